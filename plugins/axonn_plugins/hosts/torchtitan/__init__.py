"""torchtitan as a host: ``--override.imports axonn_plugins.hosts.torchtitan.axonn`` splits its model over the grid.

Nothing of the checkout changes: an override is its own way to swap a component of a configuration.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config.override import derive, override
from torchtitan.protocols.model_spec import ModelSpec

from axonn_plugins import config
from axonn_plugins.config import ConfigError, TensorParallel
from axonn_plugins.hosts.common.tensor_parallel import refuse_keys_of_deepspeed
from axonn_plugins.hosts.torchtitan.optimizers import SplitOptimizers
from axonn_plugins.hosts.torchtitan.parallelize import parallelize


@override(target=OptimizersContainer.Config, description="3D parallel matrix multiplication (AxoNN)")
def axonn(config: OptimizersContainer.Config, **block: Any) -> OptimizersContainer.Config:
    """Split the model of this run.

    Args:
        config: torchtitan's, of the optimizers; ours keep whole states in checkpoints.
        block: keys of the block's ``"tensor_parallel"``, but for the sizes that torchtitan has names for: gx·gy is its
            tensor_parallel_degree, gz its data_parallel_shard_degree, the data axis its data_parallel_replicate_degree. The
            plan is ``"auto"`` by default.

    Raises:
        ConfigError: a key is wrong, or the optimizers are of a kind of their own.
    """
    if type(config) is not OptimizersContainer.Config:
        raise ConfigError(
            f"axonn: the optimizers of this run are {type(config).__qualname__}, whose states in checkpoints we do not know; use OptimizersContainer"
        )
    _split_next_model(parse(block))
    return derive(config, SplitOptimizers.Config)


def parse(block: dict[str, Any]) -> TensorParallel:
    """The override's keys.

    Raises:
        ConfigError: the first mistake, in one sentence.
    """
    for key in ("gx", "gz"):
        if key in block:
            of = "tensor_parallel_degree, which is gx*gy" if key == "gx" else "data_parallel_shard_degree"
            raise ConfigError(f"axonn: {key} = {block[key]!r} is torchtitan's --parallelism.{of}; set that instead")
    found = config.parse({"tensor_parallel": {"plan": "auto", **block}}).tensor_parallel
    assert found is not None
    if found.gy == "auto":
        raise ConfigError(
            'axonn: gy = "auto" needs sizes that torchtitan gives as numbers; run axonn plan, and give gy'
        )
    refuse_keys_of_deepspeed(found, "axonn: ")
    return found


def _split_next_model(block: TensorParallel) -> None:
    """Have the model specification, which is no component, give our function once: for the model that is made next."""

    def ours(spec: ModelSpec) -> Any:
        del ModelSpec.parallelize_fn  # what each has itself is there again
        return partial(parallelize, block)

    ModelSpec.parallelize_fn = property(ours)
