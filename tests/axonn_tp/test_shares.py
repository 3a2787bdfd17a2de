"""The sum of weight gradients over z on gloo: each rank's share, in half the bytes of gloo's own reduce-scatter."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.cluster import Cluster, lacking
from axonn_plugins.observe.ledger import Ledger
from axonn_tp import Grid, Mesh
from axonn_tp.comm.bundle import fits, start_all_gathers, start_sums_of_shares
from axonn_tp.comm.collectives import Collective, all_gather, reduce_scatter, start_sum_of_shares
from axonn_tp.comm.gloo_reduce_scatter import less_between_nodes
from axonn_tp.comm.sums_of_shares import _WHOLE_AT_ONCE
from tests.axonn_tp.test_grids import gpt_plan
from tests.distributed import run_ranks

SIZES = (1, 3, 8, 1001)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def drawn(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)


def wanted(mesh: Mesh, size: int, dtype: torch.dtype) -> Tensor:
    """This rank's share of the sum in float64, rounded once, of what the ranks of its z group have."""
    members = dist.get_process_group_ranks(mesh.group("z"))
    total = torch.stack([drawn(member, size, dtype).double() for member in members]).sum(0)
    share = -(-size // len(members))
    padded = torch.nn.functional.pad(total, (0, share * len(members) - size))
    return padded.chunk(len(members))[mesh.rank("z")].to(dtype)


def sums() -> list[tuple[str, float, bool]]:
    mesh, found = Mesh(Grid(2, 1, 4)), []
    for dtype in DTYPES:
        for size in SIZES:
            own, exact = drawn(dist.get_rank(), size, dtype), wanted(mesh, size, dtype).double()
            with Ledger(mesh.axis_names()) as ledger:
                share = start_sum_of_shares(own, mesh, "z").wait()
            apart = float((share.double() - exact).abs().max()) / max(1.0, float(exact.abs().max()))
            counted = ledger.collectives == [Collective("reduce_scatter", "z", 4, -(-size // 4) * 4)]
            found.append((f"{dtype} {size}", apart / torch.finfo(dtype).eps, counted and share.dtype == dtype))
    return found


def test_shares_are_exact_to_one_rounding_and_counted_as_what_they_are() -> None:
    for found in run_ranks(sums, 8, backend="gloo"):
        for name, roundings, counted in found:
            assert roundings <= 1 and counted, (name, roundings)


def bundled() -> list[tuple[str, bool, list[Collective]]]:
    """True if several tensors in a call give what each gives alone, bit for bit; and the calls."""
    mesh, found = Mesh(Grid(1, 1, 4)), []
    for dtype in DTYPES:
        tensors = [drawn(dist.get_rank(), size, dtype) for size in (4, 24, 1000)]
        tensors = [*tensors[:1], tensors[1].view(8, 3), *tensors[2:]]
        with Ledger(mesh.axis_names()) as ledger:
            gathers, sums = start_all_gathers(tensors, mesh, "z"), start_sums_of_shares(tensors, mesh, "z")
            both = [[bundle.take(number) for number in range(3)] for bundle in (gathers, sums)]
        alone = [
            [all_gather(one, mesh, "z") for one in tensors],
            [start_sum_of_shares(one, mesh, "z").wait() for one in tensors],
        ]
        same = all(
            torch.equal(a, b)
            for mine, theirs in zip(both, alone, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )
        found.append((str(dtype), same, ledger.collectives))
    return found


def test_tensors_that_share_a_call_get_what_each_gets_alone() -> None:
    for found in run_ranks(bundled, 4, backend="gloo"):
        for name, same, calls in found:
            assert same, name
            assert calls == [Collective("all_gather", "z", 4, 1028), Collective("reduce_scatter", "z", 4, 1028)], name


def test_calls_are_filled_in_order_and_what_is_larger_goes_alone() -> None:
    calls: list[list[int]] = []
    for size in (10, 30, 60, 1, 200, 5, 99, 100):
        if not calls or not fits(sum(calls[-1]), size, 100):
            calls.append([])
        calls[-1].append(size)
    assert calls == [[10, 30, 60], [1], [200], [5], [99], [100]]
    assert not fits(1, 1, 0) and fits(0, 1, 0)


def test_shares_are_exchanged_where_that_sends_less_between_nodes() -> None:
    assert all(less_between_nodes(ranks, ranks) and less_between_nodes(1, ranks) for ranks in (2, 3, 8, 64))
    assert less_between_nodes(2, 8) and not less_between_nodes(4, 8)
    assert not less_between_nodes(8, 16) and not less_between_nodes(4, 32)


def gradients(layers: int) -> float:
    """Largest difference of gradients with reduce-scatters that wait for backward's end from those with none that waits."""
    import axonn_tp
    from axonn_recipes.models.gpt import GPT, GPTConfig

    mesh, found = Mesh(Grid(1, 1, 2)), []
    chosen = [axonn_tp.Options(bucket_bytes=most) for most in (0, 2**13, 2**18)]
    for options in (*chosen, axonn_tp.Options(overlap_reduce_scatter=False)):
        torch.manual_seed(1)
        config = GPTConfig(vocabulary=32, context=8, layers=layers, heads=4, hidden=16)
        model = axonn_tp.parallelize(GPT(config).double(), mesh, gpt_plan(config.heads), options)
        ids = torch.randint(32, (2, 2, 8), generator=torch.Generator().manual_seed(dist.get_rank()))
        model(ids[0], ids[1]).backward()
        # Two forward passes, one backward: a weight has two gradients under way.
        (model(ids[0], ids[1]) + 2 * model(ids[1], ids[0])).backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
    *others, alone = found
    return max(float((a - b).abs().max()) for other in others for a, b in zip(other, alone, strict=True))


def test_more_reduce_scatters_than_may_be_under_way() -> None:
    layers = _WHOLE_AT_ONCE  # of four weights each
    assert max(run_ranks(gradients, 2, layers, backend="gloo")) == 0


BYTES = 4 << 20


def between_nodes(cluster: Cluster) -> list[int]:
    """Bytes that this node sends for our sum and for torch's, which must be what we know of it."""
    dist.init_process_group("gloo")
    mesh, sent = Mesh(Grid(1, 1, 2)), []
    tensor = torch.ones(BYTES // 4)
    for scatter in (lambda: start_sum_of_shares(tensor, mesh, "z").wait(), lambda: reduce_scatter(tensor, mesh, "z")):
        scatter()
        dist.barrier()
        before = cluster.bytes()[dist.get_rank()].sent
        scatter()
        dist.barrier()
        sent.append(cluster.bytes()[dist.get_rank()].sent - before)
    dist.destroy_process_group()
    return sent


@pytest.mark.skipif(lacking() is not None, reason=str(lacking()))
def test_a_node_sends_each_share_once() -> None:
    with Cluster(2) as cluster:
        for ours, gloos in cluster.launch(between_nodes, 1, cluster):
            assert BYTES / 2 < ours < 1.1 * BYTES / 2
            assert gloos > BYTES
