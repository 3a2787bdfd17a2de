"""A run's page, and the services that are told its numbers."""

from __future__ import annotations

import itertools
import json
import re
import sys
import types
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from axonn_plugins.cli import main
from axonn_plugins.config import ConfigError
from axonn_plugins.observe import charts, run_report
from axonn_plugins.observe.metrics import MetricsLogger

NESTED = {
    "html",
    "head",
    "body",
    "main",
    "table",
    "tr",
    "th",
    "td",
    "svg",
    "figure",
    "figcaption",
    "title",
    "h1",
    "h2",
    "p",
    "pre",
    "text",
}


class Nesting(HTMLParser):
    """Every tag that is opened is closed, innermost first."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in NESTED:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in NESTED:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def run_of(folder: Path, steps: int) -> None:
    logger = MetricsLogger(folder)
    for step in range(1, steps + 1):
        logger.log(
            step,
            loss=5.0 / step,
            tokens_per_s=1000.0 + step,
            memory_bytes=2**30,
            x_exposed_s=0.25,
            x_bytes=2**21,
            mfu=None,
        )
    logger.log(steps, val_loss=1.5, loss_text="<b>", other=float("nan"))
    logger.finish()
    collective = {
        "op": "all_gather",
        "axis": "x",
        "ranks": 2,
        "bytes": 2.0**20,
        "started": 0.001,
        "ended": 0.005,
        "exposed": 0.002,
    }
    (folder / "ledger.json").write_text(json.dumps({"step": 7, "collectives": [collective]}))
    (folder / "run.json").write_text(json.dumps({"settings": {"gx": 2, "data": "<script>"}}))


def test_a_run_as_a_page(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run_of(tmp_path, 10)
    assert main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    seen = Nesting()
    seen.feed(page)
    assert not seen.open
    for words in (
        "0.5000 (step 10)",
        "1.5000 (step 10)",
        "1,008",
        "1.00 GiB",
        "250.0 ms exposed, 2.00 MiB sent",
        "all_gather",
        "settings.gx",
    ):
        assert words in seen.text, words
    assert "<script" not in page and not re.search(r"(?:src|href)=", page)
    # Eight charts, of which utilisation and gradient norm have no number, learning rate neither; and the timeline.
    assert page.count("<figure>") == 5 and page.count("<svg") == 6


def test_long_runs_are_thinned() -> None:
    line = [(step, float(step)) for step in range(1, 12346)]
    kept = charts.thinned(line)
    assert len(kept) <= charts.POINTS + 1 and kept[-1] == line[-1] and kept[0] == line[0]
    assert charts.thinned(line[:3]) == line[:3]


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.3, 5.6), (-2e-7, 9e-7), (17.0, 23456.0)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    found = charts.ticks(low, high)
    assert 2 <= len(found) <= 7 and all(low - 1e-9 <= tick <= high + 1e-9 for tick in found)
    steps = {f"{(b - a):.6e}"[0] for a, b in itertools.pairwise(found)}
    assert len(steps) == 1 and steps <= set("125")


def test_lines_that_do_not_change_are_flat() -> None:
    svg = charts.chart("sent", {"x": [(1, 9.05594), (2, 9.05595)]})
    first, second = re.search(r'points="\S+,(\S+) \S+,(\S+)"', svg).groups()  # type: ignore[union-attr]
    assert abs(float(first) - float(second)) < 1


def test_a_folder_without_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no metrics.jsonl"):
        run_report.write_report(tmp_path)


def test_numbers_that_no_float_holds_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1%s}\n{"step": 2, "loss": 1.5}\n' % ("0" * 400))
    page = run_report.write_report(tmp_path).read_text()
    assert "1.5000 (step 2)" in page


ROW = {"op": "all_reduce", "axis": "x", "ranks": 2, "bytes": 8.0, "started": 0.0, "ended": 1.0, "exposed": None}


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.json", "{", 'run.json" is not JSON'),
        ("ledger.json", "{", 'ledger.json" is no ledger of collectives'),
        ("ledger.json", '{"step": 1, "collectives": [3]}', 'ledger.json" is no ledger of collectives'),
        ("ledger.json", json.dumps({"step": 1, "collectives": [ROW | {"bytes": None}]}), "is no ledger of collectives"),
        (
            "ledger.json",
            json.dumps({"step": 1, "collectives": [ROW | {"exposed": "1"}]}),
            "is no ledger of collectives",
        ),
        ("metrics.jsonl", '{"step": NaN}\n{"step": 1%s}\n' % ("0" * 400), "holds no metrics.jsonl with a step"),
        ("metrics.jsonl", '3\n{"loss": 1}\n{"step": "one"}\n', "holds no metrics.jsonl with a step"),
    ],
)
def test_damaged_files_of_a_run_are_one_sentence(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run_of(tmp_path, 10)
    (tmp_path / name).write_text(text)
    assert main(["report", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.count("\n") == 1 and not (tmp_path / "report.html").exists()


def stand_in(told: list[Any]) -> dict[str, types.ModuleType]:
    """Both services' modules, as far as they are used."""

    class Run:
        id = "abc"
        info = types.SimpleNamespace(run_id="m1")

        def log(self, values: Any, step: int) -> None:
            told.append(("wandb", step, values))

        def finish(self) -> None:
            told.append(("wandb", "end"))

    wandb, mlflow = types.ModuleType("wandb"), types.ModuleType("mlflow")
    wandb.init = lambda **given: told.append(given) or Run()  # type: ignore[attr-defined]
    mlflow.start_run = lambda **given: told.append(given) or Run()  # type: ignore[attr-defined]
    mlflow.log_metrics = lambda values, step: told.append(("mlflow", step, values))  # type: ignore[attr-defined]
    mlflow.end_run = lambda: told.append(("mlflow", "end"))  # type: ignore[attr-defined]
    return {"wandb": wandb, "mlflow": mlflow}


def test_services_are_told_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    for name, module in stand_in(told).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv("AXONN_TRACK", "wandb, mlflow")
    logger = MetricsLogger(tmp_path)
    logger.log(3, loss=2.0, mfu=None, words="no")
    logger.finish()
    assert told[0]["id"] is None and told[0]["name"] == tmp_path.name and told[1]["run_id"] is None
    assert told[2:] == [("wandb", 3, {"loss": 2.0}), ("mlflow", 3, {"loss": 2.0}), ("wandb", "end"), ("mlflow", "end")]
    told.clear()
    MetricsLogger(tmp_path, resume_step=3).finish()
    assert told[0]["id"] == "abc" and told[1]["run_id"] == "m1"
    told.clear()
    MetricsLogger(tmp_path).finish()
    assert told[0]["id"] is None and told[1]["run_id"] is None


def test_services_that_are_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.setenv("AXONN_TRACK", "wandb")
    MetricsLogger(tmp_path).finish()
    assert "needs wandb, which is not installed" in capsys.readouterr().err
    monkeypatch.setenv("AXONN_TRACK", "wanbd")
    with pytest.raises(ConfigError, match='has "wanbd", which is not known; use "wandb"'):
        MetricsLogger(tmp_path)
    assert main(["train", "quickstart", "--dry-run"]) == 2
    assert 'AXONN_TRACK has "wanbd"' in capsys.readouterr().err
