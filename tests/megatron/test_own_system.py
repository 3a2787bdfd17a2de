"""Systems of a user's own, and PCCL, in Megatron-LM's own pretrain_gpt.py, with and without a grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.megatron.harness import difference, run
from tests.megatron.test_pretrain import flags, needs_script, stock

SCRIPT = Path(__file__).with_name("with_systems.py")
TOLERANCE = 1e-5
NOISE = ["--axonn-gradient-noise", json.dumps({"std": 0.3}), "--train-iters", "6", "--axonn-journal"]


def apart(wanted: dict[str, Any], found: dict[str, dict[str, Any]], within: float = TOLERANCE) -> dict[str, Any]:
    """Differences of cases from what is wanted, where they are too large; ``pytest -s`` shows all."""
    far = {name: result.get("error") or difference(wanted, result) for name, result in found.items()}
    print(*(f"{name}: {value}" for name, value in far.items()), sep="\n")
    return {name: value for name, value in far.items() if not (isinstance(value, float) and value < within)}


@needs_script
def test_noise_is_that_of_one_rank_on_every_grid() -> None:
    distributed = "--use-distributed-optimizer"
    ranks, words = stock("swiglu", *NOISE)
    cases = {"one": stock("swiglu", *NOISE), "without": stock("swiglu", "--train-iters", "6")}
    for grid in ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)):
        cases[f"{grid}"] = flags(grid, "swiglu", *NOISE)
    cases["(1, 1, 2, 1), distributed"] = flags((1, 1, 2, 1), "swiglu", distributed, *NOISE)
    cases["(2, 1, 1, 2), distributed"] = flags((2, 1, 1, 2), "swiglu", distributed, *NOISE)
    cases["data"] = 2 * ranks, words
    cases["data, distributed"] = 2 * ranks, [*words, distributed]
    cases["tensor"] = 2 * ranks, [*words, "--tensor-model-parallel-size", "2"]
    found = run(SCRIPT, cases)
    one, without = found.pop("one"), found.pop("without")
    assert "error" not in one, one["error"]
    assert difference(one, without) > 100 * TOLERANCE
    assert apart(one, found) == {}


@needs_script
def test_runs_go_on_with_their_systems(tmp_path: Path) -> None:
    """On other grids and in stages, whose names, tied embeddings and steps are those of one rank."""
    form = ["--ckpt-format", "torch_dist"]
    begin = [*NOISE, "--save", str(tmp_path), "--save-interval", "3", "--exit-interval", "3", *form]
    load = [*NOISE, "--load", str(tmp_path), "--no-load-rng", *form]
    cases = {"straight": stock("plain", *NOISE), "begin": stock("plain", *begin), "one": stock("plain", *load)}
    cases["(2, 1, 1, 1)"] = flags((2, 1, 1, 1), "plain", *load)
    cases["(1, 1, 2, 1) on each of two stages"] = flags((1, 1, 2, 1), "plain", *load, stages=2)
    cases["stages"] = 2, [*stock("plain", *load)[1], "--pipeline-model-parallel-size", "2"]
    found = run(SCRIPT, cases)
    straight, begun = found.pop("straight"), found.pop("begin")
    assert "error" not in straight and "error" not in begun, (straight, begun)
    assert apart({what: straight[what][3:] for what in ("losses", "norms")}, found) == {}


@needs_script
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_noise_is_scaled_as_the_loss(precision: str) -> None:
    more = [f"--{precision}", *NOISE, *(["--loss-scale", "256"] if precision == "fp16" else [])]
    ranks, words = stock("plain", *more)
    cases = {"fp32": stock("plain", *NOISE), "one": (ranks, words), "gx": flags((2, 1, 1, 1), "plain", *more)}
    cases["distributed"] = 2, [*words, "--use-distributed-optimizer"]
    found = run(SCRIPT, cases)
    wide = found.pop("fp32")
    assert apart(wide, found, 0.01) == {}


@needs_script
def test_pccl_trains_as_gloo() -> None:
    few = ["--train-iters", "6"]
    pccl = [*few, "--axonn-pccl", json.dumps({"algorithm": "ring"}), "--axonn-journal", json.dumps({"backend": "pccl"})]
    words, tensor = stock("overlapped", *few, *pccl)[1], ["--tensor-model-parallel-size", "2"]
    cases = {"gloo": stock("plain", *few), "tensor": (2, [*words, *tensor]), "data": (2, words)}
    cases["(2, 1, 2, 1)"] = flags((2, 1, 2, 1), "distributed optimizer", *pccl)
    cases["(1, 2, 1, 1)"] = flags((1, 2, 1, 1), "plain", *pccl)
    found = run(SCRIPT, cases)
    assert apart(found.pop("gloo"), found) == {}
