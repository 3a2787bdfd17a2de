"""Weights that are gathered while the next forward pass runs: whoever uses one sees what a gather behind the step brings."""

from __future__ import annotations

import copy
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from axonn_plugins.hosts.plain import compose
from axonn_plugins.optim import arriving
from axonn_plugins.optim.arriving import Arriving, expect, nobody_else_reads
from tests.distributed import run_ranks

RANKS, STEPS = 4, 3


class Unasking(nn.Module):
    """Its extension takes the weight without asking the weight's class, as those of pybind11 do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 7))

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return nn.functional.linear(x, self.weight)


class Net(nn.Module):
    """Some weights are used by the module that has them, one by its parent, one in no pass."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.first = nn.Embedding(13, 7), Unasking()
        self.middle = nn.ModuleList(nn.Sequential(nn.LayerNorm(11), nn.Linear(11, 11), nn.Tanh()) for _ in range(3))
        self.attention, self.never = nn.MultiheadAttention(11, 1, batch_first=True), nn.Linear(3, 5)
        self.head, self.scale = nn.Linear(11, 13), nn.Parameter(torch.tensor(0.7))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.tokens(ids))
        for block in self.middle:
            x = x + block(x)
        x = x + self.attention(x, x, x)[0]
        logits = nn.functional.linear(x, self.head.weight, self.head.bias) * self.scale
        return nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())


def everything(read: Callable[[Tensor], Any]) -> Callable[..., Any]:
    return lambda model, optimizer: [read(parameter) for parameter in model.parameters()]


def set_data(parameter: Tensor) -> None:
    parameter.data = parameter.data * 0.99


LEAVE: dict[str, Callable[[nn.Module, Any], Any]] = {
    "nothing": lambda model, optimizer: None,
    "shapes": everything(lambda p: (p.shape, p.size(), p.numel(), p.dtype, p.device, p.is_leaf, p.grad, {p: 1}[p])),
    "zero_grad": lambda model, optimizer: (optimizer.zero_grad(), model.zero_grad()),
    "to training": lambda model, optimizer: model.eval().train(),
}
"""What a script does between steps that values are not asked for."""
TAKE: dict[str, Callable[[nn.Module, Any], Any]] = {
    "norms": everything(lambda p: p.norm().item()),
    "foreach": lambda model, optimizer: [n.item() for n in torch._foreach_norm(list(model.parameters()))],
    "detached": everything(lambda p: p.detach().clone()),
    "data": everything(lambda p: p.data.sum().item()),
    "in place": everything(lambda p: p.data.mul_(0.99).sum().item()),
    "other data": everything(set_data),
    "state_dict": lambda model, optimizer: copy.deepcopy(model.state_dict()),
    "deepcopy": lambda model, optimizer: [type(p) for p in copy.deepcopy(model).parameters()],
    "saved": lambda model, optimizer: torch.save(list(model.parameters()), io.BytesIO()),
    "states": lambda model, optimizer: [sorted(state) for state in optimizer.state_dict()["state"].values()],
    "loaded": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "moved": lambda model, optimizer: model.double(),
}
"""What asks for all values."""


def train(read: Callable[[nn.Module, Any], Any], ahead: bool) -> tuple[list[Any], list[int]]:
    """What a run gives, and how many gathers were on their way behind each step and behind what was read."""
    torch.manual_seed(0)
    model = Net().double()
    optimizer = samo.Optimizer(
        lambda groups: torch.optim.AdamW(groups, lr=1e-2),
        model,
        samo.magnitude(model, 0.5, include=["middle.1.*"]),
        group=dist.group.WORLD,
        stage=1,
        bucket_bytes=700,
        gather_ahead=ahead,
    )
    found: list[Any] = []
    travelling = []
    for number in range(STEPS):
        ids = torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))
        loss = model(ids)
        loss.backward()
        optimizer.step()
        travelling.append(len(arriving._UNDER_WAY))
        found += [loss.item(), read(model, optimizer)]
        travelling.append(len(arriving._UNDER_WAY))
    model.eval()
    found += [model(torch.arange(13)[None]).item(), [p.tolist() for p in model.parameters()]]
    assert not arriving._UNDER_WAY and arriving._hook is None
    assert {type(p) for p in model.parameters()} == {nn.Parameter}
    return found, travelling


def aliased() -> tuple[bool, int]:
    """A script keeps views of weights: what they show behind a step is what a gather behind it brings."""
    views: list[list[Tensor]] = []

    def read(model: nn.Module, optimizer: Any) -> list[float]:
        if not views or views[0][0].data_ptr() != next(model.parameters()).data_ptr():
            views.insert(0, [parameter.data for parameter in model.parameters()])
        return [view.sum().item() for view in views[0]]

    behind = train(read, False)
    views.clear()
    ahead = train(read, True)
    return behind[0] == ahead[0], ahead[1][2]


def on_grid(**sizes: int) -> tuple[list[list[float]], int, int]:
    """Losses and weights of a split model, gathered behind the step and ahead; gathers of a step, and how many were not waited for."""
    results, begun = [], 0
    for ahead in (False, True):
        torch.manual_seed(0)
        model = Net().double()
        block = {"tensor_parallel": sizes, "overlap_param_gather": ahead}
        run = compose(model, lambda groups: torch.optim.AdamW(groups, lr=1e-2), block, stage=1)
        found = []
        for number in range(STEPS):
            reader = 10 * number + run.mesh.rank("batch")
            loss = model(torch.randint(13, (2, 5), generator=torch.Generator().manual_seed(reader)))
            run.backward(loss)
            run.step()
            begun = len(arriving._UNDER_WAY)
            found.append(loss.item())
        results.append([*found, *(parameter.sum().item() for parameter in model.parameters())])
    return results, sum(bucket.sharded for store in run.optimizer.stores for bucket in store.buckets), begun


def on_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, read in (LEAVE | TAKE).items():
        behind, ahead = train(read, False), train(read, True)
        found[name] = repr(behind[0]) == repr(ahead[0]), behind[1], ahead[1]
    return found | {"views": aliased(), "x": on_grid(gx=2), "z": on_grid(gz=2)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(on_ranks, RANKS)


@pytest.mark.parametrize("name", [*LEAVE, *TAKE])
def test_whoever_reads_sees_the_gathered_weights(ranks: list[dict[str, Any]], name: str) -> None:
    for rank in ranks:
        same, behind, ahead = rank[name]
        assert same and not any(behind)
        assert min(ahead[::2]) > 3, "nothing was on its way"
        assert ahead[1::2] == (ahead[::2] if name in LEAVE else [0] * STEPS)


@pytest.mark.parametrize("axis", ["x", "z"])
def test_shards_are_gathered_ahead_as_well(ranks: list[dict[str, Any]], axis: str) -> None:
    for rank in ranks:
        (behind, ahead), gathers, begun = rank[axis]
        assert behind == ahead and begun == gathers > 0


def test_views_that_a_script_keeps_are_waited_for(ranks: list[dict[str, Any]]) -> None:
    assert [rank["views"] for rank in ranks] == [(True, 0)] * RANKS


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    for one in list(arriving._UNDER_WAY):
        one.finish()


def on_its_way() -> tuple[nn.Parameter, list[str]]:
    parameter, said = nn.Parameter(torch.zeros(2, 3)), []

    def land() -> None:
        said.append("landed")
        parameter.detach().fill_(1)

    expect([parameter], land)
    return parameter, said


@pytest.mark.parametrize(
    "use",
    [
        lambda p: p + 1,
        lambda p: torch.stack([p, p]),
        lambda p: torch.ops.aten.add(p, 1),
        lambda p: p.untyped_storage(),
        lambda p: p.data_ptr(),
        lambda p: p._version,
        lambda p: repr(p),
        lambda p: p.tolist(),
        lambda p: p.detach().numpy(),
        lambda p: torch.zeros(2, 3).copy_(p),
        lambda p: torch.utils.checkpoint.checkpoint(lambda x: x * p, torch.ones(2, 3), use_reentrant=False),
        lambda p: torch.func.functional_call(nn.Linear(3, 2, bias=False), {"weight": p}, torch.ones(3)),
        lambda p: torch.func.vmap(lambda row: row.sum())(p),
        lambda p: torch.func.grad(torch.sum)(p),
        lambda p: torch.func.jacrev(torch.sum)(p),
        lambda p: torch.func.jvp(torch.sum, (p,), (torch.ones(2, 3),)),
        lambda p: torch.autograd.grad((2 * p).sum(), p),
        lambda p: copy.copy(p),
        lambda p: torch.func.vmap(lambda x: x * p)(torch.ones(3)[:, None, None].expand(3, 2, 3)),
        lambda p: torch.func.grad(lambda x: (x * p).sum())(torch.ones(2, 3)),
        lambda p: torch.inference_mode()(lambda: p * 2)(),
        lambda p: nn.utils.parameters_to_vector([p]),
    ],
)  # fmt: skip
def test_a_function_of_values_waits_for_them(use: Callable[[Tensor], Any]) -> None:
    parameter, said = on_its_way()
    use(parameter)
    assert said == ["landed"] and type(parameter) is nn.Parameter and "_expected" not in vars(parameter)
    assert bool((parameter == 1).all()) and said == ["landed"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_what_torch_jit_traced_waits_for_all_weights_in_it() -> None:
    layer = nn.Linear(3, 2)
    traced = torch.jit.trace(nn.Sequential(nn.Sequential(layer)), torch.ones(3))
    expect([layer.weight], lambda: layer.weight.detach().fill_(1))
    assert torch.equal(traced(torch.ones(3)), 3 + layer.bias) and not arriving._UNDER_WAY


@pytest.mark.parametrize("what", ["capture_begin", "replay"])
def test_a_cuda_graph_waits_for_everything(what: str) -> None:
    _, said = on_its_way()
    with pytest.raises(Exception):  # noqa: B017,PT011 - there is no device, or no graph
        getattr(torch.cuda.CUDAGraph, what)(object())
    assert said == ["landed"]


def test_copies_are_no_parameters_on_their_way() -> None:
    parameter, said = on_its_way()
    copied = copy.deepcopy(parameter)
    assert type(copied) is nn.Parameter and bool((copied == 1).all()) and said == ["landed"]


def test_nothing_is_on_its_way_into_a_child() -> None:
    parameter, said = on_its_way()
    child = os.fork()
    if child == 0:
        os._exit(0 if said == ["landed"] and type(parameter) is nn.Parameter else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_one_thread_lands_what_two_use() -> None:
    parameter, _ = on_its_way()
    (one,) = arriving._UNDER_WAY
    began, go, landed = threading.Event(), threading.Event(), []

    def land() -> None:
        began.set()
        assert go.wait(30)
        landed.append(True)
        parameter.detach().fill_(2)

    one._land = land  # type: ignore[method-assign]
    sums: list[float] = []
    threads = [threading.Thread(target=lambda: sums.append(parameter.sum().item())) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert began.wait(30)
    go.set()
    for thread in threads:
        thread.join()
    assert sums == [12.0, 12.0] and landed == [True]


def test_what_cannot_wait_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(3, 2)
    assert nobody_else_reads([layer.weight, layer.bias])
    loss = layer(torch.ones(3)).sum()
    loss.backward()
    assert nobody_else_reads([layer.weight])  # the graph is there, what it kept of values is not
    kept = layer.weight.data
    assert not nobody_else_reads([layer.weight])
    del kept
    assert not nobody_else_reads([layer.bias, type("Other", (nn.Parameter,), {})(torch.ones(2))])
    monkeypatch.setitem(arriving.sys.modules["torch._dynamo.utils"].counters["frames"], "total", 1)
    assert not nobody_else_reads([layer.weight])


@pytest.mark.parametrize("stage", [0, 2])
def test_other_stages_have_nothing_to_gather_ahead(stage: int) -> None:
    with pytest.raises(ValueError, match=f"gather_ahead .*stage = {stage}; leave it out"):
        samo.Optimizer(torch.optim.SGD, nn.Linear(3, 2), stage=stage, group=lambda p: (None, 1), gather_ahead=True)


def test_arriving_is_a_parameter() -> None:
    assert issubclass(Arriving, nn.Parameter)
    assert isinstance(on_its_way()[0], nn.Parameter)
