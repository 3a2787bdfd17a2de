"""Mixtures of HF's newer families with sizes drawn at random: experts that divide by nothing, tied routers, linear attention and mixers beside."""

from __future__ import annotations

from typing import Any

from tests.axonn_tp.families import GROUPED, SIZES, VOCABULARY

_WINDOWED = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_NARROW = {"head_dim": 8, "moe_intermediate_size": 20}
_EACH = {**SIZES, "num_key_value_heads": 4}
DRAWN: dict[str, dict[str, Any]] = {
    "Qwen3Next": {
        **{**GROUPED, **_LINEAR, "head_dim": 8, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20},
        **{"num_experts": 5, "num_experts_per_tok": 5, "norm_topk_prob": False, "tie_word_embeddings": True},
        **{
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    },
    "Dots1": {
        **{**_EACH, **_NARROW, "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 3},
        **{
            "n_group": 3,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
        },
        **{"layer_types": ["full_attention", "full_attention"]},
    },
    "GraniteMoeShared": {
        **{**GROUPED, "num_local_experts": 6, "num_experts_per_tok": 4, "shared_intermediate_size": 20},
        **{"output_router_logits": True, "router_aux_loss_coef": 0.0, "tie_word_embeddings": True},
        **{"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 3.0},
    },
    "MiniMax": {
        **{**GROUPED, **_LINEAR, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 3, "block_size": 4}
    },
    "Dbrx": {
        **{"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 16, "vocab_size": VOCABULARY},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 3},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
    },
    "Jamba": {
        **{**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 1, "expert_layer_offset": 0},
        **{"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False, "mamba_d_state": 4},
    },
    "Lfm2Moe": {
        **{**GROUPED, "moe_intermediate_size": 12, "num_dense_layers": 1, "num_experts": 7, "num_experts_per_tok": 3},
        **{"norm_topk_prob": False, "layer_types": ["conv", "full_attention"]},
    },
    "NemotronH": {
        **{name: size for name, size in GROUPED.items() if name != "num_hidden_layers"},
        **{**_NARROW, "layers_block_type": ["mamba", "moe", "attention", "moe"], "use_mamba_kernels": False},
        **{"ssm_state_size": 4, "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 4},
        **{"n_routed_experts": 4, "n_shared_experts": 1, "moe_shared_expert_intermediate_size": 20},
        **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1},
    },
    "LongcatFlash": {
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 1,
            "num_attention_heads": 4,
            "ffn_hidden_size": 48,
        },
        **{"max_position_embeddings": 16, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8},
        **{"qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 8, "moe_topk": 3, "n_routed_experts": 4},
        **{"zero_expert_num": 2, "expert_ffn_hidden_size": 20},
    },
    "Cohere2Moe": {
        **{**GROUPED, **_WINDOWED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 4},
        **{"num_shared_experts": 2, "norm_topk_prob": False},
    },
    "ExaoneMoe": {
        **{**GROUPED, **_WINDOWED, **_NARROW, "num_experts": 6, "num_experts_per_tok": 2, "n_group": 2},
        **{"topk_group": 1, "num_shared_experts": 1, "sliding_window_pattern": 2},
    },
    "Laguna": {
        **{**GROUPED, **_WINDOWED, **_NARROW, "num_experts": 4, "num_experts_per_tok": 2},
        **{"shared_expert_intermediate_size": 20},
    },
    "Afmoe": {
        **{**GROUPED, **_WINDOWED, **_NARROW, "num_experts": 3, "num_experts_per_tok": 3, "num_dense_layers": 1},
        **{"num_shared_experts": 1},
    },
    "GraniteMoeHybrid": {
        **{**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 20},
        **{"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_state": 4, "mamba_d_head": 16},
        **{"mamba_expand": 2, "mamba_chunk_size": 4},
    },
    "Zaya": {**{**GROUPED, **_NARROW, "num_experts": 4, "num_experts_per_tok": 1, "router_hidden_size": 16}},
    "Llama4": {
        **{**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48},
        "configuration": "Llama4TextConfig",
    },
    "JetMoe": {
        **{
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "kv_channels": 8,
            "intermediate_size": 24,
        },
        **{"vocab_size": VOCABULARY, "max_position_embeddings": 16, "num_local_experts": 4, "num_experts_per_tok": 2},
    },
}
"""Whole configurations, by family."""
