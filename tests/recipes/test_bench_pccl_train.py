"""The benchmark of ZeRO-3 by PCCL: what is asked for is what is trained, and what is reported is what was measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from axonn_plugins.cli import main  # noqa: E402
from axonn_plugins.cli.options import read  # noqa: E402
from axonn_plugins.config import ConfigError  # noqa: E402
from axonn_recipes.bench.output import publish  # noqa: E402
from axonn_recipes.bench_pccl.train import results, text  # noqa: E402
from axonn_recipes.bench_pccl.train_settings import Options, Training, resolve  # noqa: E402


def settings(*words: str) -> Training:
    return resolve(read(Options, words))


def test_the_sides_differ_in_the_block_alone() -> None:
    chosen = settings("--precision", "bf16", "--batch", "2")
    stock, ours = chosen.ds_config("gloo"), chosen.ds_config("pccl")
    assert ours.pop("axonn") == {"pccl": {}} and ours == stock
    assert stock["zero_optimization"] == {"stage": 3} and stock["bf16"] == {"enabled": True}
    assert "bf16" not in settings().ds_config("gloo")


def test_the_model_has_some_ten_million_parameters() -> None:
    from axonn_recipes.models.gpt import GPT

    assert 9e6 < sum(parameter.numel() for parameter in GPT(settings().model).parameters()) < 12e6


def test_table_of_a_stored_result(tmp_path: Path) -> None:
    turns = [
        {
            "side": side,
            "losses": [5.5, 5.25],
            "seconds": seconds,
            "calls": {"all_gather": 3},
            "sent": {"all_gather": 2**21},
        }
        for side, seconds in (("gloo", [3.0, 5.0]), ("pccl", [2.0, 2.0]), ("pccl", [1.0, 1.0]), ("gloo", [4.0, 4.0]))
    ]
    numbers = results(settings("--layouts", "8x2"), [{"nodes": 8, "ranks_per_node": 2, "turns": turns}])
    cluster = numbers["clusters"][0]
    assert cluster["gloo"]["median"] == 4.0 and cluster["gloo"]["tokens_per_s"] == 16 * 64 / 4.0
    assert cluster["speedup"] == pytest.approx(4.0 / 1.5) and cluster["speedup_by_turn"] == [2.0, 4.0]
    said = text(numbers)
    assert "pccl trains 2.67 times gloo's tokens/s (by turns 2.00 to 4.00)" in said
    assert "3 all_gather (2.00 MiB)" in said and "5.500000 5.250000" in said
    files = publish(tmp_path / "run", numbers, said)
    assert text(json.loads(files[0].read_text())) == said


def test_dry_run_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--train", "--dry-run", "--latency", "2ms", "--runs", str(tmp_path)]
    assert main(["bench", "pccl", *words]) == 0
    text = capsys.readouterr().out
    assert "nodes x ranks: 8x2, emulated, latency 2ms, bandwidth 500Mbit a node" in text
    assert "6 blocks, hidden 384, 6 heads, 1 x 64 tokens a rank and step, fp32" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--layouts", "16"], "--layouts 16 is not nodes x ranks a node"),
        (["--steps", "0"], "--steps 0 is not at least 1"),
        (["--hidden", "100", "--heads", "8"], "--hidden 100 does not divide into --heads 8"),
        (["--bandwidth", "fast"], "bandwidth = 'fast' is not a bandwidth"),
    ],
)
def test_mistakes_are_named(options: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        settings(*options)


def test_both_sides_train_alike_in_one_node(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    sizes = ["--layers", "1", "--hidden", "32", "--heads", "2", "--context", "8", "--steps", "2", "--rounds", "2"]
    assert main(["bench", "pccl", "--train", "--layouts", "1x2", *sizes, "--runs", str(tmp_path)]) == 0
    (cluster,) = json.loads((tmp_path / "bench_pccl_train" / "results.json").read_text())["clusters"]
    sides = [turn["side"] for turn in cluster["turns"]]
    assert sorted(sides[:2]) == sorted(sides[2:]) == ["gloo", "pccl"]
    assert all(len(turn["seconds"]) == 2 and len(turn["losses"]) == 4 for turn in cluster["turns"])
    assert cluster["losses_apart"] < 1e-5
    assert cluster["turns"][0]["calls"] == cluster["turns"][1]["calls"]
    assert {"all_gather", "reduce_scatter"} <= set(cluster["turns"][0]["calls"])
    assert "times gloo's tokens/s" in capfd.readouterr().out
