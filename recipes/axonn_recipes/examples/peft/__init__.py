"""LoRA by PEFT with the block in the DeepSpeed configuration."""
