"""The study at the paper's scale, with a small checkpoint: read part by part from HF's folder, trained on documents on a grid."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from axonn_plugins.cli import main
from axonn_plugins.config import ConfigError
from axonn_recipes.memorization import pages, recipe
from axonn_recipes.memorization.pages import documents, order
from axonn_recipes.memorization.settings import BUCKETS, LOSSES, SUFFIX, asked, resolve
from tests.matrix import thorough

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")

WORDS = 61
WANTED = "--scale tinyllama-1b --pages 2 --epochs 1 2 3 --warmup 1 --steps 4 --batch 4 --tokens 72 --dtype fp32".split()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama of random weights in two files, its tokenizer, and documents."""
    folder = tmp_path_factory.mktemp("checkpoint")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "max_position_embeddings": 128}
    torch.manual_seed(2)
    config = transformers.LlamaConfig(
        vocab_size=WORDS, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.3, **sizes
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="25KB")
    assert (folder / "model.safetensors.index.json").is_file()
    vocabulary = {f"w{number}": number for number in range(WORDS)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of a document each, and one of lines; every other document is too short."""
    folder = tmp_path_factory.mktemp("documents")
    generator = torch.Generator().manual_seed(4)
    texts = [
        " ".join(
            f"w{word}" for word in torch.randint(WORDS, (72 + number % 5 if number % 2 else 71,), generator=generator)
        )
        for number in range(400)
    ]
    for number, text in enumerate(texts[:20]):
        (folder / f"{number:02}.txt").write_text(text)
    (folder / "rest.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[20:]))
    return folder


def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def untrained(folder: Path, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Of the serial model as transformers reads it: which of the last tokens are right, and the mean loss."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(rows).logits[:, :-1]
    return (logits.argmax(-1) == rows[:, 1:])[:, -SUFFIX:], F.cross_entropy(
        logits.flatten(0, 1), rows[:, 1:].flatten()
    ).item()


@pytest.mark.usefixtures("by_pccl")
@pytest.mark.parametrize("split", ["2,1,1,1", thorough("2,1,2,1")])
def test_a_checkpoint_goes_on_on_a_grid(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str
) -> None:
    monkeypatch.setattr(pages, "HELD_OUT", 8)
    words = [*WANTED, "--checkpoint", str(checkpoint), "--data", str(data), "--seeds", "3"]
    for grid, lr in (("1,1,2,1", "1e-9"), (split, "1e-2")):
        assert (
            main(["train", "memorization", *words, "--grid", grid, "--lr", lr, "--runs", str(tmp_path), "--name", grid])
            == 0
        )
    settings = resolve(asked(words + ["--grid", "1,1,2,1"]))
    read = documents(data, tokenizer(checkpoint), settings)
    still, learned = (
        {cell["loss"]: cell for cell in json.loads((tmp_path / grid / "cells.json").read_text())}
        for grid in ("1,1,2,1", split)
    )
    buckets = order(settings, len(read.learned), 3).buckets
    for loss in LOSSES:
        # Nothing is learned at such a rate, so these are the numbers of what was read.
        assert still[loss]["held_out"] == pytest.approx([untrained(checkpoint, read.held_out)[1]] * 2, rel=1e-5)
        for name in BUCKETS:
            right, _ = untrained(checkpoint, read.learned[buckets[name]])
            assert still[loss]["accuracy"][name] == pytest.approx(right.double().mean().item(), abs=1e-9)
        assert learned[loss]["held_out"][0] > learned[loss]["held_out"][1]
    assert learned["standard"]["held_out"] != pytest.approx(learned["goldfish"]["held_out"], rel=1e-4)
    assert set(json.loads((tmp_path / split / "results.json").read_text())) == set(LOSSES)


def test_another_checkpoint_of_one_name_has_another_folder(
    checkpoint: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"exact": dict.fromkeys(BUCKETS, 0.0), "accuracy": dict.fromkeys(BUCKETS, 0.5), "held_out": [2.0, 1.0]}
    monkeypatch.setattr(recipe, "launch", lambda *_: [found | {"parameters": 3, "seconds": 1.0}])
    other, runs = Path(shutil.copytree(checkpoint, tmp_path / checkpoint.name)), tmp_path / "runs"
    for folder in (checkpoint, other):
        words = [*WANTED, "--checkpoint", str(folder), "--data", str(data), "--seeds", "3", "--runs", str(runs)]
        assert main(["train", "memorization", *words, "--grid", "1,1,1,1"]) == 0
    assert {folder.name for folder in runs.iterdir()} == {"memorization", "memorization-2"}


def test_documents_are_those_long_enough(checkpoint: Path, data: Path, tmp_path: Path) -> None:
    settings = resolve(asked([*WANTED, "--grid", "1,1,1,1"]))
    found = documents(data, tokenizer(checkpoint), settings)
    first = (data / "01.txt").read_text().split()[:72]
    assert [f"w{number}" for number in found.held_out[0].tolist()] == first
    for line in ('{"title": "w2"}', '{"text": null}'):
        (tmp_path / "one.jsonl").write_text(f'{{"text": "w1"}}\n{line}\n')
        with pytest.raises(ConfigError, match='one.jsonl, line 2: not an object with a "text"'):
            documents(tmp_path, tokenizer(checkpoint), settings)
    (tmp_path / "one.jsonl").write_text('{"text": "w1"}\n')
    with pytest.raises(ConfigError, match="make 0 pages of 72 tokens and 0 held out"):
        documents(tmp_path, tokenizer(checkpoint), settings)
