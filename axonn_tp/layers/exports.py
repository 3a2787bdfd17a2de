"""State dicts of split layers: `state_dict` gives and `load_state_dict` takes whole tensors, as the serial model's, never shards.

`state_dict` gathers them, so that every rank calls it; each gets them all, on the CPU. `load_state_dict` communicates nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_tp.comm.collectives import whole_parameter
from axonn_tp.comm.meeting import meet
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import Mesh

_OTHER_WAYS = "axonn_tp.checkpoint.export_safetensors keeps the whole on rank 0 alone"
_as_shards: ContextVar[bool] = ContextVar("axonn_as_shards", default=False)


@contextmanager
def as_shards() -> Iterator[None]:
    """Inside, `state_dict` gives and `load_state_dict` takes this rank's shards: for files that a grid writes and reads itself."""
    token = _as_shards.set(True)
    try:
        yield
    finally:
        _as_shards.reset(token)


def in_shards() -> bool:
    """True within `as_shards`."""
    return _as_shards.get()


class _Call(threading.local):
    """The `state_dict` call that this thread is in: where it collects, and what it gathered, by parameter."""

    destination: Any = staticmethod(lambda: None)
    wholes: Any = None


_call = _Call()
_handed: WeakKeyDictionary[nn.Module, dict[str, tuple[str, Tensor, int]]] = WeakKeyDictionary()
"""Copies that `state_dict` gave: of a layer's parameters the key, what counts the changes of the copy, and their number then."""


@torch.no_grad()
def whole_tensor(shard: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The serial tensor, in memory of its own; the ranks of x, y and z call it together."""
    return whole_parameter(shard.detach(), layout, mesh).clone(memory_format=torch.contiguous_format)


def give_whole(
    module: nn.Module, layouts: Mapping[str, Layout], mesh: Mesh, destination: dict[str, Any], prefix: str, keep: bool
) -> None:
    """Put whole tensors where `state_dict` has collected a layer's shards.

    Args:
        module: the layer.
        layouts: of its own parameters.
        mesh: its mesh.
        destination: what is collected.
        prefix: of the layer's names there.
        keep: whether parameters themselves were asked for.

    Raises:
        ValueError: they were, or not all ranks call it.
    """
    wholes = None
    for name, shard in module._parameters.items():
        layout = layouts.get(name)
        if shard is None or layout is None or not (layout.axes or layout.transposed):
            continue
        if keep:
            raise ValueError(
                f"state_dict(keep_vars=True) would hand out this rank's shard of {prefix}{name}; leave keep_vars out for whole tensors, or take "
                "the shards from named_parameters()"
            )
        wholes = wholes_of(destination, mesh) if wholes is None else wholes
        _refuse_changed(module, name)
        # Layers that share a parameter share what is made of it.
        whole = wholes.get(id(shard))
        if whole is None:
            whole = wholes[id(shard)] = whole_tensor(shard, layout, mesh).cpu()
            _note(module, name, f"{prefix}{name}", whole)
        destination[f"{prefix}{name}"] = whole


def _note(module: nn.Module, name: str, key: str, whole: Tensor) -> None:
    """Note that a script was given a copy of a weight, which it may take for the weight itself.

    Args:
        module: the layer.
        name: of its parameter.
        key: in the state dict.
        whole: the copy.
    """
    version: Any = whole.detach()
    version.set_()  # without memory, it counts the changes of what it came from
    _handed.setdefault(module, {})[name] = key, version, version._version


def refuse_changed() -> None:
    """A forward begins: what `state_dict` gave since the last one is a script's own from now on.

    Raises:
        ValueError: it was changed in place.
    """
    for module, given in list(_handed.items()):
        for name in given:
            _refuse_changed(module, name)
    _handed.clear()


def _refuse_changed(module: nn.Module, name: str) -> None:
    key, version, known = _handed.get(module, {}).get(name, ("", None, 0))
    if version is not None and version._version != known:
        _handed.clear()
        raise ValueError(
            f"a tensor that state_dict() gave for {key} was changed in place, which changes a copy of a weight that is split over ranks and not the weight; "
            "give the changed state_dict to load_state_dict, or, to average two models that are split alike, go through their parameters()"
        )


def wholes_of(destination: dict[str, Any], mesh: Mesh) -> Any:
    """The whole tensors of this call of `state_dict`, gathered the first time, once all ranks are here."""
    if _call.destination() is not destination:
        if not dist.is_initialized():
            raise ValueError("state_dict() gathers weights from all ranks; call it before destroy_process_group()")
        if mesh.size("grid") > 1:
            meet(mesh.group("grid"), "state_dict() of a model that is split over ranks", _OTHER_WAYS)
        _call.destination, _call.wholes = weakref.ref(destination), weakref.WeakValueDictionary()
    return _call.wholes


def taken_shards(
    module: nn.Module,
    layouts: Mapping[str, Layout],
    mesh: Mesh,
    given: Mapping[str, Any],
    prefix: str,
    errors: list[str],
) -> dict[str, Any]:
    """Cut from the whole tensors that `load_state_dict` was given this rank's shards, which it is to copy into a layer.

    Args:
        module: the layer.
        layouts: of its own parameters.
        mesh: its mesh.
        given: whole tensors, by the serial model's names.
        prefix: of the layer's names there.
        errors: gets what does not fit, in torch's words.
    """
    taken = dict(given)
    _handed.pop(module, None)
    for name, shard in module._parameters.items():
        key = f"{prefix}{name}"
        layout = layouts.get(name)
        if shard is None or layout is None or not isinstance(given.get(key), Tensor):
            continue
        whole, shape = given[key], torch.Size(layout.serial_shape)
        if whole.shape == shape:
            taken[key] = layout.shard(whole.detach(), mesh.grid, mesh.coordinates)
        else:
            errors.append(
                f"size mismatch for {key}: copying a param with shape {whole.shape} from checkpoint, the shape in current model is {shape} "
                "(load_state_dict takes whole tensors and keeps this rank's shard of each)."
            )
            taken[key] = shard.detach()
    return taken
