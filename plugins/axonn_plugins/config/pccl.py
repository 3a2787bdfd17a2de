"""The ``"pccl"`` key of the ``"axonn"`` block."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, WrapValidator, field_validator
from pydantic_core import PydanticCustomError

from axonn_plugins.config.base import Block
from axonn_plugins.pccl.options import Options


def _ranks_per_node(value: Any, either: Any) -> Any:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise PydanticCustomError("ranks_per_node", 'an integer of at least 1, or "auto"')


class Pccl(Block):
    """DeepSpeed's collectives by PCCL (dissertation chapter 6)."""

    algorithm: Literal["auto", "ring", "recursive", "hierarchical", "native"] = Field(
        "auto",
        description="auto: by collective, size and nodes. ring: p-1 steps. recursive: doubling and halving, and Bruck's algorithm where the "
        "ranks are no power of two. hierarchical: few steps between nodes for small sizes, a ring for large ones, then within each node. "
        "native: gloo, on CUDA NCCL.",
    )
    ranks_per_node: Annotated[int | Literal["auto"], WrapValidator(_ranks_per_node)] = Field(
        "auto", description="auto: ranks whose node has the same name are on one node. n: each n consecutive ranks are."
    )
    interfaces: list[str] | None = Field(
        None,
        description="Network interfaces by name; process i of a node uses number i modulo their count. By default those of "
        "GLOO_SOCKET_IFNAME, else the one that leads to MASTER_ADDR.",
    )
    tuning_file: str | None = Field(
        None, description="Where measurements of this cluster are kept; by default in the user's cache folder."
    )
    tune: bool | None = Field(
        None,
        description="Whether auto times the algorithms: on CPUs for some 10 seconds at the first start on a cluster of which it has no times, on "
        "CUDA at each start. By default what AXONN_PCCL_TUNE says, else true.",
    )
    silence: Annotated[float, Field(ge=1, le=86400)] = Field(
        30.0, description="Seconds after which a node that does not answer is given up."
    )
    read_memory: bool = Field(
        False,
        description="Whether ranks of a node may read each other's memory even where Yama (kernel.yama.ptrace_scope = 1) forbids it: each "
        "then opens its memory to the nearest process that started them all, and to whatever that process started.",
    )

    @field_validator("interfaces", mode="before")
    @classmethod
    def _names(cls, value: Any) -> Any:
        if value is None or (isinstance(value, list) and value and all(isinstance(name, str) for name in value)):
            return value
        raise PydanticCustomError("interfaces", 'a list of network interfaces such as ["eth0"]')

    def options(self) -> Options:
        """The same for torch."""
        names = None if self.interfaces is None else tuple(self.interfaces)
        given = (self.algorithm, self.ranks_per_node, names, self.tuning_file, self.tune)
        return Options(*given, silence=self.silence, read_memory=self.read_memory)
