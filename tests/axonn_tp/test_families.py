"""plan="auto" on the model families that people train: three steps on every grid of 4 ranks equal one process in float64."""

from __future__ import annotations

import copy
import io
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist

import axonn_tp
from axonn_tp import Grid, auto_plan, factorisations
from tests.axonn_tp.families import FAMILIES, in_float64
from tests.axonn_tp.test_auto import TOLERANCE, few_steps, serial_steps
from tests.distributed import meshes, run_ranks

TRAINED = (
    "llama",
    "qwen3",
    "gemma3",
    "phi",
    "gpt2",
    "neox",
    "mistral",
    "bert",
    "t5",
    "vit",
    "whisper",
    "convnext",
    "mamba",
)


def trained(names: list[str]) -> dict[tuple[str, str], tuple[dict[str, float], str]]:
    """By family and grid the errors of losses and gradients, and the report."""
    torch.manual_seed(1)
    models = {name: FAMILIES[name][0]().double() for name in names}
    with in_float64():
        expected = {name: serial_steps(model) for name, model in models.items()}
    found: dict[tuple[str, str], Any] = {}
    for mesh in meshes(factorisations(dist.get_world_size())):
        for name, model in models.items():
            with in_float64(), redirect_stdout(io.StringIO()) as printed:
                parallel = axonn_tp.parallelize(copy.deepcopy(model), mesh, "auto")
                errors = few_steps(model, expected[name], parallel, mesh)
            found[name, str(mesh.grid)] = errors, printed.getvalue()
    return found


@pytest.mark.families
def test_steps_of_every_family_equal_serial() -> None:
    pytest.importorskip("transformers")
    ranks = run_ranks(trained, 4, list(TRAINED))
    for (name, grid), (_, report) in ranks[0].items():
        sent = next(line for line in report.splitlines() if line.startswith("Each rank sends"))
        print(f"{name:9} {grid}: {sent}")
    wrong = {
        case: errors for found in ranks for case, (errors, _) in found.items() if max(errors.values()) >= TOLERANCE
    }
    assert not wrong, wrong
    assert len(ranks[0]) == len(TRAINED) * len(list(factorisations(4)))


@pytest.mark.parametrize("family", TRAINED)
def test_the_report_says_what_to_do_about_layers_in_no_pair(family: str) -> None:
    pytest.importorskip("transformers")
    _, report = auto_plan(FAMILIES[family][0](), Grid(2, 2))
    told = [line.partition('": ')[0][1:] for line in report.advice()]
    for row in report.rows:
        if row.kind in ("self_contained", "replicated"):
            assert any(reason in row.why for reason in told), row
    assert bool(told) == any(row.kind in ("self_contained", "replicated") for row in report.rows)
