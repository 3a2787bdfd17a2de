"""The step on a CPU in one pass over memory, compiled when it is first wanted; what torch's tiles do, several times faster.

It stands in for torch's fused Adam and AdamW (`fused=True`), as these do for the plain ones: equal up to rounding.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from operator import is_
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from axonn_plugins.caches import cache_folder
from axonn_plugins.optim.store import Entry, Segment, Store

_SOURCE = Path(__file__).parent / "csrc" / "step.c"
_FLAGS = [
    "-O3",
    "-march=native",
    "-fopenmp",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fno-strict-aliasing",
    "-fno-trapping-math",
    "-shared",
    "-fPIC",
]
_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_NAMES = ("exp_avg", "exp_avg_sq")
_HELD = (*_NAMES, "step")
_LENGTH = 2**16  # kept elements that a thread takes at a time


class _Job(ctypes.Structure):
    """`struct job` of step.c; pointers as numbers."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("offsets", "starts", "positions")),
        *((name, ctypes.c_int64) for name in ("begin", "length")),
        *((name, ctypes.c_uint64) for name in ("parameter", "gradient", "master", "average", "square")),
        *((name, ctypes.c_float) for name in ("decay", "penalty", "rate1", "beta2", "rate2", "epsilon", "step")),
        ("type", ctypes.c_int32),
    ]


@cache
def library() -> ctypes.CDLL | None:
    """The compiled step; None where there is no C compiler, or it does not compile."""
    command = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if command is None:
        return None
    digest = hashlib.sha256(repr((command, _FLAGS, _processor())).encode() + _SOURCE.read_bytes()).hexdigest()[:16]
    built = cache_folder() / "samo" / f"step-{digest}.so"
    try:
        if not built.exists():
            built.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=built.parent) as scratch:
                made = Path(scratch) / built.name
                subprocess.run(
                    [command, *_FLAGS, str(_SOURCE), "-o", str(made), "-lm"], capture_output=True, check=True
                )
                made.replace(built)
        found = ctypes.CDLL(str(built))
    except (OSError, subprocess.CalledProcessError):
        return None
    found.samo_step.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float]
    found.samo_step.restype = None
    pointer, whole = ctypes.c_void_p, ctypes.c_int
    found.samo_compress.argtypes = [*[pointer] * 4, ctypes.c_int64, pointer, whole, whole, whole]
    found.samo_compress.restype = None
    return found


def _processor() -> list[str]:
    """Lines of /proc/cpuinfo by which -march=native chooses: a home folder may be shared by machines of several kinds."""
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})


def native_step(inner: torch.optim.Optimizer, stores: list[Store]) -> NativeStep | None:
    """The compiled step of stores; None where it does not apply: torch's tiles do it then.

    It applies to parameters in float32, bf16 or fp16, and gradients of the same type, on a CPU with torch's Adam or AdamW,
    ``fused=True``, without amsgrad and maximize.
    """
    known = type(inner) in (torch.optim.Adam, torch.optim.AdamW) and all(
        group["fused"] and isinstance(group["lr"], float | int) for group in inner.param_groups
    )
    kinds = all(
        store.device.type == "cpu" and store.dtype in _TYPES and store.gradient.dtype == store.dtype and not store.host
        for store in stores
    )
    return NativeStep(inner, stores) if known and kinds and plain(inner) and library() is not None else None


def plain(inner: torch.optim.Optimizer) -> bool:
    """True if the compiled step does what the optimizer's groups ask for, as they are now: a script or a checkpoint may change them."""
    return not any(group["amsgrad"] or group["maximize"] for group in inner.param_groups)


class NativeStep:
    """All segments of stores, as jobs; and the compression of their gradients.

    Args:
        inner: torch's Adam or AdamW; state is where it keeps it, under the same names.
        stores: all of them.
    """

    def __init__(self, inner: torch.optim.Optimizer, stores: list[Store]) -> None:
        self._inner = inner
        self._segments = [(store, segment) for store in stores for segment in store.segments]
        self._entries = [segment.entry for _, segment in self._segments]
        counts = torch.zeros(len(self._segments))
        self._counts, self._steps = counts.unbind(), counts.numpy()  # all of `state["step"]`: counting costs one call
        self._jobs = np.zeros(0)
        self._owners = np.zeros(0, dtype=np.int64)  # by job: the number of its segment
        self._active: list[int] = []
        self._at: list[int] = []
        self._held: list[Any] = []  # the tensors whose addresses the jobs have

    def compress(self, entry: Entry, gradient: Tensor, into: Tensor) -> bool:
        """Put a flattened gradient's kept elements into `into`, or add them; False: nothing done.

        Args:
            entry: whose, with an index.
            gradient: all elements.
            into: room for the kept ones.
        """
        if gradient.dtype != into.dtype or entry.index is None:
            return False
        stored, starts = entry.index.tensors
        where = (None, None, stored.data_ptr()) if starts is None else (stored.data_ptr(), starts.data_ptr(), None)
        found = library()
        assert found is not None
        kind, threads = _TYPES[into.dtype], torch.get_num_threads()
        found.samo_compress(
            *where, gradient.data_ptr(), into.numel(), into.data_ptr(), int(entry.filled), kind, threads
        )
        return True

    def step(self, factor: float) -> None:
        """Update all segments whose gradients have arrived; these are multiplied by `factor` first."""
        active = [number for number, entry in enumerate(self._entries) if entry.arrived]
        if not active:
            return
        table = self._table(active)
        self._steps[active] += 1
        steps = self._steps.tolist()
        kinds = {(self._entries[number].group, steps[number]) for number in active}
        for group, step in kinds:
            rates = _rates(self._inner.param_groups[group], step, type(self._inner))
            rows = self._rows(group, step) if len(kinds) > 1 else slice(None)
            for name, value in rates.items():
                table[name][rows] = value
        torch.autograd.graph.increment_version([self._entries[number].parameter for number in active])
        found = library()
        assert found is not None
        found.samo_step(table.ctypes.data, len(table), torch.get_num_threads(), factor)

    def _rows(self, group: int, step: float) -> np.ndarray:
        """Which jobs are of segments of this group that are at this step."""
        groups = np.array([entry.group for entry in self._entries])
        return ((groups == group) & (self._steps == step))[self._owners]

    def _table(self, active: list[int]) -> np.ndarray:
        """The jobs of segments; made anew where others have arrived, a parameter has moved in memory, or state was loaded."""
        states = [self._inner.state[self._segments[number][1].weights] for number in active]
        at = [self._entries[number].parameter.data_ptr() for number in active]
        held = [state.get(name) for state in states for name in _HELD]
        if active != self._active or at != self._at or not all(map(is_, held, self._held)):
            for number, state in zip(active, states, strict=True):
                self._adopt(number, state)
            cut = [_cut(*self._segments[number], state) for number, state in zip(active, states, strict=True)]
            jobs = [job for each in cut for job in each]
            self._jobs = np.ctypeslib.as_array((_Job * len(jobs))(*jobs))
            self._owners = np.repeat(active, [len(each) for each in cut])
            self._active, self._at = active, at
            self._held = [state[name] for state in states for name in _HELD]
        return self._jobs

    def _adopt(self, number: int, state: dict[str, Tensor]) -> None:
        """Begin a segment's state, or count on from what was loaded."""
        count = self._counts[number]
        if not state:
            length = self._segments[number][1].length
            state |= {name: torch.zeros(length) for name in _NAMES}
            state["step"] = count.zero_()
        elif state["step"] is not count:
            state["step"] = count.copy_(state["step"])


def _rates(group: dict[str, Any], number: float, kind: type) -> dict[str, float]:
    """A group's hyperparameters at its step `number`, as the jobs need them."""
    beta1, beta2 = group["betas"]
    decoupled = kind is torch.optim.AdamW or group.get("decoupled_weight_decay", False)
    root = (1 - beta2**number) ** 0.5
    return {
        "decay": 1 - group["lr"] * group["weight_decay"] if decoupled else 1.0,
        "penalty": 0.0 if decoupled else group["weight_decay"],
        "rate1": 1 - beta1,
        "beta2": beta2,
        "rate2": 1 - beta2,
        "epsilon": group["eps"] * root,
        "step": -group["lr"] / (1 - beta1**number) * root,
    }


def _cut(store: Store, segment: Segment, state: dict[str, Tensor]) -> list[_Job]:
    gradient, master, entry = store.gradient, store.master, segment.entry
    stored, starts = (None, None) if entry.index is None else entry.index.tensors
    where = {"parameter": entry.parameter.data_ptr(), "type": _TYPES[gradient.dtype]}
    if stored is not None:
        where |= (
            {"positions": stored.data_ptr()}
            if starts is None
            else {"offsets": stored.data_ptr(), "starts": starts.data_ptr()}
        )
    width = gradient.element_size()
    jobs = []
    for done in range(0, segment.length, _LENGTH):
        jobs.append(
            _Job(
                begin=segment.begin + done,
                length=min(_LENGTH, segment.length - done),
                gradient=gradient.data_ptr() + (segment.gradient + done) * width,
                master=0 if master is None else master.data_ptr() + (segment.owned + done) * 4,
                average=state["exp_avg"].data_ptr() + done * 4,
                square=state["exp_avg_sq"].data_ptr() + done * 4,
                **where,
            )
        )
    return jobs
