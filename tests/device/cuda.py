"""`torch.cuda` of the tests' device (late.cpp), for a torch without CUDA."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

BACKEND = "cpu:gloo,cuda:late"
"""Of a world whose CPU's tensors gloo moves, and the device's a communicator with NCCL's rules."""


def install(built: Path) -> ModuleType:
    """Have this process, and those that it forks, see one GPU."""
    if torch.backends.cuda.is_built():
        raise RuntimeError("this torch has CUDA; the tests' device is for one without")
    late = _loaded(built)
    cuda: Any = torch.cuda

    @contextmanager
    def stream(chosen: Any) -> Iterator[None]:
        before = late.set_stream(chosen.stream_id) if chosen is not None else None
        try:
            yield
        finally:
            if before is not None:
                late.set_stream(before)

    def on(number: int) -> torch.Stream:
        return torch.Stream(stream_id=number, device_index=0, device_type=1)

    answers = {
        "_lazy_init": None,
        "is_available": True,
        "is_initialized": True,
        "_is_in_bad_fork": False,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "get_device_name": "late",
        "get_device_capability": (8, 0),
        "get_device_properties": SimpleNamespace(
            name="late", major=8, minor=0, total_memory=2**40, multi_processor_count=1
        ),
        "is_current_stream_capturing": False,
        "max_memory_allocated": 0,
        "empty_cache": None,
    }
    for name, answer in answers.items():
        setattr(cuda, name, lambda *_, answer=answer, **__: answer)
    cuda.Stream = lambda device=None, priority=0: torch.Stream(device="cuda", priority=priority)
    cuda.Event = lambda enable_timing=False, **_: torch.Event("cuda", enable_timing=enable_timing)
    cuda.stream, cuda.synchronize = stream, lambda device=None: late.synchronize()
    cuda.current_stream, cuda.default_stream = lambda device=None: on(late.current_stream()), lambda device=None: on(0)
    cuda.device, cuda.device_of = _Device, lambda device: nullcontext()
    torch.__config__.show = lambda: "late"  # torch's own asks a CUDA library for its version
    # One generator for both: kernels are the CPU's.
    cuda.get_rng_state, cuda.set_rng_state = lambda device=None: torch.get_rng_state(), lambda state, device=None: None
    cuda.random.get_rng_state = cuda.get_rng_state
    cuda.default_generators = (torch.default_generator,)
    cuda.manual_seed = cuda.manual_seed_all = lambda seed: None
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    return late


class _Device(nullcontext):
    """`torch.cuda.device`, of which there is one."""


def _loaded(built: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("_late", built)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class HostReads(TorchDispatchMode):
    """Tells the device what the host reads and writes of pinned memory."""

    def __init__(self, late: ModuleType) -> None:
        super().__init__()
        self.late = late

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs or {})) if isinstance(leaf, torch.Tensor)]
        schema = function._schema
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in schema.returns)
        if not views and all(tensor.device.type == "cpu" for tensor in given):
            named = zip(
                [*args, *(kwargs or {}).values()],
                [*schema.arguments[: len(args)], *self._named(schema, kwargs)],
                strict=True,
            )
            for value, argument in named:
                writes = argument.alias_info is not None and argument.alias_info.is_write
                for tensor in tree_leaves(value):
                    if isinstance(tensor, torch.Tensor):
                        self.late.host(tensor, writes, str(function))
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _named(schema: Any, kwargs: Any) -> list[Any]:
        by_name = {argument.name: argument for argument in schema.arguments}
        return [by_name[name] for name in kwargs or {}]


def register(late: ModuleType) -> None:
    """Name torch the backend ``late``, and have one be NCCL's for whoever asks for that; before the process group is made."""

    def create(asked: Any, _: Any) -> Any:
        return communicator(late, asked.store, asked.group_rank, asked.group_size)

    dist.Backend.register_backend("late", create, extended_api=True, devices=["cuda"])

    class Kind(type):
        def __instancecheck__(cls, one: Any) -> bool:
            return isinstance(one, torch._C._distributed_c10d.Backend) and one.name() == "late"

    class Nccl(metaclass=Kind):
        """`torch.distributed.ProcessGroupNCCL`."""

        Options = SimpleNamespace

        def __new__(cls, store: Any, rank: int, size: int, options: Any = None) -> Any:
            if (parent := getattr(options, "split_from", None)) is not None:
                parent.perform_nocolor_split(None)
            return communicator(late, store, rank, size)

    late.split_by(partial(communicator, late))
    kind: Any = torch._C._distributed_c10d.Backend.Options
    kind.__deepcopy__ = lambda options, memo: options  # torch copies what it splits by
    for module in (dist, dist.distributed_c10d):
        module.ProcessGroupNCCL, module.is_nccl_available = Nccl, lambda: True  # type: ignore[attr-defined]


def communicator(late: ModuleType, store: Any, rank: int, size: int) -> Any:
    """A backend by itself."""
    inner = dist.ProcessGroupGloo(dist.PrefixStore("bytes", store), rank, size, timedelta(seconds=60))
    return late.communicator(rank, size, inner, dist.PrefixStore("order", store))
