"""``axonn samo memory``: bytes of model state, dense, by the dissertation's SAMO, by ours, and measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import nn
from tyro import conf

import samo
from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.figures import Picture
from axonn_plugins.samo.models import MODELS, gpt, maker
from samo import memory
from samo.pruning import require_sparsity, smallest
from samo.selection import Magnitudes
from samo.targets import names_of, targets

LARGEST = 200_000_000
"""Parameters of the largest model that is built and trained for a step."""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_OPTIMIZERS: dict[str, tuple[int, Callable]] = {
    "adamw": (memory.ADAM, partial(torch.optim.AdamW, lr=1e-3)),
    "sgd": (memory.MOMENTUM, partial(torch.optim.SGD, lr=1e-3, momentum=0.9)),
}

small_gpt = partial(gpt, 2, 192, 512, 128)
"""Makes the model that the picture's points are measured on."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Bytes of model state, dense, by the dissertation's SAMO, by ours, and measured.

    Attributes:
        sparsity: of the weights that are pruned.
        dtype: of parameters and gradients.
        optimizer: adamw, or sgd with momentum.
        shard: data-parallel ranks that share the state.
        include: patterns of parameters to prune; "*": tables of embeddings, too.
        exclude: patterns of parameters not to prune.
        picture: a file to draw Figure 4.2 into: share saved against sparsity.
    """

    model: Annotated[
        conf.Positional[str],
        conf.arg(
            metavar="MODEL",
            help=f"{', '.join(MODELS)}, GPT:layers,hidden,vocabulary[,context], or the path of HF's config.json",
        ),
    ]
    sparsity: float = 0.9
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    optimizer: Literal["adamw", "sgd"] = "adamw"
    shard: int = 1
    include: tuple[str, ...] | None = None
    exclude: tuple[str, ...] | None = None
    picture: Path | None = None


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    parsed = read(Options, arguments, "axonn samo memory")
    _check(parsed)
    make = maker(parsed.model)
    with torch.device("meta"):
        model = make()
    try:
        chosen = targets(model, parsed.include, parsed.exclude)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    print(_report(parsed, model, make, sum(parameter.numel() for parameter in chosen.values())))
    if parsed.picture is not None:
        for file in picture().save(parsed.picture, "--picture"):
            print(f"picture: {file}")
    return 0


def _check(parsed: Options) -> None:
    try:
        require_sparsity(parsed.sparsity)
    except ValueError as error:
        raise ConfigError(f"--{error}") from None
    if parsed.shard < 1:
        raise ConfigError(f"--shard = {parsed.shard} is not a number of ranks; use 1 or more")


def _report(parsed: Options, model: nn.Module, make: Callable[[], nn.Module], prunable: int) -> str:
    layers = memory.layers_of(model, parsed.sparsity, parsed.include, parsed.exclude)
    phi, kept = sum(layer.numel for layer in layers), sum(layer.kept for layer in layers)
    state, factory = _OPTIMIZERS[parsed.optimizer]
    itemsize = _DTYPES[parsed.dtype].itemsize
    sparsity, ranks = 1 - kept / phi, parsed.shard
    dense = memory.dense_bytes(phi, state, itemsize)
    ours = memory.predicted(layers, state, itemsize, ranks)
    rows: list[tuple[str, float]] = [(f"dense, as the paper counts it: {dense // phi}φ", dense)]
    if itemsize == 2:
        rows.append((f"dense, torch under autocast: {state + 8}φ, and θ16 in forward and backward", (state + 10) * phi))
    rows += [
        ("SAMO as published, eq. 4.3", memory.paper_bytes(phi, sparsity, state, itemsize)),
        (f"ours, formula{_over(ranks)}", memory.our_bytes(phi, sparsity, state, itemsize, ranks)),
        (f"ours, by layer{_over(ranks)}", ours.total),
    ]
    note = f"\nnot measured: {phi:,} parameters are more than {LARGEST:,}, the largest model that is built here"
    if ranks > 1:
        note = "\nnot measured: that takes the ranks; leave --shard out"
    elif phi <= LARGEST:
        found = measure(make, parsed.sparsity, _DTYPES[parsed.dtype], factory, parsed.include, parsed.exclude)
        rows.append(("ours, measured after a step", found.total))
        note = f"\nbeside it for one tile while it steps: {found.buffers / 2**20:.2f} MiB measured, {ours.buffers / 2**20:.2f} by formula"
    head = (
        f"{parsed.model}: {phi:,} parameters, of which {prunable:,} can be pruned; sparsity {parsed.sparsity:g} of these keeps "
        f"{kept:,} ({kept / phi:.2%} of all)\n{parsed.dtype}, {parsed.optimizer}\n\n"
    )
    return head + _table(rows, dense) + note


def _over(ranks: int) -> str:
    return f", over {ranks} ranks" if ranks > 1 else ""


def _table(rows: Sequence[tuple[str, float]], dense: float) -> str:
    width = max(len(label) for label, _ in rows)
    unit, size_of = ("GiB", 2**30) if dense >= 2**30 else ("MiB", 2**20)
    lines = [f"{'model state':<{width}}{'bytes':>20}{unit:>12}{'saved':>9}"]
    for label, size in rows:
        lines.append(f"{label:<{width}}{round(size):>20,}{size / size_of:>12.3f}{1 - size / dense:>9.1%}")
    return "\n".join(lines)


def measure(
    make: Callable[[], nn.Module],
    sparsity: float,
    dtype: torch.dtype,
    factory: Callable,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
) -> memory.Bytes:
    """Build the model as it is initialised, prune each layer, take a step, and count.

    Args:
        make: makes the model.
        sparsity: of each layer that is pruned.
        dtype: of the parameters.
        factory: makes the optimizer.
        include: see `samo.targets.targets`.
        exclude: see there.
    """
    model = make().to(dtype)
    # Of a model that is only counted everything may be pruned.
    masks = smallest(Magnitudes(targets(model, include, exclude)), sparsity, "layer")
    optimizer = samo.Optimizer(factory, model, masks)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.sum().backward()
    optimizer.step()
    return memory.measured(optimizer)


def picture() -> Picture:
    """Figure 4.2: the share of 20φ bytes saved against sparsity, by both formulas and measured on a small GPT."""
    steps = [number / 20 for number in range(21)]
    with torch.device("meta"):
        phi = sum(parameter.numel() for parameter in names_of(small_gpt())[0].values())
    dense = memory.dense_bytes(phi)

    def draw(figure: Any) -> None:
        points = []
        for sparsity in steps[::2]:
            with torch.device("meta"):
                layers = memory.layers_of(small_gpt(), sparsity, ["*"])
            found = measure(small_gpt, sparsity, torch.bfloat16, _OPTIMIZERS["adamw"][1], ["*"])
            points.append((1 - sum(layer.kept for layer in layers) / phi, 100 * (1 - found.total / dense)))
        axis = figure.subplots()
        axis.plot(steps, [100 * memory.paper_saving(phi, p) / dense for p in steps], label="SAMO as published, eq. 4.5")
        axis.plot(steps, [100 * (1 - memory.our_bytes(phi, p) / dense) for p in steps], label="ours, 2φ + 16fφ")
        axis.plot(*zip(*points, strict=True), "o", label=f"ours, measured: GPT, {phi / 1e6:.1f} million parameters")
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.set(xlabel="sparsity", ylabel="memory saved (% of 20φ)", xlim=(0, 1))
        axis.legend()

    return Picture(draw, (6.5, 4.5))
