"""ZeRO-1 and 2 in tiles beside DeepSpeed's own step: the same bits, the same files, one tile of memory."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from torch import nn

from axonn_plugins.config import ConfigError, parse
from axonn_plugins.hosts.deepspeed.optim.tiled_zero import TiledZeroOptimizer
from axonn_plugins.optim.flat import TILE as USUAL
from axonn_plugins.optim.flat import FlatOptimizer
from axonn_recipes.allocations import most_allocated
from tests.deepspeed.training import attempt, two_groups
from tests.distributed import run_ranks
from tests.matrix import asked, chosen, names, thorough

ACCUMULATION = 2
HALVES = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "loss_scale": 128.0}},
    "overflows": {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 2, "hysteresis": 1}},
    "bf16 sums in fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
}


class Model(nn.Module):
    """Sizes that nothing divides, and a parameter that no gradient reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(13, 61), nn.GELU(), nn.LayerNorm(61), nn.Linear(61, 37), nn.Linear(37, 5))
        self.unused = nn.Linear(3, 5)

    def forward(self, rows: Any, targets: Any) -> Any:
        return nn.functional.mse_loss(self.layers(rows).float(), targets.float())


class Experts(nn.Module):
    """A mixture whose experts are on different ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(13, 16)
        expert = nn.Sequential(nn.Linear(16, 45), nn.ReLU(), nn.Linear(45, 16))
        self.moe = MoE(16, expert, num_experts=4, ep_size=2, k=1, use_rts=False)
        self.last = nn.Linear(16, 5)

    def forward(self, rows: Any, targets: Any) -> Any:
        mixed, auxiliary, _ = self.moe(self.first(rows))
        return nn.functional.mse_loss(self.last(mixed).float(), targets.float()) + 0.01 * auxiliary.float()


def configuration(stage: int, half: str, tile: int | None, clip: float = 0.0, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 6,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": clip,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**4, "allgather_bucket_size": 10**4},
    }
    config |= HALVES[half] | more
    return config if tile is None else config | {"axonn": {"ted": {"tile_size": tile or None}}}


def start(config: dict[str, Any], groups: Any = two_groups, build: Any = Model) -> Any:
    import axonn_plugins

    axonn_plugins.activate()
    type(get_accelerator()).is_fp16_supported = lambda self: True
    torch.manual_seed(3)
    model = build()
    return deepspeed.initialize(model=model, model_parameters=groups(model), config=config)[0]


def train(engine: Any, steps: int, seed: int = 5) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed + dist.get_rank())
    found: dict[str, Any] = {"losses": [], "norms": [], "overflows": []}
    dtype = next(engine.module.parameters()).dtype
    for _ in range(steps):
        for _ in range(ACCUMULATION):
            rows, targets = (torch.randn(6, size, generator=generator) for size in (13, 5))
            loss = engine(rows.to(dtype), targets)
            engine.backward(loss)
            engine.step()
            found["losses"].append(loss.item())
        found["norms"].append(float(engine.get_global_grad_norm()))
        found["overflows"].append(engine.optimizer.overflow)
    found["weights"] = [p.detach().clone() for p in engine.module.parameters()]
    optimizer = engine.optimizer
    if isinstance(optimizer, FlatOptimizer):
        states = optimizer.state_dict()["state"]
        found["masters"] = [state["master"] for state in states.values() if "master" in state]
        found["state"], found["class"] = states, "stock" if optimizer.tile_size == USUAL else "tiled"
        return found
    found["masters"] = [p.detach().clone() for p in optimizer.single_partition_of_fp32_groups]
    found["state"] = copy.deepcopy(optimizer.optimizer.state_dict())
    found["class"] = "tiled" if isinstance(optimizer, TiledZeroOptimizer) else "stock"
    return found


def same(ours: Any, theirs: Any, path: str = "") -> list[str]:
    """Where two nests of tensors and numbers differ."""
    if isinstance(ours, torch.Tensor):
        return [] if ours.dtype == theirs.dtype and torch.equal(ours, theirs) else [path]
    if isinstance(ours, dict):
        if ours.keys() != theirs.keys():
            return [f"{path}: {sorted(map(str, ours))} and {sorted(map(str, theirs))}"]
        return [place for key in ours for place in same(ours[key], theirs[key], f"{path}.{key}")]
    if isinstance(ours, (list, tuple)):
        if len(ours) != len(theirs):
            return [f"{path}: {len(ours)} and {len(theirs)}"]
        return [place for n, (a, b) in enumerate(zip(ours, theirs, strict=True)) for place in same(a, b, f"{path}.{n}")]
    if hasattr(ours, "__dict__"):
        return same(vars(ours), vars(theirs), path)
    return [] if ours == theirs else [f"{path}: {ours} and {theirs}"]


def beside_stock(stage: int, half: str, tile: int, clip: float, groups: Any, build: Any) -> dict[str, Any]:
    # With experts the engine is TED's, tiled or not.
    sizes = (tile, 0 if build is Experts else None)
    runs = [train(start(configuration(stage, half, size, clip), groups, build), 5) for size in sizes]
    classes = [run.pop("class") for run in runs]
    if build is Experts:  # whose norms are sums of tiles'
        ours, theirs = (run.pop("norms") for run in runs)
        assert ours == pytest.approx(theirs, rel=1e-7)
    return {"classes": classes, "differ": same(*runs), "runs": runs}


def moe_groups(model: nn.Module) -> Any:
    return split_params_into_different_moe_groups_for_optimizer(
        [{"params": list(model.parameters()), "name": "all", "lr": 1e-2}]
    )


def one_group(model: nn.Module) -> Any:
    return list(model.parameters())


# The largest gradient has 2257 elements.
CASES = {
    f"ZeRO-{stage} {half} {what}": (stage, half, tile, clip, groups, Model)
    for stage in (1, 2)
    for half in HALVES
    for what, tile, clip, groups in (("clipped", 2300, 0.3, two_groups), ("small tiles", 300, 0.3, one_group))
    if (half != "fp32" or what == "clipped") and (stage, half) != (1, "bf16 sums in fp32")
}
EVERY_RUN = {
    "ZeRO-1 fp32 clipped",
    "ZeRO-1 fp16 small tiles",
    "ZeRO-2 bf16 small tiles",
    "ZeRO-2 overflows clipped",
    "ZeRO-2 bf16 sums in fp32 clipped",
}
assert EVERY_RUN <= CASES.keys()


def checkpoints(stage: int, half: str, folder: str) -> list[str]:
    """Saved by one, loaded by the other, trained on."""
    differ = []
    saved = {}
    for name, tile in (("ours", 300), ("stock", None)):
        engine = start(configuration(stage, half, tile))
        train(engine, 3)
        engine.save_checkpoint(f"{folder}/{name}", tag="3")
        saved[name] = train(engine, 3, seed=9)
    dist.barrier()
    if dist.get_rank() == 0:
        for path in sorted(Path(folder, "stock", "3").glob("*.pt")):
            ours, stock = (
                torch.load(Path(folder, name, "3", path.name), weights_only=False) for name in ("ours", "stock")
            )
            differ += same(
                {k: v for k, v in ours.items() if k != "ds_config"},
                {k: v for k, v in stock.items() if k != "ds_config"},
            )
    for name, tile in (("stock", 300), ("ours", None)):
        engine = start(configuration(stage, half, tile))
        engine.load_checkpoint(f"{folder}/{name}", tag="3")
        resumed = train(engine, 3, seed=9)
        differ += same({**resumed, "class": ""}, {**saved[name], "class": ""}, f"resumed from {name}")
    return differ


SIDE = 400


class Large(nn.Module):
    """A few large layers."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(SIDE, SIDE) for _ in range(layers)))

    def forward(self, rows: Any) -> Any:
        return self.layers(rows).float().square().mean()


def peaks(tile: int | None, layers: int, stage: int, half: str, clip: float) -> list[int]:
    config = configuration(stage, half, tile, clip, gradient_accumulation_steps=1)
    engine = start(config, one_group, lambda: Large(layers))
    found = []
    for _ in range(3):
        engine.backward(engine(torch.randn(6, SIDE, dtype=next(engine.module.parameters()).dtype)))
        found.append(most_allocated(engine.step))
    return found[1:]


def on_two_ranks(folder: str, cases: dict[str, Any], stages: list[int]) -> dict[str, Any]:
    found = {name: attempt(beside_stock, *case) for name, case in cases.items()}
    for stage, half in ((1, "bf16"), (2, "fp16")):
        if stage not in stages:
            continue
        found[f"checkpoints {stage}"] = attempt(checkpoints, stage, half, f"{folder}/{stage}")
    return found


TILE = 2**15


def by_value(function: Any, *arguments: Any) -> bytes:
    """Results of a rank, with its tensors' contents: handles end with the rank."""
    return pickle.dumps(function(*arguments))


def gathered(function: Any, ranks: int, *arguments: Any) -> list[Any]:
    return [pickle.loads(found) for found in run_ranks(by_value, ranks, function, *arguments)]


@pytest.fixture(scope="module")
def two_ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    stages = [stage for (stage,) in asked(request, "stage") if stage]
    return gathered(on_two_ranks, 2, str(tmp_path_factory.mktemp("checkpoints")), chosen(request, CASES), stages)


def check(found: Any) -> None:
    assert not isinstance(found, str), found
    assert found["classes"] == ["tiled", "stock"]
    assert not found["differ"]


@pytest.mark.parametrize("name", names(CASES, EVERY_RUN))
def test_the_bits_of_stock(name: str, two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        check(rank[name])
        if "overflows" in name:
            skipped = rank[name]["runs"][0]["overflows"]
            assert any(skipped) and not all(skipped)


@pytest.mark.parametrize("stage", [thorough(1), 2])
def test_checkpoints_go_both_ways(stage: int, two_ranks: list[dict[str, Any]]) -> None:
    for rank in two_ranks:
        assert rank[f"checkpoints {stage}"] == []


MIXTURES = {
    f"experts ZeRO-{stage} {half}": (stage, half, tile, clip, moe_groups, Experts)
    for stage, half, tile, clip in ((1, "bf16", 1500, 0.3), (2, "bf16", 100, 0.3), (1, "fp16", 1500, 0.3))
}


def on_four_ranks(mixtures: list[str]) -> dict[str, Any]:
    return {name: attempt(beside_stock, *MIXTURES[name]) for name in mixtures}


@pytest.mark.parametrize("mixtures", [["experts ZeRO-2 bf16"], thorough([*MIXTURES])], ids=["one", "all"])
def test_experts(mixtures: list[str]) -> None:
    for rank in gathered(on_four_ranks, 4, mixtures):
        for name in mixtures:
            check(rank[name])
            assert len(rank[name]["runs"][0]["state"]) > 1


def refused() -> dict[str, str]:
    found = {}
    zero = {"stage": 1, "reduce_bucket_size": 10**4}
    for name, more in {
        "stage = 0": {"zero_optimization": {"stage": 0}},
        "stage = 3": {"zero_optimization": {"stage": 3}},
        "offload_optimizer": {"zero_optimization": {**zero, "offload_optimizer": {"device": "cpu"}}},
        "optimizer.type = Lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 1e-2}}},
        "float16": {"torch_autocast": {"enabled": True, "dtype": "float16"}},
        "grad_accum_dtype = fp32": {"data_types": {"grad_accum_dtype": "fp32"}},
        "deepcompile": {"compile": {"deepcompile": True}},
    }.items():
        with pytest.raises(ConfigError) as error:
            start(configuration(1, "bf16", None, **({"axonn": {"ted": {"tile_size": 100}}} | more)))
        found[name] = str(error.value)
    return found


def by_default() -> list[str]:
    """The optimizers' classes with an empty block, with tiles turned off, without a block, and where tiles do not go with the rest."""
    sums = {"data_types": {"grad_accum_dtype": "fp32"}, "zero_optimization": {"stage": 1}}
    blocks: list[Any] = [
        {"axonn": {"ted": {}}},
        {"axonn": {"ted": {"tile_size": None}}},
        {},
        {"axonn": {"ted": {}}} | sums,
    ]
    return [type(start(configuration(1, "bf16", None, **block)).optimizer).__name__ for block in blocks]


MEMORY = {
    "2 layers": (2, 1, "bf16", 0.0),
    "5 layers": (5, 1, "bf16", 0.0),
    "clipped": (2, 2, "fp16", 0.1),
    "fp32": (2, 1, "fp32", 0.1),
}


def on_one_rank(measured: list[str]) -> Any:
    """Memory is measured here, as what gloo allocates to gather weights is not the update's."""
    memory = {
        name: [attempt(peaks, tile, *how) for tile in (TILE, None)] for name in measured for how in [MEMORY[name]]
    }
    return refused(), by_default(), memory


@pytest.fixture(scope="module")
def one_rank(request: pytest.FixtureRequest) -> Any:
    return gathered(on_one_rank, 1, sorted(name for (name,) in asked(request, "measured") if name))[0]


@pytest.mark.parametrize("measured", names(MEMORY, ("5 layers", "clipped")))
def test_memory_of_a_step(measured: str, one_rank: Any) -> None:
    ours, stock = one_rank[2][measured]
    assert not isinstance(ours, str) and not isinstance(stock, str), (ours, stock)
    assert max(ours) <= 4 * TILE + 2**20
    assert min(stock) > 4 * 2 * SIDE * SIDE


def test_the_block(one_rank: Any) -> None:
    sentences, classes, _ = one_rank
    for name, sentence in sentences.items():
        assert sentence.startswith("axonn.ted.tile_size = ") and name in sentence
    assert classes[:3] == ["TiledZeroOptimizer", "DeepSpeedZeroOptimizer", "DeepSpeedZeroOptimizer"]
    assert classes[3] != classes[0]
    for block, words in {
        '{"tile": 3}': ("axonn.ted.tile is not a key", '"tile_size"'),
        '{"tile_size": 0}': ("axonn.ted.tile_size = 0", "at least 1"),
    }.items():
        with pytest.raises(ConfigError) as error:
            parse({"ted": json.loads(block)})
        assert all(word in str(error.value) for word in words)
