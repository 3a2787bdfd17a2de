"""fp16 that overflows: all stages skip the step together, lower the scale alike, and go on as if it had not been."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.autoload import activate
from tests.distributed import made_once, run_ranks
from tests.matrix import thorough
from tests.pipeline.training import Case, difference, parameters, ready, serial, start, train

activate()

INJECTED = 5
"""The step in which one rank of the second stage has an infinite gradient; the first ones overflow by their scale."""
FP16 = Case(
    dtype="fp16",
    microbatches=3,
    steps=7,
    extra={"fp16": {"initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 1000}},
)
CASES: dict[str, Case] = {
    "ZeRO-1": replace(FP16, stage=1),
    "ZeRO-1, clipped": replace(FP16, stage=1, clip=0.05),
    "ZeRO-0": FP16,
    "ZeRO-0, SGD": replace(FP16, optimizer="SGD"),
    "offloaded": replace(FP16, offload={"bucket_size": 2048, "coarsening": 1}),
    "offloaded, SGD, clipped": replace(FP16, optimizer="SGD", clip=0.05, offload={"bucket_size": 2048}),
}


EVERY_RUN = ("ZeRO-1, clipped", "ZeRO-0, SGD", "offloaded, SGD, clipped")


def overflows(cases: dict[str, Case]) -> dict[str, Any]:
    ready()
    found: dict[str, Any] = {}
    for name, case in cases.items():
        ours = watched(start(case), case)
        kept = [step for step, skipped in enumerate(ours["skipped"]) if not skipped]
        (losses, weights), (_, before) = made_once(
            lambda case=case, kept=kept: (serial(case, 2, kept), serial(case, 2, []))
        )
        ours["far"] = difference(ours["weights"], weights)
        ours["moved"] = difference(ours["weights"], before)
        ours["serial"] = losses
        if case.stage == 1:
            stock = watched(start(replace(case, block=None)), case)
            weights = stock.pop("weights")
            ours["stock"] = stock
            ours["stock's bits"] = all(torch.equal(ours["weights"][key], weights[key]) for key in weights)
        found[name] = {key: value for key, value in ours.items() if key != "weights"}
    return found


def watched(engine: Any, case: Case) -> dict[str, Any]:
    """A run's losses, the steps that left the weights as they were, and the scales after each."""
    injecting = [False]
    if dist.get_rank() == 2:
        weight = next(engine.module.parameters())
        weight.register_hook(lambda gradient: gradient * float("inf") if injecting[0] else gradient)
    found: dict[str, Any] = {"losses": [], "skipped": [], "scales": []}
    for step in range(case.steps):
        injecting[0] = step == INJECTED
        before = parameters(engine)
        found["losses"] += train(engine, case, [step])
        after = parameters(engine)
        found["skipped"].append(all(torch.equal(before[key], after[key]) for key in before))
        found["scales"].append(float(engine._get_optimizer_loss_scale()))
    found["counted"] = engine.skipped_steps
    found["weights"] = parameters(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("names", [EVERY_RUN, thorough([*CASES])], ids=["some", "all"])
def test_overflow_and_recovery(names: Sequence[str]) -> None:
    everywhere = run_ranks(overflows, 4, {name: CASES[name] for name in names})
    for name in names:
        first = everywhere[0][name]
        skipped = first["skipped"]
        assert skipped[0] and not skipped[INJECTED - 1] and skipped[INJECTED] and not any(skipped[INJECTED + 1 :]), name
        halved = [2.0 ** (18 - sum(skipped[: step + 1])) for step in range(len(skipped))]
        for rank, of_rank in enumerate(everywhere):
            found = of_rank[name]
            assert found["skipped"] == skipped and found["scales"] == halved, f"{name} on rank {rank}: {found}"
            assert found["counted"] == sum(skipped)
            if CASES[name].optimizer == "SGD":  # AdamW moves by the sign of what is next to nothing
                assert found["far"] < 0.05 * found["moved"] + 2**-11, f"{name} on rank {rank}: {found}"
            kept = [loss for loss, skip in zip(found["losses"], skipped, strict=True) if not skip]
            assert kept == pytest.approx(found["serial"], rel=5e-3)
            if "stock" in found:
                stock = found["stock"]
                assert found["stock's bits"] and stock["skipped"] == skipped and stock["scales"] == halved, name
                assert found["losses"] == pytest.approx(stock["losses"], rel=3e-3)
