"""DeepSpeed on sequences that ranks of z share: losses, norms and what is saved are those of one process."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn

from axonn_plugins.config import ConfigError, parse
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, Mesh, Options
from tests.axonn_tp.test_context import Checkpointing, compare, parts_again, two_lengths
from tests.deepspeed.training import Case, difference, run_cases, serial
from tests.distributed import run_ranks, same_on_all
from tests.matrix import thorough


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=51, context=9, layers=1, heads=4, hidden=16))


def ids() -> tuple[Tensor, ...]:
    drawn = torch.randint(51, (8, 10))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def saved(engine: Any, module: nn.Module) -> dict[str, Any]:
    """Weights as a checkpoint has them, read again, and who reads what."""
    if not hasattr(engine, "save_checkpoint"):
        return {name: p.detach().flatten().tolist() for name, p in module.named_parameters()}
    folder = same_on_all(tempfile.mkdtemp())
    engine.save_checkpoint(folder, "here")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    engine.load_checkpoint(folder, "here")
    dist.barrier()
    assert (Path(folder) / "latest").read_text() == "here"
    unit, grid = engine.mpu, engine.mesh.grid
    assert (unit.get_data_parallel_world_size(), engine.train_batch_size()) == (grid.readers, 4 * grid.readers)
    return {name: value.flatten().tolist() for name, value in module.state_dict().items()}


CASES = {
    f"zero{stage}-{gx}-{gy}-{z}": Case(
        gpt, ids, (gx, gy, z), plan, stage, "fp64", after=saved, extra={"zero_allow_untested_optimizer": True}
    )
    for stage, gx, gy, z, plan in (
        (0, 1, 1, {"sequence": 4}, {}),
        (0, 2, 1, {"sequence": 2}, "auto"),
        (1, 1, 1, {"batch": 2, "sequence": 2}, {}),
        (2, 1, 2, {"sequence": 2}, "auto"),
        (1, 1, 1, {"sequence": 2}, {}),
    )
}


EVERY_RUN = {"zero0-2-1-{'sequence': 2}", "zero1-1-1-{'batch': 2, 'sequence': 2}", "zero2-1-2-{'sequence': 2}"}


@pytest.mark.parametrize("names", [sorted(EVERY_RUN), thorough([*CASES])], ids=["some", "all"])
def test_trains_as_one_process(names: list[str]) -> None:
    found = run_ranks(run_cases, 4, {name: CASES[name] for name in names})
    expected = serial(Case(gpt, ids, dtype="fp64", after=saved))
    for name in names:
        for rank in found:
            assert isinstance(rank[name], dict), rank[name]
            for key in ("losses", "norms"):
                assert difference(rank[name][key], expected[key]) < 1e-9, (name, key)
            for weight, values in expected["after"].items():
                # The gradient of a bias of keys is 0 but for rounding, of which Adam makes a step.
                assert weight.endswith("qkv.bias") or difference(rank[name]["after"][weight], values) < 1e-8, (
                    name,
                    weight,
                )


@pytest.mark.parametrize(
    ("block", "said"),
    [
        ({"gz": {"batch": 2}}, "tensor_parallel.gz.sequence"),
        ({"gz": {"sequence": 2}, "gx": "auto"}, 'gz.sequence does not go with gx or gy = "auto"'),
        ({"gz": {"sequence": 0}}, "tensor_parallel.gz.sequence = 0"),
        ({"gz": 2, "attention": "rings"}, 'tensor_parallel.attention = "rings"'),
    ],
)
def test_mistakes_are_one_sentence(block: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse({"tensor_parallel": block})
    assert said in str(raised.value) and "\n" not in str(raised.value)


class DeepSpeeds(Checkpointing):
    """By one of DeepSpeed's own checkpoints."""

    def __init__(self, again: Any) -> None:
        super().__init__(as_module=False, reentrant=True)
        self.again = again


def computed_again() -> None:
    mesh = Mesh(Grid(gz=2, sequence=2))
    for again in (checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint):
        compare(partial(DeepSpeeds, again), two_lengths, mesh, None, Options())
        parts_again(again, mesh)


def test_deepspeeds_checkpoints_know_their_tokens() -> None:
    run_ranks(computed_again, 2)
