"""The first tutorial as its reader would do it: the script on the page, with each configuration on the page, on four ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from axonn_plugins.cli.convert import main as convert
from tests.deepspeed import training  # noqa: F401 - DeepSpeed on the CPU, imported before ranks are forked
from tests.distributed import run_ranks
from tests.docs.texts import BLOCKS

PAGE = [block for block in BLOCKS if block.file == "docs/tutorials/deepspeed.md"]
SCRIPT = next(block.text for block in PAGE if block.title == "train.py")
READING = next(block.text for block in PAGE if "load_file" in block.text)
CONFIGS = [block.text for block in PAGE if block.title == "ds_config.json"]


def follow(folder: Path) -> list[list[float]]:
    """Losses of this rank with each configuration."""
    os.chdir(folder)
    found = []
    for number, text in enumerate(CONFIGS):
        here = folder / f"{number} of {os.environ['RANK']}"
        here.mkdir()
        os.chdir(here)
        Path("ds_config.json").write_text(text)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(SCRIPT.replace('"checkpoints"', f'"{folder}/{number}"'), "train.py", "exec"), namespace)
        found.append(namespace["losses"])
        namespace["engine"].destroy()
    return found


def model() -> nn.Module:
    """The script's."""
    script = SCRIPT[SCRIPT.index("model = ") : SCRIPT.index("engine, ")]
    namespace: dict[str, Any] = {"nn": nn}
    exec(script, namespace)
    return namespace["model"]


def test_the_first_tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(CONFIGS) == 3
    ranks = run_ranks(follow, 4, tmp_path)
    means = [[sum(step) / 4 for step in zip(*(rank[number] for rank in ranks), strict=True)] for number in range(3)]
    stock, grid, pruned = means
    assert len(stock) == 8 and grid == pytest.approx(stock, rel=1e-5)
    assert pruned != pytest.approx(stock, rel=1e-5)
    assert all((tmp_path / str(number) / "latest").exists() for number in range(3))
    # What the grid saved is read as the page says, and is what stock saved.
    monkeypatch.chdir(tmp_path)
    namespace = {"model": model()}
    assert convert(["1/global_step8", "weights", "--to", "hf"]) == 0
    exec(READING, namespace)
    assert convert(["1/global_step8", "back", "--to", "deepspeed", "--ranks", "4"]) == 0
    stock, back = (
        torch.load(f"{folder}/global_step8/mp_rank_00_model_states.pt", weights_only=False) for folder in ("0", "back")
    )
    for name, value in namespace["model"].state_dict().items():
        assert torch.equal(value, back["module"][name])
        torch.testing.assert_close(value, stock["module"][name], rtol=1e-4, atol=1e-5)
    assert len(list((tmp_path / "back" / "global_step8").iterdir())) == 5
