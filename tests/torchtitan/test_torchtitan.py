"""torchtitan's Llama 3 debug model on the grid: what its trainer reports, beside one process and beside its own TP and FSDP."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.torchtitan.on_cpu import OURS, trained

# Degrees of torchtitan's tensor parallelism, shards and replicas, and our keys.
GRIDS = {
    "x and z": (2, 2, 1, ""),
    "y and data": (2, 1, 2, '={"gy": 2, "layout": "replicated"}'),
    "x and y": (4, 1, 1, '={"gy": 2}'),
}
ONE = (1, 1, 1, None)
SAVING = ("--checkpoint.enable", "--checkpoint.interval", "2")


def tied(config: Any) -> None:
    """One table for words in and out, the loss of all tokens at once, other recomputation, bf16 where torchtitan has it."""
    from torchtitan.distributed.activation_checkpoint import FullAC
    from torchtitan.models.common.param_init import skip_param_init

    model = config.model_spec.model
    model.enable_weight_tying, model.tok_embeddings.param_init = True, {"weight": skip_param_init}
    config.loss, config.activation_checkpoint = config.loss.loss_fn, FullAC.Config()


def mixed(config: Any) -> None:
    config.training.mixed_precision_param = "bfloat16"


def run(folder: Path, sizes: tuple[int, int, int, str | None], *arguments: str, **more: Any) -> dict[str, Any]:
    tensor, shard, replicate, keys = sizes
    names = ("tensor_parallel", "data_parallel_shard", "data_parallel_replicate")
    degrees = [
        word for name, size in zip(names, sizes, strict=False) for word in (f"--parallelism.{name}_degree", str(size))
    ]
    given = ["--dump_folder", str(folder), "--validator.steps", str(4 // shard // replicate), *degrees, *arguments]
    found = trained(*given, overrides=() if keys is None else (f"{OURS}{keys}",), **more)
    model = found.pop("trainer").model_parts[0]
    found["elements"] = sum(parameter.numel() for parameter in model.parameters())
    return found


def resumed(folder: Path, source: str, sizes: tuple[int, int, int, str | None], *arguments: str) -> dict[str, Any]:
    """From the second step of another run."""
    target = folder / f"{source} {sizes}"
    if dist.get_rank() == 0:
        shutil.copytree(folder / source / "checkpoint" / "step-2", target / "checkpoint" / "step-2")
    dist.barrier()
    return run(target, sizes, *SAVING, *arguments)


def alone(folder: Path) -> dict[str, Any]:
    """One process, which is torchtitan's own but for the last."""
    found = {
        "plain": run(folder / "one", ONE, *SAVING),
        "tied": run(folder / "tied", ONE, change=tied),
        "mixed": run(folder / "mixed", ONE, change=mixed),
        "ours": run(folder / "ours", (1, 1, 1, "")),
    }
    return found


def split(folder: Path) -> dict[str, Any]:
    saving = {"x and z": SAVING}
    found = {n: attempt(partial(run, folder / n, sizes, *saving.get(n, ()))) for n, sizes in GRIDS.items()}
    found["tied"] = attempt(partial(run, folder / "tied 4", GRIDS["x and y"], change=tied))
    found["mixed"] = attempt(partial(run, folder / "mixed 4", GRIDS["x and z"], change=mixed))
    found["resumed"] = attempt(partial(resumed, folder, "one", GRIDS["y and data"]))
    # spmd_types of torchtitan's asks for a newer torch than its releases name.
    theirs = ("--parallelism.spmd_backend", "partial_dtensor")
    found["theirs resumed"] = attempt(partial(resumed, folder, "x and z", (2, 2, 1, None), *theirs))
    return found


def one_again(folder: Path) -> dict[str, Any]:
    return resumed(folder, "x and z", ONE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return run_ranks(alone, 1, folder)[0]


@pytest.fixture(scope="module")
def four(folder: Path, one: dict[str, Any]) -> list[dict[str, Any]]:
    return run_ranks(split, 4, folder)


def close(found: Any, wanted: dict[str, Any], name: str, rel: float = 2e-4) -> None:
    """Steps that a run made: number, mean loss, norm of the gradient; and what it validated."""
    assert isinstance(found, dict), (name, found)
    steps, validated = {step[0]: step for step in wanted["steps"]}, dict(wanted["validated"])
    for step, loss, _, norm, _ in found["steps"]:
        assert loss == pytest.approx(steps[step][1], rel=rel), name
        assert norm == pytest.approx(steps[step][3], rel=rel), name
    assert dict(found["validated"]) == pytest.approx(
        {step: validated[step] for step, _ in found["validated"]}, rel=rel
    ), name


def test_a_run_is_that_of_one_process(one: dict[str, Any], four: list[dict[str, Any]]) -> None:
    assert len(one["plain"]["steps"]) == 3 and len(one["plain"]["validated"]) == 2
    close(one["ours"], one["plain"], "ours")
    for rank in four:
        for name in GRIDS:
            close(rank[name], one["ours"], name, 2e-6)
            assert [step[4] for step in rank[name]["steps"]] == [128, 256, 384] and len(rank[name]["validated"]) == 2
            assert rank[name]["elements"] < 0.6 * one["plain"]["elements"], name
        close(rank["tied"], one["tied"], "tied")
        close(rank["mixed"], one["mixed"], "mixed", 2e-2)
        assert rank["tied"]["steps"] != rank["x and y"]["steps"] and rank["mixed"]["steps"] != rank["x and z"]["steps"]


def test_checkpoints_are_torchtitans(folder: Path, one: dict[str, Any], four: list[dict[str, Any]]) -> None:
    for name in ("resumed", "theirs resumed"):
        for rank in four:
            close(rank[name], one["plain"], name)
            assert [step[0] for step in rank[name]["steps"]] == [3]
    back = run_ranks(one_again, 1, folder)[0]
    close(back, one["plain"], "one process")
    assert len(back["steps"]) == 1


REFUSED = {
    "gy = 2 does not divide": ("", '={"gy": 2}'),
    "is torchtitan's --parallelism.data_parallel_shard_degree": ("", '={"gz": 2}'),
    "layuot": ("", '={"layuot": "replicated"}'),
    "CUDA graphs": ("--training.no-disable_cuda_graphs", ""),
    "compile.components": ("--compile.enable", ""),
}


def refused() -> dict[str, str]:
    found = {}
    for words, (argument, keys) in REFUSED.items():
        found[words] = str(attempt(partial(trained, *filter(None, [argument]), overrides=(f"{OURS}{keys}",))))
    return found


def test_what_cannot_be_is_said() -> None:
    for words, said in run_ranks(refused, 1)[0].items():
        message = said.strip().splitlines()[-1]
        assert words in message and one_sentence(message), (words, said)


def test_the_next_run_is_torchtitans_own(one: dict[str, Any]) -> None:
    from torchtitan.protocols.model_spec import ModelSpec

    assert not hasattr(ModelSpec, "parallelize_fn")
    assert torch.isfinite(torch.tensor(one["plain"]["steps"])).all()
