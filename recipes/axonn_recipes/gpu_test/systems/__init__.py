"""The systems, each a module with a function `run` of the run's scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec

_HERE = "axonn_recipes.gpu_test.systems"


@dataclass(frozen=True)
class System:
    """A system.

    Attributes:
        module: where its `run` is.
        what: it is beside what.
        ranks: how many it needs at least.
        packages: that must be installed.
    """

    module: str
    what: str
    ranks: int = 1
    packages: tuple[str, ...] = ()

    def unfit(self, ranks: int) -> str | None:
        """Why it is left out; None where it is not."""
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            return f"{missing[0]} is not installed"
        return f"it needs {self.ranks} ranks" if ranks < self.ranks else None


SYSTEMS: Mapping[str, System] = {
    "machine": System(f"{_HERE}.machine", "products, copies and all-reduces, for comparison"),
    "kernels": System(f"{_HERE}.kernels", "SAMO's Triton kernels beside torch's fused AdamW", packages=("triton",)),
    "tensor_parallel": System(f"{_HERE}.tensor_parallel", "4D in plain PyTorch beside FSDP2 and DDP"),
    "deepspeed": System(f"{_HERE}.deepspeed", "4D under DeepSpeed beside its ZeRO-1"),
    "megatron": System(
        f"{_HERE}.megatron", "4D in Megatron beside its own tensor and data parallelism", packages=("megatron",)
    ),
    "samo": System(f"{_HERE}.pruned", "SAMO under DeepSpeed beside its dense ZeRO-1"),
    "offload": System(f"{_HERE}.offload", "states in host memory beside ZeRO-Offload"),
    "goldfish": System(f"{_HERE}.goldfish", "the goldfish loss under DeepSpeed beside all targets"),
    "ted": System(f"{_HERE}.experts", "TED beside stock DeepSpeed-MoE", ranks=2),
    "pipeline": System(f"{_HERE}.stages", "the message-driven pipeline beside DeepSpeed's", ranks=2),
    "pccl": System(f"{_HERE}.pccl", "PCCL's collectives beside NCCL's", ranks=2),
}
