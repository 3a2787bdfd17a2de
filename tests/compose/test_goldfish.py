"""The goldfish loss of a model of transformers: on every grid, under each host, what one process computes of its own masked labels."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, get_args

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_plugins.goldfish import Strategy, goldfish_labels
from axonn_plugins.hosts.common.divisor import Divisor
from axonn_plugins.hosts.common.goldfish import Weight
from axonn_plugins.hosts.plain import compose
from axonn_tp import factorisations
from tests import matrix
from tests.compose.training import ready
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import chosen

SAMPLES, TOKENS, WORDS, STEPS = 4, 19, 40, 2
GOLDFISH: dict[str, Any] = {"k": 2, "h": 5, "shifts": True}
OF_ITSELF: dict[str, Any] = {"k": 2, "h": 5}
WORLDS = (1, 2, 4)
Sizes = dict[str, int] | None
"""Of a grid; None without the key, where all ranks are data-parallel."""


def grids(world: int) -> dict[str, Sizes]:
    """Every grid of so many ranks, by name, and none."""
    found: dict[str, Sizes] = {f"{world} ranks without a grid": None}
    for grid in factorisations(world):
        sizes = {"gx": grid.gx, "gy": grid.gy, "gz": grid.gz}
        found[f"{world} ranks, {'x'.join(map(str, sizes.values()))}x{grid.gdata}"] = sizes
    return found


GRIDS = {name: world for world in WORLDS for name in grids(world)}
EVERY_RUN = {
    "1 ranks without a grid",
    "4 ranks, 1x2x2x1",
    "4 ranks, 2x1x1x2",
}
"""Each axis in one or two."""


def gpt2(wide: bool = True) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "n_positions": TOKENS, "n_embd": 16, "n_layer": 1, "n_head": 4, "bos_token_id": None}
    config = transformers.GPT2Config(**sizes, eos_token_id=None, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = transformers.GPT2LMHeadModel(config).double()
    if wide:
        model.loss_function = in_float64
    return model


def in_float64(logits: Tensor, labels: Tensor, **rest: Any) -> Tensor:
    """That of transformers computes in float32."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def batches() -> Tensor:
    return torch.randint(WORDS, (STEPS, SAMPLES, TOKENS), generator=torch.Generator().manual_seed(3))


_serial: dict[str, list[float]] = {}


def serial(goldfish: dict[str, Any]) -> list[float]:
    """The mean loss of all kept targets in each step; then that of an evaluation, of all targets. Each once in a process."""
    if repr(goldfish) not in _serial:
        _serial[repr(goldfish)] = _serial_run(goldfish)
    return _serial[repr(goldfish)]


def _serial_run(goldfish: dict[str, Any]) -> list[float]:
    rule = {key: value for key, value in goldfish.items() if key != "shifts"}
    model, losses = gpt2(wide="shifts" in goldfish), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for ids in batches():
        logits, targets = model(ids).logits[:, :-1], goldfish_labels(ids[:, 1:], **rule)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(model.eval()(batches()[0], labels=batches()[0]).loss.item())
    return losses


def mean(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def readers_of(grid: Sizes) -> int:
    """Ranks, or groups of them, that read data of their own."""
    return dist.get_world_size() // (grid["gx"] * grid["gy"] if grid else 1)


def block_of(grid: Sizes, goldfish: dict[str, Any]) -> dict[str, Any]:
    return {"goldfish": goldfish} | ({"tensor_parallel": grid | {"plan": "auto"}} if grid else {})


def by_deepspeed(grid: Sizes, goldfish: dict[str, Any], stage: int = 0) -> list[float]:
    readers = readers_of(grid)
    raw = {
        "train_micro_batch_size_per_gpu": SAMPLES // readers,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 10**5, "allgather_bucket_size": 10**5},
        "axonn": block_of(grid, goldfish),
    }
    model = gpt2(wide="shifts" in goldfish)
    engine = deepspeed.initialize(model=model.float() if stage else model, config=raw)[0]
    reader = engine.mesh.rank("batch") if grid else dist.get_rank()
    losses = []
    for number, ids in enumerate(batches()):
        part = ids.chunk(readers)[reader]
        # By name and by place.
        loss = (engine(part, labels=part) if number else engine(input_ids=part, labels=part)).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
    engine.eval()
    with torch.no_grad():
        part = batches()[0].chunk(readers)[reader]
        losses.append(mean(engine(part, labels=part).loss))
    engine.destroy()
    return losses


def by_hand(grid: Sizes, goldfish: dict[str, Any]) -> list[float]:
    made = compose(gpt2(), lambda groups: torch.optim.AdamW(groups, lr=1e-2), block_of(grid, goldfish))
    losses = []
    for ids in batches():
        part = made.mesh.shard_batch(ids)
        loss = made.model(part, labels=part).loss
        made.backward(loss)
        made.step()
        losses.append(mean(loss))
    part = made.mesh.shard_batch(batches()[0])
    with torch.no_grad():
        losses.append(mean(made.model.eval()(part, labels=part).loss))
    return losses


class Squares(nn.Module):
    """Takes no labels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def refused(function: Any) -> str:
    try:
        function()
    except ConfigError as error:
        return str(error)
    return "no error"


def started(model: nn.Module, more: dict[str, Any], goldfish: dict[str, Any] = GOLDFISH) -> Any:
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "axonn": {"goldfish": goldfish},
    }
    return deepspeed.initialize(model=model, config=raw | more)[0]


def called(**arguments: Any) -> str:
    engine = started(gpt2(), {})
    engine(batches()[0][:1], **arguments)
    return "no error"


SAID: dict[str, tuple[Any, str]] = {
    "no labels": (partial(started, Squares(), {}), "'labels' is no argument of Squares.forward, which takes x"),
    "no place": (partial(started, Squares(), {}, GOLDFISH | {"labels": 3}), "= 3 is no argument of Squares.forward"),
    "split, no labels": (
        partial(started, Squares(), {"axonn": {"goldfish": GOLDFISH, "tensor_parallel": {"gx": 2}}}),
        "'labels' is no argument of Squares.forward",
    ),
    "plain": (partial(compose, Squares(), torch.optim.AdamW, {"goldfish": GOLDFISH}), "is no argument of Squares.for"),
    "hybrid": (partial(started, Squares(), {"hybrid_engine": {"enabled": True}}), "hybrid_engine has an engine of its"),
    "rows are split": (partial(started, Squares(), {"sequence_parallel_size": 2}), "sequence_parallel_size has the"),
    "not called with labels": (called, "the model was called without that argument while it trains"),
    "classes": (partial(called, labels=torch.tensor([1])), "are torch.int64 of shape (1,)"),
    "shifted by the script": (
        partial(called, labels=batches()[0][:1], shift_labels=batches()[0][:1]),
        "the model was given shift_labels",
    ),
    "stages without the key": (
        lambda: started(PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2), {}),
        "axonn.goldfish does not go with a PipelineModule without axonn.pipeline",
    ),
    "stages without a loss": (
        lambda: started(
            PipelineModule([nn.Linear(4, 4), nn.Linear(4, 4)], num_stages=2),
            {"axonn": {"goldfish": GOLDFISH, "pipeline": {}}},
        ),
        "this one has none; pass loss_fn",
    ),
}


class Said(NamedTuple):
    logits: Tensor
    loss: Tensor


@dataclass(frozen=True)
class Told:
    loss: Tensor


LOGITS = torch.zeros(2, 2)
FORMS: dict[str, tuple[Any, Any]] = {
    "a scalar": (lambda loss: loss, lambda output: output),
    "first of a tuple": (lambda loss: (loss, LOGITS), lambda output: output[0]),
    "last of a tuple": (lambda loss: (LOGITS, loss), lambda output: output[1]),
    "of a list": (lambda loss: [None, LOGITS, torch.tensor(3), loss], lambda output: output[3]),
    "of a dictionary": (lambda loss: {"loss": loss}, lambda output: output["loss"]),
    "of an object": (lambda loss: SimpleNamespace(loss=loss), lambda output: output.loss),
    "of a named tuple": (lambda loss: Said(torch.tensor(2.0), loss), lambda output: output.loss),
    "of a dataclass": (Told, lambda output: output.loss),
}
"""What models return of a loss, and where it is in that."""


def weighed_forms() -> dict[str, float]:
    kept = torch.tensor((3, 1, 0, 4)[dist.get_rank()])
    known = Divisor()
    known.known = True
    return {
        name: of(Weight(lambda weights: kept, None, known, kept.device).of(make(torch.tensor(1.5)))).item()
        for name, (make, of) in FORMS.items()
    }


def no_mean(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def of_all(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").mean()


def over_kept(logits: Tensor, targets: Tensor) -> Tensor:
    return no_mean(logits, targets) / (targets != -100).sum().clamp(min=1)


CLASS_WEIGHTS = torch.rand(WORDS, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def weighed(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight=CLASS_WEIGHTS)


def weighed_but_counted(logits: Tensor, targets: Tensor) -> Tensor:
    given = {"weight": CLASS_WEIGHTS, "reduction": "sum"}
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), **given) / (targets != -100).sum()


DIVIDED: dict[str, tuple[Any, int]] = {
    "sum": (no_mean, 4),
    "of all targets": (of_all, 1),
    "of those kept": (over_kept, 1),
    "by class weights": (weighed, 1),
    "of weighed ones by their number": (weighed_but_counted, 1),
}
"""Losses of a script's own, and by how much one process's is more than the mean of four readers'."""


class OfItsOwn(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loss, self.table, self.head = loss, nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.double()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.loss(self.head(self.table(ids)), labels)


def divided(loss: Any, host: str) -> list[float]:
    """Losses of four readers, the mean of each step, and one process's of the same rows."""
    block = {"goldfish": {"k": 2, "h": 5}}
    made: Any
    if host == "DeepSpeed":
        raw = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.0}}, "axonn": block}
        made = deepspeed.initialize(model=OfItsOwn(loss), config=raw)[0]
    else:
        made = compose(OfItsOwn(loss), lambda groups: torch.optim.SGD(groups, lr=0.0), block).model
    alone, found = OfItsOwn(loss), []
    for ids in batches():
        part = ids.chunk(4)[dist.get_rank()]
        found += [mean(made(part, part)), alone(ids, goldfish_labels(ids, 2, 5)).item()]
    return found


def on_grids(names: set[str]) -> dict[str, Any]:
    """Results of hosts on grids of these ranks, DeepSpeed with the published hash, and those of one process."""
    ready(staged=False)
    found: dict[str, Any] = {}
    strategies = itertools.cycle(get_args(Strategy)[1:])
    for name, grid in grids(dist.get_world_size()).items():
        other = GOLDFISH | {"strategy": next(strategies)}
        if name not in names:
            continue
        found[name] = {
            "DeepSpeed": (attempt(by_deepspeed, grid, GOLDFISH), serial(GOLDFISH)),
            "plain": (attempt(by_hand, grid, other), serial(other)),
        }
    return found


def in_fp16(stage: int) -> list[float]:
    """Losses of steps that are clipped, as what they divide by shows, and the last norm of the gradients."""
    raw = {
        "train_micro_batch_size_per_gpu": 1,
        "fp16": {"enabled": True, "initial_scale_power": 8},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
        "zero_optimization": {"stage": stage},
        "axonn": {"goldfish": OF_ITSELF},
    }
    engine, losses = deepspeed.initialize(model=gpt2(wide=False).half(), config=raw)[0], []
    for ids in batches():
        part = ids.chunk(4)[dist.get_rank()]
        loss = engine(part, labels=part).loss
        engine.backward(loss)
        engine.step()
        losses.append(mean(loss))
    return [*losses, float(engine.get_global_grad_norm())]


def on_four(names: set[str]) -> dict[str, Any]:
    found = on_grids(names)
    square: Sizes = {"gx": 2, "gy": 2, "gz": 1}
    found["its own loss"] = attempt(by_deepspeed, square, OF_ITSELF), serial(OF_ITSELF)
    found["ZeRO-3"] = attempt(by_deepspeed, None, OF_ITSELF, 3), serial(OF_ITSELF)
    found["forms"] = weighed_forms()
    type(get_accelerator()).is_fp16_supported = lambda self: True
    found["fp16"] = [attempt(in_fp16, stage) for stage in (0, 1)]
    for name, (loss, _) in DIVIDED.items():
        for host in ("DeepSpeed", "plain"):
            found[f"{name}, {host}"] = attempt(divided, loss, host)
    for name, (function, _) in SAID.items():
        found[name] = refused(function)
    return found


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    for goldfish in (OF_ITSELF, GOLDFISH, *(GOLDFISH | {"strategy": strategy} for strategy in get_args(Strategy)[1:])):
        serial(goldfish)  # which ranks inherit
    return run_ranks(on_four, 4, {*chosen(request, GRIDS)})


@pytest.fixture(scope="module")
def every(request: pytest.FixtureRequest, ranks: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    wanted = chosen(request, GRIDS)
    return {4: ranks} | {world: run_ranks(on_grids, world, {*wanted}) for world in (1, 2) if world in wanted.values()}


@pytest.mark.parametrize("name", matrix.names(GRIDS, EVERY_RUN))
def test_losses_are_those_of_one_process(every: dict[int, list[dict[str, Any]]], name: str) -> None:
    for rank in every[GRIDS[name]]:
        for found, wanted in rank[name].values():
            assert not isinstance(found, str), found
            assert found == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize("name", ["its own loss", "ZeRO-3"])
def test_a_model_of_transformers_is_known_to_shift_its_labels(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        found, wanted = rank[name]
        assert not isinstance(found, str), found
        assert found == pytest.approx(wanted, rel=1e-5)


def test_fp16_without_zero_steps_by_whole_gradients(ranks: list[dict[str, Any]]) -> None:
    """DeepSpeed's own engine would divide them by a loss scale that it has not multiplied with."""
    for rank in ranks:
        found, by_zero = rank["fp16"]
        assert found == pytest.approx(by_zero, rel=1e-5), rank["fp16"]
        assert by_zero[0] - by_zero[1] > 0.01 and by_zero[2] > 0.5


@pytest.mark.parametrize("name", FORMS)
def test_the_loss_is_found_in_what_a_model_returns(ranks: list[dict[str, Any]], name: str) -> None:
    assert [rank["forms"][name] for rank in ranks] == [2.25, 0.75, 0.0, 3.0]


@pytest.mark.parametrize("host", ["DeepSpeed", "plain"])
@pytest.mark.parametrize("name", DIVIDED)
def test_what_is_no_mean_over_kept_targets_is_not_weighed_as_one(
    ranks: list[dict[str, Any]], name: str, host: str
) -> None:
    for rank in ranks:
        found = rank[f"{name}, {host}"]
        assert not isinstance(found, str), found
        assert [DIVIDED[name][1] * one for one in found[::2]] == pytest.approx(found[1::2], rel=1e-12)


@pytest.mark.parametrize("name", SAID)
def test_what_has_no_labels_to_mask(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        assert SAID[name][1] in rank[name] and one_sentence(rank[name]), rank[name]
