"""DeepSpeed's curriculum of samples, and its schedule of dropped tokens, on the grid and in checkpoints."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.data_pipeline.data_sampling.data_sampler import DeepSpeedDataSampler
from deepspeed.runtime.engine import DeepSpeedEngine

from axonn_plugins.config import ConfigError
from axonn_tp import Grid, Mesh


def send_to_all(engine: DeepSpeedEngine, mesh: Mesh) -> None:
    """Have the samples of a curriculum, which rank 0 draws, reach replicas as well.

    DeepSpeed has rank 0 send them to ranks that read other samples than it, by a group that replicas are not of.
    """
    sampler: Any = _sampler(engine)
    if sampler is None or mesh.size("replicas") == 1:
        return
    readers, mine = mesh.size("readers"), mesh.rank("readers")

    def part(batch_len: int | None = None) -> tuple[int, int]:
        samples = batch_len or sampler.micro_batch_times_data_parallel_size
        return round(mine * samples / readers), round((mine + 1) * samples / readers)

    sampler.data_parallel_group, sampler.get_start_end_idx = mesh.group("grid"), part


def refuse_dropped_tokens(parsed: Any, grid: Grid, layout: str) -> None:
    """Refuse random_ltd where a rank has a share of each sequence.

    Args:
        parsed: DeepSpeed's configuration.
        grid: of the ranks that hold the model, or a stage of it.
        layout: of activations.

    Raises:
        ConfigError: its layers would count, and leave out, tokens of the share.
    """
    shared = grid.sequence > 1 or (grid.gx > 1 and layout == "scattered")
    if shared and parsed.data_efficiency_config["data_routing"]["random_ltd"]["enabled"]:
        raise ConfigError(
            "data_efficiency.data_routing.random_ltd leaves tokens of whole sequences out, and ranks have shares of these over "
            + (
                "z (gz.sequence); use 1"
                if grid.sequence > 1
                else 'x; use axonn.tensor_parallel.layout = "replicated", or gx = 1'
            )
        )


def parts_with_state(engine: DeepSpeedEngine) -> dict[str, Any]:
    """The parts of an engine that know how far they are, by the names that DeepSpeed's own checkpoints have for their states."""
    sampler = _sampler(engine)
    found = {} if sampler is None else {"data_sampler": sampler}
    return found | ({"random_ltd": engine.random_ltd_scheduler} if engine.random_ltd_enabled() else {})


def _sampler(engine: DeepSpeedEngine) -> DeepSpeedDataSampler | None:
    """The curriculum's; None where there is none."""
    sampler = getattr(engine.training_dataloader, "data_sampler", None)
    return sampler if isinstance(sampler, DeepSpeedDataSampler) else None
