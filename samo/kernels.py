"""SAMO on a GPU: a gradient's compression, and the whole step of Adam, as one Triton kernel each.

Nothing imports this module where triton is missing; `samo.fused` decides, and the torch version, tiles of
`axonn_plugins.optim`, is the reference. Both kernels give a program consecutive kept elements of one 65,536-element block, so that 16-bit offsets are
turned into positions in registers: what moves is 2 bytes an index, not 8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from axonn_plugins.optim.index import BLOCK as _BLOCK
from axonn_plugins.optim.index import Index

BLOCK = tl.constexpr(_BLOCK)
CHUNK = 1024
"""Kept elements that a program handles."""
ADAM_WARPS = 8
"""Warps of a program of `adam`: with four, a thread's eight elements take 122 registers on sm_90, and programs fill a quarter of the GPU."""

PIECE = ("scalars", "index", "bytes", "begin", "gradient", "master", "parameter", "exp_avg", "exp_avg_sq")
"""Columns of `adam`'s int64 table, a row a piece: addresses, but for these: its row of scalars (-1: it has no gradient), bytes of an index's
element (0: all are kept), and where the piece begins in the index and in the vectors of gradients and master weights."""
NOTHING = (-1,) * len(PIECE)
"""A row of a piece without a gradient."""

SCALAR = ("decay", "coupled_decay", "weight1", "beta2", "weight2", "root", "eps", "step_size")
"""Columns of `adam`'s float32 table, what torch's Adam computes in float64 on the host."""

PIECE_COLUMNS = tl.constexpr(len(PIECE))
SCALAR_COLUMNS = tl.constexpr(len(SCALAR))
WORK_COLUMNS = tl.constexpr(4)


@triton.jit
def _position(index, width, base, number, kept):
    """Positions of the kept elements `number` of a flattened tensor."""
    if width == 2:
        found = base + tl.load(index.to(tl.pointer_type(tl.uint16)) + number, kept, 0).to(tl.int64)
    elif width == 4:
        found = tl.load(index.to(tl.pointer_type(tl.int32)) + number, kept, 0).to(tl.int64)
    else:
        found = number
    return found


@triton.jit(do_not_specialize=["start", "kept", "chunks"])
def _compress(
    dense, index, starts, into, start, kept, chunks, WIDTH: tl.constexpr, ADD: tl.constexpr, SIZE: tl.constexpr
):
    program = tl.program_id(0)
    block = (program // chunks).to(tl.int64)
    if WIDTH == 2:
        begin = tl.load(starts + block)
        end = tl.load(starts + block + 1)
    else:
        begin = block
        end = begin + kept
    number = begin + (program % chunks) * SIZE + tl.arange(0, SIZE)
    inside = number < end
    values = tl.load(dense + _position(index, WIDTH, block * BLOCK, number, inside), inside)
    into += start
    if ADD:
        values = values.to(tl.float32) + tl.load(into + number, inside).to(tl.float32)
    tl.store(into + number, values.to(into.dtype.element_ty), inside)


@triton.jit
def _adam(work, pieces, scalars, gradients, masters, factor, MASTER: tl.constexpr, SIZE: tl.constexpr):
    row = work + tl.program_id(0).to(tl.int64) * WORK_COLUMNS
    piece = tl.load(row)
    first = tl.load(row + 1)
    count = tl.load(row + 2)
    base = tl.load(row + 3)
    pieces += piece * PIECE_COLUMNS
    numbers = tl.load(pieces)
    if numbers >= 0:
        scalars += numbers * SCALAR_COLUMNS
        lane = tl.arange(0, SIZE)
        inside = lane < count
        number = first + lane
        parameter = tl.load(pieces + 6).to(tl.pointer_type(gradients.dtype.element_ty))
        position = _position(tl.load(pieces + 1), tl.load(pieces + 2), base, tl.load(pieces + 3) + number, inside)
        exp_avg = tl.load(pieces + 7).to(tl.pointer_type(tl.float32)) + number
        exp_avg_sq = tl.load(pieces + 8).to(tl.pointer_type(tl.float32)) + number
        if MASTER:
            master = masters + tl.load(pieces + 5) + number
            weight = tl.load(master, inside)
        else:
            weight = tl.load(parameter + position, inside)
        gradient = tl.load(gradients + tl.load(pieces + 4) + number, inside).to(tl.float32) * tl.load(factor)
        average = tl.load(exp_avg, inside)
        square = tl.load(exp_avg_sq, inside)

        weight *= tl.load(scalars)
        gradient += tl.load(scalars + 1) * weight
        weight1 = tl.load(scalars + 2)
        # As torch's lerp: from the nearer end.
        if weight1 < 0.5:
            average += weight1 * (gradient - average)
        else:
            average = gradient - (gradient - average) * (1 - weight1)
        square = square * tl.load(scalars + 3) + tl.load(scalars + 4) * (gradient * gradient)
        root = tl.div_rn(tl.sqrt_rn(square), tl.load(scalars + 5)) + tl.load(scalars + 6)
        weight -= tl.load(scalars + 7) * tl.div_rn(average, root)

        tl.store(exp_avg, average, inside)
        tl.store(exp_avg_sq, square, inside)
        if MASTER:
            tl.store(master, weight, inside)
        tl.store(parameter + position, weight.to(gradients.dtype.element_ty), inside)


def compress(dense: Tensor, index: Index, into: Tensor, start: int, accumulate: bool) -> None:
    """Take a gradient's kept elements; the same as `Index.compress` of all of it.

    Args:
        dense: the gradient, flattened.
        index: which elements.
        into: the vector of compressed gradients.
        start: where in it.
        accumulate: add to what is there, else replace it.
    """
    stored, starts = index.tensors
    blocks = 1 if starts is None else starts.numel() - 1
    chunks = -(-index.longest // CHUNK)
    if blocks * chunks:
        width = stored.element_size()
        _compress[(blocks * chunks,)](
            dense, stored, starts, into, start, index.kept, chunks, WIDTH=width, ADD=accumulate, SIZE=CHUNK
        )


def adam(
    work: Tensor, pieces: Tensor, scalars: Tensor, gradients: Tensor, masters: Tensor | None, factor: Tensor
) -> None:
    """Update kept elements, and write them to where they belong in the parameters.

    Args:
        work: (programs, 4), from `split`, with the piece's number in front.
        pieces: see `PIECE`; parameters are of the gradients' dtype.
        scalars: see `SCALAR`.
        gradients: compressed, bf16, fp16 or fp32.
        masters: float32 weights; None: the parameters are the weights.
        factor: one float32, by which gradients are multiplied.
    """
    if work.shape[0]:
        _adam[(work.shape[0],)](
            work,
            pieces,
            scalars,
            gradients,
            masters,
            factor,
            MASTER=masters is not None,
            SIZE=CHUNK,
            num_warps=ADAM_WARPS,
        )


def split(index: Index | None, begin: int, length: int, device: torch.device) -> Tensor:
    """Share kept elements among programs.

    Args:
        index: of a tensor; None: all of it is kept.
        begin: number of the first of its kept elements that are meant.
        length: how many.
        device: of the result.

    Returns:
        (programs, 3) int64: the first element, counted from `begin`; how many; where their block begins in the tensor.
    """
    starts = None if index is None else index.tensors[1]
    edges = torch.tensor([0, length], device=device) if starts is None else starts.clamp(begin, begin + length) - begin
    programs = (edges.diff() + CHUNK - 1) // CHUNK
    block = torch.repeat_interleave(programs)
    nth = torch.arange(block.numel(), device=device) - (programs.cumsum(0) - programs)[block]
    first = edges[block] + nth * CHUNK
    return torch.stack([first, (edges[block + 1] - first).clamp(max=CHUNK), block * _BLOCK], 1)
