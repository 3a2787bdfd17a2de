"""``axonn.tensor_parallel`` under DeepSpeed."""
