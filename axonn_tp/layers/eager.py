"""Code that `torch.compile` leaves as it is."""

from __future__ import annotations

import pkgutil
import warnings
from functools import cache
from importlib.util import find_spec

from torch._C._dynamo.eval_frame import get_eval_frame_callback

from axonn_tp.layers.activation import Activation, ShareSum
from axonn_tp.layers.as_share import AsShare
from axonn_tp.layers.whole_weight import WholeWeight


def compiler_runs() -> bool:
    """True in code that `torch.compile` has left as it is, called by code that it compiles."""
    return get_eval_frame_callback() not in (None, False)


@cache
def tell_uncompiled() -> None:
    """Warn, once a process."""
    warnings.warn(
        "torch.compile leaves split layers, and code on activations that are split over x and y, as they are; for a graph without breaks give "
        'axonn_tp.Options(layout="replicated", compile=True), or these keys in the block\'s tensor_parallel',
        stacklevel=3,
    )


@cache
def leave_to_eager() -> None:
    """Have `torch.compile` run this package, but for what is written for it (`axonn_tp.compiled`), and code on activations as they are.

    It would trace the backward of a product, whose sums are shared by several, without what they share, and give wrong gradients.
    """
    import torch._dynamo.config
    import torch._dynamo.trace_rules

    package = find_spec("axonn_tp")
    assert package is not None
    for module in pkgutil.iter_modules(package.submodule_search_locations, "axonn_tp."):
        if module.name != "axonn_tp.compiled":
            torch._dynamo.trace_rules.add(module.name)
    torch._dynamo.config.nontraceable_tensor_subclasses.update({Activation, AsShare, ShareSum, WholeWeight})
