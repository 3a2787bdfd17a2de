"""The example of pruned fine-tuning: the same on one rank, on two that share states, and where the model is split."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import axonn_plugins
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks

axonn_plugins.activate()
pytest.importorskip("accelerate")
from axonn_recipes import examples  # noqa: E402
from axonn_recipes.examples.pruned import train  # noqa: E402
from tests.huggingface.trainer_runs import forget  # noqa: E402


def pruned(folder: Path, name: str, config: dict[str, Any], readers: int) -> Any:
    forget()
    file = folder / f"{name}.json"
    file.write_text(json.dumps(config))
    size = ["--per_device_train_batch_size", str(8 // readers), "--max_steps", "4"]
    return attempt(partial(train.main, ["--deepspeed", str(file), *size, "--output_dir", str(folder / name)]))


def test_is_pruned_alike_on_any_ranks(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    config = json.loads((Path(examples.__path__[0]) / "pruned" / "ds_config.json").read_text())
    split = config | {"axonn": config["axonn"] | {"tensor_parallel": {"gx": 2, "gy": 1, "gz": 1, "plan": "auto"}}}
    (wanted,) = run_ranks(pruned, 1, tmp_path, "alone", config, 1)
    assert wanted[1] == pytest.approx(0.8, abs=1e-3)
    for found in run_ranks(pruned, 2, tmp_path, "shared", config, 2):
        assert found == pytest.approx(wanted, abs=2e-4)
    printed = capfd.readouterr().err
    assert "SAMO: pruned after step 4" in printed and "part of the weights" not in printed
    for found in run_ranks(pruned, 2, tmp_path, "split", split, 1):
        assert found == pytest.approx(wanted, abs=2e-4)
    assert "state on rank 0, whose part of the weights this is" in capfd.readouterr().err
