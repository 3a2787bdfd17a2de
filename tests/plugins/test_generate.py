"""``axonn generate``: HF's own greedy tokens, on grids and of every format."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import axonn_plugins
from axonn_plugins.cli import main

axonn_plugins.activate()
transformers = pytest.importorskip("transformers")
from axonn_plugins.weights.generate import Sampling, _choose  # noqa: E402
from tests.plugins.test_convert import converted, drawn  # noqa: E402

WORDS = [f"w{number}" for number in range(50)]
PROMPT = "w3 w1 w4 w1 w5"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama and a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    place = tmp_path_factory.mktemp("model") / "hf"
    drawn("llama").save_pretrained(place)
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(place)
    return place


def expected(folder: Path, tokens: int) -> str:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    return str(tokenizer.decode(model.generate(ids, max_new_tokens=tokens, do_sample=False)[0]))


def said(capfd: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    capfd.readouterr()
    code = main(["generate", str(folder), "--prompt", PROMPT, *arguments])
    printed = capfd.readouterr()
    assert code == 0, printed.err
    return printed.out.splitlines()[-1]


@pytest.mark.parametrize("sizes", [(), ("--gx", "2"), ("--gy", "2"), ("--gz", "2")])
def test_the_tokens_are_those_of_generate(
    sizes: tuple[str, ...], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert said(capfd, folder, "--tokens", "12", *sizes) == expected(folder, 12)


@pytest.mark.parametrize("to", ["litgpt", "megatron", "axonn"])
def test_from_every_format(to: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    converted(folder, tmp_path / to, "--to", to)
    assert said(capfd, tmp_path / to, "--tokens", "5") == expected(folder, 5)


def test_draws_are_of_the_likeliest_tokens() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()[torch.tensor([2, 0, 3, 1])]
    generator = torch.Generator().manual_seed(1)
    drawn = [int(_choose(logits, Sampling(1.0, 0.75), generator)) for _ in range(2000)]
    assert set(drawn) == {1, 3} and abs(drawn.count(1) / 2000 - 0.5 / 0.8) < 0.05
    assert {int(_choose(logits, Sampling(1.0, 1e-6), generator)) for _ in range(20)} == {1}
    assert {int(_choose(logits, Sampling(1e-300), generator)) for _ in range(20)} == {1}
    assert {int(_choose(logits, Sampling(5.0), generator)) for _ in range(200)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--tokens", "40"],
            "--prompt has 5 tokens, which with --tokens = 40 are more than the 32 that the model knows",
        ),
        (["--top-p", "0"], "--top-p = 0.0 is not above 0"),
        (["--seed", str(2**70)], "--seed = 1180591620717411303424 is not"),
        (["--gz", "0"], "--gz = 0 is not a number from 1"),
    ],
)
def test_mistakes_are_one_sentence(
    arguments: list[str], words: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(folder), "--prompt", PROMPT, *arguments]) == 2
    assert words in capfd.readouterr().err


def test_a_damaged_generation_config_is_one_sentence(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder, tmp_path / "hf")
    (tmp_path / "hf" / "generation_config.json").write_text("{")
    assert main(["generate", str(tmp_path / "hf"), "--prompt", PROMPT, "--tokens", "3"]) == 2
    assert "generation_config.json cannot be read" in capfd.readouterr().err


def test_weights_of_other_sizes_are_refused(folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder, tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "intermediate_size": 64}))
    assert main(["generate", str(tmp_path / "hf"), "--prompt", PROMPT, "--tokens", "3"]) == 2
    assert "mlp.down_proj.weight, (32, 48) and not (32, 64)" in capfd.readouterr().err
