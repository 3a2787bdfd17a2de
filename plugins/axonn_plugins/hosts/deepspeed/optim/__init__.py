"""Optimizers as DeepSpeed's engine wants them."""
