"""The recipe of TED: both sides are one script and learn the same, and the dry run knows the papers' configurations."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from axonn_plugins.cli import main
from axonn_plugins.config import parse
from axonn_recipes.ted_moe.settings import asked, resolve, scales
from axonn_recipes.ted_moe.sides import build
from ted_moe.memory import TABLE_4_1, parameters

TINY = {
    "layers": 2, "hidden": 16, "heads": 2, "context": 8, "experts": 4, "ranks": 4, "tensor": 2, "expert": 2, "batch": 8,
    "micro-batch": 2, "steps": 4, "lr": 0.02, "validate-every": 2, "validation-batches": 1, "tile-size": 64,
}  # fmt: skip


def words(**changes: object) -> list[str]:
    return [word for name, value in {**TINY, **changes}.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    return str(file)


def run(folder: Path, text: str, name: str, *options: str, **changes: object) -> dict:
    start = ["train", "ted_moe", "--data", text, "--runs", str(folder), "--name", name]
    assert main([*start, *words(**changes), *options]) == 0
    return json.loads((folder / name / "results.json").read_text())


@pytest.mark.usefixtures("by_pccl")
def test_both_sides_learn_the_same(text: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    numbers = run(tmp_path, text, "both")
    said = capfd.readouterr().out
    stock, ted = numbers["sides"]["deepspeed"], numbers["sides"]["ted"]
    assert stock["replicas"] == 4 and ted["replicas"] == 2
    assert max(numbers["differences"]["losses"]) < 1e-4 and max(numbers["differences"]["validation"]) < 1e-4
    assert stock["losses"][-1] < stock["losses"][0] - 0.05
    # One block of experts; half as many data-parallel ranks have twice as many microbatches. 6 exchanges with checkpointing, 4 without
    # the recomputation's; slots: min_capacity of 4 for each of 4 experts, 16 features, 4 bytes, and half with tokens dropped.
    slots = 4 * 4 * 16 * 4
    assert stock["exchanges"] == [6, 6 * slots]
    assert ted["exchanges"] == [2 * 4, 2 * 4 * slots // 2]
    assert ted["parameters"] < 0.6 * stock["parameters"]
    assert 0 < ted["state_bytes"] < stock["state_bytes"] and ted["allocated"] > 0
    assert [step for step, _ in ted["validation"]] == [2, 4]
    assert "largest relative difference: of training losses" in said
    assert {file.name for file in (tmp_path / "both").iterdir()} >= {"table.txt", "curves.png", "deepspeed", "ted"}
    lines = [json.loads(line) for line in (tmp_path / "both" / "ted" / "metrics.jsonl").read_text().splitlines()]
    assert [line["val_loss"] for line in lines if "val_loss" in line] == [value for _, value in ted["validation"]]


@pytest.mark.thorough
@pytest.mark.usefixtures("by_pccl")
def test_the_same_order_of_sums_gives_the_same_to_rounding(text: str, tmp_path: Path) -> None:
    numbers = run(tmp_path, text, "same", "--stock-ranks", "1", ranks=2, expert=1, steps=3, **{"micro-batch": 4})
    stock, ted = numbers["sides"]["deepspeed"], numbers["sides"]["ted"]
    assert stock["replicas"] == ted["replicas"] == 1 and stock["exchanges"] == ted["exchanges"] == [0, 0]
    assert max(numbers["differences"]["losses"]) < 1e-6


@pytest.mark.thorough
def test_ranks_change_nothing(text: str, tmp_path: Path) -> None:
    options = ("--side", "deepspeed")
    losses = [
        run(tmp_path, text, f"on-{ranks}", *options, ranks=ranks, expert=ranks, tensor=1, steps=3)["sides"][
            "deepspeed"
        ]["losses"]
        for ranks in (1, 2)
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_experts_start_by_their_numbers() -> None:
    settings = resolve(asked(words()))
    models = [build(settings, replica) for replica in range(3)]
    weights = [
        [expert.fc1.weight for expert in model.blocks[1].moe.deepspeed_moe.experts.deepspeed_experts]
        for model in models
    ]
    assert len(weights[0]) == 2 and not torch.equal(weights[0][0], weights[0][1])
    assert not torch.equal(weights[0][0], weights[1][0]) and torch.equal(weights[0][1], weights[2][1])
    assert all(torch.equal(models[0].head.weight, other.head.weight) for other in models)


def test_dry_run_says_what_the_papers_configurations_need(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for scale, base, tensor in (
        ("gpt3_xl", "GPT-3-XL", 1),
        ("gpt3_2.7b", "GPT-3-2.7B", 2),
        ("gpt3_6.7b", "GPT-3-6.7B", 4),
        ("gpt3_13b", "GPT-3-13B", 8),
    ):
        assert main(["train", "ted_moe", "--scale", scale, "--dry-run", "--runs", str(tmp_path)]) == 0
        said = capsys.readouterr().out
        assert (
            f"{parameters(TABLE_4_1[base], 16).total:,}" in said
            and f"TED: tensor {tensor} x expert 16 x data 2" in said
        )
        # Section 7.4.3: with these tensor degrees they fit on Summit's GPUs.
        line = next(line for line in said.splitlines() if line.startswith("     16 "))
        assert line.split(":")[1].startswith(" V100, 16 GB")
        config = json.loads(said[said.index("{") :])
        block = parse(config["axonn"]).ted
        assert block is not None and block.tile_size == 1_800_000 and config["axonn"]["ted"]["tensor"] == tensor
    assert not list(tmp_path.iterdir())


def test_every_scale_makes_a_run() -> None:
    for scale in scales():
        settings = resolve(asked(["--scale", scale]))
        assert settings.degrees.gpus == settings.ranks and math.isfinite(settings.lr) and settings.source
        assert "axonn" not in settings.ds_config("deepspeed")
    wide = resolve(asked(["--scale", "gpt3_6.7b", "--experts", "128"]))
    assert (wide.experts, wide.expert, wide.degrees.data) == (128, 32, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps 0 is not at least 1"),
        ({"layers": 1}, "--layers 1 leaves no second block to hold experts"),
        ({"heads": 3}, "--heads 3 does not divide --hidden 16"),
        ({"heads": 1}, "--tensor 2 does not divide --heads 1"),
        ({"k": 5}, "--k 5 is more than --experts 4"),
        ({"expert": 3}, "--ranks 4 is no multiple of tensor x expert = 2 x 3 (equation 7.1)"),
        ({"experts": 3}, "--experts = 3 do not divide among expert = 2 ranks"),
        ({"batch": 12}, "--batch 12 does not divide into microbatches of 2 for 4 ranks; use a multiple of 8"),
        ({"lr": -1}, "--lr -1.0 is not positive"),
        ({"data": "/none/such"}, "--data /none/such does not exist"),
    ],
)
def test_mistakes_are_one_sentence(changes: dict, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "ted_moe", *words(**changes)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("axonn: error: ") and message in error and error.count("\n") == 1
