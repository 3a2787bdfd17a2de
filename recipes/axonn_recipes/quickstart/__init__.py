"""First light: a byte-level GPT in 3D PMM under DeepSpeed."""
