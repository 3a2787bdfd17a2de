"""Today's models: parameters by name, by HF's config.json and beside transformers' own modules; what is refused."""

import json
import sys

import pytest

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import hf, model

PUBLISHED = {
    # Billions as their makers publish them, in all and of a token.
    "qwen3-8b": (8.19, None),
    "gemma3-27b": (27.01, None),  # 25,600 million and 1,416 million in tables, without what is for images
    "phi-4": (14.66, None),
    "mistral-7b": (7.24, None),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (140.6, 39.1),
    "dbrx": (131.6, 36.5),
    "phi-3.5-moe": (41.87, 6.64),
    "olmoe-1b-7b": (6.92, 1.28),
    "qwen3-30b-a3b": (30.5, 3.35),
    "qwen3-235b-a22b": (235.1, 22.2),
    "gpt-oss-20b": (20.91, 4.19),  # of a token published as 3.6, without the table of tokens that comes in
    "gpt-oss-120b": (116.83, 5.71),
    "llama4-maverick": (400.7, 17.2),
    "deepseek-v2": (235.7, 21.4),
    "deepseek-v3": (671.0, 37.55),
    "kimi-k2": (1026.4, 32.9),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name):
    found, (total, active) = model.load(name), PUBLISHED[name]
    assert found.parameters / 1e9 == pytest.approx(total, rel=2e-3)
    assert found.active_parameters / 1e9 == pytest.approx(active or total, rel=5e-3)


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    **{"hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128},
    **{"intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1},
    **{"num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1, "hidden_act": "silu"},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"vocab_size": 129280, "tie_word_embeddings": False, "max_position_embeddings": 163840},
}
LLAMA_4 = {
    "model_type": "llama4",
    "text_config": {
        "model_type": "llama4_text",
        **{"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8},
        **{"head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_local_experts": 128},
        **{"num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "hidden_act": "silu", "vocab_size": 202048},
        **{"tie_word_embeddings": False, "max_position_embeddings": 1048576},
    },
    "vision_config": {
        "model_type": "llama4_vision_model",
        **{"hidden_size": 1408, "num_hidden_layers": 34, "intermediate_size": 5632, "hidden_act": "gelu"},
    },
}
QWEN_3 = {
    "model_type": "qwen3_moe",
    **{"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
    **{"head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128},
    **{"num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu"},
    **{"vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 40960},
}
DBRX = {
    "model_type": "dbrx",
    **{"d_model": 6144, "n_layers": 40, "n_heads": 48, "max_seq_len": 32768, "vocab_size": 100352},
    "attn_config": {"kv_n_heads": 8},
    "ffn_config": {
        "ffn_act_fn": {"name": "silu"},
        **{"ffn_hidden_size": 10752, "moe_num_experts": 16, "moe_top_k": 4},
    },
    "tie_word_embeddings": False,
}


@pytest.mark.parametrize("installed", [True, False])
@pytest.mark.parametrize(
    ("table", "billions", "active"),
    [
        (DEEPSEEK_V3, 671.03, 37.55),
        (DEEPSEEK_V3 | {"model_type": "kimi_k2", "n_routed_experts": 384, "num_attention_heads": 64}
         | {"first_k_dense_replace": 1, "vocab_size": 163840}, 1026.4, 32.86),
        (LLAMA_4, 401.6, 18.1),
        (QWEN_3, 30.53, 3.35),
        (DBRX, 131.6, 36.5),
    ],
)  # fmt: skip
def test_configurations_with_experts(table, billions, active, installed, tmp_path, monkeypatch):
    if not installed:
        monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps(table))
    found = model.load(str(tmp_path))
    assert found.parameters / 1e9 == pytest.approx(billions, rel=5e-3)
    assert found.active_parameters / 1e9 == pytest.approx(active, rel=5e-3)


def test_what_a_configuration_leaves_out_is_its_class_s():
    pytest.importorskip("transformers")
    text = {"model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62}
    text |= {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}
    sizes = hf.sizes_of("here", {"model_type": "gemma3", "text_config": text})
    assert (sizes["vocabulary"], sizes["untied"], sizes["gated"]) == (262208, False, True)


FAMILIES = (
    *("apertus", "arcee", "bloom", "codegen", "cohere", "deepseek_v3", "ernie4_5_moe", "exaone4", "falcon", "gemma2"),
    *("glm4_moe_lite", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "granitemoeshared", "llama"),
    *("llama4_text", "minicpm3", "mixtral", "modernbert-decoder", "mpt", "olmo2", "olmoe", "opt", "phi", "phi3"),
    *("phimoe", "qwen2_moe", "qwen3_moe", "stablelm", "starcoder2"),
)


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_modules_have_as_many(family):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    config = transformers.CONFIG_MAPPING[family]()
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)
    network.tie_weights()
    counted = sum(parameter.numel() for parameter in network.parameters())
    found = model.parse(family, hf.sizes_of(family, config.to_dict()), family)
    assert found.parameters == pytest.approx(counted, rel=5e-3)


@pytest.mark.parametrize("family", ["afmoe", "bert", "cpmant", "glm4v", "got_ocr2", "starcoder2", "qwen3_moe"])
def test_a_file_has_as_many_as_its_class_makes(family, tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    sizes = {"hidden_size": 384, "vocab_size": 50000} if family == "starcoder2" else {}  # biases are 1 % of it
    config = transformers.CONFIG_MAPPING[family](**sizes)
    auto = {
        "bert": "AutoModelForMaskedLM",
        "glm4v": "AutoModelForImageTextToText",
        "got_ocr2": "AutoModelForImageTextToText",
    }
    with torch.device("meta"):
        network = getattr(transformers, auto.get(family, "AutoModelForCausalLM")).from_config(config)
    network.tie_weights()
    config.architectures = [type(network).__name__]
    config.save_pretrained(tmp_path)
    found = model.load(str(tmp_path))
    assert found.parameters == sum(parameter.numel() for parameter in network.parameters())
    assert found.active_parameters == found.parameters or found.experts


@pytest.mark.parametrize(
    ("change", "dense", "every", "sparse"),
    [
        ({}, 0, 1, 48),
        ({"decoder_sparse_step": 2}, 0, 2, 24),
        ({"mlp_only_layers": [0, 1, 2]}, 3, 1, 45),
        ({"mlp_only_layers": [5, 40]}, 2, 1, 46),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, 3, 3, 15),
        ({"first_k_dense_replace": 1}, 1, 1, 47),
        ({"num_hidden_layers": 4, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}, 1, 1, 3),
        ({"num_hidden_layers": 4, "moe_layer_freq": [0, 0, 1, 1]}, 2, 1, 2),
        ({"num_hidden_layers": 5, "moe_layer_freq": 2}, 2, 1, 3),
        ({"num_hidden_layers": 2, "num_experts": [64, 64], "num_experts_per_tok": [8, 8]}, 0, 1, 2),
        ({"attn_type_list": [1] * 48}, 0, 1, 48),
    ],
)
def test_layers_with_experts(change, dense, every, sparse, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    found = model.parse("here", hf.sizes_of("here", QWEN_3 | change), "here")
    assert (found.dense_layers, found.sparse_every, found.sparse_layers) == (dense, every, sparse)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mamba_d_state": 16}, "mamba_d_state = 16 means layers of state-space models, which is not modelled"),
        ({"layer_types": ["full_attention", "linear_attention"]}, 'layer_types has "linear_attention"'),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is true"),
        ({"model_type": "jetmoe"}, 'model_type = "jetmoe"'),
        ({"num_experts": [64, 64]}, r"experts = \[64, 64\]"),
        ({"layer_types": 3}, "layer_types = 3 is not a list"),
        ({"lru_width": 2048}, "lru_width = 2048 means recurrent layers"),
        ({"word_embed_proj_dim": 512}, "word_embed_proj_dim = 512 means tables of tokens of another width"),
        ({"attn_type_list": [0, 1]}, "attn_type_list has 0, linear attention"),
        ({"moe_layer_freq": "2"}, "does not say in numbers which layers have its 128 experts"),
        ({"num_experts_per_tok": None}, "None for each token"),
        ({"num_experts_per_tok": 200}, "an experts_per_token from 1 to 128"),
        ({"num_hidden_layers": "48"}, "num_hidden_layers = '48' is not a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000 is not a whole number from 0 to 10,000"),
        ({"text_config": {"num_hidden_layers": 10**9}}, "num_hidden_layers = 1000000000 is not a whole number"),
        ({"hidden_size": None}, 'lacks the key "hidden_size"'),
    ],
)
def test_configurations_that_are_refused(change, words, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text(json.dumps(QWEN_3 | change))
    with pytest.raises(ConfigError, match=words) as caught:
        model.load(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_keys_for_images_that_are_no_numbers_count_as_missing(tmp_path):
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    vision = {"hidden_size": 32, "num_hidden_layers": 2}
    counts = []
    for odd in (
        {},
        {"intermediate_size": "a", "mlp_ratio": None, "spatial_merge_size": [2], "deepstack_visual_indexes": 3},
    ):
        path = tmp_path / "config.json"
        path.write_text(json.dumps({**config, "vision_config": {**vision, **odd}}))
        counts.append(model.load(str(path)).parameters)
    assert counts[0] == counts[1] > 0
