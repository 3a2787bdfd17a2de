"""The part of `PortableState` that is an optimizer's with states of ours: dense states by parameter, and masks of pruned ones.

So a checkpoint tells neither how many ranks shared the states nor whether they were compressed: it is read pruned or dense.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn

import samo
from axonn_plugins.hosts.common.composition import Composition
from axonn_plugins.optim.beside import take_written
from axonn_plugins.optim.state import MASTER, dense_parts
from axonn_plugins.samo.pruning import Masks
from axonn_tp import Mesh, layout_of
from axonn_tp.checkpoint.optimizer import Piece, Pieces
from axonn_tp.checkpoint.planner import Shard
from axonn_tp.checkpoint.state import Notes, Shards

_SUM = "first"
"""The key of sums of first gradients, by which weights are to be scored."""


class OwnState:
    """The optimizer as any torch optimizer of the dense model, for a while.

    Args:
        model: this rank's part.
        mesh: of it.
        states: the optimizer.
        composition: the systems that it was made for.

    Attributes:
        view: has the parameter groups, and while a checkpoint is written or read the dense states.
        masters: float32 weights of 16-bit parameters, by name.
        composition: see above.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, states: samo.Optimizer, composition: Composition) -> None:
        self._mesh, self._states, self.composition = mesh, states, composition
        self._pruning = self.composition.pruning
        self._names = {parameter: name for name, parameter in model.named_parameters()}
        self.view: torch.optim.Optimizer = object.__new__(type(self._states.inner))
        self.view.param_groups, self.view.state = self._states.param_groups, {}  # type: ignore[assignment]
        self.masters: dict[str, Shard] = {}

    @property
    def _numbered(self) -> list[tuple[int, nn.Parameter]]:
        numbers = count()
        return [(next(numbers), parameter) for group in self.view.param_groups for parameter in group["params"]]

    def collect(self) -> Pieces:
        """Fill `view` and `masters` with what this rank holds; every rank calls it.

        Returns:
            Which part of each parameter that is.
        """
        take_written(self._states)
        parts = {
            entry.parameter: part for entry, part in dense_parts(self._states.stores, self._states.inner.state).items()
        }
        pieces: Pieces = []
        for group in self.view.param_groups:
            pieces.append([])
            for parameter in group["params"]:
                if getattr(parameter, "axonn_stands_in", False):
                    continue
                start, length, state = parts.get(parameter, (0, 0, {}))
                name, layout = self._names[parameter], layout_of(parameter)
                if not self._writes(parameter):
                    start, length, state = 0, 0, {key: _nothing_of(value) for key, value in state.items()}
                holder = parameter.new_empty(1).expand(length)
                master = state.pop(MASTER, None)
                if master is not None:
                    self.masters[name] = Shard(master, layout, start)
                if state:
                    self.view.state[holder] = state
                pieces[-1].append(Piece(name, layout, holder, 0, length, start))
        return pieces

    def _writes(self, parameter: nn.Parameter) -> bool:
        """True if this rank is of the first that share a parameter's states: replicas on other axes and stages cut them elsewhere."""
        layout = layout_of(parameter)
        at = self._mesh.over(layout.grid).coordinates
        first = layout.counted_here(at, ("y",) if layout.partial else ("x", "y"))
        return first and not getattr(parameter, "ds_pipe_replicated", False)

    def masks(self) -> tuple[Shards, Notes]:
        """Masks by the serial model's names, with what a search for a ticket has seen; every rank calls it."""
        pruning = self._pruning
        if pruning is None:
            return {}, {"pruned": False, "search": None}
        parts = pruning.masks(self._states) if pruning.pruned else {}
        seen, search = pruning.search_state()
        shards = {f"samo.{name}.{key}": mask for name, key, mask in [*_named(parts, "mask"), *seen]}
        made = {
            key: Shard(
                mask.to(torch.uint8), layout_of(pruning.parameters[key.removeprefix("samo.").rpartition(".")[0]])
            )
            for key, mask in shards.items()
        }
        notes: Notes = {"pruned": pruning.pruned, "search": search, "owed": pruning.owed}
        if (first := pruning.first_gradients) is not None and first.taken:
            sums = first.so_far(self._states)
            made |= {
                f"samo.{name}.{_SUM}": Shard(one, layout_of(pruning.parameters[name])) for name, one in sums.items()
            }
            notes["taken"] = first.taken
        return made, notes

    def take_masks(self, notes: Notes, fill: Callable[[Shards], None]) -> None:
        """Prune as the checkpoint is, which may be dense; every rank calls it.

        Args:
            notes: of the checkpoint.
            fill: reads tensors of it; every rank calls it.
        """
        # Gradients that no step has consumed are of other weights.
        self._states.zero_grad()
        pruning, saved = self._pruning, notes.get("samo") or {"pruned": False, "search": None}
        if pruning is None:
            return
        kept = {name for name in notes["tensors"] if name.startswith("samo.")}

        def numbers(key: str) -> Masks:
            parts = {
                name: torch.zeros_like(parameter, dtype=notes["tensors"][f"samo.{name}.{key}"][1])
                for name, parameter in pruning.parameters.items()
                if f"samo.{name}.{key}" in kept
            }
            fill({f"samo.{name}.{key}": Shard(t, layout_of(pruning.parameters[name])) for name, t in parts.items()})
            return parts

        def read(key: str) -> Masks:
            return {name: part.bool() for name, part in numbers(key).items()}

        masks = pruning.forget()
        if saved["pruned"]:
            own = read("mask")
            pruning.take(own)
            masks |= own
            pruning.owed = saved.get("owed", False)
        else:
            pruning.resume_search(saved["search"], read)
            if pruning.first_gradients is not None and saved.get("taken"):
                pruning.first_gradients.go_on(saved["taken"], numbers(_SUM))
        self.composition.prune(masks)

    def make_masters(self, notes: Notes) -> None:
        """Room for the float32 weights in the checkpoint."""
        for name, parameter in ((self._names[p], p) for _, p in self._numbered):
            if f"optimizer.{name}.master" in notes["tensors"] and parameter.dtype in (torch.float16, torch.bfloat16):
                self.masters[name] = Shard(torch.zeros_like(parameter, dtype=torch.float32), layout_of(parameter))

    def hand_over(self) -> None:
        """Have the optimizer go on with what was read into `view` and `masters`; every rank calls it."""
        state: dict[int, dict[str, Any]] = {}
        groups, numbers = [], count()
        for number, parameter in self._numbered:
            found = dict(self.view.state.get(parameter, {}))
            name = self._names[parameter]
            if name in self.masters:
                found["master"] = self.masters[name].tensor
            state[number] = found
        for group in self.view.param_groups:
            groups.append({**group, "params": [next(numbers) for _ in group["params"]]})
        self._states.load_state_dict({"state": state, "param_groups": groups, "loss_scale": None})


def _nothing_of(value: Any) -> Any:
    return value[:0] if isinstance(value, Tensor) and value.dim() else value


def _named(parts: Masks, key: str) -> list[tuple[str, str, Tensor]]:
    return [(name, key, mask) for name, mask in parts.items()]
