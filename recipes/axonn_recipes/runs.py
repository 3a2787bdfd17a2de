"""Where runs are kept."""

from __future__ import annotations

from pathlib import Path

from axonn_plugins.config import ConfigError


def new_folder(runs: Path, name: str | None, recipe: str) -> Path:
    """The folder of a new run: a name that was given, or the recipe's with the next number.

    Raises:
        ConfigError: a named one exists.
    """
    if name is not None:
        if (runs / name).exists():
            raise ConfigError(f"{runs / name} exists; choose another --name")
        return runs / name
    number = 1
    while (runs / (chosen := recipe if number == 1 else f"{recipe}-{number}")).exists():
        number += 1
    return runs / chosen
