"""Run random cases and print what is not equal to the serial model; a case is repeated by its number."""

from __future__ import annotations

import argparse
import sys

from tests.fuzz.driver import SECONDS, WORLDS, run_cases


def main(arguments: list[str] | None = None) -> int:
    """Run the command; 0 where no case is wrong and none hangs."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--cases", type=int, default=200, help="how many (default: 200)")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first case; with --cases 1 it is repeated alone"
    )
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="after which a case hangs (default: %(default)g)"
    )
    given = parser.parse_args(arguments)
    found = run_cases(given.seed, range(given.first, given.first + given.cases), given.seconds)
    for line in found.bad:
        print(line, file=sys.stderr)
    print(f"seed {given.seed}, on {', '.join(map(str, WORLDS))} ranks: {found}")
    if given.cases == 1:
        print(found.told[given.first])
    return 1 if found.bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
