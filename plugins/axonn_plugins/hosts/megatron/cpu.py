"""Megatron on a CPU with gloo, for smoke tests: ``AXONN_MEGATRON_CPU=1``.

Megatron asks for CUDA by name in hundreds of places. Here torch answers for a GPU that is the CPU: tensors asked for on
``cuda`` are made on the CPU, the GPU's random generator is the CPU's, and streams are nothing. The switch is an
environment variable, so that processes which Megatron spawns, as it does to save a checkpoint, have it too. Numbers are
those of any CPU; speed is not.

Scripts need these flags: ``--distributed-backend gloo --transformer-impl local --no-persist-layer-norm
--no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
--no-bias-dropout-fusion --no-rope-fusion --num-workers 0``.
"""

from __future__ import annotations

import importlib.util
import logging
import site
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.data import dataloader

from axonn_plugins.autoload import on_import
from axonn_plugins.hosts.megatron import enums

SWITCH = "AXONN_MEGATRON_CPU"
"""The environment variable; 1 turns it on."""
_HELPERS = "megatron.core.datasets.helpers_cpp"
_STUBBED_TRITON = "3.4.0"  # which Megatron takes on a machine without a GPU
_enabled: set[str] = set()


def enable() -> bool:
    """Let Megatron's training scripts run on this machine's CPU; call it before megatron is imported.

    Returns:
        Whether it is on: a machine with a GPU is left as it is, with a warning.
    """
    if not enable_core():
        return False
    if "scripts" not in _enabled:
        _enabled.add("scripts")
        torch.cuda.is_available = lambda: True
        torch.cuda.device_count = lambda: 1  # type: ignore[assignment]
        torch.compile = _uncompiled  # type: ignore[assignment]
        _seed_loaders_aside()
        if importlib.util.find_spec("triton") is None:
            _stub_triton()
        # Compiled with nvcc, and used by fused softmax only; later versions have no such module.
        fused = ModuleType("megatron.legacy.fused_kernels")
        fused.load = lambda args: None  # type: ignore[attr-defined]
        sys.modules[fused.__name__] = fused
        on_import("megatron.core.datasets.utils", _use_compiled_helpers)
        on_import("megatron.training.initialize", _no_warmup)
        enums.readable()
    return True


def enable_core() -> bool:
    """Let megatron.core's own modules run on the CPU: what `enable` does less what only the scripts ask for.

    ``torch.cuda.is_available()`` still says no. Megatron may have been imported already.

    Returns:
        Whether it is on: a machine with a GPU is left as it is, with a warning.
    """
    if "core" in _enabled:
        return True
    if torch.cuda.is_available():
        warnings.warn(
            f"axonn: {SWITCH} has no effect on a machine with a GPU; unset it, or hide the GPU with CUDA_VISIBLE_DEVICES=",
            stacklevel=2,
        )
        return False
    _enabled.add("core")
    _answer_for_cuda()
    # What Megatron has compiled when it was imported would be compiled for the GPU that is none.
    torch.compiler.set_stance("force_eager")
    _OnCpu().__enter__()
    torch.autograd._engine_run_backward = _on_cpu(torch.autograd._engine_run_backward)  # type: ignore[attr-defined]
    on_import("megatron.core.tensor_parallel.random", _set_states_at_once)
    on_import("megatron.core.tensor_parallel.random", _recompute_without_engine)
    on_import("megatron.core.pipeline_parallel.p2p_communication", _send_copies)
    on_import("megatron.core.transformer.dot_product_attention", _take_widths)
    on_import("megatron.core.transformer.moe.moe_utils", _route_without_engine)
    on_import("megatron.core.transformer.multi_latent_attention", _attend_without_engine)
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_is_news)
    return True


def enabled() -> bool:
    """True if Megatron's tensors are on the CPU."""
    return "core" in _enabled


class _Stream:
    """A stream: what is put on it has been done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        return _no_op()


def _no_op() -> Callable[..., None]:
    """A new function each time: torch.compile's tables refuse one function in two places."""
    return lambda *args, **kwargs: None


def _answer_for_cuda() -> None:
    """Make torch.cuda speak of the CPU: one device, its random generator, and streams that do nothing."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: 0
    cuda.set_device, cuda.synchronize = _no_op(), _no_op()
    cuda.Stream, cuda.stream = _Stream, nullcontext
    cuda.current_stream, cuda.default_stream = (lambda device=None: _Stream()), (lambda device=None: _Stream())
    # Newest of all, for which Megatron asks no environment variable.
    cuda.get_device_properties = lambda device=None: SimpleNamespace(name="CPU", major=10, minor=0, total_memory=0)
    cuda.default_generators = (torch.default_generator,)
    cuda.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.random.get_rng_state = lambda device=None: torch.get_rng_state()
    cuda.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    if hasattr(torch._C, "_cuda_setRNGState"):  # a build for CUDA, without a GPU
        torch._C._cuda_setRNGState = torch.set_rng_state


def _seed_loaders_aside() -> None:
    """A data loader draws its seed from the CPU's generator, and only the first of tensor ranks has one: the others would drop other elements."""
    kind = dataloader._BaseDataLoaderIter
    original = kind.__init__

    @wraps(original)
    def init(self: Any, *args: Any, **named: Any) -> None:
        with torch.random.fork_rng(devices=()):
            original(self, *args, **named)

    kind.__init__ = init  # type: ignore[method-assign]


def _set_states_at_once(random: ModuleType) -> None:
    """Else torch would put off setting a generator's state until there is CUDA."""
    random._lazy_call = lambda act, **kwargs: act()  # type: ignore[attr-defined]


def _recompute_without_engine(random: ModuleType) -> None:
    """Megatron asks Transformer Engine for its 8 bits wherever an output is recomputed, also where none are asked for."""
    original = random.CheckpointWithoutOutput.__init__
    if random.HAVE_TE:
        return

    @wraps(original)
    def init(self: Any, fp8: Any = None) -> None:
        original(self, fp8 or None)

    random.CheckpointWithoutOutput.__init__ = init  # type: ignore[attr-defined]


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Torch runs backward outside of modes, where Megatron makes tensors, too."""

    @wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        with _OnCpu():
            return function(*args, **named)

    return run


def _send_copies(communication: ModuleType) -> None:
    """Gloo sends from where a tensor lies, which the interleaved schedule empties as soon as the send has begun."""
    start = communication._p2p_ops

    @wraps(start)
    def p2p_ops(**tensors: Any) -> Any:
        sent = {name: tensors[name] for name in ("tensor_send_prev", "tensor_send_next")}
        copies = {name: one.detach().clone() for name, one in sent.items() if one is not None}
        return start(**{**tensors, **copies})

    communication._p2p_ops = p2p_ops  # type: ignore[attr-defined]


def _take_widths(attention: ModuleType) -> None:
    """Multi-latent attention tells how wide keys and values are, which Transformer Engine's core takes and Megatron's own does not."""
    original = attention.DotProductAttention.__init__

    @wraps(original)
    def init(self: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **named: Any) -> None:
        original(self, *args, **named)
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    attention.DotProductAttention.__init__ = init


def _route_without_engine(utils: ModuleType) -> None:
    """Routers ask whether there is a product of Transformer Engine's, by a name that only is where that is installed."""
    vars(utils).setdefault("te_general_gemm", None)


def _attend_without_engine(latent: ModuleType) -> None:
    """Megatron holds Transformer Engine for installed there, and asks whether a layer is of a class that there is not."""
    latent.HAVE_TE = latent.HAVE_TE and isinstance(latent.TELinear, type)  # type: ignore[attr-defined]


_NAMES_OF_DEVICES = {torch.device, str}


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


class _OnCpu(TorchFunctionMode):
    """Whatever is asked for on cuda is made on the CPU; a CPU tensor says that its type is cuda's."""

    def __torch_function__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.cuda:
            return args[0]
        if function is Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.", 1)
        if function is torch.device and type(args[0]) is int:
            return torch.device("cpu")
        if kwargs.get("pin_memory"):  # which only a GPU copies from
            kwargs = {**kwargs, "pin_memory": False}
        if "device" in kwargs and (_is_cuda(kwargs["device"]) or type(kwargs["device"]) is int):
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if not _NAMES_OF_DEVICES.isdisjoint(map(type, args)) and any(map(_is_cuda, args)):
            args = tuple(torch.device("cpu") if _is_cuda(value) else value for value in args)
        return function(*args, **kwargs)


def _uncompiled(model: Any = None, **kwargs: Any) -> Any:
    """torch.compile that leaves a function as it is; Megatron compiles a dozen that run as well uncompiled."""
    return model if model is not None else lambda function: function


def _is_news(record: logging.LogRecord) -> bool:
    """True if a message of Megatron's generators is news: here the GPU's is the CPU's, which it warns of at each use."""
    return "CPU RNG state changed" not in record.getMessage()


def _stub_triton() -> None:
    """Stand in for triton, which Megatron imports without need: decorators do nothing, and nothing else works."""
    from unittest.mock import MagicMock

    for name in ("triton", "triton.language"):
        spec = importlib.util.spec_from_loader(name, None)
        sys.modules[name] = MagicMock(__spec__=spec, __version__=_STUBBED_TRITON)


def _use_compiled_helpers(utils: ModuleType) -> None:
    """Take a checkout's compiled helper from the wheel where there is one, so that no compiler is needed."""
    import megatron.core.datasets as datasets

    for folder in site.getsitepackages():
        datasets.__path__.append(str(Path(folder, "megatron", "core", "datasets")))
    if importlib.util.find_spec(_HELPERS) is not None:
        utils.compile_helpers = _no_op()  # type: ignore[attr-defined]


def _no_warmup(initialize: ModuleType) -> None:
    """Nothing is compiled, and what the warm-up draws would make initial weights depend on the tensor-parallel size."""
    initialize._warmup_jit_function = _no_op()  # type: ignore[attr-defined]
