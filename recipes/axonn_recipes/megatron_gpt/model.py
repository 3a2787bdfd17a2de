"""megatron.core's GPT, its gradient buffers and its optimizer, as a run's settings ask for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset

from axonn_recipes.megatron_gpt.settings import VOCABULARY, Settings

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute_granularity": "selective"},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


class SeededLayer(TransformerLayer):
    """A layer whose first weights depend on its number alone, not on which pipeline stage it is in."""

    seed = 0

    def __init__(self, config: TransformerConfig, submodules: Any, layer_number: int = 1, **kwargs: Any) -> None:
        torch.manual_seed(self.seed + layer_number + get_transformer_layer_offset(config))
        super().__init__(config, submodules, layer_number, **kwargs)


def build(
    settings: Settings, config: TransformerConfig | None = None, fill: Callable[[torch.nn.Module], None] | None = None
) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """This rank's share of the model and its optimizer; process groups must be there.

    Args:
        settings: the run.
        config: of the layers; by default `transformer(settings)`.
        fill: changes first weights in place.

    Returns:
        The model, whose configuration knows how gradients are scaled and summed, and the optimizer.
    """
    config = config or transformer(settings)
    layers = get_gpt_layer_local_spec(config.num_moe_experts, normalization=config.normalization)
    SeededLayer.seed = settings.seed
    layers.module = SeededLayer
    torch.manual_seed(settings.seed)
    model: Any = GPTModel(
        config,
        layers,
        vocab_size=VOCABULARY,
        max_sequence_length=settings.context,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not settings.untied,
        position_embedding_type="rope" if settings.rope else "learned_absolute",
    )
    if fill is not None:
        fill(model)
    model = model.to(torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu"))
    if settings.precision == "bf16":
        model = Float16Module(config, model)
    model = DistributedDataParallel(config, _buffers(settings), model)
    optimizer = get_megatron_optimizer(_optimizer(settings), [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if settings.overlap_grad_reduce:
        config.no_sync_func = model.no_sync
    return model, optimizer


def transformer(settings: Settings) -> TransformerConfig:
    """Megatron's own configuration of the layers."""
    dtype = _DTYPES[settings.precision]
    return TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_attention_heads=settings.heads,
        num_query_groups=settings.groups,
        ffn_hidden_size=settings.ffn,
        normalization="RMSNorm" if settings.rmsnorm else "LayerNorm",
        gated_linear_unit=settings.swiglu,
        activation_func=torch.nn.functional.silu if settings.swiglu else torch.nn.functional.gelu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=settings.tensor,
        pipeline_model_parallel_size=settings.pipeline_model_parallel_size,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=settings.precision == "bf16",
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **_RECOMPUTE[settings.recompute],
    )


def _buffers(settings: Settings) -> DistributedDataParallelConfig:
    return DistributedDataParallelConfig(
        grad_reduce_in_fp32=not settings.grad_reduce_in_bf16,
        overlap_grad_reduce=settings.overlap_grad_reduce,
        overlap_param_gather=settings.overlap_param_gather,
        use_distributed_optimizer=settings.distributed_optimizer,
    )


def _optimizer(settings: Settings) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        weight_decay=0.1,
        clip_grad=1.0,
        params_dtype=_DTYPES[settings.precision],
        bf16=settings.precision == "bf16",
        use_distributed_optimizer=settings.distributed_optimizer,
        overlap_param_gather=settings.overlap_param_gather,
    )
