"""``axonn.samo`` under DeepSpeed."""
