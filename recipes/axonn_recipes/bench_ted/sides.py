"""The sides: one model, one batch, one optimizer; its experts are stock DeepSpeed's, or TED's with more and more switched on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import axonn_tp
import ted_moe
from axonn_recipes.bench_ted import stock
from axonn_recipes.bench_ted.settings import MIN_CAPACITY, Settings
from axonn_recipes.models.moe_gpt import FeedForward, MoEBlock, MoEGPT
from axonn_tp import LayerPlan, Mesh
from ted_moe import Groups, Stashing
from ted_moe.experts import plan_expert, split_expert

DEEPSPEED, BASELINE, DTD, CAC, FUSED, OVERLAP = "deepspeed", "TED baseline", "+DTD", "+CAC", "+fused", "+overlap"
LEARNING_RATE = 1e-3
_BUCKET = 2**18


@dataclass(frozen=True)
class Switches:
    """Parts of ours that are on: TED's optimizations; sums of gradients while backward runs, and all-to-alls in two slices."""

    drop: bool = False
    stash: bool = False
    fused: bool = False
    overlap: bool = False


SIDES: dict[str, Switches | None] = {
    DEEPSPEED: None,
    BASELINE: Switches(),
    DTD: Switches(drop=True),
    CAC: Switches(drop=True, stash=True),
    FUSED: Switches(drop=True, stash=True, fused=True),
    OVERLAP: Switches(drop=True, stash=True, fused=True, overlap=True),
}


class Ranks:
    """The groups that all sides share.

    Attributes:
        mesh: tensor parallelism of the dense part, along x.
        groups: those of the experts; their tensor axis has the ranks of x.
    """

    def __init__(self, settings: Settings) -> None:
        self.mesh = Mesh.create(gx=settings.tensor)
        self.groups = Groups(settings.topology)
        stock.prepare(self.groups)

    def axis_names(self, sums: Groups | None) -> dict[str, str]:
        """Axis by torch's name of its group, for a ledger.

        Args:
            sums: the groups of gradients, where they have their own.
        """
        names = {**self.mesh.axis_names(), **stock.axis_names(), **self.groups.axis_names()}
        if sums is not None:
            names |= {sums.group(axis).group_name: axis for axis in ("data", "expert_data") if sums.size(axis) > 1}
        return {name: "tensor" if axis == "x" else axis for name, axis in names.items()}


class Step:
    """A side's training step; a call returns the mean loss of this rank's tokens.

    Attributes:
        stashed: bytes that communication-aware checkpointing held when the last forward ended.
        axis_names: axis by torch's name of its group.
    """

    def __init__(self, name: str, settings: Settings, ranks: Ranks) -> None:
        switches = SIDES[name]
        self._stash = switches is not None and switches.stash
        self._stashes: list[Stashing] = []
        self.stashed = 0
        self.groups = ranks.groups
        self.model = _dense(settings, ranks.mesh, self._checkpointed)
        for place, block in enumerate(self.model.blocks):
            if isinstance(block, MoEBlock):
                block.moe = _experts(switches, settings, ranks.groups)
                _fill(block.moe, place, settings, ranks.groups)
        overlap = switches is not None and switches.overlap
        self._reducer = ted_moe.GradientReducer(self.model.parameters(), ranks.groups, _BUCKET) if overlap else None
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE, fused=True)
        self.batch = _batch(settings, ranks.groups)
        self.axis_names = ranks.axis_names(None if self._reducer is None else self._reducer.groups)

    def __call__(self) -> Tensor:  # noqa: D102
        self.optimizer.zero_grad()
        loss = self.model(*self.batch)
        self.stashed = sum(stash.nbytes for stash in self._stashes)
        loss.backward()
        self._stashes.clear()
        if self._reducer is None:
            ted_moe.sync_gradients(self.model.parameters(), self.groups)
        else:
            self._reducer.finish()
        self.optimizer.step()
        return loss.detach()

    def _checkpointed(self, block: nn.Module, x: Tensor) -> Any:
        if self._stash:
            self._stashes.append(Stashing(block))
            return checkpoint(self._stashes[-1], x, use_reentrant=True)
        return checkpoint(block, x, use_reentrant=True)


def _dense(settings: Settings, mesh: Mesh, call: Callable[[nn.Module, Tensor], Any]) -> MoEGPT:
    """The model with nothing where experts belong, its blocks split as Megatron splits them; the rest is small, and whole."""
    torch.manual_seed(settings.seed)
    model = MoEGPT(settings.model, lambda hidden, expert: nn.Identity(), settings.every, checkpoint=call)
    attention = {"*.qkv": LayerPlan("normal", parts=3, heads=settings.heads), "*.proj": LayerPlan("transposed")}
    feed_forward = {"fc1": LayerPlan("normal"), "fc2": LayerPlan("transposed")}
    for block in model.blocks:
        plan = attention if isinstance(block, MoEBlock) else attention | feed_forward
        axonn_tp.parallelize(block, mesh, plan, axonn_tp.Options(layout="replicated"))
    return model


def _experts(switches: Switches | None, settings: Settings, groups: Groups) -> nn.Module:
    options: dict[str, Any] = {
        "k": settings.k,
        "min_capacity": MIN_CAPACITY,
        "use_rts": False,
        "top2_2nd_expert_sampling": False,
    }
    if switches is None:
        return stock.layer(settings.hidden, _split(settings, groups), settings.experts, groups, **options)
    return ted_moe.MoE(
        settings.hidden,
        FeedForward(settings.model),
        settings.experts,
        groups.size("expert"),
        groups=groups,
        duplicate_token_dropping=switches.drop,
        fused=switches.fused,
        overlap_degree=2 if switches.overlap else 1,
        **options,
    )


def _split(settings: Settings, groups: Groups) -> FeedForward:
    """This rank's part of an expert, split over the tensor ranks as TED's baseline splits it."""
    expert = FeedForward(settings.model)
    split_expert(expert, plan_expert(expert, settings.hidden, groups, fuse=False), groups)
    return expert


@torch.no_grad()
def _fill(layer: Any, place: int, settings: Settings, groups: Groups) -> None:
    """Weights that depend on the layer's and the expert's number only, not on the side or the rank."""
    gate, local = layer.deepspeed_moe.gate.wg, layer.deepspeed_moe.experts.deepspeed_experts
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1000 * settings.seed + place)
        gate.weight.normal_(std=settings.hidden**-0.5)
        for number, expert in enumerate(local):
            torch.manual_seed(1000 * settings.seed + 100 * (1 + place) + groups.rank("expert") * len(local) + number)
            expert.load_state_dict(_split(settings, groups).state_dict())


def _batch(settings: Settings, groups: Groups) -> list[Tensor]:
    generator = torch.Generator().manual_seed(settings.seed)
    windows = torch.randint(256, (settings.batch, settings.context + 1), generator=generator)
    mine = windows.chunk(groups.size("data"))[groups.rank("data")]
    return [mine[:, :-1], mine[:, 1:]]


def mean_loss(loss: Tensor) -> float:
    """Mean over all ranks."""
    total = loss.double()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()
