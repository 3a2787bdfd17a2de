"""The optimizer of a pruned network: any element-wise torch optimizer on compressed state (000, section 4.1)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.optim.alike import require_alike
from axonn_plugins.optim.beside import take_written
from axonn_plugins.optim.flat import Factory, FlatOptimizer
from axonn_plugins.optim.index import Index
from axonn_plugins.optim.move import Layout, move
from axonn_plugins.optim.store import Entry, Store
from axonn_tp.comm.replicated import send_first
from samo import fused
from samo.mask_file import masks_within
from samo.native import native_step, plain
from samo.parameters import check_masks
from samo.reparametrised import absorb


class Optimizer(FlatOptimizer):
    """Trains a pruned network with the state of its kept elements only.

    The model computes with dense parameters in which pruned elements are zero. Gradients are compressed as soon as backward
    has produced them, and `parameter.grad` is let go; master weights (for bf16 and fp16 parameters) and the optimizer's
    state exist for kept elements only. For Adam: 2φ + 16fφ bytes in 16 bits, 4φ + 14fφ in 32 (φ parameters, f kept).
    The result is that of the same optimizer on masked dense tensors.

    ::

        masks = samo.magnitude(model, sparsity=0.9)
        optimizer = samo.Optimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True), model, masks)

    Args:
        factory: see `FlatOptimizer`.
        params: see `FlatOptimizer`.
        masks: by parameter name, true where an element is kept; what is not named is kept whole. Names are those of the
            module, or the numbers of the parameters in their order. A state_dict of torch.nn.utils.prune is taken, too.
            None: nothing is pruned yet (`prune`), or ever. A module that carries torch.nn.utils.prune's reparametrisations is taken
            as pruned by them, and loses them (`samo.absorb`).
        kernels: compress and step by Triton's kernels on CUDA, and step by a compiled loop on a CPU, where these know the
            inner optimizer and state is not in host memory. They differ from torch in rounding only.
        options: the other arguments of `FlatOptimizer`: max_norm, loss_scale, group, stage, host, tile_size (of kept
            elements), bucket_bytes, gradient_dtype and norm.

    Attributes:
        holds: called with the loss scale in each step whose reduced gradients are finite; true: it moves no weight and counts as
            skipped, the same on all ranks.

    Raises:
        ValueError: see `FlatOptimizer`; masks of unknown parameters or of other shapes.
    """

    takes_masks = True
    """True if a compressed state that is loaded says what is pruned, where nothing is."""

    def __init__(
        self,
        factory: Factory,
        params: nn.Module | Iterable[Any],
        masks: Mapping[str, Tensor] | None = None,
        *,
        kernels: bool = True,
        **options: Any,
    ) -> None:
        if isinstance(params, nn.Module):
            masks = absorb(params) | dict(masks or {})
        self.kernels, self._masks = kernels, masks or {}
        self.holds: list[Callable[[float], bool]] = []
        self._watched: dict[str, Tensor | None] = {}
        super().__init__(factory, params, **options)

    def _select(self) -> None:
        self._apply(self._masks)
        self._masks = {}

    def _apply(self, masks: Mapping[str, Tensor]) -> None:
        """Give entries the indices of masks, and set what they prune to zero."""
        parameters = {self.names[p]: p for group in self.param_groups for p in group["params"]}
        masks = masks_within(masks)
        check_masks(masks, parameters)
        self._pruned = self._pruned or bool(masks)
        with torch.no_grad():
            for name, mask in masks.items():
                parameters[name].masked_fill_(~mask.to(parameters[name].device), 0)
        for entry in self.entries:
            if entry.name in masks:
                mask = masks[entry.name].to(entry.parameter.device)
                entry.index = None if bool(mask.all()) else Index.from_mask(mask)

    def _build(self, inner: torch.optim.Optimizer) -> None:
        super()._build(inner)
        self._plans: dict[Store, fused.Plan] = {}
        interpreted = any(fused.runs(store.gradient) for store in self.stores)
        self._native = native_step(inner, self.stores) if self.kernels and not interpreted else None

    def prune(self, masks: Mapping[str, Tensor]) -> None:
        """Prune from now on, or further: state of what is kept stays.

        Args:
            masks: see the class. What is kept now but was not before begins with zeros. Where ranks share states every rank calls it;
                elements that another rank holds from now on travel, and no others.

        Raises:
            ValueError: see the class; ranks that sum gradients are given other masks.
            RuntimeError: there are gradients that no step has consumed, of other kept elements.
        """
        if any(entry.filled or entry.arrived for entry in self.entries):
            raise RuntimeError(
                "there are gradients that no step has consumed, of what was kept before; prune behind a step, or call zero_grad first"
            )
        take_written(self)
        inner, whole = self.inner, self._whole
        before = Layout(self.stores, inner.state)
        self._apply(masks)
        require_alike(self.entries)
        before.forget_gradients()
        inner.state.clear()
        self._build(inner)
        self.refresh_masters()
        move(before, self.stores, inner)
        if self._whole is not None and whole is not None:
            self._whole.go_on_from(whole)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `FlatOptimizer`. Where nothing is pruned yet, what the state was pruned by is taken, too, so that zeros stay.

        Raises:
            ValueError: see there.
            RuntimeError: see `prune`.
        """
        if self.takes_masks and all(entry.index is None for entry in self.entries):
            masks = self._masks_in(state_dict)
            if masks:
                self.prune(masks)
        super().load_state_dict(state_dict)

    def _masks_in(self, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
        """Masks by which the parameters of a compressed state were pruned."""
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        masks = {}
        for number, parameter in zip(numbers, self._parameters, strict=False):
            positions = state_dict["state"].get(number, {}).get("positions")
            if positions is not None:
                mask = torch.zeros(parameter.numel(), dtype=torch.bool, device=parameter.device)
                mask[positions.long().to(mask.device)] = True
                masks[self.names[parameter]] = mask.view(parameter.shape)
        return masks

    def _written(self, entries: list[Entry]) -> None:
        changed = [entry for entry in entries if entry.index is not None and _masked(entry)]
        if changed:
            warnings.warn(
                f"samo: what is pruned of {changed[0].name!r} was written since the last step, as by load_state_dict, and is zero "
                "again; load weights before the optimizer is made",
                stacklevel=4,
            )
        super()._written(entries)

    # Dense gradients

    def watch(self, names: Iterable[str]) -> None:
        """Keep dense gradients of these parameters, by name, of backward passes from now on; of no others."""
        self._watched = dict.fromkeys(names)

    def dense_gradients(self) -> dict[str, Tensor]:
        """Gradients of the watched parameters, summed over ranks and times the loss scale; every rank calls it."""
        found = {}
        for entry in self.entries:
            if entry.name in self._watched:
                gradient = self._watched[entry.name]
                wide = torch.promote_types(entry.parameter.dtype, torch.float32)
                gradient = torch.zeros_like(entry.parameter, dtype=wide) if gradient is None else gradient
                if entry.process_group is not None:
                    dist.all_reduce(gradient, group=entry.process_group)
                found[entry.name] = gradient / entry.divisor
        self._watched = dict.fromkeys(self._watched)
        if self.mesh is not None:
            parameters = {entry.name: entry.parameter for entry in self.entries}
            send_first(((parameters[name], gradient) for name, gradient in found.items()), self.mesh)
        return found

    def _take(self, entry: Entry) -> None:
        gradient = entry.parameter.grad
        if gradient is not None and entry.name in self._watched:
            before, wide = self._watched[entry.name], torch.promote_types(gradient.dtype, torch.float32)
            self._watched[entry.name] = gradient.to(wide, copy=True) if before is None else before + gradient
        super()._take(entry)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that no step has consumed, those of frozen parameters and dense ones too."""
        self._watched = dict.fromkeys(self._watched)
        super().zero_grad(set_to_none)

    def _factor(self) -> Tensor | None:
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        factor = super()._factor()
        self.overflow = self.overflow or any([hold(scale) for hold in self.holds])
        return factor

    def _compress(self, entry: Entry, gradient: Tensor, into: Tensor) -> bool:
        if self.kernels and fused.compress(entry, gradient, into):
            return True
        return self._native is not None and self._native.compress(entry, gradient, into)

    def _step_by_kernels(self, factor: Tensor | None) -> list[Store]:
        if self._native is not None and plain(self.inner):
            self._native.step(1.0 if factor is None else float(factor))
            return self.stores
        return [s for s in self.stores if self.kernels and fused.adam(self.inner, s, self._plans, factor)]


def _masked(entry: Entry) -> bool:
    """Set what an entry's index prunes to zero; true if something was not."""
    kept = entry.read(entry.flat, 0, entry.kept).clone()
    before = entry.flat.count_nonzero()
    entry.flat.zero_()
    entry.write(kept, 0)
    return bool(before != kept.count_nonzero())
