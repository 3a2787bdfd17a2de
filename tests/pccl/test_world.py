"""The group of all ranks, taken from another backend, stays what torch knows."""

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from axonn_plugins.pccl import Options, world


def test_the_group_keeps_its_name() -> None:
    dist.init_process_group("cpu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = c10d._get_default_group()
        named = group.group_name, group.group_desc
        assert named[0]
        assert world.take(Options("ring"))
        assert (group.group_name, group.group_desc) == named
        assert c10d._resolve_process_group(group.group_name) is group
        assert world.give_back()
        assert (group.group_name, group.group_desc) == named
    finally:
        dist.destroy_process_group()
