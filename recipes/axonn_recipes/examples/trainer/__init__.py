"""The HF Trainer with the block in its DeepSpeed configuration."""
