"""Tables and pictures of ``axonn ted memory``: the largest MoE by number of GPUs, and the bytes of one configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from axonn_plugins.observe.figures import Picture
from ted_moe import fitting, memory
from ted_moe.fitting import Fit
from ted_moe.memory import TABLE_4_1, TILE, Degrees, Parameters, Transformer

PUBLISHED = (1.09, 4.8)
"""The range of ratios in section 7.4.2, from 32 to 512 GPUs; the bars of Figure 7.9 are not given as numbers."""


@dataclass(frozen=True)
class Row:
    """The largest models on so many GPUs, each by two counts.

    Attributes:
        gpus: how many.
        stock: DeepSpeed-MoE's, by equation 7.5.
        ted: TED's, by equation 7.5.
        stock_part: DeepSpeed-MoE's, by part.
        ted_part: TED's, by part.
    """

    gpus: int
    stock: Fit | None
    ted: Fit | None
    stock_part: Fit | None
    ted_part: Fit | None


def search(gpus: Sequence[int], experts: Sequence[int], room: float, tensor: int) -> list[Row]:
    """The largest models of Table 4.1 with experts.

    Args:
        gpus: numbers of GPUs.
        experts: numbers to try.
        room: bytes of a GPU for model state and the optimizer's step.
        tensor: the highest tensor degree allowed to TED.
    """
    return [
        Row(
            number,
            fitting.largest(TABLE_4_1, experts, number, room),
            fitting.largest(TABLE_4_1, experts, number, room, tensor),
            fitting.largest(TABLE_4_1, experts, number, room, count=fitting.by_part_stock),
            fitting.largest(TABLE_4_1, experts, number, room, tensor, fitting.by_part_ted),
        )
        for number in gpus
    ]


def table(rows: Sequence[Row], experts: Sequence[int], size: float, reserve: float, tensor: int) -> str:
    """Figure 7.9 as text, and the bounds of equations 7.5 and 7.6.

    Args:
        rows: what `search` found.
        experts: numbers that were tried.
        size: bytes of a GPU.
        reserve: of these, bytes kept free.
        tensor: the highest tensor degree allowed to TED.
    """
    room = size - reserve
    tried = ", ".join(str(number) for number in experts)
    lines = [
        f"Largest MoE on GPUs of {size / 1e9:g} GB, {reserve / 1e9:g} GB kept free: base models of Table 4.1; {tried} experts in every second",
        f"layer, one on each expert-parallel rank; TED's tensor degree at most {tensor}, DeepSpeed-MoE's 1. Model state, GB a GPU.",
    ]
    for title, part in (
        ("equation 7.5", False),
        (f"by part, with the optimizer's step (TED: tiles of {TILE:,}; stock: a group at a time)", True),
    ):
        lines += ["", title, f"{'GPUs':>5}  {'DeepSpeed-MoE':<42}{'TED':<42}{'ratio':>6}"]
        for row in rows:
            stock, ted = (row.stock_part, row.ted_part) if part else (row.stock, row.ted)
            lines.append(f"{row.gpus:>5}  {_cell(stock):<42}{_cell(ted):<42}{_ratio(stock, ted):>6}".rstrip())
    low, high = PUBLISHED
    lines += [
        "",
        f"published: TED's are {low} to {high} times as large, more so with more GPUs, on 32 to 512 GPUs of Summit (section 7.4.2)",
        "",
        f"Largest base model, in billions of parameters, with {min(experts)} experts (equation 7.5)",
        f"{'GPUs':>5}{'DeepSpeed-MoE':>16}{f'TED, tensor {tensor}':>18}",
    ]
    for row in rows:
        bases = [memory.paper_largest_base(room, degree, min(experts), row.gpus) / 1e9 for degree in (1, tensor)]
        lines.append(f"{row.gpus:>5}{bases[0]:>16.2f}{bases[1]:>18.2f}")
    limits = [memory.paper_largest_base(room, degree) / 1e9 for degree in (1, tensor)]
    lines.append(f"{'∞':>5}{limits[0]:>16.2f}{limits[1]:>18.2f}  equation 7.6: G_tensor·M/4")
    return "\n".join(lines)


def _cell(fit: Fit | None) -> str:
    if fit is None:
        return "nothing fits"
    tensor = f", tensor {fit.degrees.tensor}" if fit.degrees.tensor > 1 else ""
    return f"{fit.parameters / 1e9:6.1f}B {fit.base} × {fit.experts}{tensor} ({fit.bytes / 1e9:.1f})"


def _ratio(stock: Fit | None, ted: Fit | None) -> str:
    return f"{ted.parameters / stock.parameters:.2f}" if stock and ted else "-"


def picture(rows: Sequence[Row]) -> Picture:
    """Figure 7.9: parameters of the largest MoE by number of GPUs; bars by equation 7.5, marks by part.

    Args:
        rows: what `search` found.
    """
    return Picture(partial(_draw, rows))


def _draw(rows: Sequence[Row], figure: Any) -> None:
    axis = figure.subplots()
    width = 0.4
    for offset, name, bars, marks in (
        (-width / 2, "DeepSpeed-MoE", [row.stock for row in rows], [row.stock_part for row in rows]),
        (width / 2, "TED", [row.ted for row in rows], [row.ted_part for row in rows]),
    ):
        places = [place + offset for place in range(len(rows))]
        drawn = axis.bar(places, [_billions(fit) for fit in bars], width, label=f"{name}, equation 7.5")
        axis.bar_label(drawn, [_short(fit) for fit in bars], padding=4, fontsize=7)
        axis.plot(places, [_billions(fit) for fit in marks], "kx" if offset < 0 else "k+", label=f"{name}, by part")
    axis.set_xticks(range(len(rows)), [f"{row.gpus}\n{_ratio(row.stock, row.ted)}" for row in rows])
    axis.set(
        xlabel=f"GPUs, and TED's over DeepSpeed-MoE's (published: {PUBLISHED[0]} to {PUBLISHED[1]})",
        ylabel="parameters of the largest MoE (billions)",
    )
    axis.margins(y=0.12)
    axis.legend(loc="upper left")


def _billions(fit: Fit | None) -> float:
    return 0.0 if fit is None else fit.parameters / 1e9


def _short(fit: Fit | None) -> str:
    return "" if fit is None else f"{fit.base.removeprefix('GPT-3-')}\n× {fit.experts}"


def configuration(
    name: str, model: Transformer, experts: int, degrees: Degrees, tokens: int, size: float | None
) -> str:
    """Bytes of one configuration by part: TED's, and DeepSpeed-MoE's on the same GPUs.

    Args:
        name: the base model's.
        model: the base model.
        experts: in every second layer.
        degrees: how TED splits it.
        tokens: of a microbatch, on a GPU.
        size: bytes of a GPU, to say whether it fits.
    """
    plain = _stock(degrees)
    whole, base = memory.parameters(model, experts), memory.base_parameters(model)
    local = [memory.parameters(model, experts, split) for split in (degrees, plain)]
    parts = _parts(model, experts, degrees, tokens)
    total = parts[-1][1]
    lines = [
        f"{name}: {base:,} parameters; with {experts} experts in {memory.expert_layers(model)} of {model.layers} layers "
        f"{whole.total:,}, of which {whole.expert:,} in experts",
        f"{degrees.gpus} GPUs: tensor {degrees.tensor} × data {degrees.shared_data} outside experts; tensor {degrees.tensor} × "
        f"expert {degrees.expert} × data {degrees.data} for experts. DeepSpeed-MoE: tensor 1, data {plain.shared_data}; "
        f"expert {plain.expert} × data {plain.data}",
        "",
        f"{'on a GPU':<56}{'TED':>18}{'DeepSpeed-MoE':>20}",
        f"{'parameters':<56}{local[0].total:>18,}{local[1].total:>20,}",
        *(f"{label:<56}{_size(values[0]):>18}{_size(values[1]):>20}" for label, values in parts),
    ]
    if size is not None:
        fits = [f"{_size(size - need)} free" if need <= size else f"{_size(need - size)} too much" for need in total]
        lines.append(f"{f'of {_size(size)}':<56}{fits[0]:>18}{fits[1]:>20}")
    lines.append(
        "\nNot counted: activations of the one layer that is recomputed, communication buffers, the allocator's loss."
    )
    return "\n".join(lines)


def totals(model: Transformer, experts: int, degrees: Degrees, tokens: int) -> list[float]:
    """Bytes on a GPU, all that is counted: of TED, and of DeepSpeed-MoE on the same GPUs; see `configuration`."""
    return _parts(model, experts, degrees, tokens)[-1][1]


def _stock(degrees: Degrees) -> Degrees:
    """DeepSpeed-MoE on as many GPUs."""
    return Degrees(1, degrees.expert, degrees.tensor * degrees.data)


def _parts(model: Transformer, experts: int, degrees: Degrees, tokens: int) -> list[tuple[str, list[float]]]:
    """Rows of name, TED's bytes and DeepSpeed-MoE's; all together last."""
    splits = (degrees, _stock(degrees))
    base = memory.base_parameters(model)
    local = [memory.parameters(model, experts, split) for split in splits]
    sides = list(zip(local, splits, strict=True))
    shared = [memory.state(part.shared, split.shared_data) for part, split in sides]
    expert = [memory.state(part.expert, split.data) for part, split in sides]
    published = [_published(base, experts, split) for split in splits]
    state = [memory.state_bytes(part, split) for part, split in sides]
    steps = [memory.step_bytes(local[0], degrees, TILE), memory.stock_step_bytes(*sides[1])]
    inputs: list[float] = [memory.checkpoint_bytes(model, tokens)] * 2
    stash: list[float] = [memory.stash_bytes(model, experts, tokens, degrees), 0]
    return [
        ("weights, outside experts", [part.weights for part in shared]),
        ("weights, experts", [part.weights for part in expert]),
        ("gradients, outside experts", [part.gradients for part in shared]),
        ("gradients, experts", [part.gradients for part in expert]),
        ("optimizer (ZeRO-1), outside experts", [part.optimizer for part in shared]),
        ("optimizer (ZeRO-1), experts", [part.optimizer for part in expert]),
        ("model state", state),
        ("  by equations 7.2 to 7.4", published),
        ("optimizer's step: TED's tiles; stock's longest group", steps),
        ("  a whole group in float32 (section 7.2)", [memory.step_bytes(part, split) for part, split in sides]),
        (f"checkpointed inputs of layers, {tokens:,} tokens", inputs),
        ("what communication-aware checkpointing stashes", stash),
        (
            "all: state, step, inputs, stash",
            [sum(addends) for addends in zip(state, steps, inputs, stash, strict=True)],
        ),
    ]


def _published(base: int, experts: int, degrees: Degrees) -> float:
    whole = memory.paper_parameters(base, experts)
    local = Parameters(whole.shared / degrees.tensor, whole.expert / degrees.tensor / degrees.expert)
    return memory.state_bytes(local, degrees)


def _size(size: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6)):
        if size >= scale:
            return f"{size / scale:.2f} {unit}"
    return f"{size / 1e3:.2f} kB" if size else "0"
