"""`torch.compile` on split models: with `Options(compile=True)` one graph, without it right numbers from layers that are left as they are."""

from __future__ import annotations

import copy
import os
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import axonn_tp
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, Mesh, Options
from axonn_tp.compiled.refusals import check_compiled
from axonn_tp.plan.placement import place
from tests.axonn_tp.families import SIZES, hf
from tests.axonn_tp.test_auto import loss_of
from tests.axonn_tp.test_grids import Step, gpt_loss, gpt_plan, largest_error, serial_step
from tests.distributed import run_ranks
from tests.matrix import names

CONFIG = GPTConfig(vocabulary=19, context=6, layers=1, heads=4, hidden=16)
COMPILED = Options(layout="replicated", compile=True)
TOLERANCE = 1e-10


def errors_of(
    expected: Step, parallel: nn.Module, compiled: nn.Module, mesh: Mesh, loss: Callable[..., torch.Tensor], *batch: Any
) -> dict[str, float]:
    """Of a step by the model as it is compiled, against the serial one."""
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=0.1, weight_decay=0.1)
    reducer = axonn_tp.GradientReducer(parallel.parameters(), mesh, bucket_bytes=3000)
    for _ in range(2):
        parallel.zero_grad()
        mine = loss(compiled, *(mesh.shard_batch(tensor) for tensor in batch))
        mine.backward()
        reducer.finish()
    mean = mine.detach().clone()
    dist.all_reduce(mean, group=mesh.group("batch"))
    gradients = {id(p): expected.gradients[name] for name, p in expected.after.named_parameters()}
    errors = {
        "loss": (mean / mesh.grid.batch - expected.loss).abs().item(),
        "gradients": largest_error(expected.after, parallel, mesh, lambda p: gradients.get(id(p), p.grad)),
    }
    axonn_tp.clip_grad_norm_(parallel.parameters(), mesh, 0.5)
    optimizer.step()
    return errors | {"weights": largest_error(expected.after, parallel, mesh, lambda p: p.data)}


class Odd(nn.Module):
    """Ids of padding, a layer that reads whole features, a weight that code reads, RMSNorm, a weighted loss of smoothed labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(19, 16, padding_idx=3), nn.RMSNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.head, self.loss = (
            nn.Linear(16, 19),
            nn.CrossEntropyLoss(torch.rand(19), label_smoothing=0.1, ignore_index=5),
        )

    def forward(self, given: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.table(given)
        x = x + self.down(self.up(self.norm(x)).relu())
        return self.loss(self.head(x).flatten(0, 1), targets.flatten()) + self.up.weight.square().sum()


ODD = {"table": "embedding", "norm": "norm", "up": "normal", "down": "transposed", "head": "head", "loss": "loss"}


@dataclass
class Case:
    """A model on a grid, how it is compiled, and whether without a break."""

    build: Callable[[], nn.Module]
    plan: Any
    grid: Grid
    backend: str | None = "aot_eager"
    whole: bool = True
    options: Options = COMPILED
    loss: Callable[..., torch.Tensor] = gpt_loss

    def batch(self) -> tuple[torch.Tensor, ...]:
        """Its arguments, and those of its loss."""
        drawn = torch.randint(19, (4, CONFIG.context + 1), generator=torch.Generator().manual_seed(3))
        return (drawn,) if self.loss is gpt_loss else (drawn[:, 1:], drawn[:, :-1])


def llama() -> nn.Module:
    """One that runs its blocks again in backward."""
    model = hf("LlamaForCausalLM", **{**SIZES, "num_hidden_layers": 1}, num_key_value_heads=2, use_cache=False).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def gpt2() -> nn.Module:
    """One whose attention reads from itself how wide it is."""
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16, "vocab_size": 50}
    return hf("GPT2LMHeadModel", **sizes, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0))


GPT_OF = partial(GPT, CONFIG)
TIED = partial(GPT, replace(CONFIG, tied=True))
CASES: dict[str, tuple[int, dict[str, Case]]] = {
    "some": (
        2,
        {
            "gz": Case(TIED, gpt_plan(4), Grid(1, 1, 2)),
            "odd": Case(Odd, ODD, Grid(2), whole=False),
            "left as it is": Case(GPT_OF, gpt_plan(4), Grid(2), whole=False, options=Options()),
        },
    ),
    "two": (
        2,
        {
            "gx": Case(GPT_OF, gpt_plan(4), Grid(2)),
        },
    ),
    "four": (
        4,
        {
            "not compiled": Case(GPT_OF, gpt_plan(4), Grid(2, 2), backend=None),
            "gx, gz": Case(TIED, gpt_plan(4), Grid(2, 1, 2), backend="inductor"),
            "gy": Case(GPT_OF, gpt_plan(4), Grid(1, 2, 1, 2)),
            "gx, gy": Case(GPT_OF, gpt_plan(4), Grid(2, 2)),
            "gy, gz": Case(TIED, gpt_plan(4), Grid(1, 2, 2)),
            "no plan": Case(GPT_OF, {}, Grid(1, 2, 2)),
            "odd": Case(Odd, ODD, Grid(2, 2), whole=False),
            "llama": Case(llama, "auto", Grid(2, 1, 2), loss=loss_of),
            "gpt2": Case(gpt2, "auto", Grid(1, 2, 1, 2), loss=loss_of),
        },
    ),
}
"""With their ranks; of those of four inductor compiles as well as traces one. In every run some, the others in thorough ones."""


def train(cases: dict[str, Case], expected: dict[str, Step]) -> dict[str, tuple[dict[str, float], list[str]]]:
    """Errors of every case, and what was warned of."""
    found = {}
    for name, case in cases.items():
        mesh = Mesh(case.grid)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model = axonn_tp.parallelize(copy.deepcopy(expected[name].before), mesh, case.plan, case.options)
            compiled = model
            if case.backend is not None:
                compiled = torch.compile(model, fullgraph=case.whole, backend=case.backend)
            errors = errors_of(expected[name], model, compiled, mesh, case.loss, *case.batch())
        found[name] = errors, [str(warning.message) for warning in told]
        mesh.destroy()
    if "no plan" in cases:
        found["autocast"] = {"gradients": in_bfloat16(GPT_OF, *cases["no plan"].batch())}, []
    return found


def in_bfloat16(build: Callable[[], nn.Module], given: torch.Tensor) -> float:
    """How far gradients under autocast are from those of the same model that is not compiled, relative to them."""
    mesh, found = Mesh.create(2, 1, dist.get_world_size() // 2), []
    for compiles in (False, True):
        torch.manual_seed(7)
        model = axonn_tp.parallelize(build(), mesh, gpt_plan(4), COMPILED)
        run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiles else model
        with torch.autocast("cpu", torch.bfloat16):
            gpt_loss(run, mesh.shard_batch(given)).backward()
        found.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    mesh.destroy()
    return ((found[1] - found[0]).norm() / found[0].norm()).item()


@pytest.fixture(scope="module", params=names(CASES, ["some"]))
def trained(request: pytest.FixtureRequest) -> list[dict[str, tuple[dict[str, float], list[str]]]]:
    ranks, cases = CASES[request.param]
    expected = {name: serial_step(case.build, case.loss, case.batch()) for name, case in cases.items()}
    with mock.patch.dict(
        os.environ, TORCHINDUCTOR_COMPILE_THREADS="1"
    ):  # the compiler's processes would be the parent's
        return run_ranks(train, ranks, cases, expected)


def test_a_compiled_model_equals_the_serial_one(trained: list) -> None:
    for rank in trained:
        for name, (errors, told) in rank.items():
            assert max(errors.values()) < (1e-2 if name == "autocast" else TOLERANCE), (name, errors)
            left = any("torch.compile leaves split layers" in words for words in told)
            assert left == (name == "left as it is"), (name, told)


REFUSED = {
    "layout": ({}, "layout = 'scattered' does not go with compile = True"),
    "reshard": ({"reshard_after_forward": True}, "reshard_after_forward = True does not"),
    "cache": ({"cache_gathers": "all"}, "cache_gathers = 'all' does not"),
    "tuned": ({"tune_matmuls": True}, "tune_matmuls = True does not"),
    "statistics": ({"sync_batch_norm": True}, "sync_batch_norm = True does not"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_are_not_traced_are_refused(name: str) -> None:
    given, words = REFUSED[name]
    with pytest.raises(ValueError, match=re.escape(words)):
        Options(**({"layout": "replicated"} if given else {}) | given, compile=True)


class Dropping(nn.Module):
    """Names of layers, and a probability that functional dropout reads."""

    def __init__(self, attention_dropout: float = 0.0, p: float = 0.0) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout
        self.conv, self.drop, self.up = nn.Conv2d(4, 4, 1), nn.Dropout(p), nn.Linear(4, 4)


MODELS = {
    "convolution": (Dropping(), Grid(2), {}, "layer conv: a Conv2d that is split is not traced"),
    "dropout": (
        Dropping(p=0.1),
        Grid(2),
        {"conv": "replicated"},
        "drop.p = 0.1 does not go with compile = True on gx = 2",
    ),
    "attribute": (Dropping(0.2), Grid(1, 2), {"conv": "replicated"}, "attention_dropout = 0.2 does not go"),
    "sequences": (Dropping(), Grid(1, 1, 2, sequence=2), {"conv": "replicated"}, "sequence = 2 does not go"),
    "dropout alone on z": (Dropping(0.2, 0.1), Grid(1, 1, 2), {"conv": "replicated"}, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_are_not_traced_are_refused(name: str) -> None:
    model, grid, plan, words = MODELS[name]
    placements = place(model, grid, plan, COMPILED)
    with nullcontext() if words is None else pytest.raises(ValueError, match=re.escape(words)):
        check_compiled(model, placements, grid)
