"""Files that are kept between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """The folder of such files: ``AXONN_CACHE``, or ``axonn`` in the user's cache folder."""
    return Path(
        os.environ.get("AXONN_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "axonn"
    )
