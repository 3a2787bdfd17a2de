"""Ranks that share a sample's positions: what keys and values cost on their way, which plans do so, and what starts them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from axonn_plugins.planner import axonn, context, fourd, machine, model
from axonn_plugins.planner.answer import AnyStrategy, Question, answer
from axonn_plugins.planner.compute import layer_times
from axonn_plugins.planner.context import Shares
from axonn_plugins.planner.runnable import Runnable, runnable
from axonn_plugins.planner.search import Constraints, GridPlan
from axonn_plugins.planner.setting import Setting
from axonn_tp.context.chunks import Chunks, Heads, Sight, cheaper

H100 = machine.calibrated(machine.load("h100"), "calibrated")


def llama(sequence: int) -> model.Transformer:
    found = model.load("llama3-8b", sequence=sequence)
    assert isinstance(found, model.Transformer)
    return found


def test_gathering_and_a_ring_by_hand() -> None:
    """Four ranks with 3 MB each at 1 GB/s; a quarter of attention is beside each of three messages."""
    assert H100.calibration is not None
    half = replace(H100, calibration=replace(H100.calibration, hidden=0.5))
    of = Shares(ranks=4, own=3e6, rate=1e9, hop=1e-5, forward=4e-3, backward=80e-3, outputs=0.0)
    assert context.seconds(half, of, "gather") == pytest.approx((3 * 3.01e-3, 6 * 3.01e-3))
    merge = 3 * 4e-6
    # Of a message's 3.01 ms at most 1 ms is hidden by attention; of backward's 6.02 ms half, though attention takes 20.
    assert context.seconds(half, of, "ring") == pytest.approx((3 * 2.01e-3 + merge, 3 * 3.01e-3))


def test_the_cheaper_way_is_taken_of_each_candidate() -> None:
    of = Shares(np.array([8, 8]), 1e6, 1e9, 1e-5, np.array([0.0, 1.0]), np.array([0.0, 2.0]), 1e6)
    forward, backward = context.cheaper(H100, of)
    both = [context.seconds(H100, of, "gather"), context.seconds(H100, of, "ring")]
    gathered, passed = (forth + np.array([1.0, 1.0]) * back for forth, back in both)
    assert gathered[0] < passed[0] and passed[1] < gathered[1]
    assert forward + backward == pytest.approx([gathered[0], passed[1]])
    assert not np.any(np.stack(context.cheaper(H100, replace(of, ranks=np.array([1, 1])))))


def test_heads_by_hand() -> None:
    """Of 6 MB each of four ranks gives away three quarters, in two messages to each, and gradients as much."""
    of = Shares(ranks=4, own=3e6, rate=1e9, hop=1e-5, forward=4e-3, backward=80e-3, outputs=0.0, dealt=6e6)
    assert context.seconds(H100, of, "heads") == pytest.approx((4.56e-3, 4.56e-3))
    assert context.cheaper(H100, of) == pytest.approx((4.56e-3, 4.56e-3))


def test_heads_are_dealt_out_where_they_divide() -> None:
    """Of 32 heads, 8 of keys and values: on 4 ranks of x and y those of a rank are 8 and 2, and 2 are repeated for 8."""
    of = llama(8192).blocks[0].attention
    assert of is not None
    at = axonn.Grids(*(np.array([size] * 4) for size in (4, 1, 16, 1)), shared=np.array([2, 4, 8, 16]))
    made = context._dealt_bytes(of, at, np.full(4, 0.5))
    assert made == pytest.approx([8192 * (8 + keys) * 256 for keys in (2, 4, 8)] + [np.inf])
    deepseek = model.load("deepseek-v3", sequence=4096).blocks[0].attention
    assert deepseek is not None and np.isinf(context._dealt_bytes(deepseek, at, np.full(4, 0.5))).all()


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_what_sends_least_is_what_a_run_takes(ranks: int) -> None:
    """By the planner's bytes of a rank and by attention's own count."""
    for heads, keys, width, x in ((32, 8, 128, 1), (32, 8, 128, 2), (16, 16, 64, 1), (48, 1, 80, 1), (24, 3, 8, 3)):
        gpt = model.Transformer("odd", 2, heads * width, heads, 6144, kv_heads=keys)
        of = gpt.blocks[0].attention
        assert of is not None
        at = axonn.Grids(*(np.array([size]) for size in (x, 1, ranks, 1)), shared=np.array([ranks]))
        of_rank = Heads(1, heads // x, max(keys // x, 1), width, width)
        expected = cheaper(Chunks(6144, ranks), Sight(), of_rank)
        shares = context._shares(H100, of, at, np.full(1, 1 / ranks))
        assert ranks == 1 or context.WAYS[int(context.least_sent(shares)[0])] == expected


def test_room_by_hand() -> None:
    """Of 8 ranks' keys and values all others', a neighbour's and the next one's, or what is dealt out; each with its gradients."""
    of = llama(8192).blocks[0].attention
    assert of is not None
    at = axonn.Grids(*(np.array([size] * 3) for size in (1, 1, 8, 1)), shared=np.array([1, 2, 8]))
    samples = 1 / at.gz
    own = 2 * 1024 * 8 * 256
    by_way = [context.room(H100, of, at, samples, Setting(sharing=way)) for way in context.WAYS]
    assert by_way[0].tolist() == [0, 2 * own, 14 * own] and by_way[1].tolist() == [0, 2 * own, 4 * own]
    assert by_way[2].tolist() == [0, 2 * 1024 * (32 + 8) * 256, 2 * 1024 * (32 + 8) * 256]
    assert context.room(None, of, at, samples, Setting()).tolist() == by_way[0].tolist()
    ways = [context.way_of(H100, of, at.take(np.array([i])), samples[[i]]) for i in range(3)]
    fastest = [by_way[context.WAYS.index(way)][i] for i, way in enumerate(ways)]
    assert context.room(H100, of, at, samples, Setting()).tolist() == fastest


def test_a_core_that_moves_bytes_hides_none() -> None:
    cpu = machine.calibrated(machine.load("cpu"), "calibrated")
    of = Shares(4, 1e6, 1e9, 1e-5, 1.0, 1.0, 1e6)
    gathered, passed = (context.seconds(cpu, of, way) for way in ("gather", "ring"))
    assert sum(gathered) < sum(passed)


def test_grouped_heads_and_a_latent_travel() -> None:
    at, samples = axonn.Grids(*(np.array([size]) for size in (2, 1, 4, 1))), np.array([0.25])
    of = llama(8192).blocks[0].attention
    assert of is not None
    assert context.own_bytes(of, at, samples) == 2 * 2048 * 4 * (128 + 128)
    deepseek = model.load("deepseek-v3", sequence=4096)
    latent = deepseek.blocks[0].attention
    assert latent is not None
    assert context.own_bytes(latent, at, samples) == 2 * 1024 * (512 + 64) / 2


def test_a_shared_sample_is_an_eighth_of_the_work_each() -> None:
    """Products and causal attention of one sample on eight ranks are an eighth of those on one."""
    block = llama(131072).blocks[0]
    one = axonn.Grids(*(np.array([1]) for _ in range(4)))
    eight = replace(one, gz=np.array([8]), shared=np.array([8]))
    alone, shared = (layer_times(H100, block, at, 1 / at.gz) for at in (one, eight))
    for whole, part in ((alone.forward, shared.forward), (alone.backward, shared.backward)):
        assert part[0] == pytest.approx(whole[0] / 8, rel=1e-3)


def test_samples_are_shared_where_they_do_not_suffice_or_nothing_fits() -> None:
    def ask(batch: int, positions: int, **fixed: int) -> list[GridPlan]:
        on, asked, setting = machine.load("h100"), Constraints(fixed), Setting(recompute=True)
        found = fourd.search(on, llama(positions), 64, batch, "calibrated", 50, asked, setting)
        return [plan for plan in found.best if isinstance(plan, GridPlan)]

    few = ask(4, 131072)
    assert any(plan.sequence > 1 for plan in few)
    for plan in few:
        readers = plan.gz // plan.sequence * plan.gdata
        assert plan.gz % plan.sequence == 0 and 4 % (readers * plan.microbatches) == 0
        assert plan.sequence == 1 or plan.gz * plan.gdata > 4
    for plans, sizes in ((ask(64, 8192), {1}), (ask(64, 8192, sequence=4), {4})):
        assert {plan.sequence for plan in plans} == sizes
    long = ask(64, 2**20, gx=1, gy=1, stages=1)
    assert long and all(plan.sequence > 1 for plan in long)
    assert not ask(2, 8190, gx=1, gy=1, gz=64)  # whose positions are no 2·32 chunks


def started(strategy: AnyStrategy, on: str = "h100", **fixed: int) -> Runnable:
    where = replace(machine.load(on), memory=1e15)
    asked = Question(where, llama(131072), 64, 8, (strategy,), fixed=fixed, setting=Setting(recompute=True))
    best = answer(asked, 1).best[0]
    return runnable(asked, best)


def test_a_block_says_who_shares() -> None:
    made = started("axonn", gx=1, gy=1, gz=32, gdata=2)
    assert made.ds_config is not None
    assert made.ds_config["axonn"]["tensor_parallel"]["gz"] == {"batch": 4, "sequence": 8}
    assert made.ds_config["train_batch_size"] == 8
    words = {"gather": "all_gather", "ring": "p2p", "heads": "a2a"}
    way = words[made.ds_config["axonn"]["tensor_parallel"]["attention"]]
    assert f"--context-parallel-size 8 --cp-comm-type {way}" in str(made.megatron)


def test_2d_is_megatrons_context_parallelism() -> None:
    made = started("2d", n1=2, n2=8, np=1, nd=4)
    assert made.ds_config is None and "ranks of z share samples" in " ".join(made.notes)
    assert "--tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 8" in str(made.megatron)
    made = started("2d", "cpu", n1=2, n2=8, np=1, nd=4)
    assert made.megatron is None and "transformer-engine only" in " ".join(made.notes)
