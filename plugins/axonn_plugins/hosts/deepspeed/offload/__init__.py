"""``axonn.offload_optimizer`` under DeepSpeed."""
