"""SAMO's Triton kernels as machine code of GPUs that need not be here."""
