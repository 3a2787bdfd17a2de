"""All texts of the repository, and the blocks of code in them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "code"))
TEXTS = sorted(
    {
        *ROOT.glob("*.md"),
        *(
            file
            for folder in ("axonn_tp", "docs", "plugins", "recipes", "samo", "ted_moe", "tests")
            for file in (ROOT / folder).rglob("*.md")
        ),
    }
)


@dataclass(frozen=True)
class Code:
    """A fenced block.

    Attributes:
        file: from the repository's root.
        line: where it begins.
        language: as the fence says.
        title: of the file that it is, as train.py.
        text: what stands in it.
    """

    file: str
    line: int
    language: str
    title: str
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def blocks() -> Iterator[Code]:
    """All of them."""
    for file in TEXTS:
        found = re.finditer(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", file.read_text(), re.M | re.S)
        for one in found:
            line = file.read_text()[: one.start()].count("\n") + 1
            yield Code(str(file.relative_to(ROOT)), line, one[1], one[2] or "", one[3])


BLOCKS = list(blocks())
