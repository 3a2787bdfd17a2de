"""axonn bench scale: fits, grids, and that the quick form runs and finds nothing that grows with the square of the ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_plugins.config import ConfigError
from axonn_recipes.bench_scale.growth import AT, fitted, judge
from axonn_recipes.bench_scale.recipe import main as bench
from axonn_recipes.bench_scale.recipe import sizes_of
from axonn_recipes.bench_scale.standin import grid_of, places

RANKS = [2**power for power in range(8, 16)]


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("constant", [0.0, 0.1, 0.5])
def test_the_exponent_is_that_of_what_grows_above_a_constant(exponent: float, constant: float) -> None:
    growth = fitted({ranks: constant + 0.02 * ranks**exponent for ranks in RANKS})
    assert abs(growth.exponent - exponent) < 0.03
    assert growth.at(2 * AT) == pytest.approx(constant + 0.02 * (2 * AT) ** exponent, rel=0.05)


def test_what_hardly_grows_is_flat_and_what_falls_is_too() -> None:
    assert fitted(dict.fromkeys(RANKS, 3.0)).word == "flat"
    assert fitted({ranks: 3.0 + ranks / 1e5 for ranks in RANKS}).word == "flat"
    assert fitted({ranks: 100.0 / ranks for ranks in RANKS}).factor == 0


def test_the_square_and_what_is_too_much_miss_the_bars() -> None:
    assert judge({ranks: 1e-4 * ranks for ranks in RANKS}, 5.0).met
    assert not judge({ranks: 1e-3 * ranks for ranks in RANKS}, 5.0).met
    assert not judge({ranks: 1e-9 * ranks**2 for ranks in RANKS}, 5.0).met
    assert judge({ranks: 1e-12 * ranks**2 for ranks in RANKS}, 5.0).met  # what is as little as that is noise
    few = judge({ranks: 1e-3 * ranks for ranks in RANKS[:3]}, 5.0)
    assert not few.measured and not few.met and few.value == pytest.approx(AT * 1e-3, rel=0.01)


def test_grids_have_all_ranks_and_other_numbers_are_refused() -> None:
    assert [grid_of(ranks).world for ranks in RANKS] == RANKS
    assert places(256) == [0, 128, 255]
    for wrong in ("100", "32", "64,x", ""):
        with pytest.raises(ConfigError, match="is not a list of powers of two from 64"):
            sizes_of(wrong)
    with pytest.raises(ConfigError, match="--processes 2 cannot lose one"):
        bench(["--processes", "2", "--dry-run"])


def test_the_quick_form_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(["--quick", "--runs", str(tmp_path)]) == 0
    assert "within the bars" in capsys.readouterr().out
    found = json.loads((tmp_path / "bench_scale" / "results.json").read_text())
    curves = {(curve["what"], curve["unit"]): curve for curve in found["curves"]}
    assert found["ranks"] == [64, 256] and all(set(curve["costs"]) == {"64", "256"} for curve in curves.values())
    # Counted, not timed: a rank asks the store as often however many there are, and all but rank 0 read little.
    for role in ("rank 0", "other ranks"):
        assert curves[f"pccl: requests to the store, {role}", ""]["growth"]["factor"] == 0
    assert curves["pccl: read from the store, other ranks", "B"]["costs"]["256"] < 256 * 100
    assert curves["pccl: links for small calls", ""]["costs"]["256"] <= 32
