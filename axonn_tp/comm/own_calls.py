"""Calls of torch's that a script makes itself on a split model's parameters: loss scales, optimizers and their state dicts, first values.

Norms are in `axonn_tp.comm.clipping`.

torch would do them on this rank's shards alone: an overflow that differs between ranks brings replicas apart, and a file that one rank
writes would have its shards and no others'. From the first `axonn_tp.parallelize` on they are about whole parameters; every rank makes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from axonn_tp.comm.clipping import measure_alike, owner_of
from axonn_tp.comm.grad_scaler import GradScaler, agreed
from axonn_tp.comm.meeting import meet
from axonn_tp.comm.optimizer_kinds import looks_at_whole_matrices
from axonn_tp.comm.summed import look_at_sums
from axonn_tp.grid.layout import layout_of
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.exports import in_shards, whole_tensor

_meshes = WeakTensorKeyDictionary()
_known: WeakSet[Optimizer] = WeakSet()
_taken: list[bool] = []
_DRAWN = (
    *("_no_grad_uniform_", "_no_grad_normal_", "_no_grad_trunc_normal_", "_calculate_fan_in_and_fan_out"),
    *("orthogonal_", "eye_", "dirac_", "sparse_"),
)
"""Functions that torch.nn.init's call, so that a script's import of these may come before, and some of these themselves."""
_FSDP = (
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam", "fully_shard"),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "FullyShardedDataParallel"),
)
_refusing_kinds: list[type] = []
_SAVE = "axonn_tp.checkpoint.save writes each rank's part"


def know(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """From now on these split parameters are known.

    Args:
        parameters: with layouts.
        mesh: that they lie on.
    """
    for parameter in parameters:
        layout = layout_of(parameter)
        if not layout.home and any(mesh.size(axis) > 1 for axis in layout.axes):
            _meshes[parameter] = mesh


def know_copies(originals: Mapping[str, Any], copies: Mapping[str, Any]) -> None:
    """Parameters of a layer's copy, or that took the places of its own, are known where those are."""
    for name, copy in copies.items():
        if copy is not None and originals[name] is not None:
            measure_alike(originals[name], copy)
            if originals[name] in _meshes:
                know([copy], _meshes[originals[name]])


def take_over() -> None:
    """Have torch's scaler, optimizers and initialisers know split parameters; harmless when called again."""
    for where, name, called in _FSDP:  # as far as a script has imported them
        kind = getattr(sys.modules.get(where), name, None)
        if kind is not None and kind not in _refusing_kinds:
            _refusing_kinds.append(kind)
            kind.__init__ = _refusing(
                kind.__init__,
                called,
                "share one rank's shards out among all",
                "z is its counterpart: give gz, and leave it out",
            )
    if _taken:
        return
    _taken.append(True)
    torch.amp.GradScaler._unscale_grads_ = _unscaling(torch.amp.GradScaler._unscale_grads_)  # type: ignore[method-assign]
    register_optimizer_step_pre_hook(_before_step)  # type: ignore[arg-type]
    for name in _DRAWN:
        setattr(torch.nn.init, name, _of_whole(getattr(torch.nn.init, name)))
    DistributedDataParallel.__init__ = _refusing(  # type: ignore[method-assign]
        DistributedDataParallel.__init__,
        "DistributedDataParallel",
        "send one rank's shards to all and take the mean of gradients of different shards",
        "call axonn_tp.sync_gradients after backward, or GradientReducer, in its place",
    )


def _mesh_of(parameters: Iterable[Any]) -> Mesh | None:
    return next((_meshes[one] for one in parameters if isinstance(one, Tensor) and one in _meshes), None)


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _of_whole(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def initialise(tensor: Any, *args: Any, **keywords: Any) -> Any:
        if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta and tensor.numel():
            place = tensor.data_ptr()
            if any(parameter.data_ptr() == place for parameter in _meshes):
                raise ValueError(
                    "torch.nn.init would draw this rank's shard of a weight that is split, by the shard's shape and with the numbers of other shards; "
                    "initialise the model before it is split, or make it on the meta device, where parallelize calls reset_parameters"
                )
        return original(tensor, *args, **keywords)

    return initialise


def _refusing(original: Callable[..., None], name: str, would: str, remedy: str) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, module: nn.Module | nn.Parameter, *args: Any, **keywords: Any) -> None:  # noqa: N807
        if _mesh_of(module.parameters() if isinstance(module, nn.Module) else [module]) is not None:
            raise ValueError(f"{name} was given a model that is split already, and would {would}; {remedy}")
        original(self, module, *args, **keywords)

    return __init__


def _unscaling(original: Callable[..., dict[torch.device, Tensor]]) -> Callable[..., dict[torch.device, Tensor]]:
    @wraps(original)
    def _unscale_grads_(
        self: Any, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = original(self, optimizer, inv_scale, found_inf, allow_fp16)
        mesh = None if isinstance(self, GradScaler) else _mesh_of(_parameters(optimizer))
        return found if mesh is None else agreed(found or {found_inf.device: found_inf}, mesh)

    return _unscale_grads_


def _before_step(
    optimizer: Optimizer, given: tuple[Any, ...] = (), named: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """An optimizer steps; the first time with split parameters it is looked at, and its state dicts are whole from then on.

    Raises:
        ValueError: what it does to one weight depends on others of its matrix, or gradients are not summed.
    """
    if torch._C._current_graph_task_id() != -1:
        _refuse_in_backward(optimizer)
    if any(kind.__module__.startswith(("axonn_plugins.", "samo.", "ted_moe.")) for kind in type(optimizer).__mro__):
        return
    look_at_sums(optimizer, given, named)
    if optimizer in _known:
        return
    parameters = _parameters(optimizer)
    mesh = _mesh_of(parameters)
    if mesh is None:
        return
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__):
        raise ValueError(
            "ZeroRedundancyOptimizer sends each parameter from one rank to all, and those of a split model are shards, others on each rank; use the optimizer "
            "itself, or axonn_plugins.hosts.plain.compose with stage = 1"
        )
    if looks_at_whole_matrices(optimizer):
        raise ValueError(
            f"the optimizer {type(optimizer).__name__} looks at whole weight matrices, of which a rank has shards, and would step each rank's in another "
            "way; use an element-wise one such as AdamW, or axonn_plugins.hosts.plain.compose, which gives it whole ones"
        )
    _refuse_decay_by_dims(optimizer)
    _known.add(optimizer)
    for parameter in parameters:
        held = optimizer.state.get(parameter, {})
        held.update(_own(held, parameter, sure=False))
    optimizer.register_state_dict_post_hook(_give_whole)
    optimizer.register_load_state_dict_pre_hook(_take_own)


def _refuse_decay_by_dims(optimizer: Optimizer) -> None:
    """Refuse groups that take flat shards for vectors, as scripts do that decay what has two dims and more.

    Raises:
        ValueError: all shards along z are decayed as all vectors are, and less than some others.
    """
    known = [group for group in optimizer.param_groups if isinstance(group.get("weight_decay"), int | float)]
    groups: list[tuple[float, list[Tensor]]] = [(group["weight_decay"], group["params"]) for group in known]
    dims = [(decay, p.dim(), len(layout_of(p).serial_shape)) for decay, parameters in groups for p in parameters]
    flat = {decay for decay, own, serial in dims if own <= 1 < serial}
    vectors = {decay for decay, _, serial in dims if serial <= 1}
    if len(flat) != 1 or not vectors <= flat:
        return
    (least,) = flat
    most = max(decay for decay, _ in groups)
    if most > least and all(own > 1 for decay, own, _ in dims if decay != least):
        raise ValueError(
            f"{type(optimizer).__name__} has weight_decay = {least} for all weights that are split along z, as for biases, and {most} for others: shards "
            "along z are flat, and groups by p.dim() or p.ndim take them for vectors; make the groups before axonn_tp.parallelize, or by "
            "len(axonn_tp.layout_of(p).serial_shape)"
        )


def _refuse_in_backward(optimizer: Optimizer) -> None:
    """Refuse steps by gradients of this rank's samples alone.

    Raises:
        ValueError: ranks read different samples.
    """
    for parameter in _parameters(optimizer):
        mesh = owner_of(parameter)
        if isinstance(mesh, Mesh) and (mesh.grid.batch > 1 or layout_of(parameter).partial):
            raise ValueError(
                f"{type(optimizer).__name__} steps while backward runs, as in register_post_accumulate_grad_hook, by gradients that are not summed over the "
                "ranks that read other samples; step behind axonn_tp.sync_gradients, or GradientReducer.finish()"
            )


def _own(values: Mapping[str, Any], parameter: Tensor, sure: bool) -> dict[str, Any]:
    """States of a parameter, those of the serial one's shape cut to this rank's part; `sure`: they are whole where a padded shard has that shape, too."""
    layout, mesh = layout_of(parameter), _meshes.get(parameter)
    shape = torch.Size(layout.serial_shape)
    if mesh is None or (parameter.shape == shape and not sure):
        return dict(values)
    return {
        key: layout.shard(value, mesh.grid, mesh.coordinates)
        if isinstance(value, Tensor) and value.shape == shape
        else value
        for key, value in values.items()
    }


@torch.no_grad()
def _give_whole(optimizer: Optimizer, held: dict[str, Any]) -> dict[str, Any] | None:
    """Whole states in the place of shards, as a split model's `state_dict` gives whole weights.

    Raises:
        ValueError: not all ranks call it, or a state is neither of its parameter's shape nor one number.
    """
    parameters = _parameters(optimizer)
    mesh = _mesh_of(parameters)
    if in_shards() or mesh is None:
        return None
    meet(mesh.group("grid"), "state_dict() of an optimizer of split parameters", _SAVE)
    state = dict(held["state"])
    for number, parameter in enumerate(parameters):
        layout = layout_of(parameter)
        if number not in state or parameter not in _meshes:
            continue
        state[number] = dict(state[number])
        for key, value in sorted(state[number].items()):
            if not isinstance(value, Tensor) or not value.dim():
                continue
            if value.shape != parameter.shape:
                raise ValueError(
                    f"{type(optimizer).__name__} keeps a state {key} of shape {tuple(value.shape)} for a parameter whose shard has shape "
                    f"{tuple(parameter.shape)}, and nobody could make it whole; use an element-wise optimizer such as AdamW"
                )
            state[number][key] = whole_tensor(value, layout, _meshes[parameter]).cpu()
    return {**held, "state": state}


def _take_own(optimizer: Optimizer, given: dict[str, Any]) -> dict[str, Any] | None:
    """This rank's parts of whole states."""
    if in_shards():
        return None
    named = dict(enumerate(_parameters(optimizer)))
    state = {
        number: _own(values, named[number], sure=True) if number in named and isinstance(values, Mapping) else values
        for number, values in given["state"].items()
    }
    return {**given, "state": state}
