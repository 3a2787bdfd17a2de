"""DeepSpeed's curriculum of samples, and its schedule of dropped tokens, on the grid and in checkpoints."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.engine import DeepSpeedEngine

from axonn_tp import Mesh


class Curriculum(DeepSpeedEngine):
    """The part of an engine on the grid that makes loaders."""

    mesh: Mesh

    def deepspeed_io(self, *rest: Any, **keywords: Any) -> Any:
        """DeepSpeed's loader; a curriculum's samples, which rank 0 draws, reach replicas as well."""
        loader = super().deepspeed_io(*rest, **keywords)
        if isinstance(loader.data_sampler, DeepSpeedDataSampler):
            _reach_all(loader.data_sampler, self.mesh)
        return loader


def _reach_all(sampler: DeepSpeedDataSampler, mesh: Mesh) -> None:
    """Have rank 0 send to all: DeepSpeed has it send to the ranks that read other samples than it, by a group of which replicas are not."""
    readers, mine = mesh.size("readers"), mesh.rank("readers")
    if mesh.size("replicas") == 1:
        return

    def part(batch_len: int | None = None) -> tuple[int, int]:
        samples = batch_len or sampler.micro_batch_times_data_parallel_size
        return round(mine * samples / readers), round((mine + 1) * samples / readers)

    sampler.data_parallel_group, sampler.get_start_end_idx = mesh.group("grid"), part


def parts_with_state(engine: DeepSpeedEngine) -> dict[str, Any]:
    """The parts of an engine that know how far they are, by the names that DeepSpeed's own checkpoints have for their states."""
    found = {}
    sampler = getattr(engine.training_dataloader, "data_sampler", None)
    if isinstance(sampler, DeepSpeedDataSampler):
        found["data_sampler"] = sampler
    if engine.random_ltd_enabled():
        found["random_ltd"] = engine.random_ltd_scheduler
    return found
