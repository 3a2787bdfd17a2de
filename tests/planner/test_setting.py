"""Training beyond the paper's: recomputation, interleaved stages, pruned networks, experts."""

from dataclasses import replace

import numpy as np
import pytest

from axonn_plugins import cli
from axonn_plugins.planner import axonn, fourd, machine, model, step
from axonn_plugins.planner.answer import EVERY, Question, answer
from axonn_plugins.planner.search import Constraints, search
from axonn_plugins.planner.setting import OVERLAPS, Setting
from axonn_plugins.planner.space import placed, shapes
from axonn_plugins.planner.step import memory, times
from samo.memory import our_bytes
from ted_moe.memory import Degrees, state_bytes
from ted_moe.memory import Transformer as ted_transformer
from ted_moe.memory import parameters as ted_parameters

A100 = machine.load("a100-nvs8")
GPT3 = model.load("gpt3-13b")


def test_recomputation_costs_a_forward_and_keeps_inputs():
    at = shapes(GPT3, "1d", 16, 64)
    plain, again = (times(A100, GPT3, "1d", "roofline", at, 64, Setting(one)) for one in (False, True))
    assert (again.compute > plain.compute).all() and (again.compute < 1.5 * plain.compute).all()
    assert (again.tensor >= plain.tensor).all()
    full, inputs = (memory(GPT3, "1d", "roofline", at, 64, Setting(one)).activations for one in (False, True))
    assert (inputs < full).all()
    alone = (at.n1 == 1) & (at.np == 1) & (at.bm == 1)
    layer = full[alone][0] / GPT3.layers
    assert inputs[alone][0] == GPT3.layers * 2 * GPT3.sequence * GPT3.hidden + layer


def test_interleaving_divides_the_bubble():
    given = Constraints({"n1": 1, "np": 4, "nd": 2, "bm": 1})
    plans = [search(A100, GPT3, "1d", 8, 32, "roofline", 1, given, Setting(interleave=parts)).best for parts in (1, 2)]
    (one,), (two,) = plans
    assert two.parts["bubble"] == pytest.approx((one.parts["bubble"] + 3 * one.parts["pipeline"] / 16) / 2, rel=1e-12)
    assert two.parts["pipeline"] == 2 * one.parts["pipeline"]
    assert two.holds["activations"] == pytest.approx(one.holds["activations"] * (1 + 3 / 8))
    assert not search(A100, GPT3, "1d", 8, 32, "roofline", 1, given, Setting(interleave=3)).shapes  # 40 layers


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_samos_state_is_samos(sparsity):
    at = shapes(GPT3, "1d", 16, 64)
    pruned, dense = (memory(GPT3, "1d", "roofline", at, 64, one) for one in (Setting(sparsity=sparsity), Setting()))
    count = dense.weights / 2
    state = pruned.weights + pruned.gradients + pruned.optimizer
    expected = [our_bytes(1, sparsity, ranks=int(replicas)) for replicas in at.nd]
    assert state / count == pytest.approx(np.array(expected), rel=1e-12)
    assert (pruned.activations == dense.activations).all()


def test_samo_needs_fewer_stages():
    # The dissertation's argument: with less memory, fewer pipeline stages and more data parallelism.
    def best(setting):
        plans = answer(Question(machine.load("summit"), GPT3, 512, 1024, ("1d",), setting=setting), 1).best
        return plans[0]

    dense, pruned = best(Setting(recompute=True)), best(Setting(recompute=True, sparsity=0.9))
    assert pruned.n1 * pruned.np < dense.n1 * dense.np
    assert pruned.seconds < dense.seconds


def test_settings_of_grids():
    at = fourd.grids(GPT3, 16, 64)
    m = np.ones(len(at))
    setting = Setting(True, 1, 0.9)
    plain, pruned = (fourd.memory(GPT3, at, m, 64, "roofline", one) for one in (Setting(), setting))
    assert (pruned.total < plain.total).all()
    prompt = replace(A100, fast_latency=0.0, slow_latency=0.0)
    (timed, talked), (again, more) = (
        fourd.times(prompt, GPT3, at, m, 64, "roofline", one) for one in (Setting(), setting)
    )
    assert (again.compute > timed.compute).all()
    assert more.data == pytest.approx(0.1 * talked.data, rel=1e-12)
    assert (more.forward == 2 * talked.forward).all()


def test_the_command(capsys):
    base = "plan --model gpt3-13b --machine summit --gpus 384 --batch 1536 --recompute"
    assert cli.main(f"{base} --strategy all --samo 0.9 --interleave 2".split()) == 0
    assert "axonn gx" not in capsys.readouterr().out
    for wrong, message in (
        ("--samo 1.0", '--samo = "1.0" is not a share below 1'),
        ("--samo 90%", '--samo = "90%" is not a share below 1'),
        ("--interleave 0", '--interleave = "0" is not a whole number'),
        ("--interleave 2 --strategy axonn", "--interleave = 2, but stages of 4D grids run 1F1B in one part each"),
        ("--fix gx=2,np=4", "--fix names gx, np, not all sizes of --strategy all"),
        ("--ted 16", '--ted = "16" does not say how many experts'),
        ("--ted experts=16 --strategy axonn", "--ted experts=16 is TED's"),
        ("--fix gx=2 --strategy 1d", "--fix names gx, not all sizes of --strategy 1d"),
    ):
        assert cli.main(f"{base} {wrong}".split()) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
    assert len(EVERY) == 4


@pytest.mark.parametrize("strategy", ["1d", "2d", "summa"])
def test_one_expert_is_the_base_model(strategy):
    at = placed(shapes(GPT3, strategy, 32, 64), 32, 8)
    for one in (Setting(), Setting(recompute=True, sparsity=0.5)):
        same = replace(one, experts=1)
        assert memory(GPT3, strategy, "roofline", at, 64, same).total == pytest.approx(
            memory(GPT3, strategy, "roofline", at, 64, one).total, rel=1e-12
        )
        with_latency, without = (times(A100, GPT3, strategy, "roofline", at, 64, each) for each in (same, one))
        assert with_latency.tensor == pytest.approx(without.tensor, rel=1e-12)
        assert (with_latency.data >= without.data * (1 - 1e-12)).all()


def test_teds_state_is_teds():
    # Equation 7.4 for a GPU's parameters: (4 + 12/G_data) bytes each, of experts with their own degree.
    at = shapes(GPT3, "1d", 64, 64)
    held = memory(GPT3, "1d", "roofline", at, 64, Setting(experts=16))
    stages = at.np == 1
    for i in np.flatnonzero(stages):
        tensor, data = int(at.n1[i]), int(at.nd[i])
        ranks = int(np.gcd(data, 16))
        degrees = Degrees(tensor, ranks, data // ranks)
        base = ted_transformer(GPT3.layers, GPT3.hidden, 0, 0)
        local = ted_parameters(base, 16, degrees)
        # Theirs has a last LayerNorm and gates, ours biases whole on each rank: a part in a thousand.
        state = held.weights[i] + held.gradients[i] + held.optimizer[i]
        assert state == pytest.approx(state_bytes(local, degrees), rel=2e-3)


def test_experts_cost_memory_and_exchanges():
    at = shapes(GPT3, "1d", 64, 64)
    base, many = (times(A100, GPT3, "1d", "roofline", at, 64, Setting(experts=one)) for one in (0, 16))
    alone = at.nd == 1
    assert (many.tensor[~alone] > base.tensor[~alone]).all()
    assert many.tensor[alone] == pytest.approx(base.tensor[alone])
    assert (many.compute == base.compute).all()


GRIDS = axonn.Grids(*(np.array([size]) for size in (2, 2, 4, 2)))


def grid_seconds(**setting):
    """All parts of a grid's step, and the seconds of its collectives, hidden or not."""
    timed, talked = fourd.times(
        machine.load("frontier"), model.load("gpt-5b"), GRIDS, np.ones(1), 64, setting=Setting(**setting)
    )
    return timed, talked


@pytest.mark.parametrize("recompute", [False, True])
def test_overlaps_are_switched_off_one_by_one(recompute):
    timed, talked = grid_seconds(recompute=recompute, overlap=frozenset())
    assert timed.tensor + timed.data == pytest.approx(talked.total, rel=1e-12)
    spent = timed.total
    for number in range(len(OVERLAPS)):
        some = frozenset(("OAR", "ORS", "OAG")[: number + 1])
        less = grid_seconds(recompute=recompute, overlap=some)[0].total
        assert less < spent
        spent = less
    assert spent == grid_seconds(recompute=recompute)[0].total


def test_kept_weights_are_gathered_once_and_take_room():
    kept, again = (grid_seconds(recompute=True, overlap=frozenset(), keep_gathered=one) for one in (True, False))
    assert 2 * kept[1].gather == pytest.approx(again[1].gather, rel=1e-12)
    assert kept[0].tensor + kept[1].gather == pytest.approx(again[0].tensor, rel=1e-12)
    held = [
        fourd.memory(model.load("gpt-5b"), GRIDS, np.ones(1), 64, setting=Setting(recompute=True, keep_gathered=one))
        for one in (True, False)
    ]
    assert held[0].weights > held[1].weights


def test_tables_of_tokens_are_in_the_first_and_last_stage():
    """Of 7 layers on 3 stages by hand: 2, 3 and 2; on 2: 3 and 4."""
    layer, table = 100_000, 1000 * 64
    for untied in (False, True):
        odd = model.Transformer("odd", 7, 64, 4, 128, vocabulary=1000, untied=untied, other=5000)
        several = np.array([1, 2, 3, 7])
        found = step.fullest_stage(odd, several, 7.0 * layer)
        ends = [4 * layer + table, max(2 * layer + table + 5000, 3 * layer), layer + table + 5000]
        assert found.tolist() == [7 * layer + (1 + untied) * table + 5000, *ends]
        at = fourd.Grids(*(np.ones(4, np.int64) for _ in range(4)), stages=several)
        held = fourd.memory(odd, at, np.ones(4), 4, "calibrated")
        each = (odd.parameters - (1 + untied) * table - 5000) / 7
        assert held.weights / 2 == pytest.approx(step.fullest_stage(odd, several, 7 * each), rel=1e-12)
        one = placed(shapes(odd, "1d", 7, 7, uneven=True), 7, 8)
        one = one.take((one.n1 == 1) & (one.nd == 1) & (one.bm == 1))
        calibrated, published = (memory(odd, "1d", mode, one, 7).weights[0] / 2 for mode in ("calibrated", "paper"))
        assert calibrated == pytest.approx(published + table + 5000, rel=1e-12)


def test_ted_without_dropping_and_with_its_stash():
    at = placed(shapes(GPT3, "1d", 32, 32), 32, 8)
    at = at.take((at.n1 == 4) & (at.np == 1) & (at.nd == 8) & (at.bm == 1) & (at.v1 == 4))
    summit = replace(machine.load("summit-nvs8"), slow_latency=0.0, fast_latency=0.0)

    def seconds(**setting):
        return times(summit, GPT3, "1d", "roofline", at, 32, Setting(experts=8, **setting)).tensor

    plain, whole = seconds(), seconds(dropping=False)
    none = times(summit, GPT3, "1d", "roofline", at, 32, Setting()).tensor
    assert whole - none == pytest.approx(4 * (plain - none), rel=1e-9)
    again, stashed, once = seconds(recompute=True), seconds(recompute=True, stashing=True), seconds()
    assert stashed == pytest.approx(once, rel=1e-12)
    assert (again > 1.3 * stashed).all()
    held = [
        memory(GPT3, "1d", "roofline", at, 32, Setting(recompute=True, experts=8, stashing=one)).activations
        for one in (True, False)
    ]
    assert (held[0] > held[1]).all()
