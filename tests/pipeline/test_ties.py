"""Tied layers against a serial run: wherever DeepSpeed keeps their gradients, on how many stages they are, and whatever they have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from axonn_plugins.autoload import activate
from axonn_plugins.config import ConfigError
from tests.distributed import made_once, run_ranks
from tests.matrix import thorough
from tests.pipeline.training import (
    WIDTH,
    Case,
    Feed,
    Spec,
    Words,
    compare,
    config,
    difference,
    module_of,
    parameters,
    ready,
    scores,
    serial,
    start,
    train,
)

activate()

CLOSE = 1e-10


class Mixed(nn.Module):
    """A residual layer of which `tied_weight_attr`, by default, names one of four parameters."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(width, width) / width), nn.Parameter(torch.randn(width))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(x) @ self.weight + self.bias)


def with_norm(layer: Mixed, x: Tensor) -> Tensor:
    """Uses a part of the layer: the other weights have no gradient here."""
    return x + layer.norm(x)


def several() -> list[Spec]:
    """Three tied layers: the words on the first and the last stage, one on all, and one of which a stage uses a part."""
    mixed = TiedLayerSpec("mixed", Mixed)
    return [
        TiedLayerSpec("words", Words),
        mixed,
        LayerSpec(Feed),
        TiedLayerSpec("partly", Mixed),
        mixed,
        LayerSpec(Feed),
        mixed,
        TiedLayerSpec("partly", Mixed, forward_fn=with_norm),
        LayerSpec(nn.LayerNorm, WIDTH),
        mixed,
        TiedLayerSpec("words", Words, forward_fn=scores),
    ]


def sums(kind: str | None, offloaded: bool = False) -> dict[str, Any]:
    """DeepSpeed's keys that say in which type gradients are added, and where."""
    made: dict[str, Any] = {} if kind is None else {"data_types": {"grad_accum_dtype": kind}}
    if offloaded:
        made["zero_optimization"] = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
        made["zero_force_ds_cpu_optimizer"] = False
    return made


def pair(**sizes: int) -> dict[str, Any]:
    return {"gx": 1, "gy": 1, "gz": 1, **sizes, "plan": {"*.up": {"kind": "normal"}, "*.down": {"kind": "transposed"}}}


SEVERAL = Case(several, microbatches=3, optimizer="SGD", steps=2)
EXACT: dict[int, dict[str, Case]] = {
    2: {
        f"ZeRO-{stage}, clip {clip}, {optimizer}": replace(SEVERAL, stage=stage, clip=clip, optimizer=optimizer)
        for stage, clip, optimizer in ((0, 0.0, "AdamW"), (0, 0.3, "SGD"), (1, 0.0, "AdamW"), (1, 0.3, "SGD"))
    }
    | {
        "SAMO": replace(SEVERAL, samo={"sparsity": 0.6, "scope": "layer"}, optimizer="AdamW", clip=0.3),
        "buckets": replace(SEVERAL, offload={"bucket_size": 4096}, optimizer="AdamW", clip=0.3),
        "one stage": replace(SEVERAL, stages=1, stage=1, clip=0.3),
    },
    3: {
        f"ZeRO-{stage}, {schedule}": replace(
            SEVERAL, stages=3, stage=stage, clip=0.3, microbatches=5, block={"schedule": schedule}
        )
        for stage, schedule in ((0, "1f1b"), (1, "message_driven"), (1, "gpipe"))
    },
    4: {
        "2 x 2": replace(SEVERAL, stage=1, clip=0.3),
        "2 x 2, ZeRO-0": replace(SEVERAL, clip=0.3, optimizer="AdamW"),
        "4 stages": replace(SEVERAL, stages=4, stage=1, clip=0.3, optimizer="AdamW"),
        "tensors by x": replace(SEVERAL, tensor=pair(gx=2), clip=0.3),
        "tensors by z": replace(SEVERAL, tensor=pair(gz=2), clip=0.3, optimizer="AdamW"),
        "SAMO, 2 x 2": replace(SEVERAL, samo={"sparsity": 0.6, "scope": "layer"}, optimizer="AdamW", clip=0.3),
    },
    6: {"3 x 2": replace(SEVERAL, stages=3, stage=1, clip=0.3)},
}


SOME = {
    "ZeRO-0, clip 0.0, AdamW",
    "ZeRO-1, clip 0.3, SGD",
    "SAMO",
    "buckets",
    "ZeRO-1, message_driven",
    "2 x 2",
    "tensors by x",
}


@pytest.mark.parametrize(
    ("ranks", "every"), [(2, False), (3, False), (4, False), *(thorough(ranks, True) for ranks in EXACT)]
)
def test_equal_a_serial_run(ranks: int, every: bool) -> None:
    cases = {name: case for name, case in EXACT[ranks].items() if every or name in SOME}
    for rank, found in enumerate(run_ranks(compare, ranks, cases)):
        for name, (loss, weight, _) in found.items():
            assert loss < CLOSE and weight < CLOSE, f"{name} on rank {rank}: {loss}, {weight}"


# How far weights may be from the serial run's, in units of how far they moved, where they or sums of their gradients are of a type.
ROUNDING = {"fp64": 1e-12, "fp32": 1e-5, "fp16": 3e-2, "bf16": 0.2}
LR = 0.1
KINDS: dict[str, tuple[Case, float]] = {
    f"{dtype}, ZeRO-{stage}, sums {kind}, {'offloaded' if offloaded else 'on the device'}": (
        replace(SEVERAL, dtype=dtype, steps=3, stage=stage, clip=2.0, extra=sums(kind, offloaded)),
        max(ROUNDING[dtype], ROUNDING[kind or dtype]),
    )
    for dtype, stage, kind, offloaded in (
        ("fp64", 1, None, True),
        ("fp64", 1, "fp32", False),
        ("fp32", 0, None, False),
        ("fp32", 1, None, False),
        ("fp32", 1, "fp16", False),
        ("fp32", 1, "bf16", True),
        ("fp16", 0, None, False),
        ("fp16", 1, None, False),
        ("fp16", 1, "fp32", False),
        ("fp16", 1, "fp32", True),
        ("fp16", 1, "bf16", False),
        ("bf16", 0, None, False),
        ("bf16", 1, None, False),
        ("bf16", 1, "fp32", False),
        ("bf16", 1, "fp32", True),
        ("bf16", 1, "fp16", False),
    )
}


def serial_runs(case: Case, replicas: int) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Weights after the run, before it, and after its first step without clipping."""
    unclipped = serial(replace(case, clip=0.0), replicas, [0])[1]
    return serial(case, replicas)[1], serial(case, replicas, [])[1], unclipped


def rounded(cases: dict[str, Case]) -> dict[str, dict[str, float]]:
    """By case: how far weights and the first step's norm are from the serial run's, as a share of how far they moved and of the norm."""
    ready()
    found = {}
    for name, case in cases.items():
        engine = start(case)
        train(engine, case, [0])
        norm = float(engine.get_global_grad_norm() or 0)
        train(engine, case, range(1, case.steps))
        ours, replicas = parameters(engine), engine.grid.data_parallel_size
        weights, before, unclipped = made_once(lambda case=case, replicas=replicas: serial_runs(case, replicas))
        wanted = float(torch.cat([(unclipped[key] - before[key]).flatten() for key in before]).norm()) / LR
        found[name] = {"weights": difference(ours, weights) / difference(ours, before), "norm": abs(norm / wanted - 1)}
        engine.destroy()
    return found


@pytest.mark.parametrize(("ranks", "first", "every"), [(2, 1, 4), (4, 0, 8), thorough(2, 0, 1), thorough(4, 0, 3)])
def test_gradients_are_found_in_any_type_of_sum(ranks: int, first: int, every: int) -> None:
    cases = {name: case for name, (case, _) in list(KINDS.items())[first::every]}
    for rank, found in enumerate(run_ranks(rounded, ranks, cases)):
        for name, far in found.items():
            close = KINDS[name][1]
            assert far["weights"] < close and far["norm"] < close / 10, f"{name} on rank {rank}: {far}"


def differ(layer: Any, change: str) -> None:
    """Make the copy of the last stage another."""
    if change == "trained":
        layer.weight.requires_grad_(False)
    elif change == "shape":
        layer.weight.data = layer.weight.data[:3]


def mistakes() -> dict[str, str]:
    """Errors of copies that cannot be one layer; one that merely has another bias is."""
    ready()
    found = {}
    for change in ("trained", "shape"):
        module = module_of(SEVERAL)
        if dist.get_rank() == 1:
            differ(module.get_submodule("tied_modules.mixed"), change)
        try:
            deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config(SEVERAL))
        except ConfigError as error:
            found[change] = str(error)
    torch.manual_seed(3)
    one, held = Feed(), Feed()
    for name, pair in (("made", [one, one]), ("held", [LayerSpec(Around, held), LayerSpec(Around, held)])):
        try:
            start(Case(lambda pair=pair: [pair[0], LayerSpec(Feed), LayerSpec(Feed), pair[1]], dtype="fp32"))
        except ConfigError as error:
            found[name] = str(error)
    return found


class Around(nn.Module):
    """A layer around another."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_copies_that_differ_are_refused_on_all_ranks() -> None:
    for found in run_ranks(mistakes, 2):
        for change in ("trained", "shape"):
            assert "the tied layer 'mixed' has a 'weight' on several stages which differs there" in found[change]
        for kind in ("made", "held"):
            assert "layers 0 and 3 of the PipelineModule have a weight in common" in found[kind]
