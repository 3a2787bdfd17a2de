"""Which device a rank gets, with stand-ins for GPUs: torch.cuda's functions and the process group's backends are set by the test."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from axonn_tp.grid.device import device_of_rank, made_where_not_split


@dataclass
class Node:
    """GPUs that this process sees, and what it was told.

    Attributes:
        gpus: how many.
        backends: of the process group.
        rank: global.
        local: LOCAL_RANK, or none.
        current: GPU that the script has chosen.
        bound: GPU that it gave to init_process_group.
        chosen: GPU that was made the current one.
    """

    gpus: int = 4
    backends: str = "cpu:gloo,cuda:nccl"
    rank: int = 2
    local: int | None = 2
    current: int | None = None
    bound: int | None = None
    chosen: list[int] = field(default_factory=list)

    def stand_in(self, patch: pytest.MonkeyPatch) -> None:
        bound = None if self.bound is None else torch.device("cuda", self.bound)
        patch.setattr(dist, "get_backend_config", lambda: self.backends)
        patch.setattr(dist, "get_rank", lambda: self.rank)
        patch.setattr(dist, "group", SimpleNamespace(WORLD=SimpleNamespace(bound_device_id=bound)))
        patch.setattr(torch.cuda, "is_available", lambda: self.gpus > 0)
        patch.setattr(torch.cuda, "device_count", lambda: self.gpus)
        patch.setattr(torch.cuda, "is_initialized", lambda: self.current is not None)
        patch.setattr(torch.cuda, "current_device", lambda: self.current or 0)
        patch.setattr(torch.cuda, "set_device", self.chosen.append)
        patch.delenv("LOCAL_RANK", raising=False)
        if self.local is not None:
            patch.setenv("LOCAL_RANK", str(self.local))


@pytest.mark.parametrize(
    ("node", "device_type", "found", "chosen"),
    [
        (Node(), "cuda", "cuda:2", [2]),
        (Node(), None, "cuda:2", [2]),
        (Node(current=0), "cuda", "cuda:2", [2]),
        (Node(current=3), "cuda", "cuda:3", []),
        (Node(current=3, bound=1), "cuda", "cuda:1", [1]),
        (Node(local=None, rank=7), "cuda", "cuda:3", [3]),
        (Node(gpus=1, rank=5, local=5), "cuda", "cuda:0", [0]),
        (Node(rank=6, local=2), "cuda", "cuda:2", [2]),
        (Node(), "cuda:1", "cuda:1", []),
        (Node(), "cpu", "cpu", []),
        (Node(backends="cpu:gloo,cuda:gloo"), None, "cpu", []),
        (Node(backends="cpu:pccl"), None, "cpu", []),
        (Node(gpus=0, backends="cpu:gloo,cuda:nccl"), None, "cpu", []),
    ],
)
def test_every_rank_has_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch, node: Node, device_type: str | None, found: str, chosen: list[int]
) -> None:
    node.stand_in(monkeypatch)
    assert (str(device_of_rank(device_type)), node.chosen) == (found, chosen)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Node(gpus=2, local=3).stand_in(monkeypatch)
    with pytest.raises(
        ValueError, match="LOCAL_RANK = 3 has no GPU of its own, as this node has 2; start 2 ranks a node"
    ):
        device_of_rank("cuda")


@pytest.mark.parametrize("splits", [True, False])
def test_a_world_that_was_told_its_device(splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one whose backend splits no groups torch is to make them."""
    bound = torch.device("cuda", 1)
    world = SimpleNamespace(
        bound_device_id=bound, _get_backend=lambda device: SimpleNamespace(supports_splitting=splits)
    )
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    with made_where_not_split():
        assert world.bound_device_id == (bound if splits else None)
    assert world.bound_device_id == bound
