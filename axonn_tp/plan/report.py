"""The report of a plan: the kind of each layer of a model, and the bytes that it sends, as a table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from torch import nn

from axonn_tp.grid.mesh import Grid
from axonn_tp.layers.batch_norm import PLAIN
from axonn_tp.layers.linear_split import features
from axonn_tp.options import Options
from axonn_tp.plan.placement import place
from axonn_tp.plan.rules import LayerPlan, Placement

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_OWN = "statistics of each rank's own samples, as under DDP; sync_batch_norm = true takes those of all"
_SYNCHRONISED = "statistics of all ranks' samples"
ALONE = "no partner"
ALL_FEATURES = "needs all features"
MIXED = "which others read too"
OUTSIDE = "which is used outside of the pair, too"
CHANGES = "split, it changes the model"
AT_TIMES = "called for some inputs only"
_SHARED = "its weight is shared or read by other code"
_OWN_FORWARD = "has a forward of its own"
_ADVICE = {
    ALL_FEATURES: "on a share of the features the code between these layers computes something else, as said in brackets. Let it take "
    "head counts and widths from the shapes of what these layers give, not of what they read (y.view(b, t, -1, head_size), and y.flatten(2) behind "
    "the attention), or from an integer attribute of the module such as num_heads.",
    MIXED: "these read a sum or product of several layers' outputs, as a residual stream or a gate is, so no pair ends in them; each is split by "
    "itself, with whole features in and out.",
    ALONE: "what these give does not reach one linear alone, so they begin no pair; each is split by itself, with whole features in and out.",
    OUTSIDE: "inside a rank has the gradient of its share, outside the whole one, and no sum of both is right; give the pair a parameter, an activation "
    "with weights or an embedding of its own.",
    CHANGES: "each of these pairs is right by itself and wrong in the model: code outside of them reads their features or their counts. Let it "
    "read what the pair's last layer gives.",
    AT_TIMES: "ranks of z read different data, and would wait for weights that others do not gather; these layers are whole on every rank. Call them "
    "for every input, also with no rows, or leave experts to TED (axonn.ted).",
    "do not divide": "sizes and heads must divide by the axis that splits them: choose gx and gy from their divisors.",
    _SHARED: "untie the weight (tie_word_embeddings = false in HF), or call the layer in the place of reading its weight.",
    _OWN_FORWARD: "only torch's own linear is split: use nn.Linear, or keep it whole.",
}
_HEADER = ("layers", "number", "became", "with", "a step sends", "a token sends", "why")


def collapse(name: str) -> str:
    """A layer's name with the numbers of repeated blocks as ``*``."""
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", name)


@dataclass(frozen=True)
class Row:
    """Layers of one name pattern that became the same.

    Attributes:
        pattern: their name, numbers as ``*``.
        number: how many there are.
        kind: a key of `KINDS`.
        detail: parts, heads and counts.
        step_bytes: what they send together from one rank in a step, whatever the batch: weights over z.
        token_bytes: what they send together from one rank for each row of its activations.
        why: the source of the decision, or what stood against a pair.
    """

    pattern: str
    number: int
    kind: str
    detail: str
    step_bytes: Fraction
    token_bytes: Fraction
    why: str


@dataclass(frozen=True)
class Report:
    """The table; `str` of it is what `parallelize` prints."""

    grid: Grid
    rows: tuple[Row, ...]
    note: str

    @property
    def at_times(self) -> bool:
        """True if there are layers that are called for some inputs only."""
        return any(row.why == AT_TIMES for row in self.rows)

    def bytes_sent(self, tokens: int) -> Fraction:
        """Bytes that one rank sends in the forward and backward pass of the table's layers.

        Args:
            tokens: rows of activations on this rank.
        """
        return sum((row.step_bytes + tokens * row.token_bytes for row in self.rows), Fraction(0))

    def __str__(self) -> str:
        sizes = " ".join(f"g{axis}={self.grid.size(axis)}" for axis in ("x", "y", "z", "data"))
        lines = [_HEADER] + [
            (r.pattern, str(r.number), r.kind, r.detail, _shown(r.step_bytes), _shown(r.token_bytes), r.why)
            for r in self.rows
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_HEADER))]
        table = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        step, token = (
            _shown(sum((getattr(r, f"{n}_bytes") for r in self.rows), Fraction(0))) for n in ("step", "token")
        )
        total = f"Each rank sends {step} a step and {token} for each of its tokens, forward and backward."
        rest = "Layers that are not in the table are whole on every rank."
        return "\n".join([f"axonn auto plan, {sizes}", *table, total, rest, *filter(None, [self.note]), *self.advice()])

    def advice(self) -> list[str]:
        """Remedies for layers that are in no pair, a sentence for each reason in the table."""
        reasons = {row.why for row in self.rows if row.kind in ("self_contained", "replicated")}
        return [f'"{why}": {told}' for why, told in _ADVICE.items() if any(why in reason for reason in reasons)]


def make_report(
    model: nn.Module,
    grid: Grid,
    plan: Mapping[str, LayerPlan],
    why: Mapping[str, str],
    note: str = "",
    options: Options | None = None,
) -> Report:
    """The report on a plan.

    Args:
        model: the serial model.
        grid: the grid.
        plan: exact layer names.
        why: a sentence by layer name, where there is one.
        note: what else there is to say.
        options: of the run.
    """
    placements = {placement.name: placement for placement in place(model, grid, plan, options)}
    rows: dict[tuple, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, PLAIN):
            statistics = _SYNCHRONISED if options is not None and options.sync_batch_norm else _OWN
            rows.setdefault((collapse(name), "replicated", "", statistics), []).append(name)
        elif features(module) or isinstance(module, nn.Linear) or name in plan:
            kind = placements[name].kind if name in placements else "replicated"
            reason = why.get(name, ALONE if name in placements else _untouched(module))
            rows.setdefault((collapse(name), kind, _detail(plan.get(name)), reason), []).append(name)
    made = []
    for (pattern, kind, detail, reason), names in rows.items():
        costs = [_cost(placements[name], grid) for name in names if name in placements]
        step, token = (sum((cost[i] for cost in costs), Fraction(0)) for i in (0, 1))
        made.append(Row(pattern, len(names), kind, detail, step, token, reason))
    return Report(grid, tuple(made), note)


def _cost(placement: Placement, grid: Grid) -> tuple[Fraction, Fraction]:
    """Bytes sent by one rank: for no tokens, and for each."""
    dtype = next(placement.module.parameters()).dtype
    # As many tokens as divide among the ranks of x.
    fixed, more = (
        sum((c.sent * placement.options.itemsize(c, dtype) for c in placement.collectives(n, grid)), Fraction(0))
        for n in (0, grid.gx)
    )
    return fixed, (more - fixed) / grid.gx


def _detail(layer: LayerPlan | None) -> str:
    if layer is None:
        return ""
    parts = [f"parts={layer.parts}"] if layer.parts > 1 else []
    parts += ["whole_tokens"] if layer.whole_tokens else []
    parts += [f"heads={layer.heads}"] if layer.heads else []
    return " ".join([*parts, *([f"counts={','.join(layer.counts)}"] if layer.counts else [])])


def _untouched(module: nn.Module) -> str:
    if features(module):
        return _SHARED
    return f"{type(module).__name__} {_OWN_FORWARD}"


def _shown(size: Fraction) -> str:
    value = float(size)
    for unit in _UNITS:
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.4g} {unit}" if value else "0"
        value /= 1024
    raise AssertionError
