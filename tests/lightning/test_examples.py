"""The examples of Lightning, Fabric and LitGPT, as their users start them."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import torch._dynamo

from axonn_plugins.cli import main
from axonn_plugins.cluster.launch import launch
from axonn_recipes import examples
from axonn_recipes.examples.fabric import train as fabric_train
from axonn_recipes.examples.lightning import train as lightning_train
from tests.distributed import run_ranks
from tests.matrix import thorough


def both(folder: Path, grids: list[list[str]], ranks: int) -> list[list[float]]:
    """The loss of each grid in each example; the last one goes on where the first one stopped half way."""
    found, checkpoint = [], ["--checkpoint", str(folder / f"{ranks}.ckpt")]
    fabric_train.main(["--devices", str(ranks), *grids[0], "--steps", "3", *checkpoint])
    for grid in grids:
        given = ["--devices", str(ranks), *grid, "--steps", "6"]
        resumed = checkpoint if grid is grids[-1] else []
        found.append([lightning_train.main([*given, "--folder", str(folder)]), fabric_train.main([*given, *resumed])])
    return found


@pytest.mark.parametrize(
    ("ranks", "grids"),
    [(2, [["--gx", "2"], ["--gz", "2"]]), thorough(4, [["--gx", "2", "--gz", "2"], ["--gy", "2"]])],
    ids=str,
)
def test_losses_are_those_of_one_process(tmp_path: Path, ranks: int, grids: list[list[str]]) -> None:
    wanted = both(tmp_path, [[]], 1)[0]
    for found in run_ranks(both, ranks, tmp_path, grids, ranks):
        for losses in found:
            assert losses == pytest.approx(wanted, abs=2e-5)


def started(arguments: list[str], folder: Path, **more: str) -> str:
    """Output of a command in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", **more}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.thorough  # two interpreters that import all of it
def test_lightning_starts_the_ranks(tmp_path: Path) -> None:
    wanted = fabric_train.main(["--devices", "1", "--steps", "4"])
    printed = started(["axonn_recipes.examples.fabric.train", "--devices", "2", "--gy", "2", "--steps", "4"], tmp_path)
    assert float(printed.split()[-1]) == pytest.approx(wanted, abs=2e-5)


def losses(printed: str) -> list[float]:
    return [float(line.split("loss train: ")[1].split(",")[0]) for line in printed.splitlines() if "loss train" in line]


def as_started(arguments: list[str], folder: Path, strategy: dict[str, int] | None) -> list[float]:
    given = {} if strategy is None else {"AXONN_STRATEGY": json.dumps(strategy)}
    return losses(started(arguments, folder, **given))


def as_forked(arguments: list[str], folder: Path, strategy: dict[str, int] | None) -> list[float]:
    """As started by torchrun, without an interpreter's start for each rank."""
    ranks = int(arguments[arguments.index("--devices") + 1])
    found = (
        launch(litgpt_alone, 1, arguments, folder)
        if strategy is None
        else run_ranks(litgpt_alone, ranks, arguments, folder, strategy)
    )
    return found[0]


def litgpt_alone(arguments: list[str], folder: Path, strategy: dict[str, int] | None = None) -> list[float]:
    os.chdir(folder)
    if strategy is not None:
        os.environ["AXONN_STRATEGY"] = json.dumps(strategy)
    sys.argv, torch._dynamo.config.disable = arguments, True
    printed = StringIO()
    with redirect_stdout(printed):
        from litgpt.__main__ import main as litgpt

        litgpt()
    return losses(printed.getvalue())


@pytest.mark.parametrize("train", [as_forked, thorough(as_started)])
def test_litgpt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: Callable[..., list[float]]) -> None:
    pytest.importorskip("jsonargparse", reason="LitGPT's command line needs it")
    # What LitGPT imports, and compiles with, before ranks are forked.
    import lightning.pytorch.cli  # noqa: F401
    import torch._inductor.compile_fx  # noqa: F401

    config = str(Path(examples.__path__[0]) / "litgpt" / "pretrain.yaml")
    given = ["litgpt", "pretrain", "--config", config, "--out_dir"]
    wanted = train([*given, "one", "--devices", "1"], tmp_path, None)
    assert len(wanted) == 8
    both = [*given, "xz", "--devices", "4", "--train.micro_batch_size", "2"]
    assert train(both, tmp_path, {"gx": 2, "gz": 2}) == pytest.approx(wanted, abs=1.1e-3)
    through_the_converters(tmp_path, monkeypatch)


def through_the_converters(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Convert what was trained to a model of transformers and back by LitGPT's commands."""
    transformers = pytest.importorskip("transformers")
    import litgpt.config
    from litgpt.model import GPT
    from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
    from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint
    from litgpt.scripts.convert_pretrained_checkpoint import convert_pretrained_checkpoint

    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")  # LitGPT saves the DataLoader, too
    convert_pretrained_checkpoint(folder / "xz" / "final", folder / "weights")
    monkeypatch.delenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD")
    convert_lit_checkpoint(folder / "weights", folder / "theirs")
    assert main(["convert", str(folder / "xz" / "final"), str(folder / "bytes"), "--to", "hf"]) == 0
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "bytes").eval()
    model.load_state_dict(torch.load(folder / "theirs" / "model.pth"))
    config = litgpt.config.Config.from_file(folder / "weights" / "model_config.yaml")
    trained = torch.load(folder / "weights" / "lit_model.pth")
    whole = GPT(config).eval()
    whole.load_state_dict(trained)
    ids = torch.arange(32)[None] * 3
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, whole(ids), rtol=0, atol=1e-5)
    model.save_pretrained(folder / "bytes")
    monkeypatch.setitem(litgpt.config.name_to_config, "bytes", dataclasses.asdict(config))
    convert_hf_checkpoint(folder / "bytes")
    back = torch.load(folder / "bytes" / "lit_model.pth")
    assert back.keys() == trained.keys() and all(torch.equal(back[name], trained[name]) for name in trained)
