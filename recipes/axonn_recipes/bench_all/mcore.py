"""The model as megatron.core's GPT, split by Megatron itself."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from axonn_recipes.bench_all.settings import Settings, Way
from axonn_recipes.bench_all.weights import drawn, keep_zeros
from axonn_recipes.bench_all.work import LEARNING_RATE, batch_of
from axonn_recipes.bench_moe.mcore import let_dispatch_on_cpu, mixture
from axonn_recipes.data import Corpus
from axonn_recipes.megatron_gpt.settings import Settings as Training


def build(settings: Settings, way: Way) -> Callable[[], Tensor]:
    """A side's training step; it returns the batch's loss."""
    warnings.filterwarnings("ignore", category=UserWarning)
    from megatron.core import parallel_state

    from axonn_recipes.megatron_gpt import train
    from axonn_recipes.megatron_gpt.model import build as build_model
    from axonn_recipes.megatron_gpt.model import transformer

    let_dispatch_on_cpu()
    side = _training(settings, way)
    over = {"expert_model_parallel_size": way.experts, "expert_tensor_parallel_size": 1}
    train.start(side, **over)
    model, optimizer = build_model(
        side, mixture(transformer(side), settings, over), lambda built: _fill(built, settings, parallel_state)
    )
    optimizer.config.clip_grad = 0.0
    for group in optimizer.param_groups:
        group["weight_decay"] = 0.0
    reader, readers = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    batches = batch_of(settings, readers, reader, way.microbatches)

    class Steps(train.Steps):
        def _share(self, step: int) -> list[tuple[Tensor, Tensor]]:
            return batches

    nothing = torch.zeros(1)
    steps = Steps(side, model, optimizer, Corpus(nothing, nothing, 0, "none"))
    return lambda: torch.tensor(steps.take(0)[0])


def _training(settings: Settings, way: Way) -> Training:
    return Training(
        ranks=settings.ranks,
        layers=settings.layers,
        hidden=settings.hidden,
        heads=settings.heads,
        context=settings.context,
        batch=settings.batch,
        micro_batch=settings.batch // (settings.readers(way) * way.microbatches),
        seed=settings.seed,
        lr=LEARNING_RATE,
        untied=True,
        tensor_model_parallel_impl="megatron",
        pipeline_model_parallel_size=way.stages,
        distributed_optimizer=bool(settings.stage),
    )


@torch.no_grad()
def _fill(model: nn.Module, settings: Settings, ranks: Any) -> None:
    """The serial model's weights under Megatron's names."""
    first_layer = ranks.get_pipeline_model_parallel_rank() * (
        settings.layers // ranks.get_pipeline_model_parallel_world_size()
    )
    local = settings.experts // ranks.get_expert_model_parallel_world_size()
    first_expert = ranks.get_expert_model_parallel_rank() * local
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.copy_(_weight(settings, name, tuple(parameter.shape), first_layer, first_expert))
            keep_zeros(parameter)


def _weight(settings: Settings, name: str, shape: tuple[int, ...], first_layer: int, first_expert: int) -> Tensor:
    outside = {
        "embedding.word_embeddings.weight": "0.tokens",
        "embedding.position_embeddings.weight": "0.positions",
        "output_layer.weight": f"{settings.layers + 1}.head",
    }
    if name in outside:
        return drawn(settings, outside[name], shape)
    number, _, rest = name.partition("layers.")[2].removesuffix(".weight").partition(".")
    layer = 1 + first_layer + int(number)
    if rest == "self_attention.linear_qkv":
        whole = (settings.hidden, settings.hidden)
        three = [drawn(settings, f"{layer}.attention.{which}", whole) for which in "qkv"]
        return torch.cat([part.unflatten(0, (settings.heads, -1)) for part in three], 1).flatten(0, 1)
    if rest == "self_attention.linear_proj":
        return drawn(settings, f"{layer}.attention.out", shape)
    if rest == "mlp.router":
        return drawn(settings, f"{layer}.router", shape)
    expert, _, which = rest.removeprefix("mlp.experts.local_experts.").partition(".")
    called = {"linear_fc1": "up", "linear_fc2": "down"}[which]
    return drawn(settings, f"{layer}.experts.{int(expert) + first_expert}.{called}", shape)
