"""The sweep of matrix products: its fit, its file, and that axonn bench network keeps what it wrote."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_plugins.cli import main
from axonn_plugins.config import ConfigError
from axonn_plugins.planner import machine
from axonn_recipes.bench_matmul.measure import Products, shapes
from axonn_recipes.bench_matmul.recipe import main as bench
from axonn_recipes.bench_network.report import merged


def products(start: float) -> Products:
    seconds = {(m, k, n): start + 2.0 * m * k * n / 50e9 for m, k, n in shapes(512)}
    return Products("CPU", "float32", seconds, 1e10)


def test_shapes() -> None:
    assert len(set(shapes(1024))) == 20
    assert shapes(64)[:4] == [(4, 4, 4), (16, 4, 4), (4, 16, 4), (4, 4, 16)]


def test_the_fit_finds_the_rate_and_the_half() -> None:
    exact = products(20e-6)
    assert exact.fit == pytest.approx((50e9, 50e9 * 20e-6), rel=1e-9)
    assert exact.error < 1e-9
    assert products(0.0).fit == pytest.approx((50e9, 1.0), rel=1e-6)


def test_keys_go_before_tables_and_other_lines_stay() -> None:
    text = 'source = "x"\nsustained = "1 GFLOP/s"   # old\n\n[within]\nsustained = 3\n'
    new = merged(text, {"sustained": '"2 GFLOP/s"', "product_half": "5"})
    assert new == 'source = "x"\nsustained = "2 GFLOP/s"\nproduct_half = 5\n\n[within]\nsustained = 3\n'
    assert merged(new, {}) == new


def test_into_the_file_of_the_network_which_keeps_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AXONN_CACHE", str(tmp_path / "cache"))
    words = ["--largest", "32", "--size", "1", "--rounds", "1", "--ranks", "2", "--runs", str(tmp_path)]
    assert main(["bench", "matmul", *words]) == 0
    assert "measure it by axonn bench network" in capsys.readouterr().out
    network = ["bench", "network", "--layouts", "1x2", "--size", "64K", "--matrix", "64", "--rounds", "1"]
    assert main([*network, "--runs", str(tmp_path)]) == 0
    assert machine.load("here").product_half is None
    assert main(["bench", "matmul", *words]) == 0
    known = machine.load("here")
    told = json.loads((tmp_path / "bench_matmul-2" / "products.json").read_text())
    assert len(told["products"]) == 20 and told["dtype"] == "float32"
    assert known.sustained == pytest.approx(told["sustained"], rel=1e-4)
    assert known.product_half == pytest.approx(told["product_half"], rel=1e-4)
    assert known.memory_bandwidth == pytest.approx(told["memory_bandwidth"], rel=1e-4)
    assert main([*network, "--runs", str(tmp_path)]) == 0
    again = machine.load("here")
    assert (again.sustained, again.product_half) == (known.sustained, known.product_half)


def test_wrong_input(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("domain = 2\n")
    for words, message in (
        (["--ranks", "0"], "--ranks 0 is not at least 1"),
        (["--largest", "8"], "--largest = 8 is too small"),
        (["--file", str(tmp_path / "mine.toml")], 'lacks the key "source"'),
        (["--file", str(tmp_path / "none.toml")], "cannot be read"),
        (["--file", str(tmp_path / "mine.json")], "is JSON, but TOML alone is written"),
    ):
        with pytest.raises(ConfigError, match=message):
            bench([*words, "--runs", str(tmp_path)])
    assert main(["bench", "matmul", "--dry-run", "--runs", str(tmp_path)]) == 0
    assert [one.name for one in tmp_path.iterdir()] == ["mine.toml"]
