"""The pipeline's recipe: what it is asked, and small runs whose losses are the serial model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_plugins.cli import main
from axonn_plugins.observe.metrics import format_split

SMALL = ["--layers", "2", "--hidden", "16", "--heads", "2", "--context", "8", "--batch", "8", "--steps", "3"]


@pytest.fixture
def text(tmp_path: Path) -> str:
    file = tmp_path / "text.txt"
    file.write_text("who has a message works; " * 200)
    return str(file)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--batch", "7"), "--batch 7 does not divide into microbatches of 1 for 2 pipelines"),
        (("--stages", "9"), "--stages 9 are more than the 6 parts"),
        (("--heads", "3"), "--heads 3"),
        (("--lr", "0"), "--lr 0.0 is not positive"),
        (("--sparsity", "1"), "--sparsity 1.0 is not a share from 0 to below 1"),
        (("--steps", "0"), "--steps 0 is not at least 1"),
    ],
)
def test_mistakes_are_one_sentence(words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["train", "pipeline", *words, "--dry-run"]) == 2
    assert said in capsys.readouterr().err


def test_split_in_the_line() -> None:
    assert format_split({"compute": 3.0, "bubble": 1.0}) == "compute 75%  bubble 25%"
    assert format_split({}) == ""


def test_all_sides_learn_alike(tmp_path: Path, text: str) -> None:
    """The message-driven one with its optimizer's state in host memory."""
    words = ["--data", text, "--runs", str(tmp_path), "--name", "r", "--offload", "--bucket-size", "1024"]
    assert main(["train", "pipeline", *SMALL, *words]) == 0
    numbers = json.loads((tmp_path / "r" / "results.json").read_text())
    assert list(numbers["sides"]) == ["serial", "deepspeed", "message_driven"]
    assert max(numbers["differences"].values()) < 1e-5
    line = json.loads((tmp_path / "r" / "message_driven" / "metrics.jsonl").read_text().splitlines()[0])
    assert line["compute_s"] > 0 and {"bubble_s", "point-to-point_s", "collective_s"} <= line.keys()
    assert (tmp_path / "r" / "curves.png").is_file()


def test_with_state_in_host_memory(tmp_path: Path, text: str) -> None:
    words = ["--data", text, "--runs", str(tmp_path), "--name", "r", "--side", "message_driven", "--dtype", "bf16"]
    assert main(["train", "pipeline", *SMALL, *words, "--offload", "--bucket-size", "1024"]) == 0
    device, host = json.loads((tmp_path / "r" / "results.json").read_text())["sides"]["message_driven"]["state"]
    assert device < host / 2


def test_pruned(tmp_path: Path, text: str) -> None:
    """With what is left of the state in host memory, too."""
    words = ["--data", text, "--runs", str(tmp_path), "--side", "message_driven", "--sparsity", "0.9"]
    found = {}
    for name, more in (("alone", []), ("offloaded", ["--offload", "--bucket-size", "1024"])):
        assert main(["train", "pipeline", *SMALL, *words, "--name", name, *more]) == 0
        found[name] = json.loads((tmp_path / name / "results.json").read_text())["sides"]["message_driven"]
    (whole, nothing), (device, host) = (found[name]["state"] for name in ("alone", "offloaded"))
    assert nothing == 0 < host and device < whole
    assert len(found["alone"]["losses"]) == 3
    assert found["offloaded"]["losses"] == pytest.approx(found["alone"]["losses"], rel=1e-5)
