"""The features of torchtitan that a model on the grid does not go with, each with its reason."""

from __future__ import annotations

from typing import Any

from torchtitan.models.common.moe import MoE

from axonn_plugins.config import ConfigError


def check(model: Any, dims: Any, training: Any, compile_config: Any) -> None:
    """Refuse what cannot be obeyed.

    Args:
        model: the serial model.
        dims: torchtitan's `ParallelDims`.
        training: its section of the configuration.
        compile_config: its section.

    Raises:
        ConfigError: the first of them, in one sentence; the same on every rank.
    """
    degrees = {"pipeline": dims.pp, "context": dims.cp, "expert": dims.ep}
    for name, degree in degrees.items():
        if degree > 1:
            raise ConfigError(
                f"axonn: parallelism.{name}_parallel_degree = {degree} has no axis of the grid, which splits over tensor_parallel_degree, "
                "data_parallel_shard_degree and data_parallel_replicate_degree; set it to 1"
            )
    if any(isinstance(module, MoE) for module in model.modules()):
        raise ConfigError(
            "axonn: the model has a mixture of experts, whose dispatch is torchtitan's own; leave the override out, or use ted under DeepSpeed"
        )
    if compile_config.enable and "model" in compile_config.components:
        raise ConfigError(
            "axonn: compile.components has model, and torchtitan compiles a block as one graph, which a split layer's collectives leave; give "
            "--compile.components loss"
        )
    if training.enable_cpu_offload:
        raise ConfigError("axonn: training.enable_cpu_offload is FSDP's, which the z axis replaces; turn it off")
    if training.dtype != "float32" and training.mixed_precision_param != training.dtype:
        raise ConfigError(
            f"axonn: training.mixed_precision_param = {training.mixed_precision_param} would compute in more precision than training.dtype = "
            f"{training.dtype} keeps; make them equal, or keep float32"
        )
    # The manager of graphs replays into gradients that were there first, and the sums over ranks put others in their place.
    if not training.disable_cuda_graphs:
        raise ConfigError(
            "axonn: CUDA graphs replay into the gradients of the step that was captured, and sums over ranks replace these; give "
            "--training.disable_cuda_graphs"
        )
