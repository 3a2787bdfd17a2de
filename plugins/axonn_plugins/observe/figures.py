"""Pictures, where matplotlib is installed: the one place that imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from axonn_plugins.config.base import ConfigError
from axonn_plugins.observe.files import complete

MISSING = 'needs matplotlib, which is not installed; run pip install "axonn-plugins[plots]"'


@dataclass(frozen=True)
class Picture:
    """A picture: the function that draws it, and its size.

    Attributes:
        draw: draws into a `matplotlib.figure.Figure`, whose layout takes care of itself.
        size: width and height in inches.
        dpi: pixels an inch.
    """

    draw: Callable[[Any], None]
    size: tuple[float, float] = (7.0, 4.5)
    dpi: int = 120

    def save(self, file: Path, option: str | None = None) -> list[Path]:
        """Write the picture; without matplotlib say so on stderr, and go on.

        Args:
            file: where it goes, in a format that its suffix names.
            option: by which the user gave the file, as in ``--picture``.

        Returns:
            The file, or nothing where it was not drawn.

        Raises:
            ConfigError: the file that the user gave cannot be written.
        """
        try:
            # A Figure without pyplot draws with Agg and leaves the caller's backend alone.
            from matplotlib.figure import Figure
        except ModuleNotFoundError as missing:
            if missing.name != "matplotlib":
                raise
            print(f"axonn: {file} is not drawn: that {MISSING}", file=sys.stderr)
            return []
        if option is not None and file.is_dir():
            raise ConfigError(f'{option} = "{file}" is a folder; use a file such as picture.png, .pdf or .svg')
        figure = Figure(figsize=self.size, layout="constrained")
        self.draw(figure)
        try:
            if option is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
            with complete(file) as aside:
                figure.savefig(aside, dpi=self.dpi)
        except (ValueError, OSError) as error:
            if option is None:
                raise
            reason = error.strerror or error if isinstance(error, OSError) else error
            raise ConfigError(
                f'{option} = "{file}" cannot be written: {reason}; use a file such as picture.png, .pdf or .svg'
            ) from None
        return [file]
