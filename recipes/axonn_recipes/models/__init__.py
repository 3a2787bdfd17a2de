"""Serial models in plain PyTorch."""
