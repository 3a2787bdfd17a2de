"""``axonn convert``: there and back bit for bit, what each format's own library makes of it, and what is held meanwhile."""

from __future__ import annotations

import json
import queue
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import axonn_plugins
from axonn_plugins.cli import main

axonn_plugins.activate()
transformers = pytest.importorskip("transformers")
from axonn_plugins.weights import megatron_names  # noqa: E402
from axonn_tp.checkpoint import load, save  # noqa: E402
from axonn_tp.checkpoint.lazily import SafeFile  # noqa: E402
from axonn_tp.grid.lazy import Source  # noqa: E402
from tests.axonn_tp.families import GROUPED, hf  # noqa: E402
from tests.distributed import run_ranks  # noqa: E402
from tests.matrix import thorough  # noqa: E402

SIZES = {**GROUPED, "max_position_embeddings": 32}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf("LlamaForCausalLM", **SIZES, rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "tied llama": lambda: hf("LlamaForCausalLM", **SIZES, tie_word_embeddings=True),
    "scaled llama": lambda: hf(
        "LlamaForCausalLM", **SIZES, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
    ),
    "mistral": lambda: hf("MistralForCausalLM", **SIZES, head_dim=16, sliding_window=None),
    "qwen2": lambda: hf("Qwen2ForCausalLM", **SIZES),
    "qwen3": lambda: hf("Qwen3ForCausalLM", **SIZES, head_dim=16),
    "mixtral": lambda: hf("MixtralForCausalLM", **SIZES, num_local_experts=4, sliding_window=None),
    "gpt2": lambda: hf("GPT2LMHeadModel", n_embd=32, n_head=4, n_layer=2, n_positions=32, vocab_size=50),
}
ROUTES = {
    "litgpt": ("llama", "tied llama", "scaled llama", "mistral", "qwen2", "qwen3", "mixtral"),
    "megatron": ("llama", "tied llama", "mistral", "qwen2", "qwen3", "gpt2"),
    "axonn": ("llama", "tied llama", "mixtral", "gpt2"),
}
IDS = torch.arange(12)[None] * 7 % 50


def drawn(name: str) -> Any:
    """A model none of whose numbers are what an initialisation gives, in bfloat16 but for one."""
    torch.manual_seed(len(name))
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) / 8 + (parameter.dim() == 1))
    return model


def tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def converted(*arguments: Any) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize(("to", "name"), [(to, name) for to, names in ROUTES.items() for name in names])
def test_there_and_back_is_bit_for_bit(to: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("litgpt" if to == "litgpt" else "torch")
    model = drawn(name).to(torch.bfloat16 if name == "llama" else torch.float32)
    model.save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    converted(tmp_path / "hf", tmp_path / "other", "--to", to)
    converted(tmp_path / "other", tmp_path / "back", "--to", "hf", "--shard-size", "30KB")
    same(tensors(tmp_path / "back"), tensors(tmp_path / "hf"))
    assert (tmp_path / "other" / "tokenizer.json").exists() and (tmp_path / "back" / "tokenizer.json").exists()
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    before, after = (type(model).from_pretrained(tmp_path / place) for place in ("hf", "back"))
    with torch.no_grad():
        assert after.dtype == model.dtype and torch.equal(after(IDS).logits, before(IDS).logits)


@pytest.mark.parametrize("name", ROUTES["litgpt"])
def test_litgpt_computes_the_same(name: str, tmp_path: Path) -> None:
    litgpt = pytest.importorskip("litgpt.model")
    model = drawn(name).eval()
    model.save_pretrained(tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "lit", "--to", "litgpt")
    from litgpt.config import Config

    theirs = litgpt.GPT(Config.from_file(tmp_path / "lit" / "model_config.yaml")).eval()
    theirs.load_state_dict(torch.load(tmp_path / "lit" / "lit_model.pth", mmap=True))
    with torch.no_grad():
        assert torch.allclose(theirs(IDS), model(IDS).logits, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_litgpts_own_folder_needs_no_configuration_of_hf(name: str, tmp_path: Path) -> None:
    """As LitGPT's pretraining leaves one."""
    litgpt = pytest.importorskip("litgpt.model")
    from litgpt.config import Config
    from litgpt.utils import save_config

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": 2, "vocab_size": 50, "padded_vocab_size": 64}
    kind = {"rotary_percentage": 1.0, "parallel_residual": False, "bias": False, "norm_class_name": "RMSNorm"}
    own = Config(
        **{"name": f"{name.capitalize()}-tiny", "block_size": 32, "intermediate_size": 48, "norm_qk": name == "qwen3"},
        **{"mlp_class_name": "LLaMAMLP", "norm_eps": 1e-3, "rope_base": 777, **sizes, **kind},
    )
    torch.manual_seed(2)
    theirs = litgpt.GPT(own).eval()
    (tmp_path / "lit").mkdir()
    torch.save({"model": theirs.state_dict()}, tmp_path / "lit" / "lit_model.pth")
    save_config(own, tmp_path / "lit")
    converted(tmp_path / "lit", tmp_path / "hf", "--to", "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    with torch.no_grad():
        assert torch.allclose(theirs(IDS), model(IDS).logits, atol=1e-4)
    converted(tmp_path / "lit", tmp_path / "kept", "--to", "axonn")
    again = litgpt.GPT(own)
    load(tmp_path / "kept" / "axonn", again, None)
    same(dict(again.state_dict()), dict(theirs.state_dict()))


def megatrons(folder: Path, names: list[str]) -> dict[str, float]:
    """Megatron reads what was written, and what Megatron saves is converted back: differences of logits."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from tests.megatron import training

    found: dict[str, float] = {}
    training.on_cpu()
    # In its place Megatron starts a process that imports everything again, for saving in the background.
    filesystem_async._results_queue = queue.Queue()
    with training.parallel(training.Case()):
        for name in names:
            model = transformers.AutoModelForCausalLM.from_pretrained(folder / name).eval()
            told: Namespace = megatron_names.arguments(model.config)
            gpt2 = told.position_embedding_type == "learned_absolute"
            config = TransformerConfig(
                **{key: getattr(told, key) for key in ("num_layers", "hidden_size", "num_attention_heads")},
                **{key: getattr(told, key) for key in ("num_query_groups", "ffn_hidden_size", "kv_channels")},
                **{key: getattr(told, key) for key in ("normalization", "add_bias_linear", "add_qkv_bias")},
                layernorm_epsilon=told.norm_epsilon,
                qk_layernorm=told.qk_layernorm,
                gated_linear_unit=told.swiglu,
                activation_func=partial(nn.functional.gelu, approximate="tanh") if gpt2 else nn.functional.silu,
                **dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0),
                **dict.fromkeys(("gradient_accumulation_fusion", "masked_softmax_fusion", "apply_rope_fusion"), False),
                **dict.fromkeys(("bias_activation_fusion", "bias_dropout_fusion", "persist_layer_norm"), False),
                use_cpu_initialization=True,
            )
            theirs = GPTModel(
                config,
                get_gpt_layer_local_spec(normalization=told.normalization, qk_layernorm=told.qk_layernorm),
                vocab_size=told.padded_vocab_size,
                max_sequence_length=told.max_position_embeddings,
                position_embedding_type=told.position_embedding_type,
                rotary_base=told.rotary_base,
                share_embeddings_and_output_weights=not told.untie_embeddings_and_output_weights,
            ).eval()
            metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
            converted(folder / name, folder / f"{name} of megatron", "--to", "megatron")
            state = {"model": theirs.sharded_state_dict(metadata=metadata)}
            theirs.load_state_dict(
                dist_checkpointing.load(state, str(folder / f"{name} of megatron" / "release"))["model"]
            )
            places = torch.arange(IDS.shape[1])[None]
            mask = torch.ones(1, 1, *[IDS.shape[1]] * 2).triu(1).bool()
            with torch.no_grad():
                found[name] = (theirs(IDS, places, mask) - model(IDS).logits).abs().max().item()
                for parameter in theirs.parameters():
                    parameter.mul_(1.5)
                other = folder / f"{name} saved"
                for apart in (False, True):
                    kept = {"model": theirs.sharded_state_dict(metadata=metadata | {"singleton_local_shards": apart})}
                    place = other / f"iter_000000{apart + 1}"
                    place.mkdir(parents=True)
                    dist_checkpointing.save(kept | {"args": told}, str(place))
                    (other / "latest_checkpointed_iteration.txt").write_text(str(apart + 1))
                    converted(other, folder / f"{name} back {apart}", "--to", "hf")
                    back = transformers.AutoModelForCausalLM.from_pretrained(folder / f"{name} back {apart}").eval()
                    found[f"{name} {apart}"] = (theirs(IDS, places, mask) - back(IDS).logits).abs().max().item()
    return found


@pytest.mark.parametrize("names", [["qwen3", "gpt2"], thorough(list(ROUTES["megatron"]))], ids=["some", "all"])
def test_megatron_computes_the_same(names: list[str], tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    for name in names:
        drawn(name).save_pretrained(tmp_path / name)
    (found,) = run_ranks(megatrons, 1, tmp_path, names)
    assert len(found) == 3 * len(names)
    for name, difference in found.items():
        assert difference < 2e-4, name


def test_no_more_than_a_tensor_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = drawn("llama")
    model.save_pretrained(tmp_path / "hf")
    sizes: list[int] = []
    original = SafeFile.read

    def read(self: SafeFile, name: str, cut: Any) -> Tensor:
        tensor = original(self, name, cut)
        sizes.append(tensor.nbytes)
        return tensor

    def hold(self: Source) -> Tensor:
        raise AssertionError(f"{self.origin} is kept in memory")

    monkeypatch.setattr(SafeFile, "read", read)
    monkeypatch.setattr(Source, "hold", hold)
    total = sum(parameter.nbytes for parameter in model.parameters())
    for source, to in (
        ("hf", "megatron"),
        ("megatron", "litgpt"),
        ("litgpt", "axonn"),
        ("axonn", "hf2"),
        ("hf2", "hf3"),
    ):
        sizes.clear()
        converted(tmp_path / source, tmp_path / to, "--to", "hf" if to.startswith("hf") else to)
        if source.startswith("hf"):
            assert sum(sizes) == total, (source, to)
            assert max(sizes) == max(parameter.nbytes for parameter in model.parameters())
    same(tensors(tmp_path / "hf3"), tensors(tmp_path / "hf"))


def test_nothing_is_lost_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint of ours has what from_pretrained makes of a folder: one type, and no tensor that is not the model's."""
    model = drawn("llama").to(torch.bfloat16)
    model.model.norm.float()
    model.save_pretrained(tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "cast", "--to", "axonn")
    assert "torch.float32 became torch.bfloat16" in capsys.readouterr().out
    file = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(file) | {"nobody.weight": torch.ones(3)}, file, {"format": "pt"})
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "new"), "--to", "axonn"]) == 2
    assert "unexpected keys nobody.weight" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_a_converted_checkpoint_leaves_seeds_alone(tmp_path: Path) -> None:
    """It had the state of the process that has converted, which every run then went on from, whatever its seed."""
    model = drawn("llama")
    model.save_pretrained(tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "ours", "--to", "axonn")
    drawings = []
    for loading in (False, True):
        torch.manual_seed(5)
        if loading:
            load(tmp_path / "ours" / "axonn", model, None)
        drawings.append(torch.rand(3))
    assert torch.equal(*drawings)


def test_a_plain_models_checkpoint_becomes_safetensors(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4))
    save(tmp_path / "saved", model, None)
    converted(tmp_path / "saved", tmp_path / "plain", "--to", "hf")
    same(tensors(tmp_path / "plain"), dict(model.state_dict()))


def megatron_folder(folder: Path, name: str) -> Path:
    drawn(name).save_pretrained(folder / "hf")
    converted(folder / "hf", folder / "megatron", "--to", "megatron")
    (folder / "megatron" / "config.json").unlink()
    return folder / "megatron"


@pytest.mark.parametrize("to", ["litgpt", "megatron"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"vocab_size": 60},
        {"num_attention_heads": 8, "head_dim": 4},
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4},
        {"num_hidden_layers": 1},
    ],
)
def test_weights_that_are_not_the_configurations_are_refused(
    wrong: dict[str, int], to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("litgpt" if to == "litgpt" else "torch")
    drawn("llama").save_pretrained(tmp_path / "hf")
    converted(tmp_path / "hf", tmp_path / "other", "--to", to)
    file = tmp_path / "other" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **wrong}))
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "other"), str(tmp_path / "new"), "--to", "hf"]) == 2
    printed = capsys.readouterr().err
    assert "config.json" in printed and printed.count("\n") == 1 and not (tmp_path / "new").exists()


def test_a_checkpoint_of_a_models_arguments_keeps_its_configuration(tmp_path: Path) -> None:
    converted(megatron_folder(tmp_path, "tied llama"), tmp_path / "ours", "--to", "axonn")
    converted(tmp_path / "ours", tmp_path / "back", "--to", "hf")
    same(tensors(tmp_path / "back"), tensors(tmp_path / "hf"))
    assert transformers.AutoConfig.from_pretrained(tmp_path / "back").tie_word_embeddings


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("llama", ["nowhere", "new", "--to", "hf"], "is no folder"),
        ("llama", [".", "new", "--to", "hf"], "holds none of"),
        ("llama", ["hf", "hf", "--to", "litgpt"], "is there already"),
        ("llama", ["hf", "hf/config.json/new", "--to", "hf"], "cannot be made"),
        ("llama", ["hf", "new", "--to", "hf", "--shard-size", "big"], '--shard-size = "big" is not a size'),
        ("llama", ["hf", "new", "--to", "hf", "--shard-size", 400 * "9"], "is not a size; write one such as"),
        ("llama", ["hf", "new", "--to", "gguf"], '--to = "gguf" is not known'),
        ("mixtral", ["hf", "new", "--to", "megatron"], 'model_type = "mixtral" has no place in Megatron'),
        ("gpt2", ["hf", "new", "--to", "litgpt"], "LitGPT's model_config.yaml of a gpt2"),
    ],
)
def test_mistakes_are_one_sentence(
    name: str, arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn(name).save_pretrained(tmp_path / "hf")
    places = [str(tmp_path / part) for part in arguments[:2]]
    capsys.readouterr()
    assert main(["convert", *places, *arguments[2:]]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1 and not (tmp_path / "new").exists()
    assert not list(tmp_path.glob("*.incomplete"))


@pytest.mark.parametrize(
    ("held", "change", "said"),
    [
        ({}, {}, "there are no weights in floating point"),
        ({"a": torch.arange(3)}, {}, "there are no weights in floating point"),
        (None, {"hidden_size": -32}, "config.json: no model can be made of it"),
    ],
)
def test_folders_of_no_model_are_one_sentence(
    held: dict[str, Tensor] | None,
    change: dict[str, int],
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    drawn("llama").save_pretrained(tmp_path / "hf")
    if held is not None:
        save_file(held, tmp_path / "hf" / "model.safetensors")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    capsys.readouterr()
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "new"), "--to", "axonn"]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("release/metadata.json", b"{", ".metadata is missing"),
        ("lit_model.pth", b"no zip", "is no file of torch's, or damaged"),
        ("latest", b"\xff\xfe\x00", "holds none of"),
        ("other.json", b"{}", 'other.json" is neither a folder nor a config.json'),
    ],
)
def test_files_of_other_kinds_are_one_sentence(
    name: str, content: bytes, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "given" / name
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    if name.startswith("release"):
        (tmp_path / "given" / "latest_checkpointed_iteration.txt").write_text("release")
    more = ["--config", str(file)] if name == "other.json" else []
    assert main(["convert", str(tmp_path / "given"), str(tmp_path / "new"), "--to", "axonn", *more]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1
