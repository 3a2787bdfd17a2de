"""The validation: both models learn as the serial ones do, and what is reported is what was compared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from axonn_plugins.cli import main
from axonn_plugins.config import ConfigError
from axonn_recipes.validation import recipe
from axonn_recipes.validation.problems import SIZES, Size, discs
from axonn_recipes.validation.report import Pair, earlier
from axonn_recipes.validation.settings import BOUNDS, Options, Settings, resolve
from tests.matrix import thorough


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Of this file's tests, which learn the same text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


TINY = replace(
    SIZES["small"], gpt=replace(SIZES["small"].gpt, context=16, heads=4, hidden=32), batch={"gpt": 4, "unet": 4}
)


@pytest.mark.parametrize(("size", "steps"), [(TINY, 2), thorough(SIZES["small"], 3)], ids=["tiny", "small"])
def test_both_models_learn_as_the_serial_ones(
    size: Size, steps: int, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "small", size)
    words = ["train", "validation", "--steps", str(steps), "--grid", "2,1,2,1", "--out", str(tmp_path / "out")]
    assert main([*words, "--dtype", "float64"]) == 0
    assert main([*words, "--dtype", "float32", "--model", "gpt"]) == 0
    text = capfd.readouterr().out
    assert "4 ranks, gx=2 gy=1 gz=2 gdata=1" in text and "U-Net in float64: losses differ by at most" in text
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"results.json", "losses.png"}
    numbers = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [(pair["model"], pair["dtype"]) for pair in numbers["pairs"]] == [
        ("gpt", "float64"),
        ("gpt", "float32"),
        ("unet", "float64"),
    ]
    for pair in numbers["pairs"]:
        assert pair["good"] and pair["largest_difference"] < (1e-12 if pair["dtype"] == "float64" else 1e-4)
        assert len(pair["serial"]) == len(pair["parallel"]) == steps == len(set(pair["serial"]))
        assert pair["drift"] < pair["bound"]  # nothing where a processor rounds both runs alike
        assert min(pair["seconds"]) > 0


def test_a_dry_run_says_what_would_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "validation", "--dry-run", "--out", str(tmp_path / "out")]) == 0
    text = capsys.readouterr().out
    assert "16 ranks, gx=2 gy=2 gz=2 gdata=2" in text and "300 steps, float64 and float32" in text
    assert not (tmp_path / "out").exists()


def test_a_larger_size_is_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe.report.write(
        [Pair("gpt", "float64", [1.0], [1.0], [1.0], (1.0, 1.0))], resolve(Options()), tmp_path / "small"
    )
    words = ["train", "validation", "--dry-run", "--size", "large", "--out"]
    assert main([*words, str(tmp_path / "out")]) == 0 and "GPT: 10,868,736 parameters" in capsys.readouterr().out
    assert (
        main([*words, str(tmp_path / "small")]) == 2 and "whose size is small and not large" in capsys.readouterr().err
    )


def test_steps_fit_into_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A serial step takes 0.1 s here and one on ranks 0.4 s: 0.6 s for a step of the three curves."""
    clock = [0.0]

    def launched(made: object, dtype: str, settings: Settings, role: str) -> tuple[list[float], list[float]]:
        each = 0.4 if role == "parallel" else 0.1
        clock[0] += 1 + settings.steps * each
        return [1.0 / (step + 1) for step in range(settings.steps)], [each] * settings.steps

    monkeypatch.setattr(recipe, "_launched", launched)
    monkeypatch.setattr(recipe.time, "perf_counter", lambda: clock[0])
    words = ["train", "validation", "--dtype", "float32", "--out"]
    assert main([*words, str(tmp_path / "out"), "--minutes", "2"]) == 0
    # Of a minute for each model 54 s, less the 4 s of the probe, and 3 s to start all.
    assert capsys.readouterr().out.count("0.60 s a step of two serial runs and one on 16 ranks: 78 steps") == 2
    assert clock[0] <= 120
    pairs = json.loads((tmp_path / "out" / "results.json").read_text())["pairs"]
    assert [len(pair["serial"]) for pair in pairs] == [78, 78]
    assert main([*words, str(tmp_path / "more"), "--minutes", "20", "--model", "unet"]) == 0
    assert "16 ranks: 300 steps" in capsys.readouterr().out
    assert main([*words, str(tmp_path / "less"), "--minutes", "0.4"]) == 2
    error = capsys.readouterr().err
    assert "--minutes 0.4 leave 6 steps, and a curve has 10 at least (GPT in float32: 0.60 s" in error
    assert error.count("\n") == 1 and "give 0.5 minutes" in error


def test_everything_is_on() -> None:
    options = resolve(Options()).options
    assert options.layout == "scattered" and options.cache_gathers and options.tune_matmuls
    assert options.overlap_all_reduce and options.overlap_reduce_scatter and options.overlap_all_gather
    assert options.reshard_after_forward


@pytest.mark.parametrize("apart", [1e-5, float("nan")])
def test_a_broken_bound_is_said_and_fails(
    apart: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def trained(made: object, dtype: str, settings: object, role: str) -> tuple[list[float], float]:
        return [3.0, 2.0 + apart * {"serial": 0, "control": 0.01, "parallel": 1}[role]], 1.0

    monkeypatch.setattr(recipe, "_timed", trained)
    words = ["train", "validation", "--model", "unet", "--out", str(tmp_path)]
    assert main([*words, "--dtype", "float64"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("axonn: U-Net in float64: losses differ by at most") and "step 2 of 2" in error
    assert "BEYOND the 1e-06" in error and error.count("\n") == 1
    bound = BOUNDS["float32"]
    assert Pair("gpt", "float32", [1.0], [1.0], [1.0 + bound / 2], (1.0, 1.0)).good
    assert Pair("gpt", "float32", [1.0], [1.0 + bound], [1.0 - 1.9 * bound], (1.0, 1.0)).good
    assert not Pair("gpt", "float32", [1.0], [1.0 + bound], [1.0 - 2.1 * bound], (1.0, 1.0)).good


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], "--steps 0 is not at least 1"),
        (["--minutes", "0"], "--minutes 0 is not positive; give a time such as 30"),
        (["--minutes", "nan"], "--minutes nan is not positive"),
        (["--grid", "2,2,2"], "--grid 2,2,2 is not four integers; write gx,gy,gz,gdata as in 2,2,2,2"),
        (["--grid", "2,a,2,2"], "--grid 2,a,2,2 is not four integers"),
        (["--grid", "0,1,1,1"], "--grid 0,1,1,1: gx = 0 is not an integer of at least 1"),
        (["--grid", "1,1,3,1"], "--grid 1,1,3,1: the batch of 16 does not divide by gz*gdata = 3"),
        (["--grid", "3,1,1,1"], "--grid 3,1,1,1 does not fit the GPT: layer blocks.0.attention.qkv"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "validation", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("axonn: error: ") and words in error and error.count("\n") == 1


def test_another_run_is_not_mixed_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = resolve(Options(steps=1))
    recipe.report.write([Pair("gpt", "float64", [1.0], [1.0], [1.0], (1.0, 1.0))], settings, tmp_path)
    assert main(["train", "validation", "--steps", "2", "--dry-run", "--out", str(tmp_path)]) == 2
    assert "holds a run whose steps is 1 and not 2; choose another folder" in capsys.readouterr().err
    assert main(["train", "validation", "--steps", "1", "--dry-run", "--out", str(tmp_path)]) == 0


@pytest.mark.parametrize(
    "text", ["{", "[1]", '{"settings": [], "pairs": []}', '{"settings": {}, "pairs": [{"model": "gpt"}]}']
)
def test_damaged_results_are_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ConfigError, match="holds a results.json that is damaged; choose another folder"):
        earlier(tmp_path, resolve(Options()))


def test_images_are_discs_and_follow_from_the_generator() -> None:
    first, again = (discs(5, 8, torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, again) and first.shape == (5, 3, 8, 8)
    assert first.abs().max() <= 1 and (first.amax((2, 3)) - first.amin((2, 3))).mean() > 0.1
