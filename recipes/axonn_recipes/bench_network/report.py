"""A measured machine in words, and as the planner's file."""

from __future__ import annotations

from collections.abc import Mapping

from axonn_recipes.bench_network.measure import Measured


def toml(found: Measured, size: str, where: str) -> str:
    """The planner's machine file. Rates are as measured, so no share of them is taken off."""
    slow, slow_latency = (found.between, found.between_latency) if found.between else (_fast(found), _latency(found))
    assumed = [] if found.between else ["There was one node, so that nothing is known between nodes: as within one."]
    assumed += (
        [] if found.within else ["There was one rank a node, so that nothing is known within nodes: as between them."]
    )
    lines = [
        f'source = "measured by axonn bench network with rings of {size}: {where}; {found.device}"',
        f'tensor = "{found.tensor / 1e9:.5g} GFLOP/s"',
        f'vector = "{found.vector / 1e9:.5g} GFLOP/s"',
        f'memory = "{found.memory / 1e9:.5g} GB"',
        f'memory_bandwidth = "{found.memory_bandwidth / 1e9:.5g} GB/s"',
        *(['device = "cpu"'] if found.device == "CPU" else []),
        *([] if found.bf16 else ["bf16 = false"]),
        f"domain = {found.ranks}",
        f'fast_bandwidth = "{_fast(found) / 1e9:.5g} GB/s"',
        f'fast_latency = "{_latency(found) * 1e6:.5g} us"',
        f'slow_bandwidth = "{slow / 1e9:.5g} GB/s"',
        f'slow_latency = "{(slow_latency or 0.0) * 1e6:.5g} us"',
        f"interfaces = {1 / found.ranks:.6g}   # one ring has all that a node has",
        *([f"reduce_scatter = {found.reduce_scatter:.3g}   # beside an all-gather"] if found.reduce_scatter else []),
        *([f'call = "{found.call * 1e6:.5g} us"'] if found.call is not None else []),
        f'flop_latency = "{found.overhead * 1e6:.5g} us"',
        "flop_efficiency = 1.0",
        "bandwidth_efficiency = 1.0",
        *([f'assumed = "{" ".join(assumed)}"'] if assumed else []),
    ]
    if found.within:
        lines += ["", "[within]", *(f'{a}x{b} = "{rate / 1e9:.5g} GB/s"' for (a, b), rate in found.within.items())]
    return "\n".join(lines) + "\n"


def merged(text: str, keys: Mapping[str, str]) -> str:
    """A machine file with some of its keys set, or added before its first table; other lines stay."""
    lines, left = text.splitlines(), dict(keys)
    end = next((at for at, line in enumerate(lines) if line.startswith("[")), len(lines))
    for at, line in enumerate(lines[:end]):
        key = line.partition("=")[0].strip()
        if key in left:
            lines[at] = f"{key} = {left.pop(key)}"
    while end and not lines[end - 1].strip():
        end -= 1
    added = [f"{key} = {value}" for key, value in left.items()]
    return "\n".join([*lines[:end], *added, *lines[end:]]) + "\n"


def described(found: Measured) -> str:
    """The measurements, in words."""
    lines = [
        f"{found.nodes} nodes of {found.ranks} ranks on {found.device}",
        f"matrix multiplication {found.tensor / 1e9:.4g} Gflop/s, element-wise {found.vector / 1e9:.4g}, memory "
        f"{found.memory_bandwidth / 1e9:.4g} GB/s",
        *(f"within a node, {a} rings of {b}: {rate / 1e9:.4g} GB/s each" for (a, b), rate in found.within.items()),
    ]
    if found.reduce_scatter:
        lines.append(f"a reduce-scatter takes {found.reduce_scatter:.3g} times as long as an all-gather")
    if found.call is not None:
        lines.append(f"a layer's sum takes {found.call * 1e6:.4g} us longer in training than by itself")
    if found.between:
        lines.append(
            f"between nodes, one ring: {found.between / 1e9:.4g} GB/s, {(found.between_latency or 0) * 1e6:.4g} us a message"
        )
    return "\n".join(lines)


def _fast(found: Measured) -> float:
    return found.within.get((1, found.ranks)) or found.between or found.memory_bandwidth


def _latency(found: Measured) -> float:
    return found.within_latency or found.between_latency or 0.0
