"""Qwen3-MoE of transformers under DeepSpeed: with AutoEP and AutoTP, or with our block."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_recipes.bench_moe.settings import Settings, Way

LEARNING_RATE = 1e-3
VOCABULARY = 256
_BUCKET = 10**6
_OPTIMIZER = {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}}


def load() -> None:
    """Import what forked ranks need, once."""
    import deepspeed
    from transformers import Qwen3MoeForCausalLM  # noqa: F401

    # On CPU DeepSpeed compiles a kernel for inference when it starts; training needs neither it nor a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def build(settings: Settings, way: Way) -> Callable[[], Tensor]:
    """A side's training step; it returns this rank's loss, whose mean over all ranks is the batch's."""
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist.get_backend())
    if way.ours:
        import axonn_plugins

        axonn_plugins.activate()
    else:
        _let_autoep_register()
    config: dict[str, Any] = {
        "train_batch_size": settings.batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": _OPTIMIZER,
        "zero_optimization": {
            "stage": settings.stage,
            # Stock ZeRO makes buffers of this size, by itself of 2 GB.
            "reduce_bucket_size": _BUCKET,
            "allgather_bucket_size": _BUCKET,
            # Nothing is clipped, and nobody asks for the norm; stage 0 has no such key.
            "compute_grad_norm": settings.stage == 0,
        },
        **(_block(settings, way) if way.ours else _auto(way)),
    }
    model = _model(settings)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    readers = settings.readers(way)
    generator = torch.Generator().manual_seed(settings.seed)
    batch = torch.randint(VOCABULARY, (settings.batch, settings.context), generator=generator)
    mine = batch.chunk(readers)[dist.get_rank() // way.tensor]

    def step() -> Tensor:
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def _model(settings: Settings) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(settings.seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": settings.hidden,
        "intermediate_size": 4 * settings.hidden,
        "moe_intermediate_size": settings.width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "num_key_value_heads": settings.heads,
        "head_dim": settings.hidden // settings.heads,
        "num_experts": settings.experts,
        "num_experts_per_tok": settings.k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "max_position_embeddings": settings.context,
        "tie_word_embeddings": False,
        "use_cache": False,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes))


def _block(settings: Settings, way: Way) -> dict[str, Any]:
    grid = {"gx": way.tensor, "gz": way.z, "plan": "auto"}
    return {
        "axonn": {"tensor_parallel": grid, "ted": {"expert": way.experts}, "overlap_param_gather": settings.stage == 1}
    }


def _auto(way: Way) -> dict[str, Any]:
    # HF's own plan for tensor parallelism has styles for experts, at which AutoTP stops.
    specs = [
        {"patterns": [r".*self_attn\.o_proj\.weight$"], "partition_type": "row"},
        {"patterns": [r".*self_attn\.[qkv]_proj\.weight$"], "partition_type": "column"},
    ]
    split = {"autotp_size": way.tensor, "partition_config": {"use_default_specs": False, "layer_specs": specs}}
    experts = {"enabled": True, "autoep_size": way.experts, "preset_model": "qwen3_moe"}
    return {"expert_parallel": experts, **({"tensor_parallel": split} if way.tensor > 1 else {})}


def _let_autoep_register() -> None:
    """Let AutoEP look into transformers' registry of outputs by a class's name and with a default, as it did in versions before."""
    from transformers.utils import output_capturing

    found: Any = output_capturing._CAN_RECORD_REGISTRY

    class Registry(type(found)):  # type: ignore[misc]
        def __setitem__(self, model: Any, outputs: Any) -> None:
            dict.__setitem__(self, model if isinstance(model, str) else str(model.__class__), outputs)

        def get(self, model: Any, default: Any = None) -> Any:
            return dict.get(self, model, default) if isinstance(model, str) else super().get(model)

    registry = Registry()
    dict.update(registry, found)
    output_capturing._CAN_RECORD_REGISTRY = registry
