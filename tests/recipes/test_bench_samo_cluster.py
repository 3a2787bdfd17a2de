"""The benchmark on an emulated cluster: bytes are exact, and what is reported is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_plugins.cli import main
from axonn_plugins.cli.options import read
from axonn_plugins.cluster import lacking
from axonn_plugins.optim.reducer import FLAG_BYTES
from axonn_recipes.bench_samo_cluster import recipe
from axonn_recipes.bench_samo_cluster.measure import ALONE, DENSE, SAMO, Side
from axonn_recipes.bench_samo_cluster.settings import Options, resolve

WORDS = ["bench", "samo_cluster", "--layers", "1", "--hidden", "32", "--heads", "4", "--context", "8", "--batch", "4"]


@pytest.mark.skipif(lacking() is not None, reason=f"no cluster can be emulated here: {lacking()}")
def test_bytes_are_exact_and_sides_are_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--rounds", "2", "--bandwidth", "1Gbit", "--dtype", "bf16", "--runs", str(tmp_path)]
    assert main(words) == 0
    numbers = json.loads((tmp_path / "bench_samo_cluster" / "results.json").read_text())
    sides = {side["name"]: side for side in numbers["sides"]}
    assert list(sides) == [DENSE, DENSE + ALONE, SAMO, SAMO + ALONE]
    kept, whole = sides[SAMO]["kept"], sides[SAMO]["parameters"]
    assert whole - kept == round(0.9 * (32 * 32 * 12 + 32 * 256))
    assert sides[SAMO]["reduced"] == 2 * kept + FLAG_BYTES * (
        1 + 17
    )  # 2f phi, and which of 17 parameters have gradients
    assert sides[DENSE]["reduced"] == 2 * whole  # 2 phi
    assert sides[DENSE + ALONE]["reduced"] == sides[SAMO + ALONE]["reduced"] == 0
    assert sides[DENSE]["wire"] > sides[SAMO]["wire"] > 2 * 3 * 2 * kept  # four ranks: 3/2 of it each, and headers
    for side in sides.values():
        assert len(side["seconds"]) == 2 and min(side["seconds"]) <= side["median"] <= max(side["seconds"])
    assert f"2.01 for each of {kept:,} parameters kept of {whole:,}" in capfd.readouterr().out


def test_bandwidth_is_found_at_which_communication_is_half(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(settings: object) -> dict[str, Side]:
        megabits = float(settings.bandwidth.removesuffix("Mbit"))  # type: ignore[attr-defined]
        return {DENSE: Side(DENSE, [0.1 + 10 / megabits]), DENSE + ALONE: Side(DENSE + ALONE, [0.1])}

    monkeypatch.setattr(recipe, "run", run)
    settings = resolve(read(Options, []))
    assert settings.bandwidth == "half"
    assert recipe.halved(settings).bandwidth == "100.0Mbit"


def test_ratios_are_of_rounds() -> None:
    seconds = {DENSE: [2.0, 4.0, 3.0], DENSE + ALONE: [1.0] * 3, SAMO: [1.0, 2.0, 1.0], SAMO + ALONE: [0.5] * 3}
    sides = {name: Side(name, times, kept=1, parameters=1) for name, times in seconds.items()}
    numbers = recipe.results(resolve(read(Options, [])), sides)
    assert numbers["ratio"]["median"] == 2 and numbers["ratio"]["range"] == [2, 3]
    assert numbers["communication_share_of_dense"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--nodes", "1"], "--nodes 1 of one rank each have nothing to communicate"),
        (["--bandwidth", "3"], "bandwidth = '3' is not a bandwidth"),
        (["--sparsity", "1"], "--sparsity 1.0 is not a share from 0 to below 1"),
        (["--batch", "6"], "--batch 6 does not divide by the 4 ranks"),
        (["--hidden", "30"], "--hidden 30 does not divide into --heads 8"),
        (["--rounds", "0"], "--rounds 0 is not at least 1"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "samo_cluster", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("axonn: error: ") and words in error and error.count("\n") == 1
