"""Bytes that TED's training keeps on a GPU: the dissertation's model (000, equations 7.1 to 7.7), and ours by part.

An MoE is a base transformer whose every second layer has E experts for its MLP. *Shared* are the parameters outside experts, which
the dissertation calls non-expert. Training is in mixed precision with Adam and ZeRO-1: 2 bytes each for a weight and its
gradient, and 12 for the weight in float32 and two moments, which data-parallel ranks share. DeepSpeed-MoE is the tensor degree 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

TILE = 1_800_000
"""Elements of the tiled optimizer's tile (section 7.2).

The dissertation says that this caps the spike at 1 GB, but 4·TILE are 7.2 MB. What gives 1 GiB is DeepSpeed's own limit on
a group of experts, `STOCK_GROUP`, at 6 bytes an element.
"""
STOCK_GROUP = 178_956_971
"""Elements to which stock DeepSpeed limits a parameter group of experts (deepspeed/moe/utils.py)."""
CAPACITY_FLOOR = 4
"""DeepSpeed-MoE's default `min_capacity`."""


@dataclass(frozen=True)
class Degrees:
    """Degrees by which an MoE is split over GPUs, equation 7.1: G_tensor × G_expert × G_data^exp = G_tensor × G_data^nonexp = G.

    Attributes:
        tensor: ranks that split each matrix, of experts too.
        expert: ranks that share the experts of a layer.
        data: replicas of an expert, G_data^exp.
    """

    tensor: int = 1
    expert: int = 1
    data: int = 1

    def __post_init__(self) -> None:
        for name, size in (("tensor", self.tensor), ("expert", self.expert), ("data", self.data)):
            if size < 1:
                raise ValueError(f"{name} = {size} is not a number of ranks; use 1 or more")

    @property
    def gpus(self) -> int:
        """All of them, G."""
        return self.tensor * self.expert * self.data

    @property
    def shared_data(self) -> int:
        """Replicas of the parameters outside experts, G_data^nonexp."""
        return self.expert * self.data


@dataclass(frozen=True)
class Transformer:
    """Sizes of a GPT with learned positions, MLPs four times as wide, biases, and its output layer tied to the table of tokens."""

    layers: int
    hidden: int
    vocabulary: int = 50257
    context: int = 2048


TABLE_4_1 = {
    "GPT-3-XL": Transformer(24, 2048),
    "GPT-3-2.7B": Transformer(32, 2560),
    "GPT-3-6.7B": Transformer(32, 4096),
    "GPT-3-13B": Transformer(40, 5120),
}
"""The base models of section 7.4."""


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters, of a model or of one GPU's part of it.

    Attributes:
        shared: outside experts.
        expert: in experts.
    """

    shared: float
    expert: float

    @property
    def total(self) -> float:
        """Sum of both."""
        return self.shared + self.expert


@dataclass(frozen=True)
class State:
    """Bytes of model state on a GPU.

    Attributes:
        weights: in 16 bits.
        gradients: in 16 bits.
        optimizer: this rank's share of weights in float32 and of both moments.
    """

    weights: float
    gradients: float
    optimizer: float

    @property
    def total(self) -> float:
        """Sum of all three."""
        return self.weights + self.gradients + self.optimizer


# The dissertation's equations.


def paper_parameters(base: float, experts: int) -> Parameters:
    """Equations 7.2 and 7.3: E/3 · NP_base in experts, 2/3 · NP_base outside.

    Args:
        base: parameters of the base model, NP_base, of which two thirds are taken to be in MLPs.
        experts: E.
    """
    return Parameters(shared=2 * base / 3, expert=experts * base / 3)


def paper_bytes(base: float, experts: int, gpus: float, tensor: int = 1) -> float:
    """Equation 7.5, bytes of model state a GPU: 4·NP_base·(1/G_tensor + (E + 2)/G), with as many expert-parallel ranks as experts.

    Args:
        base: NP_base.
        experts: E.
        gpus: G.
        tensor: G_tensor; 1 for DeepSpeed-MoE.
    """
    return 4 * base * (1 / tensor + (experts + 2) / gpus)


def paper_largest_base(memory: float, tensor: int = 1, experts: int = 0, gpus: float = math.inf) -> float:
    """NP_base that fits: equation 7.6, G_tensor·M/4, without an end to GPUs, and equation 7.5 solved for NP_base with `gpus`.

    Args:
        memory: bytes of a GPU.
        tensor: G_tensor.
        experts: E.
        gpus: G.
    """
    return memory / paper_bytes(1, experts, gpus, tensor)


# By part.


def base_parameters(model: Transformer) -> int:
    """Parameters of the base model, NP_base, counted."""
    hidden = model.hidden
    return (model.vocabulary + model.context) * hidden + model.layers * (12 * hidden**2 + 13 * hidden) + 2 * hidden


def expert_layers(model: Transformer) -> int:
    """Layers that have experts: every second."""
    return model.layers // 2


def parameters(model: Transformer, experts: int, degrees: Degrees | None = None) -> Parameters:
    """Parameters of the MoE on one GPU; of the whole model without `degrees`.

    Tensor parallelism is Megatron's: biases of the second matrix of a pair, norms, positions and gates are on every rank, and the
    vocabulary is padded to what its ranks divide.

    Args:
        model: the base model.
        experts: in each layer that has them.
        degrees: how they are split.

    Raises:
        ValueError: experts or features do not divide.
    """
    degrees = degrees or Degrees()
    require_divides(model, experts, degrees)
    hidden, tensor, sparse = model.hidden, degrees.tensor, expert_layers(model)
    attention = (4 * hidden**2 + 3 * hidden) // tensor + hidden
    mlp = (8 * hidden**2 + 4 * hidden) // tensor + hidden
    tables = (-(-model.vocabulary // tensor) + model.context) * hidden
    norms = (2 * model.layers + 1) * 2 * hidden
    gates = sparse * experts * hidden
    return Parameters(
        shared=tables + norms + gates + model.layers * attention + (model.layers - sparse) * mlp,
        expert=sparse * experts // degrees.expert * mlp,
    )


def require_divides(model: Transformer, experts: int, degrees: Degrees) -> None:
    """Refuse experts that the expert degree, and features that the tensor degree does not divide.

    Raises:
        ValueError: one of these.
    """
    if experts < 1:
        raise ValueError(f"experts = {experts} is not a number of experts; use 1 or more")
    if experts % degrees.expert:
        raise ValueError(
            f"experts = {experts} do not divide among expert = {degrees.expert} ranks; use a multiple of {degrees.expert}"
        )
    if model.hidden % degrees.tensor:
        raise ValueError(
            f"tensor = {degrees.tensor} does not divide the {model.hidden} features of the model; use a divisor of {model.hidden}"
        )


def state(count: float, data: int) -> State:
    """Model state of `count` parameters with ZeRO-1, a term of equation 7.4: (4 + 12/G_data)·NP_gpu bytes.

    Args:
        count: parameters on the GPU.
        data: data-parallel ranks that share the optimizer's state.
    """
    return State(weights=2 * count, gradients=2 * count, optimizer=12 * count / data)


def state_bytes(local: Parameters, degrees: Degrees) -> float:
    """Equation 7.4: bytes of model state on a GPU with these parameters."""
    return state(local.shared, degrees.shared_data).total + state(local.expert, degrees.data).total


def step_bytes(local: Parameters, degrees: Degrees, tile: int | None = None) -> float:
    """Bytes that the optimizer's step needs besides (section 7.2): 4 for each element whose gradient is in float32.

    They are made for a parameter group at a time, experts or the others, and with tiles for `tile` elements at a time. That experts
    have E times fewer replicas to share the work is equation 7.7.

    Args:
        local: parameters on the GPU.
        degrees: how they are split.
        tile: elements of a tile; none, the whole group.
    """
    longest = max(local.shared / degrees.shared_data, local.expert / degrees.data)
    return 4 * (longest if tile is None else min(tile, longest))


def stock_step_bytes(local: Parameters, degrees: Degrees) -> float:
    """Bytes that the step of stock DeepSpeed's ZeRO-1 needs besides: 6 for each element of its longest group.

    It flattens a group's gradients before it makes them float32. Groups of experts have `STOCK_GROUP` elements at most.
    """
    return 6 * max(local.shared / degrees.shared_data, min(local.expert, STOCK_GROUP) / degrees.data)


def checkpoint_bytes(model: Transformer, tokens: int) -> int:
    """Activations that checkpointing keeps: the input of every layer, in 16 bits (section 7.3.2).

    Args:
        model: the base model.
        tokens: of a microbatch, on this GPU.
    """
    return 2 * model.layers * tokens * model.hidden


def stash_bytes(
    model: Transformer,
    experts: int,
    tokens: int,
    degrees: Degrees,
    k: int = 1,
    capacity_factor: float = 1.0,
    dropping: bool = True,
    fused: bool = True,
) -> int:
    """Bytes that communication-aware checkpointing stashes besides: the output of every collective of the first forward (section 7.3.2).

    A layer without experts has two all-reduces. One with experts has the all-reduce of attention, two all-to-alls and the experts'
    all-reduce; with duplicate token dropping the all-to-alls are G_tensor times smaller and each is followed by an all-gather; the fused
    form has a reduce-scatter for the experts' all-reduce, if there is dropping. Groups of one rank have no collectives.

    Args:
        model: the base model.
        experts: in each layer that has them.
        tokens: of a microbatch, on this GPU.
        degrees: how the model is split.
        k: experts that a token is sent to.
        capacity_factor: of an expert, over k·tokens/experts.
        dropping: duplicate tokens are dropped.
        fused: the drop after the experts' all-reduce and this are a reduce-scatter.
    """
    tensor, sparse = degrees.tensor, expert_layers(model)
    capacity = max(math.ceil(tokens * k * capacity_factor / experts), CAPACITY_FLOOR)
    if dropping:
        capacity = -(-capacity // tensor) * tensor
    routed = experts * capacity
    dropped = routed // tensor if dropping else routed
    reduces = (2 * model.layers - sparse) * tokens if tensor > 1 else 0
    exchanges = 2 * dropped if degrees.expert > 1 else 0
    reduced = (dropped if fused else routed) if tensor > 1 else 0
    gathers = 2 * routed if tensor > 1 and dropping else 0
    return 2 * model.hidden * (reduces + sparse * (exchanges + reduced + gathers))
