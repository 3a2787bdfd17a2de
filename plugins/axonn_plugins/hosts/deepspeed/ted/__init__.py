"""``axonn.ted`` under DeepSpeed."""
