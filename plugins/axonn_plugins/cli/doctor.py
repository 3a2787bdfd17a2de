"""``axonn doctor``: what is installed, what works here and what is missing."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_plugins.observe import doctor


@dataclass(frozen=True)
class Options:
    """Say what of the suite and its hosts works in this environment, and what to do about the rest."""


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if arguments:  # else nothing is imported that a broken installation may lack
        from axonn_plugins.cli.options import read

        read(Options, arguments, "axonn doctor")
    return doctor.main()
