"""The sides: one model and one batch, under DeepSpeed's engine with and without the block, and under torch's schedules."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.distributed import pipelining  # noqa: E402

from axonn_recipes.bench_pipeline.settings import Settings  # noqa: E402
from axonn_recipes.bench_pipeline.work import Pace, Work, loss_fn  # noqa: E402

OURS, LEAST, STOCK = "message driven", "message driven, limit G", "deepspeed"
BLOCKS: dict[str, dict[str, Any] | None] = {
    STOCK: None,
    OURS: {"pipeline": {"schedule": "message_driven"}},
    LEAST: {"pipeline": {"schedule": "message_driven"}},
    "ours, 1F1B": {"pipeline": {"schedule": "1f1b"}},
    "ours, GPipe": {"pipeline": {"schedule": "gpipe"}},
}
# Mixed precision with AdamW, its state on the device and in host memory.
HALVES: dict[str, dict[str, Any]] = {
    "bf16": {"pipeline": {}},
    "bf16, offloaded": {"pipeline": {}, "offload_optimizer": {}},
}
TORCH = {
    "torch GPipe": pipelining.ScheduleGPipe,
    "torch 1F1B": pipelining.Schedule1F1B,
    "torch interleaved 1F1B": pipelining.ScheduleInterleaved1F1B,
    "torch zero bubble": pipelining.ScheduleInterleavedZeroBubble,
}
SPLIT_BACKWARD = ("torch zero bubble",)
LEARNING_RATE = 1e-3
Batch = Callable[[], float]


def batch_of(settings: Settings, pipeline: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of a pipeline's microbatches."""
    generator = torch.Generator().manual_seed(pipeline)
    shape = (1, settings.tokens, settings.width)
    return [
        (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
        for _ in range(settings.microbatches)
    ]


def make(name: str, settings: Settings, pace: Pace) -> Batch:
    """A side; a call computes a batch, steps, and returns the loss of the whole batch."""
    if name in TORCH:
        return _torch(name, settings, pace)
    if name in HALVES:
        block = dict(HALVES[name])
        if "offload_optimizer" in block:
            block["offload_optimizer"] = {"bucket_size": settings.bucket_size}
        return deepspeed_engine(block, settings, pace, torch.bfloat16)[0]
    made = BLOCKS[name]
    if made is not None and name == LEAST:
        made = {"pipeline": {**made["pipeline"], "pipeline_limit": settings.stages}}
    return deepspeed_engine(made, settings, pace)[0]


def deepspeed_engine(
    block: dict[str, Any] | None, settings: Settings, pace: Pace, dtype: torch.dtype = torch.float32
) -> tuple[Batch, Any]:
    """A side under DeepSpeed, and its engine."""
    half = dtype == torch.bfloat16
    optimizer = {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}} if half else None
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.microbatches,
        "optimizer": optimizer or {"type": "SGD", "params": {"lr": LEARNING_RATE}},
        "bf16": {"enabled": half},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    if block is not None:
        config["axonn"] = block
    layers = [LayerSpec(Work, pace, number, settings.width) for number in range(settings.layers)]
    module = PipelineModule(layers, num_stages=settings.stages, loss_fn=loss_fn, partition_method="uniform")
    engine = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)[0]
    pairs = batch_of(settings, engine.grid.get_data_parallel_rank())
    data = [(inputs.to(dtype), targets.to(dtype)) for inputs, targets in pairs]
    return lambda: float(engine.train_batch(iter(data))), engine


def _torch(name: str, settings: Settings, pace: Pace) -> Batch:
    rank, stages = dist.get_rank(), settings.stages
    several = name not in ("torch GPipe", "torch 1F1B")
    parts = 2 * stages if several else stages
    mine = (rank, rank + stages) if several else (rank,)
    size = settings.layers // parts
    modules = [
        nn.Sequential(*(Work(pace, number, settings.width) for number in range(part * size, (part + 1) * size)))
        for part in mine
    ]
    made = [
        pipelining.PipelineStage(module, part, parts, torch.device("cpu"))
        for module, part in zip(modules, mine, strict=True)
    ]
    given: Any = made if several else made[0]
    schedule: Any = TORCH[name](given, settings.microbatches, loss_fn=loss_fn)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=LEARNING_RATE)
    data = batch_of(settings, 0)
    inputs, targets = (torch.cat([pair[which] for pair in data]) for which in (0, 1))

    def batch() -> float:
        optimizer.zero_grad()
        losses: list[Tensor] = []
        arguments = (inputs,) if rank == 0 else ()
        schedule.step(*arguments, **({"target": targets, "losses": losses} if rank == stages - 1 else {}))
        optimizer.step()
        # As DeepSpeed: every stage knows the loss.
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, stages - 1)
        return loss.item()

    return batch
