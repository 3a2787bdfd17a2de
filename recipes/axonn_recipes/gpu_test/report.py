"""The report of a run: JSON with all that was measured, and Markdown to attach to an issue."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from axonn_recipes.bench.numbers import ratio, spread
from axonn_recipes.bench.output import ms
from axonn_recipes.gpu_test.agents import Outcome
from axonn_recipes.gpu_test.scale import Check, Figure, Scale
from axonn_recipes.gpu_test.systems import SYSTEMS

_PACKAGES = (
    "axonn-plugins",
    "torch",
    "triton",
    "deepspeed",
    "megatron-core",
    "transformers",
    "transformer-engine",
    "apex",
)


def report(scale: Scale, shared: bool, outcomes: Sequence[Outcome], left_out: Mapping[str, str]) -> dict[str, Any]:
    """All of a run, as what JSON can hold.

    Args:
        scale: the run's.
        shared: True if ranks share GPUs.
        outcomes: by system.
        left_out: systems that were not run, with the reason.
    """
    dry = scale.device == "cpu"
    seen = {outcome.found.device for outcome in outcomes if outcome.found is not None and outcome.found.device}
    if dry:
        device = "CPU, with gloo: no time of this run says anything about a GPU"
    else:
        device = ", ".join(sorted(seen)) + (", shared by ranks: no time of this run says anything" if shared else "")
    return {
        "dry": dry,
        "shared": shared,
        "machine": {
            "device": device,
            "ranks": scale.ranks,
            "ranks_of_a_node": scale.local,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "nccl": _nccl(),
            "python": platform.python_version(),
            "packages": _versions(),
        },
        "scale": asdict(scale),
        "systems": {outcome.name: _system(outcome) for outcome in outcomes},
        "left_out": dict(left_out),
    }


def verdict(outcome: Outcome) -> str:
    """Either ok, differs or failed."""
    if outcome.found is None:
        return "failed"
    return "ok" if all(check.holds for check in outcome.found.checks) else "differs"


def line(outcome: Outcome) -> str:
    """A system in a line."""
    said = f"{outcome.name:<16} {verdict(outcome):<8} {outcome.seconds:6.1f} s"
    if outcome.found is None:
        rank, error = next(iter(outcome.errors.items()))
        return f"{said}  rank {rank}: {error.strip().splitlines()[-1]}"
    worst = _worst(outcome.found.checks)
    if worst is None:
        return f"{said}  {SYSTEMS[outcome.name].what}"
    count = len(outcome.found.checks)
    return f"{said}  {count} compared, {worst.difference:.1e} apart at most (allowed {worst.allowed:.0e}: {worst.what})"


def markdown(numbers: Mapping[str, Any]) -> str:
    """The report as one reads it."""
    machine = numbers["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
    lines = [
        f"# axonn test gpu{' --dry' if numbers['dry'] else ' --share' if numbers['shared'] else ''}",
        "",
        f"- {machine['ranks']} ranks, {machine['ranks_of_a_node']} a node: {machine['device']}",
        f"- CUDA {machine['cuda']}, HIP {machine['hip']}, NCCL {machine['nccl']}, Python {machine['python']}; {versions}",
        "",
        "| system | | largest difference (allowed) | ours, ms | peer, ms | peer / ours |",
        "|---|---|---|---|---|---|",
    ]
    lines += [_row(name, system) for name, system in numbers["systems"].items()]
    lines += [f"| {name} | left out: {reason} | | | | |" for name, reason in numbers["left_out"].items()]
    for name, system in numbers["systems"].items():
        lines += ["", f"## {name}: {SYSTEMS[name].what}", ""]
        lines += _failed(system["errors"])
        lines += [
            f"- DIFFERS: {check['what']}: {check['difference']:.1e}, allowed {check['allowed']:.0e}"
            for check in system["checks"]
            if not check["holds"]
        ]
        lines += [
            f"- {side['name']}: {ms(side['median'])} ms (quartiles {ms(side['low'])} to {ms(side['high'])})"
            + ("" if side["memory"] is None else f", {side['memory'] / 2**30:.2f} GiB")
            for side in system["sides"]
        ]
        lines += [f"- {figure['name']}: {figure['shown']}" for figure in system["figures"]]
    return "\n".join(lines)


def _system(outcome: Outcome) -> dict[str, Any]:
    found = outcome.found
    checks = [] if found is None else found.checks
    sides = [] if found is None else found.sides
    return {
        "verdict": verdict(outcome),
        "seconds": outcome.seconds,
        "errors": {str(rank): error for rank, error in outcome.errors.items()},
        "checks": [asdict(check) | {"holds": check.holds} for check in checks],
        "sides": [asdict(side) | spread(side.seconds) for side in sides],
        "figures": [asdict(each) | {"shown": shown(each)} for each in ([] if found is None else found.figures)],
    }


def _row(name: str, system: Mapping[str, Any]) -> str:
    checks = [Check(each["what"], each["difference"], each["allowed"]) for each in system["checks"]]
    worst = _worst(checks)
    difference = "" if worst is None else f"{worst.difference:.1e} ({worst.allowed:.0e}), {len(checks)} compared"
    mine, theirs = ([side for side in system["sides"] if side["ours"] is ours] for ours in (True, False))
    times = "| | |"
    if name != "pccl" and mine and theirs:
        ours, peer = (min(sides, key=lambda side: side["median"]) for sides in (mine, theirs))
        found = ratio(peer["seconds"], ours["seconds"])
        times = (
            f"{ms(ours['median'])} ({ours['name']}) | {ms(peer['median'])} ({peer['name']}) | {found['median']:.2f} |"
        )
    return f"| {name} | {system['verdict']} | {difference} | {times}"


def _failed(errors: Mapping[str, str]) -> list[str]:
    """The first error whole, of the others the last line."""
    found = []
    for number, (rank, error) in enumerate(errors.items()):
        last = error.strip().splitlines()[-1]
        found.append(f"- rank {rank}: {last}" if number else f"- rank {rank} failed:\n\n```\n{error.strip()}\n```")
    return found


def _worst(checks: Sequence[Check]) -> Check | None:
    """The check nearest to, or farthest above, what it is allowed."""
    return max(checks, key=lambda check: (not check.holds, check.difference / (check.allowed or 1)), default=None)


def shown(figure: Figure) -> str:
    """A figure with its unit; a dash where the device does not tell."""
    if figure.value is None:
        return "-"
    if figure.unit == "%":
        return f"{figure.value:.1%}"
    return f"{figure.value:.3g} {figure.unit}"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _nccl() -> str | None:
    with suppress(AttributeError, RuntimeError, ImportError):
        return ".".join(map(str, torch.cuda.nccl.version()))
    return None
