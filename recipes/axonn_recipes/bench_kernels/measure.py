"""SAMO's Triton kernels compiled for GPUs that need not be here, and what can be read off the code."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_SECTOR = 32
"""Bytes that a warp fetches at least, as for an entry of a table that all of its threads read."""


@dataclass(frozen=True)
class Target:
    """A kind of GPU.

    Attributes:
        gpu: one of them.
        backend: Triton's.
        arch: Triton's name of it.
        lanes: threads of a warp.
        bandwidth: of that GPU's memory, in bytes a second, by its vendor's data sheet.
    """

    gpu: str
    backend: str
    arch: int | str
    lanes: int
    bandwidth: float

    def occupancy(self, registers: int, warps: int) -> float:
        """The share of the warps that a multiprocessor can hold which programs of `warps` warps fill, by their registers.

        NVIDIA: 65,536 registers for at most 64 warps of at most 32 programs, given to a warp in multiples of 8 a thread. AMD's CDNA: 512 a
        lane of a SIMD for at most 8 wavefronts, in multiples of 8.
        """
        rounded = math.ceil(registers / 8) * 8
        if self.backend == "hip":
            return min(8, 512 // rounded) / 8
        programs = min(32, 65536 // (rounded * self.lanes) // warps, 64 // warps)
        return programs * warps / 64


TARGETS: Mapping[str, Target] = {
    "sm_80": Target("A100 80GB SXM", "cuda", 80, 32, 2.039e12),
    "sm_90": Target("H100 SXM", "cuda", 90, 32, 3.35e12),
    "sm_100": Target("B200", "cuda", 100, 32, 8.0e12),
    "gfx90a": Target("MI250X, one of its two dies", "hip", "gfx90a", 64, 1.6e12),
    "gfx942": Target("MI300X", "hip", "gfx942", 64, 5.3e12),
}


@dataclass(frozen=True)
class Kernel:
    """A kernel with the types it is called with.

    Attributes:
        name: in the table.
        function: in `samo.kernels`.
        types: of its arguments.
        constants: its compile-time arguments.
        warps: of a program.
        must: bytes that an element's update has to move, those that are scattered as if they stood together.
        spared: bytes an element of accesses that the code has for another kind of index.
    """

    name: str
    function: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    must: int
    spared: int = 0


@dataclass(frozen=True)
class Code:
    """A compiled kernel.

    Attributes:
        kernel: which.
        target: name of the target.
        registers: of a thread.
        spilled: bytes a thread on NVIDIA, registers on AMD, that did not fit.
        accesses: how often an element's access has so many bits; empty on AMD.
        moved: bytes an element that the code moves; None on AMD.
    """

    kernel: Kernel
    target: str
    registers: int
    spilled: int
    accesses: Mapping[int, int] = field(default_factory=dict)
    moved: float | None = None

    @property
    def occupancy(self) -> float:
        """See `Target.occupancy`."""
        return TARGETS[self.target].occupancy(self.registers, self.kernel.warps)

    @property
    def roof(self) -> float:
        """Elements a second that the memory allows."""
        return TARGETS[self.target].bandwidth / self.kernel.must


def kernels() -> list[Kernel]:
    """All kernels, by the type of weights and the kind of index."""
    from samo import kernels as module

    found, size = [], {"fp32": 4, "bf16": 2, "fp16": 2}
    for dtype, width in size.items():
        tables = {"work": "*i64", "pieces": "*i64", "scalars": "*fp32", "factor": "*fp32"}
        types = tables | {"gradients": f"*{dtype}", "masters": "*fp32" if width == 2 else "constexpr"}
        constants = {"MASTER": width == 2, "SIZE": module.CHUNK} | ({} if width == 2 else {"masters": None})
        # The gradient and a 16-bit offset; two averages and the weight, read and written; of 16 bits the parameter as well.
        must = width + 2 + 2 * 3 * 4 + (width if width == 2 else 0)
        found.append(Kernel(f"adam {dtype}", "_adam", types, constants, module.ADAM_WARPS, must, 4))
        for add in (False, True):
            for offset, index, starts in ((2, "*u16", "*i64"), (4, "*i32", "constexpr")):
                types = {"dense": f"*{dtype}", "into": f"*{dtype}", "start": "i32", "kept": "i32", "chunks": "i32"}
                types |= {"index": index, "starts": starts}
                constants = {"WIDTH": offset, "ADD": add, "SIZE": module.CHUNK} | (
                    {} if offset == 2 else {"starts": None}
                )
                name = f"{'add' if add else 'compress'} {dtype}, {8 * offset}-bit index"
                found.append(Kernel(name, "_compress", types, constants, 4, offset + (3 if add else 2) * width))
    return found


def compiled(kernel: Kernel, target: str) -> Code:
    """Compile a kernel: no GPU and no driver takes part.

    Raises:
        KeyError: there is no such target.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from samo import kernels as module

    gpu, function = TARGETS[target], getattr(module, kernel.function)
    types = dict(kernel.types) | dict.fromkeys(kernel.constants, "constexpr")
    signature = {name: types[name] for name in function.arg_names}
    source = ASTSource(function, signature, dict(kernel.constants))
    options = {"num_warps": kernel.warps}
    made = triton.compile(source, target=GPUTarget(gpu.backend, gpu.arch, gpu.lanes), options=options)
    if gpu.backend == "hip":
        text = made.asm["amdgcn"]
        spilled = _number(r"\.vgpr_spill_count:\s*(\d+)", text) + _number(r"\.sgpr_spill_count:\s*(\d+)", text)
        return Code(kernel, target, _number(r"\.vgpr_count:\s*(\d+)", text), spilled)
    said = _resources(made.asm["cubin"], Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    spilled = _number(r"STACK:(\d+)", said) + _number(r"LOCAL:(\d+)", said)
    each = kernel.constants["SIZE"] // (gpu.lanes * kernel.warps)
    accesses, moved = _accesses(made.asm["ptx"], each, kernel.constants["SIZE"])
    return Code(kernel, target, _number(r"REG:(\d+)", said), spilled, accesses, moved - kernel.spared)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"the compiler does not say {pattern}"
    return int(found[1])


def _resources(cubin: bytes, cuobjdump: Path) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([cuobjdump, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout


def _accesses(ptx: str, each: int, size: int) -> tuple[dict[int, int], float]:
    """Accesses of elements by their bits, and bytes an element: what has no predicate are entries of tables, one a program.

    Args:
        ptx: the code.
        each: elements of a thread.
        size: elements of a program.
    """
    found: dict[int, int] = {}
    tables = 0
    for predicate, vector, bits in re.findall(r"(@%p\d+ )?(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", ptx):
        wide = int(bits) * int(vector or 1)
        if predicate:
            found[wide] = found.get(wide, 0) + 1
        else:
            tables += 1
    return found, sum(bits // 8 * count for bits, count in found.items()) / each + tables * _SECTOR / size
