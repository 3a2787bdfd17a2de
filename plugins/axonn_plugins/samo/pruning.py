"""When a model is pruned during training, and by which masks: the same on any mesh, stage of a pipeline and number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from axonn_plugins.config.base import ConfigError
from axonn_plugins.config.samo import EarlyBird, Heads, Samo
from axonn_plugins.samo import report
from axonn_plugins.samo.frozen import FrozenMasks
from axonn_plugins.samo.gradients import FirstGradients
from axonn_plugins.samo.mesh import positions_of, shards_of
from axonn_plugins.samo.pruners import masks_by
from axonn_tp import Mesh, layout_of
from samo.mask_file import pack, unpack
from samo.routers import routers_in
from samo.stacks import stacks_of
from samo.targets import tables_in, targets

Masks = dict[str, Tensor]
_TOLERANCE = 0.01


class Pruning:
    """The block's pruner at work; every rank calls each method.

    Args:
        block: the ``"samo"`` key.
        model: this rank's part of the model.
        trained: the parameters that the optimizer has; others, and frozen ones among them, are not pruned.
        mesh: how the model is split, or the mesh of this rank's stage.
        names: of parameters, as the serial model has them.
        copies: how many stages hold a parameter of this name; 1 where it is not tied.
        tables: names of parameters that are tables of embeddings, though their modules are no `nn.Embedding`.

    Attributes:
        pruned: whether the model is.
        names: of the parameters that are.
        first_gradients: by which it is to be pruned; None: by something else.

    Raises:
        ConfigError: the same on every rank: the masks' file or the patterns do not fit the model.
    """

    def __init__(
        self,
        block: Samo,
        model: nn.Module,
        trained: set[nn.Parameter],
        mesh: Mesh,
        names: Mapping[nn.Parameter, str] | None = None,
        copies: Callable[[str], int] = lambda _: 1,
        tables: Collection[str] = (),
    ) -> None:
        self.block, self.model, self.mesh = block, model, mesh
        self.pruned = False
        self.names: set[str] = set()
        named = names or {parameter: name for name, parameter in model.named_parameters()}
        self.parameters = {name: parameter for parameter, name in named.items()}
        stepped = {parameter for parameter in trained if parameter.requires_grad}
        self._frozen = FrozenMasks({name: one for name, one in self.parameters.items() if one not in stepped})
        self._copies, self._tables = copies, tables
        self._targets: dict[str, Tensor] = {}
        self._search: samo.EarlyBird | None = None
        self._schedule: samo.Schedule | None = None
        self._regrowth: samo.Regrowth | None = None
        if block.regrow is not None:
            regrow = block.regrow
            self._regrowth = samo.Regrowth(regrow.interval, regrow.end_step, regrow.fraction, block.start_step)
        self._regrown: Masks | None = None
        self.owed = False  # a regrowth, from when it is due until a step's gradients are finite
        self._rows: dict[str, dict[str, Any]] = {}
        self.first_gradients: FirstGradients | None = None
        self._together(self._prepare, trained)

    def _together(self, work: Callable[..., Any], *inputs: Any) -> Any:
        """Do work that fails on every rank where it fails on one.

        Raises:
            ConfigError: it raised ValueError; the same on every rank.
        """
        problem, result = None, None
        try:
            result = work(*inputs)
        except ValueError as error:
            problem = str(error).removeprefix("axonn.samo: ")
        for other in _everyone(problem):
            if other is not None:
                raise ConfigError(f"axonn.samo: {other}")
        return result

    def _prepare(self, trained: set[nn.Parameter]) -> None:
        block = self.block
        if block.mask is not None:
            self._read()
            return
        known: list[tuple[str, Tensor]] = list(self.parameters.items())
        shapes = {name: layout_of(parameter).serial_shape for name, parameter in known}
        # Patterns need not fit every stage: for what other ranks have there are stand-ins.
        named = self._include is not None or block.exclude is not None
        told = _everyone({name: (shapes[name], p.dtype) for name, p in known}) if named else []
        others = {name: there for one in told for name, there in one.items() if name not in shapes}
        known += [(name, torch.empty(0, dtype=dtype, device="meta")) for name, (_, dtype) in others.items()]
        shapes |= {name: shape for name, (shape, _) in others.items()}
        found = targets(known, self._include, block.exclude, shapes)
        whole = self._whole_by_default() if self._include is None else set()
        self._targets = {n: p for n, p in found.items() if p in trained and p.requires_grad and n not in whole}
        if not any(_everyone(bool(self._targets))):
            raise ValueError(
                "include and exclude leave no parameter to prune among those that are trained; correct the patterns"
            )
        self._begin_search()

    @property
    def _include(self) -> list[str] | None:
        structure = self.block.structure
        return [*structure.rows, *structure.columns] if isinstance(structure, Heads) else self.block.include

    def _whole_by_default(self) -> set[str]:
        """Names of tables of embeddings and of routers, which are pruned where the block names what to prune alone."""
        whole = {id(parameter) for parameter in [*tables_in(self.model), *routers_in(self.model)]}
        return {name for name, parameter in self.parameters.items() if id(parameter) in whole or name in self._tables}

    def _shards(self) -> samo.Shards:
        return shards_of(self.mesh, self._copies)

    def _begin_search(self) -> None:
        settings = self.block.search
        if settings is not None:
            self._search = self._search_for(settings)
        if self.block.snip is not None:
            self.first_gradients = FirstGradients(self._targets, self.block.snip.batches)
        given = self.block.schedule
        if given is not None and self.block.sparsity is not None:
            self._schedule = samo.Schedule(
                self.block.sparsity, self.block.start_step, given.end_step, given.interval, given.initial, given.shape
            )

    def _search_for(self, settings: EarlyBird) -> samo.EarlyBird:
        assert self.block.sparsity is not None
        return samo.EarlyBird(
            self._targets.items(),
            self.block.sparsity,
            settings.window,
            settings.epsilon,
            self.block.scope,
            shards=self._shards(),
            stacks=stacks_of(self.model, self._shards()),
        )

    def first(self) -> Masks | None:
        """The masks, where the model is pruned before the first step."""
        return self.after(0)

    def after(self, steps: int) -> Masks | None:
        """The masks of this rank's parts, if it is time to prune, or to prune further, after so many optimizer steps.

        Raises:
            ConfigError: the weights are NaN; the same on every rank.
        """
        if self._regrown is not None:
            masks, self._regrown = self._regrown, None
            return masks
        dense = steps - self.block.start_step
        if dense < 0 or (self.pruned and (self._schedule is None or not self._schedule.due(steps))):
            return None
        if self.first_gradients is not None and not self.first_gradients.complete:
            return None
        if self.block.search is None:
            return self._together(self._make, steps)
        return self._together(self._observe) if dense and dense % self.block.search.interval == 0 else None

    def _make(self, steps: int) -> Masks:
        if self.block.mask is not None:
            return self._read()
        sparsity = self.block.sparsity if self._schedule is None else self._schedule.sparsity(steps)
        return masks_by(self.block, self.model, self._targets, self._shards(), sparsity, self.first_gradients)

    def _observe(self) -> Masks | None:
        assert self._search is not None
        return self._search.masks if self._search.observe() else None

    def _read(self) -> Masks:
        """This rank's parts of the masks in the block's file."""
        file = self.block.mask
        assert file is not None
        masks = self._together(samo.read_masks, file)
        shapes = {name: layout_of(parameter).serial_shape for name, parameter in self.parameters.items()}
        known = {name for names in _everyone(sorted(shapes)) for name in names}
        unknown = sorted(set(masks) - known)
        if unknown:
            raise ValueError(
                f'"{file}" has a mask of {unknown[0]!r}, which is no parameter of the model; correct the file'
            )
        size = sum(mask.numel() for mask in masks.values())
        found = 1 - sum(int(mask.sum()) for mask in masks.values()) / max(size, 1)
        if self.block.sparsity is not None and abs(found - self.block.sparsity) > _TOLERANCE:
            raise ValueError(
                f'sparsity = {self.block.sparsity}, but "{file}" prunes {found:.2%} of what it masks; correct sparsity, or '
                "leave it out"
            )
        own = {}
        for name in shapes.keys() & masks.keys():
            if tuple(masks[name].shape) != shapes[name]:
                raise ValueError(
                    f'"{file}" has a mask of {tuple(masks[name].shape)} for {name!r} of {shapes[name]}; correct the file'
                )
            positions = positions_of(self.parameters[name], self.mesh)
            own[name] = masks[name].to(positions.device).reshape(-1)[positions.clamp(min=0)] & (positions >= 0)
        return own

    def take(self, masks: Mapping[str, Tensor]) -> None:
        """The model is pruned by these masks."""
        self.pruned, self.names = True, self.names | set(masks)
        self._frozen.take(masks)
        self._search = self.first_gradients = None

    def report(self, masks: Mapping[str, Tensor], steps: int) -> None:
        """Write what the model keeps after so many steps, if the block says where.

        Raises:
            ConfigError: the file cannot be written; the same on every rank.
        """
        file = self.block.report
        if file is None:
            return
        self._rows |= report.kept_by_all(masks, self.parameters, self._shards())
        self._together(lambda: report.write(file, steps, self._rows) if dist.get_rank() == 0 else None)

    def hold(self, steps: int, optimizer: samo.Optimizer, scale: float) -> bool:
        """Take a step's gradients for scores, if it is time; whether the step is to move no weight, the same on every rank.

        Args:
            steps: that were taken before.
            optimizer: its gradients are reduced.
            scale: by which these are multiplied.
        """
        if self.first_gradients is not None and steps >= self.block.start_step:
            self.first_gradients.take(optimizer, scale)
            return True
        if not self._regrows(steps):
            return False
        self.owed, self._regrown = False, self._together(self._regrow, steps, optimizer)
        return True

    def _regrows(self, steps: int) -> bool:
        return self.pruned and self._regrowth is not None and (self.owed or self._regrowth.due(steps))

    def watched(self, steps: int) -> set[str]:
        """The parameters whose dense gradients are wanted in the step after so many.

        Raises:
            ConfigError: they are sums over stages; the same on every rank.
        """
        if not self._regrows(steps):
            return set()
        self.owed = True
        tied = [
            name for found in _everyone(sorted(name for name in self.names if self._copies(name) > 1)) for name in found
        ]
        if tied:
            raise ConfigError(
                f"axonn.samo.regrow needs dense gradients, and {tied[0]!r} is tied over stages, where compressed ones are summed; exclude it"
            )
        return self.names

    def _regrow(self, steps: int, optimizer: samo.Optimizer) -> Masks:
        assert self._regrowth is not None
        gradients = optimizer.dense_gradients()
        masks = {name: mask for name, mask in self.masks(optimizer).items() if name in gradients}
        parameters = {name: self.parameters[name] for name in masks}
        shards, share = self._shards(), self._regrowth.share(steps)
        return samo.regrow(parameters, gradients, masks, share, shards=shards, stacks=stacks_of(self.model, shards))

    def forget(self) -> Masks:
        """The model is not pruned any more; returns masks that keep all of what was."""
        masks = {name: torch.ones_like(self.parameters[name], dtype=torch.bool) for name in self.names}
        self.pruned, self.names = False, set()
        self._frozen.forget()
        return masks

    def masks(self, optimizer: samo.Optimizer) -> Masks:
        """This rank's parts of the masks by which the model is pruned."""
        indices = {entry.name: entry.index for entry in optimizer.entries}
        found = {}
        for name in sorted(self.names):
            parameter, index = self.parameters[name], indices.get(name)
            if index is not None:
                mask = torch.zeros(parameter.numel(), dtype=torch.bool, device=parameter.device)
                mask[index.positions()] = True
                found[name] = mask.view(parameter.shape)
            elif name in indices:  # kept whole
                found[name] = torch.ones_like(parameter, dtype=torch.bool)
            else:
                found[name] = self._frozen.of(name)
        return found

    def search_state(self) -> tuple[list[tuple[str, str, Tensor]], dict[str, Any] | None]:
        """The state of the search for a ticket.

        Returns:
            This rank's parts of masks, each with its parameter's name and a key; and the rest, the same on all ranks, None where there
            is no search.
        """
        if self._search is None:
            return [], None
        state = self._search.state_dict()
        shapes = state["shapes"]
        seen = [
            (name, f"seen{number}", unpack(packed, tuple(shapes[name])))
            for number, masks in enumerate(state["recent"])
            for name, packed in masks.items()
        ]
        rest = {"sparsity": state["sparsity"], "distances": state["distances"], "seen": len(state["recent"])}
        return seen, rest

    def resume_search(self, rest: dict[str, Any] | None, read: Callable[[str], Masks]) -> None:
        """Go on with a search where `search_state` was taken, on any mesh, or begin anew.

        Args:
            rest: of `search_state`; None: there was none.
            read: this rank's parts of the masks with a key.

        Raises:
            ConfigError: it does not fit this one; the same on every rank.
        """
        recent = [read(f"seen{number}") for number in range(0 if rest is None else rest["seen"])]

        def resume() -> None:
            self._begin_search()
            if self._search is None or rest is None:
                return
            shapes = {name: list(mask.shape) for masks in recent for name, mask in masks.items()}
            packed = [{name: pack(mask) for name, mask in masks.items()} for masks in recent]
            self._search.load_state_dict({**rest, "shapes": shapes, "recent": packed, "masks": None})

        self._together(resume)


def _everyone(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
