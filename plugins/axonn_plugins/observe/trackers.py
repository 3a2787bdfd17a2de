"""Weights & Biases and MLflow beside TensorBoard, where ``AXONN_TRACK`` names them: the one place that imports either."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from axonn_plugins.config.base import ConfigError

SWITCH = "AXONN_TRACK"


class Tracker(Protocol):
    """A service that is told a run's numbers."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Tell it a step's numbers."""

    def close(self) -> None:
        """End the run there."""


class Wandb:
    """Weights & Biases: WANDB_PROJECT, WANDB_MODE and whatever else its own variables say.

    Args:
        folder: the run's, whose name is the run's there.
        resumed: the run of this folder goes on. Its service takes no step twice: those since the checkpoint stay as they were.
    """

    def __init__(self, folder: Path, resumed: bool) -> None:
        wandb = importlib.import_module("wandb")
        kept = folder / "wandb_id"
        known = kept.read_text() if resumed and kept.is_file() else None
        project = os.environ.get("WANDB_PROJECT", "axonn")
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), id=known, resume="allow")
        kept.write_text(self._run.id)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Tell it a step's numbers; several calls of one step are one row."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run there."""
        self._run.finish()


class MLflow:
    """MLflow: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME say where.

    Args:
        folder: the run's, whose name is the run's there.
        resumed: the run of this folder goes on.
    """

    def __init__(self, folder: Path, resumed: bool) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        kept = folder / "mlflow_id"
        known = kept.read_text() if resumed and kept.is_file() else None
        run = self._mlflow.start_run(run_id=known, run_name=None if known else folder.name)
        kept.write_text(run.info.run_id)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Tell it a step's numbers."""
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """End the run there."""
        self._mlflow.end_run()


KINDS: Mapping[str, type[Wandb] | type[MLflow]] = {"wandb": Wandb, "mlflow": MLflow}


def trackers(folder: Path, resumed: bool = False) -> list[Tracker]:
    """The services that ``AXONN_TRACK`` names, such as ``wandb,mlflow``; one that is not installed is told on stderr, and the run goes on.

    Args:
        folder: the run's.
        resumed: the run of this folder goes on.

    Raises:
        ConfigError: the variable has another word.
    """
    found: list[Tracker] = []
    for name in named():
        try:
            found.append(KINDS[name](folder, resumed))
        except ModuleNotFoundError as missing:
            if missing.name != name:
                raise
            print(
                f"axonn: {SWITCH} = {name} needs {name}, which is not installed; run pip install {name}",
                file=sys.stderr,
            )
    return found


def named() -> list[str]:
    """Names in ``AXONN_TRACK``.

    Raises:
        ConfigError: one is not known.
    """
    names = [name.strip() for name in os.environ.get(SWITCH, "").split(",") if name.strip()]
    for name in names:
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f'{SWITCH} has "{name}", which is not known; use "{near}", or wandb and mlflow with a comma between'
            )
    return names
