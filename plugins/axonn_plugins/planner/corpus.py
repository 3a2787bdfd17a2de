"""Published measurements of training: `corpus/*.toml`, typed, and what the model says of the same."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import files, machine, model
from axonn_plugins.planner.answer import EVERY, AnyStrategy, Question, answer
from axonn_plugins.planner.axonn import model_flops
from axonn_plugins.planner.calibration import Calibration
from axonn_plugins.planner.search import AnyPlan
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.transformer import Mode

MEASURES = ("seconds", "petaflops", "percent_of_peak", "tflops", "percent_of_model_peak", "tokens_per_gpu")
"""Published numbers: seconds of a step; the rate of all GPUs with what is recomputed, and in percent of the peak; the rate of a GPU
without, and in percent; tokens a second."""


@dataclass(frozen=True)
class Measurement:
    """A row of a published table.

    Attributes:
        table: the file's name.
        source: publication and table.
        assumed: what these leave open.
        framework: what trained.
        model: a name that `model.load` knows.
        machine: likewise.
        gpus: how many.
        batch: samples of a step.
        strategy: of the model's, what the framework does.
        setting: how it was trained.
        fixed: sizes that were published.
        measure: one of `MEASURES`.
        value: what was published.
        sequence: positions of a sample; None for the model's.
    """

    table: str
    source: str
    assumed: str
    framework: str
    model: str
    machine: str
    gpus: int
    batch: int
    strategy: AnyStrategy
    setting: Setting
    fixed: Mapping[str, int]
    measure: str
    value: float
    sequence: int | None = None

    @property
    def seconds(self) -> float:
        """Seconds of a step, as published, or by Narayanan's formula where operations were published."""
        trained = model.load(self.model, sequence=self.sequence)
        assert isinstance(trained, model.Transformer)
        if self.measure == "seconds":
            return self.value
        if self.measure == "tokens_per_gpu":
            return self.batch * trained.sequence / self.gpus / self.value
        peak = self.gpus * machine.load(self.machine).tensor
        rate = {
            "petaflops": self.value * 1e15,
            "tflops": self.value * 1e12 * self.gpus,
            "percent_of_peak": self.value / 100 * peak,
            "percent_of_model_peak": self.value / 100 * peak,
        }[self.measure]
        again = self.measure in ("petaflops", "percent_of_peak")
        return model_flops(trained, self.batch, again) / rate

    @property
    def system(self) -> tuple[str, str]:
        """The framework and the machine: rows of one pair are one system."""
        return self.framework.partition(",")[0], self.machine

    def predicted(self, mode: Mode = "calibrated", calibration: Calibration | None = None) -> AnyPlan | None:
        """The model's plan for this run; where nothing fits, without a limit of memory, as it did run. None where the model has no such strategy.

        Args:
            mode: which model.
            calibration: coefficients to fit, among them the rate of attention, also where a machine's file has another.
        """
        trained, on = model.load(self.model, sequence=self.sequence), machine.load(self.machine)
        if calibration is not None:
            on = replace(on, calibration=calibration, attention=None)
        asked = Question(on, trained, self.gpus, self.batch, (self.strategy,), mode, self.fixed or None, self.setting)
        best = answer(asked, 1).best or answer(replace(asked, machine=replace(on, memory=math.inf)), 1).best
        return best[0] if best else None


def load() -> tuple[Measurement, ...]:
    """All tables, in the order of their names."""
    return tuple(row for path in files.ours("corpus").values() for row in read(path))


@cache
def read(path: Path) -> tuple[Measurement, ...]:
    """The rows of a file.

    Raises:
        ConfigError: it cannot be read, or a key is missing, unknown or wrong.
    """
    table = files.read("corpus", path)
    where = path.name
    files.keys(where, table, ("source", "assumed", "row"), ("machine", "common"))
    source, assumed = (files.text(f"{where}: {key}", table[key]) for key in ("source", "assumed"))
    rows = [
        _row(f"{where}: row {at}", {"machine": table.get("machine")} | table.get("common", {}) | row)
        for at, row in enumerate(table["row"], 1)
    ]
    return tuple(Measurement(table=path.stem, source=source, assumed=assumed, **row) for row in rows)


_NEEDED = ("framework", "model", "machine", "gpus", "batch", "strategy")
_SETTING = ("recompute", "interleave", "sparsity", "experts", "fused", "fp8")


def _row(where: str, row: dict[str, Any]) -> dict[str, Any]:
    files.keys(where, row, _NEEDED, ("sequence", "fixed", *_SETTING, *MEASURES))
    measures = [key for key in MEASURES if key in row]
    if len(measures) != 1:
        raise ConfigError(
            f"{where} gives {', '.join(measures) or 'nothing'} as measured; give one of {', '.join(MEASURES)}"
        )
    if row["strategy"] not in EVERY:
        raise ConfigError(f"{where}: strategy = {row['strategy']!r} is not known; use one of {', '.join(EVERY)}")
    return {
        **{key: files.text(f"{where}: {key}", row[key]) for key in ("framework", "model", "machine", "strategy")},
        **{key: files.whole(f"{where}: {key}", row[key]) for key in ("gpus", "batch", "sequence") if key in row},
        "setting": Setting(**{key: row[key] for key in _SETTING if key in row}),
        "fixed": {
            key: files.whole(f"{where}: {key}", row["gpus"] if size == "gpus" else size)
            for key, size in row.get("fixed", {}).items()
        },
        "measure": measures[0],
        "value": files.number(f"{where}: {measures[0]}", row[measures[0]]),
    }
