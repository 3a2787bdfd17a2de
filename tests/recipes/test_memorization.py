"""The memorization study: what is repeated is learned by heart, but for the goldfish loss; on any grid, and from HF's checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from axonn_plugins.cli import main
from axonn_plugins.config import ConfigError
from axonn_recipes.memorization import recipe
from axonn_recipes.memorization.pages import HELD_OUT, made_up, order, windows
from axonn_recipes.memorization.settings import BUCKETS, LOSSES, Settings, asked, resolve
from tests.matrix import thorough

SMALL = [
    "--pages",
    "1",
    "--epochs",
    "1",
    "2",
    "170",
    "--warmup",
    "10",
    "--steps",
    "100",
    "--batch",
    "2",
    "--lr",
    "5e-3",
]
SMALL += ["--grid", "1,1,1,1"]
"""Of one rank, for it takes a hundred steps to learn by heart; grids are test_every_grid_learns_the_same, and the checkpoints' test."""
TINY = ["--pages", "2", "--epochs", "1", "2", "4", "--warmup", "2", "--steps", "8", "--batch", "4", "--hidden", "16"]
TEXT = Path(__file__).parents[3] / "shared" / "data" / "wikitext-2"


def run(runs: Path, *words: str, code: int = 0) -> Path:
    assert main(["train", "memorization", "--runs", str(runs), *words]) == code
    return runs / "memorization"


def read(file: Path) -> Any:
    return json.loads(file.read_text())


def settings(*words: str) -> Settings:
    return resolve(asked(words))


@pytest.fixture(scope="module", params=[(64,), thorough((16, 64))], ids=len)
def hidden(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """Features of the models."""
    return request.param


@pytest.fixture(scope="module")
def finished(hidden: tuple[int, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One page in a bucket is enough to be learned by heart."""
    return run(tmp_path_factory.mktemp("runs"), *SMALL, "--hidden", ",".join(map(str, hidden)), "--seeds", "5")


def test_what_is_repeated_is_learned_by_heart_but_for_the_goldfish_loss(
    finished: Path, hidden: tuple[int, ...]
) -> None:
    results = read(finished / "results.json")
    assert list(results) == list(LOSSES) and all(list(found) == list(BUCKETS) for found in results.values())
    assert results["standard"] == {"control": 0, "low": 0, "middle": 0, "high": 1}
    assert set(results["goldfish"].values()) == {0}
    cells = read(finished / "cells.json")
    assert [(cell["model"], cell["loss"], cell["seed"]) for cell in cells] == [
        (f"hidden-{width}", loss, 5) for width in hidden for loss in LOSSES
    ]
    large = {cell["loss"]: cell for cell in cells if cell["model"] == "hidden-64"}
    assert large["standard"]["accuracy"]["high"] == 1 and 0.2 < large["goldfish"]["accuracy"]["high"] < 0.9
    for cell in cells:
        assert 1 < cell["held_out"][1] < 6 and cell["parameters"] > 10_000
    assert {file.name for file in finished.iterdir()} >= {"exact.png", "accuracy.png", "table.txt", "run.json"}


def test_what_is_finished_is_not_run_again(
    finished: Path,
    hidden: tuple[int, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder, trained = Path(shutil.copytree(finished, tmp_path / "memorization")), []

    def launch(function: Any, ranks: int, model: Any, pages: Any, settings: Any, loss: str, seed: int) -> list[Any]:
        trained.append((model.name, loss, seed))
        return [read(finished / "cells" / f"{model.name}-{loss}-seed-5.json")]

    monkeypatch.setattr(recipe, "launch", launch)
    words = [*SMALL, "--hidden", *map(str, hidden), "--seeds"]
    run(tmp_path, *words, "5")
    assert trained == [] and read(folder / "results.json") == read(finished / "results.json")
    small = f"hidden-{hidden[0]}"
    (folder / "cells" / f"{small}-goldfish-seed-5.json").unlink()
    run(tmp_path, *words, "5", "7")
    first, *others = ((f"hidden-{width}", loss, 7) for width in hidden for loss in LOSSES)
    assert trained == [first, (small, "goldfish", 5), *others]
    assert "mean over 2 seeds" in capsys.readouterr().out


def test_other_settings_have_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {"exact": dict.fromkeys(BUCKETS, 0.0), "accuracy": dict.fromkeys(BUCKETS, 0.5), "held_out": [2.0, 1.0]}
    monkeypatch.setattr(recipe, "launch", lambda *_: [found | {"parameters": 3, "seconds": 1.0}])
    run(tmp_path, *TINY, "--seeds", "1")
    run(tmp_path, *TINY, "--seeds", "2", "--lr", "1e-3")
    assert {folder.name for folder in tmp_path.iterdir()} == {"memorization", "memorization-2"}
    run(tmp_path, *TINY, "--seeds", "1", "--lr", "1e-3", "--name", "memorization", code=2)


@pytest.mark.thorough
def test_every_grid_learns_the_same(tmp_path: Path) -> None:
    cells = []
    for grid in ("1,1,1,1", "2,1,2,1", "1,2,1,2"):
        folder = run(tmp_path / grid, *TINY, "--seeds", "3", "--grid", grid)
        cells.append({cell["loss"]: cell for cell in read(folder / "cells.json")})
    for loss in LOSSES:
        one, *others = (found[loss] for found in cells)
        for other in others:
            # Readers take the mean over their own kept targets.
            assert other["held_out"] == pytest.approx(one["held_out"], rel=1e-5 if loss == "standard" else 1e-2)
    assert cells[1]["standard"]["held_out"] != pytest.approx(cells[1]["goldfish"]["held_out"], rel=1e-4)


def test_pages_are_seen_as_often_as_is_said() -> None:
    made = settings("--pages", "3", "--epochs", "2", "5", "9", "--warmup", "4", "--steps", "30", "--batch", "4")
    found = order(made, 200, seed=8)
    assert found.batches.shape == (34, 4)
    seen = torch.bincount(found.batches.flatten(), minlength=200)
    chosen = torch.cat([*found.buckets.values()])
    for name, epochs in zip(BUCKETS, (0, 2, 5, 9), strict=True):
        assert seen[found.buckets[name]].tolist() == [epochs] * 3
    others = torch.ones(200, dtype=torch.bool).index_fill(0, chosen, False)
    assert len(chosen.unique()) == 12 and seen[others].max() == 1 and seen[others].sum() == made.fillers
    assert not torch.isin(found.batches[:4], chosen).any()
    # The readings of a page are spread over the run.
    where = [(found.batches[4:] == page).any(1).nonzero().flatten() for page in found.buckets["high"]]
    assert all(one.min() < 8 and one.max() > 22 for one in where)
    again, other = order(made, 200, seed=8), order(made, 200, seed=9)
    assert torch.equal(again.batches, found.batches) and not torch.equal(other.batches, found.batches)


def test_text_is_cut_into_pages(tmp_path: Path) -> None:
    made = settings(*TINY)
    (tmp_path / "a.txt").write_bytes(made_up(120_000))
    found = windows(tmp_path, made)
    assert found.learned.shape[1] == 72 and found.held_out.shape == (HELD_OUT, 72)
    assert bytes(found.learned[1].tolist()) == made_up(120_000)[72:144]
    own = windows(None, made)
    assert own.digest == windows(None, made).digest != found.digest and own.source == "words that are made up"
    (tmp_path / "a.txt").write_bytes(made_up(3000))
    with pytest.raises(ConfigError, match="make 39 pages of 72 tokens and 2 held out, and 34 and 64 are needed; give"):
        windows(tmp_path, made)


@pytest.mark.skipif(not TEXT.is_dir(), reason="no WikiText-2 beside the repository")
def test_real_text_is_enough() -> None:
    found = windows(TEXT, settings())
    assert len(found.learned) > 20_000 and found.held_out.shape == (HELD_OUT, 72) and "files of" in found.source


@pytest.mark.parametrize(
    ("scale", "parameters", "ranks"),
    [("tinyllama-1b", 1.1e9, 8), ("llama-2-7b", 6.7e9, 8), ("llama-2-13b", 13e9, 16), ("llama-2-70b", 69e9, 64)]
    + [("llama-3.1-8b", 8e9, 8), ("llama-3.1-70b", 70.6e9, 64), ("llama-3.1-405b", 406e9, 128)],
)
def test_dry_run_says_what_the_papers_scale_needs(
    scale: str, parameters: float, ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "--scale", scale, "--dry-run")
    said = capsys.readouterr().out
    assert f"{ranks} ranks, gx=1 gy=1 gz={ranks} gdata=1" in said and not list(tmp_path.iterdir())
    assert "50 + 50 steps of 128 x 2048 tokens: 26,214,400 a run, of which buckets are 4,505,600" in said
    assert "4 buckets of 200 pages: never seen, and 1, 4 and 6 times; 10,600 others once" in said
    needs = next(line for line in said.splitlines() if line.startswith(scale))
    number = float(needs.split(": ")[1].split(" billion")[0]) * 1e9
    assert number == pytest.approx(parameters, rel=0.08)
    held = float(needs.split("holds ")[1].split(" GiB")[0]) * 2**30
    assert 16 * number / ranks < held < 64 * 2**30


def test_dry_run_of_a_laptop_counts_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path, "--dry-run", "--hidden", "64", "--grid", "1,1,1,1")
    needs = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("hidden 64: "))
    number = float(needs.split(": ")[1].split(" million")[0]) * 1e6
    for part, each in (("weights", 4), ("gradients", 4), ("optimizer", 8)):
        held = float(needs.split(f"{part} ")[1].split(" MiB")[0]) * 2**20
        assert held == pytest.approx(each * number, rel=0.05)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--seeds", "1", "x"], "--seeds 1 x is not a list of whole numbers; write them as in --seeds 1 2 3"),
        (["--seeds", f"1,{2**63}"], f"--seeds {2**63} is not below 2**63, as random numbers need; give a smaller one"),
        (["--hidden", "66"], "--hidden 66 does not divide into --heads 4"),
        (["--grid", "8,1,1,1"], "--hidden 64 with 4 heads does not divide by gx = 8"),
        (["--grid", "1,1,3,1"], "--batch 8 does not divide by gz*gdata = 3 of --grid 1,1,3,1"),
        (["--grid", "2,2"], "--grid 2,2 is not four integers"),
        (["--epochs", "6", "6", "7"], "--epochs 6 6 7 do not rise"),
        (["--steps", "83"], "--steps 83 of 8 pages have no room for the 672 of the buckets"),
        (["--tokens", "60"], "--tokens 60 leaves no beginning before the last 50; give 64 or more"),
        (["--lr", "0"], "--lr 0.0 is not positive"),
        (["--quick", "--scale", "llama-2-7b"], "--quick is of the laptop's scale"),
        (["--scale", "llama-2-7b"], "goes on with a checkpoint on pages; give its folder as --checkpoint"),
        (["--checkpoint", "/none"], "--checkpoint is not of the laptop's scale"),
        (["--data", "/none/such"], "--data /none/such does not exist"),
        (["--scale", "llama-2-7b", "--checkpoint", "/none/such", "--data", "."], "--checkpoint"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], said: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, *words, code=2)
    error = capfd.readouterr().err
    assert error.startswith("axonn: error: ") and said in error and error.count("\n") == 1, error
    assert not list(tmp_path.iterdir())
