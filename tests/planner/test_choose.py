"""A grid for the layers at hand."""

from dataclasses import replace

import numpy as np
import pytest

from plugins.block import ConfigError
from plugins.planner import axonn, machine, model
from plugins.planner.axonn import Linear
from plugins.planner.choose import Choice, Layer, choose, sentence

PERLMUTTER = machine.load("perlmutter")
GPT_20B = model.load("gpt-20b")
LAYERS = [Layer(linear, 2048, 56) for _ in range(32) for linear in axonn.linears(GPT_20B)]


def test_the_layers_of_a_transformer_rank_as_the_transformer():
    on = replace(PERLMUTTER, memory=36e9, bandwidth_efficiency=1.0)
    choices = choose(on, LAYERS, 32, 32)
    assert [(one.gx, one.gy, one.gz, one.gdata) for one in choices[:3]] == [(1, 1, 32, 1), (2, 1, 16, 1), (4, 1, 8, 1)]
    assert round(choices[0].seconds, 3) == 0.765
    at = axonn.Grids(*(np.array([size]) for size in (4, 1, 8, 1)))
    whole = axonn.communication(on, GPT_20B, at, 32 * 2048)
    assert choices[2].seconds == pytest.approx(whole.total[0], rel=1e-12)


def test_given_sizes_and_the_sentence():
    choices = choose(PERLMUTTER, LAYERS, 32, 32, {"gx": 4})
    assert all(one.gx == 4 for one in choices)
    text = sentence(choices)
    assert text.startswith("planner: gx=4 gy=") and "; next gx=4" in text
    assert sentence([Choice(1, 1, 2, 1, 0.001, 1e9)]).endswith("the only grid that divides and fits")


def test_convolutions_of_different_levels():
    layers = [
        Layer(Linear("down", 9 * 64, 128, False), 1024),
        Layer(Linear("middle", 9 * 128, 128, True), 256),
        Layer(Linear("up", 9 * 128, 64, False), 1024),
    ]
    choices = choose(PERLMUTTER, layers, 8, 16)
    assert {one.gx * one.gy * one.gz * one.gdata for one in choices} == {8}
    assert [one.seconds for one in choices] == sorted(one.seconds for one in choices)


def test_nothing_divides_or_fits():
    odd = [Layer(Linear("odd", 7, 11, False), 16)]
    with pytest.raises(ConfigError, match="4 ranks make no grid that divides"):
        choose(PERLMUTTER, odd, 4, 3)
    with pytest.raises(ConfigError, match="with gx = 2 that divides"):
        choose(PERLMUTTER, odd, 4, 4, {"gx": 2})
    with pytest.raises(ConfigError, match="state alone takes"):
        choose(replace(PERLMUTTER, memory=1e9), LAYERS, 8, 8)
