"""`from_pretrained` of a folder that the block will split: the same model as ever, of which ranks read their shards."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import axonn_plugins
from axonn_plugins import autoload

axonn_plugins.activate()
transformers = pytest.importorskip("transformers")
from axonn_tp.checkpoint import lazy_loading  # noqa: E402
from axonn_tp.grid.lazy import LazyTensor  # noqa: E402
from tests.axonn_tp.families import GROUPED, SIZES, hf  # noqa: E402
from tests.axonn_tp.test_lazy import counted  # noqa: E402

MOE = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
GPT2: dict[str, Any] = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 16, "vocab_size": 50}


def without(folder: Path, *names: str) -> None:
    file = folder / "model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if name not in names}, file, {"format": "pt"})


def as_torch_saves(folder: Path) -> None:
    file = folder / "model.safetensors"
    torch.save(load_file(file), folder / "pytorch_model.bin")
    file.unlink()


def both_tied(folder: Path) -> None:
    """As older checkpoints: under both names, with equal values."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"].clone()}, file, {"format": "pt"})


def untied_after_all(folder: Path) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["transformer.wte.weight"] + 1}, file, {"format": "pt"})


def more(folder: Path) -> None:
    file = folder / "model.safetensors"
    save_file(load_file(file) | {"nobody.weight": torch.ones(3)}, file, {"format": "pt"})


# Saved model, loaded class, what happens to the folder, arguments of from_pretrained, how many tensors are in memory at once.
CASES: dict[str, tuple[Any, str, Any, dict[str, Any]]] = {
    "llama": (lambda: hf("LlamaForCausalLM", **GROUPED), "LlamaForCausalLM", None, {}),
    "sharded": (lambda: hf("LlamaForCausalLM", **GROUPED), "AutoModelForCausalLM", "sharded", {"dtype": "bfloat16"}),
    "torch's": (lambda: hf("LlamaForCausalLM", **GROUPED), "LlamaForCausalLM", as_torch_saves, {"dtype": "float64"}),
    "tied": (lambda: hf("GPT2LMHeadModel", **GPT2), "GPT2LMHeadModel", None, {"dtype": torch.float64}),
    "tied twice": (lambda: hf("GPT2LMHeadModel", **GPT2), "GPT2LMHeadModel", both_tied, {}),
    "untied": (lambda: hf("GPT2LMHeadModel", **GPT2), "GPT2LMHeadModel", untied_after_all, {}),
    "new head": (lambda: hf("LlamaForCausalLM", **GROUPED), "LlamaForSequenceClassification", None, {"num_labels": 3}),
    "base model": (lambda: hf("BertForMaskedLM", **SIZES), "BertModel", None, {}),
    "missing": (
        lambda: hf("LlamaForCausalLM", **GROUPED),
        "LlamaForCausalLM",
        lambda folder: without(folder, "model.layers.1.mlp.up_proj.weight"),
        {},
    ),
    "unexpected": (lambda: hf("LlamaForCausalLM", **GROUPED), "LlamaForCausalLM", more, {}),
    "experts": (lambda: hf("MixtralForCausalLM", **MOE), "MixtralForCausalLM", None, {}),
    "other size": (
        lambda: hf("LlamaForSequenceClassification", **GROUPED, num_labels=2),
        "LlamaForSequenceClassification",
        None,
        {"num_labels": 5, "ignore_mismatched_sizes": True},
    ),
}


def loaded(kind: str, folder: Path, keywords: dict[str, Any]) -> tuple[nn.Module, Any]:
    torch.manual_seed(7)
    return getattr(transformers, kind).from_pretrained(folder, output_loading_info=True, **keywords)


@pytest.mark.parametrize("name", CASES)
def test_the_model_is_the_same(name: str, tmp_path: Path) -> None:
    make, kind, change, keywords = CASES[name]
    torch.manual_seed(1)
    saved = make()
    saved.save_pretrained(tmp_path, max_shard_size="20KB" if change == "sharded" else "1GB")
    if callable(change):
        change(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == (change == "sharded")
    expected, of_expected = loaded(kind, tmp_path, keywords)
    state = torch.get_rng_state()
    with lazy_loading(), counted() as sizes:
        model, of_model = loaded(kind, tmp_path, keywords)
    assert torch.equal(state, torch.get_rng_state())
    assert json.dumps(of_model, default=sorted) == json.dumps(of_expected, default=sorted)
    # Only two names for one tensor are looked into.
    assert not sizes or name in ("tied twice", "untied") and len(sizes) == 2
    lazy = {n for n, p in model.named_parameters() if isinstance(p, LazyTensor)}
    assert lazy and not any(b.is_meta for b in model.buffers())
    assert lazy >= {n for n, _ in model.named_parameters()} - of_model["missing_keys"] - {"score.weight"}
    theirs, ours = expected.state_dict(), model.state_dict()
    assert list(theirs) == list(ours)
    for key, tensor in theirs.items():
        assert tensor.dtype == ours[key].dtype and torch.equal(tensor, ours[key]), key
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in expected.named_parameters()]
    for (_, tensor), (key, other) in zip(expected.named_buffers(), model.named_buffers(), strict=True):
        assert torch.equal(tensor, other), key


def test_models_need_no_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    trainer = ModuleType("transformers.trainer")
    autoload._patch_trainer(trainer)
    assert not hasattr(trainer, "Trainer")
