"""The work of each rank: train by ZeRO-3 with one side's collectives and the other's, in turns."""

from __future__ import annotations

import gc
import logging
import os
import time
import warnings
from collections import Counter
from contextlib import nullcontext
from typing import Any

# Here and not in the ranks, which are forked: DeepSpeed takes seconds to import. PCCL's tensors are the CPU's.
os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402

import axonn_plugins  # noqa: E402
from axonn_plugins import processors
from axonn_plugins.config import ConfigError  # noqa: E402
from axonn_plugins.observe.ledger import Ledger  # noqa: E402
from axonn_plugins.pccl import Options, world  # noqa: E402
from axonn_plugins.pccl.tuner import tune  # noqa: E402
from axonn_recipes.bench.rounds import apart, in_turns, over_ranks  # noqa: E402
from axonn_recipes.bench_pccl.train_settings import SIDES, TOLERANCE, WARM_UP, Training  # noqa: E402
from axonn_recipes.models.gpt import GPT  # noqa: E402


def measure(settings: Training) -> dict[str, Any]:
    """Train on this cluster; every rank calls it, and has the result.

    Returns:
        Nodes, ranks a node, and the turns: side, losses of all steps (means over the ranks), seconds of the timed steps
        (the slowest rank's), and calls and bytes sent of a step by collective, as this rank made them.

    Raises:
        ConfigError: the sides do not compute the same losses.
    """
    _prepare()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    if settings.tune:
        world.take(Options())  # those of the empty block
        tune()
        world.give_back()
    turns = []
    for _, side in in_turns(SIDES, settings.rounds):
        turns.append(_turn(settings, side))
        _check(turns[0], turns[-1], TOLERANCE[settings.precision])
    local = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    nodes = dist.get_world_size() // local
    dist.destroy_process_group()
    return {"nodes": nodes, "ranks_per_node": local, "turns": turns}


def _prepare() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    processors.share_among(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    # Else DeepSpeed compiles a kernel for inference when it starts; training needs neither it nor a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    axonn_plugins.activate()


def _turn(settings: Training, side: str) -> dict[str, Any]:
    torch.manual_seed(settings.seed)
    model = GPT(settings.model)
    config = settings.ds_config(side)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + dist.get_rank())
    losses, seconds, calls, sent = [], [], Counter[str](), Counter[str]()
    for number in range(WARM_UP + settings.steps):
        windows = torch.randint(256, (settings.batch, settings.context + 1), generator=generator)
        dist.barrier()
        began = time.perf_counter()
        with Ledger() if number == WARM_UP - 1 else nullcontext() as ledger:
            losses.append(_step(engine, windows))
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
        for entry in ledger.entries if ledger else ():
            calls[entry.collective.op] += 1
            sent[entry.collective.op] += int(entry.sent)
    engine.destroy()
    del engine, model
    gc.collect()
    return {
        "side": side,
        "losses": [loss / dist.get_world_size() for loss in over_ranks(losses, dist.ReduceOp.SUM)],
        "seconds": over_ranks(seconds, dist.ReduceOp.MAX),
        "calls": dict(calls),
        "sent": dict(sent),
    }


def _step(engine: Any, windows: Tensor) -> float:
    loss = engine(windows[:, :-1], windows[:, 1:])
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def _check(first: dict[str, Any], turn: dict[str, Any], tolerance: float) -> None:
    difference = apart(first["losses"], turn["losses"])
    if not difference <= tolerance:
        raise ConfigError(
            f"{first['side']} and then {turn['side']} do not compute the same: their losses, {first['losses']} and "
            f"{turn['losses']}, differ by {difference:.2g}, more than {tolerance:g}; nothing is reported"
        )
