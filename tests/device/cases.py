"""The systems on the tests' device, beside themselves on the CPU: the same values, and nobody reads, writes or frees too early.

See `tests.device.__main__` for how they are run.
"""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

import axonn_tp
import samo.fused
import ted_moe
from axonn_plugins.cluster.launch import launch
from axonn_plugins.hosts.common.divisor import Divisor
from axonn_plugins.hosts.common.goldfish import Weight
from axonn_plugins.hosts.plain import compose
from axonn_plugins.optim.access import Access
from axonn_plugins.optim.flat import FlatOptimizer
from axonn_plugins.optim.state import dense_parts
from axonn_plugins.optim.whole.newton_schulz import Iteration, orthogonalise
from axonn_plugins.pipeline.bucketed_optimizer import BucketedOptimizer
from axonn_plugins.pipeline.links import StageLost
from axonn_plugins.pipeline.packing import Message
from axonn_plugins.pipeline.transport import Transport
from axonn_plugins.pipeline.wires import TorchWire
from axonn_tp import GradientReducer, Grid, LayerPlan, Mesh, Options
from axonn_tp.context.attention import attend
from axonn_tp.context.chunks import HOW, Chunks, Sight
from axonn_tp.context.shared import Shared
from ted_moe.agreement import Agreement, watch_outputs
from tests.device import cuda

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
REAL = torch.backends.cuda.is_built()
LOW = torch.float32 if REAL else torch.bfloat16
"""The type of weights that have masters; in bfloat16 a GPU's sums are rounded otherwise than the CPU's, whose kernels the tests' device has."""
late: Any = None
CASES: dict[str, tuple[int, Callable[[], None], bool]] = {}


def case(ranks: int, world: bool = True) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Keep a function as a case of so many ranks, which have a group of all unless the case makes it."""

    def kept(function: Callable[[], None]) -> Callable[[], None]:
        CASES[function.__name__] = ranks, function, world and ranks > 1
        return function

    return kept


def same(here: Any, there: Any, exact: bool = False, single: bool = False) -> None:
    """Values of the device are those of the CPU: exactly so where its kernels are the CPU's, else but for rounding; `single`: in float32 on the way."""
    rounding = 1e-4 if REAL and (exact or single) else 0 if exact else 1e-10
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=rounding)


class Model(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.up, self.down, self.alone = (nn.Linear(*sizes, bias=bias) for sizes in ((6, 10), (10, 6), (6, 5)))

    def forward(self, rows: Tensor) -> Tensor:
        return self.alone(self.down(self.up(rows).tanh()))


PLAN = {"up": LayerPlan("normal"), "down": LayerPlan("transposed")}


def model_of(dtype: torch.dtype = torch.float64, bias: bool = True) -> nn.Module:
    torch.manual_seed(3)
    return Model(bias).to(dtype)


def rows_of(number: int, rows: int = 8) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(number), dtype=torch.float64)


# The device itself: what is wrong is told, what is right is not.


def _raises(words: str, call: Callable[[], Any]) -> None:
    try:
        call()
    except RuntimeError as error:
        assert words in str(error), error
        assert late.races(), "noted, too"
    else:
        raise AssertionError(f"nobody said {words!r}")


@case(1)
def tells() -> None:
    side = torch.cuda.Stream()
    a = torch.ones(4, device=GPU)
    with torch.cuda.stream(side):
        _raises("add reads on stream 1 what", lambda: a + 1)
        side.wait_stream(torch.cuda.current_stream())  # itself: no help
        _raises("add reads on stream 1 what", lambda: a + 1)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        b = a + 1
        event = torch.cuda.Event()
        event.record()
    _raises("mul writes on stream 0 what aten::add", lambda: a.mul_(2))
    torch.cuda.current_stream().wait_event(event)
    a.mul_(2)
    assert (a + b).tolist() == [4.0] * 4
    # Memory that a side stream uses goes back to the stream that made it.
    for recorded in (False, True):
        c = torch.ones(4, device=GPU)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            c.add_(1)
        if recorded:
            c.record_stream(side)
        del c
        if recorded:
            torch.ones(4, device=GPU)
        else:
            _raises("nor was it told by record_stream", lambda: torch.ones(4, device=GPU))
    # Nobody wrote it.
    assert torch.empty(3, device=GPU).isnan().all()
    # The host, and pinned memory.
    with cuda.HostReads(late):
        host = torch.zeros(4, pin_memory=True)
        assert host.is_pinned()
        host.copy_(a, non_blocking=True)
        _raises("add.Tensor reads on the host what aten::copy_", lambda: host + 1)
        torch.cuda.synchronize()
        host.add_(1)
        a.copy_(host, non_blocking=True)
        _raises("add_.Tensor writes on the host what aten::copy_", lambda: host.add_(1))
        torch.cuda.current_stream().synchronize()
        host.add_(1)
    assert not (asked := torch.cuda.Event()).query() or asked
    late.forbid(True)
    try:
        a.sum().item()
    except RuntimeError as error:
        assert "the host waits for the device (item), where nothing may" in str(error)
    else:
        raise AssertionError("a host that reads is told")
    finally:
        late.forbid(False)


@case(1)
def computes() -> None:
    """Autograd's thread for the device, views, in-place and out forms, indexing, what allocates, and random numbers."""
    torch.manual_seed(0)
    weights = torch.randn(5, 7, dtype=torch.float64)
    found = []
    for device in (CPU, GPU):
        torch.manual_seed(1)
        w = weights.clone().to(device).requires_grad_()
        x = w.t()[2:, ::2].reshape(-1).unfold(0, 3, 2).softmax(-1)
        y = torch.cat([x, x * 2]).cumsum(0)[:, [0, 2]]
        mask = y > y.median()
        loss = y[mask].sum() + nn.functional.dropout(y, 0.5).square().mean() + torch.linalg.vector_norm(w)
        loss.backward()
        out = torch.empty(0, device=device, dtype=torch.float64)
        torch.add(y.detach(), 1, out=out)
        other = torch.empty(2, device=device, dtype=torch.float64).set_(out.untyped_storage())
        torch._foreach_mul_([out, w.grad], 2.0)
        rest = torch.arange(5, device=device).repeat_interleave(torch.tensor([1, 0, 2, 3, 1], device=device))
        found.append([loss.detach(), w.grad, out, other, rest, *w.detach().topk(2), out.resize_(3, 3)[0]])
    for here, there in zip(*found, strict=True):
        same(here, there, True)


# Collectives


@case(2)
def communicates() -> None:
    """Every collective's value; reading before waiting, or freeing, is told; ranks that call otherwise are told."""
    rank, group = dist.get_rank(), dist.group.WORLD
    mine = torch.full((4,), rank + 1.0, device=GPU)
    work = dist.all_reduce(mine, async_op=True)
    assert work is not None
    _raises("add reads on stream 0 what all_reduce wrote", lambda: mine + 1)
    assert not work.is_completed()
    work.wait()
    assert (mine + 1).tolist() == [4.0] * 4
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    work = dist.all_reduce(mine, async_op=True)
    with torch.cuda.stream(side):
        work.wait()
    _raises("reads on stream 0 what all_reduce wrote", mine.clone)
    torch.cuda.current_stream().wait_stream(side)
    assert mine.tolist() == [6.0] * 4
    out = torch.empty(2, 4, device=GPU)
    dist.all_gather_into_tensor(out, mine * (rank + 1))
    assert out[:, 0].tolist() == [6.0, 12.0]
    share = torch.empty(4, device=GPU)
    dist.reduce_scatter_tensor(share, out, dist.ReduceOp.AVG)
    assert share.tolist() == [6.0 * (rank + 1)] * 4
    parts = [torch.empty(4, device=GPU) for _ in range(2)]
    dist.all_gather(parts, share)
    dist.reduce_scatter(share, parts)
    dist.all_to_all_single(out, torch.stack(parts))
    dist.broadcast(share, 1)
    dist.reduce(share, 0)
    dist.barrier()
    byte = torch.full((1,), rank, dtype=torch.uint8, device=GPU)
    (dist.send if rank else dist.recv)(byte, 1 - rank)
    assert byte.item() == 1
    got = torch.empty_like(byte)
    ops = [dist.P2POp(dist.isend, byte, 1 - rank), dist.P2POp(dist.irecv, got, 1 - rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    assert got.item() == 1
    late_one = dist.new_group(backend="cuda:late")
    for wrong, words in (
        (torch.ones(2), "No backend type associated with device type cpu"),
        (torch.ones(4, 4, device=GPU).t()[:2], "must be contiguous"),
    ):
        try:
            dist.all_reduce(wrong, group=late_one)
        except (RuntimeError, ValueError) as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"nobody said {words!r}")
    short = torch.ones(3 + rank, device=GPU)
    try:
        dist.all_reduce(short, group=dist.new_group(timeout=timedelta(seconds=2)))
    except RuntimeError as error:
        assert (
            not rank
            or "order: call 0 of rank 1 of the group is all_reduce 4Float; and of rank 0 all_reduce 3Float;"
            in str(error)
        )
    else:
        assert not rank
    assert group is not None


# 4D


_TOGETHER = {"overlap_all_reduce": False, "overlap_reduce_scatter": False, "overlap_all_gather": False}
_GRIDS = {
    Grid(2, 1, 2, 1): Options(tune_matmuls=True),
    Grid(1, 2, 2, 1): Options(reshard_after_forward=True, regather_inputs=True, bucket_bytes=0),
    Grid(1, 1, 2, 2): Options(**_TOGETHER),  # type: ignore[arg-type]
    Grid(2, 2, 1, 1): Options(layout="replicated", **_TOGETHER),  # type: ignore[arg-type]
}


@case(4)
def grids() -> None:
    _grids(list(_GRIDS))


@case(4)
def grids_few() -> None:
    _grids(list(_GRIDS)[:2])


def _grids(chosen_grids: list[Grid]) -> None:
    serial = model_of()
    for grid in chosen_grids:
        chosen = _GRIDS[grid]
        found = []
        for device in ("cpu", "cuda"):
            mesh = Mesh(grid, device)
            assert mesh.device.type == device
            with patch("axonn_tp.parallelize.default_cache", lambda: None):  # or nothing is timed
                model = axonn_tp.parallelize(copy.deepcopy(serial), mesh, PLAN, chosen).to(mesh.device)
            reducer = GradientReducer(model.parameters(), mesh, bucket_bytes=200)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            for step in range(3):
                batch = mesh.shard_batch(rows_of(step)).to(mesh.device)
                with reducer.no_sync():
                    model(batch).square().mean().backward()
                model(batch).square().mean().backward()
                reducer.finish()
                axonn_tp.clip_grad_norm_(model.parameters(), mesh, 0.1)
                optimizer.step()
                optimizer.zero_grad()
            _broken_off(model, batch)
            with reducer.no_sync():
                model(batch).square().mean().backward()
            axonn_tp.sync_gradients(model.parameters(), mesh)
            found.append([t for p in model.parameters() for t in (p.detach(), p.grad)])
        for here, there in zip(*found, strict=True):
            same(here, there)
        # What nobody waits for is held for good.
        assert torch._C._distributed_c10d._get_work_registry_size() == 0


def _broken_off(model: nn.Module, batch: Tensor) -> None:
    """A forward that ends while weights of the layers that did not run are on their way."""

    def ends(*_: Any) -> None:
        raise InterruptedError

    hook = model.down.register_forward_pre_hook(ends)
    with suppress(InterruptedError):
        model(batch)
    hook.remove()


@case(3)
def sequences() -> None:
    tokens, generator = 13, torch.Generator().manual_seed(1)
    whole = [torch.randn(2, 6, tokens + 5, 4, generator=generator, dtype=torch.float64) for _ in range(4)]
    for how, sight in itertools.product(HOW, (Sight(), Sight(window=3))):
        found = []
        for device in ("cpu", "cuda"):
            mesh = Mesh(Grid(gz=3, sequence=3), device)
            chunks = Chunks(tokens, 3)
            places = torch.tensor(chunks.places(mesh.rank("sequence")))
            q, k, v, grad = (t[:, :, : chunks.padded][:, :, places].to(device) for t in whole)
            shares = [t.requires_grad_() for t in (q, k, v)]
            out = attend(*shares, Shared(mesh, chunks, how), sight, None, 0.4, 0.0)
            out.backward(grad)
            found.append([out.detach(), *(t.grad for t in shares)])
            mesh.destroy()
        for here, there in zip(*found, strict=True):
            same(here, there)


# Optimizers


ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=False)


@case(2)
def states() -> None:
    _states(((0, True), (1, False), (2, True)))


@case(2)
def states_few() -> None:
    _states(((1, False), (2, True)))


@case(2)
def states_more() -> None:
    _states(((0, False), (1, True), (2, False)))


def _states(kinds: tuple[tuple[int, bool], ...]) -> None:
    """ZeRO's stages, in host memory or not, clipping, checkpoints read and written between steps."""
    for stage, host in kinds:
        found = []
        for device in (CPU, GPU):
            model = model_of(LOW).to(device)
            optimizer = FlatOptimizer(
                ADAMW,
                model,
                max_norm=0.5,
                group=dist.group.WORLD,
                stage=stage,
                host=host,
                tile_size=16,
                bucket_bytes=128,
            )
            with cuda.HostReads(late):
                for step in range(4):
                    for part in range(2):
                        rows = rows_of(10 * step + part + 100 * dist.get_rank()).to(device, LOW)
                        model(rows).square().mean().backward()
                    if stage == 0:
                        optimizer.gradient_of(model.down.bias).mul_(2)
                    optimizer.step()
                    # Each straight behind a step, nothing of which the host has waited for.
                    if step == 0:
                        state = copy.deepcopy(optimizer.state_dict(CPU))
                    elif step == 1:
                        access = Access(optimizer, model.up.weight)
                        access.set_weights(torch.full((10, 6), 0.25))  # from the CPU
                        with torch.no_grad():
                            model.up.bias.add_(1)
                        optimizer.refresh_masters()
                    elif step == 2:
                        parts = dense_parts(optimizer.stores, optimizer.inner.state)
                        kept = [
                            t.double() for _, _, read in parts.values() for t in read.values() if isinstance(t, Tensor)
                        ]
                        access.set_weights(access.weights() + access.state("exp_avg"))
                    else:
                        optimizer.load_state_dict(state)
                states_ = optimizer.state_dict(CPU)["state"]
            found.append(
                [p.detach() for p in model.parameters()]
                + [t for s in states_.values() for t in s.values() if isinstance(t, Tensor)]
            )
            found[-1] += kept
        for here, there in zip(*found, strict=True):
            same(here, there, True)


@case(2)
def pruned() -> None:
    _pruned(((0, True), (2, False), (1, True)))


@case(2)
def pruned_few() -> None:
    _pruned(((2, False), (1, True)))


def _pruned(kinds: tuple[tuple[int, bool], ...]) -> None:
    """SAMO beside shares, host memory and further pruning."""
    for stage, host in kinds:
        found = []
        for device in (CPU, GPU):
            model = model_of(LOW).to(device)
            masks = samo.magnitude(model_of(LOW), 0.5)
            optimizer = samo.Optimizer(
                ADAMW,
                model,
                {n: m.to(device) for n, m in masks.items()},
                group=dist.group.WORLD,
                stage=stage,
                host=host,
                tile_size=16,
            )
            with cuda.HostReads(late):
                for step in range(3):
                    model(rows_of(step + 100 * dist.get_rank()).to(device, LOW)).square().mean().backward()
                    less = samo.magnitude(copy.deepcopy(model).cpu(), 0.7)
                    optimizer.step()
                    if step == 1:  # straight behind the step, nothing of which the host has waited for
                        optimizer.prune({n: m.to(device) for n, m in less.items()})
            found.append([p.detach() for p in model.parameters()])
        for here, there in zip(*found, strict=True):
            same(here, there, True)


@case(2)
def buckets() -> None:
    """The pipeline's optimizer, whose state is in host memory."""
    for max_norm in (None, 0.5):
        found = []
        for device in (CPU, GPU):
            torch.manual_seed(5)
            model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(3))).to(device, LOW)
            groups = [{"params": list(model.parameters())}]
            optimizer = BucketedOptimizer(ADAMW, groups, 1024, max_norm=max_norm, group=dist.group.WORLD, coarsening=1)
            with cuda.HostReads(late):
                for step in range(4):
                    rows = torch.randn(6, 40, generator=torch.Generator().manual_seed(step + 9 * dist.get_rank()))
                    model(rows.to(device, LOW)).square().mean().backward()
                    if step == 2:
                        optimizer.reduce()
                    optimizer.step()
                    optimizer.zero_grad()
                    if step == 0:
                        state = copy.deepcopy(optimizer.state_dict())
                    elif step == 1:
                        with torch.no_grad():
                            model[0].bias.add_(1)
                        optimizer.refresh_masters()
                    elif step == 3:
                        optimizer.load_state_dict(state)
                masters = optimizer.state_dict()["masters"]
            found.append([*(p.detach() for p in model.parameters()), *masters.values()])
        for here, there in zip(*found, strict=True):
            same(here, there, True)


# Experts


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.fc2(torch.nn.functional.gelu(self.fc1(tokens)))


def _asked_on_the_device(data: int) -> None:
    """What ranks ask each other before they send tokens, over a group that moves the device's tensors alone, as NCCL's."""
    only = dist.new_group(backend=cuda.BACKEND.split(",")[1])
    groups = ted_moe.topology.Groups(ted_moe.Topology(4, 2, 2), {"block": only})
    tokens = torch.randn(9, 8, generator=torch.Generator().manual_seed(data)).to(GPU)
    assert Agreement(dist.get_rank(), tokens, groups).wait() == 3
    expert = nn.Linear(8, 8).to(GPU)
    dist.broadcast(expert.weight.data, 0, only)
    dist.broadcast(expert.bias.data, 0, only)
    watch_outputs(expert, groups)
    for _ in range(2):
        expert(tokens)


_MIXTURES: tuple[dict[str, Any], ...] = (
    {"k": 2, "top2_2nd_expert_sampling": False, "capacity_factor": 0.9},
    {"k": 1, "use_rts": False, "drop_tokens": False, "dropless": True},
    {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False, "fused": False},
)
_STASHES = (None, "device", "cpu")


@case(4)
def experts() -> None:
    _experts(list(zip(_MIXTURES, _STASHES, strict=True)))


@case(4)
def experts_more() -> None:
    pairs = itertools.product(enumerate(_MIXTURES), enumerate(_STASHES))
    _experts([(kind, place) for (number, kind), (other, place) in pairs if number != other])


def _experts(pairs: list[tuple[dict[str, Any], Any]]) -> None:
    """Dispatch with and without capacities, whole and split experts, and communication-aware checkpoints in either memory."""
    groups = ted_moe.topology.Groups(ted_moe.Topology(4, 2, 2))
    _asked_on_the_device(groups.rank("data"))
    for kind, place in pairs:
        torch.manual_seed(0)
        first = ted_moe.MoE(8, Expert(), 4, 2, groups=groups, **kind).double()
        first.gate.float()
        found = []
        for device in (CPU, GPU):
            layer = copy.deepcopy(first).to(device)
            generator = torch.Generator().manual_seed(groups.rank("data"))
            tokens = torch.randn(1, 9, 8, generator=generator, dtype=torch.float64).to(device).requires_grad_()

            def run(tokens: Tensor, layer: Any = layer) -> Tensor:
                output, l_aux, _ = layer(tokens)
                return output + l_aux + tokens

            with cuda.HostReads(late):
                for _ in range(2):
                    if place is None:
                        out = run(tokens)
                    else:
                        stashing = ted_moe.Stashing(run, stash=place)
                        out = torch.utils.checkpoint.checkpoint(stashing, tokens, use_reentrant=False)
                        # What may come between: memory that goes to others.
                        torch.empty(64, device=device)
                    out.square().sum().backward()
            found.append([out.detach(), tokens.grad, *(p.grad for p in layer.parameters())])
        for here, there in zip(*found, strict=True):
            same(here, there, single=True)  # the gate's


# PCCL in front of the device's own library


@case(4)
def pccl() -> None:
    from axonn_plugins.pccl import register
    from axonn_plugins.pccl.algorithms import algorithms
    from axonn_plugins.pccl.backend import planner, using
    from axonn_plugins.pccl.choice import WINDOW, Choice

    register()
    rank, side = dist.get_rank(), torch.cuda.Stream()
    group = dist.new_group(backend="pccl", pg_options=_pccl_options())
    if not REAL:
        planner(group, "cuda").window = partial(torch.empty, dtype=torch.uint8, device=GPU)
    for collective, name in itertools.chain.from_iterable(
        [(c, n) for n in (*algorithms(c, 4), *([] if REAL else [WINDOW]))]
        for c in ("all_gather", "reduce_scatter", "all_reduce")
    ):
        with using(Choice(name), group, "cuda"):
            for _ in range(2):
                data = torch.full((13,), rank + 1.0, device=GPU)
                if collective == "all_gather":  # nobody waits for this one, nor keeps where it goes
                    dist.all_gather_into_tensor(torch.empty(52, device=GPU), data, group, async_op=True)
                    torch.ones(52, device=GPU)
                whole = torch.arange(52.0, device=GPU) * (rank + 1)
                # Made late, and freed before anybody waits.
                with torch.cuda.stream(side):
                    side.wait_stream(torch.cuda.default_stream())
                    if collective == "all_gather":
                        got = torch.empty(52, device=GPU)
                        work = dist.all_gather_into_tensor(got, data * 1, group, async_op=True)
                        wanted = torch.arange(1.0, 5).repeat_interleave(13)
                    elif collective == "all_reduce":
                        got = data * 1
                        work = dist.all_reduce(got, group=group, async_op=True)
                        wanted = torch.full((13,), 10.0)
                    else:
                        got = torch.empty(13, device=GPU)
                        work = dist.reduce_scatter_tensor(got, whole * 1, group=group, async_op=True)
                        wanted = 10 * torch.arange(52.0)[13 * rank : 13 * (rank + 1)]
                    torch.ones(52, device=GPU)
                    if not REAL:
                        _raises("reads on", got.clone)
                        assert not work.is_completed()
                    work.wait()
                    doubled = got * 2
                torch.cuda.current_stream().wait_stream(side)
                same(2 * wanted, doubled, True)
                assert work.is_completed() or work.is_completed()
                future = work.get_future()
                future.wait()
                same(wanted, future.value()[0], True)
    got, data = torch.empty(13, device=GPU), torch.full((13,), rank + 1.0, device=GPU)
    ops = [dist.P2POp(dist.isend, data, (rank + 1) % 4, group), dist.P2POp(dist.irecv, got, (rank - 1) % 4, group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(torch.full((13,), (rank - 1) % 4 + 1.0), got, True)
    dist.barrier()


def _pccl_options() -> Any:
    from axonn_plugins.pccl.options import Options as PcclOptions

    return PcclOptions(algorithm="ring", ranks_per_node=2)


# Pipelines


def _stages(stages: int) -> None:
    from tests.pipeline import test_ordered as ordered

    replicas = dist.get_world_size() // stages
    pipelines = ordered.pipelines_of(stages, replicas)
    content = ordered.content
    for policy in ordered.POLICIES:
        wire = TorchWire(pipelines, GPU, 60.0)
        wire.connect()
        limit = ordered.automatic_limit(policy, stages, ordered.MICROBATCHES)
        with patch.object(ordered, "content", lambda *place: content(*place).to(GPU)):
            ordered.train(wire, dist.get_rank() // replicas, stages, policy, limit, True)
        dist.barrier()


@case(2)
def stages_2() -> None:
    _stages(2)


@case(3)
def stages_3() -> None:
    _stages(3)
    if not REAL:  # NCCL's watchdog ends the process
        _lost()


def _lost() -> None:
    """A message that will not come has arrived, as far as one can ask; who takes it is told."""
    wire: Any = TorchWire([[0, 1, 2]], GPU, 60.0)
    wire.connect()
    transport = Transport(wire, dist.get_rank(), 3)
    dist.barrier()
    if dist.get_rank() == 2:
        transport.begin(1, 1)
        try:
            transport.receive(True)
        except StageLost as error:
            assert error.stage == 1 and "gloo" in str(error), error
        else:
            raise AssertionError("stage 1 is gone")
    elif dist.get_rank() == 1:
        groups = [wire._groups.pop(place)[0] for place in list(wire._groups)]
        while groups:
            dist.destroy_process_group(groups.pop())


@case(4)
def stages_4() -> None:
    _stages(4)


@case(4)
def stages_2_replicas_2() -> None:
    _stages(2)


@case(8)
def stages_4_replicas_2() -> None:
    _stages(4)


# All together, as a plain loop has them


def _composed(stage: int, block: dict[str, Any], factory: Any = ADAMW, bias: bool = True) -> None:
    found = []
    for device in ("cpu", "cuda"):
        with patch("axonn_tp.grid.device._default", lambda device=device: device):
            model = model_of(torch.float32, bias).to(device)
            run = compose(model, factory, block, stage=stage, max_norm=0.2)
        run.model.to(device)
        assert run.mesh.device.type == device
        with cuda.HostReads(late):
            for step in range(3):
                for part in range(2):
                    batch = run.mesh.shard_batch(rows_of(2 * step + part, 16).float()).to(device)
                    run.backward(run.model(batch).square().mean())
                run.step()
        found.append([p.detach() for p in run.model.parameters()])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(there.cpu(), here, rtol=1e-5, atol=1e-6)


BLOCKS: list[dict[str, Any]] = [
    {"tensor_parallel": {"gx": 2, "gz": 2, "plan": "auto"}, "samo": {"sparsity": 0.5}, "offload_optimizer": {}},
    {"tensor_parallel": {"gy": 2, "plan": "auto"}, "samo": {"sparsity": 0.5}},
]


@case(4)
def composed() -> None:
    for stage, block in zip((1, 2), BLOCKS, strict=True):
        _composed(stage, block)
    grid = {"tensor_parallel": {"gx": 2, "plan": "auto"}}
    for block in (
        () if REAL else ({"offload_optimizer": {}}, grid)
    ):  # of whole matrices, which torch's iterates in bfloat16
        _composed(1, block, partial(torch.optim.Muon, lr=0.02), bias=False)
    panels = torch.randn(4, 12, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = []
    for device in (CPU, GPU):
        panel, numbers = panels[dist.get_rank()].to(device), Iteration((3.4, -4.8, 2.0), 3, 1e-7, torch.float64)
        found.append(orthogonalise(panel, (12, 12), numbers, dist.group.WORLD, device))
    same(*found)
    _composed(1, grid | {"samo": {"pruner": {"n_of_m": [1, 2]}}})


@case(8)
def composed_8() -> None:
    _composed(1, BLOCKS[0])


@case(2)
def weights_of_losses() -> None:
    """Kept targets are counted while the model runs."""
    for device in (CPU, GPU):
        kept, divisor = torch.tensor(3 + dist.get_rank(), device=device), Divisor()
        for _ in range(2):  # behind the first, ranks have nothing else to agree upon
            weight = Weight(lambda weights, kept=kept: kept, dist.group.WORLD, divisor, device)
            with weight:
                loss = torch.ones((), device=device)
            got = weight.of(loss)
            assert abs(got.item() - (3 + dist.get_rank()) * 2 / 7) < 1e-6


# The host in the loop


def _waited(step: Callable[[], Any]) -> dict[str, int]:
    """Count the host's waits for the device in a step behind two others."""
    for _ in range(2):
        step()
    late.forbid(False)
    step()
    return late.waits()


@case(2)
def host_waits() -> None:
    """Each wait is known: a dense 4D step has none, a message one for what it is (README.md)."""
    mesh = Mesh(Grid(gx=2), "cuda")
    model = axonn_tp.parallelize(model_of(), mesh, PLAN).to(GPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, capturable=True, foreach=True)
    reducer, batch = GradientReducer(model.parameters(), mesh), rows_of(0).to(GPU)

    def dense() -> None:
        model(batch).square().mean().backward()
        reducer.finish()
        axonn_tp.clip_grad_norm_(model.parameters(), mesh, 0.1)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):  # ranks compare what they read in passes 1, 2, 4 and 8
        dense()
    found = {"dense": _waited(dense)}
    late.forbid(True)
    dense()
    late.forbid(False)
    for name, host in (("states", False), ("offload", True)):
        shared = model_of(torch.bfloat16).to(GPU)
        flat = FlatOptimizer(ADAMW, shared, max_norm=0.5, group=dist.group.WORLD, stage=1, host=host)

        def states(shared: Any = shared, flat: Any = flat) -> None:
            shared(batch.bfloat16()).square().mean().backward()
            flat.step()

        for _ in range(3):  # values are looked at behind steps 0, 1, 2 and 4
            states()
        found[name] = _waited(states)
    groups = ted_moe.topology.Groups(ted_moe.Topology(2, 1, 2))
    for name, kind in (("capacity", {}), ("dropless", {"dropless": True, "drop_tokens": False})):
        layer = ted_moe.MoE(8, Expert(), 2, 2, k=1, use_rts=False, groups=groups, **kind).to(GPU)
        tokens = torch.randn(1, 9, 8, device=GPU).requires_grad_()

        def experts(layer: Any = layer, tokens: Tensor = tokens) -> None:
            output, l_aux, _ = layer(tokens)
            (output.sum() + l_aux).backward()

        found[name] = _waited(experts)
    wire = TorchWire([[0, 1]], GPU, 60.0)
    wire.connect()
    transport = Transport(wire, dist.get_rank(), 2)
    message = Message(0, (torch.ones(5, 3, device=GPU),), True, (True,))

    def passed() -> None:
        transport.begin(1, 1)
        if dist.get_rank() == 0:
            transport.send_input(message)
            assert transport.receive(True) is not None
        else:
            assert transport.receive(True) is not None
            transport.send_gradient(message)
        transport.end()

    found["message"] = _waited(passed)
    read, sent = "copy to the host", "copy of pageable memory"
    flags = {read: 1, sent: 4 if dist.get_rank() else 3}
    assert found == {
        "dense": {},
        "states": flags,
        "offload": flags,
        "capacity": {},
        "dropless": {read: 2, "item": 1},
        "message": {read: 1, sent: 1},
    }, found


# Running them


def _on_rank(name: str) -> float:
    torch.set_num_threads(1)
    begin = time.process_time()
    _, function, world = CASES[name]
    cuda.register(late)
    if world:
        dist.init_process_group(cuda.BACKEND, timeout=timedelta(seconds=60))
    function()
    found = late.races()
    assert not found, f"{name}: {found[0]}"
    return time.process_time() - begin


def _find(names: list[str]) -> None:
    """Import the files that have these cases; all of them need this one, and some hosts that take seconds to import."""
    for begins, file in (
        ("deepspeed", "deepspeed"),
        ("asked", "asked"),
        ("replicas", "replicas"),
        ("lists", "listed"),
    ):
        if any(name.startswith(begins) for name in names):
            importlib.import_module(f"tests.device.{file}")


def main(file: Path | None, names: list[str]) -> dict[str, str]:
    """Run cases, each on ranks of its own, and print what they took; returns what was wrong, by case.

    Args:
        file: the tests' device; None: a GPU that is here.
        names: of the cases.
    """
    global late
    if file is None:
        from tests.device import real

        late, place = real.install(), real.place
        names = names or [name for name in CASES if name not in real.LEFT_OUT]
    else:
        late, place = cuda.install(file), None
        samo.fused.kernels = lambda: None  # which need a compiler for a GPU, and a GPU
    failed = {}
    _find(names)
    for name in names or CASES:
        if name.startswith("asked"):
            importlib.import_module("tests.device.asked").import_hosts()
        begin = time.perf_counter()
        try:
            taken = launch(_on_rank, CASES[name][0], name, timeout=300, place=place)
            print(json.dumps({"case": name, "processor": sum(taken), "wall": time.perf_counter() - begin}), flush=True)
        except Exception as error:
            failed[name] = str(error)
            print(json.dumps({"case": name, "error": str(error)}), flush=True)
    return failed
