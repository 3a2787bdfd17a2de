"""What the recipes of SAMO share: dense and pruned training, side by side on data-parallel ranks in plain PyTorch."""
