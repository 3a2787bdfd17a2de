"""The common part of benchmarks: turns, medians with their spread, the table and what is written."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import axonn_recipes
from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_plugins.observe.figures import Picture
from axonn_recipes.bench import claims, numbers, output, rounds

RECIPES = Path(axonn_recipes.__file__).parent


@dataclass(frozen=True)
class Asked:
    kind: str
    rounds: int = 7


@dataclass
class Side:
    name: str
    losses: list[float] = field(default_factory=list)


def test_each_round_has_an_order_of_its_own() -> None:
    turns = "".join(side for _, side in rounds.in_turns("abc", 40))
    assert all(sorted(turns[first : first + 3]) == ["a", "b", "c"] for first in range(0, 120, 3))
    assert {"ab", "ac", "ba", "bc", "ca", "cb"} <= {turns[first : first + 2] for first in range(119)}
    assert turns == "".join(side for _, side in rounds.in_turns("abc", 40))
    assert [number for number, _ in rounds.in_turns("ab", 2)] == [0, 0, 1, 1]


def test_spread_is_of_rounds() -> None:
    assert numbers.spread([1.0, 2.0, 3.0]) == {"median": 2.0, "low": 1.5, "high": 2.5}
    assert numbers.spread([4.0]) == {"median": 4.0, "low": 4.0, "high": 4.0}
    assert numbers.ratio([2.0, 6.0], [1.0, 2.0]) == {"median": 2.5, "quartiles": [2.25, 2.75], "range": [2.0, 3.0]}
    with pytest.raises(ValueError):
        numbers.ratios([1.0], [1.0, 2.0])
    assert numbers.worst([1.0, 3.0, 2.0]) == 1 and numbers.worst([1.0, float("nan"), 2.0, float("nan")]) == 1


def test_sides_that_learn_otherwise_are_refused() -> None:
    first, near, far = Side("a", [100.0, 1.0]), Side("b", [100.5, 1.0]), Side("c", [100.0, float("nan")])
    rounds.check_losses([first, near], 1.0)
    rounds.check_losses([first, near], 0.01, relative=True)
    for sides in ([first, near], [first, near, far]):
        with pytest.raises(
            ConfigError, match="b and a do not compute the same.* differ by 0.5, .*nothing is reported, use another$"
        ):
            rounds.check_losses(sides, 0.1, advice="use another")
    with pytest.raises(ConfigError, match="c and a"):
        rounds.check_losses([first, far], 1.0)


def test_columns_are_as_wide_as_their_cells() -> None:
    rows = [{"name": "ours", "s": 0.5}, {"name": "another", "s": 12.25}]
    shown = output.table({"": lambda row: row["name"], "step s": lambda row: output.two(row["s"])}, rows)
    assert shown.splitlines() == ["         step s", "ours       0.50", "another   12.25"]


def test_figures_in_words() -> None:
    assert (output.ms(0.01234), output.ms(1.5)) == ("12.3", "1500")
    assert (output.mib(2**20), output.mib(None)) == ("1.0", "-")
    found = {"median": 0.7, "low": 0.5, "high": 0.9}
    assert output.judged(found, 0.7) == "0.70 (quartiles 0.50 to 0.90; asked: 0.70, met)"
    assert "not met" in output.judged(found, 0.8)


def test_a_run_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = Picture(lambda figure: figure.subplots().plot([0, 1]))
    files = output.publish(tmp_path / "run", {"a": 1}, "the table", {"line.png": picture})
    assert [file.name for file in files] == ["results.json", "table.txt", "line.png"] and all(map(Path.is_file, files))
    assert json.loads(files[0].read_text()) == {"a": 1} and files[1].read_text() == "the table\n"
    out = capsys.readouterr().out
    assert out.startswith("the table\n\n") and all(str(file) in out for file in files)


def test_a_run_is_told_where_it_is_beside_the_readme(tmp_path: Path) -> None:
    file = tmp_path / claims.NAME
    file.write_text(
        json.dumps({"": {"a": [1, 2]}, "--kind 'of two'": {"a": [2, 3], "b": [1, 1.5], "c": [1, 2], "d": [1, 2]}})
    )
    found = {"a": 1.99, "b": 1.51, "c": 1.5}

    def asked(words: Sequence[str]) -> list[Asked]:
        """A command of two runs where it names no kind."""
        return [Asked(words[1])] if words else [Asked("first"), Asked("second")]

    def beside(run: Asked) -> list[str]:
        return claims.beside(str(tmp_path / "recipe.py"), asked, run, found)

    assert beside(Asked("of two", rounds=3)) == [
        "a: 1.99, below the README's range, 2.00 to 3.00",
        "b: 1.51, above the README's range, 1.00 to 1.50",
        "c: 1.50, inside the README's range, 1.00 to 2.00",
    ]
    assert beside(Asked("second")) == ["a: 1.99, inside the README's range, 1.00 to 2.00"]
    assert beside(Asked("third")) == []


@pytest.mark.parametrize("name", sorted(file.parent.name for file in RECIPES.glob("*/claims.json")))
def test_commands_of_claims_are_commands(name: str) -> None:
    settings = importlib.import_module(f"axonn_recipes.{name}.settings")
    assert settings.__file__
    made = json.loads(Path(settings.__file__).with_name(claims.NAME).read_text())
    for words, ranges in made.items():
        settings.resolve(read(settings.Options, shlex.split(words)))
        assert all(low <= high for low, high in ranges.values())
