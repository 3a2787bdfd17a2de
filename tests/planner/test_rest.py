"""Parts of a step that 004 leaves out: the output layer, the optimizer, residual sums, attention that is not fused."""

from dataclasses import replace

import numpy as np
import pytest

from axonn_plugins import cli
from axonn_plugins.planner import machine, model
from axonn_plugins.planner.rest import optimizer_seconds, plain_attention
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.space import shapes
from axonn_plugins.planner.step import times
from axonn_plugins.planner.transformer import local, operations

A100 = replace(machine.load("a100-nvs8"), flop_latency=0.0)
GPT3 = model.load("gpt3-13b")
WHOLE, PLAIN = Setting(whole=True), Setting(fused=False)


def at(**sizes):
    found = shapes(GPT3, "1d", 16, 64)
    return found.take(np.flatnonzero(np.all([getattr(found, name) == size for name, size in sizes.items()], axis=0)))


def test_flops_of_plain_attention_are_those_of_fused_but_for_the_scores():
    size = local(GPT3, "1d", "roofline", 4.0, 1.0, 2.0, 1.0)
    fused = next(one for one in operations(GPT3, "1d", "roofline", size, 0.0) if one.name == "attention")
    again, kept = ([one.work for one in plain_attention(fused, GPT3, size, way)] for way in (True, False))
    matrices = [sum(one.flops for one in (four[0], four[3])) for four in (again, kept)]
    assert matrices == [fused.work.flops] * 2
    assert again[0].backward_flops + again[3].backward_flops == fused.work.backward_flops
    scores = 2 * GPT3.heads / 4 * GPT3.sequence**2
    assert kept[1].moved == 4 * scores and again[1].backward_moved == 10 * scores
    assert [one.stored for one in again] == [fused.work.stored, 0, 0, 0]


def test_the_optimizer_steps_its_share():
    none = replace(GPT3, vocabulary=0)
    one = at(n1=2, np=2, nd=4, bm=1)
    plain, whole = (times(A100, none, "1d", "roofline", one, 64, way) for way in (Setting(), WHOLE))
    layers = 64 / 4 * none.layers / 2  # a microbatch's, of a stage
    elements = none.sequence / 2 * none.hidden
    sums = 2 * layers * 2 * 6 * elements / A100.memory_bandwidth
    share = none.layers * (12 * none.hidden**2) / 2 / 2 / 4
    added = (whole.compute + whole.memory) - (plain.compute + plain.memory)
    assert added[0] == pytest.approx(sums + optimizer_seconds(A100, share), rel=1e-2)


def test_the_output_layer_delays_each_microbatch():
    one = at(n1=4, np=4, nd=1, bm=2)
    without = times(A100, replace(GPT3, vocabulary=0), "1d", "roofline", one, 64, WHOLE)
    with_it = times(A100, GPT3, "1d", "roofline", one, 64, WHOLE)
    flops = 6 * 64 * GPT3.sequence * GPT3.hidden * GPT3.vocabulary / 4
    assert (with_it.compute - without.compute)[0] == pytest.approx(flops / (0.8 * A100.tensor), rel=2e-2)
    assert (with_it.bubble == without.bubble).all()


@pytest.mark.parametrize("strategy", ["1d", "2d", "summa"])
def test_more_work_takes_longer(strategy):
    found = shapes(GPT3, strategy, 16, 64)
    plain, whole, scores = (
        times(A100, GPT3, strategy, "roofline", found, 64, way).total for way in (Setting(), WHOLE, PLAIN)
    )
    assert (whole > plain).all() and (scores > plain).all()


def test_the_command(capsys):
    asked = (
        "plan --model gpt3-175b --machine a100-nvs8 --gpus 64 --batch 64 --whole --attention plain --recompute --top 2"
    )
    assert cli.main(asked.split()) == 0
    out = capsys.readouterr().out
    assert "best: " in out and "axonn g" not in out
