"""Mixed precision in tiles: float32 gradients of one tile at a time (000, section 7.2).

The dissertation upcasts the gradients of a whole parameter group before the update, or of a tile of 1.8 million elements. Here
a tile's 4·tile_size bytes hold what the optimizer's arithmetic allocates, too, which for torch's Adam is twice a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from axonn_plugins.optim.gradients import check_norm, clip_factor, flat_gradient, norm_in_parts
from axonn_plugins.optim.lending import TiledStep, parts_of, require_groups, share_options
from axonn_plugins.optim.store import Entry
from axonn_plugins.optim.tiles import Buffers, ParameterCut, update
from axonn_plugins.optim.writes import Writes
from axonn_tp.comm.clipping import norm_of_all
from axonn_tp.comm.optimizer_trial import StepMemory, along, examine, make_optimizer, require_one_by_one

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
TILE = 1_800_000
"""Elements of a tile by default, the dissertation's."""


class TiledOptimizer(torch.optim.Optimizer):
    """Any element-wise torch optimizer for 16-bit parameters with float32 masters, stepping in tiles.

    A step allocates at most 4·tile_size bytes above the resident state, whatever the model's size. The result is, to the
    bit, that of the same optimizer on float32 masters whose gradients are upcast whole; with torch's fused kernels, and where
    a clipped gradient is longer than a tile, to rounding. Parameters of other types are updated in place.

    ::

        optimizer = ted_moe.TiledOptimizer(lambda groups: torch.optim.AdamW(groups, lr=1e-3), model.parameters())

    Learning-rate schedulers change `param_groups` as ever. For fp16, `torch.amp.GradScaler` takes it as it takes fused
    optimizers: ``scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()``, and ``scaler.update(128.0)`` keeps
    the scale fixed.

    Args:
        optimizer_factory: makes the torch optimizer from parameter groups.
        params: what torch's optimizers take: parameters, named ones, or groups of these; experts are as any other.
        tile_size: elements, of 4 bytes, that a step may allocate.
        max_norm: clip the gradient's norm to this.
        norm: how squared norms of the parameters' gradients, by name or number, become the square of the norm of all: for
            parameters that are shards. By default their sum, over ranks where `sync_gradients` or `axonn_tp` knows how they lie.

    Attributes:
        total_norm: the gradient's norm in the last step, before clipping; None without `max_norm`.
        overflow: whether the last step was skipped, as a GradScaler had found an overflow.

    Raises:
        ValueError: arguments that are not allowed; an optimizer that is not element-wise.
    """

    _step_supports_amp_scaling = True  # torch.amp.GradScaler then leaves unscaling to `step`
    grad_scale: Tensor | None
    found_inf: Tensor

    def __init__(
        self,
        optimizer_factory: Factory,
        params: Iterable[Any],
        tile_size: int = TILE,
        *,
        max_norm: float | None = None,
        norm: Callable[[dict[str, Tensor]], Tensor] | None = None,
    ) -> None:
        if isinstance(tile_size, bool) or not isinstance(tile_size, int) or tile_size < 1:
            raise ValueError(f"tile_size = {tile_size!r} is not a number of elements; use an integer of at least 1")
        check_norm(max_norm)
        self.tile_size, self.max_norm, self.norm = tile_size, max_norm, norm
        self.total_norm: Tensor | None = None
        self.overflow = False
        super().__init__(params, {})
        self._live: dict[Tensor, nn.Parameter] = {}
        self._writes = Writes(apart=True)
        self.inner = inner = make_optimizer(
            optimizer_factory, [self._with_masters(group) for group in self.param_groups]
        )
        require_groups(inner.param_groups, self.param_groups)
        self.defaults, self.state = inner.defaults, inner.state
        share_options(inner.param_groups, self.param_groups)
        self._memory = StepMemory(1, 1)
        for group in inner.param_groups:
            self._examine(group)
        self._note_masters()

    def _note_masters(self) -> None:
        apart = ((str(place), pair) for place, pair in enumerate(self._live.items()) if pair[0] is not pair[1])
        self._entries = [Entry(name, parameter, 0) for name, (_, parameter) in apart]
        self._writes.note(self._entries)

    def _take_written(self) -> None:
        """Take weights that a script has loaded or set since the last step."""
        if not any(self._writes.counted(entry.parameter) for entry in self._entries):
            return
        for master, parameter in self._live.items():
            if parameter.stride() != master.stride():  # tiles go by the order in memory
                same = torch.empty_like(master, dtype=parameter.dtype, device=parameter.device, requires_grad=False)
                parameter.data = same.copy_(parameter.detach())
        self.refresh_masters()
        self._writes.note(self._entries)

    def _with_masters(self, group: dict[str, Any]) -> dict[str, Any]:
        return {**group, "params": [self._master(parameter) for parameter in group["params"]]}

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if (
            1 + sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True))
            != parameter.numel()
        ):
            parameter.data = parameter.data.contiguous()  # it has holes, or is empty
        half = parameter.dtype in (torch.bfloat16, torch.float16)
        master = parameter.detach().float() if half else parameter
        self._live[master] = parameter
        return master

    def _examine(self, group: dict[str, Any]) -> None:
        weights = max(group["params"], key=Tensor.numel, default=torch.zeros(()))
        if weights.dim():
            require_one_by_one(self.inner, group)
            self._memory |= examine(self.inner, group, weights, self.inner.state.get(weights, {}))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's."""
        super().add_param_group(param_group)
        if hasattr(self, "inner"):
            self.inner.add_param_group(self._with_masters(self.param_groups[-1]))
            share_options(self.inner.param_groups, self.param_groups)
            self._examine(self.inner.param_groups[-1])
            self._note_masters()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the masters a tile at a time, and write them to the parameters; gradients stay as they are.

        Args:
            closure: computes the loss again, and the gradients.

        Returns:
            What the closure returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.overflow = bool(getattr(self, "found_inf", False))
        if not self.overflow:
            if refused := self._writes.refusal():
                raise RuntimeError(refused)
            self._take_written()
            self._step(self._factor())
            self._writes.end_step(self._entries)
        return loss

    def _step(self, factor: Tensor | None) -> None:
        share_options(self.param_groups, self.inner.param_groups)
        step = TiledStep(self.inner)
        size = self._memory.elements(self.tile_size, first=not all(self.state.get(master) for master in self._live))
        buffers = Buffers(size)
        for tile in self._tiles(size):
            update(step, tile, buffers, factor)
        step.finish()
        share_options(self.inner.param_groups, self.param_groups)

    def _tiles(self, size: int) -> Iterator[list[ParameterCut]]:
        """Parts of all parameters that have gradients, at most `size` elements together."""
        tile: list[ParameterCut] = []
        used = 0
        for number, group in enumerate(self.inner.param_groups):
            for master in group["params"]:
                parameter = self._live[master]
                if parameter.grad is None:
                    continue
                for part in parts_of(number, master, size):
                    length = part.end - part.begin
                    if used + length > size:
                        yield tile
                        tile, used = [], 0
                    tile.append(ParameterCut(part, slice(used, used + length), parameter))
                    used += length
        if tile:
            yield tile

    def _factor(self) -> Tensor | None:
        """The factor of the gradients; notes the norm."""
        scale = getattr(self, "grad_scale", None)
        factor = None if scale is None else scale.double().reciprocal().float()
        self.total_norm = None
        if self.max_norm is None:
            return factor
        norm = self._norm()
        self.total_norm = norm if factor is None else norm * factor.to(norm.device)
        clip = clip_factor(self.total_norm, self.max_norm)
        return clip if factor is None else clip * factor.to(clip.device)

    def _norm(self) -> Tensor:
        """The 2-norm of the gradient as it is, loss scale included."""
        norms: dict[str, Tensor] = {}
        by_parameter: dict[nn.Parameter, Tensor] = {}
        number = 0
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                name = group["param_names"][place] if "param_names" in group else str(number)
                number += 1
                if parameter.grad is not None:
                    norms[name] = by_parameter[parameter] = norm_in_parts(flat_gradient(parameter), self.tile_size)
        if self.norm is not None:
            return self.norm({name: norm.square() for name, norm in norms.items()}).sqrt()
        whole = norm_of_all(by_parameter, (p for group in self.param_groups for p in group["params"]))
        if whole is not None:
            return whole.to(next((norm.dtype for norm in norms.values()), torch.float32))
        device = next((p.device for group in self.param_groups for p in group["params"]), torch.device("cpu"))
        return torch.linalg.vector_norm(torch.stack([norm.to(device) for norm in norms.values()] or [torch.zeros(())]))

    def refresh_masters(self) -> None:
        """Take the masters of parameters that were changed from outside from these; masters that round to theirs stay."""
        with torch.no_grad():
            for master, parameter in self._live.items():
                if parameter is not master and not torch.equal(master.to(parameter), parameter):
                    master.copy_(parameter)

    def _masters(self) -> dict[int, Tensor]:
        masters = [master for group in self.inner.param_groups for master in group["params"]]
        return {number: master for number, master in enumerate(masters) if self._live[master] is not master}

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the untiled optimizer over the masters, and "masters", which torch's optimizers ignore, by number."""
        self._take_written()
        share_options(self.param_groups, self.inner.param_groups)
        return {**self.inner.state_dict(), "masters": self._masters()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned, or the untiled optimizer's; then masters are those that round to the parameters.

        Raises:
            ValueError: it is of other parameters.
        """
        self.inner.load_state_dict({key: value for key, value in state_dict.items() if key != "masters"})
        for master, state in self.inner.state.items():
            for key, value in state.items():
                if along(value, master) and value.stride() != master.stride():
                    state[key] = torch.empty_like(master, dtype=value.dtype, requires_grad=False).copy_(value)
        self.state = self.inner.state
        share_options(self.inner.param_groups, self.param_groups)
        if "masters" not in state_dict:
            self.refresh_masters()
            return
        with torch.no_grad():
            for number, master in self._masters().items():
                master.copy_(state_dict["masters"][number])
