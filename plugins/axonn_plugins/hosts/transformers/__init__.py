"""HF Trainer and Accelerate with the ``"axonn"`` block in their DeepSpeed configuration."""
