"""The sides of the benchmark: one model, one batch, one optimizer, trained in 3D PMM or as its peers do."""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import axonn_tp
import samo
from axonn_recipes.bench_tp.settings import Settings
from axonn_recipes.models.gpt import GPT
from axonn_tp import Grid, Mesh
from axonn_tp.comm.gradients import sum_ranks

LEARNING_RATE = 1e-3
# Peers that check what they communicate, and so cannot run without.
NEED_COMMUNICATION = ("zero3",)
Step = Callable[[], Tensor]


def device() -> torch.device:
    """This rank's device."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def absent(peer: str) -> str | None:
    """Why a peer cannot be measured here, or None."""
    if peer == "zero3" and importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed"
    return None


def build(peer: str, settings: Settings) -> Step:
    """A peer's training step; it returns this rank's loss, whose mean over all ranks is the batch's."""
    return {
        "ddp": _ddp,
        "fsdp2": lambda chosen: _fsdp(chosen, _ranks(chosen), reshard=True),
        "fsdp2-keep": lambda chosen: _fsdp(chosen, _ranks(chosen), reshard=False),
        "fsdp2+tp": _fsdp_with_tensor,
        "hsdp": lambda chosen: _fsdp(chosen, _nodes(chosen), reshard=True),
        "tp": _tensor,
        "zero3": _zero3,
    }[peer](settings)


def ours(
    settings: Settings, grid: Grid, options: Mapping[str, object], mesh: Mesh | None = None, stage: int = 0
) -> Step:
    """The training step of 3D PMM on a grid.

    Args:
        settings: the run.
        grid: the grid.
        options: of `axonn_tp.Options`, for the overlap stages.
        mesh: of this grid, where there is one already.
        stage: of ZeRO over the ranks that sum gradients.
    """
    model, batch = _model(settings), _batch(settings)
    mesh = mesh or Mesh(grid, device().type)
    axonn_tp.parallelize(model, mesh, settings.trained.plan(settings), axonn_tp.Options(**options))  # type: ignore[arg-type]
    share = [mesh.shard_batch(tensor) for tensor in batch]
    if stage:
        return _in_shares(model, share, mesh, stage)
    return step_of(model, share, axonn_tp.GradientReducer(model.parameters(), mesh).finish)


def _in_shares(model: nn.Module, batch: list[Tensor], mesh: Mesh, stage: int) -> Step:
    """A step at a stage of ZeRO; at stage 1 updated weights are gathered while the next forward pass runs."""
    optimizer = samo.Optimizer(
        lambda groups: torch.optim.AdamW(groups, lr=LEARNING_RATE, foreach=True),
        model,
        group=lambda parameter: sum_ranks(parameter, mesh),
        stage=stage,
        mesh=mesh,
        gather_ahead=stage == 1,
    )

    def step() -> Tensor:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _model(settings: Settings) -> Any:
    torch.manual_seed(settings.seed)
    return settings.trained.build(settings).to(device(), getattr(torch, settings.dtype))


def _batch(settings: Settings, part: int = 0, parts: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(settings.seed)
    return [tensor.to(device()).chunk(parts)[part] for tensor in settings.trained.batch(settings, generator)]


def step_of(model: nn.Module, batch: list[Tensor], after_backward: Callable[[], None] = lambda: None) -> Step:
    """A step of AdamW on a batch; its loss."""
    # Fused lists of tensors must be of one kind and mesh, so each has its own group.
    alike: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        alike[parameter.device_mesh if isinstance(parameter, DTensor) else None].append(parameter)
    groups = [{"params": parameters} for parameters in alike.values()]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, foreach=True)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = model(*batch)
        loss.backward()
        after_backward()
        optimizer.step()
        return loss.detach()

    return step


def _ranks(settings: Settings) -> DeviceMesh:
    return init_device_mesh(device().type, (settings.ranks,))


def _nodes(settings: Settings) -> DeviceMesh:
    return init_device_mesh(
        device().type, (settings.nodes, settings.ranks_per_node), mesh_dim_names=("across", "within")
    )


def _ddp(settings: Settings) -> Step:
    model: nn.Module = _model(settings)
    if dist.get_backend() != "fake":  # torch's stand-in for communication cannot serve DDP's reducer
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return step_of(model, _batch(settings, dist.get_rank(), settings.ranks))


def _sharded(settings: Settings, model: nn.Module, mesh: DeviceMesh, reshard: bool) -> nn.Module:
    for block in settings.trained.blocks(model):
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model


def _fsdp(settings: Settings, mesh: DeviceMesh, reshard: bool) -> Step:
    return step_of(
        _sharded(settings, _model(settings), mesh, reshard), _batch(settings, dist.get_rank(), settings.ranks)
    )


def _fsdp_with_tensor(settings: Settings) -> Step:
    mesh = _nodes(settings)
    model = _split(_model(settings), mesh["within"])
    across = mesh["across"]
    return step_of(_sharded(settings, model, across, True), _batch(settings, across.get_local_rank(), settings.nodes))


def _tensor(settings: Settings) -> Step:
    return step_of(_split(_model(settings), _ranks(settings)), _batch(settings))


def _split(model: GPT, mesh: DeviceMesh) -> GPT:
    """Column and row parallelism by DTensor, in pairs; embeddings and norms stay whole."""
    for block in model.blocks:
        _interleave(block.attention.qkv, mesh.size())  # type: ignore[union-attr, arg-type]
        pairs = {"attention.qkv": "attention.proj", "fc1": "fc2"}
        styles = {name: ColwiseParallel() for name in pairs} | {name: RowwiseParallel() for name in pairs.values()}
        parallelize_module(block, mesh, styles)  # type: ignore[arg-type]
    return parallelize_module(model, mesh, {"head": ColwiseParallel(output_layouts=Replicate())})  # type: ignore[return-value]


@torch.no_grad()
def _interleave(qkv: nn.Linear, parts: int) -> None:
    """Reorder a fused q, k, v so that each of `parts` consecutive shares of its rows has a q, a k and a v."""
    for parameter in (qkv.weight, qkv.bias):
        parameter.copy_(parameter.unflatten(0, (3, parts, -1)).transpose(0, 1).flatten(0, 2))


def _zero3(settings: Settings) -> Step:
    import deepspeed

    # On CPU DeepSpeed compiles a kernel for inference when it starts; training needs neither it nor a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = _model(settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=True)
    config = {
        "train_batch_size": settings.batch,
        "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,  # which newer DeepSpeed does unasked, and no other side here
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batch = _batch(settings, dist.get_rank(), settings.ranks)

    def step() -> Tensor:
        loss = engine(*batch)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
