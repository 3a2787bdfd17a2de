"""The goldfish loss on Megatron's core alone, in float64: on grids of 1, 2 and 4 ranks the losses of one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from axonn_plugins.config import Goldfish
from axonn_plugins.goldfish import goldfish_mask
from axonn_plugins.hosts.megatron import patch
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_tp import Grid, factorisations
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.megatron import training
from tests.megatron.training import BATCH, SEQUENCE, VOCABULARY, Case

RULE = {"k": 2, "h": 5}
ROWS, STEPS = 2, 2
"""Of a microbatch, whose mean is Megatron's; and of the optimizer."""


def samples() -> list[dict[str, Tensor]]:
    """Batches of Megatron's own dataset for training, with targets left out as its hook does."""
    installed()
    tokenizer = SimpleNamespace(eod=VOCABULARY - 1, pad=-1, vocab_size=VOCABULARY, unique_identifiers={"class": "none"})
    flags = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    config = GPTDatasetConfig(
        random_seed=3,
        sequence_length=SEQUENCE,
        blend=None,
        split="1,0,0",
        tokenizer=tokenizer,
        mid_level_dataset_surplus=0.005,
        **flags,
    )
    (made, *_) = BlendedMegatronDatasetBuilder(MockGPTDataset, [STEPS * BATCH, 0, 0], lambda: True, config).build()
    generator = torch.Generator().manual_seed(5)
    found = []
    for first in range(0, STEPS * BATCH, BATCH):
        batch = {
            key: torch.stack([made[at][key] for at in range(first, first + BATCH)]) for key in made[0] if key != "index"
        }
        # The mock's ids stand in their order: drawn ones, masked by the hook's own rule, say more.
        drawn = torch.randint(VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
        assert torch.equal(batch["loss_mask"] == 0, goldfish_mask(batch["labels"], **RULE))
        kept = (~goldfish_mask(drawn[:, 1:], **RULE)).double()
        found.append({"tokens": drawn[:, :-1], "labels": drawn[:, 1:], "loss_mask": kept})
    return found


def forward(batches: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    batch = next(batches)
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    places = torch.arange(SEQUENCE).expand(len(batch["tokens"]), -1)
    logits = model(batch["tokens"], places, mask)
    return logits, partial(loss_of, batch)


def loss_of(batch: dict[str, Tensor], logits: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """As pretrain_gpt.py's, but in float64, which Megatron's cross-entropy is not."""
    each = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    total, kept = (each * batch["loss_mask"].flatten()).sum(), batch["loss_mask"].sum().int()
    return total, kept, {"loss": (total / kept).detach().clone()}


def losses(settings: Settings | None, batches: list[dict[str, Tensor]]) -> list[float]:
    # Megatron clips in float32.
    case = Case(settings=settings, dtype=torch.float64, optimizer={"clip_grad": 0.0}, model={"parallel_output": False})
    with training.parallel(case):
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        case = replace(case, micro_batches=BATCH // ranks // ROWS)
        model = training.build(case)
        optimizer = training._optimizer(case, model)
        config = model.module.config
        config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
        found = []
        for batch in batches:
            model.zero_grad_buffer()
            optimizer.zero_grad()
            parts = [
                {key: value[first : first + ROWS] for key, value in batch.items()}
                for first in range(rank * BATCH // ranks, (rank + 1) * BATCH // ranks, ROWS)
            ]
            told = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=iter(parts),
                model=model,
                num_microbatches=case.micro_batches,
                seq_length=SEQUENCE,
                micro_batch_size=ROWS,
                forward_only=False,
            )
            mean = torch.stack([one["loss"] for one in told]).double().mean()
            dist.all_reduce(mean, group=parallel_state.get_data_parallel_group())
            found.append(mean.item() / ranks)
            assert optimizer.step()[0]
    return found


def installed() -> None:
    training.on_cpu()
    torch.set_default_dtype(torch.float64)
    patch.install_components({"goldfish": Goldfish(**RULE)})


def on(grids: Iterable[Grid], batches: list[dict[str, Tensor]]) -> dict[str, list[float]]:
    installed()
    cases: dict[str, Settings | None] = {"Megatron's own": None}
    for grid in grids:
        cases[f"{grid.gx} {grid.gy} {grid.gz} {grid.gdata}"] = Settings(grid.gx, grid.gy, grid.gz)
    return {name: losses(settings, batches) for name, settings in cases.items()}


SOME = [Grid(2, 2, 1, 1), Grid(1, 1, 2, 2)]
"""Each axis is split in one."""


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_losses_on_grids(every: bool) -> None:
    batches = run_ranks(samples, 1)[0]
    one = run_ranks(on, 1, list(factorisations(1)) if every else [], batches)[0]["Megatron's own"]
    assert len(one) == STEPS and one[0] != one[1]
    for world in (2, 4) if every else (4,):
        grids = list(factorisations(world)) if every else SOME
        for rank in run_ranks(on, world, grids, batches):
            assert len(rank) == 1 + len(grids)
            apart = {name: max(abs(a - b) for a, b in zip(found, one, strict=True)) for name, found in rank.items()}
            assert max(apart.values()) < 1e-10, apart
