"""Options of pccl, in the block, as ``pg_options`` or in the environment."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

SILENCE = 30.0  # seconds
Algorithm = Literal["auto", "ring", "recursive", "hierarchical", "native"]


@dataclass(frozen=True)
class Options:
    """Choices for one group; those given to ``init_process_group`` hold for all groups made after it, too.

    Attributes:
        algorithm: "auto" chooses by collective, size and nodes. "ring": p - 1 steps, fewest bytes. "recursive": recursive
            doubling and halving, and where the ranks are no power of two Bruck's algorithm, both in the smallest
            number of steps. "hierarchical": between nodes in few steps for small sizes and in a ring for large
            ones, then within each node. "native": gloo; for CUDA tensors NCCL.
        ranks_per_node: "auto" goes by the nodes' names; n takes each n consecutive ranks of the job for a node.
        interfaces: network interfaces' names, of which process i of a node uses number i modulo their count; None: those
            of GLOO_SOCKET_IFNAME, else the one that leads to MASTER_ADDR.
        tuning_file: where what was measured of this cluster is kept; None: in the user's cache folder.
        tune: whether "auto" measures when the job's first group is made and nothing was measured of such a cluster; None:
            AXONN_PCCL_TUNE says so, else true.
        silence: seconds after which a node that does not answer is given up.
        read_memory: whether processes of a node may read each other's memory even where Yama forbids it by default.

    Raises:
        ValueError: a value that is not allowed.
    """

    algorithm: Algorithm = "auto"
    ranks_per_node: int | Literal["auto"] = "auto"
    interfaces: tuple[str, ...] | None = None
    tuning_file: str | None = None
    tune: bool | None = field(default=None, compare=False)  # a group once made is the same with and without
    silence: float = SILENCE
    read_memory: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.interfaces, list):
            object.__setattr__(self, "interfaces", tuple(self.interfaces))
        self._check("algorithm", _nearest(self.algorithm, get_args(Algorithm)))
        wrong = self.ranks_per_node != "auto" and not (type(self.ranks_per_node) is int and self.ranks_per_node >= 1)
        self._check("ranks_per_node", 'an integer of at least 1, or "auto"' if wrong else None)
        names = self.interfaces
        wrong = names is not None and not (
            isinstance(names, tuple) and names and all(isinstance(n, str) for n in names)
        )
        self._check("interfaces", 'a list of network interfaces such as ["eth0"]' if wrong else None)
        wrong = self.tuning_file is not None and not isinstance(self.tuning_file, str)
        self._check("tuning_file", "a path" if wrong else None)
        wrong = self.tune is not None and not isinstance(self.tune, bool)
        self._check("tune", "true or false (in the environment 1 or 0)" if wrong else None)
        number = isinstance(self.silence, int | float) and not isinstance(self.silence, bool)
        self._check("silence", None if number and 1 <= self.silence <= 86400 else "a number of seconds from 1 to 86400")
        wrong = not isinstance(self.read_memory, bool)
        self._check("read_memory", "true or false (in the environment 1 or 0)" if wrong else None)

    def _check(self, key: str, allowed: str | None) -> None:
        if allowed is not None:
            raise ValueError(f"pccl: {key} = {getattr(self, key)!r} is not {allowed}; correct its value")

    @staticmethod
    def from_environment() -> Options:
        """Options of the variables AXONN_PCCL_ALGORITHM, AXONN_PCCL_RANKS_PER_NODE and so on.

        Lists are comma-separated, switches 1 or 0, and _TUNING names the file.

        Raises:
            ValueError: a value that is not allowed, or a variable of that beginning that means nothing.
        """
        read: dict[str, tuple[str, Callable[[str], Any]]] = {
            "AXONN_PCCL_ALGORITHM": ("algorithm", str),
            "AXONN_PCCL_RANKS_PER_NODE": ("ranks_per_node", lambda text: int(text) if text.isdecimal() else text),
            "AXONN_PCCL_INTERFACES": ("interfaces", lambda text: tuple(name.strip() for name in text.split(","))),
            "AXONN_PCCL_TUNING": ("tuning_file", str),
            "AXONN_PCCL_TUNE": ("tune", _switch),
            "AXONN_PCCL_SILENCE": ("silence", _seconds),
            "AXONN_PCCL_READ_MEMORY": ("read_memory", _switch),
        }
        given: dict[str, Any] = {}
        for name in [name for name in os.environ if name.startswith("AXONN_PCCL_")]:
            if not (value := os.environ[name]):
                continue
            if name not in read:
                near = difflib.get_close_matches(name, read, n=1, cutoff=0.0)[0]
                raise ValueError(f"{name} is not a variable of pccl; use {near}, or another of {', '.join(read)}")
            key, convert = read[name]
            given[key] = convert(value)
        return Options(**given)

    def tunes(self) -> bool:
        """True if pccl tunes itself: `tune`, or the environment's where that is None.

        Raises:
            ValueError: the environment is wrong.
        """
        return (Options.from_environment().tune if self.tune is None else self.tune) is not False

    def agreed(self) -> str:
        """The options that must be the same on all ranks, as a line.

        Raises:
            ValueError: the environment is wrong.
        """
        return f"algorithm {self.algorithm!r}, ranks_per_node {self.ranks_per_node!r}, tune {self.tunes()}"


def _switch(text: str) -> bool | str:
    return {"0": False, "1": True}.get(text, text)


def _seconds(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _nearest(value: Any, allowed: tuple[str, ...]) -> str | None:
    if value in allowed:
        return None
    near = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.0)[0]
    return f'known: use "{near}", or another of {", ".join(allowed)}'
