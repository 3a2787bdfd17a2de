"""``axonn convert`` and what Megatron's scripts keep of a model's arguments beside its weights."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import axonn_plugins
from axonn_plugins.cli import main
from axonn_plugins.config import ConfigError

axonn_plugins.activate()
transformers = pytest.importorskip("transformers")
from axonn_plugins.weights import hf, litgpt, megatron_names  # noqa: E402
from tests.plugins.test_convert import converted, drawn, megatron_folder, same, tensors  # noqa: E402


def change_arguments(folder: Path, **values: Any) -> None:
    file = folder / "release" / "common.pt"
    told = torch.load(file, weights_only=False)
    vars(told["args"]).update(values)
    torch.save(told, file)


@pytest.mark.parametrize("by_name", [False, True], ids=["by value", "by name"])
def test_megatrons_arguments_are_read_without_megatron(
    by_name: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of its own kinds, too, and say how positions are scaled; releases of Python differ in how they write an enum's member."""
    folder = megatron_folder(tmp_path, "llama")
    Backend = enum.Enum("Backend", ["auto"], module="megatron_that_is_not_there")  # noqa: N806
    written = lambda one, _: (getattr, (Backend, one.name)) if by_name else (Backend, (one.value,))  # noqa: E731
    monkeypatch.setattr(Backend, "__reduce_ex__", written)
    module = ModuleType(Backend.__module__)
    vars(module)["Backend"] = Backend
    with monkeypatch.context() as there:
        there.setitem(sys.modules, Backend.__module__, module)
        change_arguments(
            folder, attention_backend=Backend["auto"], use_rope_scaling=True, rope_scaling_factor=32.0, rotary_base=777
        )
    converted(folder, tmp_path / "back", "--to", "hf")
    same(tensors(tmp_path / "back"), tensors(tmp_path / "hf"))
    rope = transformers.AutoConfig.from_pretrained(tmp_path / "back").rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["rope_theta"]) == ("llama3", 32.0, 777.0)
    told = megatron_names.arguments(transformers.AutoConfig.from_pretrained(tmp_path / "back"))
    assert told.use_rope_scaling and told.rope_scaling_factor == 32.0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"apply_layernorm_1p": True}, "--apply-layernorm-1p"),
        ({"rotary_percent": 0.5}, "has no config.json"),
        ({"rotary_interleaved": True}, "has no config.json"),
    ],
)
def test_what_hfs_models_do_not_compute_is_refused(
    values: dict[str, Any], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = megatron_folder(tmp_path, "llama")
    change_arguments(folder, **values)
    assert main(["convert", str(folder), str(tmp_path / "new"), "--to", "hf"]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_scaled_positions_that_megatron_has_not_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn("llama").save_pretrained(tmp_path / "hf")
    file = tmp_path / "hf" / "config.json"
    rope = {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_parameters": rope}))
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "new"), "--to", "megatron"]) == 2
    assert "--use-rope-scaling" in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_missing_transformers_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    for call in (
        lambda: hf.configuration(tmp_path),
        lambda: hf.class_of(None),
        lambda: litgpt.hf_configuration(None, tmp_path),
    ):
        with pytest.raises(
            ConfigError, match="need transformers, which cannot be imported .*; install it, or convert in"
        ):
            call()


@pytest.mark.parametrize(
    ("to", "option", "value", "formats"),
    [
        ("hf", "--ranks", "1", "--to deepspeed"),
        ("hf", "--zero", "1", "--to deepspeed"),
        ("litgpt", "--shard-size", "1GB", "--to hf"),
        ("deepspeed", "--config", ".", "--to hf or --to litgpt or --to megatron or --to axonn"),
    ],
)
def test_options_of_another_format_are_refused(
    to: str, option: str, value: str, formats: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path), str(tmp_path / "there"), "--to", to, option, value]) != 0
    assert f"{option} = {value} is for {formats}, and this is --to {to}" in capsys.readouterr().err
