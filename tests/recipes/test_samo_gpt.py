"""The GPT recipe: both sides see the same, the pruned one is pruned, and what is reported is what was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from axonn_plugins.cli import main
from axonn_plugins.config import ConfigError
from axonn_plugins.optim.reducer import FLAG_BYTES
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.pruned.plan import Plan
from axonn_recipes.pruned.report import described
from axonn_recipes.samo_gpt.problem import Text, Tokens, read
from axonn_recipes.samo_gpt.settings import asked, resolve, scales

TINY = [
    "--layers",
    "1",
    "--hidden",
    "32",
    "--heads",
    "4",
    "--context",
    "8",
    "--batch",
    "4",
    "--validation-batches",
    "2",
]
TINY += ["--every", "1", "--window", "2", "--validate-every", "2"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    return str(file)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_both_sides_train_and_are_reported(
    dtype: str, text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "samo_gpt", *TINY, "--data", text, "--runs", str(tmp_path), "--steps", "6", "--latest", "0.5"]
    assert main([*words, "--epsilon", "1e-9", "--dtype", dtype, "--lr", "1e-2"]) == 0
    said = capfd.readouterr().out
    folder = tmp_path / "samo_gpt"
    numbers = json.loads((folder / "results.json").read_text())
    dense, pruned = numbers["sides"]["dense"], numbers["sides"]["pruned"]
    size, kept, whole = 4 if dtype == "fp32" else 2, pruned["kept"], pruned["parameters"]
    prunable = 32 * 32 * 12 + 32 * 256
    assert whole - kept == round(0.9 * prunable)
    assert dense["kept"] == whole and dense["pruned_at"] is None
    assert pruned["pruned_at"] == 3 and not pruned["ticket"]
    assert len(pruned["distances"]) == 3 and len(pruned["distances"][-1]) == 2
    assert dense["reduced_bytes"] == [size * whole] * 2
    tensors = 17
    flags = FLAG_BYTES * (1 + tensors)
    assert pruned["reduced_bytes"] == [size * whole + flags, size * kept + flags]
    counters = 4 * tensors  # Adam counts the steps of each parameter
    assert dense["state_bytes"] == (16 if dtype == "fp32" else 20) * whole + counters
    assert 0 < pruned["state_bytes"] < 0.6 * dense["state_bytes"]
    # The same until weights are pruned, and not after.
    assert dense["losses"][:3] == pytest.approx(pruned["losses"][:3], abs=1e-5 if dtype == "fp32" else 2e-2)
    assert dense["losses"][4] != pytest.approx(pruned["losses"][4], abs=1e-4)
    assert [step for step, _ in dense["validation"]] == [2, 4, 6]
    assert dense["final"] == dense["validation"][-1][1] < dense["validation"][0][1]
    assert "weights were pruned by magnitude after step 3" in said
    assert {file.name for file in folder.iterdir()} >= {"table.txt", "sparsity.txt", "curves.png", "dense", "pruned"}
    assert "blocks.0.fc1.weight" in (folder / "sparsity.txt").read_text()
    lines = [json.loads(line) for line in (folder / "pruned" / "metrics.jsonl").read_text().splitlines()]
    assert [line["val_perplexity"] for line in lines if "val_perplexity" in line] == [
        v for _, v in pruned["validation"]
    ]


def test_a_ticket_ends_the_search_and_ranks_change_nothing(text: str, tmp_path: Path) -> None:
    words = ["train", "samo_gpt", *TINY, "--data", text, "--runs", str(tmp_path), "--side", "pruned", "--steps", "6"]
    losses = []
    for ranks, micro in ((1, 4), (2, 1)):
        name = f"on-{ranks}"
        options = ["--ranks", str(ranks), "--micro-batch", str(micro), "--epsilon", "1", "--name", name]
        assert main([*words, *options]) == 0
        side = json.loads((tmp_path / name / "results.json").read_text())["sides"]["pruned"]
        assert side["ticket"] and side["pruned_at"] == 3
        losses.append(side["losses"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert main([*words, "--name", "on-1"]) == 2


def test_dry_run_says_what_the_papers_scale_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for scale, parameters, ranks in (("gpt3_xl", "1,418,649,600", 64), ("gpt3_2.7b", "2,780,211,200", 128)):
        assert main(["train", "samo_gpt", "--scale", scale, "--dry-run", "--runs", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert f"{parameters} parameters, 20000 steps on {ranks} data-parallel ranks, bf16" in said
    assert not list(tmp_path.iterdir())


def test_what_is_needed_is_the_memory_models() -> None:
    said = described(Plan(dtype="bf16", sparsity=0.0), "m", lambda: nn.Linear(2**15, 2**15, bias=False))
    assert "dense 20.00 GiB, SAMO as in the dissertation 26.00 GiB, SAMO here 18.00 GiB" in said
    assert "dense 2.00 GiB, pruned 2.00 GiB" in said


def test_token_ids_are_read_from_their_files(tmp_path: Path) -> None:
    model = GPTConfig(vocabulary=1000, context=4)
    for name in ("train.bin", "val.bin"):
        np.arange(100, dtype=np.uint16).tofile(tmp_path / name)
    tokens = read(str(tmp_path), model)
    assert isinstance(tokens, Tokens)
    problem = Text(tokens, model, 6, 1, 1, seed=1)
    whole = problem.batches(3, 0, 1)
    shares = [pair for rank in range(2) for pair in problem.batches(3, rank, 2)]
    assert len(whole) == len(shares) == 6
    for (ids, targets), (again, _) in zip(whole, shares, strict=True):
        assert torch.equal(ids, again) and torch.equal(ids + 1, targets) and ids.shape == (1, 4)
    assert problem.figure(1.0) == math.e and problem.figure(1e3) == math.inf  # of a run that has diverged
    np.array([1000] * 9, dtype=np.uint16).tofile(tmp_path / "val.bin")
    for content in (b"", b"odd"):
        (tmp_path / "odd").mkdir(exist_ok=True)
        for name in ("train.bin", "val.bin"):
            (tmp_path / "odd" / name).write_bytes(content)
        with pytest.raises(ConfigError, match=f"has {len(content)} bytes, which are no 16-bit ids"):
            read(str(tmp_path / "odd"), model)
    with pytest.raises(ConfigError, match="holds 9 ids up to 1000; more than 4 below 1000 are needed"):
        read(str(tmp_path), model)


def test_learning_rate_warms_up_and_falls_to_a_tenth() -> None:
    plan = Plan(steps=100, lr=1.0, pruned_lr=2.0)
    assert plan.lr_at(5, False) == 0.5 and plan.lr_at(10, True) == 2.0
    assert plan.lr_at(100, True) == pytest.approx(0.2) and plan.lr_at(55, False) == pytest.approx(0.55)


def test_every_scale_makes_a_run() -> None:
    for scale in scales():
        settings = resolve(asked(["--scale", scale]))
        assert settings.batch % settings.plan.ranks == 0 and math.isfinite(settings.plan.lr)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], "--steps 0 is not at least 1"),
        (["--sparsity", "1.5"], "--sparsity 1.5 is not a share; give a number from 0 to 1"),
        (["--sparsity", "1"], "--sparsity 1.0 keeps nothing of any layer"),
        (["--pruned-lr", "-1"], "--pruned-lr -1.0 is not positive"),
        (["--ranks", "3"], "--batch 8 does not divide by the 3 ranks"),
        (["--heads", "3"], "--hidden 512 does not divide into --heads 3"),
        (["--micro-batch", "3"], "--micro-batch 3 does not divide the 4 windows of a rank"),
        (["--data", "/none/such"], "--data /none/such does not exist"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "samo_gpt", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("axonn: error: ") and words in error and error.count("\n") == 1
