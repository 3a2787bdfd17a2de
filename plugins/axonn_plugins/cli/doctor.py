"""``axonn doctor``: what is installed, what works here and what is missing."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_plugins.observe import doctor


@dataclass(frozen=True)
class Options:
    """Say what of the suite and its hosts works in this environment, and what to do about the rest.

    Attributes:
        json: one JSON object instead, for programs: ready, and checks with name, state, detail, remedy and core.
    """

    json: bool = False


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if arguments:  # else nothing is imported that a broken installation may lack
        from axonn_plugins.cli.options import read

        return doctor.main(read(Options, arguments, "axonn doctor").json)
    return doctor.main()
