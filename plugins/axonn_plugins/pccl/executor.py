"""Which collective of an accelerator's tensors is done how, and doing it: what the C++ backend `Device` asks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import AllreduceOptions

from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.choice import NATIVE, Choice, Measured, choose, prescribed
from axonn_plugins.pccl.device import AVERAGE, COMBINE, Layout, Memory, Plan, execute, plan, resolve
from axonn_plugins.pccl.nodewise import Nodewise, covers, even
from axonn_plugins.pccl.options import Options
from axonn_plugins.pccl.program import COLLECTIVES, block_lengths


class Executor:
    """One rank's collectives of one group.

    Args:
        inner: the vendor's backend of the group.
        local: the vendor's backend of the ranks of this rank's node, which is `inner` where all are on one; None where
            `axonn_plugins.pccl.nodewise.even` does not hold.
        rank: this rank.
        nodes: the group's ranks by node.
        options: what the user chose.
        measured: what choices rest on; where nothing was measured, the vendor's library has them all.

    Attributes:
        fixed: a choice that holds whatever was measured.
    """

    def __init__(
        self,
        inner: Any,
        local: Any,
        rank: int,
        nodes: Sequence[Sequence[int]],
        options: Options,
        measured: Measured | None = None,
    ) -> None:
        self.inner, self.local, self.rank, self.options = inner, local, rank, options
        self.nodes = tuple(tuple(node) for node in nodes)
        self.size = sum(map(len, self.nodes))
        self.measured = measured or Measured()
        self.fixed: Choice | None = None
        self._nodewise = Nodewise(inner, local, rank, self.nodes) if local is not None and even(self.nodes) else None
        self._plans: dict[tuple[str, Choice], Plan] = {}
        self._connected: set[torch.device] = set()

    def ours(self, collective: int, size: int, native: bool) -> bool:
        """True if a collective is not left to the inner backend.

        Args:
            collective: number in `COLLECTIVES`.
            size: bytes of all blocks.
            native: whether the inner backend can do it.
        """
        return self.choose(COLLECTIVES[collective], size, native).algorithm != NATIVE

    def choose(self, collective: str, size: int, native: bool = True) -> Choice:
        """Choose the algorithm of a collective of `size` bytes, all blocks together; the same on every rank."""
        if self.fixed is not None and (native or self.fixed.algorithm != NATIVE):
            return self.fixed
        found = prescribed(self.options, collective, size, self.size) or self.measured.choose(collective, size, native)
        return found or (Choice(NATIVE) if native else choose(collective, size, self.nodes))

    def run(self, collective: int, output: Tensor, input: Tensor, reduction: int) -> None:
        """Enqueue one collective on the current stream.

        Args:
            collective: number in `COLLECTIVES`.
            output: all_gather p blocks, reduce_scatter one; all_reduce is in place.
            input: all_gather one block, reduce_scatter p.
            reduction: torch's number of it; of no meaning for all_gather.
        """
        name = COLLECTIVES[collective]
        into = _flat(output) if output.is_contiguous() else output.new_empty(output.numel())
        copied = into.data_ptr() != output.data_ptr()
        if name == "all_reduce" and copied:
            into.copy_(output.reshape(-1))
        self._run(name, into, into if name == "all_reduce" else _flat(input.contiguous()), reduction)
        if name != "all_gather" and reduction == AVERAGE:
            into.div_(self.size)
        if copied:
            output.copy_(into.view(output.shape))

    def run_list(self, collective: int, outputs: list[Tensor], inputs: list[Tensor], reduction: int) -> None:
        """`run` where the p blocks are a list of tensors."""
        if COLLECTIVES[collective] == "reduce_scatter":
            self.run(collective, outputs[0], torch.cat([part.reshape(-1) for part in inputs]), reduction)
            return
        whole = outputs[0].new_empty(self.size * outputs[0].numel())
        self.run(collective, whole, inputs[0], reduction)
        rows = whole.view(self.size, -1) if whole.numel() else [whole] * self.size
        torch._foreach_copy_(outputs, [row.view(output.shape) for row, output in zip(rows, outputs, strict=True)])

    def shutdown(self, abort: bool) -> None:
        """End the node's backend; the group's is the caller's."""
        if self.local is not None and self.local is not self.inner:
            self.local.abort() if abort else self.local.shutdown()

    def _run(self, name: str, output: Tensor, input: Tensor, reduction: int) -> None:
        whole = input if name == "reduce_scatter" else output
        if not whole.numel():
            return
        self._connect(whole.device)
        choice = self.choose(name, whole.nbytes, native=False)
        if self._nodewise is not None and covers(choice) and _native_sums(name, whole):
            if name == "all_gather":
                self._nodewise.all_gather(choice, output, input)
            elif name == "reduce_scatter":
                self._nodewise.reduce_scatter(choice, output, input, reduction)
            else:
                self._nodewise.all_reduce(choice, output, reduction)
            return
        if (name, choice) not in self._plans:
            self._plans[name, choice] = self._plan(name, choice)
        made = self._plans[name, choice]
        layout = _layout(name, whole.numel(), self.size)
        combine = COMBINE.get(reduction, torch.add)
        memory = Memory(made, layout, input, output)
        execute(resolve(made, layout), memory, self.rank, combine, self.inner, range(self.size))

    def _connect(self, device: torch.device) -> None:
        """NCCL's communicators are made by all ranks together, of which a step may leave some out."""
        if device not in self._connected:
            for backend in filter(None, (self.inner, self.local)):
                backend.allreduce([torch.zeros(1, device=device)], AllreduceOptions()).wait()
            self._connected.add(device)

    def _plan(self, name: str, choice: Choice) -> Plan:
        make = algorithms(name, self.size)[choice.algorithm]
        return plan(lambda rank: make(name, rank, self.size, self.nodes, choice.chunks), self.rank, self.size)


def _flat(data: Tensor) -> Tensor:
    """A contiguous tensor in one dimension, of stride 1 even where it has but one element."""
    return data.as_strided((data.numel(),), (1,))


def _native_sums(name: str, data: Tensor) -> bool:
    """True if the vendor's library can do its part within a node."""
    return data.dtype is not torch.int16 and (name == "all_gather" or data.dtype is not torch.bool)


def _layout(collective: str, elements: int, size: int) -> Layout:
    lengths = tuple(block_lengths(elements, size))
    starts = tuple(sum(lengths[:block]) for block in range(size))
    own = (0,)
    if collective == "all_gather":
        return Layout(lengths, own, starts)
    return Layout(lengths, starts, own if collective == "reduce_scatter" else starts)
