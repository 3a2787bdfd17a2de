"""``axonn layers``: the automatic plan of a model by its configuration, and its cost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from axonn_plugins.cli import main

LLAMA = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 5},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50},
}


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["layers", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_the_plan_and_what_it_took_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    code, found, _ = printed(capsys, str(file), "--gx", "2", "--gy", "2")
    assert code == 0 and found.startswith("axonn auto plan, gx=2 gy=2 gz=1 gdata=1")
    assert "model.layers.*.self_attn.o_proj          5       transposed" in found
    *plan, took = found.splitlines()
    assert took.startswith("Found in ") and took.endswith(" GiB of memory.")
    *slow, _ = printed(capsys, str(file), "--gx", "2", "--gy", "2", "--every-block")[1].splitlines()
    assert slow == plan


def test_mistakes_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.json"
    code, _, said = printed(capsys, str(file), "--gx", "0")
    assert code == 2 and "--gx = 0 is not a number of ranks; use 1 or more" in said
    code, _, said = printed(capsys, str(file))
    assert code == 2 and "there is no file" in said
