"""``axonn bench kernels``: SAMO's Triton kernels compiled for GPUs that need not be here: registers, spills, bytes, and the memory's bound."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.progress import each
from axonn_recipes.bench_kernels.measure import TARGETS, Code, compiled, kernels


@dataclass(frozen=True, kw_only=True)
class Options:
    """SAMO's Triton kernels compiled for GPUs that need not be here.

    Attributes:
        targets: kinds of GPUs, with commas.
        dry_run: say what would be compiled, and stop.
    """

    targets: str = ",".join(TARGETS)
    dry_run: bool = False


def main(arguments: Sequence[str]) -> int:
    """Print the table; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = read(Options, arguments, "axonn bench kernels")
    targets = options.targets.split(",")
    if unknown := [target for target in targets if target not in TARGETS]:
        raise ConfigError(f'--targets has "{unknown[0]}", which is not known; use some of {", ".join(TARGETS)}')
    if find_spec("triton") is None:
        raise ConfigError(
            "axonn bench kernels compiles Triton's kernels, and triton is not installed; pip install triton"
        )
    if options.dry_run:
        print(f"{len(kernels())} kernels for {', '.join(targets)}")
        return 0
    asked = list(itertools.product(kernels(), targets))
    for line in table([compiled(kernel, target) for kernel, target in each(asked, "compiling", "kernel")]):
        print(line)
    return 0


def table(codes: Sequence[Code]) -> list[str]:
    """A line a kernel and target."""
    lines = [
        f"{'kernel':<28}{'target':<8}{'registers':>9}{'spilled':>8}{'occupancy':>10}{'bits an access':>16}"
        f"{'must move':>11}{'moves':>8}{'Gelements/s':>13}"
    ]
    for code in codes:
        bits = " ".join(f"{count}x{wide}" for wide, count in sorted(code.accesses.items())) or "-"
        moved = "-" if code.moved is None else f"{code.moved:.1f} B"
        lines.append(
            f"{code.kernel.name:<28}{code.target:<8}{code.registers:>9}{code.spilled:>8}{code.occupancy:>10.0%}{bits:>16}"
            f"{code.kernel.must:>9} B{moved:>8}{code.roof / 1e9:>13.1f}"
        )
    return lines
