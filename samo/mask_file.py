"""Masks in a file: eight elements a byte in a safetensors file of ours, or what others have saved."""

from __future__ import annotations

import json
import math
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from samo.targets import Parameters, names_of, nearest

_SHAPES = "samo_mask_shapes"


def pack(mask: Tensor) -> Tensor:
    """A boolean tensor as uint8, eight elements a byte, flattened, on the CPU."""
    return torch.from_numpy(numpy.packbits(mask.detach().reshape(-1).cpu().numpy()))


def unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The boolean tensor of this shape that `pack` packed."""
    bits = numpy.unpackbits(packed.cpu().numpy(), count=math.prod(shape))
    return torch.from_numpy(bits).bool().view(shape)


def write_masks(path: str | os.PathLike, masks: Mapping[str, Tensor]) -> None:
    """Write masks as one safetensors file, eight elements a byte, their shapes in its metadata; complete or absent.

    Args:
        path: the file; its folder is made.
        masks: by parameter name, boolean.
    """
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    shapes = {name: list(mask.shape) for name, mask in masks.items()}
    aside = file.with_name(f"{file.name}.incomplete")
    save_file({name: pack(mask) for name, mask in masks.items()}, aside, {_SHAPES: json.dumps(shapes)})
    aside.replace(file)


def masks_within(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The masks in a state_dict of torch.nn.utils.prune, boolean, by the names that the parameters had before; else what is given.

    Args:
        state: where a parameter ``w`` is pruned it has ``w_orig`` and ``w_mask``, of zeros and ones.
    """
    found = {name.removesuffix("_mask"): mask for name, mask in state.items() if name.endswith("_mask")}
    own = {name: mask for name, mask in found.items() if f"{name}_orig" in state}
    return {name: _boolean(name, mask, "the state_dict") for name, mask in own.items()} if own else state


def read_masks(path: str | os.PathLike, model: Parameters | None = None) -> dict[str, Tensor]:
    """Read masks: what `write_masks` wrote, or a dict by parameter name of boolean tensors or of zeros and ones.

    The state_dict of a model that torch.nn.utils.prune has pruned is taken, too.

    Args:
        path: a safetensors file, or one of torch.save, which is read without running code from it.
        model: whose parameters they are for, a module or pairs of name and parameter; None: nothing is compared.

    Returns:
        By name, boolean, on the CPU. With a model the names are those of `named_parameters`.

    Raises:
        ValueError: the file is missing or holds something else; a name or shape that is not the model's; a mask keeps nothing.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(
            f'the file of masks "{file}" does not exist; write one with samo.write_masks, or correct the path'
        )
    found = {name: _boolean(name, mask, f'"{file}"') for name, mask in masks_within(_read(file)).items()}
    if model is not None:
        found = _of_model(found, model, file)
    for name, mask in found.items():
        if mask.numel() and not mask.any():
            raise ValueError(
                f'the mask of {name!r} in "{file}" keeps nothing; keep some of it, or take its layer out of the model'
            )
    return found


def _read(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        is_safetensors = stream.read(9)[8:] == b"{"
    try:
        if is_safetensors:
            with safe_open(file, "pt") as opened:
                shapes = json.loads((opened.metadata() or {}).get(_SHAPES, "{}"))
                stored = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            return {name: unpack(t, tuple(shapes[name])) if name in shapes else t for name, t in stored.items()}
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f'"{file}" cannot be read as masks, a safetensors file or a dict of tensors by torch.save: {reason}'
        ) from None
    if not isinstance(loaded, dict):
        raise ValueError(f'"{file}" holds a {type(loaded).__name__}; masks are a dict of tensors by parameter name')
    return loaded


def _boolean(name: str, mask: Any, where: str) -> Tensor:
    if not isinstance(mask, Tensor):
        raise ValueError(
            f"{name!r} in {where} is a {type(mask).__name__}; masks are boolean tensors, or tensors of 0 and 1"
        )
    if mask.dtype == torch.bool:
        return mask
    kept = mask != 0
    if not torch.equal(kept.to(mask.dtype), mask):
        raise ValueError(f"{name!r} in {where} holds other values than 0 and 1; a mask is 1 where an element is kept")
    return kept


def _of_model(masks: dict[str, Tensor], model: Parameters, file: Path) -> dict[str, Tensor]:
    parameters, aliases = names_of(model)
    found: dict[str, Tensor] = {}
    for name, mask in masks.items():
        if name not in aliases:
            raise ValueError(
                f'"{file}" masks {name!r}, which is no parameter of the model; the nearest name is {nearest(name, aliases)}'
            )
        shape = tuple(parameters[aliases[name]].shape)
        if tuple(mask.shape) != shape:
            raise ValueError(
                f'the mask of {name!r} in "{file}" has the shape {tuple(mask.shape)}, the parameter {shape}; use masks of this model'
            )
        if not torch.equal(found.setdefault(aliases[name], mask), mask):
            raise ValueError(
                f'"{file}" masks {aliases[name]!r} and {name!r} differently, which are one parameter; keep one of the masks'
            )
    return found
