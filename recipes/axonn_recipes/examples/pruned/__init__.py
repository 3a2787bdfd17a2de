"""A checkpoint of transformers, fine-tuned and pruned by the block in the DeepSpeed configuration."""
