"""Sizes of the grid that are ``auto``: the planner chooses, for Megatron's arguments and this machine, before any group is made."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import add
from typing import Any

import numpy as np

from axonn_plugins.config.base import ConfigError
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_plugins.hosts.megatron.sizes import mistaken
from axonn_plugins.planner import choose, here
from axonn_plugins.planner.axonn import Bandwidths, Grids, Repeats, layer_communication, model_flops
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.space import factorizations

_AXES = ("x", "y", "z", "data")


def choose_sizes(args: Any, given: Mapping[str, int]) -> dict[str, int]:
    """The grid whose collectives take least time; printed by rank 0 with what keeps it.

    Args:
        args: Megatron's, before its validation.
        given: sizes that are not auto, by gx, gy and gz.

    Raises:
        ConfigError: no grid divides ranks, model and batch, or none fits the memory.
    """
    stages = args.pipeline_model_parallel_size
    if args.world_size % stages:
        raise ConfigError(
            f"--pipeline-model-parallel-size {stages} does not divide the {args.world_size} ranks; correct it"
        )
    model = model_of(args)
    refused: list[str] = []
    candidates = list(_candidates(args, model, given, refused))
    if not candidates:
        fixed = "".join(f" --axonn-{axis} {size}" for axis, size in given.items())
        first = f", for one because {refused[0].partition(';')[0]}" if refused else ""
        raise ConfigError(
            f"no grid of {args.world_size // stages} ranks{' with' + fixed if fixed else ''} divides the model and "
            f"--global-batch-size {args.global_batch_size}{first}; use another number of ranks or samples"
        )
    on = here.this_machine(None, "", cpu=args.distributed_backend == "gloo")
    choices = choose.choose(on, candidates)
    sizes = {"gx": choices[0].gx, "gy": choices[0].gy, "gz": choices[0].gz}
    if args.rank == 0:
        pinned = " ".join(f"--axonn-{axis} {size}" for axis, size in sizes.items())
        print(f"axonn: planner, on {on.name}: {choose.sentence(choices)}; to keep it, give {pinned}", flush=True)
    return sizes


def model_of(args: Any) -> Transformer:
    """The planner's model of Megatron's arguments; what they lack, Megatron's validation refuses later, in its words.

    Raises:
        ConfigError: sizes that no grid can be chosen without.
    """
    for name in ("num_experts", "multi_latent_attention", "mtp_num_layers"):
        if getattr(args, name, None):
            raise ConfigError(
                f"--{name.replace('_', '-')} does not go with the size auto, as the planner counts plain layers alone; give numbers"
            )
    if args.context_parallel_size > 1:
        raise ConfigError(
            f"--context-parallel-size {args.context_parallel_size} does not go with the size auto, which counts samples that ranks read whole; give "
            "numbers"
        )
    for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "micro_batch_size"):
        if getattr(args, name) is None:
            raise ConfigError(f"--{name.replace('_', '-')} is missing, without which no size can be auto; give it")
    if not args.kv_channels and args.hidden_size % args.num_attention_heads:
        raise ConfigError(
            f"--num-attention-heads {args.num_attention_heads} does not divide --hidden-size {args.hidden_size}; "
            "change one of the two, or give --kv-channels"
        )
    return Transformer(
        name="this model",
        layers=args.num_layers,
        hidden=args.hidden_size,
        heads=args.num_attention_heads,
        sequence=args.seq_length,
        feed_forward=_ffn(args),
        gated=args.swiglu,
        kv_heads=args.num_query_groups if args.group_query_attention else 0,
        head_width=args.kv_channels or 0,
        vocabulary=args.vocab_size or args.padded_vocab_size or 0,
    )


def _ffn(args: Any) -> int:
    """Megatron's own default where it is not given."""
    if args.ffn_hidden_size is not None:
        return args.ffn_hidden_size
    return int(4 * args.hidden_size * 2 / 3 / 64) * 64 if args.swiglu else 4 * args.hidden_size


def _candidates(
    args: Any, model: Transformer, given: Mapping[str, int], refused: list[str]
) -> Iterator[choose.Candidate]:
    """Grids that divide model and batch; `refused` gets why others do not."""
    derived = Namespace(**{**vars(args), "ffn_hidden_size": _ffn(args)})
    for sizes in factorizations(args.world_size // args.pipeline_model_parallel_size, 4):
        gx, gy, gz, gdata = sizes
        settings = Settings(gx, gy, gz, args.axonn_layout or "scattered")
        if any(getattr(settings, axis) != size for axis, size in given.items()):
            continue
        mistake = mistaken(derived, settings)
        at_once = args.micro_batch_size * gz * gdata
        batch = args.global_batch_size or at_once
        if mistake is None and batch % at_once:
            mistake = f"--global-batch-size {batch} does not divide by {at_once}"
        if mistake is not None:
            refused.append(mistake)
            continue
        yield _candidate(args, model, sizes, batch // at_once, batch)


def _candidate(args: Any, model: Transformer, sizes: tuple[int, ...], steps: int, batch: int) -> choose.Candidate:
    """The bytes that one rank of a stage sends and holds (000, equations 5.1 to 5.5)."""
    gx, gy, gz, gdata = sizes
    stages = args.pipeline_model_parallel_size
    at = Grids(*np.array([sizes], np.int64).T)
    weight = 2 if args.fp16 or args.bf16 else 4
    passes = 2 if args.recompute_granularity == "full" else 1
    # The formulas take two bytes an element of weights, and what they give is taken times weight/2 below.
    summed = 2 * _gradient_bytes(args) / weight
    repeats = Repeats(passes, passes, steps, gradient_bytes=summed, scatter_bytes=summed)
    sent, scattered = {}, {}
    for one in _AXES:
        # An axis' bytes are the seconds where it alone has a bandwidth, of one byte a second.
        beta = Bandwidths(**{axis: np.array([1.0 if axis == one else np.inf]) for axis in _AXES})
        parts = [
            layer_communication(linear, batch / gdata, at, beta, repeats).times(block.count)
            for block in model.blocks
            for linear in block.linears
        ]
        part = reduce(add, parts).times(weight / 2 / stages)
        sent[one] = float(part.total[0])
        sums = (part.forward + part.backward) / 2 if args.axonn_layout != "replicated" else 0
        scattered[one] = float((part.scatter + sums)[0])
    each = 4 * model.layers * steps // stages
    messages = {
        "x": 2 * (gx - 1) * each,
        "y": 2 * (gy - 1) * each,
        "z": (passes + 1) * (gz - 1) * each,
        "data": 2 * (gdata - 1),
    }
    flops = model_flops(model, batch, args.recompute_granularity == "full") / (gx * gy * gz * gdata * stages)
    bytes_each = weight + 4 + (12 if weight == 2 else 8) / (gdata if args.use_distributed_optimizer else 1)
    state = bytes_each * model.parameters / (gx * gy * gz) / stages
    return choose.Candidate((gx, gy, gz, gdata), sent, messages, state, scattered, flops)


def _gradient_bytes(args: Any) -> int:
    """Bytes of an element of a gradient that is summed over ranks; Megatron's validation has not run yet."""
    rounded = args.fp16 and not getattr(args, "accumulate_allreduce_grads_in_fp32", False)
    return 2 if rounded or getattr(args, "grad_reduce_in_bf16", False) else 4
