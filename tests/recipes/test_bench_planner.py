"""Every grid measured beside the prediction: it runs, learns the same on all grids, and its figures are what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_plugins.cli import main
from axonn_plugins.planner import machine
from axonn_recipes.bench_network import measure as network
from axonn_recipes.bench_planner import recipe
from axonn_recipes.bench_planner.measure import in_turn
from axonn_recipes.bench_planner.report import errors, results, spearman, text
from axonn_recipes.bench_tp.measure import Side

TINY = ["--layers", "1", "--hidden", "32", "--heads", "4", "--context", "8", "--batch", "4", "--rounds", "1"]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network and the arithmetic are measured as they are for the planner, but of less, and less often."""
    for name, value in {"RING": 2**14, "MATRIX": 32, "NETWORK_ROUNDS": 1}.items():
        monkeypatch.setattr(recipe, name, value)
    monkeypatch.setattr(network, "_LAYERS", 2)


@pytest.mark.usefixtures("quick", "by_pccl")
def test_it_runs_on_this_machine(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "planner", *TINY, "--nodes", "1", "--ranks-per-node", "2", "--runs", str(tmp_path)]) == 0
    folder = tmp_path / "bench_planner"
    assert {file.name for file in folder.iterdir()} == {"results.json", "table.txt", "ranks.png", "machine.toml"}
    numbers = json.loads((folder / "results.json").read_text())
    assert {one["grid"] for one in numbers["grids"]} == {"x2 y1 z1 d1", "x1 y2 z1 d1", "x1 y1 z2 d1", "x1 y1 z1 d2"}
    assert {row["axis"] for row in numbers["collectives"]} == {"x", "y", "z", "data"}
    loaded = machine.load(str(folder / "machine.toml"))
    assert loaded.collective_error == pytest.approx(numbers["collective_error"], rel=1e-2)
    medians = [one["median"] for one in numbers["grids"]]
    assert medians == sorted(medians)
    for way in ("formulas", "counted"):
        assert -1 <= numbers["judged"][way]["spearman"] <= 1
        assert sorted(one[f"{way} rank"] for one in numbers["grids"])[0] >= 1
    assert "Spearman" in capfd.readouterr().out


@pytest.mark.thorough
def test_several_models_are_measured_on_one_network(tmp_path: Path) -> None:
    words = ["bench", "planner", "--models", "1,32,4,8,4 1,64,4,8,4", "--rounds", "1", "--nodes", "1"]
    assert main([*words, "--ranks-per-node", "2", "--runs", str(tmp_path)]) == 0
    folder = tmp_path / "bench_planner"
    loaded, every = machine.load(str(folder / "machine.toml")), []
    for number, hidden in enumerate((32, 64)):
        every.append(json.loads((folder / f"model{number}" / "results.json").read_text()))
        assert every[-1]["settings"]["hidden"] == hidden and len(every[-1]["grids"]) == 4
    assert loaded.collective_error == pytest.approx(sum(one["collective_error"] for one in every) / 2, rel=1e-2)
    assert loaded.device == "cpu" and loaded.call >= 0


def test_spearman() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 400]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 2, 3, 4, 5], [2, 1, 4, 3, 5]) == pytest.approx(0.8)
    assert spearman([1, 2, 3], [1, 1, 2]) == pytest.approx(0.866, abs=1e-3)


def test_what_is_under_way_together_counts_once() -> None:
    assert in_turn([(0.0, 1.0), (0.5, 2.0), (0.6, 1.5), (3.0, 4.5)]) == [1.0, 1.0, 0.0, 1.5]


def test_what_is_judged() -> None:
    sides = [Side(str(i), "ours", lambda: None, seconds=[time]) for i, time in enumerate((2.0, 1.0, 4.0))]  # type: ignore[arg-type,return-value]
    missed = errors(["0", "1"], [{"x": 1.0, "z": 1.0}, {"x": 2.0}], [{"x": 1.5, "z": 2.5}, {"x": 1.0}])
    assert missed["by_axis"] == {"x": 0.0, "z": 1.5} and missed["collective_error"] == 0.75
    numbers = results({}, sides, {"formulas": [1.0, 2.0, 3.0]}) | missed
    assert [one["grid"] for one in numbers["grids"]] == ["1", "0", "2"]
    said = numbers["judged"]["formulas"]
    assert said["place_of_the_measured_best"] == 2 and said["slowdown_of_the_predicted_best"] == 2.0
    assert said["spearman"] == pytest.approx(0.5) and said["median_error"] == -0.25
    assert "the measured best is number 2" in text(numbers)


def test_mistakes_and_dry_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["bench", "planner", "--dry-run", "--bandwidth", "500Mbit", "--runs", str(tmp_path)]) == 0
    assert "20 grids: x1 y1 z1 d8" in capsys.readouterr().out and not list(tmp_path.iterdir())
    words = ["bench", "planner", "--nodes", "1", "--runs", str(tmp_path), "--dry-run"]
    assert main([*words, "--models", "1,32,4,8,4 2,64,8,16,8"]) == 0
    said = capsys.readouterr().out
    assert (
        "GPT: 1 blocks, hidden 32, 4 heads, 4 x 8 tokens" in said
        and "GPT: 2 blocks, hidden 64, 8 heads, 8 x 16" in said
    )
    for models, message in (
        ("1,32,4", "is not layers,hidden,heads,context,batch"),
        ("", "names none"),
        ("1,30,4,8,4", "30"),
    ):
        assert main([*words, "--models", models]) == 2
        assert message in capsys.readouterr().err
    assert main(["bench", "planner", "--nodes", "1", "--ranks-per-node", "1", "--dry-run"]) == 2
    assert "there is only one grid of 1 ranks" in capsys.readouterr().err
    assert main([*words, "--backend", "pccl"]) == 2
    assert "--backend pccl is not for axonn bench planner" in capsys.readouterr().err
    for key in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(key, "1")
    assert main(["bench", "planner"]) == 2
    assert "does not run under torchrun" in capsys.readouterr().err
