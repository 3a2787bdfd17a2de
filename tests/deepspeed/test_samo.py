"""SAMO from the block: a stock script trains as a plain PyTorch run does, on any ranks, and resumes on others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import samo
from axonn_plugins.autoload import activate
from axonn_plugins.optim import reducer
from axonn_plugins.pccl.build import load
from tests.deepspeed.samo_training import DYNAMIC, SEARCH, STEPS, Case, dense, masks_of, plain, ready, run, start, train
from tests.matrix import thorough

activate()
SCALE = samo.LossScale(16.0, growth_interval=10**9)
# Name: the run, and the loss scale of the plain one.
CASES: dict[str, tuple[Case, Any]] = {
    "fp32": (Case(), None),
    "fp32, all on": (Case(accumulation=2, clip=0.3, scheduler="config"), None),
    "client": (Case(optimizer="client", scheduler="client", clip=0.3), None),
    "callable": (Case(optimizer="callable", scheduler="callable"), None),
    "bf16": (Case(dtype="bf16", accumulation=2, clip=0.3), 1.0),
    "fp16 static": (Case(dtype="fp16", clip=0.3, scale={"loss_scale": 64.0}), 64.0),
    "fp16 overflow": (Case(dtype="fp16", scheduler="config", scale=DYNAMIC, blow_up=2), SCALE),
    "shard": (Case({"sparsity": 0.9, "shard": True}, dtype="bf16", accumulation=2, clip=0.3), 1.0),
    "nothing pruned": (Case({"sparsity": 0.0}, clip=0.3), None),
    "nearly all pruned": (Case({"sparsity": 0.999}), None),
}


EVERY_RUN = ("fp32", "fp32, all on", "callable", "fp16 overflow", "shard", "nearly all pruned")


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of every all-reduce and reduce-scatter."""
    seen: list[int] = []
    names = ((dist, "all_reduce"), (dist, "reduce_scatter_tensor"), (reducer, "start_parts"))
    originals = {name: (where, getattr(where, name)) for where, name in names}

    def counting(name: str) -> Any:
        def call(*tensors: Any, **keywords: Any) -> Any:
            seen.append(max(t.nbytes for t in (*tensors, *keywords.values()) if isinstance(t, torch.Tensor)))
            return originals[name][1](*tensors, **keywords)

        return call

    for name, (where, _) in originals.items():
        setattr(where, name, counting(name))
    try:
        yield seen
    finally:
        for name, (where, original) in originals.items():
            setattr(where, name, original)


def against_plain(names: list[str]) -> dict[str, Any]:
    ready()
    found: dict[str, Any] = {}
    for name in names:
        case, scale = CASES[name]
        engine = start(case)
        with counted() as seen:
            ours = train(engine, case)
        kept = sum(entry.kept * entry.parameter.element_size() for entry in engine.optimizer.entries)
        weights = torch.cat([p.detach().reshape(-1).float() for p in engine.module.parameters()])
        everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, weights)
        assert all(torch.equal(other, weights) for other in everyone), name
        engine.destroy()
        # Single numbers and norms of shards apart, which are sums in float64 of one number a parameter.
        moved = sum(n for n in seen if n > 8 * len(list(engine.module.parameters())))
        found[name] = {"ours": ours, "plain": plain(case, scale), "bytes": moved, "kept": kept}
    return found


@pytest.mark.parametrize(("ranks", "every"), [(1, False), (3, False), thorough(1, True), thorough(3, True)])
def test_equals_a_plain_run(ranks: int, every: bool) -> None:
    everyone = run(against_plain, ranks, [*CASES] if every else [*EVERY_RUN])
    first, last = (sum(rank["fp32"]["ours"][step][0][0] for rank in everyone) for step in (0, -1))
    assert last < first
    for rank in everyone:
        for name, found in rank.items():
            case = CASES[name][0]
            for (losses, norm, scale, skipped), wanted in zip(found["ours"], found["plain"], strict=True):
                assert losses == pytest.approx(wanted[0], rel=1e-6), name
                assert wanted[1] is None or norm == pytest.approx(wanted[1], rel=1e-6), name
                assert skipped == wanted[3], name
                if case.blow_up is None:
                    assert scale == wanted[2], name
            if ranks > 1:
                # Gradients of kept weights once a step: 2fφ or 4fφ bytes; of shards, padded to the number of ranks.
                padding = 64 * STEPS if "shard" in case.block else 0
                assert found["kept"] * STEPS <= found["bytes"] <= found["kept"] * STEPS + padding, name
        scales = [step[2] for step in rank["fp16 overflow"]["ours"]]
        skips = [step[3] for step in rank["fp16 overflow"]["ours"]]
        assert skips == [0, 0, 1, 1, 1, 1] and scales[2] == 8.0


EXACT = {
    "from the start": (Case({"sparsity": 0.8}, "fp64", accumulation=2, clip=0.3, scheduler="config"), 0),
    "at step 3": (Case({"sparsity": 0.8, "start_step": 3}, "fp64", clip=0.3, scheduler="config"), 3),
    "by layer, shards": (Case({"sparsity": 0.8, "scope": "layer", "start_step": 2, "shard": True}, "fp64"), 2),
    "patterns": (Case({"sparsity": 0.8, "include": ["0.*", "5.*", "3.*"], "exclude": ["3.weight"]}, "fp64"), 0),
}


def exact() -> dict[str, Any]:
    ready()
    found = {}
    for name, (case, _) in EXACT.items():
        engine = start(case)
        before = engine._pruning.pruned
        losses = [step[0] for step in train(engine, case)]
        weights = {key: p.detach() for key, p in engine.module.named_parameters()}
        found[name] = {"losses": losses, "weights": weights, "masks": masks_of(engine), "before": before}
        engine.destroy()
    return found


def test_equals_masked_dense_training() -> None:
    ranks = run(exact, 2)
    for name, (case, at) in EXACT.items():
        masks = ranks[0][name]["masks"]
        losses, weights = dense(case, {at: masks}, 2)
        ours = [sum(sum(rank[name]["losses"][step]) for rank in ranks) / 2 / case.accumulation for step in range(STEPS)]
        assert ours == pytest.approx(losses, rel=1e-9), name
        for rank in ranks:
            assert rank[name]["before"] is (at == 0)
            for key, weight in rank[name]["weights"].items():
                assert torch.allclose(weight, weights[key], rtol=1e-9, atol=1e-10), (name, key)
        pruned = {"0.weight", "5.weight"} if name == "patterns" else {"1.weight", "3.weight", "5.weight"}
        assert set(masks) == pruned
        if at == 0 and name != "patterns":
            assert all(torch.equal(masks[key], mask) for key, mask in samo.magnitude(case.model(), 0.8).items())
        shares = [1 - mask.double().mean().item() for mask in masks.values()]
        size = sum(mask.numel() for mask in masks.values())
        assert sum(int(mask.sum()) for mask in masks.values()) == size - round(0.8 * size) or name.startswith(
            "by layer"
        )
        if name.startswith("by layer"):
            assert shares == pytest.approx([0.8] * 3, abs=0.01)


def other_ways(folder: Path) -> dict[str, Any]:
    """Early-bird tickets, mask files, PCCL, parameters that one rank does not use."""
    ready()
    found: dict[str, Any] = {}
    case = Case({"sparsity": 0.8, "pruner": SEARCH, "start_step": 1}, "fp64")
    engine, seen = start(case), []
    losses = train(engine, case, each=lambda: seen.append(engine._pruning.pruned))
    found["search"] = (seen, [step[0][0] for step in losses], masks_of(engine))
    engine.destroy()

    masks = samo.magnitude(case.model(), 0.7, "layer")
    if dist.get_rank() == 0:
        samo.write_masks(folder / "masks.safetensors", masks)
    dist.barrier()
    for name, more in (("mask", {}), ("mask and sparsity", {"sparsity": 0.7})):
        engine = start(Case({"pruner": {"mask": str(folder / "masks.safetensors")}} | more))
        found[name] = all(torch.equal(mask, masks[key]) for key, mask in masks_of(engine).items())
        engine.destroy()

    engine = start(Case(extra={"axonn": {"pccl": {"algorithm": "ring"}, "samo": {"sparsity": 0.9, "shard": True}}}))
    found["pccl"] = train(engine, Case()), engine.data_parallel_group._get_backend(torch.device("cpu")).name()
    engine.destroy()
    engine = start(Case())
    found["gloo"] = train(engine, Case())
    engine.destroy()

    engine = start(Case())
    for _ in range(2):
        hidden = engine.module[0](torch.arange(4))
        first = engine.module[1](hidden).sum()
        engine.backward(first + engine.module[5](torch.ones(2, 40)).sum() if dist.get_rank() else first)
        engine.step()
    found["unused"] = [p.detach().clone() for p in engine.module.parameters()]
    engine.destroy()
    return found


def test_early_bird_mask_file_pccl_and_unused_parameters(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    load()  # compiled before ranks are forked, whose time is limited
    ranks = run(other_ways, 2, tmp_path)
    for found in ranks:
        assert found["mask"] and found["mask and sparsity"]
        assert found["pccl"][1] == "pccl"
        assert [step[0] for step in found["pccl"][0]] == [pytest.approx(step[0], rel=1e-6) for step in found["gloo"]]
        for ours, other in zip(found["unused"], ranks[0]["unused"], strict=True):
            assert torch.equal(ours, other)
    # Dense steps 1 and 2; looked at after steps 2, 3 and 4, and found with the third mask.
    seen, _, masks = ranks[0]["search"]
    assert seen == [False, False, False, True, True, True]
    case = Case({"sparsity": 0.8}, "fp64")
    losses, _ = dense(case, {4: masks}, 2)
    ours = [sum(rank["search"][1][step] for rank in ranks) / 2 for step in range(STEPS)]
    assert ours == pytest.approx(losses, rel=1e-9)
    printed = capfd.readouterr().err
    assert "SAMO: pruned after step 4" in printed
    assert re.search(r"1\.weight +40x24 +\d+ +960", printed) and re.search(r"pruned layers .* 80\.00%", printed)
