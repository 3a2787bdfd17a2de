"""``axonn convert`` and what Megatron's scripts keep of a model's arguments beside its weights."""

from __future__ import annotations

import enum
import json
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import axonn_plugins
from axonn_plugins.cli import main
from axonn_plugins.config import ConfigError

axonn_plugins.activate()
transformers = pytest.importorskip("transformers")
from axonn_plugins.weights import hf, litgpt, megatron_names, megatron_told  # noqa: E402
from tests.plugins.test_convert import IDS, converted, drawn, megatron_folder, same, tensors  # noqa: E402


def change_arguments(folder: Path, **values: Any) -> None:
    file = folder / "release" / "common.pt"
    told = torch.load(file, weights_only=False)
    vars(told["args"]).update(values)
    torch.save(told, file)


@pytest.mark.parametrize("by_name", [False, True], ids=["by value", "by name"])
def test_megatrons_arguments_are_read_without_megatron(
    by_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of its own kinds, too, and say how positions are scaled; releases of Python differ in how they write an enum's member."""
    folder = megatron_folder(tmp_path, "llama")
    Backend = enum.Enum("Backend", ["auto"], module="megatron_that_is_not_there")  # noqa: N806
    written = lambda one, _: (getattr, (Backend, one.name)) if by_name else (Backend, (one.value,))  # noqa: E731
    monkeypatch.setattr(Backend, "__reduce_ex__", written)
    module = ModuleType(Backend.__module__)
    vars(module)["Backend"] = Backend
    with monkeypatch.context() as there:
        there.setitem(sys.modules, Backend.__module__, module)
        change_arguments(
            folder, attention_backend=Backend["auto"], use_rope_scaling=True, rope_scaling_factor=32.0, rotary_base=777
        )
    converted(folder, tmp_path / "back", "--to", "hf")
    same(tensors(tmp_path / "back"), tensors(tmp_path / "hf"))
    rope = transformers.AutoConfig.from_pretrained(tmp_path / "back").rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 32.0, 777.0)
    told = megatron_names.arguments(transformers.AutoConfig.from_pretrained(tmp_path / "back"))
    assert told.use_rope_scaling and told.rope_scaling_factor == 32.0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"apply_layernorm_1p": True}, "--apply-layernorm-1p, which"),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p, which"),
        ({"rotary_percent": 0.5}, "--rotary-percent 0.5, which"),
        ({"rotary_interleaved": True}, "--rotary-interleaved, which"),
        ({"no_rope_freq": 4}, "--no-rope-freq 4, which"),
        ({"softmax_type": "off-by-one"}, "--softmax-type off-by-one, which"),
    ],
)
def test_what_hfs_models_do_not_compute_is_refused(
    values: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the model's configuration as without it."""
    folder = megatron_folder(tmp_path, "llama")
    change_arguments(folder, **values)
    for more in ([], ["--config", str(tmp_path / "hf")]):
        assert main(["convert", str(folder), str(tmp_path / "new"), "--to", "hf", *more]) == 2
        assert said in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        (
            "llama",
            {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
            "trained with --num-attention-heads 4, and the model of config.json is one with --num-attention-heads 8",
        ),
        ("llama", {"rms_norm_eps": 1e-3}, "--norm-epsilon"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 501.0}}, "--rotary-base 500"),
        ("mistral", {"sliding_window": 8}, "trained without --window-size, and"),
        ("gpt2", {"activation_function": "gelu"}, "without --no-bias-gelu-fusion, and"),
        ("gpt2", {"activation_function": "relu"}, 'activation_function = "relu" is no activation of'),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not computed"),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act = "gelu" is no activation of'),
    ],
)
def test_another_model_of_the_same_sizes_is_refused(
    name: str, wrong: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = megatron_folder(tmp_path, name)
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **wrong}))
    capsys.readouterr()
    command = ["convert", str(folder), str(tmp_path / "new"), "--to", "hf", "--config", str(tmp_path / "hf")]
    assert main(command) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1 and not (tmp_path / "new").exists()


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("llama", {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16}}, "rope_adjustments = {}"),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope_base = 500"),
        ("mistral", {"sliding_window": 8}, "sliding_window_size = 0, and the one of config.json has 8"),
        ("mixtral", {"num_experts_per_tok": 1}, "n_expert_per_token = 2"),
    ],
)
def test_another_model_than_litgpts_is_refused(
    name: str, wrong: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("litgpt")
    drawn(name).save_pretrained(tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "lit", "--to", "litgpt")
    file = tmp_path / "lit" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **wrong}))
    # Whose settings are in both folders, and whose weights fit them all.
    for folder, to in (("lit", "hf"), ("hf", "litgpt")):
        capsys.readouterr()
        more = ["--config", str(tmp_path / "lit")]
        assert main(["convert", str(tmp_path / folder), str(tmp_path / "new"), "--to", to, *more]) == 2
        printed = capsys.readouterr().err
        assert said in printed and printed.count("\n") == 1 and not (tmp_path / "new").exists()


def test_heads_of_other_families_are_compared(tmp_path: Path) -> None:
    """Which split the same weights otherwise."""
    config = pytest.importorskip("litgpt.config").Config
    own = config(name="pythia-tiny", n_layer=2, n_embd=32, n_head=4, vocab_size=50, block_size=32)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 50, "max_position_embeddings": 32}
    litgpt.compare(own, transformers.GPTNeoXConfig(**sizes, num_attention_heads=4), tmp_path)
    with pytest.raises(ConfigError, match="n_head = 4, and the one of config.json has 8"):
        litgpt.compare(own, transformers.GPTNeoXConfig(**sizes, num_attention_heads=8), tmp_path)


def test_a_folders_name_makes_no_other_model_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of one that was trained on with other positions, and is named after what it began as."""
    config = pytest.importorskip("litgpt.config")
    drawn("llama").save_pretrained(tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "lit", "--to", "litgpt")
    right = config.Config.from_file(tmp_path / "lit" / "model_config.yaml")
    for name, norm_eps in (("Same-1", right.norm_eps), ("Other-1", 0.25)):
        known = {field.name: getattr(right, field.name) for field in fields(right)}
        monkeypatch.setitem(config.name_to_config, name, {**known, "name": name, "norm_eps": norm_eps})
        (tmp_path / "hf").rename(tmp_path / name)
        converted(tmp_path / name, tmp_path / f"{name} there", "--to", "litgpt")
        (tmp_path / name).rename(tmp_path / "hf")
        found = config.Config.from_file(tmp_path / f"{name} there" / "model_config.yaml")
        assert found.norm_eps == right.norm_eps and (found.name == name) == (name == "Same-1")


def test_arguments_of_megatron_016_have_other_names(tmp_path: Path) -> None:
    """Such as the fields of its configuration that they become."""
    config = pytest.importorskip("megatron.core.transformer.transformer_config").TransformerConfig
    flags = {f.name: f.metadata.get("argparse_meta", {}).get("arg_names", [""])[0] for f in fields(config)}
    names = {name: flag for name, flag in flags.items() if flag in ("--norm-epsilon", "--apply-layernorm-1p")}
    assert not names or names.keys() == megatron_told._EARLIER.keys()
    folder = megatron_folder(tmp_path, "llama")
    told = torch.load(folder / "release" / "common.pt", weights_only=False)
    del told["args"].norm_epsilon
    torch.save(told, folder / "release" / "common.pt")
    change_arguments(folder, layernorm_epsilon=3e-4)
    converted(folder, tmp_path / "back", "--to", "hf")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").rms_norm_eps == 3e-4


def test_transformer_engines_gelu_is_that_by_tanh(tmp_path: Path) -> None:
    folder = megatron_folder(tmp_path, "gpt2")
    change_arguments(folder, bias_gelu_fusion=False, use_te_activation_func=True)
    converted(folder, tmp_path / "back", "--to", "hf")
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").activation_function == "gelu_new"


def test_windows_and_epsilons_go_along(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn("mistral").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sliding_window": 8, "rms_norm_eps": 1e-3}))
    converted(tmp_path / "hf", tmp_path / "megatron", "--to", "megatron")
    assert "the script needs --norm-epsilon 0.001 --window-size 7,0" in capsys.readouterr().out
    (tmp_path / "megatron" / "config.json").unlink()
    converted(tmp_path / "megatron", tmp_path / "back", "--to", "hf")
    same(tensors(tmp_path / "back"), tensors(tmp_path / "hf"))
    found = transformers.AutoConfig.from_pretrained(tmp_path / "back")
    assert (found.model_type, found.sliding_window, found.rms_norm_eps) == ("mistral", 8, 1e-3)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"model_type": "mistral", "sliding_window": None}),
        ({"sliding_window_size": 8}, {"model_type": "mistral", "sliding_window": 8}),
        ({"sliding_window_size": 64}, {"sliding_window": None}),
        ({"rope_adjustments": {"factor": 4.0}}, {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
        ({"sliding_window_size": 8, "sliding_window_indices": [1, 0]}, "sliding_window_size = 8"),
        ({"attention_logit_softcapping": 50.0}, "attention_logit_softcapping = 50.0"),
        ({"rope_condense_ratio": 2}, "rope_condense_ratio = 2"),
        ({"rope_adjustments": {"factor": 4.0, "beta_fast": 32}}, "rope_adjustments = "),
    ],
)
def test_what_litgpts_settings_are_in_hfs_terms(values: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    config = pytest.importorskip("litgpt.config").Config
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 50, "padded_vocab_size": 64, "block_size": 32}
    kind = {"rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm"}
    own = config(name="Mistral-tiny", mlp_class_name="LLaMAMLP", intermediate_size=48, **sizes, **kind, **values)
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=f"for its {expected}"):
            litgpt.hf_configuration(own, tmp_path)
        return
    found = litgpt.hf_configuration(own, tmp_path).to_dict()
    for key, value in expected.items():
        assert found[key] == value if not isinstance(value, dict) else found[key].items() >= value.items()


def test_windows_go_to_litgpt(tmp_path: Path) -> None:
    own = pytest.importorskip("litgpt.model")
    model = drawn("mistral")
    model.config.sliding_window = 4
    model.save_pretrained(tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "lit", "--to", "litgpt")
    from litgpt.config import Config

    theirs = own.GPT(Config.from_file(tmp_path / "lit" / "model_config.yaml")).eval()
    theirs.load_state_dict(torch.load(tmp_path / "lit" / "lit_model.pth", mmap=True))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert torch.allclose(theirs(IDS), model(IDS).logits, atol=1e-4)


@pytest.mark.parametrize("to", ["litgpt", "megatron"])
def test_a_llama_has_no_window(to: str, tmp_path: Path) -> None:
    """Its code passes over the key, which a Mistral that was renamed has left."""
    pytest.importorskip("litgpt" if to == "litgpt" else "torch")
    model = drawn("llama")
    model.config.sliding_window = 4
    model.save_pretrained(tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "there", "--to", to)
    (tmp_path / "there" / "config.json").unlink()
    converted(tmp_path / "there", tmp_path / "back", "--to", "hf")
    models = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in ("hf", "back")]
    with torch.no_grad():
        first, again = (model(IDS).logits for model in models)
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    ("to", "said"), [("litgpt", "as LitGPT's rope_base is"), ("megatron", "as Megatron's --rotary-base is")]
)
def test_rotary_bases_are_not_cut_off(to: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("litgpt" if to == "litgpt" else "torch")
    drawn("llama").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    rope = {"rope_type": "default", "rope_theta": 500.5}
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": rope}))
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "new"), "--to", to]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize("method", ["gptq", "fp8"])
def test_quantized_weights_are_refused(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn("llama").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    quantized = {"quant_method": method, "bits": 4, "weight_block_size": [8, 8]}
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantized}))
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "new"), "--to", "axonn"]) == 2
    printed = capsys.readouterr().err
    assert f'quant_method = "{method}"' in printed and printed.count("\n") == 1 and not (tmp_path / "new").exists()


def test_tokenizers_of_all_kinds_go_along(tmp_path: Path) -> None:
    drawn("llama").save_pretrained(tmp_path / "hf")
    names = ["spiece.model", "tokenizer.model", "vocab.txt", "merges.txt", "qwen.tiktoken", "chat_template.jinja"]
    for name in names:
        (tmp_path / "hf" / name).write_text(name)
    converted(tmp_path / "hf", tmp_path / "new", "--to", "hf")
    assert all((tmp_path / "new" / name).read_text() == name for name in names)


def test_scaled_positions_that_megatron_has_not_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn("llama").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": rope}))
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "new"), "--to", "megatron"]) == 2
    assert "--use-rope-scaling" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_missing_transformers_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (
        lambda: hf.configuration(tmp_path),
        lambda: hf.class_of(None),
        lambda: litgpt.hf_configuration(None, tmp_path),
    ):
        with pytest.raises(
            ConfigError, match="need transformers, which cannot be imported .*; install it, or convert in"
        ):
            call()


@pytest.mark.parametrize(
    ("to", "option", "value", "formats"),
    [
        ("hf", "--ranks", "1", "--to deepspeed"),
        ("hf", "--zero", "1", "--to deepspeed"),
        ("litgpt", "--shard-size", "1GB", "--to hf"),
        ("deepspeed", "--config", ".", "--to hf or --to litgpt or --to megatron or --to axonn"),
    ],
)
def test_options_of_another_format_are_refused(
    to: str, option: str, value: str, formats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path), str(tmp_path / "there"), "--to", to, option, value]) != 0
    assert f"{option} = {value} is for {formats}, and this is --to {to}" in capsys.readouterr().err
