"""``axonn.pipeline`` under DeepSpeed."""
