"""A system of a user's own in Megatron-LM's own pretrain_gpt.py, with and without a grid."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.megatron.harness import difference, run
from tests.megatron.test_pretrain import flags, needs_script, stock

SCRIPT = Path(__file__).with_name("with_noise.py")
TOLERANCE = 1e-5
NOISE = ["--axonn-gradient-noise", json.dumps({"std": 0.3}), "--train-iters", "6"]


def apart(wanted: dict[str, Any], found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How far every case is from what is wanted, where that is too far; ``pytest -s`` shows all."""
    far = {name: result.get("error") or difference(wanted, result) for name, result in found.items()}
    print(*(f"{name}: {value}" for name, value in far.items()), sep="\n")
    return {name: value for name, value in far.items() if not (isinstance(value, float) and value < TOLERANCE)}


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
