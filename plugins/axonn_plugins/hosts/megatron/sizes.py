"""Sizes of a model that the grid must divide, and what ranks with the same heads drop."""

from __future__ import annotations

import re
from typing import Any

from axonn_plugins.config.base import ConfigError
from axonn_plugins.hosts.megatron.settings import Settings

MULTIPLE = 16
"""Rows and columns of a product in 8 bits are multiples of it."""


def mistaken(args: Any, settings: Settings) -> str | None:
    """The first reason why a model does not train on a grid, as a sentence; None where there is none.

    Args:
        args: Megatron's, with derived sizes.
        settings: the grid.
    """
    return indivisible(args, settings) or uneven_in_8_bits(args, settings) or dropped_apart(args, settings)


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
    if getattr(args, "sft", False) and settings.tensor > 1 and _loses_lengths():
        return (
            f"--sft does not go with gx*gy = {settings.tensor} in megatron-core 0.16, whose scripts send the lengths of packed sequences in "
            "another order than tensor ranks receive them; use 0.17 or later, or leave --axonn-gx and -gy at 1"
        )
    if groups % gx and gx % groups:
        return f"--num-query-groups {groups} is neither a multiple of --axonn-gx {gx} nor divides it; change one of the two"
    if groups < gx and getattr(args, "attention_output_gate", False):
        return f"--attention-output-gate needs --num-query-groups {groups} to be a multiple of --axonn-gx {gx}; change one of the two"
    sizes = [
        ("--num-attention-heads", heads, "gx", gx),
        *((f"{name},", width, "gx", gx) for name, width in attention_widths(args)),
        ("--ffn-hidden-size", args.ffn_hidden_size, "gx", gx),
        ("--hidden-size", hidden, "gy", gy),
    ]
    if getattr(args, "multi_latent_attention", False):
        latents = {name: getattr(args, name) for name in ("q_lora_rank", "kv_lora_rank")}
        sizes += [(f"--{name.replace('_', '-')}", rank, "gy", gy) for name, rank in latents.items() if rank]
    if getattr(args, "mtp_num_layers", None):
        sizes.append(("--hidden-size", hidden, "gx", gx))
    if getattr(args, "num_experts", None):
        sizes.append(("--moe-shared-expert-intermediate-size", args.moe_shared_expert_intermediate_size or 0, "gx", gx))
        width = args.moe_ffn_hidden_size or args.ffn_hidden_size
        if args.expert_tensor_parallel_size != 1 and width % settings.tensor:
            return (
                f"--moe-ffn-hidden-size {width} does not divide by gx*gy = {settings.tensor}, which splits every expert; change one of the two, "
                "or give --expert-tensor-parallel-size 1"
            )
    if settings.layout == "scattered":
        ranks = getattr(args, "context_parallel_size", 1)
        name = "--seq-length" if ranks == 1 else f"--seq-length by --context-parallel-size {ranks},"
        sizes.append((name, args.seq_length // ranks, "gx", gx))
    for flag, size, axis, by in sizes:
        if size % by:
            return f"{flag} {size} does not divide by --axonn-{axis} {by}, which splits it; change one of the two"
    return None


def _loses_lengths() -> bool:
    """True of a Megatron whose `get_batch_on_this_tp_rank` sends the longest length, which no other rank receives: they read its bytes as a count."""
    from megatron import core

    return re.match(r"0\.16\b", str(getattr(core, "__version__", ""))) is not None


def uneven_in_8_bits(args: Any, settings: Settings) -> str | None:
    """The first size of a rank's products that Transformer Engine cannot multiply in 8 bits, as a sentence; None where it can all."""
    if not getattr(args, "fp8", None):
        return None
    gx, gy, ranks = settings.gx, settings.gy, getattr(args, "context_parallel_size", 1)
    heads = args.num_attention_heads * (
        getattr(args, "kv_channels", None) or args.hidden_size // args.num_attention_heads
    )
    for flag, size, divisor in (
        ("--hidden-size", args.hidden_size, ("--axonn-gy", gy)),
        ("--ffn-hidden-size", args.ffn_hidden_size, ("--axonn-gx", gx)),
        ("the width of all heads", heads, ("--axonn-gx", gx)),
        *((f"{name},", width, ("--axonn-gx", gx)) for name, width in attention_widths(args)),
        (
            "--seq-length times --micro-batch-size",
            args.seq_length * args.micro_batch_size,
            ("--context-parallel-size", ranks),
        ),
    ):
        if size % (divisor[1] * MULTIPLE):
            return (
                f"{flag} {size} by {divisor[0]} {divisor[1]} leaves a rank {size / divisor[1]:g}, no multiple of {MULTIPLE}, as products with "
                f"--fp8-format {args.fp8} need; change one of the two"
            )
    return None


def dropped_apart(args: Any, settings: Settings) -> str | None:
    """Say that ranks with the same heads would drop other elements, as a sentence; None where they drop the same, or nothing.

    Args:
        args: Megatron's, with derived sizes.
        settings: the grid.
    """
    heads = args.num_query_groups if args.group_query_attention else args.num_attention_heads
    apart = settings.gy == 1 or (settings.layout == "scattered" and heads % settings.tensor == 0)
    # Sequences that ranks share have an attention of ours, and a hybrid model may have none.
    others = getattr(args, "context_parallel_size", 1) > 1 or getattr(args, "is_hybrid_model", False)
    if apart or others or args.transformer_impl != "transformer_engine" or not getattr(args, "attention_dropout", 0):
        return None
    why = f"gx*gy = {settings.tensor} does not divide {heads} heads or query groups, so that"
    why = why if settings.layout == "scattered" else f"with --axonn-layout {settings.layout}"
    return (
        f"--attention-dropout {args.attention_dropout} does not go with Transformer Engine's attention on --axonn-gy {settings.gy}: {why} ranks along y "
        "have the same heads, and each would drop other elements; give --attention-dropout 0, or --transformer-impl local"
    )


def attention_widths(args: Any) -> list[tuple[str, int]]:
    """Output features of attention's column-parallel layers, and what they are."""
    heads = args.num_attention_heads
    if getattr(args, "multi_latent_attention", False):
        widths = [
            ("--q-lora-rank", args.q_lora_rank or 0),
            ("--kv-lora-rank plus --qk-pos-emb-head-dim", args.kv_lora_rank + args.qk_pos_emb_head_dim),
            ("the width of queries", heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)),
            ("the width of keys and values", heads * (args.qk_head_dim + args.v_head_dim)),
        ]
        return [(name, width) for name, width in widths if width]
    groups = args.num_query_groups if args.group_query_attention else heads
    # As many gates as queries, where there are any.
    queries = 2 * heads if getattr(args, "attention_output_gate", False) else heads
    channels = getattr(args, "kv_channels", None) or args.hidden_size // heads
    return [("the width of queries, keys and values", (queries + 2 * groups) * channels)]


def check_instances(args: Any, block: int) -> None:
    """Refuse several instances of the distributed optimizer among which replicas of weights cannot be dealt out.

    Args:
        args: Megatron's.
        block: ranks of which none holds the same part of a weight, or of an expert, as another.

    Raises:
        ConfigError: says how many replicas there are.
    """
    instances = getattr(args, "num_distributed_optimizer_instances", 1)
    replicas = args.world_size // args.pipeline_model_parallel_size // block
    if instances < 1 or replicas % instances:
        raise ConfigError(
            f"--num-distributed-optimizer-instances {instances} does not divide the {replicas} data-parallel replicas that the grid and "
            f"--expert-model-parallel-size leave; choose a divisor of {replicas}"
        )
