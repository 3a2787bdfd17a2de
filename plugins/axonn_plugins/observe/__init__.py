"""Records of a run: collectives, traces, metrics, and the state of the environment."""
