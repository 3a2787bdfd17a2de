"""AxoNN's 3D parallel matrix multiplication in Megatron: `arguments` takes the flags, `patch` installs what they ask for."""
