"""Model A: the published optima, the scalar reference, invariants of the search."""

import random

import numpy as np
import pytest

from axonn_plugins.planner import machine, model, reference
from axonn_plugins.planner.collectives import Kind, point_to_point, seconds
from axonn_plugins.planner.search import Plan, search
from axonn_plugins.planner.space import factorizations, placed, shapes
from axonn_plugins.planner.step import Candidates, memory, times
from axonn_plugins.planner.transformer import STRATEGIES, local, operations

GPT3_175B, GPT3_1T, VIT = (model.load(name) for name in ("gpt3-175b", "gpt3-1t", "vit-era5"))


def paper(machine_name, trained, strategy, gpus, batch=4096, **more):
    return search(machine.load(machine_name), trained, strategy, gpus, batch, "paper", **more)


def test_gpt3_175b_on_512_a100():
    best, second = paper("a100-nvs4", GPT3_175B, "1d", 512, batch=1024, top=400).best[:2]
    assert (best.n1, best.np, best.nd, best.bm, best.v1, best.vp, best.vd) == (4, 16, 8, 1, 4, 1, 1)
    assert round(best.seconds, 3) == 22.469
    assert round(best.bytes / 1e9, 2) == 46.38
    shares = {part: round(seconds / best.seconds, 3) for part, seconds in best.parts.items()}
    assert shares == {
        "compute": 0.807,
        "tensor": 0.051,
        "data": 0.019,
        "pipeline": 0.008,
        "bubble": 0.103,
        "memory": 0.012,
    }
    assert (second.n1, second.np, second.nd, second.bm) == (4, 32, 4, 1)
    assert round(second.seconds, 3) == 22.519


@pytest.mark.parametrize(
    ("gpus", "shape", "seconds"),
    [
        (512, (16, 32, 1, 4096, 1), 614.2018866732147),
        (1024, (8, 64, 2, 2048, 1), 260.4279665160468),
        (4096, (8, 32, 16, 256, 1), 70.99605471418536),
    ],
)
def test_gpt3_1t_on_a100(gpus, shape, seconds):
    best = paper("a100-nvs4", GPT3_1T, "1d", gpus).best[0]
    assert (best.n1, best.np, best.nd, best.microbatches, best.bm) == shape
    assert best.seconds == pytest.approx(seconds, rel=1e-12)
    if gpus == 512:
        assert best.bytes / 1e9 == pytest.approx(73.42104576, rel=1e-12)


def test_placements_of_question_2():
    best = paper("b200-nvs8", GPT3_1T, "1d", 2048).best[0]
    assert (best.v1, best.vp, best.vd) == (4, 2, 1)
    best = paper("b200-nvs8", GPT3_1T, "1d", 1024).best[0]
    assert (best.v1, best.vd, best.vp) == (2, 2, 2)


@pytest.mark.parametrize("name", ["a100-nvs4", "h200-nvs64", "b200-nvs8"])
def test_vit_fits_nowhere_in_1d(name):
    for gpus in (4, 64, 1024, 16384):
        found = paper(name, VIT, "1d", gpus)
        assert not found.best
        assert all(plan.bytes > machine.load(name).memory for plan in found.nearest)


def test_vit_in_2d_uses_4_by_4():
    best = paper("b200-nvs8", VIT, "2d", 4096).best[0]
    assert (best.n1, best.n2) == (4, 4)


def candidates(trained, strategy, gpus, batch, domain):
    return placed(shapes(trained, strategy, gpus, batch), gpus, domain)


@pytest.mark.parametrize("mode", ["paper", "roofline"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_fast_path_equals_the_reference(strategy, mode):
    chooser = random.Random(7)
    small = model.Transformer("small", layers=12, hidden=1536, heads=24, sequence=3000, feed_forward=5376)
    for trained, gpus, batch, name in (
        (GPT3_1T, 1024, 512, "b200-nvs8"),
        (VIT, 2048, 128, "a100-nvs64"),
        (small, 48, 96, "summit"),
        (small, 64, 64, "frontier"),
    ):
        on = machine.load(name)
        at = candidates(trained, strategy, gpus, batch, on.domain)
        at = at.take(np.array(sorted(chooser.sample(range(len(at)), min(len(at), 40)))))
        total, held = (
            times(on, trained, strategy, mode, at, batch).total,
            memory(trained, strategy, mode, at, batch).total,
        )
        for i in range(len(at)):
            row = {key: int(values[i]) for key, values in vars(at).items()}
            plan = Plan(strategy=strategy, **row, microbatches=0, seconds=0, parts={}, bytes=0, holds={})
            expected = reference.seconds_and_bytes(on, trained, plan, batch, mode == "paper")
            assert (total[i], held[i]) == pytest.approx(expected, rel=1e-12)


def test_the_default_corrects_the_two_defects():
    on = machine.load("a100-nvs4")
    sent = [point_to_point(on, 1e6, 8, v, is_paper) for v in (1, 2, 4) for is_paper in (False, True)]
    assert sent[0] == sent[1]
    assert sent[2] > sent[3] and sent[4] > sent[5]
    widths = [local(GPT3_1T, "summa", mode, 4.0, 2.0, 1.0, 4.0).norm_width for mode in ("roofline", "paper")]
    assert widths == [25600 / 4, 2048 / 4]
    for gpus in (512, 4096):
        wrong, right = (
            search(on, GPT3_1T, "summa", gpus, 4096, mode).best[0].seconds for mode in ("paper", "roofline")
        )
        assert 0 < right / wrong - 1 < 0.06


def test_collectives_by_hand():
    on = machine.load("a100-nvs4")
    volume, slow, fast = 1e8, 0.7 * 25e9, 0.7 * 300e9
    within = 7 * 2.5e-6 + 7 / 8 * volume / fast
    between = 7 * 5e-6 + 7 / 8 * volume / slow
    mixed = 5e-6 + 6 * 2.5e-6 + 7 / 8 * volume / (4 * slow)
    got = [seconds(on, Kind.GATHER, volume, 8, v) for v in (8, 1, 4)]
    assert got == pytest.approx([within, between, mixed], rel=1e-14)
    assert seconds(on, Kind.BROADCAST, volume, 1, 1) == 0
    assert seconds(on, Kind.REDUCE, volume, 8, 8) == pytest.approx(7 * 2.5e-6 + volume / fast, rel=1e-14)
    assert seconds(on, Kind.ALL_REDUCE, 2 * volume, 8, 8) == seconds(on, Kind.GATHER, 2 * volume, 8, 8)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_candidate_is_one(strategy):
    trained, gpus, batch, domain = GPT3_175B, 256, 96, 8
    at = candidates(trained, strategy, gpus, batch, domain)
    assert (at.n1 * at.n2 * at.np * at.nd == gpus).all()
    assert (at.v1 * at.v2 * at.vp * at.vd == domain).all()
    for group, near in ((at.n1, at.v1), (at.n2, at.v2), (at.np, at.vp), (at.nd, at.vd)):
        assert (group % near == 0).all()
    assert (trained.layers % at.np == 0).all() and (batch % (at.nd * at.bm) == 0).all()
    rows = np.stack(list(vars(at).values()))
    assert np.unique(rows, axis=1).shape == rows.shape
    if strategy == "1d":
        assert (at.n2 == 1).all()


def test_all_gpus_within_a_domain():
    at = candidates(GPT3_175B, "2d", 8, 8, 64)
    assert (at.v1 == at.n1).all() and (at.vd == at.nd).all()


def test_factorizations():
    assert set(factorizations(4, 2)) == {(1, 4), (2, 2), (4, 1)}
    assert len(factorizations(64, 4)) == 84


def test_faster_hardware_is_never_slower():
    slow = machine.load("a100-nvs8")
    from dataclasses import replace

    base = search(slow, GPT3_1T, "2d", 1024, 1024, top=1).best[0].seconds
    for key in ("tensor", "memory_bandwidth", "fast_bandwidth", "slow_bandwidth", "memory"):
        better = replace(slow, **{key: 2 * getattr(slow, key)})
        assert search(better, GPT3_1T, "2d", 1024, 1024, top=1).best[0].seconds <= base * (1 + 1e-12)


def test_stored_activations_in_closed_form():
    n1, n2, microbatch = 8.0, 4.0, 2.0
    e, h, positions = GPT3_1T.hidden, GPT3_1T.heads, 2.0 * GPT3_1T.sequence / 4
    forms = {
        "2d": positions * e * (4 + 36 / n1) + 4 * positions * h / n1,
        "summa": 36 * positions * e / n1 + 4 * positions * (e / n1) + 4 * positions * h / n1,
    }
    for strategy, expected in forms.items():
        size = local(GPT3_1T, strategy, "roofline", n1, n2, microbatch, 8.0)
        layer = operations(GPT3_1T, strategy, "roofline", size, 4.0)
        assert len(layer) == 14
        assert sum(operation.work.stored for operation in layer) == pytest.approx(expected, rel=1e-14)


def test_shared_heads_and_wide_heads():
    shared = model.Transformer("s", layers=32, hidden=4096, heads=32, kv_heads=8)
    one = local(shared, "1d", "roofline", 1.0, 1.0, 1.0, 1.0)
    count = sum(operation.work.backward_flops for operation in operations(shared, "1d", "roofline", one, 4.0))
    plain = model.load("gpt3-6.7b")
    full = sum(operation.work.backward_flops for operation in operations(plain, "1d", "roofline", one, 4.0))
    assert count < full
    at = Candidates(*(np.ones(1, np.int64) for _ in range(10)))
    held = memory(shared, "1d", "roofline", at, 1)
    assert held.weights[0] == 2 * shared.parameters
    wide = model.Transformer("w", layers=32, hidden=4096, heads=32, head_width=256)
    assert memory(wide, "1d", "roofline", at, 1).weights[0] == 2 * wide.parameters
