"""Starting ranks: who keeps the store stays until all have reported."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import launch


def _sum_in_a_later_group() -> float:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank > 0:
        time.sleep(1)
    group = dist.new_group([1, 2])
    total = torch.tensor([float(rank)])
    if rank > 0:
        dist.all_reduce(total, group=group)
    return total.item()


def test_rank_0_serves_the_store_until_all_have_reported() -> None:
    assert launch(_sum_in_a_later_group, 3) == [0, 3, 3]
