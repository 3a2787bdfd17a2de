"""Models whose layers are not all attention: parameters beside transformers' classes and what is published, operations by hand, what is refused."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest

from axonn_plugins import cli
from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import axonn, fourd, hf, machine, model, step
from axonn_plugins.planner.answer import Question, answer
from axonn_plugins.planner.axonn import model_flops
from axonn_plugins.planner.hf_mixers import FAMILIES
from axonn_plugins.planner.runnable import runnable
from axonn_plugins.planner.search import search
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.space import placed, shapes

NEMOTRON = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
PUBLISHED = {
    # Billions in all and of a token, as their makers say; MiniMax's 45.9 of a token are without both tables.
    "mamba2-2.7b": (2.70, None, {"model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64}
                    | {"state_size": 128, "n_groups": 1, "vocab_size": 50288, "tie_word_embeddings": True}),
    "falcon-mamba-7b": (7.27, None, {"model_type": "falcon_mamba", "hidden_size": 4096, "num_hidden_layers": 64, "intermediate_size": 8192}
                        | {"state_size": 16, "time_step_rank": 256, "vocab_size": 65024, "tie_word_embeddings": False}),
    "jamba-v0.1": (51.6, 12.1, {"model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
                   | {"num_key_value_heads": 8, "intermediate_size": 14336, "num_experts": 16, "num_experts_per_tok": 2, "hidden_act": "silu"}
                   | {"attn_layer_period": 8, "attn_layer_offset": 4, "expert_layer_period": 2, "expert_layer_offset": 1}
                   | {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_dt_rank": 256, "vocab_size": 65536}
                   | {"tie_word_embeddings": False}),
    "nemotron-h-8b": (8.1, None, {"model_type": "nemotron_h", "hidden_size": 4096, "hybrid_override_pattern": NEMOTRON, "n_groups": 8}
                      | {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 21504}
                      | {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "vocab_size": 131072}
                      | {"tie_word_embeddings": False}),
    "qwen3-next-80b-a3b": (79.7, 3.9, {"model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "head_dim": 256}
                           | {"num_attention_heads": 16, "num_key_value_heads": 2, "intermediate_size": 5120, "num_experts": 512}
                           | {"num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
                           | {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
                           | {"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "hidden_act": "silu", "vocab_size": 151936}
                           | {"layer_types": (3 * ["linear_attention"] + ["full_attention"]) * 12, "tie_word_embeddings": False}
                           | {"decoder_sparse_step": 1, "mlp_only_layers": [], "num_shared_experts": 1}),
    "minimax-text-01": (456.1, 48.4, {"model_type": "minimax", "hidden_size": 6144, "num_hidden_layers": 80, "num_attention_heads": 64}
                        | {"num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 9216, "num_local_experts": 32}
                        | {"num_experts_per_tok": 2, "attn_type_list": [*7 * [0], 1] * 10, "hidden_act": "silu", "vocab_size": 200064}
                        | {"tie_word_embeddings": False}),
}  # fmt: skip


@pytest.fixture
def alone(monkeypatch):
    """Without transformers, by structure."""
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_counts(name, alone, tmp_path):
    total, active, table = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(table))
    found = model.load(str(tmp_path))
    assert found.parameters / 1e9 == pytest.approx(total, rel=5e-3)
    assert found.active_parameters / 1e9 == pytest.approx(active or total, rel=2e-2)


SMALL = {
    "nemotron_h": {"layers_block_type": ["mamba", "mlp", "mamba", "moe", "attention", "mlp", "mamba"]},
    **dict.fromkeys(
        ("lfm2", "lfm2_moe"), {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}
    ),
    "bamba": {"attn_layer_indices": [9, 18]},
    "granitemoehybrid": {"layer_types": 15 * ["mamba", "attention"] + ["mamba", "mamba"], "num_local_experts": 0},
}


@pytest.mark.parametrize("family", [one for one in FAMILIES if one != "minimax_text_01"])
def test_transformers_classes_have_as_many(family):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = transformers.CONFIG_MAPPING[family](**SMALL.get(family, {}))
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)
    network.tie_weights()
    counted = sum(parameter.numel() for parameter in network.parameters())
    found = model.parse(family, hf.sizes_of(family, config.to_dict()), family)
    assert found.parameters == pytest.approx(counted, rel=1e-4) and found.mixes
    assert sum(found.counts.values()) == found.layers


def hybrid(**changes):
    sizes = {"kinds": "M- *- M ME", "experts": 4, "experts_per_token": 2, "expert_feed_forward": 128, "gated": True}
    sizes |= {"mixer_gives": 640, "mixer_takes": 256, "mixer_heads": 8, "mixer_state": 16, "mixer_chunk": 32}
    return model.Transformer("hybrid", 4, 128, 8, 64, **{**sizes, "feed_forward": 512, "vocabulary": 1000, **changes})


def test_operations_by_hand():
    """Of a sample of 64 positions: each matrix, two products of attention, four of a mixer's states, and half of its chunk."""
    mixers = 3 * (128 * 640 + 256 * 128 + 256 * (2 * 16 + 32 // 2))
    attends = 128 * 3 * 128 + 128 * 128 + 64 * (128 + 128)
    mlps = 2 * 3 * 128 * 512 + 2 * 3 * 128 * 128
    assert model_flops(hybrid(), 3, recompute=False) == 3 * 64 * 6 * (mixers + attends + mlps + 1000 * 128)


def test_a_model_of_attention_written_out_is_the_same():
    plain = replace(hybrid(), kinds="", layers=4, dense_layers=2)
    said = replace(plain, kinds="*- *- *E *E", dense_layers=0)
    on, ones = machine.calibrated(machine.load("h100"), "calibrated"), np.ones(2, np.int64)
    assert plain.parameters == said.parameters and plain.blocks == said.blocks
    at = axonn.Grids(ones, ones, 2 * ones, np.array([1, 4]))
    first, second = (fourd.times(on, one, at, ones, 16, "calibrated")[0].total for one in (plain, said))
    assert (first == second).all()
    pipelined = placed(shapes(plain, "1d", 8, 16), 8, 8)
    first, second = (step.times(on, one, "1d", "calibrated", pipelined, 16).total for one in (plain, said))
    assert first == pytest.approx(second, rel=1e-12)


def test_grids_and_1d_agree_on_one_gpu():
    wide = {
        "hidden": 2048,
        "mixer_gives": 10240,
        "mixer_takes": 4096,
        "feed_forward": 8192,
        "expert_feed_forward": 2048,
    }
    trained = replace(hybrid(), heads=16, sequence=4096, **wide)
    on = replace(machine.load("h100"), memory=1e15)
    grid = answer(Question(on, trained, 1, 4, ("axonn",), fixed={"m": 4}), 1).best[0]
    alone = search(on, trained, "1d", 1, 4, "calibrated", 8).best
    same = next(one for one in alone if one.bm == 1)
    assert grid.seconds == pytest.approx(same.seconds, rel=0.03)
    assert grid.holds["activations"] == pytest.approx(same.holds["activations"], rel=0.05)


def test_time_grows_with_positions_and_not_with_their_square():
    on, fixed = replace(machine.load("h100"), memory=1e15), {"gx": 1, "gy": 1, "gz": 1, "gdata": 1, "m": 1}
    only = replace(hybrid(), kinds="M- M- M- M-", experts=0, experts_per_token=0, expert_feed_forward=0)
    took = {}
    for of, trained in (("mixers", only), ("attention", replace(only, kinds="", heads=8))):
        took[of] = [
            answer(Question(on, replace(trained, sequence=length), 1, 1, ("axonn",), fixed=fixed), 1).best[0].seconds
            for length in (2**17, 2**18)
        ]
    assert took["mixers"][1] / took["mixers"][0] == pytest.approx(2, rel=0.02)
    assert took["attention"][1] / took["attention"][0] > 3


def test_ranks_share_no_samples_of_mixers():
    on = machine.load("h100")
    assert not answer(Question(on, hybrid(), 8, 1, ("axonn",), fixed={"sequence": 2}), 1).best
    plans = answer(Question(on, hybrid(), 8, 8, ("axonn",), setting=Setting()), 50).best
    assert plans and all(plan.sequence == 1 and 8 % plan.gx == 0 for plan in plans)


def test_an_answer_says_who_runs_it(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["jamba-v0.1"][2]))
    command = f"plan --model {tmp_path} --machine h100 --gpus 64 --batch 64 --sequence 4096 --recompute"
    assert cli.main(command.split()) == 0
    out = capsys.readouterr().out
    assert "attention of 32 heads in 4" in out and "scans run at attention's rate" in out
    assert "pretrain_gpt.py has attention in every layer" in out and '"axonn": {' in out
    assert cli.main(f"{command} --strategy 2d".split()) == 2
    assert "use 1d or axonn" in capsys.readouterr().err
    trained = model.load(str(tmp_path))
    asked = Question(machine.load("h100"), trained, 64, 64, ("1d",), setting=Setting(recompute=True))
    assert runnable(asked, answer(asked, 1).best[0]).megatron is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "zamba2", "mamba_d_state": 16}, "mamba_d_state = 16 means layers of state-space models"),
        ({"model_type": "nemotron_h", "moe_latent_size": 64}, "moe_latent_size = 64 means experts of fewer features"),
        ({"attn_layer_period": None}, "lacks the key 'attn_layer_period'"),
        ({"attn_layer_period": 0}, "does not say in numbers what the layers of jamba are"),
        ({"mamba_d_state": "16"}, "does not say in numbers what the layers of jamba are"),
    ],
)
def test_configurations_that_are_refused(change, words, alone, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["jamba-v0.1"][2] | change))
    with pytest.raises(ConfigError, match=words) as caught:
        model.load(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kinds": "M- *-"}, "kinds has 2 words; write a word of M"),
        ({"kinds": "M- *- M X-"}, 'kinds has "X-"'),
        ({"kinds": "M- *- M --"}, 'kinds has "--"'),
        ({"mixer_heads": 0}, "needs mixer_gives, mixer_takes and mixer_heads"),
        ({"experts": 0, "experts_per_token": 0, "expert_feed_forward": 0}, "kinds has E, which needs experts"),
    ],
)
def test_sizes_that_do_not_go_together(change, words):
    with pytest.raises(ConfigError, match=words):
        hybrid(**change)
