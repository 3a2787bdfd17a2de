"""Gradients accumulated in float32 though the parameters are not."""

from __future__ import annotations

import torch
from torch import nn

from axonn_tp.options import Options


def accumulate_as(model: nn.Module, options: Options) -> None:
    """Have autograd keep every parameter's gradient in the type that `Options.gradient_dtype` asks for.

    Also of float32 parameters, which may become bfloat16 ones later (``model.bfloat16()``). Copies of a model
    (``copy.deepcopy``) forget it.
    """
    if options.gradient_dtype is None:
        return
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dtype != torch.float64:
            parameter.grad_dtype = options.summed_in(parameter.dtype)  # type: ignore[attr-defined]
