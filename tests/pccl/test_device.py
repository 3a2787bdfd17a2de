"""The code for accelerators, on the CPU: gloo stands in for the vendor's library, ranks for GPUs on several nodes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup

from axonn_plugins.pccl import register
from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.backend import planner, using
from axonn_plugins.pccl.build import load
from axonn_plugins.pccl.choice import NATIVE, WINDOW, Choice, Measured
from axonn_plugins.pccl.default_timeout import timeout_of
from axonn_plugins.pccl.device_tuner import tune
from axonn_plugins.pccl.executor import Executor
from axonn_plugins.pccl.nodewise import even
from axonn_plugins.pccl.options import Options
from axonn_plugins.pccl.vendor import nodes_of, window_of
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.pccl.stress import AVG, DTYPES, MAX, PRODUCT, SUM, reduced, values

OPS = (SUM, AVG, dist.ReduceOp.MIN, MAX, PRODUCT)
ELEMENTS = (0, 1, 3, 30, 257)
Maps = dict[int, tuple[Sequence[Sequence[int]], ...]]
MAPS: Maps = {
    2: (((0, 1),), ((0,), (1,))),
    3: (((0, 1), (2,)), ((2,), (0,), (1,))),
    4: (((0, 1), (2, 3)), ((0, 2), (1, 3))),
    5: (((0, 3), (1,), (2, 4)), ((0, 1, 2), (3, 4))),
    6: (((0, 1), (2, 3), (4, 5)), ((0, 1, 2), (3, 4, 5)), ((0,), (1, 2, 3, 5, 4))),
}
SOME: Maps = {2: (((0, 1),),), 3: (((2,), (0,), (1,)),), 4: (((0, 2), (1, 3)), ((0, 3), (1,), (2,)))}
"""One node, ranks alone, even nodes whose ranks are not in order, and uneven ones."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Before ranks are forked, whose time is limited."""
    load()


def group_of(ranks: int, nodes: Sequence[Sequence[int]], options: Options | None = None, measured: Any = None) -> Any:
    """A process group of the world's first ranks with the accelerator's backend in front of gloo; None elsewhere."""

    def create(asked: Any, _: Any) -> Any:
        timeout, rank = timedelta(seconds=60), asked.group_rank
        inner = dist.ProcessGroupGloo(dist.PrefixStore("inner", asked.store), rank, ranks, timeout)
        local = None
        if len(nodes) == 1:
            local = inner
        elif even(nodes):
            here = next(number for number, node in enumerate(nodes) if rank in node)
            store = dist.PrefixStore(f"node{here}", asked.store)
            local = dist.ProcessGroupGloo(store, list(nodes[here]).index(rank), len(nodes[here]), timeout)
        window = partial(torch.zeros, dtype=torch.uint8)
        executor = Executor(inner, local, rank, nodes, options or Options(), measured, window)
        return load().device_backend(inner, rank, ranks, executor, "cpu")

    dist.Backend.register_backend("pccl_double", create, extended_api=True, devices=["cpu"])
    group = dist.new_group(list(range(ranks)), backend="pccl_double")
    return group if dist.get_rank() < ranks else None


def cases(ranks: int) -> Iterator[tuple[str, Choice]]:
    """Every algorithm for every collective."""
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        for place, name in enumerate(algorithms(collective, ranks)):
            yield collective, Choice(name, 1 + place % 3)
        yield collective, Choice(WINDOW)


def one(collective: str, group: Any, dtype: torch.dtype, elements: int, op: Any, form: str, seed: int) -> None:
    """One collective by one form of the call, checked exactly."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    parts = [values(dtype, elements, seed + other) for other in range(size)]
    wide = [values(dtype, elements * size, seed + 100 + other) for other in range(size)]
    mine = parts[rank].clone()
    if form == "coalesced":
        _coalesced(collective, group, parts, wide, op)
        return
    if collective == "all_reduce":
        got = mine if form != "sparse" else torch.zeros(2 * elements, dtype=dtype)[::2].copy_(mine)
        work = dist.all_reduce(got, op, group=group, async_op=True)
        assert work is not None
        future = work.get_future()
        work.wait()
        assert torch.equal(future.value()[0], got) and work.is_completed()
        wanted = reduced(parts, op)
    elif collective == "all_gather":
        got = torch.zeros(elements * size, dtype=dtype)
        if form == "list":
            dist.all_gather(list(got.view(size, elements).unbind()), mine, group=group)
        else:
            mine = got[rank * elements : (rank + 1) * elements].copy_(mine) if form == "in place" else mine
            dist.all_gather_into_tensor(got, mine, group=group)
        wanted = torch.cat(parts)
    else:
        whole = wide[rank].clone()
        got = whole[rank * elements : (rank + 1) * elements] if form == "in place" else torch.empty_like(mine)
        if form == "list":
            dist.reduce_scatter(got, list(whole.view(size, elements).unbind()), op, group=group)
        else:
            dist.reduce_scatter_tensor(got, whole, op, group=group)
        wanted = reduced(wide, op)[rank * elements : (rank + 1) * elements]
    assert torch.equal(got, wanted), (collective, dtype, elements, op, form, got, wanted)


def _coalesced(collective: str, group: Any, parts: list[torch.Tensor], wide: list[torch.Tensor], op: Any) -> None:
    """Two calls at once, of two sizes."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    pairs = []
    with dist._coalescing_manager(group=group):
        for cut in (1, 2):
            mine, whole = parts[rank][::cut].clone(), wide[rank][: parts[0][::cut].numel() * size].clone()
            if collective == "all_reduce":
                dist.all_reduce(mine, op, group=group)
                pairs.append((mine, reduced([part[::cut] for part in parts], op)))
            elif collective == "all_gather":
                got = torch.empty(mine.numel() * size, dtype=mine.dtype)
                dist.all_gather_into_tensor(got, mine, group=group)
                pairs.append((got, torch.cat([part[::cut] for part in parts])))
            else:
                got = torch.empty_like(mine)
                dist.reduce_scatter_tensor(got, whole, op, group=group)
                summed = reduced([each[: whole.numel()] for each in wide], op)
                pairs.append((got, summed[rank * mine.numel() : (rank + 1) * mine.numel()]))
    assert all(torch.equal(got, wanted) for got, wanted in pairs), (collective, parts[0].dtype, op)


def _every_algorithm(maps_of: Maps) -> int:
    draw, done = random.Random(7), 0
    for ranks, maps in maps_of.items():
        for nodes in maps:
            group = group_of(ranks, nodes)
            lot = list(cases(ranks))
            draw.shuffle(lot)
            for number, (collective, choice) in enumerate(lot):
                kinds = [(draw.choice(DTYPES), draw.choice(ELEMENTS), draw.choice(OPS)) for _ in range(2)]
                kinds.append((torch.float64, 257, AVG))
                form = draw.choice(("plain", "in place", "list", "sparse", "coalesced"))
                if group is None:
                    continue
                with using(choice, group):
                    for dtype, elements, op in kinds:
                        floating = dtype.is_floating_point
                        if op == AVG and not floating or dtype is torch.bool and op == PRODUCT:
                            op = SUM
                        op = MAX if op == PRODUCT and dtype.itemsize < 4 else op
                        one(collective, group, dtype, elements, op, form, 1000 * number)
                        done += 1
    return done


def _choices() -> None:
    nodes = ((0, 1), (2, 3))
    times = {2**10: {Choice("ring"): 2.0, Choice(NATIVE): 1.0}, 2**20: {Choice("ring"): 1.0, Choice(NATIVE): 2.0}}
    group = group_of(4, nodes, measured=Measured({"all_gather": times}))
    asked = planner(group)
    assert [asked.ours(0, size, True) for size in (2**10, 2**20)] == [False, True]
    assert not asked.ours(1, 2**10, True) and asked.ours(1, 2**10, False)  # nothing measured: the vendor's, if it can
    ring, native = (planner(group_of(4, nodes, Options(algorithm=name))) for name in ("ring", "native"))
    assert ring.ours(0, 2**10, True) and not native.ours(0, 2**10, True)
    before = asked.measured
    measured = tune(group, sizes=(2**10, 2**12), device="cpu")
    assert asked.measured is measured and set(measured.times) == {"all_gather", "reduce_scatter", "all_reduce"}
    for by_size in measured.times.values():
        assert all({Choice(NATIVE), Choice(WINDOW)} < set(times) and len(times) >= 7 for times in by_size.values())
    if dist.get_rank() == 1:
        asked.window = None  # whose GPU has none
    for by_size in tune(group, sizes=(2**10,), device="cpu").times.values():
        assert all(Choice(WINDOW) not in times for times in by_size.values())
    asked.measured = before
    one("all_reduce", group, torch.int16, 30, SUM, "plain", 5)  # which gloo knows not
    one("all_reduce", group, torch.float32, 30, SUM, "plain", 6)
    dist.broadcast(torch.ones(3), 0, group=group)
    dist.barrier(group)
    with (
        pytest.raises(RuntimeError, match="has 9 Float of the output, expected 4 times 2 Float of the input"),
        using(Choice("ring"), group),
    ):
        dist.all_gather_into_tensor(torch.empty(9), torch.ones(2), group=group)


def _bits() -> None:
    """Sums that are not exact have the same bits on all ranks and in every run."""
    rank = dist.get_rank()
    for nodes in (((0, 1), (2, 3)), ((0, 1, 2), (3,))):
        group = group_of(4, nodes)
        for name in algorithms("all_reduce", 4):
            found = []
            for _ in range(2):
                data = torch.randn(1001, generator=torch.Generator().manual_seed(rank)).bfloat16()
                data[:2] = torch.tensor([0.0, -0.0]) if rank % 2 else torch.tensor([-0.0, 0.0])
                other = data.clone()
                with using(Choice(name), group):
                    dist.all_reduce(data, group=group)
                    dist.all_reduce(other, MAX, group=group)
                found.append(torch.cat([data, other]).view(torch.int16))
            everybody = [torch.empty_like(found[0], dtype=torch.int32) for _ in range(4)]
            dist.all_gather(everybody, found[0].int())
            assert torch.equal(*found) and all(torch.equal(bits, everybody[0]) for bits in everybody), name


def _shapes() -> None:
    """Lists of tensors whose shapes are other ones on other ranks."""
    rank = dist.get_rank()
    shape = (2, 3) if rank % 2 else (6,)
    group = group_of(4, ((0, 1), (2, 3)), Options(algorithm="ring"))
    parts = [torch.zeros(shape) for _ in range(4)]
    dist.all_gather(parts, torch.full((6,), float(rank)), group=group)
    assert [part.unique().tolist() for part in parts] == [[0.0], [1.0], [2.0], [3.0]]
    out = torch.zeros(6)
    dist.reduce_scatter(out, [torch.full(shape, float(other)) for other in range(4)], group=group)
    assert out.tolist() == [4.0 * rank] * 6


def _training() -> None:
    """DDP calls from threads of its own, and goes on in the futures."""
    group = group_of(4, ((0, 1), (2, 3)), Options(algorithm="hierarchical"))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(13, 40), nn.Tanh(), nn.Linear(40, 7)).double()
    data = torch.randn(5, 13, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    found = []
    for chosen in (dist.group.WORLD, group):
        copied = nn.parallel.DistributedDataParallel(deepcopy(model), process_group=chosen, bucket_cap_mb=0.001)
        copied(data).square().sum().backward()
        found.append(torch.cat([each.grad.flatten() for each in copied.parameters() if each.grad is not None]))
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def _routed() -> None:
    """One backend for two devices: "meta" tensors stand in for the GPU's."""
    made = []

    def make() -> Any:
        time.sleep(0.1)  # so that other threads come meanwhile
        made.append(FakeProcessGroup._create_internal(dist.get_rank(), 4))
        return made[-1]

    def create(asked: Any, _: Any) -> Any:
        inner = dist.ProcessGroupGloo(asked.store, asked.group_rank, asked.group_size, asked.timeout)
        return load().router(inner, asked.group_rank, asked.group_size, make)

    dist.Backend.register_backend("pccl_router", create, extended_api=True, devices=["cpu"])
    backend = dist.new_group(backend="pccl_router")._get_backend(torch.device("cpu"))
    here, there, rank = torch.ones(3), torch.ones(3, device="meta"), dist.get_rank()
    backend.allreduce([here], dist.AllreduceOptions()).wait()
    assert here.tolist() == [4.0] * 3 and not made
    with ThreadPoolExecutor(2) as threads:
        for work in threads.map(lambda _: backend.allreduce([there], dist.AllreduceOptions()), range(2)):
            work.wait()
    assert len(made) == 1 and isinstance(load().on_device(backend), FakeProcessGroup)
    for sent, got in ((here, torch.zeros(3)), (there, there)):
        assert backend.supports_coalescing
        backend._start_coalescing()
        backend.send([sent], (rank + 1) % 4, 0)
        backend.recv([got], (rank - 1) % 4, 0)
        backend._end_coalescing().wait()
        assert got is there or got.tolist() == [4.0] * 3


def _set_before_it_is_made() -> None:
    """A timeout that a group is given before the first tensor of the accelerator's, as `dist.breakpoint` does."""
    made: list[Any] = []

    def create(asked: Any, _: Any) -> Any:
        def gloo(name: str) -> Any:
            store = dist.PrefixStore(name, asked.store)
            return dist.ProcessGroupGloo(store, asked.group_rank, asked.group_size, asked.timeout)

        def make() -> Any:
            made.append(gloo("device"))
            return made[-1]

        return load().router(gloo("host"), asked.group_rank, asked.group_size, make)

    dist.Backend.register_backend("pccl_late", create, extended_api=True, devices=["cpu"])
    group = dist.new_group(backend="pccl_late")
    backend = group._get_backend(torch.device("cpu"))
    assert timeout_of(backend) is None  # gloo's own, which a router does not tell
    c10d._set_pg_timeout(timedelta(seconds=77), group)
    assert not made
    load().on_device(backend)
    assert made[0].options._timeout == timedelta(seconds=77)


def _both_devices() -> None:
    """The group as it is where there is a GPU, seen from the CPU's tensors."""
    register()
    with patch("torch.cuda.is_available", lambda: True):
        group = dist.new_group(backend="pccl")
    rank, mine, got = dist.get_rank(), torch.full((3,), dist.get_rank() + 1.0), torch.zeros(3)
    ops = [(dist.isend, mine, (rank + 1) % 4), (dist.irecv, got, (rank - 1) % 4)]
    for work in dist.batch_isend_irecv([dist.P2POp(op, data, group=group, group_peer=peer) for op, data, peer in ops]):
        work.wait()
    assert got.tolist() == [(rank - 1) % 4 + 1.0] * 3
    dist.all_reduce(mine, group=group)
    dist.barrier(group)
    assert mine.tolist() == [10.0] * 3
    own = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    parts = [torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(other)) for other in range(4)]
    sums, whole, share = (
        [own.clone(), own + 1],
        torch.zeros(24, dtype=torch.float64),
        torch.zeros(6, dtype=torch.float64),
    )
    calls: list[Callable[[], Any]] = [
        lambda: [dist.all_reduce(each, group=group) for each in sums],
        lambda: dist.all_gather_into_tensor(whole, own, group),
        lambda: dist.reduce_scatter_tensor(share, own.repeat(4), group=group),
    ]
    for call in calls:
        if rank == 0:
            time.sleep(0.2)
        with dist._coalescing_manager(group, torch.device("cpu")):  # type: ignore[attr-defined]
            call()
        for each in sums if call is calls[0] else ():
            each -= 1  # which a sum that is still under way would undo
    wanted = [sum(parts) - 1, sum(parts) + 3, torch.cat(parts), sum(parts)]
    for found, right in zip([*sums, whole, share], wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
    with pytest.raises(RuntimeError, match='"cuda:pccl" needs a CUDA device'):
        group._get_backend(torch.device("cuda")).allreduce([torch.ones(3, device="meta")], dist.AllreduceOptions())


def _left_by_an_exception() -> None:
    """Coalescing blocks that end so: what is called after them is done."""
    register()
    own = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(dist.get_rank()))
    wanted = sum(
        torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)) for rank in range(4)
    )
    cpu = torch.device("cpu")
    for beside in (False, True):
        with patch("torch.cuda.is_available", lambda beside=beside: beside):
            group = dist.new_group(backend="pccl")
        for device in (None, cpu):
            given_up = own.clone()
            with pytest.raises((LookupError, RuntimeError)), dist._coalescing_manager(group, device):  # type: ignore[attr-defined]
                dist.all_reduce(given_up, group=group)
                raise LookupError
            assert given_up.equal(own)
            found = own.clone()
            dist.all_reduce(found, group=group)
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
        if beside:
            backend, got = group._get_backend(cpu), torch.zeros_like(own)
            with pytest.raises(LookupError), dist._coalescing_manager(group, cpu):  # type: ignore[attr-defined]
                for work in (backend.send([own], dist.get_rank() ^ 1, 0), backend.recv([got], dist.get_rank() ^ 1, 0)):
                    work.wait()
                raise LookupError
            backend._start_coalescing()
            assert backend._end_coalescing().is_completed()


def _four() -> None:
    for check in (_choices, _bits, _shapes, _routed, _set_before_it_is_made, _both_devices, _left_by_an_exception):
        check()
        dist.barrier()


@pytest.mark.parametrize(("ranks", "maps", "enough"), [(4, SOME, 600), thorough(6, MAPS, 1700)], ids=["some", "all"])
def test_every_algorithm_with_gloo_in_the_librarys_place(ranks: int, maps: Maps, enough: int) -> None:
    done = run_ranks(_every_algorithm, ranks, maps)
    assert done[0] == max(done) > enough


def test_choices_bits_and_devices() -> None:
    run_ranks(_four, 4)


def test_nodes_by_name_or_by_number() -> None:
    assert nodes_of(["a", "b", "a"], [4, 5, 6], "auto") == ((0, 2), (1,))
    assert nodes_of(["a", "a", "a"], [3, 4, 5], 2) == ((0,), (1, 2))
    assert even(((0, 1), (2, 3))) and not even(((0, 2), (1, 3))) and not even(((0,), (1,))) and not even(((0, 1), (2,)))


def test_training_is_as_with_gloo() -> None:
    run_ranks(_training, 4)


def test_a_gpu_without_windows() -> None:
    """NCCL raises where the GPU's memory cannot be shared by handles."""

    class Backend:
        def register_mem_pool(self, pool: Any, symm: bool) -> None:
            """register_mem_pool(self, pool, symm: bool)"""

        @property
        def mem_allocator(self) -> Any:
            raise RuntimeError("NCCL mem allocator is not supported in this NCCL version")

    assert window_of(Backend()) is None
