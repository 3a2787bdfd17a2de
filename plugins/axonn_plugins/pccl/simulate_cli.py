"""``axonn simulate pccl``: Figures 6.7 to 6.11 of the dissertation, from the alpha-beta model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from axonn_plugins.cli.options import check_folder, read
from axonn_plugins.observe.clock import elapsed
from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.files import put
from axonn_plugins.pccl.calibration import Calibrated, fit, load
from axonn_plugins.pccl.calibration_report import report
from axonn_plugins.pccl.clusters import CLUSTERS, PROCESSES, SIZES, Cluster
from axonn_plugins.pccl.sweep import COLLECTIVES, Sweep, Timers, comparison, fitted_step, heat_table, sweep

LEFT_OUT = """What the model leaves out: the network between the nodes' interfaces (congestion, adaptive routing, distance), which
hurts thousands of small messages most; the protocols and kernel launches of the libraries, their channels and the
sizes at which they change them; Infinity Fabric's unequal links; memory traffic of anything but sums; and noise, of
which a ring of 2048 collects the worst of every step. "specified" takes latencies from tables; "fitted" makes the
libraries' ring wait longer for each message, so that one published number comes out (marked in clusters.py), and all
others are predictions. Both leave PCCL's own latency as specified. "ours" is the fastest of our schedules and the library.
--calibrated has what of this five constants can say, beside every published number.
Where the two differ from what was published: RCCL's and Cray MPICH's rings on 2048 processes were slower on large data,
and the published PCCL slower on small data (its messages are MPI's, rendezvous each), than latency and bandwidth explain."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Figures 6.7 to 6.11 of the dissertation, from the alpha-beta model.

    Attributes:
        cluster: whose libraries and network are modelled.
        out: folder for pictures and JSON.
        calibrated: with protocols, congestion and steps of the CPU, beside every number that was published; ends with 1 where
            these are off by other factors than calibration.toml says.
        fit: find the constants of --calibrated anew.
    """

    cluster: Literal["frontier", "perlmutter", "all"] = "all"
    out: Path = Path("runs/simulate_pccl")
    calibrated: bool = False
    fit: bool = False


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    parsed = read(Options, arguments, "axonn simulate pccl")
    clusters = [cluster for name, cluster in CLUSTERS.items() if parsed.cluster in (name, "all")]
    check_folder("--out", parsed.out)
    parsed.out.mkdir(parents=True, exist_ok=True)
    if parsed.calibrated or parsed.fit:
        return _calibrated(clusters, parsed)
    for cluster in clusters:
        _simulate(cluster, parsed.out)
    print(LEFT_OUT)
    print(f"pictures and numbers: {parsed.out}")
    return 0


def _calibrated(clusters: list[Cluster], parsed: Options) -> int:
    calibration = load()
    if parsed.fit:
        with elapsed("fitting"):
            calibration = fit(calibration, list(CLUSTERS.values()))
    for name, constant in calibration.constants.items():
        print(f"{name} = {constant.value:g}: {constant.meaning}; {constant.phenomenon}")
    simulated = [Calibrated(cluster, calibration) for cluster in CLUSTERS.values()]
    text, wrong = report(simulated)
    print(f"\n{text}")
    for each in simulated:
        if each.cluster in clusters:
            found = Sweep(each.cluster, 0.0, each.times(PROCESSES, SIZES))
            _write(each.cluster.name.lower() + "_calibrated", found, [("calibrated", found)], parsed.out)
    print("\n".join(wrong) or "as calibration.toml says")
    return 1 if wrong else 0


def _simulate(cluster: Cluster, out: Path) -> None:
    timers = Timers(cluster)
    step = fitted_step(timers)
    with elapsed(f"simulating {cluster.name}"):
        specified, fitted = sweep(timers, 0.0), sweep(timers, step)
    print(comparison(specified, fitted))
    if step < 1e-7:
        print(f"fitted: as specified, with which PCCL already gains more over {cluster.library} than was published\n")
    else:
        print(f"fitted: each message of a ring of {cluster.library} or Cray MPICH takes {step * 1e6:.0f} us more\n")
    for collective in COLLECTIVES:
        for system in ("PCCL", "ours"):
            print(heat_table(fitted, collective, system), end="\n\n")
    _write(cluster.name.lower(), fitted, [("specified", specified), ("fitted", fitted)], out)


def _write(name: str, drawn: Sweep, sweeps: list[tuple[str, Sweep]], out: Path) -> None:
    """Times as JSON, and pictures of one sweep."""
    rows = [
        {
            "latency": kind,
            "system": system,
            "collective": collective,
            "processes": count,
            "mb": size,
            "seconds": seconds,
        }
        for kind, found in sweeps
        for (system, collective, count, size), seconds in found.times.items()
    ]
    cluster = drawn.cluster.name
    put(out / f"{name}.json", json.dumps({"cluster": cluster, "step": drawn.step, "times": rows}, indent=1))
    sizes = {"Frontier": ((64, 128), (256, 512)), "Perlmutter": ((64, 128),)}[cluster]
    for collective in COLLECTIVES:
        _curves(drawn, collective, sizes).save(out / f"{name}_{collective}.png")
    _heat_maps(drawn).save(out / f"{name}_speedup.png")


def _curves(found: Sweep, collective: str, panels: tuple[tuple[int, ...], ...]) -> Picture:
    """Time against processes, one panel for each group of sizes (Figures 6.7, 6.8 and 6.10)."""
    colours = {"Cray MPICH": "tab:orange", found.cluster.library: "tab:green", "PCCL": "tab:blue", "ours": "tab:purple"}

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(panels), squeeze=False)
        for axis, sizes in zip(axes[0], panels, strict=True):
            for size, line in zip(sizes, ("-", "--"), strict=True):
                for system, colour in colours.items():
                    times = [found.times[system, collective, count, size] * 1e3 for count in PROCESSES]
                    axis.plot(PROCESSES, times, line, color=colour, marker="o", label=f"{system}, {size} MB")
            axis.set(xscale="log", yscale="log", xlabel="processes", ylabel="time (ms), simulated")
            axis.set_xticks(PROCESSES, [str(count) for count in PROCESSES])
            axis.legend(fontsize="x-small")
        figure.suptitle(f"{found.cluster.name}: {collective}")

    return Picture(draw, (6.5 * len(panels), 4.5))


def _heat_maps(found: Sweep) -> Picture:
    """Speedup of the published PCCL over the library by size and processes (Figures 6.9 and 6.11)."""
    return Picture(partial(_heat, found), (6.5 * len(COLLECTIVES), 4.5))


def _heat(found: Sweep, figure: Any) -> None:
    from matplotlib.colors import LogNorm

    axes = figure.subplots(1, len(COLLECTIVES), squeeze=False)
    library = found.cluster.library
    for axis, collective in zip(axes[0], COLLECTIVES, strict=True):
        rows = [
            [found.speedup("PCCL", library, collective, count, size) for count in PROCESSES] for size in reversed(SIZES)
        ]
        axis.imshow(rows, cmap="RdYlGn", norm=LogNorm(0.3, 30), aspect="auto")
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                axis.text(x, y, f"{value:.2f}", ha="center", va="center", fontsize="small")
        axis.set(title=f"{collective}: PCCL over {library}", xlabel="processes", ylabel="MB")
        axis.set_xticks(range(len(PROCESSES)), [str(count) for count in PROCESSES])
        axis.set_yticks(range(len(SIZES)), [str(size) for size in reversed(SIZES)])
    figure.suptitle(f"{found.cluster.name}, simulated")
