"""Any element-wise torch optimizer on flat stores: mixed precision, several groups of ranks, ZeRO's stages, host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.optim.beside import look_around, no_scaler, require_plain, take_over, take_written
from axonn_plugins.optim.gathering import begin_gathers, gather_weights, land_all
from axonn_plugins.optim.gradients import check_norm, clip_factor, squares_of
from axonn_plugins.optim.lending import share_options
from axonn_plugins.optim.loss_scale import LossScale
from axonn_plugins.optim.memory import state_bytes
from axonn_plugins.optim.parameters import check_shares, named_groups
from axonn_plugins.optim.reducer import Reducer
from axonn_plugins.optim.segments import make_tiles, step_tiles
from axonn_plugins.optim.state import by_parameter, load_masters, on_index, read_state, shards_of, write_state
from axonn_plugins.optim.store import Entry, Ranks, Store, make_stores, ranks_of
from axonn_plugins.optim.tiles import Buffers
from axonn_plugins.optim.whole.find import make_inner
from axonn_plugins.optim.whole.step import WholeStep
from axonn_plugins.optim.writes import Writes
from axonn_tp import Mesh
from axonn_tp.comm.at_times import are_marked
from axonn_tp.comm.replicated import replicated_over, send_first

Factory = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
TILE = 2**18
"""Elements that one tile updates by default: their state fits into a core's cache, and calls cost little."""


class FlatOptimizer(torch.optim.Optimizer):
    """Steps any element-wise torch optimizer in tiles, on state and gradients that stand end to end.

    Gradients are taken as soon as backward has produced them, and `parameter.grad` is let go. Parameters of 16 bits have
    float32 master weights; others are updated as they are. The result is that of the torch optimizer on all ranks' mean
    gradients. `step` consumes the gradients. Learning-rate schedulers change `param_groups` as ever.

    Args:
        factory: makes an element-wise torch optimizer from parameter groups, fused ones of other libraries included.
        params: a module, an iterable of parameters or of (name, parameter), or torch's parameter groups of these.
        max_norm: clip the gradient's norm to this.
        loss_scale: "dynamic", a number or a `LossScale`: multiply the loss by `scale`; steps that are not finite are skipped.
        group: the data-parallel ranks, whose gradients are averaged while backward runs; a function gives for each parameter
            the ranks that sum its gradients, and the divisor. None: no others.
        stage: what ranks of `group` hold a share of only, as ZeRO's stages: 0 nothing; 1 master weights and optimizer state;
            2 reduced gradients, too. In stage 2 a backward pass outside `no_sync` adds to the share, and a bucket's own
            gradients are there only while backward fills it.
        host: keep master weights and optimizer state in host memory, pinned beside a GPU; a tile of it at a time visits the
            parameters' device.
        tile_size: elements updated at a time.
        bucket_bytes: gradients reduced in one call.
        skip_nonfinite: skip a step whose gradients are not finite also where the loss is not scaled.
        norm: how squared norms of the parameters' gradients, by name, become the square of the norm of all, the same on
            every rank: for parameters that are shards, or that not all ranks have. By default their sum.
        gradient_dtype: in which gradients are accumulated and reduced, where it is wider than the parameters'.
        mesh: how parameters lie on the ranks: for gradients of replicas, which are made the same on accelerators, and for optimizers that
            look at whole parameters (`optim.whole`), which are refused without.
        gather_ahead: in stage 1, gather updated weights while the next forward pass runs; whoever uses a parameter first waits for it.

    Attributes:
        overflow: whether the last step was skipped.
        total_norm: the gradient's norm in the last step, before clipping; None if neither clipping nor scaling asked for it.
        on_gradients: called in each step when gradients are reduced, before their norm is taken.
        refuses_clipping: whether a script's `clip_grad_norm_`, which finds no gradients, is refused; not where an engine clips in its place.
        superseded: a parameter whose gradients another optimizer, made later, takes; None: there is none.

    Raises:
        ValueError: arguments that are not allowed; an optimizer that cannot step parts of parameters.
    """

    def __init__(
        self,
        factory: Factory,
        params: nn.Module | Iterable[Any],
        *,
        max_norm: float | None = None,
        loss_scale: LossScale | float | str | None = None,
        group: dist.ProcessGroup | Callable[[nn.Parameter], Ranks] | None = None,
        stage: int = 0,
        host: bool = False,
        tile_size: int = TILE,
        bucket_bytes: int = 25 * 2**20,
        norm: Callable[[dict[str, Tensor]], Tensor] | None = None,
        gradient_dtype: torch.dtype | None = None,
        skip_nonfinite: bool = False,
        mesh: Mesh | None = None,
        gather_ahead: bool = False,
    ) -> None:
        check_shares(stage, group is not None, tile_size, gather_ahead)
        check_norm(max_norm)
        self.factory, self.max_norm, self.norm, self.tile_size = factory, max_norm, norm, tile_size
        self._gather = begin_gathers if gather_ahead else gather_weights
        self.stage, self.host, self.bucket_bytes, self.gradient_dtype = stage, host, bucket_bytes, gradient_dtype
        self.loss_scale, self.skip_nonfinite = LossScale.make(loss_scale), skip_nonfinite
        self.overflow, self._pruned, self.refuses_clipping, self.mesh = False, False, True, mesh
        self.total_norm: Tensor | None = None
        self.on_gradients: list[Callable[[], None]] = []
        self.superseded: str | None = None
        groups, self.names = named_groups(params)
        self.writes = Writes()
        require_plain(params, self.names, group is not None)
        super().__init__(groups, {})
        inner = self._make_inner()
        self.defaults = dict(inner.defaults)
        share_options(inner.param_groups, self.param_groups)
        self.entries: list[Entry] = []
        self._frozen: list[nn.Parameter] = []
        for number, options in enumerate(self.param_groups):
            for parameter in options["params"]:
                if parameter.requires_grad:
                    parameter.data = parameter.data.contiguous()
                    ranks, divisor = ranks_of(group, parameter)
                    alike = () if mesh is None else replicated_over(parameter, mesh)
                    self.entries.append(Entry(self.names[parameter], parameter, number, None, ranks, divisor, alike))
                else:
                    self._frozen.append(parameter)
        self._select()
        self._build(inner)
        self.refresh_masters()
        self._hooks = take_over(self)

    # Layout

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse parameters, by a ValueError, once the optimizer is made."""
        if hasattr(self, "entries"):
            raise ValueError(f"{type(self).__name__} lays out its state once: give all parameter groups to it at once")
        super().add_param_group(param_group)

    def _make_inner(self) -> torch.optim.Optimizer:
        inner, self.rules = make_inner(self.factory, self.param_groups, self.mesh)
        return inner

    def _select(self) -> None:
        """Give entries the indices of the elements that are kept."""

    def _build(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        own = self.rules if self._pruned else ()
        self.stores = make_stores(self.entries, self.bucket_bytes, self.stage, self.host, self.gradient_dtype, own)
        self.reducer = Reducer(self.stores, self._pruned, self.writes.refusal)
        if self.mesh is not None and self.mesh.size("z") > 1:
            self.reducer.active = not are_marked(entry.parameter for entry in self.entries)
        self.tiles = [tile for store in self.stores for tile in make_tiles(store, self.tile_size, self.rules)]
        self.buffers = Buffers(max((tile.end - tile.begin for tile in self.tiles), default=0))
        self._whole = None
        if self.rules and self.mesh is not None:
            self._whole = WholeStep(self.stores, self.rules, inner.param_groups, self.mesh, self.bucket_bytes)

    @torch.no_grad()
    def refresh_masters(self) -> None:
        """Take the master weights of parameters that were changed from outside from these; those that round to theirs stay."""
        load_masters(self.stores, self.tile_size)
        self.writes.note(self.entries)

    def _written(self, entries: list[Entry]) -> None:
        """Somebody else has changed these parameters since the last step."""
        self.refresh_masters()

    # Backward

    @torch.no_grad()
    def _take(self, entry: Entry) -> None:
        gradient, entry.parameter.grad = entry.parameter.grad, None
        if gradient is None:
            return
        if gradient.layout != torch.strided:
            raise ValueError(
                f"{entry.name!r} has a {gradient.layout} gradient; make its layer give dense ones (Embedding(sparse=False))"
            )
        into, flat = self.reducer.place(entry), gradient.contiguous().view(-1)
        if not self._compress(entry, flat, into):
            for begin in range(0, entry.kept, self.tile_size):
                part = into[begin : begin + self.tile_size]
                values = entry.read(flat, begin, begin + part.numel())
                part.add_(values) if entry.filled else part.copy_(values)
        self.reducer.written(entry)

    def _compress(self, entry: Entry, gradient: Tensor, into: Tensor) -> bool:
        """Put a flattened gradient's kept elements into their place, or add them, by a kernel; False: nothing done."""
        return False

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes in the ``with`` block only accumulate."""
        return self.reducer.no_sync()

    @property
    def _step_supports_amp_scaling(self) -> bool:
        raise no_scaler()  # which GradScaler.step asks for

    def scale(self, loss: Tensor) -> Tensor:
        """The loss to call backward on."""
        return loss if self.loss_scale is None else loss * self.loss_scale.scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients that no step has consumed, those of frozen parameters too."""
        self.reducer.forget()
        super().zero_grad()

    @torch.no_grad()
    def gradient_of(self, parameter: nn.Parameter) -> Tensor:
        """A parameter's gradient of the coming step, as a vector of its kept elements, zeros where none has come.

        It is this rank's own as long as backward passes only accumulate (`no_sync`, or ``reducer.active = False``), and then
        the same in all stages: weights tied over ranks can be summed in place here, and `step` reduces the sums. Once the
        gradient is reduced it is that of all ranks. Changed in place it is what counts.

        Raises:
            RuntimeError: it is reduced, and ranks have a share of it each.
        """
        return self.reducer.gradient_of(next(entry for entry in self.entries if entry.parameter is parameter))

    def reduced(self) -> Iterator[tuple[Entry, int, Tensor]]:
        """The reduced gradients that this rank has, loss scale included, while `on_gradients` is called; changed in place they count.

        Yields:
            A parameter's entry, the number of the first of its kept elements, and consecutive ones' gradients.
        """
        for store in self.stores:
            for segment in store.segments:
                if segment.entry.arrived:
                    part = store.gradient[segment.gradient : segment.gradient + segment.length]
                    yield segment.entry, segment.begin, part

    def release(self) -> None:
        """Take no more gradients: another optimizer may have the parameters."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the kept elements, a tile at a time.

        Args:
            closure: computes the loss anew, and its gradients.

        Returns:
            What the closure returned.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        land_all(self.stores)
        look_around(self)
        self.reducer.finish()
        if self.mesh is not None:
            send_first(((entry.parameter, part) for entry, _, part in self.reduced()), self.mesh)
        for change in self.on_gradients:
            change()
        factor = self._factor()
        if not self.overflow:
            self._update(factor)
        self.writes.end_step(self.entries)
        if self.stage and not self.overflow:
            self._gather(self.stores, self.tile_size, self.writes.note)
        self.reducer.forget()
        return loss

    def _update(self, factor: Tensor | None) -> None:
        share_options(self.param_groups, self.inner.param_groups)
        if self._whole is not None:
            self._whole.step(self.inner, factor)
        done = self._step_by_kernels(factor)
        rest = [tile for tile in self.tiles if tile.store not in done]
        if rest:
            step_tiles(self.inner, rest, self.buffers, factor)
        share_options(self.inner.param_groups, self.param_groups)

    def _step_by_kernels(self, factor: Tensor | None) -> list[Store]:
        """Step where a kernel knows how; the stores that are done."""
        return []

    def _factor(self) -> Tensor | None:
        """The factor of the gradients; notes overflow and norm."""
        self.overflow, self.total_norm = False, None
        if self.max_norm is None and self.loss_scale is None and not self.skip_nonfinite:
            return None
        scale = 1.0 if self.loss_scale is None else self.loss_scale.scale
        norm = self._norm() / scale
        if self.loss_scale is not None or self.skip_nonfinite:
            self.overflow = not bool(torch.isfinite(norm))
        if self.loss_scale is not None:
            self.loss_scale.update(self.overflow)
        self.total_norm = norm
        factor = torch.full_like(norm, 1.0 / scale)
        return factor if self.max_norm is None else factor * clip_factor(norm, self.max_norm)

    def _norm(self) -> Tensor:
        """The 2-norm of the averaged gradient, in float32 at least."""
        squares = squares_of(self.stores, self.tile_size)
        if self.norm is not None:
            return self.norm(squares).sqrt()
        device = self.entries[0].parameter.device if self.entries else torch.device("cpu")
        return sum((square.to(device) for square in squares.values()), torch.zeros((), device=device)).sqrt()

    # State

    @property
    def nbytes(self) -> int:
        """Bytes of the state that this rank holds, dense parameters included, the tile's buffers not."""
        return state_bytes(self.stores, self.inner.state)

    def state_dict(self, device: torch.device | None = None) -> dict[str, Any]:
        """Compressed state of all parameters, on every rank; in stages 1 and 2 every rank calls it.

        Args:
            device: where it goes, a bucket at a time; None: where it is.

        Returns:
            "state": by the parameter's number: "positions" (absent where all are kept), "master" for 16-bit parameters, and
            the inner optimizer's; "param_groups" as torch's; "loss_scale"; "shards" where weights are split, see `shards_of`.
        """
        take_written(self)
        numbers = {parameter: number for number, parameter in enumerate(self._parameters)}
        read = read_state(self.stores, self.inner.state, device).items()
        state = dict(sorted((numbers[entry.parameter], values) for entry, values in read))
        scale = None if self.loss_scale is None else self.loss_scale.state_dict()
        return {**super().state_dict(), "state": state, "loss_scale": scale, **shards_of(self.entries, self.mesh)}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up what `state_dict` returned, of any number of ranks and stage, pruned otherwise or dense.

        A torch optimizer's state_dict of the dense model is taken, too: what is pruned here is dropped.

        Raises:
            ValueError: it is of other parameters, or of another rank's shards of them.
        """
        state, given = by_parameter(
            state_dict, self._parameters, len(self.param_groups), shards_of(self.entries, self.mesh)
        )
        read = {entry: on_index(entry, state[entry.parameter], self.inner) for entry in self.entries}
        for ours, group in zip(self.param_groups, given, strict=True):
            ours.update({key: value for key, value in group.items() if key not in ("params", "param_names")})
        if self.loss_scale is not None and state_dict.get("loss_scale"):
            self.loss_scale.load_state_dict(state_dict["loss_scale"])
        write_state(self.stores, self.inner, read, self.tile_size)
        if self._whole is not None:
            self._whole.take_up(read)

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for group in self.param_groups for parameter in group["params"]]
