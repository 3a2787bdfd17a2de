"""Checkpoints of a pruned run under DeepSpeed: other numbers of ranks, sharded or not, to and from dense runs."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine

import samo
from axonn_plugins.autoload import activate
from tests.deepspeed import samo_training as training
from tests.deepspeed.samo_training import DYNAMIC, SEARCH, STEPS, Case, config_of, masks_of, ready, run, start, train
from tests.matrix import thorough

activate()
deepspeed = training.deepspeed
SAVED = {
    "fp32": Case({"sparsity": 0.8}, accumulation=2, clip=0.3, scheduler="config", same=True),
    "bf16 shard": Case({"sparsity": 0.8, "shard": True}, dtype="bf16", same=True),
    "fp16": Case({"sparsity": 0.8}, "fp16", scale=DYNAMIC, optimizer="client", scheduler="client", same=True),
    "search": Case({"sparsity": 0.8, "pruner": SEARCH, "start_step": 1}, same=True),
    "schedule": Case(
        {"sparsity": 0.8, "start_step": 1, "schedule": {"end_step": 5, "interval": 2, "initial": 0.3}}, same=True
    ),
    "rigl": Case({"sparsity": 0.8, "regrow": {"interval": 2, "end_step": 6}}, same=True),
    "snip": Case({"sparsity": 0.8, "pruner": "snip", "start_step": 1}, "bf16", accumulation=2, clip=0.3, same=True),
    "snip while saved": Case({"sparsity": 0.8, "pruner": {"snip": {"batches": 2}}, "start_step": 2}, same=True),
    "later": Case({"sparsity": 0.8, "start_step": 5}, same=True),
}
EVERY_RUN = ("fp32", "bf16 shard", "fp16", "rigl", "snip while saved")
AT = 3


def save(folder: Path, names: list[str]) -> dict[str, Any]:
    ready()
    found = {}
    for name in names:
        case = SAVED[name]
        engine = start(case)
        train(engine, case, range(AT))
        engine.save_checkpoint(str(folder / name), client_state={"note": 7})
        found[name] = train(engine, case, range(AT, STEPS)), masks_of(engine), engine._pruning.pruned
        engine.destroy()
    return found


def resume(folder: Path, names: list[str], every: bool) -> dict[str, Any]:
    ready()
    found: dict[str, Any] = {}
    for name in names:
        case = SAVED[name]
        turned = replace(case, block=case.block | {"shard": "shard" not in case.block})
        ways = (case, turned) if every or name == "fp32" else (turned,)
        found[name] = [resumed(folder / name, way) for way in ways]
    found["weights"] = weights_only(folder)
    return found


def resumed(folder: Path, case: Case) -> Any:
    engine = start(case)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    path, client = engine.load_checkpoint(str(folder))
    assert path is not None and client["note"] == 7 and engine.global_steps == AT
    found = train(engine, case, range(AT, STEPS)), masks_of(engine), engine._pruning.pruned
    engine.destroy()
    return found


def weights_only(folder: Path) -> dict[str, Any]:
    """Weights without state; a dense run's checkpoint; damaged masks."""
    found: dict[str, Any] = {}
    case = Case({"sparsity": 0.5}, "bf16", same=True)
    engine = start(case)
    engine.load_checkpoint(str(folder / "bf16 shard"), load_module_only=True)
    masters = engine.optimizer.state_dict()["state"]
    weights = {name: p.detach().float() for name, p in engine.module.named_parameters() if p.requires_grad}
    found["masks"] = masks_of(engine)
    for number, (name, weight) in enumerate(weights.items()):
        kept = weight.reshape(-1)[masters[number]["positions"].long()] if "positions" in masters[number] else weight
        found[name] = torch.equal(masters[number]["master"], kept.reshape(-1))
    engine.destroy()

    stock = Case(same=True)
    raw = config_of(stock)
    del raw["axonn"]
    raw["optimizer"]["params"]["torch_adam"] = True
    model = stock.model()
    with torch.no_grad():
        model[1].weight.mul_(torch.rand_like(model[1].weight))
    trained = [p for p in model.parameters() if p.requires_grad]
    engine = deepspeed.initialize(model=model, model_parameters=trained, config=raw)[0]
    assert type(engine) is DeepSpeedEngine
    engine.backward(engine(torch.arange(4)).square().mean())
    engine.step()
    engine.save_checkpoint(str(folder / "dense"))
    wanted = samo.magnitude(model, 0.9)
    moments = engine.optimizer.state[model[5].weight]["exp_avg"][wanted["5.weight"]]
    engine.load_checkpoint(str(folder / "fp32"), load_module_only=True)
    found["to dense"] = 1 - (model[3].weight != 0).float().mean() > 0.75
    engine.destroy()
    for states in (True, False):
        engine = start(stock)
        engine.load_checkpoint(str(folder / "dense"), load_optimizer_states=states)
        masks = masks_of(engine)
        found[f"from dense {states}"] = all(torch.equal(mask, masks[name]) for name, mask in wanted.items())
        numbers = [name for name, p in engine.module.named_parameters() if p.requires_grad]
        state = engine.optimizer.state_dict()["state"][numbers.index("5.weight")]
        found[f"moments {states}"] = torch.equal(state["exp_avg"], moments) if states else "exp_avg" not in state
    assert engine.load_checkpoint(str(folder / "nothing"))[0] is None and engine._pruning.pruned
    engine.destroy()
    return found


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_a_checkpoint_of_four_ranks_resumes_on_two_sharded_or_not(every: bool, tmp_path: Path) -> None:
    names = [*SAVED] if every else [*EVERY_RUN]
    saved = run(save, 4, tmp_path, names)
    assert sorted(os.listdir(tmp_path / "fp32")) == ["global_step3", "latest"]
    for rank in run(resume, 2, tmp_path, names, every):
        for name in names:
            steps, masks, pruned = saved[0][name]
            for ours, our_masks, our_pruned in rank[name]:
                for (losses, _, scale, skipped), wanted in zip(ours, steps, strict=True):
                    assert losses == pytest.approx(wanted[0], rel=1e-4 if "16" in name else 1e-6), name
                    assert (scale, skipped) == (wanted[2], wanted[3]), name
                assert our_pruned is pruned is True, name
                same = [torch.equal(mask, masks[key]) for key, mask in our_masks.items()]
                assert all(same) and len(same) == len(masks), name
        weights = rank["weights"]
        masks = weights.pop("masks")
        assert 1 - sum(m.sum() for m in masks.values()) / sum(m.numel() for m in masks.values()) > 0.75
        assert all(weights.values()), weights
