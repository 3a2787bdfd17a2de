"""A grid for a model at hand, by what it sends on each."""

from dataclasses import replace

import pytest

from plugins.block import ConfigError
from plugins.planner import axonn, machine, model
from plugins.planner.choose import Candidate, Choice, choose, sentence

PERLMUTTER = replace(machine.load("perlmutter"), bandwidth_efficiency=1.0, fast_latency=0.0, slow_latency=0.0)
GPT_20B = model.load("gpt-20b")


def candidates(gpus: int, batch: int) -> list[Candidate]:
    """Equations 5.1 to 5.5, in bytes: seconds where every axis has a byte a second."""
    at = axonn.grids(GPT_20B, gpus, batch)
    one = axonn.Bandwidths(*(axis * 0 + 1.0 for axis in at.axes))
    made = []
    parts = [
        (linear, axonn.layer_communication(linear, batch * 2048 / at.gdata, at, one, axonn.Repeats()))
        for linear in axonn.linears(GPT_20B)
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
    choices = choose(replace(PERLMUTTER, memory=36e9), candidates(32, 32))
    assert [(one.gx, one.gy, one.gz, one.gdata) for one in choices[:3]] == [(1, 1, 32, 1), (2, 1, 16, 1), (4, 1, 8, 1)]
    assert round(choices[0].seconds, 3) == 0.765
    later = choose(replace(PERLMUTTER, memory=36e9, slow_latency=1e-3), candidates(32, 32))
    assert later[0].seconds == pytest.approx(choices[0].seconds + 10e-3)


def test_the_sentence():
    text = sentence(choose(PERLMUTTER, candidates(32, 32)))
    assert text.startswith("gx=") and "; next gx=" in text and text.endswith("grids fit")
    assert sentence([Choice(1, 1, 2, 1, 0.001, 1e9)]).endswith("the only grid that divides and fits")


def test_nothing_fits():
    with pytest.raises(ConfigError, match="no grid of 8 ranks fits: state alone takes"):
        choose(replace(PERLMUTTER, memory=1e9), candidates(8, 8))
