"""A rank's experts on rows that are sorted by expert: one grouped matmul for all, where torch and the GPU have it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ted_moe.experts import Column, Row

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def run(experts: Sequence[nn.Module], rows: Tensor, counts: list[int]) -> Tensor:
    """Each expert on its rows, N × M; see `run_each`."""
    return torch.cat(list(run_each(experts, rows, counts)))


def run_each(experts: Sequence[nn.Module], rows: Tensor, counts: list[int]) -> Sequence[Tensor]:
    """Run each expert on its rows, also on none, so that its gradients are zeros.

    Args:
        experts: alike.
        rows: N × M, one expert's after another's.
        counts: rows of each.
    """
    # Under DeepSpeed experts see four dims, and some unpack them.
    if _fast(rows) and groupable(experts, alignment=16):
        return _first(together(experts, counts, rows.device)(rows[None, None])).flatten(0, -2).split(counts)
    parts = zip(experts, rows.split(counts), strict=True)
    return [_first(expert(part[None, None])).flatten(0, -2) for expert, part in parts]


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def _fast(rows: Tensor) -> bool:
    if not (rows.is_cuda and rows.dtype == torch.bfloat16 and len(rows) and hasattr(F, "grouped_mm")):
        return False
    return not torch.is_autocast_enabled("cuda") and torch.cuda.get_device_capability(rows.device) >= (8, 0)


def groupable(experts: Sequence[nn.Module], alignment: int = 1) -> bool:
    """True if experts have weights in linears alone, and no hooks, which would be called for the first expert only.

    Args:
        experts: of one kind, whose modules call their children by attribute.
        alignment: bytes that the linears' sizes must be multiples of.
    """
    for expert in experts:
        if any(getattr(module, hooks) for module in expert.modules() for hooks in _HOOKS):
            return False
    linears: list[Any] = [module for module in experts[0].modules() if _is_linear(module)]
    of_linears = {id(parameter) for linear in linears for parameter in linear.parameters(recurse=False)}
    elsewhere = any(id(parameter) not in of_linears for parameter in experts[0].parameters())
    aligned = all(
        size * linear.weight.element_size() % alignment == 0 for linear in linears for size in linear.weight.shape
    )
    return aligned and not elsewhere and not list(experts[0].buffers())


def _is_linear(module: nn.Module) -> bool:
    """Subclasses may initialise their weights in another way, but not compute something else."""
    return type(module).forward in (nn.Linear.forward, Column.forward, Row.forward)


def together(experts: Sequence[nn.Module], counts: list[int], device: torch.device) -> nn.Module:
    """A module that does to sorted rows, in one go, what each expert does to its own; the experts stay as they are."""
    sizes = torch.tensor(counts).to(device, non_blocking=True)
    return _merge(experts, sizes, sizes.cumsum(0).int())


def _merge(modules: Sequence[nn.Module], sizes: Tensor, ends: Tensor) -> nn.Module:
    if _is_linear(modules[0]):
        return _Linears(modules, sizes, ends)
    merged = copy.copy(modules[0])
    merged._modules = {
        name: None if child is None else _merge([module._modules[name] for module in modules], sizes, ends)  # type: ignore[misc]
        for name, child in modules[0]._modules.items()
    }
    return merged


class _Linears(nn.Module):
    """The same linear of every expert."""

    def __init__(self, layers: Sequence[nn.Linear | nn.Module], sizes: Tensor, ends: Tensor) -> None:
        super().__init__()
        self.layers, self.sizes, self.ends = tuple(layers), sizes, ends

    def forward(self, rows: Tensor) -> Tensor:
        return self._flat(rows.flatten(0, -2)).unflatten(0, rows.shape[:-1])

    def _flat(self, rows: Tensor) -> Tensor:
        first: Any = self.layers[0]
        rows = first.enter(rows) if isinstance(first, Column) else rows
        product = _Product.apply(rows.contiguous(), self.ends, *(layer.weight for layer in self.layers))
        if first.bias is None:
            return first.leave(product, None) if isinstance(first, Row) else product
        biases = torch.stack([layer.bias for layer in self.layers])  # type: ignore[misc]
        bias = biases.repeat_interleave(self.sizes, 0, output_size=len(rows))
        return first.leave(product, bias) if isinstance(first, Row) else product + bias


class _Product(torch.autograd.Function):
    """Rows times their expert's weight; by itself autograd would keep a copy of all weights for backward."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, ends: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, ends, *weights)
        return F.grouped_mm(rows, torch.stack(weights).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, ends, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        of_rows = F.grouped_mm(grad, torch.stack(weights), offs=ends)
        return of_rows, None, *F.grouped_mm(grad.t(), rows, offs=ends).unbind()
