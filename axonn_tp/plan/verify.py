"""Does a plan compute what the serial model does? A wrong one can keep all shapes valid and train another model.

The same batch is run twice without gradients: split, and with every layer gathering its whole weight and computing as
in the serial model. Transposed and head layers, where a pair ends, are compared by random projections of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_tp.comm.collectives import all_reduce, whole_parameter
from axonn_tp.compiled import layers as compiled
from axonn_tp.grid.layout import layout_of
from axonn_tp.grid.mesh import Mesh
from axonn_tp.layers.activation import plain, split_of
from axonn_tp.layers.conv import Conv
from axonn_tp.layers.cross_entropy import CrossEntropyLoss
from axonn_tp.layers.embedding import Embedding
from axonn_tp.layers.group_norm import GroupNorm
from axonn_tp.layers.layer_norm import LayerNorm
from axonn_tp.layers.linear import Linear
from axonn_tp.layers.rms_norm import RMSNorm
from axonn_tp.layers.tokens import Tokens
from axonn_tp.plan.evaluating import evaluating

_PLAIN: dict[type[nn.Module], type[nn.Module]] = {
    Linear: nn.Linear,
    Embedding: nn.Embedding,
    LayerNorm: nn.LayerNorm,
    GroupNorm: nn.GroupNorm,
    CrossEntropyLoss: nn.CrossEntropyLoss,
    compiled.Linear: nn.Linear,
    compiled.Embedding: nn.Embedding,
    compiled.LayerNorm: nn.LayerNorm,
    compiled.CrossEntropyLoss: nn.CrossEntropyLoss,
}
# Mixed into whatever class the layer had.
_MIXED = (Conv, RMSNorm)


def _plain_class(module: nn.Module, mesh: Mesh) -> type[nn.Module]:
    """The layer's class in the serial model, whose weight is whole also for code that reads it and does not call the layer."""
    kind = type(module)
    plain_kind = _PLAIN.get(kind) or kind.__bases__[1]
    if module._parameters.get("weight") is None:
        return plain_kind

    def weight(self: nn.Module) -> Tensor:
        held = self._parameters["weight"]
        assert held is not None
        whole = not hasattr(held, "axonn_layout")  # while the layer is called
        return held if whole else whole_parameter(held.detach(), layout_of(held), mesh)

    return type(plain_kind.__name__, (plain_kind,), {"weight": property(weight)})


@contextmanager
def as_serial(model: nn.Module, mesh: Mesh) -> Iterator[None]:
    """Inside, the model computes as the serial one: each split layer gathers its weight, uses it and lets it go."""
    split = [module for module in model.modules() if isinstance(module, (*_PLAIN, *_MIXED))]

    def gather(module: nn.Module, inputs: Any) -> None:
        shards[id(module)] = dict(module._parameters)
        for name, shard in shards[id(module)].items():
            if shard is not None:
                # `torch.func.functional_call` puts shards that know no layout in the places of the layer's own.
                layouts: Any = module.layouts
                layout = layouts.get(name) or layout_of(shard)
                whole = whole_parameter(shard.detach(), layout, mesh)
                module._parameters[name] = nn.Parameter(whole, requires_grad=False)

    def release(module: nn.Module, inputs: Any, output: Any) -> None:
        module._parameters.update(shards.pop(id(module), {}))

    shards: dict[int, dict[str, nn.Parameter | None]] = {}
    with ExitStack() as stack:
        stack.enter_context(_uncompiled())
        for module in split:
            stack.callback(setattr, module, "__class__", type(module))
            module.__class__ = _plain_class(module, mesh)
            stack.callback(module.register_forward_pre_hook(gather).remove)
            stack.callback(module.register_forward_hook(release, always_call=True).remove)
        yield


def _uncompiled() -> AbstractContextManager:
    """Inside, models that are compiled run as they are: with other layers they would be compiled anew."""
    return torch.compiler.set_stance("force_eager")


def _signs(width: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(width)
    return (torch.randint(2, (width,), generator=generator) * 2 - 1).to(like.device, torch.float64)


def _columns(
    module: Linear | Conv, output: Tensor, whole: bool, mesh: Mesh, tokens: Tokens | None
) -> tuple[Tensor, Tensor]:
    """This rank's share of an output, and the signs of its columns; `tokens`: how the share's lie, where they are scattered."""
    split = module.split
    # Features last, and tokens before them.
    output = plain(output).movedim(module.operation.features, -1)
    width = module.layouts["bias"].shape[0]
    signs = _signs(width, output)
    if split.gives == "whole":
        return output.double(), signs
    missing = module.layouts["bias"].padded(mesh.grid)[0] - width
    signs = F.pad(signs, (0, missing))
    output = F.pad(output, (0, missing)) if whole else output
    for axis in (split.output, split.contracted) if split.gives == "features" else (split.output,):
        signs = signs.chunk(mesh.size(axis))[mesh.rank(axis)]
        output = output.chunk(mesh.size(axis), -1)[mesh.rank(axis)] if whole else output
    if tokens is not None:
        if output.dim() == 2 < tokens.dims:
            output = output.unflatten(0, (-1, tokens.whole if whole else tokens.share))
        first = min(tokens.share * mesh.rank(split.contracted), tokens.whole)
        output = output[..., first if whole else 0 :, :][..., : min(tokens.share, tokens.whole - first), :]
    return output.double().nan_to_num(neginf=0.0), signs


@torch.no_grad()
def first_difference(
    model: nn.Module, run: Callable[[], Any], mesh: Mesh, tolerance: float
) -> tuple[str, float] | None:
    """The first layer whose output differs from the serial model's, on any rank; every rank calls it.

    Args:
        model: a model that `parallelize` split.
        run: one forward pass; called twice, with the same random numbers, in evaluation mode.
        mesh: the mesh.
        tolerance: largest relative difference that is rounding.

    Returns:
        Name and relative difference, or None where all agree.
    """
    ends = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (Linear, Conv)) and (module.split.transposed or module.split.pad_vocabulary)
    }
    seen: dict[str, list[Tensor]] = {name: [] for name in ends}
    lying: dict[str, list[Tokens | None]] = {name: [] for name in ends}
    whole = False

    def note(name: str, module: Linear | Conv) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(_: nn.Module, inputs: Any, output: Tensor) -> None:
            call, held = len(seen[name]), split_of(output)
            if not whole:
                lying[name].append(held.tokens if held is not None and module.split.gives == "tokens" else None)
            tokens = lying[name][call] if call < len(lying[name]) else None
            columns, signs = _columns(module, output, whole, mesh, tokens)
            seen[name].append(columns @ signs)

        return hook

    handles = [module.register_forward_hook(note(name, module)) for name, module in ends.items()]
    on_cpu = torch.get_rng_state()
    on_device = torch.cuda.get_rng_state(mesh.device) if mesh.device.type == "cuda" else None

    def again() -> None:
        torch.set_rng_state(on_cpu)
        if on_device is not None:
            torch.cuda.set_rng_state(on_device, mesh.device)

    try:
        with evaluating(model), _uncompiled():
            run()
        again()
        split_pass = {name: list(rows) for name, rows in seen.items()}
        for rows in seen.values():
            rows.clear()
        whole = True
        with evaluating(model), as_serial(model, mesh):
            run()
    finally:
        again()
        for handle in handles:
            handle.remove()
    differences = torch.tensor([_relative(split_pass[name], seen[name]) for name in ends], dtype=torch.float64)
    for axis in ("model", "batch"):
        differences = all_reduce(differences.to(mesh.device), mesh, axis, "max").cpu() if ends else differences
    for name, difference in zip(ends, differences.tolist(), strict=True):
        if difference > tolerance:
            return name, difference
    return None


def _relative(split_pass: list[Tensor], serial_pass: list[Tensor]) -> float:
    if not serial_pass or len(split_pass) != len(serial_pass):
        return 0.0
    pairs = list(zip(split_pass, serial_pass, strict=True))
    if any(a.shape != b.shape for a, b in pairs):
        return float("inf")
    error = sum((a - b).square().sum().item() for a, b in pairs)
    size = sum(b.square().sum().item() for _, b in pairs)
    return (error / size) ** 0.5 if size else 0.0
