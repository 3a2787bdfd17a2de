"""A model with experts on any 4D mesh: dense layers in 3D PMM, DeepSpeed's MoE layers and others' experts TED's, with or without an engine.

The ranks of an x-y plane, which read the same tokens, are TED's tensor ranks. Those that differ in z and data read different
tokens: neighbours among them have different experts, the rest is expert data (equation 7.1 with G_tensor = gx·gy). The mesh serves
all parameters: experts' layouts name the grid of its ranks that they lie on, which `axonn_tp` reads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import torch.distributed as dist
from deepspeed.moe.layer import MoE as StockMoE
from torch import nn

from axonn_plugins.config import ConfigError, Ted
from axonn_plugins.hosts.common.experts import cuts_for, expert_ranks_for, experts_of
from axonn_plugins.hosts.deepspeed.ted.experts import exchange_weights, marked, refuse_others
from axonn_plugins.hosts.deepspeed.ted.layers import Within, adopt, expert_ranks, passing_by, stand_ins, stock_layers
from axonn_tp import Grid, LayerPlan, Mesh, Options, Placement, Report, auto_plan, parallelize, place
from axonn_tp.grid.distribute import agree_on_unread
from axonn_tp.plan.rules import Plan
from ted_moe import Groups, Topology, adapters
from ted_moe.adapters import Cut, Experts, blocks_of


@dataclass(frozen=True)
class MeshSplit:
    """The split of a model, or of the layers of one pipeline stage.

    Attributes:
        plan: of the dense layers; experts are named replicated, which leaves them to TED.
        placements: of all dense layers that change.
        report: what an automatic plan says.
        topology: of the experts; None where there are none.
        experts: by name, those that are not in DeepSpeed's layers.
        cuts: how these are split over the tensor ranks.
    """

    plan: Mapping[str, LayerPlan]
    placements: list[Placement] = field(default_factory=list)
    report: Report | None = None
    topology: Topology | None = None
    experts: Mapping[str, Experts] = field(default_factory=dict)
    cuts: Mapping[str, Mapping[str, Cut]] = field(default_factory=dict)


def split_with_experts(
    model: nn.Module,
    mesh: Mesh,
    block: Ted | None = None,
    plan: Plan | Literal["auto"] = "auto",
    options: Options | None = None,
    example_inputs: Any = None,
) -> Groups | None:
    """Split a model's dense layers on a mesh and make its MoE layers TED's, in place; every rank of every stage calls it.

    Afterwards forward, backward, `axonn_tp.sync_gradients`, `axonn_tp.clip_grad_norm_` and a torch optimizer's step train what one
    process with all experts trains that routes the tokens of each z and data by itself.

    Args:
        model: the serial model, or one pipeline stage's layers; of each MoE layer it has this rank's num_experts / ep_size experts.
        mesh: of the model, or of this rank's stage.
        block: TED's choices; its `tensor` is left out, for x and y say it.
        plan: of the dense layers, see `axonn_tp.parallelize`.
        options: of the dense layers.
        example_inputs: for the automatic plan, see `axonn_tp.auto_plan`.

    Returns:
        The experts' process groups; None where there are no MoE layers.

    Raises:
        ValueError: on every rank, the first rank's reason.
    """
    block, problem, split = block or Ted.model_validate({}), None, MeshSplit({})
    try:
        split = find_split(model, mesh.grid, block, plan, options, example_inputs)
    except ValueError as error:
        problem = str(error)
    _agree(problem)
    return apply_split(model, mesh, block, split, options)


def find_split(
    model: nn.Module,
    grid: Grid,
    block: Ted,
    plan: Plan | Literal["auto"] = "auto",
    options: Options | None = None,
    example_inputs: Any = None,
) -> MeshSplit:
    """Find the split of a model; communicates nothing and changes nothing. See `split_with_experts`.

    Raises:
        ValueError: it cannot be split so.
    """
    layers, report = stock_layers(model), None
    others = experts_of(model, layers)
    if not layers and not others and block.expert != "auto":
        raise ValueError(
            f"expert = {block.expert}, and no experts were found in {type(model).__name__}; leave expert out"
        )
    topology = _topology(layers, others, grid, block) if layers or others else None
    cuts = {} if topology is None else cuts_for(others, topology.expert_tensor)
    if isinstance(model, StockMoE):
        return MeshSplit({"*": LayerPlan("replicated")}, topology=topology)
    mixtures = blocks_of(model, others) if grid.gx * grid.gy > 1 else {}
    if plan == "auto":
        with stand_ins(model, boundary=True), adapters.stand_ins(model, mixtures, others):
            plan, report = auto_plan(model, grid, example_inputs, options)
    elif isinstance(plan, str):
        raise ValueError(f'plan = {plan!r} is not a plan; give what layers become by name pattern, or "auto"')
    else:
        _refuse_experts_in(plan, model, [*layers, *others])
    listed = [name for name, experts in others.items() if experts.lists]
    whole = {f"{name}.*" if name else "*": LayerPlan("replicated") for name in (*layers, *mixtures, *listed)}
    named = whole | {pattern: LayerPlan.of(pattern, layer) for pattern, layer in plan.items()}
    return MeshSplit(named, place(model, grid, named, options), report, topology, others, cuts)


def apply_split(
    model: nn.Module, mesh: Mesh, block: Ted, split: MeshSplit, options: Options | None = None
) -> Groups | None:
    """Do what `find_split` found; every rank of every stage calls it, also of one without MoE layers. See `split_with_experts`.

    Raises:
        ValueError: experts' weights would be lost; on every rank.
    """
    layers, mine = stock_layers(model), None
    _keep_experts(layers, split.topology)
    for topology in _topologies(split):
        groups = _groups(mesh, topology)
        if topology == split.topology:
            mine = groups
    for name, layer in layers.items():
        assert mine is not None
        adopt(layer, mine, block, within=Within(mesh, experts_grid(mine.topology)))
        layer.number = mine.enrol(name)  # type: ignore[assignment]
        layer.shared_out = mine.topology.tensor > 1 or mine.topology.expert > 1  # type: ignore[assignment]
    agree_on_unread(model, mesh)
    _spread(model, mesh, block, split, mine)
    parallelize(model, mesh, split.plan, options)
    if mesh.grid.sequence > 1:
        model.axonn_sequences.aside = partial(without_experts, model)  # type: ignore[union-attr]
    return mine


@contextmanager
def without_experts(model: nn.Module) -> Iterator[None]:
    """Tokens skip all experts, as while layers are compared: routing is not continuous, and rounding may send a token elsewhere."""
    with passing_by(model), adapters.passing_by(model):
        yield


def _spread(model: nn.Module, mesh: Mesh, block: Ted, split: MeshSplit, groups: Groups | None) -> None:
    """Deal out the experts that are not in DeepSpeed's layers."""
    choices = adapters.Choices(block.duplicate_token_dropping, block.fused, block.overlap_degree)
    enclosed = blocks_of(model, split.experts) if mesh.size("model") > 1 else {}
    for name, experts in split.experts.items():
        assert groups is not None
        adapters.adopt(experts, split.cuts[name], groups, mesh.over(experts_grid(groups.topology)), choices)
    for name in enclosed:
        adapters.enclose(model.get_submodule(name), mesh)


def experts_grid(topology: Topology) -> Grid:
    """The experts' grid on a mesh's ranks: tensor is x where experts are split, expert is z, expert data is data."""
    return Grid(gx=topology.expert_tensor, gz=topology.expert, gdata=topology.expert_data)


def experts_groups(mesh: Mesh, topology: Topology) -> dict[str, dist.ProcessGroup]:
    """The groups of experts by TED's axis, also those of one rank: what `tables.Tables` takes, after `apply_split`."""
    on = mesh.over(experts_grid(topology))
    return {"expert": on.group("z"), "expert_data": on.group("data")}


def _topology(layers: Mapping[str, StockMoE], others: Mapping[str, Experts], grid: Grid, block: Ted) -> Topology:
    plane, batch = grid.gx * grid.gy, grid.batch
    given, said = expert_ranks(dict(layers)), f"ep_size = {expert_ranks(dict(layers))} of the MoE layers"
    if layers and block.expert not in ("auto", given):
        raise ValueError(
            f"expert = {block.expert}, but the MoE layers have ep_size = {given}; leave expert out, or make them equal"
        )
    expert = given
    if others:
        dealt = block if not layers else block.model_copy(update={"expert": given})
        expert = expert_ranks_for(others, grid, dealt)
        said = said if layers else f"expert = {expert}"
    if block.tensor not in (1, plane):
        raise ValueError(
            f"tensor = {block.tensor}, but gx*gy = {grid.gx}*{grid.gy} = {plane} ranks split the dense layers, and experts with them; leave "
            "tensor out"
        )
    whole = block.expert_tensor_parallel is False
    if not whole and batch % expert:
        raise ValueError(
            f"{said} does not divide gz*gdata = {grid.gz}*{grid.gdata} = {batch}, the ranks that read "
            f"different data; choose one that divides {batch}"
        )
    if whole and (grid.world % expert or max(expert, plane) % min(expert, plane)):
        raise ValueError(
            f"{said}, whose experts expert_tensor_parallel = false leaves whole, neither divides nor is a "
            f"multiple of gx*gy = {plane}, or does not divide the grid's {grid.world} ranks; choose another, or leave expert_tensor_parallel out"
        )
    name = marked(layers)
    if name is not None and plane > 1:
        raise ValueError(
            f"layer {name} has experts that are split already (tensor_model_parallel), and gx*gy = {plane} ranks would split them again; build "
            "it with whole experts"
        )
    return Topology(grid.world, plane, expert, not whole)


def _refuse_experts_in(plan: Plan, model: nn.Module, layers: Collection[str]) -> None:
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern in plan:
        found = [name for name in names if fnmatchcase(name, pattern)]
        if found and all(any(name.startswith(f"{layer}.") for layer in layers) for name in found):
            raise ValueError(
                f"plan {pattern!r} names parts of MoE layers alone ({found[0]}), which TED splits itself; remove it from the plan"
            )


def _topologies(split: MeshSplit) -> list[Topology]:
    """Topologies of all stages, in one order on all ranks: groups are made by all together."""
    everyone: list[Topology | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, split.topology)
    return list(dict.fromkeys(topology for topology in everyone if topology is not None))


def _groups(mesh: Mesh, topology: Topology) -> Groups:
    of_experts = experts_groups(mesh, topology)
    known = {"tensor": mesh.group("model"), "data": mesh.group("batch"), **of_experts}
    if topology.block == mesh.grid.world:
        known["block"] = mesh.group("grid")
    return Groups(topology, known, dist.get_world_size() // topology.world)


def _keep_experts(layers: Mapping[str, StockMoE], topology: Topology | None) -> None:
    """Refuse experts that a script has made for the ranks of stock DeepSpeed without tensor parallelism."""
    everyone, problem = exchange_weights(layers, 1 if topology is None else topology.expert), None
    if topology is not None:
        stages, first = dist.get_world_size() // topology.world, dist.get_rank() - dist.get_rank() % topology.world
        of_stage = everyone[first : first + topology.world]
        if stages > 1:
            # Of these ranks DeepSpeed's tables know other numbers.
            of_stage = [replace(weights, known=None) for weights in of_stage]
        stock = [Topology(topology.world, 1, topology.expert)] if topology.tensor > 1 else []
        try:
            refuse_others(of_stage, topology, stock, own=False)
        except ConfigError as error:
            problem = str(error)
    _agree(problem)


def _agree(problem: str | None) -> None:
    """Raise the first rank's problem on every rank."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for found in problems:
        if found is not None:
            raise ValueError(found)
