"""``make docs``: draw, build the site strictly into the folder site, check that it asks for nothing elsewhere, and print the time."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import drawings
from mkdocs.commands.build import build
from mkdocs.config import load_config
from mkdocs.exceptions import Abort
from texts import ROOT

ELSEWHERE = re.compile(
    r"<(?:script|img|iframe|source)[^>]*\ssrc=[\"']?(?:https?:)?//"
    r"|<link[^>]*rel=[\"']?(?:stylesheet|preconnect|icon)[^>]*href=[\"']?(?:https?:)?//"
)
"""Whatever a browser would load from another place than the site."""


def outside(folder: Path) -> list[str]:
    """Pages and styles that load something from elsewhere."""
    pages = [file for file in folder.rglob("*.html") if ELSEWHERE.search(file.read_text())]
    styles = [file for file in folder.rglob("*.css") if re.search(r"url\(['\"]?https?:", file.read_text())]
    return [str(file.relative_to(folder)) for file in pages + styles]


def main() -> int:
    """Build; returns the exit code."""
    began = time.perf_counter()
    drawings.main()
    config = load_config(str(ROOT / "mkdocs.yml"), strict=True)
    try:
        build(config)
    except Abort as error:
        print(error, file=sys.stderr)
        return 1
    folder = Path(config.site_dir)
    if found := outside(folder):
        print(f"these load something from elsewhere: {', '.join(found)}", file=sys.stderr)
        return 1
    pages = sum(1 for _ in folder.rglob("*.html"))
    print(
        f"site/index.html and {pages - 1} more pages in {time.perf_counter() - began:.1f} s; nothing is loaded from elsewhere"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
