"""Parameters of split layers as Megatron's gradient buffers, optimizers and norms want them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch import Tensor, nn

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.expert_groups import Blocks, blocks_of
from axonn_tp.comm.collectives import start_all_reduce_
from axonn_tp.comm.replicated import send_first
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import Mesh


def new_weight(layout: Layout, mesh: Mesh, config: Any, init_method: Callable[[Tensor], Any], dim: int) -> nn.Parameter:
    """A matrix's shard with Megatron's initial values.

    With ``use_cpu_initialization`` every rank draws the whole matrix and cuts its shard, as Megatron does, so the values
    are those of one rank with the same seed. Otherwise a rank draws its (x, y) block on its device.

    Args:
        layout: of the weight.
        mesh: the mesh.
        config: Megatron's.
        init_method: fills a matrix in place.
        dim: the dim that Megatron would split.
    """
    with torch.no_grad():
        shard = _drawn(layout, mesh, config, init_method)
    parameter = nn.Parameter(_as_matrix(shard, layout.block_shape(mesh.grid)))
    mark(parameter, layout, mesh, dim, layout.parts)
    return parameter


def _drawn(layout: Layout, mesh: Mesh, config: Any, init_method: Callable[[Tensor], Any]) -> Tensor:
    grid, at = mesh.grid, mesh.coordinates
    if config.use_cpu_initialization and config.perform_initialization:
        whole = torch.empty(layout.shape, dtype=torch.float32)
        init_method(whole)
        return layout.shard(whole.to(config.params_dtype), grid, at)
    device = "cpu" if config.use_cpu_initialization else mesh.device
    block = torch.empty(layout.block_shape(grid), dtype=config.params_dtype, device=device)
    if config.perform_initialization:
        with get_cuda_rng_tracker().fork():
            init_method(block)
    return Layout(tuple(block.shape), over_z=True).shard(block, grid, at)


def new_bias(layout: Layout, mesh: Mesh, config: Any) -> nn.Parameter:
    """A bias' share, zero."""
    device = "cpu" if config.use_cpu_initialization else mesh.device
    bias = nn.Parameter(torch.zeros(layout.block_shape(mesh.grid), dtype=config.params_dtype, device=device))
    mark(bias, layout, mesh, 0)
    return bias


def _as_matrix(shard: Tensor, block: tuple[int, ...]) -> Tensor:
    """A flat z-shard with two dims again: Megatron takes what has one for a bias, and lets it not decay."""
    rows, columns = block
    return shard.view(-1, columns) if shard.numel() % columns == 0 else shard.view(1, -1)


def mark(parameter: nn.Parameter, layout: Layout, mesh: Mesh, dim: int = -1, stride: int = 1) -> None:
    """Tell Megatron and us how a parameter lies: who sums its gradient, and which of its replicas counts in norms.

    Args:
        parameter: this rank's share.
        layout: of the whole.
        mesh: the mesh.
        dim: the dim that Megatron would split; −1 where it would not.
        stride: that many matrices lie along this dim one after the other.
    """
    parameter.axonn_layout = layout  # type: ignore[attr-defined]
    parameter.allreduce = not (layout.over_z and mesh.size("z") > 1)  # type: ignore[attr-defined]
    # A replica that does not count has a tensor rank other than 0, which Megatron leaves out unless it is marked.
    parameter.tensor_model_parallel = layout.counted_here(mesh.coordinates, ("x", "y"))  # type: ignore[attr-defined]
    parameter.partition_dim, parameter.partition_stride = dim, stride  # type: ignore[attr-defined]
    if layout.partial:
        parameter.axonn_sum_over = layout.partial[0]  # type: ignore[attr-defined]
    if layout.over_z and mesh.size("z") > 1:
        _sum_between(parameter, _blocks().split)


def mark_expert(parameter: nn.Parameter) -> None:
    """Tell Megatron how a parameter of an expert lies: who sums its gradient, and which of its replicas counts in norms.

    Args:
        parameter: this rank's share, which Megatron's layer has made and told where it is a share.
    """
    mesh, blocks = process_groups.mesh(), _blocks()
    topology = mesh.experts.topology
    parameter.allreduce = blocks.summed(blocks.experts) == blocks.tensor  # type: ignore[attr-defined]
    share = getattr(parameter, "tensor_model_parallel", False) or topology.expert_tensor < topology.tensor
    # Where tensor ranks have experts of their own, each counts.
    parameter.tensor_model_parallel = share or mesh.rank("model") == 0  # type: ignore[attr-defined]
    _sum_between(parameter, blocks.experts)


def _blocks() -> Blocks:
    mesh = process_groups.mesh()
    return blocks_of(mesh.grid, mesh.experts.topology)


def _sum_between(parameter: nn.Parameter, size: int) -> None:
    """Where Megatron sums a gradient over larger blocks than its parameter's, have what is left summed, and one replica counted."""
    between = _blocks().between
    if between is not None and between[0] == size:
        parameter.axonn_sum_over = "between"  # type: ignore[attr-defined]
        parameter.shared = process_groups.mesh().rank("between") > 0  # type: ignore[attr-defined]


def sum_over_heads(parameter: nn.Parameter, group: str) -> None:
    """Have the gradient summed of a parameter that every rank uses on its own heads, which are split over a group.

    Megatron would sum it over all ranks of x and y; that several may hold the same heads makes it an average instead.
    """
    parameter.axonn_sum_over = group  # type: ignore[attr-defined]
    parameter.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]


def with_promised_sums(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron's ``DistributedDataParallel.__init__``, which then notes in what type its config has gradients summed over ranks."""

    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        config = self.ddp_config
        wide = config.grad_reduce_in_fp32 or config.reduce_scatter_with_fp32_accumulation
        for parameter in self.module.parameters():
            parameter.axonn_summed_in = torch.float32 if wide else parameter.dtype
        if not self.config.calculate_per_token_loss:
            _divide_before_sums(self)

    return init


def _divide_before_sums(model: Any) -> None:
    """Megatron divides gradients by the number of data-parallel ranks before it sums them; do so by z's part before z's sum, in fp16."""
    gz = process_groups.mesh().size("z")
    for group in model.expert_parallel_bucket_groups:
        for bucket in group.buckets:
            # An expert's gradient has no such sum before.
            split = all(hasattr(parameter, "axonn_layout") for parameter in bucket.params_list)
            if split and bucket.grad_data.dtype == torch.float16:
                bucket.gradient_scaling_factor *= gz
                for parameter in bucket.params_list:
                    parameter.axonn_divisor = gz


def with_all_replicas(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron's ``DistributedDataParallel.broadcast_params`` (--data-parallel-random-init), also to replicas between its groups."""

    @wraps(original)
    @torch.no_grad()
    def broadcast_params(self: Any) -> None:
        original(self)
        for parameter in self.module.parameters():
            if getattr(parameter, "axonn_sum_over", "") == "between":
                dist.broadcast(parameter, group=process_groups.mesh().group("between"), group_src=0)

    return broadcast_params


def with_partial_sums(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron's ``DistributedDataParallel.finish_grad_sync``; then what ranks of x or y computed in parts is summed, and what each computed sent."""

    @wraps(original)
    def finish_grad_sync(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        mesh, parameters = process_groups.mesh(), list(self.module.parameters())
        _sum_partial(parameters, mesh)
        if (
            self.bucket_groups or self.expert_parallel_bucket_groups
        ):  # else the optimizer is ours, and its step sends them
            split = (one for one in parameters if hasattr(one, "axonn_layout"))
            send_first(((one, one.main_grad) for one in split if getattr(one, "main_grad", None) is not None), mesh)

    return finish_grad_sync


@torch.no_grad()
def _sum_partial(parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
    """One sum for each group, in the order of the parameters, which is the same on all ranks."""
    grads: dict[tuple[str, torch.dtype], list[Tensor]] = defaultdict(list)
    # Where an axis has size 1, two names may mean one group: one call is enough.
    names: dict[dist.ProcessGroup, str] = {}
    for parameter in parameters:
        name, grad = getattr(parameter, "axonn_sum_over", ""), getattr(parameter, "main_grad", None)
        if grad is not None and name and mesh.size(name) > 1:
            grads[names.setdefault(mesh.group(name), name), grad.dtype].append(grad)
    for (name, _), members in grads.items():
        flat = start_all_reduce_(torch.cat([grad.reshape(-1) for grad in members]), mesh, name).wait()
        for grad, total in zip(members, flat.split([grad.numel() for grad in members]), strict=True):
            grad.copy_(total.view_as(grad))
