"""A run's folder as one HTML page that loads nothing: loss, throughput, memory, exposed communication, ledger, settings."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from axonn_plugins.config.base import ConfigError
from axonn_plugins.observe.charts import Line, chart, timeline
from axonn_plugins.observe.files import put
from axonn_plugins.observe.ledger_report import LEDGER_FILE, read_ledger, table
from axonn_plugins.observe.metrics import GIB, is_number, read_metrics

Records = Sequence[Mapping[str, Any]]
STYLE = """
:root { color-scheme: light dark; --ink: #1b2733; --paper: #fff; --line: #d8dfe6 }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e9ef; --paper: #161c22; --line: #39444f } }
body { font: 15px/1.5 Helvetica, Arial, sans-serif; color: var(--ink); background: var(--paper); max-width: 1180px; margin: 2em auto; padding: 0 1em }
main { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 1em }
figure { margin: 0 } figcaption { font-weight: 600 } svg { width: 100% } svg text { font-size: 12px; fill: currentColor }
.grid { stroke: var(--line) } pre { overflow-x: auto } td, th { text-align: left; padding: .1em 1.2em .1em 0; vertical-align: top }
"""


def write_report(run: Path) -> Path:
    """Write a run's page.

    Args:
        run: the folder, with metrics.jsonl, and where there are run.json and ledger.json.

    Returns:
        The page, report.html in it.

    Raises:
        ConfigError: it holds no metrics, or other files of a run are damaged.
    """
    file = run / "metrics.jsonl"
    records = read_metrics(file) if file.is_file() else []
    if not records:
        raise ConfigError(
            f'"{run}" holds no metrics.jsonl with a step in it; give the folder of a run, such as runs/quickstart'
        )
    page = run / "report.html"
    put(page, html(run, records))
    return page


def html(run: Path, records: Records) -> str:
    """The page's text."""
    name = escape(run.resolve().name)
    charts = "".join(chart(title, lines) for title, lines in _charts(records) if any(lines.values()))
    body = [f"<h1>{name}</h1>", _rows(summary(records)), f"<main>{charts}</main>"]
    if (run / LEDGER_FILE).is_file():
        body.append(_ledger(read_ledger(run)))
    if (run / "run.json").is_file():
        body += ["<h2>Settings</h2>", _rows(_flat(_settings(run / "run.json")))]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style></head>'
        f"<body>{''.join(body)}</body></html>\n"
    )


def _settings(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as error:
        raise ConfigError(f'"{file}" is not JSON: {error}; correct or remove it') from None
    return found if isinstance(found, Mapping) else {file.stem: found}


def line(records: Records, name: str, scale: float = 1.0) -> Line:
    """(step, value) of one metric, where it is a finite number."""
    return [(record["step"], record[name] * scale) for record in records if is_number(record.get(name))]


def summary(records: Records) -> dict[str, str]:
    """The run in a few numbers: medians are of its second half, without the steps that warm up."""
    found = {"steps": f"{max(record['step'] for record in records):g}"}
    for name, said in (("loss", "last loss"), ("val_loss", "last validation loss")):
        if values := line(records, name):
            found[said] = f"{values[-1][1]:.4f} (step {values[-1][0]:g})"
    if speeds := _late(line(records, "tokens_per_s")):
        found["tokens a second, median"] = f"{statistics.median(speeds):,.0f}"
    if peaks := line(records, "memory_bytes", 1 / GIB):
        found["most memory of rank 0"] = f"{max(value for _, value in peaks):.2f} GiB"
    for axis in _axes(records):
        waited = _late(line(records, f"{axis}_exposed_s", 1e3))
        sent = _late(line(records, f"{axis}_bytes", 1 / 2**20))
        if waited and sent:
            found[f"{axis}: a step"] = (
                f"{statistics.median(waited):.1f} ms exposed, {statistics.median(sent):.2f} MiB sent, medians"
            )
    return found


def _late(values: Line) -> list[float]:
    return [value for _, value in values[len(values) // 2 :]]


def _axes(records: Records) -> list[str]:
    return sorted(
        {name.removesuffix("_exposed_s") for record in records for name in record if name.endswith("_exposed_s")}
    )


def _charts(records: Records) -> list[tuple[str, dict[str, Line]]]:
    axes = _axes(records)
    return [
        ("loss", {"training": line(records, "loss"), "validation": line(records, "val_loss")}),
        ("tokens a second", {"tokens": line(records, "tokens_per_s")}),
        ("memory of rank 0, GiB", {"memory": line(records, "memory_bytes", 1 / GIB)}),
        ("exposed communication, ms a step", {axis: line(records, f"{axis}_exposed_s", 1e3) for axis in axes}),
        ("sent by rank 0, MiB a step", {axis: line(records, f"{axis}_bytes", 1 / 2**20) for axis in axes}),
        ("gradient norm", {"norm": line(records, "grad_norm")}),
        ("learning rate", {"rate": line(records, "lr")}),
        ("model FLOPs utilisation", {"utilisation": line(records, "mfu")}),
    ]


def _ledger(kept: Mapping[str, Any]) -> str:
    rows: dict[str, list[tuple[float, float, float, str]]] = {}
    for one in sorted(kept["collectives"], key=lambda one: one["axis"]):
        words = f"{one['op']} over {one['axis']}, {one['bytes'] / 2**20:.3f} MiB, {(one['ended'] - one['started']) * 1e3:.2f} ms"
        rows.setdefault(one["axis"], []).append((one["started"], one["ended"], one["exposed"] or 0.0, words))
    return (
        f"<h2>Collectives of step {kept['step']}</h2><p>Blue: under way; red: waited for.</p>{timeline(rows)}"
        f"<pre>{escape(table(dict(kept)))}</pre>"
    )


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in settings.items():
        nested = isinstance(value, Mapping)
        found |= _flat(value, f"{before}{name}.") if nested else {f"{before}{name}": json.dumps(value)}
    return found


def _rows(values: Mapping[str, str]) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in values.items())
    return f"<table>{rows}</table>"
