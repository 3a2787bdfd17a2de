"""megatron.core's GPT with experts: folded by Megatron itself, or on our grid."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from axonn_recipes.bench_moe.settings import Settings, Way
from axonn_recipes.data import Corpus
from axonn_recipes.megatron_gpt.settings import Settings as Training


def load() -> None:
    """Import what forked ranks need, once."""
    import megatron.core.models.gpt  # noqa: F401


def build(settings: Settings, way: Way) -> Callable[[], Tensor]:
    """A side's training step; it returns the batch's loss."""
    warnings.filterwarnings("ignore", category=UserWarning)
    from megatron.core import parallel_state

    from axonn_recipes.megatron_gpt import train
    from axonn_recipes.megatron_gpt.model import build as build_model
    from axonn_recipes.megatron_gpt.model import transformer

    let_dispatch_on_cpu()
    side, over = _training(settings, way), {"expert_model_parallel_size": way.experts}
    if not way.ours:
        over["expert_tensor_parallel_size"] = 1
    train.start(side, **over)
    config = mixture(transformer(side), settings, over)
    model, optimizer = build_model(side, config, lambda built: _fill(built, settings, parallel_state))
    noise = torch.randint(256, (2**16,), generator=torch.Generator().manual_seed(settings.seed))
    steps = train.Steps(side, model, optimizer, Corpus(noise, noise, 1, "noise"))
    return lambda: torch.tensor(steps.take(0)[0])


def mixture(dense: Any, settings: Any, over: Mapping[str, int]) -> Any:
    """Megatron's configuration with experts in every layer, no token dropped and no auxiliary loss.

    Args:
        dense: the configuration without.
        settings: number of `experts`, `k` a token, and their `width`.
        over: degrees of expert parallelism.
    """
    return replace(
        dense,
        num_moe_experts=settings.experts,
        moe_router_topk=settings.k,
        moe_ffn_hidden_size=settings.width,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        add_bias_linear=False,
        **over,
    )


def let_dispatch_on_cpu() -> None:
    """Let Megatron's dispatcher do without a stream beside, and have gloo told how many rows go by numbers, not by tensors."""
    from megatron.core.transformer.moe import token_dispatcher

    token_dispatcher.MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = _NoStream()
    original = token_dispatcher.all_to_all
    if getattr(original, "axonn", False):
        return

    def all_to_all(group: Any, rows: Tensor, *splits: Any, **keywords: Any) -> Any:
        told = [split.tolist() if isinstance(split, Tensor) else split for split in splits]
        named = {name: split.tolist() if isinstance(split, Tensor) else split for name, split in keywords.items()}
        return original(group, rows, *told, **named)

    all_to_all.axonn = True  # type: ignore[attr-defined]
    token_dispatcher.all_to_all = all_to_all


class _NoStream:
    """In the place of the GPU's stream on which Megatron's dispatcher copies counts, and of its events."""

    def wait_stream(self, other: Any) -> None:
        """Nothing is under way."""

    def record_event(self) -> _NoStream:
        """The stream itself stands for its event."""
        return self

    def synchronize(self) -> None:
        """Nothing is under way."""


def _training(settings: Settings, way: Way) -> Training:
    base = Training(
        ranks=settings.ranks,
        layers=settings.layers,
        hidden=settings.hidden,
        heads=settings.heads,
        context=settings.context,
        batch=settings.batch,
        micro_batch=settings.batch // settings.readers(way),
        seed=settings.seed,
        distributed_optimizer=bool(settings.stage),
        overlap_grad_reduce=bool(settings.stage),
        overlap_param_gather=bool(settings.stage),
    )
    if way.ours:
        return replace(base, axonn_gx=way.tensor, axonn_gy=1, axonn_gz=way.z)
    return replace(base, tensor_model_parallel_impl="megatron", tensor_model_parallel_size=way.tensor)


@torch.no_grad()
def _fill(model: nn.Module, settings: Settings, ranks: Any) -> None:
    """Weights of an expert that depend on its layer and number only, not on where it lies."""
    local = settings.experts // ranks.get_expert_model_parallel_world_size()
    first = ranks.get_expert_model_parallel_rank() * local
    share, shares = ranks.get_expert_tensor_parallel_rank(), ranks.get_expert_tensor_parallel_world_size()
    for name, parameter in model.named_parameters():
        before, experts, after = name.partition(".local_experts.")
        if not experts:
            continue
        number, _, which = after.partition(".")
        layer, second = int(before.split(".layers.")[1].partition(".")[0]), which.startswith("linear_fc2")
        shape = (settings.hidden, settings.width) if second else (settings.width, settings.hidden)
        seed = 1000 * settings.seed + 100 * layer + 2 * (first + int(number)) + second
        whole = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        parameter.copy_(whole.chunk(shares, int(second))[share].view_as(parameter))
