"""DeepSpeed's collectives by pccl: from the block and from dist_backend, with the losses of stock gloo."""

from __future__ import annotations

import copy
import os
from dataclasses import replace
from typing import Any

import pytest

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.utils import groups  # noqa: E402

from axonn_plugins.autoload import activate  # noqa: E402
from axonn_plugins.cluster.launch import launch  # noqa: E402
from axonn_plugins.config import ConfigError  # noqa: E402
from axonn_plugins.pccl.build import load  # noqa: E402
from tests.matrix import thorough  # noqa: E402

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


def train(stage: int, block: dict[str, Any] | None, bucket: int = 500, **extra: Any) -> dict[str, Any]:
    """Losses of every rank's own batches, and who did the collectives."""
    zero = {"stage": stage, "reduce_bucket_size": bucket, "allgather_bucket_size": bucket}
    if stage == 3:
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": bucket}
    config: dict[str, Any] = copy.deepcopy(CONFIG) | {"zero_optimization": zero}
    if stage == 1:
        config["bf16"] = {"enabled": True}
    config |= extra
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
    for rank in launch(_stages, RANKS):
        for stage, (before, ours, between, again) in rank["runs"].items():
            assert [run["world"] for run in (before, ours, between, again)] == ["gloo", "pccl"] * 2, stage
            assert [run["data"] for run in (before, ours, between, again)] == ["gloo", "pccl"] * 2, stage
            assert before["losses"] == between["losses"] and ours["losses"] == again["losses"]
            assert ours["losses"] == pytest.approx(before["losses"], rel=1e-2 if stage == 1 else 2e-6)


def _logged() -> dict[str, Any]:
    """Counts of DeepSpeed's comms_logger, by side and by stage: size → calls of each operation."""
    from deepspeed import comm

    deepspeed.init_distributed(dist_backend="gloo")
    found: dict[str, Any] = {}
    for side, block in (("gloo", None), ("pccl", BLOCK)):
        for stage in range(4):
            comm.reset_log()
            # What goes into one of several buckets depends on the order in which gradients become ready.
            run = train(stage, block, bucket=10**5, comms_logger={"enabled": True, "prof_all": True})
            assert run["world"] == run["data"] == side
            counted = comm.log_summary(show_straggler=True, return_dict=True)["summary"]
            found[f"{side} {stage}"] = {
                op: {size: entry["count"] for size, entry in sizes.items()} for op, sizes in counted.items()
            }
    return found


def test_comms_logger_counts_what_it_counts_with_gloo() -> None:
    for found in launch(_logged, 2):
        for stage in range(4):
            ours, theirs = found[f"pccl {stage}"], found[f"gloo {stage}"]
            assert ours == theirs and sum(sum(sizes.values()) for sizes in ours.values()) > STEPS, (ours, theirs)
        assert {"all_gather_into_tensor", "reduce_scatter_tensor"} <= set(found["pccl 3"])
        assert "all_reduce" in found["pccl 0"]


def _dist_backend() -> dict[str, Any]:
    deepspeed.init_distributed(dist_backend="pccl")
    return train(3, None)


def test_dist_backend() -> None:
    for found in launch(_dist_backend, 2):
        assert found["world"] == found["data"] == "pccl"


def _cases(every: bool) -> dict[str, Any]:
    from tests.deepspeed.test_engine import GPT_PLAN, gpt, ids
    from tests.deepspeed.training import Case

    found = {
        "fp64": Case(gpt, ids, (2, 1, 2), GPT_PLAN, 0, "fp64"),
        "fp32 zero 1": Case(gpt, ids, (2, 1, 1), GPT_PLAN, 1),
        "fp32 zero 2": Case(gpt, ids, (1, 2, 2), GPT_PLAN, 2),
        "bf16 zero 2": Case(gpt, ids, (1, 1, 2), GPT_PLAN, 2, "bf16"),
    }
    return found if every else {name: found[name] for name in ("fp32 zero 2",)}


def _with_tensor_parallel(every: bool) -> dict[str, Any]:
    """Every case with the block's tensor_parallel alone and then with pccl beside it, and who did the collectives."""
    from axonn_plugins.hosts.deepspeed import engine as ours
    from tests.deepspeed.training import config_of, start
    from tests.deepspeed.training import train as train_case

    deepspeed.init_distributed(dist_backend="gloo")
    found: dict[str, Any] = {}
    for name, case in _cases(every).items():
        both = config_of(case)["axonn"] | {"pccl": BLOCK}
        for side, told in (("gloo", case), ("pccl", replace(case, extra={"axonn": both}))):
            if hasattr(ours.Mesh, "cache_clear"):
                ours.Mesh.cache_clear()  # its groups are the other side's
            engine = start(told)
            axes = ("x", "y", "z", "data", "batch", "model", "tokens")
            backends = [backend(engine.mesh.group(axis)) for axis in axes]
            backends += [backend(), backend(engine.data_parallel_group)]
            found[name, side] = train_case(engine, case.batches()) | {"backends": backends}
            engine.destroy()
    return found


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_with_tensor_parallel_all_groups_are_pccls_and_losses_are_the_same(every: bool) -> None:
    from tests.deepspeed.test_engine import TOLERANCE
    from tests.deepspeed.training import serial

    ranks = launch(_with_tensor_parallel, 4, (every,))
    for name, case in _cases(every).items():
        wanted = serial(case)
        for rank in ranks:
            theirs, ours = rank[name, "gloo"], rank[name, "pccl"]
            assert set(theirs["backends"]) == {"gloo"} and set(ours["backends"]) == {"pccl"}, name
            for what in ("losses", "norms"):
                assert ours[what] == pytest.approx(theirs[what], rel=TOLERANCE[case.dtype]), name
                assert ours[what] == pytest.approx(wanted[what], rel=4 * TOLERANCE[case.dtype]), name
