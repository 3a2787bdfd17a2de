"""HF Accelerate with the block in its DeepSpeed configuration."""
