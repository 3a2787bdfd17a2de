"""All commands at once: each option says in a line what it is, and shells complete them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from axonn_plugins.cli import completion
from axonn_plugins.cli.commands import find
from axonn_plugins.cli.parsers import Reached, every, parser, stopping
from tests.docs.texts import LINES


@pytest.fixture(scope="module")
def known() -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    return completion.words()


def test_every_help_has_a_line_for_each_thing() -> None:
    missing = []
    for words in every():
        found, kind = parser(words)
        if not (kind.__doc__ or "").strip():
            missing.append(" ".join(words))
        for action in found._actions:
            said = re.sub(r"\((?:default|required|optional|sets|fixed)[^)]*\)$", "", str(action.help or "").strip())
            if not said.strip():
                missing.append(f"{' '.join(words)} {action.option_strings or action.dest}")
    assert not missing


OURS = sorted({words[words.index("axonn") + 1 :] for words in LINES if "axonn" in words} - {("doctor",)})
"""Lines of READMEs and of the site that begin a command of ours, also behind a launcher: what stands behind "axonn". The doctor reads nothing."""


@pytest.mark.parametrize("words", OURS, ids=" ".join)
def test_lines_of_texts_are_understood(words: tuple[str, ...]) -> None:
    """The command is there and takes its options; nothing runs."""
    with pytest.raises(Reached), stopping(parse=True):
        command, rest = find(words)
        command(rest)


SHELL = """
source "$1"
words() { COMP_WORDS=(axonn "$@"); COMP_CWORD=$#; _axonn; echo "${COMPREPLY[*]}"; }
words pl; words train qu; words plan --mode ""; words samo memory GPT-3-XL --sp; words completion ba
"""


def test_bash_completes(known: tuple[dict[str, list[str]], dict[str, list[str]]], tmp_path: Path) -> None:
    (tmp_path / "axonn").write_text(completion.bash(*known))
    done = subprocess.run(
        ["bash", "-c", SHELL, "bash", str(tmp_path / "axonn")], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.stdout.splitlines() == ["plan", "quickstart", "calibrated roofline paper", "--sparsity", "bash"], (
        done.stderr
    )


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_reads_its_own(known: tuple[dict[str, list[str]], dict[str, list[str]]], tmp_path: Path) -> None:
    (tmp_path / "axonn").write_text(completion.zsh(*known))
    done = subprocess.run(
        ["zsh", "-f", "-c", f"source {tmp_path}/axonn; whence -w _axonn"], capture_output=True, text=True
    )
    assert "function" in done.stdout and not done.stderr
