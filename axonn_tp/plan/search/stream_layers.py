"""Which layers take part in a split residual stream, as `axonn_tp.plan.search.stream` finds them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from axonn_tp.grid.mesh import Grid
from axonn_tp.layers.rms_norm import is_rms_norm
from axonn_tp.plan.report import collapse
from axonn_tp.plan.rules import LayerPlan
from axonn_tp.plan.search.copies import is_embedding


@dataclass(frozen=True)
class Stream:
    """The layers of a split stream.

    Attributes:
        embeddings: those that start it.
        norms: those inside it.
        heads: linears that leave it.
        whole_tokens: why its tokens cannot be split over x; empty where they can.
    """

    embeddings: tuple[str, ...]
    norms: tuple[str, ...]
    heads: tuple[str, ...]
    whole_tokens: str = ""

    def plan(self) -> dict[str, LayerPlan]:
        """Its layers' part of a plan."""
        plan = {name: LayerPlan("embedding", whole_tokens=bool(self.whole_tokens)) for name in self.embeddings}
        return plan | dict.fromkeys(self.norms, LayerPlan("norm")) | dict.fromkeys(self.heads, LayerPlan("head"))

    def described(self, grid: Grid) -> str:
        """A sentence for the report."""
        if grid.gy == 1 and (grid.gx == 1 or self.whole_tokens):
            told = f"Embeddings are split over {' and '.join(axis for axis in 'xz' if grid.size(axis) > 1)}"
            why = f"; the stream between pairs has all tokens on every x ({collapse(self.whole_tokens)})"
            return f"{told}{why if self.whole_tokens else ''}."
        told = "The stream between pairs is split, features over y"
        if grid.gx > 1:
            why = f" but all tokens on every x ({collapse(self.whole_tokens)})"
            told += why if self.whole_tokens else " and, in the scattered layout, tokens over x"
        return f"{told}."


def stream_modules(model: nn.Module, widths: set[int]) -> tuple[set[str], set[str]]:
    """Names of the embeddings and norms over any of the `widths` that could be part of a split stream."""
    embeddings, norms = set(), set()
    for name, module in model.named_modules():
        if is_embedding(module) and module.embedding_dim in widths:
            if not (module.max_norm or module.scale_grad_by_freq or module.sparse):
                embeddings.add(name)
        elif isinstance(module, nn.LayerNorm):
            if (
                module.normalized_shape in {(width,) for width in widths}
                and type(module).forward is nn.LayerNorm.forward
            ):
                norms.add(name)
        else:
            weight = module._parameters.get("weight")
            if (
                weight is not None
                and weight.dim() == 1
                and len(weight) in widths
                and is_rms_norm(module, in_own_type=True)
            ):
                norms.add(name)
    return embeddings, norms


def tables_of(model: nn.Module, found: Stream) -> tuple[dict[str, Any], set[int]]:
    """The model's modules by name, and which weights the embeddings look into."""
    modules: dict[str, Any] = dict(model.named_modules())
    return modules, {id(modules[name].weight) for name in found.embeddings}


def with_namesakes(model: nn.Module, found: Stream) -> Stream:
    """With embeddings that share a table with those that were looked into, and are only names of it."""
    modules, tables = tables_of(model, found)
    shared = {name for name, module in modules.items() if is_embedding(module) and id(module.weight) in tables}
    return replace(found, embeddings=tuple(sorted(shared | set(found.embeddings))))
