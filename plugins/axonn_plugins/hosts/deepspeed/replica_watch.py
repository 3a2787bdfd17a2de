"""A watch, all run long, over ranks that compute the same: inputs, random state, outputs, gradients, parameters.

Every call of the model compares its arguments between ranks that read the same samples, and the random state between those of
an x-y plane, before it computes; digests of a few bytes travel. Every `check_every` steps also outputs, the gradients that come back for them, and all
parameters along every axis over which they are replicated. What differs ends the run on every rank, except for random
state, which is made the same again before anything was drawn from it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common import digests, replicas
from axonn_plugins.hosts.common.agreement import on_ranks
from axonn_plugins.hosts.common.digests import GENERATORS, Sketch
from axonn_tp import Grid, Mesh, layout_of
from axonn_tp.comm.same_on_replicas import leave_to_host
from axonn_tp.grid.leaves import tensors_in
from axonn_tp.layers.weight import SplitWeight

_AXES = ("x", "y", "z", "data")
_ALL, _PLANE = ("grid",), ("model",)
_FIRST = 3
"""Steps at the beginning that are all looked at."""
_COMPUTED = 1e-3
"""Relative distance between outputs, or their gradients, that are taken for the same."""
_SAME_BATCH = (
    "feed both the same batch, from a sampler over engine.mpu.get_data_parallel_rank(), or let the first one's be used by "
    "axonn.tensor_parallel.broadcast_inputs = true"
)


class ReplicaWatch:
    """Watches one engine's model.

    Args:
        mesh: the engine's.
        model: its parallel model.
        every: steps between looks at all.
        broadcast: whether arguments are the first rank's instead of compared.
        stage: whether the mesh is one of several stages of a pipeline, whose calls other stages do not make.
    """

    def __init__(self, mesh: Mesh, model: nn.Module, every: int, broadcast: bool, stage: bool = False) -> None:
        self.mesh, self.every, self.broadcast, self.stage = mesh, every, broadcast, stage
        self.steps = 0
        self._model = model
        leave_to_host(model)
        split = [module for module in model.modules() if isinstance(module, SplitWeight)]
        self._gathers = list({id(module.gathers): module.gathers for module in split}.values())
        self._told: set[str] = set()
        self._trouble: str | None = None

    # Calls

    def call(self, names: Sequence[str], inputs: tuple, keywords: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with which to compute; ranks that differ in x, y and z call it together, all ranks where gradients are wanted.

        Raises:
            ConfigError: they differ, the same on all that call.
        """
        given = [(names[at] if at < len(names) else f"argument {at}", value) for at, value in enumerate(inputs)]
        found = [leaf for name, value in (*given, *keywords.items()) for leaf in digests.leaves(name, value)]
        callers = self._callers()
        cards = self._exchange(self._card([] if self.broadcast else found), callers).tolist()
        mine = self._ranks(callers).index(dist.get_rank()) - self.mesh.rank("model")
        self._check_order([card[2] for card in cards], callers)
        self._repair([card[3:] for card in cards[mine : mine + self.mesh.size("model")]])
        if self.broadcast:
            return replicas.broadcast_inputs(inputs, keywords, self.mesh)
        size = self.mesh.size("replicas")
        alike = [list(range(first, first + size)) for first in range(0, len(cards), size)]
        if any(cards[place][:2] != cards[places[0]][:2] for places in alike for place in places):
            self._refuse(found, callers, digests.rounding, "the model's argument {}", _SAME_BATCH, alike)
        return inputs, keywords

    def _callers(self) -> tuple[str, ...]:
        """Groups that, one after the other, reach all ranks that call the model together: z gathers weights."""
        training = self._model.training and torch.is_grad_enabled() and not self.stage
        return _ALL if training or self.mesh.size("data") == 1 else ("model", "z")

    def _ranks(self, groups: tuple[str, ...]) -> list[int]:
        """The ranks that they reach, in the order of what they gather."""
        if groups in (_ALL, _PLANE):
            return dist.get_process_group_ranks(self.mesh.group(groups[0]))
        size = self.mesh.size("model") * self.mesh.size("z")
        first = dist.get_rank() - self.mesh.rank("model") - self.mesh.size("model") * self.mesh.rank("z")
        return list(range(first, first + size))

    def _card(self, found: list[tuple[str, Any]]) -> Tensor:
        """Digests of structure, of elements, of the order of weight gathers, and of the random states."""
        device = self.mesh.device
        structure = digests.of_text(repr([(name, digests.kind(value)) for name, value in found]))
        elements = torch.zeros((), dtype=torch.int64, device=device)
        for _, value in found:
            if isinstance(value, Tensor):
                elements = elements * 31 + digests.digest(value).to(device)
        order = sum(gathers.order for gathers in self._gathers) % 2**62
        states = torch.tensor([structure, order, *digests.random_state(device)], device=device)
        return torch.cat([states[:1], elements[None], states[1:]])

    def _check_order(self, orders: list[int], callers: tuple[str, ...]) -> None:
        """Refuse passes in which ranks of z called other layers: they got parts of each other's weights."""
        ranks, together = self._ranks(callers), self.mesh.size("model") * self.mesh.size("z")
        for first in range(0, len(ranks), together):
            odd = [ranks[place] for place in range(first, first + together) if orders[place] != orders[first]]
            if odd:
                raise ConfigError(
                    f"in step {self.steps} or before, {on_ranks(odd)} called other layers than rank {ranks[first]}, and ranks of z gather their "
                    'weights together; call the same layers for every input, give those that are left out {"kind": "replicated"} in the '
                    "plan, or leave experts to axonn.ted; go on from a checkpoint before it"
                )

    def _repair(self, states: list[list[int]]) -> None:
        """Give the ranks of this plane the first one's random state again; says so once for each generator."""
        if all(state == states[0] for state in states):
            return
        replicas.align_random_state(self.mesh)
        which = [name for name, *all_states in zip(GENERATORS, *states, strict=True) if len(set(all_states)) > 1]
        if self.mesh.rank("model") or self._told.issuperset(which):
            return
        self._told.update(which)
        members = dist.get_process_group_ranks(self.mesh.group("model"))
        odd = [rank for rank, state in zip(members, states, strict=True) if state != states[0]]
        print(
            f"axonn: the state of {' and '.join(which)} random generator on {on_ranks(odd)} was not that of rank {members[0]} after step "
            f"{self.steps}: something drew from it there alone; it was made the same again before the model drew",
            file=sys.stderr,
            flush=True,
        )

    # What was computed

    @property
    def due(self) -> bool:
        """True if the step under way is looked at."""
        return self.steps < _FIRST or (self.steps + 1) % self.every == 0

    def watch(self, outputs: Any) -> None:
        """Compare the model's outputs, and their gradients when backward brings them; every rank calls it.

        Raises:
            ConfigError: outputs differ, the same on every rank.
        """
        if self.mesh.size("model") == 1 or not self.due:
            return
        self._computed(outputs, "model's outputs", _ALL)
        for value in tensors_in(outputs):
            if value.requires_grad:
                value.register_hook(self._came)

    def _came(self, gradient: Tensor) -> None:
        """Compare an output's gradient in this plane: others may have none, where a loss is of other outputs on ranks that read other data."""
        try:
            self._computed(gradient, "gradients of the model's outputs", _PLANE)
        except ConfigError as error:  # which all ranks are to end with
            self._trouble = self._trouble or str(error)

    def _computed(self, values: Any, what: str, groups: tuple[str, ...]) -> None:
        """Compare the floating-point tensors among `values`, which ranks of a plane have computed alike; other planes may have another number.

        Raises:
            ConfigError: they differ, the same on all ranks of `groups`.
        """
        found = [value for value in tensors_in(values) if value.is_floating_point()]
        card = self._none() + len(found)
        for value in found:
            card = card * 31 + digests.digest(value).to(self.mesh.device)
        planes = self._exchange(card, groups).view(-1, self.mesh.size("model"))
        if (planes == planes[:, :1]).all():
            return
        named = [(f"{what} {number}" if len(found) > 1 else what, value) for number, value in enumerate(found)]
        self._refuse(
            named,
            groups,
            lambda value: _COMPUTED if value.element_size() > 2 else 30 * _COMPUTED,
            "the {}",
            "their labels differ or the plan leaves features split: pass labels through the model's forward, read data by "
            "engine.mpu.get_data_parallel_rank()",
        )

    def _none(self) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=self.mesh.device)

    # Parameters

    def stepped(self, steps: int) -> None:
        """The optimizer has made its step number `steps`; every rank calls it.

        Raises:
            ConfigError: a parameter's replicas have come apart, or gradients of outputs had; the same on every rank.
        """
        due, self.steps = self.due and steps > self.steps, steps
        if due and self.mesh.size("grid") > 1:
            self._compare_parameters()

    def _compare_parameters(self) -> None:
        by_axes: dict[tuple[Grid, tuple[str, ...]], list[tuple[str, Tensor]]] = {}
        for name, parameter in self._model.named_parameters():
            layout = layout_of(parameter)
            split, grid = tuple(axis for axis in _AXES if axis in layout.axes), layout.grid or self.mesh.grid
            if math.prod(grid.size(axis) for axis in _AXES if axis not in split) > 1:
                by_axes.setdefault((grid, split), []).append((name, parameter))
        totals = [self._none() for _ in by_axes] + [self._none() + int(self._trouble is not None)]
        for place, replicated in enumerate(by_axes.values()):
            for _, tensor in replicated:
                totals[place] = totals[place] * 31 + digests.digest(tensor)
        cards = self._exchange(torch.stack(totals))
        if cards[:, -1].any():
            self._tell()
        for place, ((grid, split), members) in enumerate(by_axes.items()):
            groups = [list(ranks) for ranks in grid.groups(set(_AXES) - set(split))]
            column = cards[:, place].tolist()
            if any(column[rank] != column[ranks[0]] for ranks in groups for rank in ranks):
                self._refuse(
                    members,
                    _ALL,
                    digests.rounding,
                    "parameter {}",
                    "something changed them on one rank alone: go on from a checkpoint before it",
                    groups,
                )

    def _tell(self) -> None:
        """Raise what planes have found.

        Raises:
            ConfigError: always, the same on every rank.
        """
        said: list[str | None] = [None] * self.mesh.size("grid")
        dist.all_gather_object(said, self._trouble, group=self.mesh.group("grid"))
        raise ConfigError(next(one for one in said if one is not None))

    # Ranks together

    def _exchange(self, card: Tensor, groups: tuple[str, ...] = _ALL) -> Tensor:
        """Every rank's card, on the CPU."""
        cards = card[None]
        for group in groups:
            parts = [torch.empty_like(cards) for _ in range(self.mesh.size(group))]
            dist.all_gather(parts, cards, group=self.mesh.group(group))
            cards = torch.cat(parts)
        return cards.cpu()

    def _refuse(
        self,
        values: Iterable[tuple[str, Any]],
        groups: tuple[str, ...],
        allowed: Callable[[Any], float],
        what: str,
        advice: str,
        alike: list[list[int]] | None = None,
    ) -> None:
        """End with the one of `values` that is furthest apart, more than `allowed`, between ranks that should have the same.

        Args:
            values: this rank's, by name.
            groups: reach all ranks that call.
            allowed: a value's relative distance that is taken for rounding.
            what: one of them is, with a place for its name.
            advice: what to do.
            alike: places in the group of ranks that should have the same; by default the x-y planes.

        Raises:
            ConfigError: one is, the same on all that call.
        """
        mine = {name: (digests.sketch(value), allowed(value)) for name, value in values}
        ranks, everyone = self._ranks(groups), [mine]
        for group in groups:
            parts: list[list[dict[str, tuple[Sketch, float]]]] = [[] for _ in range(self.mesh.size(group))]
            dist.all_gather_object(parts, everyone, group=self.mesh.group(group))
            everyone = [found for part in parts for found in part]
        size = self.mesh.size("model")
        worst, said = 0.0, ""
        for places in alike or [list(range(first, first + size)) for first in range(0, len(ranks), size)]:
            first = everyone[places[0]]
            for name in dict.fromkeys(name for place in places for name in everyone[place]):
                apart = {place: _distance(first.get(name), everyone[place].get(name)) for place in places[1:]}
                if max(apart.values()) > worst:
                    worst, odd = max(apart.values()), [ranks[place] for place in places[1:] if apart[place]]
                    said = f"{what.format(name)} differs on {on_ranks(odd)} from that of rank {ranks[places[0]]}"
        if said:
            by = f" by {worst:.1e} of its norm" if worst < math.inf else ""
            raise ConfigError(f"{said}{by} after step {self.steps}, and should be the same; {advice}")


def _distance(one: tuple[Sketch, float] | None, other: tuple[Sketch, float] | None) -> float:
    """Distance of two values; 0 where they are no further apart than is allowed."""
    if one is None or other is None:
        return math.inf
    found = one[0].distance(other[0])
    return found if found > max(one[1], other[1]) else 0.0
