"""Megatron as a host of systems: its model, optimizer and gradient buffers as `axonn_plugins.hosts.host` describes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor, nn

from axonn_plugins.config.base import ConfigError
from axonn_plugins.hosts.host import Gradient
from axonn_plugins.hosts.megatron import process_groups
from axonn_tp import Grid, Mesh, layout_of
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import AXES

WORDS, _HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


class MegatronHost:
    """A model that Megatron trains: `axonn_plugins.hosts.host.Host`. Every rank makes it.

    Args:
        chunks: this rank's part of the model, as `setup_model_and_optimizer` returns it.
        optimizer: beside it.
        args: Megatron's.
        steps: that were taken before; as many as iterations when None.

    Attributes:
        model: this rank's part; several chunks of a pipeline are a list.
        mesh: the grid's, or one whose x is Megatron's tensor parallelism.
        steps: that were taken, also in runs before this one.

    Raises:
        ConfigError: nobody knows how the model's parameters are split.
    """

    def __init__(self, chunks: list[nn.Module], optimizer: Any, args: Any, steps: int | None = None) -> None:
        models: list[Any] = unwrap_model(chunks)
        self.model: nn.Module = models[0] if len(models) == 1 else nn.ModuleList(models)
        self.steps: int = args.iteration if steps is None else steps
        self._optimizers = getattr(optimizer, "chained_optimizers", [optimizer])
        self._optimizer = optimizer
        self._names: dict[nn.Parameter, str] = {}
        for model in models:
            self._names |= _serial_names(model)
        if hasattr(args, "tensor_model_parallel_impl"):
            self.mesh: Mesh = process_groups.mesh()
        else:
            self.mesh = _mesh_of(args)
            if args.tensor_model_parallel_size > 1:
                for model in models:
                    _lay_out(model, self.mesh.grid)
        stages = parallel_state.get_pipeline_model_parallel_group()
        found: list[set[str]] = [set()] * stages.size()
        dist.all_gather_object(found, set(self._names.values()), group=stages)
        self._stages = found

    def serial_names(self) -> dict[nn.Parameter, str]:
        """Names of this rank's parameters in Megatron's model of one rank."""
        return self._names

    def stages_with(self, name: str) -> int:
        """Number of stages of a pipeline that hold a parameter of this name."""
        return sum(name in names for names in self._stages)

    def counts(self, parameter: Tensor) -> bool:
        """True if this rank counts a parameter in a sum over all ranks, of a tied one in the first stage that has it."""
        name = self._names[parameter]  # type: ignore[index]
        first = next(stage for stage, names in enumerate(self._stages) if name in names)
        here = parallel_state.get_pipeline_model_parallel_rank()
        return here == first and layout_of(parameter).counted_here(self.mesh.coordinates, AXES)

    def gradients(self) -> Iterator[Gradient]:
        """Gradients of all parameters that this rank updates, once Megatron has summed them: all of each, or a distributed optimizer's part."""
        scale = float(self._optimizer.get_loss_scale())
        for parameter, name in self._names.items():
            gradient = getattr(parameter, "main_grad", None)
            if gradient is None or not parameter.requires_grad:
                continue
            part = self._part(parameter)
            if part.stop > part.start:
                yield Gradient(name, parameter, gradient.view(-1)[part], scale, itemgetter(part), self.mesh)

    def _part(self, parameter: nn.Parameter) -> slice:
        """Elements of a parameter that this rank updates; of others a reduce-scatter leaves no sums."""
        shared = [one for one in self._optimizers if isinstance(one, DistributedOptimizer)]
        if not shared:
            return slice(0, parameter.numel())
        for one in shared:
            if parameter in one.model_param_gbuf_map:
                found = one._get_model_param_range_map(parameter)["param"]
                return slice(found.start, found.end)
        return slice(0, 0)


def _serial_names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Names on one rank: layers by their number in the whole model, and the copy of tied embeddings under their name."""
    numbers = {
        f"{name}.": f"{name.rpartition('.')[0]}.{module.layer_number - 1}."
        for name, module in model.named_modules()
        if re.search(r"layers\.\d+$", name) and hasattr(module, "layer_number")
    }
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    names = {}
    for name, parameter in model.named_parameters():
        for prefix, serial in numbers.items():
            if name.startswith(prefix):
                name = serial + name.removeprefix(prefix)
                break
        names[parameter] = WORDS if tied and name == _HEAD else name
    return names


def _mesh_of(args: Any) -> Mesh:
    """Megatron's own groups as a grid: tensor parallelism is x, all other ranks of a stage data."""
    stages = args.pipeline_model_parallel_size
    grid = Grid.for_world(dist.get_world_size() // stages, gx=args.tensor_model_parallel_size)
    return Mesh(grid, process_groups.device(), stages)


def _lay_out(model: Any, grid: Grid) -> None:
    """Give parameters that Megatron splits their layouts, which nothing but systems reads.

    Raises:
        ConfigError: the model may split a matrix by other blocks than those of a GPT model.
    """
    if not isinstance(model, GPTModel):
        raise ConfigError(
            f"how --tensor-model-parallel-size splits weights is known of a GPTModel, and this is a {type(model).__name__}, whose "
            "matrices may be of other blocks; leave that size at 1, or the system out"
        )
    for name, parameter in model.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False) and parameter.partition_dim >= 0:
            dim, shape = parameter.partition_dim, list(parameter.shape)
            shape[dim] *= grid.gx
            # Gate and up are split each by itself; Transformer Engine's layers do not say so.
            gated = dim == 0 and ".linear_fc1." in name and model.config.gated_linear_unit
            parts = 2 if gated else parameter.partition_stride
            parameter.axonn_layout = Layout(tuple(shape), ((dim, "x"),), parts)
