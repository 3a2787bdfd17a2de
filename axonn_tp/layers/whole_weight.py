"""A split layer's weight as code finds it that reads it in the model's forward: a copy of the whole, which is not to be changed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def in_place(function: Any) -> bool:
    """True if a function, by its name, changes what it is given first."""
    name = getattr(function, "__name__", "")
    inside = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__")
    return inside or name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))


def _shares_memory(made: Any, weight: Tensor) -> bool:
    """True if a function gave memory of the weight, as `detach`, a transpose or a row of it."""
    return (
        isinstance(made, Tensor)
        and made.layout is torch.strided
        and made.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    )


class WholeWeight(Tensor):
    """The weight, which code that changes it would change in vain: refused.

    Attributes:
        axonn_name: the layer's.
    """

    axonn_name: str

    @classmethod
    def of(cls, weight: Tensor, name: str) -> WholeWeight:
        """A weight that was made of the shards of the layer `name`."""
        made = weight.as_subclass(cls)
        made.axonn_name = name
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The function's result.

        Raises:
            ValueError: the weight is another behind it.
        """
        if any(other is not cls and other.__module__.startswith("axonn_tp.") for other in types):
            return NotImplemented  # activations know what is made of them
        weight: Any = args[0] if args and type(args[0]) is cls else None
        with torch._C.DisableTorchFunctionSubclass():
            written = [args[0] if args and in_place(function) else None, (kwargs or {}).get("out")]
            before = [(one, one.as_subclass(Tensor).clone()) for one in tree_leaves(written) if type(one) is cls]
            made = function(*args, **(kwargs or {}))
            for one, was in before:
                if not torch.equal(one.as_subclass(Tensor), was):
                    raise ValueError(
                        f"the model's forward changes the weight of layer {one.axonn_name}, which is split, so that it changes a copy, and the change is lost; "
                        'make it outside of the forward, as after optimizer.step(), keep the layer whole ({"kind": "replicated"} in a plan), or turn it off '
                        "(config.rescale_every = 0 of RWKV, altup_coef_clip = None of Gemma 3n)"
                    )
            return cls.of(made, weight.axonn_name) if weight is not None and _shares_memory(made, weight) else made
