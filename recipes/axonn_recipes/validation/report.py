"""The report of a run: JSON with every loss, and a picture in the form of paper 003's Figure 8."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from axonn_plugins.config import ConfigError
from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.files import put
from axonn_recipes.validation.settings import BOUNDS, CONTROL, MODELS, Settings
from axonn_tp.grid.mesh import AXES

_EQUAL = 1e-17  # where losses without any difference are drawn on the logarithmic axis


@dataclass(frozen=True)
class Pair:
    """The curves of a model in a precision.

    Attributes:
        model: its name.
        dtype: a key of `BOUNDS`.
        serial: losses by step.
        control: those of a serial run whose first weights are one unit in the last place off.
        parallel: losses by step.
        seconds: how long each took to train, serial and parallel.
    """

    model: str
    dtype: str
    serial: list[float]
    control: list[float]
    parallel: list[float]
    seconds: tuple[float, float]

    @property
    def differences(self) -> np.ndarray:
        """The difference of the losses, by step."""
        return np.abs(np.subtract(self.serial, self.parallel))

    @property
    def worst(self) -> float:
        """The largest difference; not a number where a loss is not."""
        return float(self.differences.max())

    @property
    def drift(self) -> float:
        """The largest difference between the serial run and its control."""
        return float(np.abs(np.subtract(self.serial, self.control)).max())

    @property
    def bound(self) -> float:
        """The largest difference that rounding explains."""
        return max(BOUNDS[self.dtype], CONTROL * self.drift)

    @property
    def good(self) -> bool:
        """True if every loss is within the bound."""
        return self.worst <= self.bound

    def verdict(self) -> str:
        """The comparison in a sentence."""
        step = int(self.differences.argmax()) + 1
        word = "within" if self.good else "BEYOND"
        return (
            f"{MODELS[self.model][0]} in {self.dtype}: losses differ by at most {self.worst:.2g} (step {step} of "
            f"{len(self.serial)}), {word} the {self.bound:.2g} that rounding explains (the control drifts by {self.drift:.2g})"
        )


def earlier(folder: Path, settings: Settings) -> list[Pair]:
    """The pairs that a folder holds.

    Raises:
        ConfigError: it holds those of another run, or its file is damaged.
    """
    file = folder / "results.json"
    if not file.is_file():
        return []
    keys = Pair.__dataclass_fields__
    try:
        numbers = json.loads(file.read_text())
        kept = [Pair(**{key: value for key, value in pair.items() if key in keys}) for pair in numbers["pairs"]]
        numbers["settings"].get("steps")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"--out {folder} holds a results.json that is damaged; choose another folder") from None
    for name, value in _plain(settings).items():
        if numbers["settings"].get(name) != value:
            raise ConfigError(
                f"--out {folder} holds a run whose {name} is {numbers['settings'].get(name)} and not {value}; "
                "choose another folder"
            )
    return kept


def _plain(settings: Settings) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(settings)))


def write(pairs: list[Pair], settings: Settings, folder: Path) -> list[Path]:
    """Write results.json and losses.png into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {
        "settings": _plain(settings),
        "device": settings.device,
        "torch": torch.__version__,
        "pairs": [
            {**asdict(p), "largest_difference": p.worst, "drift": p.drift, "bound": p.bound, "good": p.good}
            for p in pairs
        ],
    }
    file = folder / "results.json"
    put(file, json.dumps(numbers, indent=1) + "\n")
    return [file, *_picture(pairs, settings).save(folder / "losses.png")]


def _picture(pairs: list[Pair], settings: Settings) -> Picture:
    """A column for each model: both curves, and below how far they are apart."""
    models = list(dict.fromkeys(pair.model for pair in pairs))
    return Picture(partial(_draw, pairs, settings, models), (5.5 * len(models), 6), 100)


def _draw(pairs: list[Pair], settings: Settings, models: list[str], figure: Any) -> None:
    axes = figure.subplots(2, len(models), height_ratios=(3, 2), sharex=True, squeeze=False)
    where = f"{settings.grid.world} ranks, everything on"
    for (curves, apart), model in zip(axes.T, models, strict=True):
        title, unit = MODELS[model]
        curves.set(title=title, ylabel=f"loss, {unit}")
        apart.set(xlabel="step", ylabel="difference", yscale="log")
        for number, pair in enumerate(p for p in pairs if p.model == model):
            steps, color = range(1, len(pair.serial) + 1), ("tab:blue", "tab:orange")[number]
            if number == 0:
                curves.plot(steps, pair.serial, color="lightgray", linewidth=4, label=f"serial, {pair.dtype}")
            curves.plot(steps, pair.parallel, "--", color=color, linewidth=1, label=f"{where}, {pair.dtype}")
            apart.plot(steps, np.maximum(pair.differences, _EQUAL), color=color, linewidth=0.8, label=pair.dtype)
            apart.axhline(pair.bound, color=color, linestyle=":", label=f"bound, {pair.dtype}")
        curves.legend()
        apart.legend(fontsize="small", ncols=2)
    grid = ", ".join(f"g{axis}={settings.grid.size(axis)}" for axis in AXES)
    figure.suptitle(f"{grid}, {settings.layout}")
