"""Plugins that bring AxoNN, TED, SAMO and PCCL to DeepSpeed and Megatron-core."""

__version__ = "0.1.0"
