"""SAMO from the block: a stock script trains as a plain PyTorch run does, on any ranks, and resumes on others."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

import samo
from plugins.autoload import activate
from plugins.config import ConfigError, parse
from plugins.launch import launch
from samo.mask_file import unpack
from tests.deepspeed import samo_training as training
from tests.deepspeed.samo_training import STEPS, Case, config_of, dense, plain, start, train
from tests.deepspeed.scripts import fork_script, one_sentence, sentences

activate()
deepspeed = training.deepspeed
DYNAMIC = {"initial_scale_power": 4, "loss_scale_window": 3, "hysteresis": 1, "min_loss_scale": 1}
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
    "all pruned": (Case({"sparsity": 1.0}), None),
}


def ready() -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of every all-reduce and reduce-scatter."""
    seen: list[int] = []
    originals = {name: getattr(dist, name) for name in ("all_reduce", "reduce_scatter_tensor")}

    def counting(name: str) -> Any:
        def call(*tensors: Any, **keywords: Any) -> Any:
            whole = tensors[-1]
            seen.append(whole.nbytes)
            return originals[name](*tensors, **keywords)

        return call

    for name in originals:
        setattr(dist, name, counting(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def against_plain() -> dict[str, Any]:
    ready()
    found: dict[str, Any] = {}
    for name, (case, scale) in CASES.items():
        engine = start(case)
        with counted() as seen:
            ours = train(engine, case)
        kept = sum(entry.kept * entry.parameter.element_size() for entry in engine.optimizer.samo.entries)
        weights = torch.cat([p.detach().reshape(-1).float() for p in engine.module.parameters()])
        everyone = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, weights)
        assert all(torch.equal(other, weights) for other in everyone), name
        engine.destroy()
        # Single numbers and norms of shards apart, which are sums in float64 of one number a parameter.
        moved = sum(n for n in seen if n > 8 * len(list(engine.module.parameters())))
        found[name] = {"ours": ours, "plain": plain(case, scale), "bytes": moved, "kept": kept}
    return found


@pytest.mark.parametrize("ranks", [1, 3])
def test_equals_a_plain_run(ranks: int) -> None:
    everyone = launch(against_plain, ranks, timeout=150)
    first, last = (sum(rank["fp32"]["ours"][step][0][0] for rank in everyone) for step in (0, -1))
    assert last < first
    for rank in everyone:
        for name, found in rank.items():
            case = CASES[name][0]
            for (losses, norm, scale, skipped), wanted in zip(found["ours"], found["plain"], strict=True):
                assert losses == pytest.approx(wanted[0], rel=1e-6), name
                assert norm == pytest.approx(wanted[1], rel=1e-5) if wanted[1] is not None else norm is None, name
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


def _masks(engine: Any) -> dict[str, Tensor]:
    state = engine._pruning.state_dict(engine.optimizer.samo)
    return {name: unpack(t, tuple(state["shapes"][name])) for name, t in state["masks"].items()}


def exact() -> dict[str, Any]:
    ready()
    found = {}
    for name, (case, _) in EXACT.items():
        engine = start(case)
        before = engine._pruning.pruned
        losses = [step[0] for step in train(engine, case)]
        weights = {key: p.detach() for key, p in engine.module.named_parameters()}
        found[name] = {"losses": losses, "weights": weights, "masks": _masks(engine), "before": before}
        engine.destroy()
    return found


def test_equals_masked_dense_training() -> None:
    ranks = launch(exact, 2, timeout=100)
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


SEARCH = {"early_bird": {"interval": 1, "window": 2, "epsilon": 0.5}}


def other_ways(folder: Path) -> dict[str, Any]:
    """Early-bird tickets, mask files, PCCL, parameters that one rank does not use."""
    ready()
    found: dict[str, Any] = {}
    case = Case({"sparsity": 0.8, "pruner": SEARCH, "start_step": 1}, "fp64")
    engine, seen = start(case), []
    losses = train(engine, case, each=lambda: seen.append(engine._pruning.pruned))
    found["search"] = (seen, [step[0][0] for step in losses], _masks(engine))
    engine.destroy()

    masks = samo.magnitude(case.model(), 0.7, "layer")
    if dist.get_rank() == 0:
        samo.write_masks(folder / "masks.safetensors", masks)
    dist.barrier()
    for name, more in (("mask", {}), ("mask and sparsity", {"sparsity": 0.7})):
        engine = start(Case({"pruner": {"mask": str(folder / "masks.safetensors")}} | more))
        found[name] = all(torch.equal(mask, masks[key]) for key, mask in _masks(engine).items())
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
    ranks = launch(other_ways, 2, tmp_path, timeout=100)
    for found in ranks:
        assert found["mask"] and found["mask and sparsity"]
        assert found["pccl"][1] == "pccl"
        assert [step[0] for step in found["pccl"][0]] == [pytest.approx(step[0], rel=1e-5) for step in found["gloo"]]
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


SAVED = {
    "fp32": Case({"sparsity": 0.8}, accumulation=2, clip=0.3, scheduler="config", same=True),
    "bf16 shard": Case({"sparsity": 0.8, "shard": True}, dtype="bf16", same=True),
    "fp16": Case({"sparsity": 0.8}, "fp16", scale=DYNAMIC, optimizer="client", scheduler="client", same=True),
    "search": Case({"sparsity": 0.8, "pruner": SEARCH, "start_step": 1}, same=True),
    "later": Case({"sparsity": 0.8, "start_step": 5}, same=True),
}
AT = 3


def save(folder: Path) -> dict[str, Any]:
    ready()
    found = {}
    for name, case in SAVED.items():
        engine = start(case)
        train(engine, case, range(AT))
        engine.save_checkpoint(str(folder / name), client_state={"note": 7})
        found[name] = train(engine, case, range(AT, STEPS)), _masks(engine), engine._pruning.pruned
        engine.destroy()
    return found


def resume(folder: Path) -> dict[str, Any]:
    ready()
    found: dict[str, Any] = {}
    for name, case in SAVED.items():
        turned = replace(case, block=case.block | {"shard": "shard" not in case.block})
        found[name] = [resumed(folder / name, way) for way in (case, turned)]
    found["weights"] = weights_only(folder)
    return found


def resumed(folder: Path, case: Case) -> Any:
    engine = start(case)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    path, client = engine.load_checkpoint(str(folder))
    assert path is not None and client["note"] == 7 and engine.global_steps == AT
    found = train(engine, case, range(AT, STEPS)), _masks(engine), engine._pruning.pruned
    engine.destroy()
    return found


def weights_only(folder: Path) -> dict[str, Any]:
    """Weights without state; a dense run's checkpoint; damaged masks."""
    found: dict[str, Any] = {}
    case = Case({"sparsity": 0.5}, "bf16", same=True)
    engine = start(case)
    engine.load_checkpoint(str(folder / "bf16 shard"), load_module_only=True)
    masters = engine.optimizer.samo.state_dict()["state"]
    weights = {name: p.detach().float() for name, p in engine.module.named_parameters() if p.requires_grad}
    found["masks"] = _masks(engine)
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
        masks = _masks(engine)
        found[f"from dense {states}"] = all(torch.equal(mask, masks[name]) for name, mask in wanted.items())
        numbers = [name for name, p in engine.module.named_parameters() if p.requires_grad]
        state = engine.optimizer.samo.state_dict()["state"][numbers.index("5.weight")]
        found[f"moments {states}"] = torch.equal(state["exp_avg"], moments) if states else "exp_avg" not in state
    engine.save_checkpoint(str(folder / "broken"), tag="one")
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "broken" / "one" / "axonn_samo.pt").write_bytes(b"no masks")
    dist.barrier()
    with pytest.raises(ConfigError, match="damaged") as caught:
        engine.load_checkpoint(str(folder / "broken"))
    assert one_sentence(str(caught.value))
    assert engine.load_checkpoint(str(folder / "nothing"))[0] is None and engine._pruning.pruned
    engine.destroy()
    return found


def test_a_checkpoint_of_four_ranks_resumes_on_two_sharded_or_not(tmp_path: Path) -> None:
    saved = launch(save, 4, tmp_path, timeout=100)
    assert sorted(os.listdir(tmp_path / "fp32")) == ["global_step3", "latest"]
    for rank in launch(resume, 2, tmp_path, timeout=100):
        for name in SAVED:
            steps, masks, pruned = saved[0][name]
            for ours, our_masks, our_pruned in rank[name]:
                for (losses, _, scale, skipped), wanted in zip(ours, steps, strict=True):
                    assert losses == pytest.approx(wanted[0], rel=1e-2 if "16" in name else 1e-5), name
                    assert (scale, skipped) == (wanted[2], wanted[3]), name
                assert our_pruned is pruned is True, name
                same = [torch.equal(mask, masks[key]) for key, mask in our_masks.items()]
                assert all(same) and len(same) == len(masks), name
        weights = rank["weights"]
        masks = weights.pop("masks")
        assert 1 - sum(m.sum() for m in masks.values()) / sum(m.numel() for m in masks.values()) > 0.75
        assert all(weights.values()), weights


SAMO = {"sparsity": 0.9}
# Name: the block, what the sentence must contain.
BLOCKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no sparsity": ({}, ("axonn.samo.sparsity", "missing", "mask file")),
    "more than all": ({"sparsity": 1.5}, ("axonn.samo.sparsity", "1.5", "0 to 1")),
    "string": ({"sparsity": "0.9"}, ("axonn.samo.sparsity", '"0.9"', "0 to 1")),
    "pruner": (SAMO | {"pruner": "magnitud"}, ("axonn.samo.pruner", "magnitud", "early_bird", "mask")),
    "mask number": (SAMO | {"pruner": {"mask": 3}}, ("axonn.samo.pruner.mask", "3", "string")),
    "two pruners": (SAMO | {"pruner": {"mask": "a", "early_bird": {}}}, ("axonn.samo.pruner", "early_bird")),
    "search key": (SAMO | {"pruner": {"early_bird": {"steps": 3}}}, ("early_bird.steps", "interval")),
    "window": (SAMO | {"pruner": {"early_bird": {"window": 0}}}, ("early_bird.window", "0", "at least 1")),
    "epsilon": (SAMO | {"pruner": {"early_bird": {"epsilon": 0}}}, ("early_bird.epsilon", "0", "above 0")),
    "patterns": (SAMO | {"include": "fc"}, ("axonn.samo.include", '"fc"', "list")),
    "mask and patterns": ({"pruner": {"mask": "a"}, "exclude": ["b"]}, ("axonn.samo.exclude", "mask file", "remove")),
    "start": (SAMO | {"start_step": -1}, ("axonn.samo.start_step", "-1", "at least 0")),
    "shard": (SAMO | {"shard": 1}, ("axonn.samo.shard", "1", "true or false")),
    "scope": (SAMO | {"scope": "all"}, ("axonn.samo.scope", '"all"', "global")),
    "key": (SAMO | {"shards": True}, ("axonn.samo.shards", '"shard"')),
}
# Name: the rest of the configuration, what the sentence must contain.
REST: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    **{
        f"stage {stage}": ({"zero_optimization": {"stage": stage}}, (f"stage = {stage}", '"shard": true'))
        for stage in (1, 2, 3)
    },
    "offload": ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, ("offload_optimizer", "remove")),
    "offload parameters": ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, ("offload_param", "remove")),
    "both halves": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ("fp16.enabled", "bf16.enabled")),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, ("torch_autocast", "bfloat16")),
    "accumulation": ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, ("grad_accum_dtype",)),
    "reduction": ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, ("communication_data_type", "bf16")),
    "1-bit": ({"optimizer": {"type": "OneBitAdam"}}, ("optimizer.type = OneBitAdam", "AdamW")),
    "lamb": ({"optimizer": {"type": "Lamb"}}, ("optimizer.type = Lamb", "AdamW")),
    "lion": ({"optimizer": {"type": "Lion"}}, ("optimizer.type = Lion", "AdamW")),
    "bias": ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, ("bias_correction", "remove")),
    "sparse": ({"sparse_gradients": True}, ("sparse_gradients", "remove")),
    "autotp": ({"tensor_parallel": {"autotp_size": 2}}, ("autotp_size", "remove")),
    "experts": ({"expert_parallel": {"enabled": True}}, ("expert_parallel", "remove")),
    "sequence": ({"sequence_parallel_size": 2}, ("sequence_parallel_size", "remove")),
    "hybrid": ({"hybrid_engine": {"enabled": True}}, ("hybrid_engine", "remove")),
    "compression": ({"compression_training": {"sparse_pruning": {}}}, ("compression_training", "remove")),
    "universal": ({"checkpoint": {"load_universal": True}}, ("load_universal", "remove")),
    "deepcompile": ({"compile": {"deepcompile": True}}, ("deepcompile", "remove")),
    "background": ({"checkpoint": {"writer": {"type": "fast"}}}, ("checkpoint.writer", "remove")),
}


def test_sentences() -> None:
    from plugins.deepspeed.samo_config import check

    found = set()
    for name, (block, said) in BLOCKS.items():
        with pytest.raises(ConfigError) as caught:
            parse({"samo": block})
        found.add(str(caught.value))
        assert one_sentence(str(caught.value)) and all(part in str(caught.value) for part in said), (name, caught.value)
    for name, (raw, said) in REST.items():
        with pytest.raises(ConfigError) as caught:
            check(raw, None)
        found.add(str(caught.value))
        assert one_sentence(str(caught.value)) and all(part in str(caught.value) for part in said), (name, caught.value)
    with pytest.raises(ConfigError, match=r"axonn\.samo and axonn\.tensor_parallel") as caught:
        parse({"samo": SAMO, "tensor_parallel": {}})
    assert one_sentence(str(caught.value)) and len(found) == len(BLOCKS) + len(REST)
    check({"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}}, None)
    parse({"samo": SAMO | {"pruner": "early_bird", "include": ["*"], "start_step": 3}, "pccl": {}})


SCRIPT = """
import torch, deepspeed
from torch import nn
torch.manual_seed(3)
net, samo, more, keywords = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 9)), {'sparsity': 0.9}, {}, {}
CHANGE
config = {'train_micro_batch_size_per_gpu': 2, 'optimizer': {'type': 'Adam'}, 'axonn': {'samo': samo}} | more
keywords = {'model_parameters': net.parameters()} | keywords
engine = deepspeed.initialize(model=net, config={k: v for k, v in config.items() if v}, **keywords)[0]
assert type(engine).__name__ == 'SamoEngine'
for _ in range(2):
    loss = engine(torch.randn(2, 16)).square().mean()
    engine.backward(loss)
    engine.step()
"""
# Name: the line that makes the mistake, on 2 ranks, and what the sentence must contain.
SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stage 2": ("more = {'zero_optimization': {'stage': 2}}", ("stage = 2", "shard")),
    "pipeline": (
        "from deepspeed.pipe import PipelineModule; deepspeed.init_distributed('gloo'); "
        "net = PipelineModule([nn.Linear(4, 4)] * 2, num_stages=2); deepspeed.comm.barrier()",
        ("PipelineModule",),
    ),
    "mpu": ("keywords['mpu'] = type('Mpu', (), {'get_data_parallel_world_size': lambda s: 2})()", ("mpu",)),
    "no optimizer": ("more = {'optimizer': None}", ("no optimizer",)),
    "no file": ("samo['pruner'] = {'mask': 'none.pt'}", ("none.pt", "does not exist")),
    "no match": ("samo['include'] = ['2.weight']", ("2.weight", "no parameter")),
    "nothing left": ("samo['exclude'] = ['*']", ("no parameter to prune",)),
    "not element-wise": (
        "class Lamb(torch.optim.SGD): pass\nkeywords['optimizer'] = Lamb(net.parameters(), lr=0.1)",
        ("Lamb", "AdamW"),
    ),
    "masks of another sparsity": (
        "torch.save({'0.weight': torch.ones(12, 16)}, 'ones.pt'); samo['pruner'] = {'mask': 'ones.pt'}",
        ("sparsity = 0.9", "0.00%"),
    ),
    "": ("", ()),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str, tmp_path: Path) -> None:
    line, said = SCRIPTS[name]
    codes, errors, seconds = fork_script(tmp_path, SCRIPT.replace("CHANGE", line), ranks=2)
    assert seconds < 60
    if not said:
        assert codes == [0, 0], errors
        assert "SAMO: pruned after step 0" in errors[0] and "SAMO" not in errors[1]
        return
    for code, error in zip(codes, errors, strict=True):
        assert code == 1 and "Traceback" not in error, (codes, error)
        (sentence,) = sentences(error)
        assert one_sentence(sentence) and all(part in sentence for part in said), sentence
