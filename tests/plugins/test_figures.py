"""Pictures and TensorBoard events are extras: without them a run says what to install, and goes on."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from axonn_plugins.config import ConfigError
from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.metrics import MetricsLogger


def diagonal(figure) -> None:
    figure.subplots().plot([0, 1], [0, 1])


def test_a_picture_is_written(tmp_path: Path) -> None:
    assert Picture(diagonal).save(tmp_path / "line.png") == [tmp_path / "line.png"]
    assert (tmp_path / "line.png").read_bytes()[:4] == b"\x89PNG"


def test_a_file_that_the_user_gave_is_refused_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='--picture = ".*line.xyz" cannot be written'):
        Picture(diagonal).save(tmp_path / "line.xyz", "--picture")
    with pytest.raises(ConfigError, match='--picture = ".*" is a folder; use a file'):
        Picture(diagonal).save(tmp_path, "--picture")


def test_without_either_a_run_ends_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find(name))

    class Nowhere:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "matplotlib":
                raise ModuleNotFoundError("No module named 'matplotlib'", name=name)

    monkeypatch.setattr(sys, "meta_path", [Nowhere(), *sys.meta_path])
    logger = MetricsLogger(tmp_path)
    logger.log(1, loss=2.0)
    logger.log(2, loss=1.0)
    logger.finish()
    assert [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [2.0, 1.0]
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl"}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and 'pip install "axonn-plugins[tensorboard]"' in said[0]
    assert "loss.png is not drawn" in said[1] and 'pip install "axonn-plugins[plots]"' in said[1]
