"""The cost of checkpoints to a training run."""
