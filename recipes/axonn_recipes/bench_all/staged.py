"""The model under DeepSpeed's engines: as they are, or with our block."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from axonn_recipes.bench_all.layers import Whole, fill, loss_of, specs
from axonn_recipes.bench_all.settings import OURS, Settings, Way
from axonn_recipes.bench_all.weights import keep_zeros
from axonn_recipes.bench_all.work import LEARNING_RATE, batch_of

_BUCKET = 10**6


def build(settings: Settings, way: Way) -> Callable[[], Tensor]:
    """A side's training step; it returns a loss, whose mean over all ranks is the batch's."""
    ours = way.host == OURS
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # On CPU DeepSpeed compiles a kernel for inference when it starts; training needs neither it nor a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend())
    if ours:
        import axonn_plugins

        axonn_plugins.activate()
    model = _model(settings, way)
    if not ours:
        for parameter in model.parameters():
            keep_zeros(parameter)
    weights = list(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=weights, config=_config(settings, way))
    place = dist.get_rank() % (settings.ranks // way.stages)
    batches = batch_of(settings, settings.readers(way), place // (way.gx * way.gy), way.microbatches)
    if way.stages > 1:
        return lambda: engine.train_batch(iter(batches)).detach()

    def step() -> Tensor:
        total = torch.zeros(())
        for ids, targets in batches:
            loss = engine(ids, targets)
            engine.backward(loss)
            engine.step()
            total += loss.detach() / len(batches)
        return total

    return step


def _model(settings: Settings, way: Way) -> nn.Module:
    model: nn.Module
    if way.stages > 1:
        model = PipelineModule(
            specs(settings, way), num_stages=way.stages, loss_fn=loss_of, partition_method="type:Block"
        )
    else:
        model = Whole(settings, way)
    place = dist.get_rank() % (settings.ranks // way.stages)
    share = place // (way.gx * way.gy) % way.experts
    fill(model, settings, share * (settings.experts // way.experts))
    return model


def _config(settings: Settings, way: Way) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_batch_size": settings.batch,
        "gradient_accumulation_steps": way.microbatches,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {
            "stage": settings.stage,
            # Stock ZeRO makes buffers of this size, by itself of 2 GB.
            "reduce_bucket_size": _BUCKET,
            "allgather_bucket_size": _BUCKET,
            # Nothing is clipped, and nobody asks for the norm; stage 0 has no such key.
            "compute_grad_norm": settings.stage == 0,
        },
    }
    if way.host == OURS:
        config["axonn"] = _block(settings, way)
    return config


def _block(settings: Settings, way: Way) -> dict[str, Any]:
    block: dict[str, Any] = {
        "tensor_parallel": {"gx": way.gx, "gy": way.gy, "gz": way.gz, "plan": "auto"},
        "ted": {},
        "pccl": {"tune": False},
        "overlap_param_gather": settings.stage == 1,
    }
    if way.stages > 1:
        block["pipeline"] = {}
    if settings.sparsity:
        block["samo"] = {"pruner": "nonzero"}
    return block
