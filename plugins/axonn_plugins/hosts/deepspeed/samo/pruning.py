"""When a model under the engine is pruned, and by which masks; rank 0 makes them, all ranks get its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from axonn_plugins.config import ConfigError
from axonn_plugins.config.samo import EarlyBird, Samo
from samo.mask_file import pack, unpack
from samo.targets import targets

Masks = dict[str, Tensor]
_TOLERANCE = 0.01


class Pruning:
    """The block's pruner at work.

    Args:
        block: the block.
        module: the model.
        trained: the parameters that the optimizer has; others are not pruned.
        device: on which collectives run.

    Attributes:
        pruned: whether the model is.
        names: of the parameters that are.

    Raises:
        ConfigError: the same on every rank: the masks' file or the patterns do not fit the model.
    """

    def __init__(self, block: Samo, module: nn.Module, trained: set[nn.Parameter], device: torch.device) -> None:
        self.block, self.module, self.device = block, module, device
        self.pruned = False
        self.names: set[str] = set()
        self._targets: Masks = {}
        self._search: samo.EarlyBird | None = None
        self._from_first(self._prepare, trained)

    def _prepare(self, trained: set[nn.Parameter]) -> None:
        block = self.block
        if block.mask is not None:
            self._read()
            return
        found = targets(self.module, block.include, block.exclude)
        self._targets = {name: parameter for name, parameter in found.items() if parameter in trained}
        if not self._targets:
            raise ValueError("include and exclude leave no parameter to prune; correct the patterns")
        self._begin_search()

    def _begin_search(self) -> None:
        settings = self.block.search
        if settings is not None:
            self._search = self._search_for(settings)

    def _search_for(self, settings: EarlyBird) -> samo.EarlyBird:
        assert self.block.sparsity is not None
        return samo.EarlyBird(
            self._targets.items(), self.block.sparsity, settings.window, settings.epsilon, self.block.scope
        )

    def first(self) -> Masks | None:
        """The masks, where the model is pruned before the first step."""
        return self.after(0)

    def after(self, steps: int) -> Masks | None:
        """The masks, if it is time to prune after so many optimizer steps; every rank calls it.

        Raises:
            ConfigError: the weights are NaN; the same on every rank.
        """
        dense = steps - self.block.start_step
        if self.pruned or dense < 0:
            return None
        if self.block.search is None:
            return self._shared(self._make)
        return self._shared(self._observe) if dense and dense % self.block.search.interval == 0 else None

    def _make(self) -> Masks:
        if self.block.mask is not None:
            return self._read()
        assert self.block.sparsity is not None
        return samo.magnitude(self._targets.items(), self.block.sparsity, self.block.scope)

    def _observe(self) -> Masks | None:
        assert self._search is not None
        return self._search.masks if self._search.observe() else None

    def _read(self) -> Masks:
        assert self.block.mask is not None
        masks, own = self._from_file(self.block.mask)
        size = sum(mask.numel() for mask in masks.values())
        found = 1 - sum(int(mask.sum()) for mask in masks.values()) / max(size, 1)
        if self.block.sparsity is not None and abs(found - self.block.sparsity) > _TOLERANCE:
            raise ValueError(
                f'sparsity = {self.block.sparsity}, but "{self.block.mask}" prunes {found:.2%} of what it masks; correct sparsity, or '
                "leave it out"
            )
        return own

    def _from_file(self, file: str) -> tuple[Masks, Masks]:
        """All masks of the file, and those of this rank's parameters."""
        masks = samo.read_masks(file, self.module)
        return masks, masks

    def _from_first(self, work: Callable[..., Any], *inputs: Any) -> Any:
        """Do work on rank 0 alone.

        Raises:
            ConfigError: it raised ValueError; the same on every rank.
        """
        problem: list[str | None] = [None]
        result = None
        if dist.get_rank() == 0:
            try:
                result = work(*inputs)
            except ValueError as error:
                problem = [str(error)]
        dist.broadcast_object_list(problem, src=0, device=self.device)
        if problem[0] is not None:
            raise ConfigError(f"axonn.samo: {problem[0]}")
        return result

    def _shared(self, work: Callable[[], Masks | None]) -> Masks | None:
        """The masks that work on rank 0 gives, on every rank."""
        masks = self._from_first(work)
        shapes = [None if masks is None else {name: tuple(mask.shape) for name, mask in masks.items()}]
        dist.broadcast_object_list(shapes, src=0, device=self.device)
        if shapes[0] is None:
            return None
        found = {}
        for name, shape in shapes[0].items():
            numel = torch.Size(shape).numel()
            packed = torch.empty(-(-numel // 8), dtype=torch.uint8, device=self.device)
            if masks is not None:
                packed.copy_(pack(masks[name]))
            dist.broadcast(packed, src=0)
            found[name] = unpack(packed, shape)
        return found

    def take(self, masks: Mapping[str, Tensor]) -> None:
        """The model is pruned by these masks."""
        self.pruned, self.names = True, set(masks)
        self._search = None

    def state_dict(self, optimizer: samo.Optimizer) -> dict[str, Any]:
        """Masks with eight elements a byte, and the search, of rank 0; no other rank knows the search."""
        indices = {entry.name: entry.index for entry in optimizer.entries}
        parameters = dict(self.module.named_parameters())
        masks, shapes = {}, {}
        for name in sorted(self.names):
            parameter, index = parameters[name], indices.get(name)
            if index is not None:
                mask = torch.zeros(parameter.numel(), dtype=torch.bool)
                mask[index.positions().cpu()] = True
            else:
                # Kept whole, or frozen: then what is zero stays so.
                mask = torch.ones(parameter.numel(), dtype=torch.bool) if name in indices else parameter.detach() != 0
            masks[name], shapes[name] = pack(mask), list(parameter.shape)
        search = None if self._search is None else self._search.state_dict()
        return {"pruned": self.pruned, "masks": masks, "shapes": shapes, "search": search}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> Masks:
        """Go on where `state_dict` was taken; None: a dense run.

        Returns:
            The masks by which the model is to be pruned now, of all parameters that were or are.

        Raises:
            ConfigError: the search does not fit this one; the same on every rank.
        """
        parameters = dict(self.module.named_parameters())
        masks = {name: torch.ones(parameters[name].shape, dtype=torch.bool) for name in self.names}
        self.pruned, self.names = False, set()
        if state is not None and state["pruned"]:
            own = {name: unpack(packed, tuple(state["shapes"][name])) for name, packed in state["masks"].items()}
            self.take(own)
            return masks | own
        self._from_first(self._resume, None if state is None else state["search"])
        return masks

    def _resume(self, search: dict[str, Any] | None) -> None:
        self._begin_search()
        if self._search is not None and search is not None:
            self._search.load_state_dict(search)
