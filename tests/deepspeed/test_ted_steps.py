"""Habits of training scripts around ``axonn.ted``: overflows, checkpoints in checkpoints, autocast, results that are no tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axonn_plugins.observe.ledger import Ledger
from axonn_tp import grad_norm
from tests import groups
from tests.deepspeed.ted_training import CHECKPOINTS, Case, start
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import asked, names, thorough

HIDDEN, STEPS = 8, 2


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        _, _, _, features = x.shape  # as under DeepSpeed
        assert features == HIDDEN
        return self.fc2(F.gelu(self.fc1(x)))


class Model(nn.Module):
    def __init__(self, way: str, ep_size: int) -> None:
        super().__init__()
        sizes = {"k": 2, "min_capacity": 1, "top2_2nd_expert_sampling": False}
        self.dense = nn.Sequential(nn.Linear(HIDDEN, 16), nn.GELU(), nn.Linear(16, HIDDEN))
        self.first = MoE(HIDDEN, Expert(), 4, ep_size, **sizes)
        self.second = MoE(HIDDEN, Expert(), 4, ep_size, **sizes)
        self.way = way

    def one(self, x: Tensor) -> Tensor:
        return x + self.first(x)[0]

    def two(self, x: Tensor) -> Tensor:
        return x + self.second(x)[0]

    def forward(self, x: Tensor, target: Tensor) -> Any:
        x = x + self.dense(x)
        if self.way in NESTED:
            outer, inner = (CHECKPOINTS[form] for form in NESTED[self.way])
            x = outer(lambda x: self.two(inner(self.one, x)), x)
        elif self.way == "layer called twice":
            x = checkpoint(self.one, self.one(x), use_reentrant=False, preserve_rng_state=False)
        else:
            x = self.two(self.one(x))
        loss = (x - target).square().mean()
        if self.way == "attributes":
            layers: list[Any] = [self.first.deepspeed_moe, self.second.deepspeed_moe]
            loss = loss + sum(layer.l_aux for layer in layers)
            return {"loss": loss, "counts": [layer.exp_counts for layer in layers]}
        return {"loss": loss, "logits": x, "name": self.way}


NESTED = {
    "nested": ("torch", "torch"),
    "nested, reentrant": ("reentrant", "reentrant"),
    "nested, reentrant outside": ("reentrant", "torch"),
    "nested, DeepSpeed's": ("deepspeed", "deepspeed"),
    "nested, DeepSpeed's that is not reentrant": ("deepspeed, not reentrant", "deepspeed, not reentrant"),
}
WAYS = ["plain", "attributes", *NESTED, "layer called twice", "evaluated between"]
WAYS_OF_EVERY_RUN = {
    "attributes",
    "nested, reentrant outside",
    "nested, DeepSpeed's that is not reentrant",
    "layer called twice",
    "evaluated between",
}


def build(way: str, ep_size: int, rank: int) -> Model:
    """A rank's part of the model that one process has whole."""
    deepspeed.utils.groups.mpu = None
    torch.manual_seed(1)
    model, whole = Model(way, ep_size), Model(way, 1).state_dict()
    state = {name: 0.3 * torch.randn(value.shape) for name, value in whole.items()}
    mine = {}
    for name in model.state_dict():
        before, experts, after = name.partition(".deepspeed_experts.")
        number, _, rest = after.partition(".")
        mine[name] = state[f"{before}{experts}{int(number) + rank * 4 // ep_size}.{rest}" if experts else name]
    model.load_state_dict(mine)
    return model


def batches(data: int) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(STEPS, data, 2, 6, 5, HIDDEN)


def steps(way: str) -> Any:
    """Losses under the block with tensor = 2, what is left in the stash, and all-to-alls of the last step."""
    import axonn_plugins

    axonn_plugins.activate()
    model = build(way, 2, dist.get_rank() // 2 % 2)
    config = {
        "train_micro_batch_size_per_gpu": 6,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.01, "torch_adam": True}},
        "gradient_clipping": 0.0,
        "axonn": {"ted": {"tensor": 2}},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    losses: list[float] = []
    for parts in batches(2):
        inputs = parts[engine.mpu.get_data_parallel_rank()]
        if way == "evaluated between":
            engine.eval()
            with torch.no_grad():
                engine(*inputs)
            engine.train()
        with Ledger() as ledger:
            loss = engine(*inputs)["loss"]
            engine.backward(loss)
            engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / 4)
    left = engine.stashed_bytes
    engine.destroy()
    return losses, left, sum(entry.collective.op == "all_to_all" for entry in ledger.entries)


def serial(way: str) -> list[float]:
    model = build(way, 1, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for parts in batches(2):
        optimizer.zero_grad()
        loss = torch.stack([model(*part)["loss"] for part in parts]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def one_infinity(stage: int, name: str) -> Any:
    """Of three steps, the second with an infinite gradient on the last rank alone: was anything changed, and the loss scale."""
    scaled = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}
    case = Case({"tensor": 2}, 2, stage, "fp16", extra=scaled)
    engine = start(case)
    parameter = next(p for key, p in engine.module.named_parameters() if name in key)
    found = []
    for number, step in enumerate(case.batches(2)):
        before = [p.detach().clone() for p in engine.module.parameters()]
        hook = parameter.register_hook(_times(float("inf") if number == 1 and dist.get_rank() == 3 else 1.0))
        for micro in step:
            ids = micro[engine.mpu.get_data_parallel_rank()]
            engine.backward(engine(ids[:, :-1], ids[:, 1:]))
            engine.step()
        hook.remove()
        after = engine.module.parameters()
        same = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        found.append((same, engine.skipped_steps, engine.optimizer.cur_scale))
    engine.destroy()
    return found


def _times(factor: float) -> Callable[[Tensor], Tensor]:
    return lambda grad: grad * factor


def autocast(form: str, ted: dict[str, Any]) -> tuple[float, float]:
    """The first loss and the norm of the gradients under the script's own autocast."""
    engine = start(Case(ted, 2, checkpoint=form, clip=0.0))
    torch.manual_seed(8)
    ids = torch.randint(50, (2, 6)).expand(4, 2, 6)[engine.mpu.get_data_parallel_rank()]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = engine(ids[:, :-1], ids[:, 1:])
    engine.backward(loss)
    found = loss.item(), float(grad_norm(engine.module.parameters(), engine.mesh))
    engine.destroy()
    return found


def everything(wanted: set[Any]) -> dict[Any, Any]:
    groups.reuse()
    found: dict[Any, Any] = {way: attempt(steps, way) for way in WAYS if way in wanted}
    found |= {case: attempt(one_infinity, *case) for case in INFINITIES if case in wanted}
    for form, fused in [case for case in AUTOCAST if case in wanted]:
        split = {"tensor": 2, "fused": fused, "duplicate_token_dropping": fused}
        found[form, fused] = attempt(autocast, form, split)
    return found | {WHOLE: attempt(autocast, "none", {})}


# The gate's gradient is the same on both tensor ranks, so the norm counts it on the first of them.
INFINITIES = [(0, "gate.wg"), (0, "experts.0.fc1.weight"), (1, "gate.wg"), (2, "qkv.weight")]
AUTOCAST = [("none", True), ("none", False), ("reentrant", True), ("torch", True), ("deepspeed", True)]
EVERY_RUN = {(0, "experts.0.fc1.weight"), (1, "gate.wg"), ("none", False), ("torch", True)}
WHOLE = "not tensor parallel, no checkpoint"


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> list[dict[Any, Any]]:
    return run_ranks(everything, 4, {value for values in asked(request, "way", "case") for value in values})


def cases(of: list[Any]) -> list[Any]:
    return [case if case in EVERY_RUN else thorough(case) for case in of]


@pytest.mark.parametrize("way", names(WAYS, WAYS_OF_EVERY_RUN))
def test_trains_what_one_process_trains(found: list[dict[Any, Any]], way: str) -> None:
    assert not isinstance(found[0][way], str), found[0][way]
    losses, left, exchanges = found[0][way]
    assert losses == pytest.approx(serial(way), rel=1e-6)
    assert left == 0
    # There and back, forward and backward; of two layers, or twice of one.
    assert exchanges == 8


@pytest.mark.parametrize("case", cases(INFINITIES), ids=str)
def test_an_overflow_on_one_rank_skips_the_step_on_all(found: list[dict[Any, Any]], case: Any) -> None:
    for rank in found:
        assert not isinstance(rank[case], str), rank[case]
        assert rank[case] == [(False, 0, 16), (True, 1, 8), (False, 1, 8)]


@pytest.mark.parametrize("case", cases(AUTOCAST), ids=str)
def test_autocast_of_the_scripts_own(found: list[dict[Any, Any]], case: Any) -> None:
    for each in (case, WHOLE):
        assert not isinstance(found[0][each], str), found[0][each]
    assert found[0][case] == pytest.approx(found[0][WHOLE], rel=2e-2)
