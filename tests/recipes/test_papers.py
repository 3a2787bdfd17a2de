"""The papers' rows: what is published, what comes out, and verdicts that fail."""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.cli import main
from axonn_plugins.config import ConfigError
from axonn_plugins.pccl import published as collectives
from axonn_plugins.planner import files
from axonn_recipes.papers import elsewhere, page
from axonn_recipes.papers import verdict as verdict_of
from axonn_recipes.papers.configured import every
from axonn_recipes.papers.data import FILE, WIDEST, Number, Row, Value, load, select
from axonn_recipes.papers.experiments import EXPERIMENTS, measured, stages
from axonn_recipes.papers.experiments.ranks import halving
from axonn_recipes.papers.found import Found
from axonn_recipes.papers.verdict import judge
from axonn_recipes.planner import figures
from tests.distributed import run_ranks

DOCS = Path(__file__).parents[2] / "docs" / "coverage.md"
ROWS = load()
NUMBERS = [number for row in ROWS for number in row.numbers]
MODELS = [
    name
    for name, experiment in EXPERIMENTS.items()
    if experiment.kind != "measured here" and not name.startswith(("collectives_", "roofline_a4"))
]
"""What is computed in a second or two, and is the same every time."""
MODELS += ["collectives_messages", "collectives_point_to_point"]


@pytest.fixture(scope="module")
def results() -> dict[str, Found]:
    return {name: EXPERIMENTS[name].run(Path()) for name in MODELS}


def moved(value: Value, number: Number, by: float) -> Value:
    """A value off by so many tolerances of a number; what is no number turned into another."""
    if isinstance(value, list):
        return [value[0] + (by if abs(by) > 1 else 0), *value[1:]]
    if isinstance(value, bool):
        return not value if abs(by) > 1 else value
    assert isinstance(value, int | float)
    return value + by * (number.tolerance * abs(value) if number.within is None else number.within)


def otherwise(value: Value, draw: random.Random) -> Value:
    """Another value, 30 % more or less at least."""
    if isinstance(value, list):
        place = draw.randrange(len(value))
        return [*value[:place], value[place] + draw.choice((-1, 1)), *value[place + 1 :]]
    if isinstance(value, bool):
        return not value
    assert isinstance(value, int | float)
    factor = draw.choice((draw.uniform(1.3, 4), draw.uniform(0.1, 0.7)))
    return value * factor if value else draw.choice((-1, 1)) * factor


def with_values(values: Mapping[tuple[str, str], Value], file: Path, rows: Collection[str]) -> list[Row]:
    """Rows of our file with these numbers by row and name in the place of those published, written to a file and read."""
    written = []
    for block in FILE.read_text().split("[[rows]]\n")[1:]:
        seed, number, *_ = (line.rpartition(" = ")[2].strip('"') for line in block.splitlines())
        if (name := f"{seed} {number}") not in rows:
            continue
        written.append("[[rows]]")
        for line in block.splitlines():
            key, equals, _ = line.rpartition(" = ")
            where = name, key.strip('"')
            written.append(f"{key} = {json.dumps(values[where])}" if equals and where in values else line)
    file.write_text("\n".join(written))
    return load(file)


def test_there_are_a_hundred() -> None:
    assert len(ROWS) == 100 and len(NUMBERS) > 450
    assert {row.seed for row in ROWS} == {"000", "001", "002", "003", "004"}
    used = {name for row in ROWS for name in row.runs}
    assert used == set(EXPERIMENTS)
    assert not [row.name for row in ROWS if row.coverage == "none"]
    partly = {row.name for row in ROWS if row.coverage == "partly"}
    assert partly == {
        row.name for row in ROWS if row.runs and (row.needs or any(number.needs for number in row.numbers))
    }
    assert all(f"{row.lacking} |" in DOCS.read_text() for row in ROWS if row.name in partly)
    assert all(row.numbers for row in ROWS if row.runs and row.claim != "trace")
    assert all(number.where and (number.needs or 0 < number.tolerance <= WIDEST) for number in NUMBERS)
    assert {number.within for number in NUMBERS if number.published == 0} == {0.05, 0.1}
    assert all(
        0 < number.within <= WIDEST * number.published for number in NUMBERS if number.within and number.published
    )


@pytest.mark.parametrize("by", [-0.9, 0.0, 0.9])
def test_what_is_within_the_tolerance_agrees(by: float) -> None:
    assert all(number.agrees(moved(number.published, number, by)) for number in NUMBERS)


@pytest.mark.parametrize("by", [-3.0, 3.0])
@pytest.mark.parametrize("obtained", [-0.9, 0.9])
def test_a_published_number_that_is_changed_fails(by: float, obtained: float) -> None:
    for number in NUMBERS:
        changed = replace(number, published=moved(number.published, number, by))
        assert not changed.agrees(moved(number.published, number, obtained)), number


def test_what_is_not_finite_or_of_another_kind_fails() -> None:
    number = NUMBERS[1]
    assert not any(
        replace(number, published=2.0).agrees(value) for value in (float("nan"), float("inf"), True, [2.0], "2")
    )
    assert not replace(number, published=[1, 2]).agrees([1])


def test_every_published_number_that_changes_in_the_file_changes_the_verdict(
    results: dict[str, Found], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are not computed in a test are taken to have been obtained as they are published, as their verdict is the same code's."""
    monkeypatch.setattr(verdict_of, "elsewhere", dict)  # with which no other number than the published one agrees
    draw = random.Random(20)
    numbers = {row.name: [one for one in row.numbers if not one.needs] for row in ROWS if row.runs}
    assert [row.name for row in ROWS if row.numbers and not numbers.get(row.name)] == []
    measured = {
        name: Found({one.what: one.published for row in ROWS if name in row.runs for one in numbers[row.name]})
        for name in EXPERIMENTS
        if name not in results
    }
    obtained = {
        (row.name, one.number.what): one for row in ROWS for one in judge(row, results | measured).compared if row.runs
    }
    seen, agreed = 0, 0
    for place in range(max(map(len, numbers.values()))):
        chosen = {name: those[place] for name, those in numbers.items() if place < len(those)}
        wrong = {(name, one.what): otherwise(one.published, draw) for name, one in chosen.items()}
        for row in with_values(wrong, tmp_path / f"{place}.toml", chosen):
            judged = judge(row, results | measured)
            one = next(one for one in judged.compared if one.number.what == chosen[row.name].what)
            seen += 1
            if obtained[row.name, one.number.what].verdict == "agrees":
                agreed += 1
                assert one.verdict == "differs" and judged.verdict.startswith("differs"), one
    right = {where: one.obtained for where, one in obtained.items() if not one.number.needs}
    for row in with_values(right, tmp_path / "right.toml", numbers):
        for one in judge(row, results | measured).compared:
            if (row.name, one.number.what) in right:
                seen += 1
                assert one.verdict == "agrees", one
    assert seen == 2 * sum(map(len, numbers.values())) > 800 and agreed > 200


def test_a_number_that_changes_alone_is_seen_whatever_its_tolerance(tmp_path: Path) -> None:
    """Its row's total is what was read from the text."""

    def slightly(value: Value) -> Value:
        if isinstance(value, bool):
            return not value
        if isinstance(value, list):
            return [value[0] + 1, *value[1:]]
        assert isinstance(value, int | float)
        return 1.001 * value or 0.001

    assert not [row.name for row in ROWS if judge(row, {}).verdict.startswith("differs")]
    seen = 0
    for row in ROWS:
        for place, number in enumerate(row.numbers):
            other = replace(number, published=slightly(number.published))
            changed = replace(row, numbers=(*row.numbers[:place], other, *row.numbers[place + 1 :]))
            assert judge(changed, {}).verdict.startswith("differs: its numbers add up to"), number
            seen += 1
    assert seen == len(NUMBERS)
    wrong = {("002 Tab III", "Frontier 1024, 10B: Pflop/s"): 78}
    [row] = with_values(wrong, tmp_path / "rows.toml", {"002 Tab III"})
    assert judge(row, {}).verdict.startswith("differs: its numbers add up to ")


def test_numbers_that_stand_in_two_files_are_the_same() -> None:
    numbers = {one.what: one for one in NUMBERS}
    others = elsewhere.elsewhere()
    assert len(others) == 95 and set(others) <= set(numbers)
    assert not [what for what, other in others.items() if other.contradicts(numbers[what].published)]


@pytest.mark.parametrize(
    ("file", "line", "row"),
    [
        ("corpus/gordon_bell.toml", "petaflops = 571.4", "002 Tab III"),
        ("corpus/four_frameworks.toml", "percent_of_peak = 57.0", "003 Tab III"),
        ("corpus/experts.toml", "percent_of_peak = 26.2", "000 Tab 7.1"),
        ("corpus/pruned.toml", "percent_of_peak = 53.4", "000 Tab 4.2"),
        ("published.toml", "high = 82.0", "000 Fig 6.7"),
        ("published.toml", "low = 6.2", "000 Fig 6.9"),
    ],
)
def test_a_number_that_changes_in_another_file_changes_the_verdict(
    file: str, line: str, row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where what was obtained agrees with the number of the rows."""
    (chosen,) = select(ROWS, row)
    obtained = dict.fromkeys(chosen.runs, Found({one.what: one.published for one in chosen.numbers}))
    assert judge(chosen, obtained).verdict.startswith("agrees")
    key, _, value = line.partition(" = ")
    changed = f"{key} = {1.25 * float(value):g}"
    ours = {name: path.read_text() for name, path in files.ours("corpus").items()}
    for name, text in ours.items():
        (tmp_path / f"{name}.toml").write_text(text.replace(line, changed, 1) if f"/{name}.toml" in file else text)
    published = tmp_path / "published"
    text = Path(collectives.__file__).with_name("published.toml").read_text()
    published.write_text(text.replace(line, changed, 1) if file == "published.toml" else text)
    monkeypatch.setattr(elsewhere.files, "ours", lambda _: {name: tmp_path / f"{name}.toml" for name in ours})
    monkeypatch.setattr(collectives, "_ours", lambda: collectives.read(published))
    monkeypatch.setattr(verdict_of, "elsewhere", elsewhere.elsewhere.__wrapped__)
    judged = judge(chosen, obtained)
    assert judged.verdict.startswith("differs: 1 of ")
    (one,) = (one for one in judged.compared if one.contradicted)
    assert one.verdict == "differs" and one.contradicted.partition(" has ")[0].endswith(file)
    assert f"differs: {one.contradicted}" in page.cells(one)


def test_a_measured_point_that_changes_in_the_figures_file_changes_the_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    (chosen,) = select(ROWS, "004 fig a1")
    obtained = dict.fromkeys(chosen.runs, Found({one.what: one.published for one in chosen.numbers}))
    measured = figures.all_gather()
    measured["2 a node"][-1] *= 1.25
    monkeypatch.setattr(figures, "all_gather", lambda: measured)
    monkeypatch.setattr(verdict_of, "elsewhere", elsewhere.elsewhere.__wrapped__)
    assert judge(chosen, obtained).verdict == "differs: 1 of 17"


def test_models_agree_and_differ(results: dict[str, Found]) -> None:
    whole = {row.name for row in ROWS if judge(row, results).verdict.startswith("agrees")}
    assert {"000 Fig 4.2", "000 Tab 5.1", "000 Tab 4.1", "004 Tab I", "004 Tab A3", "004 Fig 3", "004 Fig 4"} <= whole
    assert judge(select(ROWS, "004 fig 1")[0], results).verdict == "differs: 1 of 2"  # 65.7 GB where the text says 40


def test_table_3_1_is_chosen_among_degrees_that_divide_nodes_of_six() -> None:
    for name in stages.SIZES:
        found = every(stages.of(name), stages.SIZES[name][3], stages.BATCH, 12)
        assert {3, 6, 12} <= {tensor for _, tensor, _, _ in found}, name
        assert set(row[name] for row in stages.TABLE_3_1.values()) <= set(found)


def test_rows_by_name() -> None:
    assert [row.name for row in select(ROWS, "000 fig 4.6")] == ["000 Fig 4.6"]
    assert [row.name for row in select(ROWS, "000 Figure 4.6, 003 table iii")] == ["000 Fig 4.6", "003 Tab III"]
    chapter = select(ROWS, "000 chapter 4")
    assert len(chapter) == 10 and all(row.number.split()[1].startswith("4.") for row in chapter)
    assert len(select(ROWS, "001")) == 2 and len(select(ROWS, "004 tab A3, 004")) == 16
    for wrong in ("000 fig 4.60", "005", "chapter 4", "002 chapter 4", "000 fig", ""):
        with pytest.raises(ConfigError, match="is no seed, chapter, table or figure; use "):
            select(ROWS, wrong)


def test_mistakes_in_the_data_are_said(tmp_path: Path) -> None:
    text = FILE.read_text()
    for old, new, said in (
        ("tolerance = 0.05", "tolerance = 0.25", "tolerance = 0.25 is not above 0 and at most 0.125"),
        ("claim =", "clam =", 'has an unknown key "clam"; use "claim"'),
        ('claim = "survey"', 'claim = "poll"', 'claim = "poll" is not known'),
        ('number = "Fig 3.1"', 'number = "Fig 1.1"', "has 000 Fig 1.1 more than once"),
    ):
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.toml"
        file.write_text(text.replace(old, new, 1))
        with pytest.raises(ConfigError, match=said):
            load(file)


def test_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "papers", "--only", "000 fig 4.3, 004 fig 1, 000 fig 5.1", "--runs", str(tmp_path)]
    assert main(words) == 0
    folder = tmp_path / "papers"
    shown, read = (folder / "index.html").read_text(), (folder / "papers.md").read_text()
    assert (
        "<h2" in shown and "roofline_1_figure.png" in shown and (folder / "roofline_1_figure.png").stat().st_size > 5000
    )
    assert "| memory there | 40 GB | 65.67 GB | +64.2% | 12.5% | model at the paper's scale | differs |" in read
    rows = {one["row"]: one for one in json.loads((folder / "results.json").read_text())}
    assert rows["000 Fig 4.3"]["verdict"] == "agrees: 1" and rows["004 Fig 1"]["verdict"] == "differs: 1 of 2"
    assert rows["000 Fig 5.1"]["verdict"] == "nothing to compare" and rows["000 Fig 5.1"]["coverage"] == "n/a"
    number = rows["004 Fig 1"]["numbers"][1]
    assert number["published"] == 40 and number["error"] == pytest.approx(0.642, abs=1e-3)
    assert "3 tables and figures" in capsys.readouterr().out


def test_what_is_left_out_is_not_run(results: dict[str, Found]) -> None:
    row = next(row for row in ROWS if row.name == "000 Fig 5.4")
    judged = judge(row, {name: one for name, one in results.items() if name in row.runs})
    assert [one.verdict for one in judged.compared][1:] == ["not run"]
    assert judge(row, {}).verdict == "not run"
    needed = next(row for row in ROWS if row.name == "000 Tab 4.2")
    assert {one.verdict for one in judge(needed, results).compared} >= {"differs", "needs the machine"}


def test_experiments_give_every_number_of_their_rows(results: dict[str, Found]) -> None:
    whole = [row for row in ROWS if row.runs and set(row.runs) <= set(results)]
    assert len(whole) > 40
    for row in whole:
        assert not [one.number.what for one in judge(row, results).compared if one.verdict == "not run"], row.name


def test_what_cannot_run_here_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(folder: Path) -> Found:
        raise ConfigError("there is no such machine here; use another")

    one = EXPERIMENTS["roofline_1"]
    words = ["train", "papers", "--only", "004 fig 1", "--runs", str(tmp_path)]
    with patch.dict(EXPERIMENTS, {"roofline_1": replace(one, run=broken, kind="measured here")}):
        assert main(words) == 0
    assert "roofline_1: left out: there is no such machine here" in capsys.readouterr().out
    assert json.loads((tmp_path / "papers" / "results.json").read_text())[0]["verdict"] == "not run"
    with patch.dict(EXPERIMENTS, {"roofline_1": replace(one, run=broken)}):
        assert main(words) == 2
    assert capsys.readouterr().err == "axonn: error: there is no such machine here; use another\n"


def test_a_command_is_run_and_read(tmp_path: Path) -> None:
    def ran(words: list[str]) -> int:
        assert words[:-4] == ["--rounds", "2"] and words[-4:] == ["--runs", str(tmp_path), "--name", "measured_x"]
        folder = tmp_path / "measured_x"
        folder.mkdir()
        (folder / "results.json").write_text(json.dumps({"ratio": {"median": 1.5}}))
        (folder / "steps.png").write_bytes(b"")
        return 0

    run = measured.command("bench x --rounds 2", measured._cluster)
    with patch.object(measured, "find", lambda words: (ran, words[2:])):
        found = run(tmp_path / "measured_x")
    assert found.values == {"four nodes here: faster than dense": True}
    assert found.files == (tmp_path / "measured_x" / "steps.png",)
    with patch.object(measured, "find", lambda words: (lambda rest: 1, words)):
        with pytest.raises(ConfigError, match="axonn bench x --rounds 2 has failed"):
            run(tmp_path / "measured_y")


@pytest.mark.parametrize("quick", [False, True], ids=["whole", "short"])
def test_measurements_are_commands_that_there_are(
    quick: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, one in measured.COMMANDS.items():
        line = f"{one.line} {one.short if quick else one.whole}"
        words = [*shlex.split(line), "--dry-run", "--out" if one.option == "--out" else "--runs", str(tmp_path)]
        assert main(words) == 0, f"{name}: {capsys.readouterr().err}"
        seconds = EXPERIMENTS[f"measured_{name}"].form(quick).seconds
        assert seconds == one.seconds[quick] and one.seconds[1] < one.seconds[0]


def test_the_short_form_is_run_and_said(tmp_path: Path) -> None:
    def ran(words: list[str]) -> int:
        assert words[0] == "--quick"
        folder = tmp_path / "papers" / "measured_memorization"
        folder.mkdir()
        shares = {name: 0.0 for name in ("control", "low", "middle")}
        (folder / "results.json").write_text(
            json.dumps({"standard": shares | {"high": 1.0}, "goldfish": shares | {"high": 0.0}})
        )
        return 0

    with patch.object(measured, "find", lambda words: (ran, words[2:])):
        assert main(["train", "papers", "--quick", "--only", "002 fig 10, 002 fig 11", "--runs", str(tmp_path)]) == 0
    read = (tmp_path / "papers" / "papers.md").read_text()
    assert read.count("Run: `axonn train memorization --quick`.") == 2
    assert "002 Fig 11: agrees: 1" in read and "002 Fig 10: agrees: 1" in read


def test_what_was_found_is_written_before_the_next(tmp_path: Path) -> None:
    def broken(folder: Path) -> Found:
        raise KeyboardInterrupt

    with patch.dict(EXPERIMENTS, {"roofline_1": replace(EXPERIMENTS["roofline_1"], run=broken)}):
        assert main(["train", "papers", "--only", "000 fig 4.3, 004 fig 1", "--runs", str(tmp_path)]) == 130
    rows = json.loads((tmp_path / "papers" / "results.json").read_text())
    assert [one["verdict"] for one in rows] == ["agrees: 1", "not run"]


def stage(median: float, exposed: float) -> dict:
    return {"name": "", "kind": "stage", "median": median, "exposed_communication_s": exposed}


def run_of(stages: int, *medians: float) -> dict:
    return {"settings": {"stages": stages}, "sides": [{"median": median} for median in medians]}


@pytest.mark.parametrize(
    ("numbers", "read", "expected"),
    [
        (
            measured._overlap,
            {"sides": [{"kind": "ours"}, *(stage(4 - i, 3 - i) for i in range(4))]},
            {
                "two nodes here: all overlaps": 75.0,
                "two nodes here: exposed communication falls with each overlap": True,
            },
        ),
        (measured._memory, {"runs": [run_of(2, 9, 3), run_of(4, 4, 8)]}, {"four nodes here: batch time saved": 25.0}),
        (
            measured._stages,
            {"runs": [run_of(2, 3, 1), run_of(4, 2, 9)]},
            {"eight nodes here: more stages take longer": False},
        ),
        (
            measured._coarsening,
            {
                "factors": [
                    {"coarsening": k, "together": [t, t, t]} for k, t in ((1, 3.0), (2, 2.0), (4, 1.0), (8, 2.5))
                ]
            },
            {
                "two nodes here: the best coarsening factor is 2 or 4": True,
                "two nodes here: a factor of 1 is slower than the best": True,
            },
        ),
        (
            measured._ranks,
            {"grids": [{"formulas rank": rank} for rank in (1, 12, 3, 2, 4, 5, 6, 7, 8, 11, 9)]},
            {"eight ranks here: of the model's ten first, among the ten fastest": 8},
        ),
        *(
            (
                measured._moe_curves,
                {
                    "differences": {"losses": [*[first] * 20, 0.01], "validation": [1e-7, last]},
                    "sides": {"ted": {"final": 2.5}},
                },
                {"here: validation losses of both are equal but for rounding": equal},
            )
            for first, last, equal in ((3e-8, 2e-3, True), (3e-8, 3e-3, False), (2e-6, 1e-4, False))
        ),
        (
            measured._memorization,
            {
                "standard": {"control": 0.0, "low": 0.1, "middle": 0.5, "high": 1.0},
                "goldfish": {"control": 0.01, "low": 0.02, "middle": 0.03, "high": 0.06},
            },
            {
                "here: exact match grows with repetitions": True,
                "here: control": 0.0,
                "here: goldfish, the most seen pages beside the control": pytest.approx(0.05),
            },
        ),
    ],
)
def test_what_measurements_say(numbers: measured.Numbers, read: dict, expected: dict[str, Value]) -> None:
    assert numbers(read) == expected


def halved() -> list[float]:
    whole = torch.arange(12, dtype=torch.float64) ** (1 + dist.get_rank())
    return halving(whole, dist.group.WORLD).tolist()


def test_recursive_halving_in_python() -> None:
    found = [value for block in run_ranks(halved, 4) for value in block]
    assert found == [base + base**2 + base**3 + base**4 for base in range(12)]


def test_the_list_and_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "papers", "--list"]) == 0
    assert capsys.readouterr().out.count("\n") == 101
    assert main(["train", "papers", "--dry-run", "--only", "000 fig 7.8", "--runs", str(tmp_path)]) == 0
    assert "1 tables and figures, 1 experiments, about 3 s" in capsys.readouterr().out and not list(tmp_path.iterdir())
    assert main(["train", "papers", "--only", "000 fig 7.80"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["train", "papers", "--coverage", str(tmp_path / "no" / "where.md")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_table_of_coverage_is_generated(tmp_path: Path) -> None:
    assert main(["train", "papers", "--coverage", str(tmp_path / "coverage.md")]) == 0
    assert (tmp_path / "coverage.md").read_text() == DOCS.read_text() == page.coverage(ROWS)
