"""Cases on groups of ranks, many in a group; a case that hangs or ends a rank is named, and the rest goes on without it."""

from __future__ import annotations

import json
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import RankFailed, launch
from axonn_tp import Mesh
from tests.distributed import BACKEND, compiled
from tests.fuzz.cases import Case, case, run

WORLDS = (4, 6, 8)
SECONDS = 60.0
_CHUNK = 100


@dataclass
class Found:
    """Verdicts on cases.

    Attributes:
        told: "equal", "refused: …", "wrong: …", "failed: …" or "hangs", by number.
        cases: by number.
        seconds: that all took.
    """

    told: dict[int, str] = field(default_factory=dict)
    cases: dict[int, Case] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def bad(self) -> list[str]:
        """The cases that are neither equal nor refused."""
        wrong = (
            number for number, told in sorted(self.told.items()) if told.partition(":")[0] not in ("equal", "refused")
        )
        return [f"{self.told[number]}\n  {self.cases[number]}" for number in wrong]

    def __str__(self) -> str:
        counts = Counter(told.partition(":")[0] for told in self.told.values())
        parts = ", ".join(f"{count} {word}" for word, count in counts.most_common())
        return f"{len(self.told)} cases in {self.seconds:.0f} s: {parts}"


def run_cases(seed: int, numbers: Iterable[int], seconds: float = SECONDS) -> Found:
    """Run cases of a seed.

    Args:
        seed: of the draws.
        numbers: of the cases; each runs on one of `WORLDS`.
        seconds: after which a case counts as hanging.
    """
    begun, found = time.monotonic(), Found()
    by_world: dict[int, list[Case]] = {world: [] for world in WORLDS}
    for number in numbers:
        world = WORLDS[number % len(WORLDS)]
        found.cases[number] = case(seed, number, world)
        by_world[world].append(found.cases[number])
    for world, cases in by_world.items():
        # A mesh has groups with threads of their own: cases of one grid share it.
        cases.sort(key=lambda one: (str(one.grid), one.number))
        for begin in range(0, len(cases), _CHUNK):
            _run_chunk(cases[begin : begin + _CHUNK], world, seconds, found.told)
    found.seconds = time.monotonic() - begun
    return found


def _run_chunk(cases: Sequence[Case], world: int, seconds: float, told: dict[int, str]) -> None:
    left = list(cases)
    while left:
        problem = ""
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "told")
            file.touch()
            try:
                compiled()
                launch(_on_rank, world, left, file, seconds)
            except RankFailed as error:
                last = str(error).strip().splitlines()[-1]
                problem = "hangs" if "SIGALRM" in last or "signal 14" in last else f"failed: {last}"
            told.update(json.loads(line) for line in file.read_text().splitlines())
        left = [one for one in left if one.number[1] not in told]
        if problem and left:
            told[left[0].number[1]] = problem
            left = left[1:]


def _on_rank(cases: Sequence[Case], file: Path, seconds: float) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the rank wherever it waits
    dist.init_process_group(BACKEND)
    mesh: Mesh | None = None
    for one in cases:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        if mesh is None or mesh.grid != one.grid:
            if mesh is not None:
                mesh.destroy()
            mesh = Mesh(one.grid)
        try:
            outcome = run(one, mesh)
        except Exception:
            outcome = f"failed: {traceback.format_exc()}"
        outcomes: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(outcomes, outcome)
        if dist.get_rank() == 0:
            with file.open("a") as told:
                told.write(json.dumps((one.number[1], _together(outcomes))) + "\n")
    signal.setitimer(signal.ITIMER_REAL, 0)


def _together(outcomes: Sequence[str]) -> str:
    words = [outcome.partition(":")[0] for outcome in outcomes]
    if len(set(words)) > 1 and "refused" in words:
        return f"failed: refused on ranks {[rank for rank, word in enumerate(words) if word == 'refused']} alone: {max(outcomes)}"
    return next((outcome for outcome, word in zip(outcomes, words, strict=True) if word not in ("equal",)), "equal")
