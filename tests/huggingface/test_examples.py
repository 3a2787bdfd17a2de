"""The examples of the Trainer, Accelerate and PEFT: losses on several ranks are those of one process."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import axonn_plugins
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import thorough

axonn_plugins.activate()
pytest.importorskip("accelerate")
pytest.importorskip("peft")
from axonn_recipes import examples  # noqa: E402
from axonn_recipes.examples.accelerate import train as of_accelerate  # noqa: E402
from axonn_recipes.examples.peft import train as of_peft  # noqa: E402
from axonn_recipes.examples.pruned import train as of_pruned  # noqa: E402
from axonn_recipes.examples.trainer import train as of_trainer  # noqa: E402
from tests.huggingface.trainer_runs import forget  # noqa: E402

HOSTS: dict[str, Any] = {"trainer": of_trainer, "peft": of_peft}


def losses(folder: Path, ranks: int) -> dict[str, Any]:
    """Of all examples with 16 samples a step, in the environment that their launchers make."""
    found = {}
    for name, module in HOSTS.items():
        config = Path(examples.__path__[0]) / name / "ds_config.json"
        tensor = json.loads(config.read_text())["axonn"]["tensor_parallel"]
        counted = ranks if tensor["gx"] == "auto" else max(ranks // tensor["gx"], 1)
        given = ["--deepspeed", str(config)] if ranks > 1 else ["--use_cpu", "True"]
        size = ["--per_device_train_batch_size", str(16 // counted), "--max_steps", "4"]
        forget()
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        found[name] = attempt(partial(module.main, [*given, *size, "--output_dir", str(folder / f"{name} {ranks}")]))
    forget()
    if ranks > 1:
        config = Path(examples.__path__[0]) / "accelerate" / "ds_config.json"
        os.environ |= {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config)}
    given = ["--batch-size", str(16 // ranks), "--steps", "4", "--output", str(folder / f"loop {ranks}")]
    found["accelerate"] = attempt(partial(of_accelerate.main, given))
    return found


@pytest.mark.parametrize("ranks", [2, thorough(4)])
def test_losses_are_those_of_one_process(tmp_path: Path, ranks: int) -> None:
    wanted = run_ranks(losses, 1, tmp_path, 1)[0]
    for found in run_ranks(losses, ranks, tmp_path, ranks):
        assert found == pytest.approx(wanted, abs=1e-5), (found, wanted)


@pytest.mark.parametrize(("module", "folder"), [(of_peft, "peft_output"), (of_pruned, "pruned_output")])
def test_examples_write_into_folders_of_their_own(module: Any, folder: str, capsys: pytest.CaptureFixture) -> None:
    """Else one would read what another left: an adapter is part of any model that is loaded from beside it."""
    with pytest.raises(SystemExit):
        module.main(["--help"])
    assert f"(default: {folder})" in capsys.readouterr().out
