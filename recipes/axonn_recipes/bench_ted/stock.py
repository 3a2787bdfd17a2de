"""Stock DeepSpeed-MoE under tensor parallelism, in plain PyTorch and on gloo."""

from __future__ import annotations

import contextlib
import io
import logging
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ted_moe import Groups


class Units:
    """The ``mpu`` that DeepSpeed expects of Megatron: tensor and data ranks."""

    def __init__(self, groups: Groups) -> None:
        for axis, name in (
            ("tensor", "tensor_model_parallel"),
            ("tensor", "model_parallel"),
            ("data", "data_parallel"),
        ):
            setattr(self, f"get_{name}_rank", lambda axis=axis: groups.rank(axis))
            setattr(self, f"get_{name}_world_size", lambda axis=axis: groups.size(axis))
            setattr(self, f"get_{name}_group", lambda axis=axis: groups.group(axis))


def prepare(groups: Groups) -> None:
    """Have DeepSpeed find the tensor and data ranks, and gather on gloo."""
    import deepspeed
    from deepspeed.moe import mappings

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # On CPU DeepSpeed compiles a kernel for inference when it starts; training needs neither it nor a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist.get_backend())
    deepspeed.utils.groups.mpu = Units(groups)

    def gather(output: Tensor, input: Tensor, group: dist.ProcessGroup) -> Any:
        # gloo refuses a flat output beside an input of another shape.
        return deepspeed.comm.all_gather_into_tensor(output, input.flatten(), group=group)

    mappings.deepspeed = SimpleNamespace(utils=deepspeed.utils, comm=SimpleNamespace(all_gather_into_tensor=gather))


def layer(hidden: int, expert: nn.Module, experts: int, groups: Groups, **options: Any) -> nn.Module:
    """The layer, its experts split over the tensor ranks.

    Args:
        hidden: features of a token.
        expert: what each expert is; split over the tensor ranks already.
        experts: how many.
        groups: the process groups.
        options: of `deepspeed.moe.layer.MoE`.
    """
    import deepspeed.moe.layer

    made = deepspeed.moe.layer.MoE(
        hidden, expert, experts, groups.size("expert"), enable_expert_tensor_parallelism=True, **options
    )
    with contextlib.redirect_stdout(io.StringIO()):
        made.set_deepspeed_parallelism()
    return made


def axis_names() -> dict[str, str]:
    """Axis by torch's name of DeepSpeed's own groups."""
    import deepspeed

    made = deepspeed.utils.groups._get_expert_parallel_group_dict().values()
    return {group.group_name: "expert" for group in made}
