"""A grid for a model at hand, by what it sends on each."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import axonn, calibration, fourd, machine, model
from axonn_plugins.planner.choose import Candidate, Choice, candidate, choose, seconds, seconds_by_axis, sentence
from axonn_plugins.planner.setting import Setting
from axonn_tp import Grid
from axonn_tp.plan.volumes import Volume

PERLMUTTER = replace(machine.load("perlmutter"), bandwidth_efficiency=1.0, fast_latency=0.0, slow_latency=0.0)
GPT_20B = model.load("gpt-20b")


def candidates(gpus: int, batch: int) -> list[Candidate]:
    """Equations 5.1 to 5.5, in bytes: seconds where every axis has a byte a second."""
    at = axonn.grids(GPT_20B, gpus, batch)
    one = axonn.Bandwidths(*(axis * 0 + 1.0 for axis in at.axes))
    made = []
    parts = [
        (linear, axonn.layer_communication(linear, batch / at.gdata, at, one, axonn.Repeats()))
        for linear in GPT_20B.blocks[0].linears
    ]
    state = axonn.state_bytes(GPT_20B, at)
    for i in range(len(at)):
        sent = dict.fromkeys(("x", "y", "z", "data"), 0.0)
        for linear, part in parts:
            forward, backward = ("x", "y") if linear.transposed else ("y", "x")
            sent[forward] += 32 * part.forward[i]
            sent[backward] += 32 * part.backward[i]
            sent["z"] += 32 * (part.gather[i] + part.scatter[i])
            sent["data"] += 32 * part.data[i]
        sizes = tuple(int(axis[i]) for axis in at.axes)
        made.append(Candidate(sizes, sent, {"x": 0, "z": 10}, float(state[i])))
    return made


def test_the_published_ranks():
    as_measured = replace(PERLMUTTER, memory=36e9, device="cpu")
    choices = choose(as_measured, candidates(32, 32))
    assert [(one.gx, one.gy, one.gz, one.gdata) for one in choices[:3]] == [(1, 1, 32, 1), (2, 1, 16, 1), (4, 1, 8, 1)]
    assert round(choices[0].seconds, 3) == 0.765
    later = choose(replace(as_measured, slow_latency=1e-3), candidates(32, 32))
    assert later[0].seconds == pytest.approx(choices[0].seconds + 10e-3)


def test_compute_hides_a_calibrated_share_on_gpus():
    half = replace(calibration.ours(), products=1.0, fast=1.0, slow=1.0, crowding=0.0, hidden=0.5)
    on, every = replace(PERLMUTTER, memory=36e9, calibration=half), candidates(32, 32)
    flops = axonn.model_flops(GPT_20B, 32) / 32
    hiding = [replace(one, flops=flops) for one in every]
    assert [(one.gx, one.gz) for one in choose(on, hiding)[:3]] == [(1, 32), (2, 16), (4, 8)]
    exposed, left = seconds(on, every), seconds(on, hiding)
    by_axis = seconds_by_axis(on, every)
    beside = (by_axis["z"] + (by_axis["x"] + by_axis["y"]) / 2) / 2
    assert exposed == pytest.approx(sum(by_axis.values())) and exposed - left == pytest.approx(
        np.minimum(beside, flops / 280e12)
    )
    # What takes longer than all compute is not hidden beyond that.
    few = seconds(on, [replace(one, flops=1e9) for one in every])
    assert np.all(exposed - few <= 1e9 / 280e12 * 1.0001)
    cpu = replace(on, device="cpu")
    assert seconds(cpu, hiding).tolist() == seconds(cpu, every).tolist()


def test_reduce_scatters_take_as_long_as_they_do():
    slow = replace(PERLMUTTER, reduce_scatter=2.5)
    sent = {"x": 0.0, "y": 0.0, "z": 3e9, "data": 0.0}
    messages = dict.fromkeys(sent, 0)
    one, other = Candidate((1, 1, 8, 1), sent, messages, 0.0), Candidate((1, 1, 8, 1), sent, messages, 0.0, {"z": 1e9})
    assert seconds(PERLMUTTER, [one, other]).tolist() == pytest.approx([seconds(slow, [one])[0]] * 2)
    # Of 8 ranks in nodes of 4, an exchange of shares would send more than an all-reduce; in pairs of nodes, and within one, half.
    assert seconds(slow, [other])[0] == pytest.approx(1.5 * seconds(slow, [one])[0])
    for sizes, times in (((4, 1, 2, 1), 1.0), ((1, 1, 4, 2), 1.0), ((2, 1, 4, 1), 1 + 1 / 9)):
        one, other = (Candidate(sizes, sent, messages, 0.0, gone) for gone in ({}, {"z": 1e9}))
        assert seconds(slow, [other])[0] == pytest.approx(times * seconds(slow, [one])[0])
    activations = Candidate((1, 4, 2, 1), {"y": 3e9}, {}, 0.0, {"y": 1e9})
    as_measured = seconds_by_axis(replace(PERLMUTTER, reduce_scatter=1.0), [activations])["y"]
    assert seconds_by_axis(slow, [activations])["y"] == pytest.approx(1.5 * as_measured)


def test_a_call_takes_time_besides_its_messages_on_a_cpu():
    cpu = replace(PERLMUTTER, device="cpu", call=1e-3)
    one, other = (Candidate((2, 1, 4, 1), {"x": 1e6}, {}, 0.0, calls=calls) for calls in (3, 8))
    assert seconds(cpu, [other])[0] - seconds(cpu, [one])[0] == pytest.approx(5e-3)
    at = axonn.Grids(*(np.array([size]) for size in (2, 1, 1, 4)))
    gpt = model.load("gpt3-xl")
    with_call, without = (fourd.times(replace(cpu, call=call), gpt, at, np.ones(1), 8)[1] for call in (1e-3, 0.0))
    # Over x two calls for each of 4 linears of 24 layers, in one direction alone; over data one for each layer's sum and its gather.
    assert (with_call.forward + with_call.backward - without.forward - without.backward)[0] == pytest.approx(24 * 8e-3)
    assert (with_call.data - without.data)[0] == pytest.approx(24 * 2e-3)
    assert (with_call.gather - without.gather)[0] == 0


def test_cpus_are_taken_as_measured():
    cpu = replace(machine.load("two-cores"), name="mine")
    on = machine.calibrated(cpu, "calibrated")
    of = on.calibration
    assert of is not None and (of.products, of.passes, of.fast, of.slow, of.hidden, of.crowding) == (1, 1, 1, 1, 0, 0)
    assert on.sustained == cpu.tensor and machine.calibrated(cpu, "roofline") == cpu
    assert of.attention * cpu.vector == pytest.approx(cpu.tensor)


def test_float32_takes_twice_as_long_to_send():
    at = axonn.grids(GPT_20B, 32, 32)
    for on in (PERLMUTTER, machine.calibrated(PERLMUTTER, "calibrated")):
        two, four = (
            fourd.times(on, GPT_20B, at, np.ones(len(at)), 32, setting=Setting(float32=float32))[1]
            for float32 in (False, True)
        )
        for part in ("gather", "forward", "backward", "data"):
            assert getattr(four, part) == pytest.approx(2 * getattr(two, part))
        assert four.scatter == pytest.approx((2 if on is PERLMUTTER else 1) * two.scatter)


def test_what_is_counted_of_a_grid_goes_over_its_outermost_axes():
    volume = Volume(Fraction(6), 2, Fraction(4))
    made = candidate(Grid(2, 1, 2, 1), {"x": volume, "batch": volume, "z": Volume(Fraction(1), 1)}, 5.0)
    assert candidate(Grid(2, 1, 1, 1), {"x": Volume(Fraction(6), 2, calls=3)}, 5.0).calls == 3
    assert made.sent == {"x": 6, "z": 7} and made.messages == {"x": 2, "z": 3} and made.scattered == {"x": 4, "z": 4}
    assert candidate(Grid(1, 1, 2, 2), {"batch": volume}, 5.0).sent == {"data": 6}


def test_a_4d_grid_on_a_library_whose_reduce_scatters_are_all_reduces():
    at = axonn.grids(GPT_20B, 32, 32)
    ring, gloo = (
        fourd.times(replace(PERLMUTTER, reduce_scatter=one), GPT_20B, at, np.ones(len(at)), 32)[1] for one in (1.0, 2.0)
    )
    near = np.clip(4 // (at.gx * at.gy), 1, at.gz)
    exchanged = np.maximum(near * (at.gz - near) / np.maximum(at.gz - 1, 1), 1)
    assert exchanged.min() == 1 and exchanged.max() > 2
    assert gloo.scatter == pytest.approx(np.minimum(exchanged, 2) * ring.scatter)
    assert gloo.gather == pytest.approx(ring.gather)
    assert gloo.forward == pytest.approx(1.5 * ring.forward) and gloo.backward == pytest.approx(1.5 * ring.backward)
    assert gloo.data == pytest.approx(ring.data)


def test_the_sentence():
    text = sentence(choose(PERLMUTTER, candidates(32, 32)))
    assert text.startswith("gx=") and "; next gx=" in text and text.endswith("grids fit")
    assert sentence([Choice(1, 1, 2, 1, 0.001, 1e9)]).endswith("the only grid that divides and fits")


def test_nothing_fits():
    with pytest.raises(ConfigError, match="no grid of 8 ranks fits: state alone takes"):
        choose(replace(PERLMUTTER, memory=1e9), candidates(8, 8))
