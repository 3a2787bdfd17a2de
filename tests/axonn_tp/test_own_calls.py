"""Calls of torch's own on a split model do with it what they do with the serial one, or are refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_, get_total_norm, parametrizations

from axonn_tp import GradScaler, Grid, Mesh, grad_norm, parallelize, sync_gradients
from axonn_tp.comm.collectives import all_gather
from tests.distributed import run_ranks


class Net(nn.Module):
    """A pair, a norm, a complex parameter, and buffers that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("features", torch.randn(5, 6))
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.phase = nn.Parameter(torch.randn(6, dtype=torch.complex128))
        self.last = parametrizations.spectral_norm(nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cos(x @ self.features)
        x = x + self.down(self.up(self.norm(x)).tanh())
        return self.last((x * self.phase).abs())


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def pairs() -> Iterator[tuple[Mesh, nn.Module, nn.Module, Tensor]]:
    """A serial model, and one that was split; ranks other than the first have drawn another."""
    torch.set_default_dtype(torch.float64)
    for sizes in ({"gx": 2, "gz": 2}, {"gx": 2, "gy": 2}):
        mesh = Mesh.create(**sizes)
        torch.manual_seed(0)
        serial, x = Net(), torch.randn(8, 5)
        torch.manual_seed(dist.get_rank())
        yield mesh, serial, parallelize(Net(), mesh, {"up": "normal", "down": "transposed"}), x
        mesh.destroy()


def backward(model: nn.Module, x: Tensor, mesh: Mesh | None = None) -> None:
    model.zero_grad()
    loss_of(model, x if mesh is None else mesh.shard_batch(x)).backward()
    if mesh is not None:
        sync_gradients(model.parameters(), mesh)


def norms() -> None:
    for mesh, serial, model, x in pairs():
        backward(serial, x)
        backward(model, x, mesh)
        every = [list(each.parameters()) for each in (model, serial)]
        assert abs(grad_norm(every[0], mesh) - get_total_norm([p.grad for p in every[1]])) < 1e-12
        for kind in (2, 1.0, "inf"):
            mine, other = (get_total_norm([p.grad for p in parameters], kind) for parameters in every)
            assert abs(mine - other) < 1e-12 and mine.dtype == other.dtype, kind
            mine, other = (get_total_norm(parameters, kind) for parameters in every)
            assert abs(mine - other) < 1e-12, kind
        with pytest.raises(ValueError, match="norm_type = -1"):
            get_total_norm([p.grad for p in every[0]], -1.0)
        one = [clip_grad_norm_(each.up.weight, 1e-3) for each in (model, serial)]
        assert abs(one[0] - one[1]) < 1e-12
        both = [clip_grad_norm_(parameters, 1e-2) for parameters in every]
        assert abs(both[0] - both[1]) < 1e-12
        again = copy.deepcopy(model)
        backward(again, x, mesh)
        backward(serial, x)
        assert (
            abs(get_total_norm([p.grad for p in again.parameters()]) - clip_grad_norm_(serial.parameters(), 1)) < 1e-12
        )


def overflows() -> None:
    for mesh, _, model, x in pairs():
        for scaler in (torch.amp.GradScaler("cpu", init_scale=4.0), GradScaler(mesh, init_scale=4.0)):
            real = [p for p in model.parameters() if not p.is_complex()]
            before = [p.detach().clone() for p in real]
            optimizer = torch.optim.SGD(real, 0.1)
            backward(model, x, mesh)
            scaler.scale(torch.ones(()))
            if dist.get_rank() == 1:
                model.up.weight.grad.view(-1)[0] = torch.inf
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 2.0
            assert all(torch.equal(p, old) for p, old in zip(real, before, strict=True))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, mesh: Mesh | None = None) -> None:
    for _ in range(2):
        backward(model, x, mesh)
        clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()


def same(mine: Any, other: Any) -> None:
    assert mine.keys() == other.keys()
    for key, value in other.items():
        if isinstance(value, dict):
            same(mine[key], value)
        elif isinstance(value, Tensor):
            assert mine[key].shape == value.shape and (mine[key] - value).abs().max() < 1e-10, key


def states() -> None:
    for mesh, serial, model, x in pairs():
        for kind in (
            lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        ):
            one, mine = kind(serial.parameters()), kind(model.parameters())
            train(serial, one, x)
            train(model, mine, x, mesh)
            kept = mine.state_dict()
            same(kept["state"], one.state_dict()["state"])
            # As a file of one rank's is read by all, before or after a step, and by one process.
            for fresh in (kind(model.parameters()), mine):
                fresh.load_state_dict(copy.deepcopy(kept))
                train(model, fresh, x, mesh)
                train(serial, one, x)
                kept = fresh.state_dict()
                same(kept["state"], one.state_dict()["state"])
            one.load_state_dict(kept)
            weights, found = get_state_dict(model, mine)
            plain, wanted = copy.deepcopy(get_state_dict(serial, one))
            same(weights, plain)
            same(found["state"], wanted["state"])
            mine = kind(model.parameters())
            set_state_dict(model, mine, model_state_dict=plain, optim_state_dict=copy.deepcopy(wanted))
            train(model, mine, x, mesh)
            train(serial, one, x)
            same(model.state_dict(), serial.state_dict())


class Ahead(torch.optim.Optimizer):
    """Lookahead, which steps by an optimizer that it holds."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner, self.steps = torch.optim.SGD(self.param_groups[0]["params"], 0.1), 0
        self.slow = [parameter.detach().clone() for parameter in self.param_groups[0]["params"]]

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.steps += 1
        for parameter, slow in zip(self.param_groups[0]["params"], self.slow, strict=True):
            if self.steps % 2 == 0:
                slow.lerp_(parameter.detach(), 0.5)
                parameter.data.copy_(slow)


class ZeroRedundancyOptimizer(torch.optim.SGD):
    """In the place of torch's, whose import takes seconds."""


class Bounded(torch.optim.SGD):
    """Steps by what a matrix's norm says, which its name does not tell."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(parameter.grad.norm() + 1)
        super().step(closure)


def refusals() -> None:
    for mesh, serial, model, x in pairs():
        train(serial, Ahead(serial.parameters()), x)
        train(model, Ahead(model.parameters()), x, mesh)
        same(model.state_dict(), serial.state_dict())
        drawn = all_gather(torch.rand(1), mesh, "model")  # seeds differed
        assert (drawn == drawn[0]).all()
        backward(model, x, mesh)
        with pytest.raises(ValueError, match="call the model with different inputs.*shard_batch"):
            model(x + mesh.rank("model"))
        with pytest.raises(ValueError, match=r"torch\.func \(jvp\) transforms a model"):
            torch.func.jvp(model, (x,), (x,))
        with pytest.raises(ValueError, match=r"torch\.func \(vmap\) transforms a model"):
            torch.func.vmap(model)(x[None])
        step = lambda parameter: torch.optim.SGD([parameter], 0.0).step()  # noqa: E731
        hook = model.up.bias.register_post_accumulate_grad_hook(step)
        with pytest.raises(ValueError, match="steps while backward runs") if mesh.grid.batch > 1 else nullcontext():
            backward(model, x, mesh)
        hook.remove()
        backward(model, x, mesh)
        forgotten, all_sum = torch.optim.SGD(model.parameters(), 0.0), mesh.grid.batch == 1
        for step in range(4):
            with (
                nullcontext()
                if all_sum or step % 2 == 0
                else pytest.raises(ValueError, match="nobody has summed them; call")
            ):
                loss_of(model, mesh.shard_batch(x)).backward()
                forgotten.step()
        own_rates, alone = torch.optim.SGD(model.parameters(), 0.1 + dist.get_rank()), mesh.grid.world == 1
        backward(model, x, mesh)
        own_rates.step()
        backward(model, x, mesh)
        with (
            nullcontext() if alone else pytest.raises(ValueError, match=r"lr = 0\.1 in parameter group 0 on rank 0 and")
        ):
            own_rates.step()
        matrices = [model.up.weight, model.down.weight]
        for optimizer in (
            torch.optim.LBFGS(model.parameters()),
            torch.optim.Adafactor(matrices),
            Bounded(matrices, 0.1),
            ZeroRedundancyOptimizer(matrices, 0.1),
        ):
            with pytest.raises(ValueError, match=f"{type(optimizer).__name__} (looks at whole|sends each parameter)"):
                optimizer.step(lambda: 0.0)
        groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) is more]} for more in (True, False)]
        groups[0]["weight_decay"] = 0.1  # type: ignore[assignment]
        with (
            pytest.raises(ValueError, match=r"split along z.* before axonn_tp") if mesh.size("z") > 1 else nullcontext()
        ):
            torch.optim.SGD(groups, 0.0).step()
        for draw in (nn.init.kaiming_normal_, nn.init.xavier_uniform_, nn.init.normal_, nn.init.orthogonal_):
            with pytest.raises(ValueError, match=r"torch\.nn\.init would draw this rank's shard"):
                draw(model.up.weight.data)
        with pytest.raises(ValueError, match=r"torch\.nn\.init would draw this rank's shard"):
            model.down.reset_parameters()
        model.norm.reset_parameters()
        with pytest.raises(ValueError, match="DistributedDataParallel was given a model that is split already"):
            nn.parallel.DistributedDataParallel(model)
        with pytest.raises(ValueError, match="fully_shard was given a model that is split already"):
            fully_shard(model)


def tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.up, self.down = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 8), nn.Linear(8, 6)
            self.b.bias = self.a.bias

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(self.b(self.a(x).tanh())).tanh())

    mesh = Mesh.create(gx=2, gz=2)
    torch.manual_seed(0)
    serial, x = Tied(), torch.randn(4, 6)
    model = parallelize(copy.deepcopy(serial), mesh, "auto")
    train(serial, torch.optim.SGD(serial.parameters(), 0.1), x)
    train(model, torch.optim.SGD(model.parameters(), 0.1), x, mesh)
    same(model.state_dict(), serial.state_dict())
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    for each in (model, serial):
        each.float().double()
    torch.__future__.set_overwrite_module_params_on_conversion(False)
    same(model.state_dict(), serial.state_dict())
    for each in (model, serial):  # a single sample
        each.zero_grad()
        each(x[0]).square().mean().backward()
    sync_gradients(model.parameters(), mesh)
    one, other = (get_total_norm([p.grad for p in each.parameters()]) for each in (model, serial))
    assert abs(one - other) < 1e-12


def all_of_it() -> None:
    norms()
    overflows()
    states()
    refusals()
    tied()


def test_torchs_calls_on_a_split_model() -> None:
    run_ranks(all_of_it, 4)


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.up(x), self.up.weight)


def after_a_refusal() -> float:
    torch.manual_seed(0)
    serial, x = Reading(), torch.randn(3, 8, dtype=torch.float64)
    model = parallelize(copy.deepcopy(serial), Mesh(Grid(gz=2)))
    with pytest.raises(ValueError, match=r"torch\.func \(vmap\)"):
        torch.func.vmap(model)(x[None])
    return float((model(x) - serial(x)).abs().max())


def test_a_call_after_one_that_was_refused_finds_whole_weights() -> None:
    assert max(run_ranks(after_a_refusal, 2)) < 1e-10


def not_a_number() -> None:
    """The other rank's is taken into the norm, as it is in one process."""
    model = parallelize(nn.Sequential(nn.Linear(8, 8)), Mesh(Grid(gx=2)))
    for rank in range(2):
        model(torch.ones(3, 8)).sum().backward()
        if dist.get_rank() == rank:
            model[0]._parameters["weight"].grad[0, 0] = torch.nan
        for kind in (2.0, torch.inf):
            assert get_total_norm([p.grad for p in model.parameters()], kind).isnan(), kind
        with pytest.raises(RuntimeError, match="norm of type inf of a split model is nan"):
            clip_grad_norm_(model.parameters(), 1.0, torch.inf, error_if_nonfinite=True)
        model.zero_grad()


def test_the_largest_gradient_may_be_no_number() -> None:
    run_ranks(not_a_number, 2, backend="gloo")  # which drops it in a maximum
