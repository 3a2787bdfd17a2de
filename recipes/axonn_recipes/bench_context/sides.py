"""The sides: one GPT, one batch of long sequences, one optimizer; who has which tokens, and how they see each other, differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import axonn_tp
from axonn_recipes.bench_context.settings import Settings
from axonn_recipes.bench_tp.networks import NETWORKS
from axonn_recipes.bench_tp.sides import Step, step_of
from axonn_recipes.models.gpt import GPT, Attention
from axonn_tp import Mesh
from axonn_tp.context.chunks import Chunks

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_TEXT = NETWORKS["gpt"]


def ours(settings: Settings, gx: int, how: str) -> Step:
    """The training step of 3D PMM with sequences over z."""
    model, mesh = _model(settings), Mesh(settings.grid(gx))
    plan = _TEXT.plan(settings) if gx > 1 or mesh.size("z") > 1 else None
    axonn_tp.parallelize(model, mesh, plan, axonn_tp.Options(attention=how))
    share = [mesh.shard_batch(tensor) for tensor in _batch(settings)]
    return step_of(model, share, axonn_tp.GradientReducer(model.parameters(), mesh).finish)


def peer(settings: Settings, which: str) -> Step:
    """A peer's step; it returns this rank's loss, whose mean over all ranks is the batch's."""
    model, mesh = _model(settings), init_device_mesh("cpu", (settings.ranks,))
    group, rank = mesh.get_group(), mesh.get_local_rank()
    attend: Attend
    if which == "ulysses":
        attend, places = _ulysses(group), list(range(settings.context))
        places = places[rank * len(places) // settings.ranks : (rank + 1) * len(places) // settings.ranks]
    else:
        # Torch balances the load of causal attention as we do: a chunk from the front, and its counterpart.
        attend, places = (
            partial(_ring, group, which == "torch-gather"),
            Chunks(settings.context, settings.ranks).places(rank),
        )
    model.__class__ = _OnPlaces
    for block in model.blocks:
        block.attention.__class__ = _Attention
        block.attention.attend = attend
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    here = torch.tensor(places)
    ids, targets = _batch(settings)
    return step_of(model, [ids[:, here], here, targets[:, here]])


def _model(settings: Settings) -> Any:
    torch.manual_seed(settings.seed)
    return _TEXT.build(settings)


def _batch(settings: Settings) -> list[Tensor]:
    return _TEXT.batch(settings, torch.Generator().manual_seed(settings.seed))


class _OnPlaces(GPT):
    """A GPT on some tokens of each sequence, whose places are an argument; its loss is theirs."""

    def forward(self, ids: Tensor, places: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        x = self.tokens(ids) + self.positions(places)
        for block in self.blocks:
            x = block(x)
        return self.mean_loss(self.head(self.norm(x)), targets)


class _Attention(Attention):
    """Attention that a peer computes."""

    attend: Attend

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        q, k, v = (t.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return self.proj(self.attend(q, k, v).transpose(1, 2).flatten(2))


def _ring(group: dist.ProcessGroup, gathered: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _Ring.apply(q, k, v, group, gathered)


class _Ring(torch.autograd.Function):
    """Torch's ring attention with the CPU's kernel: `context_parallel` leads only the GPU's kernels to it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, gathered: bool) -> Tensor:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = _torch(gathered)._templated_ring_attention(group, 2, kernel, q, k, v, is_causal=True)
        ctx.group, ctx.gathered = group, gathered
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        run = _torch(ctx.gathered)._templated_ring_attention_backward
        found = run(ctx.group, 2, kernel, grad, "grad_out", *ctx.saved_tensors, is_causal=True, dropout_p=0.0)
        return *found[:3], None, None


def _torch(gathered: bool) -> Any:
    from torch.distributed.tensor.experimental._context_parallel import _attention

    _attention.set_rotate_method("allgather" if gathered else "alltoall")
    return _attention


def _ulysses(group: dist.ProcessGroup) -> Attend:
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    # On CPU DeepSpeed compiles a kernel for inference when it starts; training needs neither it nor a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend())

    def local(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    exchanged = DistributedAttention(local, group, 2, 1)  # type: ignore[arg-type]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return exchanged(*(tensor.transpose(1, 2).contiguous() for tensor in (q, k, v)), 0).transpose(1, 2)

    return attend
