"""The judgement of a job that was disturbed: what it has lost, learned wrong, or leaked."""

from __future__ import annotations

import json
import resource
import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

TOLERANCE = 1e-9
WARM = 12
"""Steps, with checkpoints among them, after which a rank has opened what it needs."""
_FEW = 9
_MORE_FILES, _MORE_BYTES, _MORE_SHARE = 8, 16 * 2**20, 0.1


@dataclass
class Samples:
    """Resident bytes and open files of processes, over time.

    Attributes:
        of: (bytes, files) by process, in order.
        agents: those of them that start ranks.
    """

    of: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    agents: set[int] = field(default_factory=set)
    _seen: dict[int, int] = field(default_factory=dict)

    def take(self, pids: list[int], agent: int | None, steps: int) -> None:
        """Look at processes, of which some may be gone.

        An agent is looked at once it has started ranks, for it imports what it needs before, and a rank once it has taken enough steps to
        have all that it needs.

        Args:
            pids: the processes.
            agent: that of them which starts ranks.
            steps: that the job has taken so far.
        """
        for pid in pids:
            starting = pid not in self.agents and len(pids) == 1
            if starting if pid == agent else steps - self._seen.setdefault(pid, steps) < WARM:
                continue
            try:
                resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
                self.of[pid].append((resident, len(list(Path(f"/proc/{pid}/fd").iterdir()))))
            except OSError:
                continue
            if pid == agent:
                self.agents.add(pid)

    def grown(self) -> list[str]:
        """Processes that hold more at the end of their life than after its first third."""
        found = []
        for pid, samples in self.of.items():
            if len(samples) < _FEW:
                continue
            third = len(samples) // 3
            early, late = samples[third : 2 * third], samples[-third:]
            (before, files), (after, more) = (
                (statistics.median(size for size, _ in part), statistics.median(count for _, count in part))
                for part in (early, late)
            )
            what = "agent" if pid in self.agents else "rank"
            if after - before > _MORE_BYTES + _MORE_SHARE * before:
                found.append(
                    f"{what} {pid} grew from {before / 2**20:.0f} to {after / 2**20:.0f} MiB in {len(samples)} samples"
                )
            if more - files > _MORE_FILES:
                found.append(f"{what} {pid} opened {more - files:.0f} files more in {len(samples)} samples")
        return found


def rows(file: Path) -> list[dict[str, Any]]:
    """The steps that ranks noted; a line that a killed rank left unfinished is none."""
    found = []
    for line in file.read_text().splitlines() if file.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def wrong(found: list[dict[str, Any]], wanted: dict[int, float], steps: int) -> list[str]:
    """Steps whose losses are not the undisturbed run's, or that nobody took."""
    said = [
        f"step {row['step']}: loss {row['loss']!r} where the undisturbed run has {wanted[row['step']]!r}, on grid {row['grid']}"
        for row in found
        if not abs(row["loss"] - wanted[row["step"]]) <= TOLERANCE
    ]
    missing = sorted(set(range(1, steps + 1)) - {row["step"] for row in found})
    return said + ([f"steps that were never taken: {missing}"] if missing else [])


def lost(found: list[dict[str, Any]], every: int) -> tuple[list[str], int, int]:
    """Starts that did not go on from the last complete checkpoint; how many starts there were, and how many steps were taken again."""
    said, starts, again = [], 1 if found else 0, 0
    if found and found[0]["step"] != 1:
        said.append(f"the first start began with step {found[0]['step']}")
    for before, row in zip(found, found[1:], strict=False):
        if row["step"] == before["step"] + 1 and row["start"] == before["start"]:
            continue
        starts += 1
        again += before["step"] + 1 - row["step"]
        # A step at which a checkpoint is due may be noted before this is complete.
        complete = {before["step"] // every * every, (before["step"] - 1) // every * every}
        if row["step"] - 1 not in complete:
            said.append(
                f"after step {before['step']} a start went on with step {row['step']}, not from {sorted(complete)}"
            )
    return said, starts, again
