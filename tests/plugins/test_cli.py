"""The command itself, whatever it is asked."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from axonn_plugins.cli import benchmarks, main, recipes
from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError


@dataclass(frozen=True)
class Options:
    """Some.

    Attributes:
        steps: how many.
        mode: which.
        window: first and last.
        dry_run: stop early.
    """

    steps: int
    mode: Literal["paper", "default"] = "default"
    window: tuple[int, int] | None = None
    dry_run: bool = False


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    reader, write = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "axonn_plugins.cli", "schema"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert done.returncode == 141 and done.stderr == ""


@pytest.mark.parametrize(
    ("place", "said"), [("nowhere/schema.json", "No such file"), (".", "Is a directory"), ("x" * 300, "too long")]
)
def test_files_that_cannot_be_written_are_one_sentence(
    place: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["schema", "--write", str(tmp_path / place)]) == 2
    printed = capsys.readouterr().err
    assert said in printed and printed.startswith("axonn: error: ") and printed.count("\n") == 1


def test_options_are_fields() -> None:
    words = ["--steps", "3", "--steps", "4", "--window", "1", "2", "--dry-run"]
    assert read(Options, words) == Options(4, window=(1, 2), dry_run=True)
    assert read(Options, ["--mode", "paper"], default=Options(7)) == Options(7, "paper")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "required: --steps"),
        (["--steps"], "--steps is not given what it needs"),
        (["--steps", "x"], '--steps = "x" is not a whole number'),
        (["--steps", "1", "--mode", "papr"], '--mode = "papr" is not known; use "paper"'),
        (["--steps", "1", "--window", "1"], '--window = "1" is not'),
        (["--steps", "1", "--dryrun"], "unrecognized arguments: --dryrun"),
        (["--steps", "1", "more"], "unrecognized arguments: more"),
    ],
)
def test_what_is_wrong_with_options_is_one_sentence(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(Options, words, "axonn it")
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert str(refused.value).endswith("; axonn it --help says what there is")


def test_help_says_what_options_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read(Options, ["--help"], "axonn it")
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "usage: axonn it" in out and "first and last" in out and "no-dry-run" not in out


def test_every_recipe_is_described_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command, names in (("bench", benchmarks()), ("train", recipes())):
        assert main([command]) == 2 and main([command, "--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        for name in names:
            assert any(line.split()[:1] == [name] and len(line.split()) > 3 for line in lines), name
    assert {"tp", "ted"} <= set(benchmarks()) and "quickstart" in recipes()


def test_a_file_where_a_folder_is_to_be_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("mine")
    commands = [["bench", name] for name in benchmarks() if name != "kernels"]  # which writes nothing
    commands += [["train", name] for name in recipes()]
    said = {"validation": "--out", **dict.fromkeys([name for _, name in commands if name != "validation"], "--runs")}
    lines = [(*command, said[command[1]], where) for command in commands for where in (file, file / "below" / "it")]
    lines += [("simulate", "pccl", "--out", file), ("train", "planner", "--runs", tmp_path, "--name", file.name)]
    lines += [("train", "megatron_gpt", option, file / "x") for option in ("--save", "--prepare")]
    for words in lines:
        assert main([*map(str, words)]) == 2, words
        err = capsys.readouterr().err
        # --prepare is the beginning of files' names.
        assert err.startswith(f'axonn: error: {words[-2]} = "') and err.count("\n") == 1, err
        assert f"since {file} is a file" in err, err
    assert file.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_help_imports_little(tmp_path: Path) -> None:
    code = (
        "import sys; from axonn_plugins.cli import main; main(sys.argv[1:]);"
        "print(*({'torch', 'pydantic', 'tyro', 'deepspeed', 'axonn_recipes'} & set(sys.modules)), file=sys.stderr)"
    )
    for words in (["--help"], ["--version"], ["bench", "--help"], ["samo", "--help"]):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert done.stdout and done.stderr.strip() == "", words


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plam"]) == 2
    assert 'axonn: error: "plam" is no command of axonn; use "plan"' in capsys.readouterr().err
