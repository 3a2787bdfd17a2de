"""Checkpoints of experts, latents and predictions go on at other degrees, and in stock Megatron and back."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.dist_checkpointing.strategies import filesystem_async

from axonn_plugins.hosts.megatron import checkpoint
from axonn_plugins.hosts.megatron.settings import Settings
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.megatron import training
from tests.megatron.test_checkpoint import SHARDED, interrupted
from tests.megatron.test_experts import GATED, LATENT, ROUTED
from tests.megatron.training import Case

CONFIG: dict[str, Any] = {
    **{**ROUTED, **GATED, **LATENT},
    **{"q_lora_rank": 16, "mtp_num_layers": 1, "moe_layer_freq": [0, 1], "moe_router_load_balancing_type": "none"},
    **{"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True, "moe_aux_loss_coeff": 0},
    **{"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
}
SPLIT, BETWEEN, WHOLE = (Settings(2, 1, 2), (2, None)), (Settings(1, 1, 2), (4, None)), (Settings(1, 2), (4, 1))
STOCK, STOCK_ALONE = (None, (4, 1)), (None, (1, None))
ROUTES: dict[str, tuple[dict[str, Any], Any, list[Any]]] = {
    "whole states": ({}, SPLIT, [BETWEEN, STOCK_ALONE]),
    "shared states": (SHARDED, SPLIT, [WHOLE, STOCK_ALONE]),
    "from stock": (SHARDED, STOCK, [SPLIT, BETWEEN]),
    "from stock, whole states": ({}, STOCK, [BETWEEN]),
}
"""From where to where; stock Megatron with experts over several ranks has two optimizers, and asks for two in a checkpoint."""
SOME = {"shared states": [STOCK_ALONE], "from stock, whole states": [BETWEEN]}
"""Those in every run."""


def _all(folder: str, every: bool) -> dict[str, dict[str, list[float]]]:
    training.on_cpu()
    filesystem_async._results_queue = queue.Queue()  # as in test_checkpoint
    checkpoint.install()
    found = {}
    for name, (ddp, first, others) in ROUTES.items():
        if not every and name not in SOME:
            continue
        place = Path(folder, name)
        if dist.get_rank() == 0:
            place.mkdir()
        dist.barrier()
        found[name] = interrupted(Case(config=CONFIG, ddp=ddp), str(place), first, others if every else SOME[name])
    checkpoint.uninstall()
    return found


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_experts_go_on_at_other_degrees_and_in_stock(tmp_path: Path, every: bool) -> None:
    found = run_ranks(_all, 4, str(tmp_path), every)[0]
    assert found.keys() == (ROUTES if every else SOME).keys()
    for name, told in found.items():
        others = {place: losses for place, losses in told.items() if place not in ("first", "whole")}
        assert len(others) == len(ROUTES[name][2] if every else SOME[name])
        for place, losses in others.items():
            assert np.allclose(losses, told["whole"], rtol=2e-5), (name, place, losses, told["whole"])
