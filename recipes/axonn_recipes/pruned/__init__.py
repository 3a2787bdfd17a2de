"""The common part of SAMO's recipes: dense and pruned training, side by side on data-parallel ranks in plain PyTorch."""
