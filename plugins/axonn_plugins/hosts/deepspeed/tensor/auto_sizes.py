"""Sizes that the block leaves to the planner, ``"gx": "auto"``: chosen when the engine starts, for the model, batch and machine at hand.

DeepSpeed parses its configuration before it shows anybody the model, so it is parsed twice: with a stand-in for the grid, and once
the model is known with the sizes chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from torch import nn

from axonn_plugins.config import ConfigError, Ted, TensorParallel
from axonn_plugins.hosts.deepspeed.sections import enabled, section
from axonn_plugins.hosts.deepspeed.ted.layers import stand_ins
from axonn_plugins.hosts.deepspeed.tensor.config import check
from axonn_plugins.planner import choose, here, machine
from axonn_plugins.planner.space import factorizations
from axonn_tp import Grid, LayerPlan, Options, auto_plan, place
from axonn_tp.plan.volumes import local_parameters, step_volumes

_LENGTHS = (
    *("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length"),
    *("context", "context_length", "block_size"),
)
"""Names that models' configurations have for the tokens of a sample."""
_REFERENCE = Grid(gx=2, gy=2)


@dataclass(frozen=True)
class Chosen:
    """The sizes, and why."""

    sizes: Mapping[str, int]
    why: str


def choose_sizes(
    model: nn.Module,
    block: TensorParallel,
    raw: Mapping[str, Any],
    world: int,
    plan: Mapping[str, LayerPlan],
    options: Options,
    experts: Ted | None = None,
) -> Chosen:
    """The grid whose collectives take least time.

    Args:
        model: the serial model.
        block: some of its sizes are "auto".
        raw: the whole configuration, which has a train_batch_size.
        world: number of ranks.
        plan: the block's; where that is "auto", it is found on a grid of 2 x 2.
        options: of the run.
        experts: how the model's MoE layers are dealt out.

    Raises:
        ConfigError: no grid divides layers and batch, none fits, or the tokens of a sample are not known.
    """
    tokens = block.tokens_per_sample or _tokens(model)
    refused: list[str] = []
    # Experts' own traffic is the same on all of these grids: that of ep_size neighbours.
    with stand_ins(model, boundary=True):
        if block.plan == "auto":
            plan, _ = auto_plan(model, _REFERENCE, options=options)
        found = list(candidates(model, block, raw, world, plan, options, tokens, refused, _dealt(model, experts)))
    if not found:
        fixed = "".join(f", {axis} = {size}" for axis, size in block.given.items())
        first = f", for one because {refused[0].partition(';')[0]}" if refused else ""
        raise ConfigError(
            f"axonn.tensor_parallel: no grid of {world} ranks{fixed} divides train_batch_size = {raw['train_batch_size']} and the "
            f"model{first}; use another number of ranks or samples"
        )
    on = this_machine(block.machine)
    choices = choose.choose(on, found)
    sizes = {"gx": choices[0].gx, "gy": choices[0].gy, "gz": choices[0].gz}
    pinned = ", ".join(f'"{axis}": {size}' for axis, size in sizes.items())
    return Chosen(
        sizes, f"planner, on {on.name}: {choose.sentence(choices)}; to keep it, write {pinned} in axonn.tensor_parallel"
    )


def with_sizes(raw: Mapping[str, Any], sizes: Mapping[str, int]) -> dict[str, Any]:
    """The configuration with the chosen sizes in its block."""
    block = raw["axonn"]
    return {**raw, "axonn": {**block, "tensor_parallel": {**block["tensor_parallel"], **sizes}}}


def this_machine(name: str | None) -> machine.Machine:
    """The machine that the block names; else the one that `here` finds.

    Raises:
        ConfigError: there is no such machine, or its file is wrong.
    """
    accelerator = get_accelerator()
    cpu = accelerator.device_name() == "cpu"
    memory = None if cpu else float(accelerator.total_memory())
    return here.this_machine(name, "axonn.tensor_parallel.machine", cpu, memory)


def candidates(
    model: nn.Module,
    block: TensorParallel,
    raw: Mapping[str, Any],
    world: int,
    plan: Mapping[str, LayerPlan],
    options: Options,
    tokens: int,
    refused: list[str],
    ep_size: int = 1,
) -> Iterator[choose.Candidate]:
    """Grids that divide the model and the batch; `refused` gets why others do not."""
    for sizes in factorizations(world, 4):
        grid = Grid(*sizes)
        if any(getattr(grid, axis) != size for axis, size in block.given.items()):
            continue
        try:
            check(raw, grid)
            if grid.batch % ep_size:
                raise ValueError(f"ep_size = {ep_size} does not divide gz*gdata = {grid.batch}")
            placements = place(model, grid, plan, options)
        except ValueError as error:
            refused.append(str(error))
            continue
        samples, micro = raw["train_batch_size"] // grid.batch, raw.get("train_micro_batch_size_per_gpu")
        steps = raw.get("gradient_accumulation_steps") or (samples // micro if micro else 1)
        volumes = step_volumes(model, placements, grid, samples // steps * tokens, steps)
        held = local_parameters(model, placements, grid)
        flops = 6.0 * held * grid.gz * samples * tokens  # two for each weight and token, and twice as many in backward
        yield choose.candidate(grid, volumes, state_bytes(raw, grid) * held, flops)


def _dealt(model: nn.Module, experts: Ted | None) -> int:
    """Ranks that read different data and have different experts."""
    sizes = [layer.ep_size for layer in model.modules() if isinstance(layer, MoE)]
    return max(sizes, default=1) if experts is not None and experts.expert_tensor_parallel is not False else 1


def state_bytes(raw: Mapping[str, Any], grid: Grid) -> float:
    """Bytes of one parameter with Adam on a rank: weight, gradient and states, of which ZeRO's stages share out over data."""
    stage = section(raw, "zero_optimization").get("stage", 0)
    half = enabled(raw, "fp16") or enabled(raw, "bf16")
    weights, gradients, optimizer = (2, 2, 12) if half else (4, 4, 8)
    return weights + gradients / (grid.gdata if stage >= 2 else 1) + optimizer / (grid.gdata if stage >= 1 else 1)


def _tokens(model: nn.Module) -> int:
    config = getattr(model, "config", None)
    for name in _LENGTHS:
        size = getattr(config, name, None)
        if isinstance(size, int) and not isinstance(size, bool) and size > 0:
            return size
    raise ConfigError(
        'axonn.tensor_parallel has sizes that are "auto", but the model\'s config does not say how many tokens a sample has; '
        "add tokens_per_sample to the block, 1 where a sample is one row"
    )
