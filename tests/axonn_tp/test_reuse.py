"""Blocks that are alike are simulated once, and the search finds what it finds where every block is simulated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, auto_plan
from axonn_tp.plan.search.replay import Replay
from tests.axonn_tp.families import FAMILIES, GROUPED, SIZES, T5, WHISPER, hf, litgpt
from tests.matrix import names, thorough

FOUR = {"num_hidden_layers": 4}
SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: hf("LlamaForCausalLM", **{**GROUPED, **FOUR}),
    "sliding windows": lambda: hf(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        **{**GROUPED, "num_hidden_layers": 6, "head_dim": 8, "sliding_window": 3, "query_pre_attn_scalar": 8},
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    ),
    "experts in every second": lambda: hf(
        "Qwen3MoeForCausalLM", **{**GROUPED, **SPARSE, "head_dim": 8, "num_hidden_layers": 5}
    ),
    "bert": lambda: hf("BertForMaskedLM", **{**SIZES, **FOUR}, pad_token_id=0),
    "one block called often": lambda: hf(
        "AlbertForMaskedLM", **{**SIZES, **FOUR}, embedding_size=16, pad_token_id=0, num_hidden_groups=2
    ),
    "gpt2": lambda: hf("GPT2LMHeadModel", n_embd=32, n_head=4, n_layer=4, vocab_size=50, n_positions=16),
    "scaled by the layer's number": lambda: hf(
        "GPT2LMHeadModel", n_embd=32, n_head=4, n_layer=4, vocab_size=50, scale_attn_by_inverse_layer_idx=True
    ),
    "t5": lambda: hf("T5ForConditionalGeneration", **{**T5, "num_layers": 4}),
    "whisper": lambda: hf("WhisperForConditionalGeneration", **{**WHISPER, "decoder_layers": 3, "encoder_layers": 3}),
    "litgpt": lambda: litgpt(n_layer=4),
    "ours": lambda: GPT(GPTConfig(50, 16, 4, 4, 32)),
    "torch": FAMILIES["torch"][0],
}


def searched(model: nn.Module, grid: Grid, **arguments: Any) -> tuple[str, Counter[str]]:
    """The plan and its report as text, and how often blocks answered as each one did."""
    replays: list[Replay] = []
    original = Replay.__init__

    def noted(self: Replay, *given: Any) -> None:
        original(self, *given)
        replays.append(self)

    with mock.patch.object(Replay, "__init__", noted):
        plan, report = auto_plan(model, grid, **arguments)
    return f"{sorted(plan.items())} {report}", sum((replay.repeated for replay in replays), Counter())


EVERY_RUN = ("llama", "sliding windows", "experts in every second", "one block called often", "t5", "ours")


@pytest.mark.parametrize("name", names(MODELS, EVERY_RUN))
def test_the_same_is_found_as_by_simulating_every_block(name: str) -> None:
    pytest.importorskip("transformers")
    model = MODELS[name]()
    found, repeated = searched(model, Grid(2, 2))
    slow, none = searched(model, Grid(2, 2), reuse=False)
    assert found == slow
    assert not none
    assert bool(repeated) == (name not in ("one block called often", "torch", "scaled by the layer's number"))
    if name == "sliding windows":
        assert {name.rpartition(".")[2] for name in repeated} == {"0", "2"}
    if name == "experts in every second":
        assert {name.rpartition(".")[2] for name in repeated} == {"0", "1"}


class Block(nn.Module):
    """A residual block of one normal and one transposed layer; `what` says what is special about the last of four."""

    def __init__(self, what: str, number: int, shared: nn.Linear) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8)
        self.number, self.last, self.what = number, float(number == 3), what
        self.mode = "mixed" if number == 3 and what == "word" else "plain"
        self.seen: list[torch.Tensor] = []
        if what == "shared module":
            self.down = shared
        if what == "tied weights" and number == 3:
            self.up.weight = shared.weight

    def forward(self, x: torch.Tensor, given: list[torch.Tensor], number: int | None = None) -> torch.Tensor:
        h = F.silu(self.up(self.norm(x)))
        if self.mode == "mixed" or number == 3 or (self.what == "number" and self.number == 3):
            h = h.softmax(-1)
        if self.what == "attribute" and self.last:
            h = h - h.mean(-1, keepdim=True)
        if self.what == "share alone" and h.shape[-1] < 12 and self.last:
            h = h.flip(-1)
        if self.what == "state":
            self.state = h.shape[-1]
        if self.what == "random":
            h = h * (1 + torch.rand(()))
        if self.what == "list":
            given.append(h.sum(-1, keepdim=True))
        if self.what == "global":
            GLOBAL.append(h)
        return x.add_(self.down(h)) if self.what == "in place" else x + self.down(h)


GLOBAL: list[torch.Tensor] = []


class Blocks(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        shared = nn.Linear(8, 12) if what == "tied weights" else nn.Linear(12, 8)
        self.what = what
        self.blocks = nn.ModuleList(Block(what, number, shared) for number in range(4))
        self.shared = shared if what == "tied weights" else nn.Identity()
        self.table, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        if what == "buffer":
            for number, block in enumerate(self.blocks):
                block.register_buffer("mask", torch.full((12,), float(number == 3)))
        if what == "hook":
            self.blocks[3].down.register_forward_pre_hook(lambda _, inputs: (inputs[0].flip(-1),))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        GLOBAL.clear()
        x, given = self.table(ids), []
        for number, block in enumerate(self.blocks):
            before = x.clone() if self.what == "in place" else x
            x = block(before, given if self.what == "list" else None, number if self.what == "argument" else None)
        for more in [*given, *(h.mean(-1, keepdim=True) for h in GLOBAL)]:
            x = x + more
        return self.head(x + self.shared(x).mean() if self.what == "tied weights" else x)


ALIKE = ("nothing", "word", "number", "attribute", "share alone", "shared module", "tied weights", "state", "random")
ALIKE += ("list", "global", "in place", "argument", "buffer", "hook")


@pytest.mark.parametrize("grid", [thorough(Grid(2, 1)), Grid(2, 2)], ids=["x", "x and y"])
@pytest.mark.parametrize("what", ALIKE)
def test_blocks_that_differ_a_little_are_not_taken_as_alike(what: str, grid: Grid) -> None:
    model = Blocks(what)
    found, repeated = searched(model, grid)
    slow, _ = searched(model, grid, reuse=False)
    assert found == slow, what
    if what in ("state", "random", "list", "in place", "shared module"):
        assert not repeated, what
    whole = what in ("word", "number", "attribute", "share alone", "argument", "hook", "list", "global", "tied weights")
    assert ("'blocks.3.up', LayerPlan(kind='normal'" in found) == (not whole), found
