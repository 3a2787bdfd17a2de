"""Models and loops that scripts have: layers with several names, experts without weights, two engines, backward run twice."""

from __future__ import annotations

from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.checkpoint
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

from ted_moe import Topology
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import asked, names, thorough

HIDDEN = 8


class FeedForward(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.fc1, self.fc2, self.dropout = nn.Linear(HIDDEN, 16), nn.Linear(16, HIDDEN), dropout

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc2(F.gelu(self.fc1(x))), self.dropout, self.training)


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def moe(experts: int, ep_size: int, expert: nn.Module | None = None) -> MoE:
    sizes = {"k": 2, "min_capacity": 1, "top2_2nd_expert_sampling": False}
    return MoE(HIDDEN, FeedForward() if expert is None else expert, experts, ep_size, **sizes)


class Model(nn.Module):
    """The name of one layer ends that of another one with another number of experts; one layer has two names."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.moe = moe(2, ep_size)
        self.inner = nn.ModuleDict({"moe": moe(4, ep_size), "idle": moe(2, ep_size, Doubling())})
        self.blocks = nn.ModuleList([FeedForward(), self.inner["moe"], self.inner["idle"], self.moe, self.moe])
        self.checkpoint: Any = None

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks:
            if isinstance(block, MoE):
                assert block.num_experts > 1
                x = x + (self.checkpoint(block, x) if self.checkpoint else block(x))[0]
            else:
                x = x + block(x)
        return (x - target).square().mean()


def build(ep_size: int, first: int) -> Model:
    """A part of the model that one process has whole."""
    torch.manual_seed(1)
    deepspeed.utils.groups.mpu = None
    model, whole = Model(ep_size).double(), Model(1).double()
    state = {name: 0.1 * torch.randn(value.shape, dtype=value.dtype) for name, value in whole.state_dict().items()}
    state = {name: state[name.replace("blocks.1.", "inner.moe.").replace("blocks.2.", "inner.idle.")] for name in state}
    for name in state:
        if name.startswith(("blocks.3.", "blocks.4.")):
            state[name] = state[f"moe.{name.split('.', 2)[2]}"]
    mine = {}
    for name in model.state_dict():
        before, experts, after = name.partition(".deepspeed_experts.")
        number, _, rest = after.partition(".")
        local = model.get_submodule(f"{before}.deepspeed_experts") if experts else []
        mine[name] = state[f"{before}{experts}{int(number) + first * len(local)}.{rest}" if experts else name]  # type: ignore[arg-type]
    model.load_state_dict(mine)
    return model


def batches(data: int) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(3, data, 2, 12 // data, 5, HIDDEN, dtype=torch.float64)


def start(ted: dict[str, Any], ep_size: int) -> Any:
    import axonn_plugins

    axonn_plugins.activate()
    tensor = ted.get("tensor", 1)
    model = build(ep_size, dist.get_rank() // tensor % ep_size)
    config = {
        "train_micro_batch_size_per_gpu": 12 * tensor // dist.get_world_size(),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "axonn": {"ted": ted},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def step(engine: Any, number: int) -> float:
    unit = engine.mpu
    inputs, targets = batches(unit.get_data_parallel_world_size())[number][unit.get_data_parallel_rank()]
    loss = engine(inputs, targets)
    engine.backward(loss)
    engine.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def serial() -> list[float]:
    model = build(1, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for parts in batches(2):
        optimizer.zero_grad()
        loss = torch.stack([model(*part) for part in parts]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained(folder: str) -> Any:
    """A run with a neighbour that has the same groups and ends, and that is saved, spoilt and loaded."""
    engine, other = start({"tensor": 2}, 2), start({"tensor": 2}, 2)
    losses = [step(engine, 0), step(other, 0)]
    other.destroy()
    losses.append(step(engine, 1))
    engine.save_checkpoint(folder)
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.fill_(3.0)
    engine.load_checkpoint(folder)
    losses.append(step(engine, 2))
    engine.destroy()
    return losses


def gradients(form: str) -> Any:
    """Of one graph on which backward runs twice, which DeepSpeed's own checkpoint does not allow."""
    engine = start({"tensor": 2}, 2)
    checkpoint: Any = torch.utils.checkpoint.checkpoint
    engine.module.checkpoint = {
        "none": None,
        "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
        "torch": lambda block, x: checkpoint(block, x, use_reentrant=False),
    }[form]
    inputs, targets = batches(2)[0][engine.mpu.get_data_parallel_rank()]
    with engine._stashes.recording():
        loss = engine.module(inputs, targets)
    kept = engine.stashed_bytes
    loss.backward(retain_graph=True)
    loss.backward()
    found = [p.grad.abs().sum().item() for p in engine.module.parameters() if p.grad is not None]
    left = engine.stashed_bytes
    engine.destroy()
    return kept > 0, left, found


def dice(dropless: bool) -> Any:
    """Numbers that tensor ranks draw after whole experts with dropout."""
    import axonn_plugins

    axonn_plugins.activate()
    torch.manual_seed(dist.get_rank())
    model = nn.ModuleDict({"moe": moe(4, 2, FeedForward(dropout=0.5))})
    model.forward = lambda x: model["moe"](x)[0].sum()  # type: ignore[method-assign]
    ted = {"tensor": 2, "expert_tensor_parallel": False, "dropless": dropless}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "axonn": {"ted": ted},
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    engine(torch.randn(7, HIDDEN))
    drawn = torch.rand(()), torch.tensor(float(torch.initial_seed()))
    everyone = [torch.empty(2) for _ in range(4)]
    dist.all_gather(everyone, torch.stack(drawn))
    engine.destroy()
    return torch.stack(everyone).tolist()


class Doubled(MoE):
    """A subclass whose forward makes something of DeepSpeed's."""

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        output, *others = super().forward(*inputs, **keywords)
        return 2 * output, *others


def subclass() -> Any:
    """Outputs of a subclass of DeepSpeed's layer, before and after it is TED's; of its inner part by itself."""
    torch.manual_seed(6)
    layer = Doubled(HIDDEN, FeedForward(), 4, k=2, min_capacity=1, top2_2nd_expert_sampling=False)
    x = torch.randn(9, HIDDEN)
    before = layer(x)[0]
    config = {"train_micro_batch_size_per_gpu": 1, "axonn": {"ted": {}}}
    engine = deepspeed.initialize(model=layer, config=config)[0]
    after = engine(x)[0]
    engine.destroy()
    return (after - before).abs().max().item(), before.abs().max().item(), attempt(layer.deepspeed_moe, x)


def told(ted: dict[str, Any], ep_size: int) -> Any:
    """DeepSpeed's word on experts: under TED, after it, and under a stock engine that comes while TED's is there."""
    stock, name = deepspeed.utils.groups, f"ep_size_{ep_size}"

    def said() -> Any:
        return (
            stock._get_expert_model_parallel_world_size(),
            list(stock._get_expert_parallel_group_ranks(name)),
            list(stock._get_expert_data_parallel_group_ranks(name)),
            stock._get_expert_parallel_rank(name),
            stock._get_expert_data_parallel_world_size(name),
            stock._get_max_expert_size(),
        )

    engine = start(ted, ep_size)
    under = said()
    after_config = deepspeed.runtime.config.DeepSpeedConfig({"train_micro_batch_size_per_gpu": 1})
    stocks = moe(4, ep_size)
    stocks.set_deepspeed_parallelism()
    beside = said()
    engine.destroy()
    kept = said()
    for table in (stock._EXPERT_PARALLEL_GROUP, stock._EXPERT_DATA_PARALLEL_GROUP):
        table.clear()
    return under, beside == kept, beside, after_config is not None


TOLD = {
    "split": ({"tensor": 2}, 2),
    "whole": ({"tensor": 2, "expert_tensor_parallel": False}, 2),
    "tensor 1": ({}, 2),
}
FORMS = ["none", "reentrant", "torch"]


def gathered(mine: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def everything(folder: str, forms: list[str], names: list[str], dropless: list[bool]) -> dict[str, Any]:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that nothing here needs
    found = {"trained": attempt(trained, folder)}
    found |= {form: attempt(gradients, form) for form in forms}
    found |= {f"told {name}": gathered(attempt(told, *TOLD[name])) for name in names}
    found["subclass"] = attempt(subclass)
    return found | {f"dropless {kind}": attempt(dice, kind) for kind in dropless}


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    parts = ("form", "name", "dropless")
    forms, told, dropless = ([value for (value,) in asked(request, part) if value is not None] for part in parts)
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return run_ranks(everything, 4, folder, ["none", *sorted(forms)], sorted(told), sorted(dropless))[0]


def test_trains_beside_another_engine_and_goes_on_from_a_checkpoint(found: Any) -> None:
    first, second, third = serial()
    assert found["trained"] == pytest.approx([first, first, second, third], rel=1e-6)  # gates are float32


@pytest.mark.parametrize("form", names(FORMS[1:], ["reentrant"]))
def test_backward_runs_twice(found: Any, form: str) -> None:
    stashed, left, gradients = found[form]
    assert stashed and left == 0
    assert gradients == pytest.approx(found["none"][2], rel=1e-10)


@pytest.mark.parametrize("dropless", [True, thorough(False)])
def test_tensor_ranks_draw_the_same_behind_whole_experts(found: Any, dropless: bool) -> None:
    drawn = found[f"dropless {dropless}"]
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3]


def test_a_subclass_keeps_its_forward(found: Any) -> None:
    difference, size, alone = found["subclass"]
    assert difference < 1e-6 < size
    assert "deepspeed_moe cannot be called by itself; call the MoE layer" in alone


@pytest.mark.parametrize("name", names(TOLD, ["split", "whole"]))
def test_groups_say_where_experts_are(found: Any, name: str) -> None:
    ted, ep_size = TOLD[name]
    for rank, result in enumerate(found[f"told {name}"]):
        assert not isinstance(result, str), result
        under, same, beside, _ = result
        for said, tensor, split in ((under, ted.get("tensor", 1), name == "split"), (beside, 1, True)):
            topology = Topology(4, tensor, ep_size, split)
            group = topology.expert_group(rank)
            assert said == (
                topology.expert_tensor,
                group,
                topology.expert_data_group(rank),
                group.index(rank),
                topology.expert_data,
                ep_size,
            )
        assert same
