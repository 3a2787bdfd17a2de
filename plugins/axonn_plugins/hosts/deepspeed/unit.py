"""The model parallel unit (mpu) that DeepSpeed asks for, answered by the mesh."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from axonn_tp import Mesh


class GridUnit:
    """The mesh as the model parallel unit (mpu) that DeepSpeed asks."""

    axonn = True

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh

    def get_model_parallel_rank(self) -> int:  # noqa: D102
        return self.mesh.rank("replicas")

    def get_model_parallel_world_size(self) -> int:  # noqa: D102
        return self.mesh.size("replicas")

    def get_model_parallel_group(self) -> Any:  # noqa: D102
        return self.mesh.group("replicas")

    def get_data_parallel_rank(self) -> int:
        """Which part of the data this rank reads."""
        return self.mesh.rank("readers")

    def get_data_parallel_world_size(self) -> int:
        """Number of ranks that read different data: gz·gdata, less those that share their sequences."""
        return self.mesh.size("readers")

    def get_data_parallel_group(self) -> Any:  # noqa: D102
        return self.mesh.group("readers")

    def get_data_parallel_group_ranks(self) -> list[int]:  # noqa: D102
        return dist.get_process_group_ranks(self.mesh.group("readers"))

    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_group = get_model_parallel_group
