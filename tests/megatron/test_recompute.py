"""Communication-aware checkpointing under Megatron's recomputation: the same numbers with fewer collectives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from axonn_plugins.config import Ted
from axonn_plugins.hosts.megatron import recompute
from axonn_plugins.hosts.megatron.settings import Settings
from ted_moe import stash
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.megatron import training
from tests.megatron.test_experts import GATED, LATENT, ROUTED
from tests.megatron.training import Case

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
GRIDS = [Case(Settings(1, 2, 2)), Case(masked=True, config={"cp_comm_type": "p2p"}).on(Settings(2, 1, 1), context=2)]
MORE = [
    Case(Settings(2, 2, 1, "replicated")),
    Case(masked=True, config={"cp_comm_type": "p2p"}).on(Settings(1, 1, 2), context=4),
    Case(config={"cp_comm_type": "all_gather"}).on(Settings(2, 1, 1), context=2),
    Case(Settings(2, 1, 2)),
    Case(Settings(1, 1, 4)),
]


class Collectives(TorchDispatchMode):
    """Counts those that a stash would keep, over other ranks than z's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function in stash._COLLECTIVES
        return function(*args, **(kwargs or {}))


def counted(case: Case) -> tuple[dict[str, Any], int]:
    """A run, and how many collectives it had."""
    with training.parallel(case), Collectives() as found:
        return training.train(case), found.count


def all_grids(grids: list[Case]) -> dict[str, list[Any]]:
    """By grid: recomputed without and with a stash, and not recomputed."""
    training.on_cpu()
    found = {}
    for grid in grids:
        case = replace(grid, config={**grid.config, **FULL}, steps=1, micro_batches=2)
        runs = [counted(case)]
        recompute.install(Ted())
        runs.append(counted(case))
        recompute.uninstall()
        runs.append(counted(replace(grid, steps=1, micro_batches=2)))
        found[f"{grid.settings} over {grid.context}"] = [(told["losses"], told["norms"], count) for told, count in runs]
    return found


@pytest.mark.parametrize("grids", [GRIDS, thorough(MORE)], ids=["some", "others"])
def test_a_recomputation_communicates_nothing_but_weights(grids: list[Case]) -> None:
    for grid, (again, kept, once) in run_ranks(all_grids, 4, grids)[0].items():
        print(grid, again[2], kept[2], once[2])
        assert kept[:2] == again[:2], grid
        assert kept[2] <= again[2] and (kept[2] < again[2] or "gx=1, gy=1" in grid), grid
        if "gz=1" in grid:
            assert kept[2] == once[2]


MODULES: dict[str, tuple[Settings, dict[str, Any], list[str]]] = {
    "biases": (Settings(2), {}, ["mlp", "core_attn", "layernorm"]),
    "latents": (
        Settings(1, 2),
        {**LATENT, "q_lora_rank": 16, "add_bias_linear": False},
        ["mla_up_proj", "mlp", "layernorm"],
    ),
    "experts": (
        Settings(1, 1, 2),
        {**ROUTED, **GATED, "moe_shared_expert_intermediate_size": 32, "moe_layer_freq": [0, 1]},
        ["shared_experts", "mlp", "layernorm"],
    ),
}
"""A grid, a configuration, and what is recomputed of it."""


def _by_modules() -> dict[str, list[dict[str, Any]]]:
    training.on_cpu()
    found = {}
    for name, (settings, config, modules) in MODULES.items():
        again = {"recompute_granularity": "selective", "recompute_modules": modules}
        case = Case(settings, config=config, batch=training.FEW, steps=1)
        found[name] = [counted(one)[0] for one in (case, replace(case, config={**config, **again}))]
    return found


def test_modules_that_are_recomputed_train_as_those_that_are_kept() -> None:
    """An MLP with biases returns one beside its output, which Megatron's recomputation must not take for its own."""
    for name, (kept, again) in run_ranks(_by_modules, 2)[0].items():
        for what in ("losses", "norms"):
            assert again[what] == pytest.approx(kept[what], rel=1e-6), (name, what)
