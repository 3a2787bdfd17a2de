"""DeepSpeed's collectives by pccl: from the block and from dist_backend, with the losses of stock gloo."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import groups  # noqa: E402

from plugins.autoload import activate  # noqa: E402
from plugins.config import ConfigError  # noqa: E402
from plugins.launch import launch  # noqa: E402
from plugins.pccl.build import load  # noqa: E402

RANKS, STEPS = 3, 4
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}


@pytest.fixture(scope="module", autouse=True)
def ready() -> None:
    """Compiled before ranks are forked, whose time is limited."""
    load()
    activate()


def backend(group: Any = None) -> str:
    """Who does the collectives of CPU tensors."""
    return str((group or dist.group.WORLD)._get_backend(torch.device("cpu")).name())


def train(stage: int, block: dict[str, Any] | None) -> dict[str, Any]:
    """Losses of every rank's own batches, and who did the collectives."""
    zero = {"stage": stage, "reduce_bucket_size": 500, "allgather_bucket_size": 500}
    if stage == 3:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 500}
    config: dict[str, Any] = copy.deepcopy(CONFIG) | {"zero_optimization": zero}
    if stage == 1:
        config["bf16"] = {"enabled": True}
    if block is not None:
        config["axonn"] = {"pccl": block}
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(11, 32), torch.nn.Tanh(), torch.nn.Linear(32, 7))
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(STEPS):
        x = torch.randn(4, 11, generator=generator).to(torch.bfloat16 if stage == 1 else torch.float32)
        loss = engine(x).float().square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    found = {"losses": losses, "world": backend(), "data": backend(engine.data_parallel_group)}
    engine.destroy()
    return found


BLOCK = {"algorithm": "hierarchical", "ranks_per_node": 2}


def _stages() -> dict[str, Any]:
    deepspeed.init_distributed(dist_backend="gloo")
    runs = {}
    for stage in range(4):
        runs[stage] = [train(stage, block) for block in (None, BLOCK, None, BLOCK)]
    with pytest.raises(ConfigError, match="choose the options once"):
        train(0, {"algorithm": "ring"})
    return {"runs": runs, "clone": backend(groups._clone_world_group())}


def test_losses_are_those_of_stock_at_every_stage_and_engines_may_alternate() -> None:
    for rank in launch(_stages, RANKS, timeout=150):
        for stage, (before, ours, between, again) in rank["runs"].items():
            assert [run["world"] for run in (before, ours, between, again)] == ["gloo", "pccl"] * 2, stage
            assert [run["data"] for run in (before, ours, between, again)] == ["gloo", "pccl"] * 2, stage
            assert before["losses"] == between["losses"] and ours["losses"] == again["losses"]
            assert ours["losses"] == pytest.approx(before["losses"], rel=1e-2 if stage == 1 else 1e-5)


def _logged() -> Any:
    from deepspeed import comm

    deepspeed.init_distributed(dist_backend="pccl")
    comm.configure(enabled=True, prof_all=True)
    found = train(3, None)
    seen = {name: sum(size[0] for size in sizes.values()) for name, sizes in comm.comm.comms_logger.comms_dict.items()}
    return found, seen


def test_dist_backend_and_the_comms_logger() -> None:
    for found, seen in launch(_logged, 2, timeout=100):
        assert found["world"] == found["data"] == "pccl"
        assert {"all_gather_into_tensor", "all_reduce"} & set(seen) and sum(seen.values()) > STEPS, seen


def _tensor_parallel() -> dict[str, Any]:
    from tests.deepspeed.test_engine import GPT_PLAN, gpt, ids
    from tests.deepspeed.training import Case, config_of, serial, start
    from tests.deepspeed.training import train as train_case

    deepspeed.init_distributed(dist_backend="cpu:pccl")
    case = Case(gpt, ids, grid=(2, 1, 2), dtype="fp64", plan=GPT_PLAN)
    engine = start(case)
    assert engine.config["axonn"] == config_of(case)["axonn"]
    return {
        "found": train_case(engine, case.batches()),
        "wanted": serial(case),
        "backends": {axis: backend(engine.mesh.group(axis)) for axis in ("x", "z", "batch")},
    }


def test_a_gpt_in_3d_equals_the_serial_one() -> None:
    for rank in launch(_tensor_parallel, 4, timeout=150):
        assert set(rank["backends"].values()) == {"pccl"}
        for what in ("losses", "norms"):
            assert rank["found"][what] == pytest.approx(rank["wanted"][what], rel=1e-10)
