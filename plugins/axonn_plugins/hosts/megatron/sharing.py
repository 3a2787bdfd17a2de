"""The tensors that are split among the ranks of x and y in each layout of activations.

| | replicated | scattered |
|---|---|---|
| residual stream | hidden over y | hidden over y, the sequence over x |
| attention | heads over x | heads over x and y where their groups divide, else over x |
| between fc1 and fc2 | columns over x | columns over x and y where they divide, else over x |
| logits | vocabulary over x | vocabulary over x and y |
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from axonn_plugins.hosts.megatron.settings import Settings
from axonn_tp import LinearSplit, Mesh
from axonn_tp.comm.collectives import gather_from, split_to


def stream_over(settings: Settings, mesh: Mesh) -> tuple[str, ...]:
    """Axes of more than one rank among which the residual stream differs."""
    axes = ("y", "x") if settings.layout == "scattered" else ("y",)
    return tuple(axis for axis in axes if mesh.size(axis) > 1)


def whole_stream(share: Tensor, settings: Settings, mesh: Mesh) -> Tensor:
    """All of the residual stream from this rank's share of it, (sequence, micro-batch, features), for a use that is the same on all ranks."""
    for axis in reversed(stream_over(settings, mesh)):
        share = gather_from(share, mesh, axis, dim=-1 if axis == "y" else 0)
    return share


def share_of_stream(whole: Tensor, settings: Settings, mesh: Mesh) -> Tensor:
    """This rank's share of what is the same on all ranks of x and y; inverse of `whole_stream`."""
    axes = stream_over(settings, mesh)
    if "x" in axes:
        check_length(whole.shape[0], mesh)
    for axis in axes:
        whole = split_to(whole, mesh, axis, dim=-1 if axis == "y" else 0)
    return whole


def check_length(sequence: int, mesh: Mesh) -> None:
    """Refuse a sequence that x cannot share without padding, of which Megatron's activations carry no note.

    Raises:
        ValueError: gx does not divide it.
    """
    if sequence % mesh.size("x"):
        raise ValueError(
            f"a sequence of {sequence} tokens does not divide by gx = {mesh.size('x')}, over which --axonn-layout scattered splits it; "
            "pad it to a multiple, or use --axonn-layout replicated"
        )


def heads_over(settings: Settings, mesh: Mesh, groups: int) -> tuple[str, ...]:
    """Axes that split the heads.

    Args:
        settings: the settings.
        mesh: the mesh.
        groups: query groups, which are never cut: as many as key and value heads.
    """
    if settings.layout == "scattered" and groups % mesh.size("model") == 0:
        return ("x", "y")
    return ("x",)


def column_split(settings: Settings, mesh: Mesh, n: int, parts: int = 1, heads: int | None = None) -> LinearSplit:
    """The split of a column-parallel layer with n output features; n is `parts` matrices, of `heads` heads."""
    if heads is not None and heads < mesh.size("x"):
        # Megatron's way: columns wherever they fall, gathered before a rank takes the queries and the one group that it needs.
        return LinearSplit(takes="tokens" if settings.layout == "scattered" else "split")
    if settings.layout == "replicated":
        return LinearSplit(parts=parts, heads=heads)
    split = LinearSplit(parts=parts, heads=heads, takes="tokens", gives="features")
    return split if split.can_scatter(n, mesh.grid) else replace(split, gives="split")


def row_split(settings: Settings) -> LinearSplit:
    """The split of a row-parallel layer; its input is split over y besides where the column layer gave it so."""
    return LinearSplit(transposed=True, gives="tokens" if settings.layout == "scattered" else "split")


def logits_over(settings: Settings) -> tuple[str, ...]:
    """Axes that split the vocabulary of logits, each within the share of the one before."""
    return ("x", "y") if settings.layout == "scattered" else ("x",)


def place(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """This rank's number among the ranks of `axes`."""
    number = 0
    for axis in axes:
        number = number * mesh.size(axis) + mesh.rank(axis)
    return number
