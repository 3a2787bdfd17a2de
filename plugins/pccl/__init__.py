"""PCCL: hierarchical collectives with few steps, after chapter 6 of the dissertation."""
