"""What a run tells of itself: collectives, traces, metrics, and the state of the environment."""
