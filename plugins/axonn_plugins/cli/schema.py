"""``axonn schema``: the JSON schema of the block."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from axonn_plugins.cli.options import read
from axonn_plugins.config import schema
from axonn_plugins.observe.files import put


@dataclass(frozen=True)
class Options:
    """Print the JSON schema of the "axonn" block.

    Attributes:
        write: a file to write it to instead.
    """

    write: Path | None = None


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    options = read(Options, arguments, "axonn schema")
    if options.write is None:
        print(schema(), end="")
    else:
        put(options.write, schema())
    return 0
