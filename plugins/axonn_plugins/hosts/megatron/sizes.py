"""Sizes of a model that the grid must divide."""

from __future__ import annotations

from typing import Any

from axonn_plugins.hosts.megatron.settings import Settings


def indivisible(args: Any, settings: Settings) -> str | None:
    """The first size of the model that the grid does not divide, as a sentence; None where it divides all.

    In the scattered layout heads and columns are split over x and y where they divide, else over x, so x is what must.

    Args:
        args: Megatron's, with derived sizes.
        settings: the grid.
    """
    gx, gy = settings.gx, settings.gy
    heads, hidden = args.num_attention_heads, args.hidden_size
    groups = args.num_query_groups if args.group_query_attention else heads
    if groups % gx and gx % groups:
        return f"--num-query-groups {groups} is neither a multiple of --axonn-gx {gx} nor divides it; change one of the two"
    if groups < gx and getattr(args, "attention_output_gate", False):
        return f"--attention-output-gate needs --num-query-groups {groups} to be a multiple of --axonn-gx {gx}; change one of the two"
    width = qkv_width(args, heads, groups, getattr(args, "kv_channels", None) or hidden // heads)
    sizes = [
        ("--num-attention-heads", heads, "gx", gx),
        ("the width of queries, keys and values,", width, "gx", gx),
        ("--ffn-hidden-size", args.ffn_hidden_size, "gx", gx),
        ("--hidden-size", hidden, "gy", gy),
    ]
    if settings.layout == "scattered":
        sizes.append(("--seq-length", args.seq_length, "gx", gx))
    for flag, size, axis, by in sizes:
        if size % by:
            return f"{flag} {size} does not divide by --axonn-{axis} {by}, which splits it; change one of the two"
    return None


def qkv_width(args: Any, heads: int, groups: int, channels: int) -> int:
    """Width of queries, of as many gates where there are any, keys and values."""
    queries = 2 * heads if getattr(args, "attention_output_gate", False) else heads
    return (queries + 2 * groups) * channels
