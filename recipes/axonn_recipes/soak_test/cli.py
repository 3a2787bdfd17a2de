"""``axonn test soak``: training on an emulated cluster whose ranks, nodes and links fail, beside the same run undisturbed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from threading import Event, Thread
from typing import Any

from axonn_plugins.cli.options import check_folder, read
from axonn_plugins.cluster import Cluster, lacking
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.files import put
from axonn_recipes.options import at_least_one
from axonn_recipes.runs import new_folder
from axonn_recipes.soak_test import verdict
from axonn_recipes.soak_test.agents import Agents
from axonn_recipes.soak_test.faults import KINDS, drawn

SCRIPT = "axonn_recipes.examples.elastic.train"
_LOOK_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Train on an emulated cluster whose ranks, nodes and links fail, and compare with the same run undisturbed. Exit code 1 if they differ.

    Attributes:
        minutes: jobs are started for so long; the last one is finished.
        seed: of the faults.
        nodes: that have ranks; one more is the head, where they find each other.
        ranks_per_node: on each.
        steps: of a job; beyond some 800 rounding on other grids has grown past the tolerance of 1e-9.
        save_every: steps between its checkpoints.
        every: seconds from fault to fault, in the mean.
        patience: seconds without a step after which a job counts as hung, faults not counted.
        latency: one way between nodes.
        bandwidth: of a node, in each direction.
        runs: folder of all runs.
        name: the run's folder in it; by itself soak, with a number.
    """

    minutes: float = 20.0
    seed: int = 0
    nodes: int = 3
    ranks_per_node: int = 1
    steps: int = 200
    save_every: int = 5
    every: float = 20.0
    patience: float = 300.0
    latency: str = "100us"
    bandwidth: str = "500Mbit"
    runs: Path = Path("runs")
    name: str | None = None


@dataclass
class Job:
    """A job, and what was found of it.

    Attributes:
        faults: kind and node by second.
        problems: what went wrong; empty where nothing has.
        starts: of ranks that took a step.
        again: steps that were taken more than once.
        grids: on which steps were taken, and how many.
        agents: starts of agents.
        submissions: of the job; one more where an agent failed itself and closed the meeting of all.
        seconds: it took.
    """

    faults: list[tuple[float, str, int, float]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    starts: int = 0
    again: int = 0
    grids: dict[str, int] = field(default_factory=dict)
    agents: int = 0
    submissions: int = 1
    seconds: float = 0.0


def main(arguments: Sequence[str]) -> int:
    """Run the test; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's, or something that the machine lacks.
    """
    options = read(Options, arguments, "axonn test soak")
    at_least_one(options, "nodes", "ranks_per_node", "steps", "save_every")
    check_folder("--runs", options.runs)
    if problem := lacking():
        raise ConfigError(problem)
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # so that nodes are ended on the way out
    folder = new_folder(options.runs, options.name, "soak").resolve()
    folder.mkdir(parents=True)
    wanted = _undisturbed(options, folder / "undisturbed")
    jobs: list[Job] = []
    began = time.monotonic()
    faults = drawn(options.seed, options.nodes, options.every)
    while not jobs or time.monotonic() - began < 60 * options.minutes:
        jobs.append(_job(options, folder / f"job{len(jobs) + 1}", len(jobs), wanted, faults))
        text = report(options, jobs)
        put(
            folder / "report.json",
            json.dumps({"options": asdict(options), "jobs": [asdict(one) for one in jobs]}, default=str),
        )
        put(folder / "report.txt", text + "\n")
        print(text.splitlines()[-1], flush=True)
    print(text, folder / "report.txt", sep="\n")
    return 1 if any(job.problems for job in jobs) else 0


def _words(options: Options, folder: Path, job: int = 0) -> list[str]:
    """The script and its arguments: of three jobs one has a fixed gx, so that a rank may be spare, and one its collectives by PCCL."""
    config = json.loads(files("axonn_recipes.examples.elastic").joinpath("ds_config.json").read_text())
    if job % 3 == 1:
        config["axonn"]["tensor_parallel"]["gx"] = 2
    elif job % 3 == 2:
        config["axonn"]["pccl"] = {}
    put(folder / "ds_config.json", json.dumps(config))
    numbers = ["--steps", str(options.steps), "--save-every", str(options.save_every), "--keep", "2"]
    return [SCRIPT, "--double", "--config", str(folder / "ds_config.json"), "--output", str(folder), *numbers]


def _undisturbed(options: Options, folder: Path) -> dict[int, float]:
    """Losses of one process."""
    folder.mkdir()
    variables = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        words = ["-m", "torch.distributed.run", "--nproc-per-node", "1", "--standalone", "--max-restarts", "0", "-m"]
        done = subprocess.run([sys.executable, *words, *_words(options, folder)], stdout=log, stderr=log, env=variables)
    if done.returncode:
        raise ConfigError(f"the run that nobody disturbs ended with exit code {done.returncode}; see {folder / 'log'}")
    return {row["step"]: row["loss"] for row in verdict.rows(folder / "losses.jsonl")}


def _job(options: Options, folder: Path, number: int, wanted: dict[int, float], faults: Any) -> Job:
    """Train a job to its end under faults, and judge it."""
    folder.mkdir()
    job, samples, over = Job(), verdict.Samples(), Event()
    began = time.monotonic()
    with Cluster(options.nodes + 1, options.latency, options.bandwidth) as cluster:
        agents = Agents(cluster, options.ranks_per_node, _words(options, folder, number), folder)
        peace = [began]
        disturber = Thread(target=_disturb, args=(agents, faults, job, over, began, peace))
        disturber.start()
        try:
            _watch(options, agents, folder, job, samples, peace, over)
        finally:
            over.set()
            disturber.join()
            job.agents, job.submissions = agents.starts, agents.submissions
            agents.end()
    job.seconds = time.monotonic() - began
    found = verdict.rows(folder / "losses.jsonl")
    job.problems += verdict.wrong(found, wanted, options.steps)
    not_kept, job.starts, job.again = verdict.lost(found, options.save_every)
    job.problems += not_kept + samples.grown()
    job.grids = dict(Counter(str(row["grid"]) for row in found))
    return job


def _disturb(agents: Agents, faults: Any, job: Job, over: Event, began: float, peace: list[float]) -> None:
    """Faults one after another, until the job is over; `peace` holds when the last was undone."""
    for fault in faults:
        if over.wait(fault.after):
            return
        job.faults.append((round(time.monotonic() - began, 1), fault.kind, fault.node, round(fault.seconds, 1)))
        try:
            KINDS[fault.kind](agents, fault)
        except Exception as error:  # in a thread, where nobody else would hear of it
            job.problems.append(f"{fault.kind} on node {fault.node} failed itself: {error!r}")
            return
        finally:
            peace[0] = time.monotonic()


def _watch(
    options: Options, agents: Agents, folder: Path, job: Job, samples: verdict.Samples, peace: list[float], over: Event
) -> None:
    """Look at the job until it is done or hangs; an agent that fails is started again, as a scheduler would."""
    seen, moved = 0, time.monotonic()
    while True:
        time.sleep(_LOOK_SECONDS)
        found = verdict.rows(folder / "losses.jsonl")
        if len(found) > seen:
            seen, moved = len(found), time.monotonic()
        ended = {node: agent.poll() for node, agent in list(agents.running.items())}
        if found and found[-1]["step"] >= options.steps:
            over.set()  # agents wait minutes at their exit for a node that is lost then
            if 0 in ended.values():
                return
        failed = [node for node, code in ended.items() if code not in (None, 0)]
        if any(agents.closed(node) for node in failed):
            agents.submit_again()
        for node in failed:
            agents.start(node)
        for node in list(agents.running):
            pids = agents.processes(node)
            samples.take(pids, pids[0] if pids else None, seen)
        if time.monotonic() - max(moved, peace[0]) > options.patience:
            job.problems.append(
                f"no step for {options.patience:g} s after {job.faults[-1] if job.faults else 'the start'}: hung"
            )
            return


def report(options: Options, jobs: list[Job]) -> str:
    """All jobs in words, and the verdict."""
    lines = [
        f"{options.nodes} nodes of {options.ranks_per_node}, seed {options.seed}, a fault every {options.every:g} s"
    ]
    for number, job in enumerate(jobs, 1):
        lines.append(
            f"job {number}: {options.steps} steps in {job.seconds:.0f} s, {len(job.faults)} faults, {job.starts} starts, "
            f"{job.again} steps taken again, submitted {job.submissions} times, on grids {job.grids}"
        )
        lines += [f"  {problem}" for problem in job.problems]
    kinds = Counter(kind for job in jobs for _, kind, _, _ in job.faults)
    lines.append(f"faults: {', '.join(f'{kind} {count}' for kind, count in kinds.items())}")
    bad = sum(bool(job.problems) for job in jobs)
    lines.append(
        f"{len(jobs)} jobs, {sum(len(job.faults) for job in jobs)} faults: "
        + (f"{bad} jobs with problems" if bad else "nothing lost, nothing wrong, nothing leaked")
    )
    return "\n".join(lines)
