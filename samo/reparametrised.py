"""Models that torch.nn.utils.prune has pruned: their masks, and parameters in the place of its reparametrisations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod

from samo.selection import Magnitudes, Shards


@torch.no_grad()
def nonzero(parameters: Mapping[str, Tensor], shards: Shards | None = None) -> dict[str, Tensor]:
    """Masks of what is not zero, of a model that comes pruned.

    Args:
        parameters: by name.
        shards: see `samo.magnitude`.

    Raises:
        ValueError: nothing is zero; or all of a parameter.
    """
    masks = {name: parameter != 0 for name, parameter in parameters.items()}
    found = Magnitudes(parameters, shards)
    kept = found.kept(masks)
    if kept == found.sizes:
        raise ValueError(
            'pruner = "nonzero" is for a model that comes pruned, and this one has no zeros; use another pruner'
        )
    dead = [name for name in found.names if found.sizes[name] and not kept[name]]
    if dead:
        raise ValueError(f"all of {dead[0]!r} is zero, of which nothing would be kept; exclude it")
    return masks


@torch.no_grad()
def absorb(model: nn.Module) -> dict[str, Tensor]:
    """Make ``weight_orig`` the parameter ``weight`` again, zero where ``weight_mask`` is.

    The parameters stay the same objects, so that an optimizer may have them already.

    Args:
        model: changed in place; without such reparametrisations nothing is.

    Returns:
        The masks by parameter name, boolean.
    """
    masks = {}
    for prefix, module in model.named_modules():
        for key, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, BasePruningMethod):
                name = hook._tensor_name
                masks[f"{prefix}.{name}" if prefix else name] = getattr(module, f"{name}_mask") != 0
                hook.remove(module)
                del module._forward_pre_hooks[key]
    return masks
