"""The benchmark: every side runs, and what is reported is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_plugins.cli import benchmarks, main
from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_recipes.bench_samo.report import text
from axonn_recipes.models.gpt import GPT, GPTConfig

TINY = ["--parameters", "40K", "--hidden", "64", "--context", "8", "--batch", "2", "--copy-mib", "1", "--device", "cpu"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_every_side_runs_and_is_reported(dtype: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "samo" in benchmarks()
    words = [*TINY, "--dtype", dtype, "--rounds", "3", "--passes", "2", "--sparsity", "0", "--runs", str(tmp_path)]
    assert main(["bench", "samo", *words]) == 0
    numbers = json.loads((tmp_path / "bench_samo" / "results.json").read_text())
    sides = {side["name"]: side for side in numbers["sides"]}
    low = dtype == "bf16"
    assert list(sides) == ["dense", *(["dense, gradients upcast"] if low else []), "samo", "samo, torch tiles"]
    elements = sum(parameter.numel() for parameter in GPT(GPTConfig(256, 8, 1, 1, 64)).parameters())
    # Nothing is pruned, so there is no index.
    assert sides["samo"]["bytes"] == sides["samo, torch tiles"]["bytes"] == elements * 28
    assert sides["dense"]["bytes"] == elements * (34 if low else 28)
    assert all(len(side["seconds"]) == 3 for side in sides.values())
    assert [(side["name"], len(side["seconds"])) for side in numbers["passes"]] == [("dense", 2), ("samo", 2)]
    dense, ours = numbers["passes"]
    assert (
        dense["compression"] == [0, 0] and 0 < numbers["compression_share"]["median"] and min(ours["compression"]) > 0
    )
    assert text(numbers) in capsys.readouterr().out
    assert numbers["ratios"][0]["side"] == "dense"


def test_dry_run_makes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "samo", "--dry-run", "--device", "cpu", "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "11 layers, hidden 512, bf16 on cpu, 90.0% of every matrix pruned" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hidden", "100"], "--hidden 100 does not divide into heads of 64"),
        (["--sparsity", "1.5"], "--sparsity 1.5 is not a share"),
        (["--parameters", "many"], "--parameters many is not a number"),
        (["--dtype", "int8"], '--dtype = "int8" is not known'),
        (["--device", "tpu"], '--device = "tpu" is not known'),
        (["--rounds", "0"], "--rounds 0 is not at least 1"),
        (["--copy-mib", "0"], "--copy-mib 0 is not at least 1"),
        (["--passes", "-1"], "--passes -1 is negative"),
    ],
)
def test_mistakes(options: list[str], words: str, tmp_path: Path) -> None:
    from axonn_recipes.bench_samo.settings import Options, resolve

    with pytest.raises(ConfigError, match=words):
        resolve(read(Options, options))
