"""DeepSpeed's MoE layers become TED's, in place: parameters keep their names and stay the objects that optimizers hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.moe.experts import Experts
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.moe.sharded_moe import MOELayer, TopKGate
from torch import Tensor, nn

from axonn_plugins.config import Ted
from axonn_tp import Grid, Mesh, layout_of
from axonn_tp.checkpoint.dealt import Dealt
from axonn_tp.grid.layout import Layout, become
from axonn_tp.layers.exports import in_shards
from ted_moe import Groups, MoE, Topology
from ted_moe.gating import Gate


class TedMoE(MoE, StockMoE):
    """TED's layer with the parts of the DeepSpeed layer that it was made of."""

    passed_by = False
    """True while tokens skip the experts, as when dense layers are compared with the serial model's."""
    shared_out = False
    """True if other ranks have experts, or shares of them, that a `state_dict` of this rank would be without."""

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:  # noqa: D102
        if not self.passed_by:
            return super().forward(hidden_states, used_token)
        layer: Any = self.deepspeed_moe
        layer.l_aux = hidden_states.new_zeros(())
        layer.exp_counts = hidden_states.new_zeros(self.num_experts, dtype=torch.int64)
        return hidden_states, layer.l_aux, layer.exp_counts

    def _save_to_state_dict(self, *rest: Any) -> None:
        self._refuse_own_experts("state_dict() would give")
        super()._save_to_state_dict(*rest)

    def _load_from_state_dict(self, *rest: Any) -> None:
        self._refuse_own_experts("load_state_dict() would take")
        super()._load_from_state_dict(*rest)

    def _refuse_own_experts(self, would: str) -> None:
        if self.shared_out and not in_shards():
            raise ValueError(
                f"{would} this rank's experts alone, or its shares of them; use engine.save_checkpoint, whose layer_*_expert_*.pt and "
                "mp_rank_00_model_states.pt hold whole weights, and engine.load_checkpoint; without an engine, axonn_tp.full_state_dict and "
                "axonn_tp.checkpoint"
            )

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Nothing to do: the groups are there."""


class _PassedBy(MOELayer):
    """The part of DeepSpeed's layer that routed tokens and called the experts; TED's layer does both."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        raise ValueError("under axonn.ted a layer's deepspeed_moe cannot be called by itself; call the MoE layer")


def stock_layers(model: nn.Module) -> dict[str, StockMoE]:
    """DeepSpeed's MoE layers by name; those that are TED's already, too."""
    return {name: module for name, module in model.named_modules() if isinstance(module, StockMoE)}


def expert_ranks(layers: dict[str, StockMoE]) -> int:
    """The ep_size of all layers.

    Raises:
        ValueError: layers differ, or one cannot become TED's.
    """
    for name, layer in layers.items():
        if isinstance(layer, TedMoE):
            raise ValueError(f"layer {name} was given to deepspeed.initialize before; build the model anew")
        if getattr(layer.deepspeed_moe, "use_tutel", False):
            raise ValueError(f"layer {name} has use_tutel = true, whose kernels TED does not use; leave it out")
        for part, stock in {
            "deepspeed_moe": MOELayer,
            "deepspeed_moe.gate": TopKGate,
            "deepspeed_moe.experts": Experts,
        }.items():
            module = layer.get_submodule(part)
            if type(module).forward is not stock.forward or "forward" in vars(module):
                raise ValueError(
                    f"layer {name}.{part} has a forward of its own, which TED would never call; use DeepSpeed's {stock.__name__}"
                )
        if any(parameter.is_meta for parameter in layer.parameters()):
            raise ValueError(f"layer {name} is on the meta device; build the model on the CPU or the accelerator")
    sizes = {layer.ep_size: name for name, layer in layers.items()}
    if len(sizes) > 1:
        (a, first), (b, second) = list(sizes.items())[:2]
        raise ValueError(
            f"layer {first} has ep_size = {a} and layer {second} has ep_size = {b}; give all MoE layers the same"
        )
    return next(iter(sizes), 1)


def grid_of(topology: Topology) -> Grid:
    """The topology as a grid: tensor is x, what of the expert axis x does not hold is z.

    Raises:
        ValueError: whole experts that fewer ranks hold than tensor ranks there are.
    """
    inside = 1 if topology.expert_tensor_parallel else topology.tensor
    if topology.expert % inside:
        raise ValueError(
            f"ep_size = {topology.expert} is no multiple of axonn.ted.tensor = {topology.tensor}, and without expert_tensor_parallel "
            "every tensor rank holds other experts; raise ep_size, or set expert_tensor_parallel to true"
        )
    return Grid.for_world(topology.world, gx=topology.tensor, gz=topology.expert // inside)


def home_axes(topology: Topology) -> tuple[str, ...]:
    """The grid's axes along which ranks have different experts."""
    return ("z",) if topology.expert_tensor_parallel else ("x", "z")


@dataclass(frozen=True)
class Within:
    """Where experts lie among dense layers that are split on a mesh.

    Attributes:
        mesh: the dense layers'.
        grid: the experts' on its ranks: tensor is x where they are split, expert is z.
    """

    mesh: Mesh
    grid: Grid


def adopt(layer: StockMoE, groups: Groups, block: Ted, own: bool = False, within: Within | None = None) -> None:
    """Make a layer TED's; every rank calls it.

    Its parameters get layouts on the topology's grid (`grid_of`), or on that of `within`.

    Args:
        layer: of DeepSpeed, or of a subclass.
        groups: the process groups.
        block: the choices.
        own: the script has split the experts over the tensor ranks.
        within: the mesh of the dense layers, where they are split on one.
    """
    stock, kind = layer.deepspeed_moe.gate, type(layer)
    # What a subclass's forward calls DeepSpeed's layer for is TED's.
    layer.__class__ = TedMoE if kind is StockMoE else type(kind.__name__, (kind, TedMoE), {})
    become(layer.deepspeed_moe, _PassedBy, MOELayer)
    assert isinstance(layer, TedMoE)
    layer.routing = Gate(
        stock.k,
        stock.capacity_factor,
        stock.eval_capacity_factor,
        stock.min_capacity,
        stock.noisy_gate_policy,
        stock.drop_tokens,
        stock.use_rts,
        stock.top2_2nd_expert_sampling,
        block.dropless,
    )
    layer.overlap_degree = block.overlap_degree
    layer._spread(groups, block.duplicate_token_dropping, block.fused, own)
    become(layer.local, Dealt, nn.ModuleList)
    layer.local.home = groups.rank("expert")  # type: ignore[assignment]
    if within is not None:
        layer.mesh = within.mesh
    at = Layout((), home=home_axes(groups.topology)) if within is None else Layout((), home=("z",), grid=within.grid)
    for expert in layer.local:
        for module in expert.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    split = getattr(module, "splits", {}).get(name)
                    parameter.axonn_layout = _layout(parameter, split, groups.size("tensor"), at)  # type: ignore[attr-defined]
    for parameter in layer.parameters():
        parameter.axonn_layout = layout_of(parameter)  # type: ignore[attr-defined]


def _layout(parameter: Tensor, split: tuple[int, int] | None, size: int, at: Layout) -> Layout:
    if split is None:
        return replace(at, shape=tuple(parameter.shape))
    dim, parts = split
    shape = list(parameter.shape)
    shape[dim] *= size
    return replace(at, shape=tuple(shape), split=((dim, "x"),), parts=parts)


class _StandIn(StockMoE):
    """Needs all features of a token, as a mixture does, and is run without a process group.

    It has the layer's kind and attributes, which models ask for; parameters it has none.
    """

    def __init__(self, layer: StockMoE, boundary: bool) -> None:
        nn.Module.__init__(self)
        self.__dict__ |= {key: value for key, value in vars(layer).items() if key not in self.__dict__}
        self.axonn_boundary = boundary

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        mixed = torch.tanh(hidden_states + hidden_states.mean(-1, keepdim=True))
        noted = SimpleNamespace(l_aux=mixed.mean(), exp_counts=torch.zeros(self.num_experts, dtype=torch.int64))
        self.deepspeed_moe = noted
        return mixed, noted.l_aux, noted.exp_counts


@contextmanager
def stand_ins(model: nn.Module, boundary: bool = False) -> Iterator[None]:
    """While a plan for the dense layers is looked for, experts are not there; a layer may have several names.

    Args:
        model: the model.
        boundary: the layers will take activations however the residual stream is split (`Within`).
    """
    named = model.named_modules(remove_duplicate=False)
    layers = {name: module for name, module in named if isinstance(module, StockMoE)}
    put = {id(layer): _StandIn(layer, boundary) for layer in layers.values()}
    for name, layer in layers.items():
        _put(model, name, put[id(layer)])
    try:
        yield
    finally:
        for name, layer in layers.items():
            _put(model, name, layer)


def _put(model: nn.Module, name: str, module: Any) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)


@contextmanager
def passing_by(model: nn.Module) -> Iterator[None]:
    """Tokens skip the experts."""
    layers = [module for module in model.modules() if isinstance(module, TedMoE)]
    for layer in layers:
        layer.passed_by = True
    try:
        yield
    finally:
        for layer in layers:
            layer.passed_by = False
