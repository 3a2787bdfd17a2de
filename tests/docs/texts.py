"""All texts of the repository, and the blocks of code in them."""

from __future__ import annotations

import contextlib
import re
import shlex
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
OTHERS = {"accelerate", "deepspeed", "litgpt", "mpirun", "pip", "pre-commit", "printf", "python", "torchrun"}
"""Programs of others that may begin a line."""


def commands(block: Code) -> Iterator[list[str]]:
    """Commands of a block, as words: lines that go on are joined, and lines of several are parted."""
    text = re.sub(r"\\\n\s*", " ", block.text)
    for line in text.splitlines():
        line = re.split(r"\s+#(?:\s|$)", line)[0].strip()
        with contextlib.suppress(ValueError):
            for words in parted(shlex.split(line)):
                while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                    words = words[1:]
                if words and (words[0] in OTHERS or words[0] in ("axonn", "make")):
                    yield words


def parted(words: list[str]) -> Iterator[list[str]]:
    """Commands that a semicolon parts."""
    command: list[str] = []
    for word in words:
        command.append(word.removesuffix(";"))
        if word.endswith(";"):
            yield command
            command = []
    yield command


LINES = sorted({tuple(words) for block in BLOCKS if block.language in ("", "bash") for words in commands(block)})
