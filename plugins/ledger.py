"""Count every collective that goes over the wire: calls and bytes by axis, forward, backward and step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.utils._python_dispatch import TorchDispatchMode

from axonn_tp import Collective

_FUNCTIONAL = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
}
_INPLACE = {
    "allreduce_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 1),
    "_allgather_base_": ("all_gather", 1),
    "allgather_single_": ("all_gather", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_single_": ("reduce_scatter", 1),
}


@dataclass(frozen=True)
class Entry:
    """A collective that happened, and the bytes of one element."""

    collective: Collective
    itemsize: int

    @property
    def sent(self) -> Fraction:
        """Bytes that this rank sends under the ring algorithms."""
        return self.collective.sent * self.itemsize


class Ledger(TorchDispatchMode):
    """A context that records the collectives of this rank.

    Groups of one rank communicate nothing and are left out.

    Args:
        axes: axis by torch's name of its group, from `Mesh.axis_names`; other groups appear by torch's name.

    Attributes:
        entries: what happened, in order.
        unknown: names of c10d operators it saw and does not count.
    """

    def __init__(self, axes: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self.axes = dict(axes or {})
        self.entries: list[Entry] = []
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Record, then run."""
        name = function._schema.name.split("::")
        if name[0] == "_c10d_functional":
            self._functional(name[1].rstrip("_"), args)
        elif name[0] == "c10d":
            self._in_place(name[1], args)
        return function(*args, **(kwargs or {}))

    def _functional(self, name: str, args: tuple) -> None:
        if name in _FUNCTIONAL:
            group = args[-1]
            size = _resolve_process_group(group).size()
            self._record(_FUNCTIONAL[name], group, size, args[0])
        elif name not in ("wait_tensor",):
            self.unknown.add(name)

    def _in_place(self, name: str, args: tuple) -> None:
        if name not in _INPLACE:
            if name not in ("barrier",):
                self.unknown.add(name)
            return
        op, position = _INPLACE[name]
        boxed = next(a for a in args if isinstance(a, torch.ScriptObject) and "ProcessGroup" in str(a._type()))
        group = dist.ProcessGroup.unbox(boxed)
        payload = args[position]
        for tensor in _flat(payload):
            self._record(op, group.group_name, group.size(), tensor)

    def _record(self, op: str, group: str, size: int, tensor: Tensor) -> None:
        if size > 1:
            collective = Collective(op, self.axes.get(group, group), size, tensor.numel())
            self.entries.append(Entry(collective, tensor.element_size()))

    @property
    def collectives(self) -> list[Collective]:
        """What happened, without element sizes."""
        return [entry.collective for entry in self.entries]

    def by_axis(self) -> dict[str, tuple[int, Fraction]]:
        """Calls and bytes sent by this rank, by axis."""
        totals: dict[str, tuple[int, Fraction]] = defaultdict(lambda: (0, Fraction(0)))
        for entry in self.entries:
            calls, sent = totals[entry.collective.axis]
            totals[entry.collective.axis] = (calls + 1, sent + entry.sent)
        return dict(totals)


def _flat(payload: Any) -> list[Tensor]:
    if isinstance(payload, Tensor):
        return [payload]
    return [tensor for part in payload for tensor in _flat(part)]
