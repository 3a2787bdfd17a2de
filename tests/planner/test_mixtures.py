"""Gated MLPs, latent attention and experts as work, parameters and collectives of a GPU; samples of a million positions."""

from dataclasses import replace

import numpy as np
import pytest

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import axonn, experts, fourd, machine, model, work
from axonn_plugins.planner.answer import EVERY, Question, answer
from axonn_plugins.planner.axonn import Grids, model_flops
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.space import placed, shapes
from axonn_plugins.planner.step import Candidates, memory, times
from axonn_plugins.planner.transformer import STRATEGIES, local, operations, parameters

H100 = machine.load("h100")
LLAMA, MIXTRAL, QWEN, DEEPSEEK = (
    model.load(name) for name in ("llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3")
)
ALONE = local(LLAMA, "1d", "roofline", 1.0, 1.0, 1.0, 1.0)


def candidate(**sizes):
    return Candidates(**{key: np.array([sizes.get(key, 1)]) for key in vars(shapes(LLAMA, "1d", 1, 1))})


def one(*sizes):
    return Grids(*(np.array([size]) for size in sizes))


@pytest.mark.parametrize(
    "name", ["llama3-8b", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3", "glm-4.5", "qwen2-57b-a14b"]
)
def test_products_are_those_of_the_active_parameters(name):
    """Two operations for each parameter of a layer that a position meets, and attention, on one GPU and as blocks."""
    trained = model.load(name, sequence=1)
    size = local(trained, "1d", "roofline", 1.0, 1.0, 1024.0, 1.0)
    tables = (1 + trained.untied) * trained.vocabulary * trained.hidden
    expected = 2 * 1024 * (trained.active_parameters - tables - trained.other)
    kinds = experts.layers(trained, "1d", "roofline", size, 0.0, np.array([1]))
    done = sum(part * op.work.flops for part, several in kinds for op in several if op.unit == "tensor")
    assert trained.layers * done.item() == pytest.approx(expected, rel=2e-3)
    blocks = sum(block.count * block.products for block in trained.blocks)
    assert 2 * 1024 * blocks == pytest.approx(expected, rel=4e-3)  # routers are left out
    assert model_flops(trained, 1, False) == pytest.approx(6 * (blocks + trained.vocabulary * trained.hidden))


@pytest.mark.parametrize("trained", [LLAMA, MIXTRAL, QWEN, DEEPSEEK, model.load("llama4-maverick")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_parameters_are_somewhere(trained, strategy):
    tables = (1 + trained.untied) * trained.vocabulary * trained.hidden + trained.other
    held = memory(trained, strategy, "roofline", candidate(), 1)
    assert held.weights[0] == pytest.approx(2 * (trained.parameters - tables), rel=1e-4)
    # Experts are shared out among data-parallel ranks, and their state lies once.
    spread = memory(trained, strategy, "roofline", candidate(nd=4), 4)
    alone = trained.parameters - tables - trained.expert_parameters
    assert spread.weights[0] == pytest.approx(2 * (alone + trained.expert_parameters / 4), rel=1e-4)
    assert 4 * spread.optimizer[0] == pytest.approx(held.optimizer[0], rel=1e-12)


def test_a_gated_mlp_has_three_matrices_and_no_biases():
    names = [one.name for one in operations(LLAMA, "1d", "roofline", ALONE, 7.0)]
    assert names == ["fc1", "gate", "fc2", "layer norm", "qkv", "attention", "proj", "layer norm"]
    by_name = {one.name: one.work for one in operations(LLAMA, "1d", "roofline", ALONE, 7.0)}
    rows = LLAMA.sequence
    assert by_name["fc1"].flops == rows * 2 * 14336 * (2 * 4096 - 1)
    assert by_name["gate"].moved == 2 * 3 * rows * 14336 and by_name["gate"].stored == 2 * 2 * rows * 14336
    count = parameters(LLAMA, "1d", ALONE)
    assert count == 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336 + 2 * 4096


def test_experts_on_more_ranks_do_the_same_with_fewer_weights():
    size = local(QWEN, "1d", "roofline", 1.0, 1.0, 4.0, 1.0)
    [(part, few)] = experts.layers(QWEN, "1d", "roofline", size, 7.0, np.array([2, 64, 3]))
    assert part == 1.0
    first = next(one for one in few if one.name == "expert fc1").work
    assert first.flops == pytest.approx(first.flops[0], rel=1e-14)
    rows, weights = 4 * QWEN.sequence * 8, 2048 * 2 * 768
    moved = [2 * (rows * 2048 + rows * 2 * 768 + count * weights) for count in (64, 2, 128)]
    assert first.moved == pytest.approx(moved, rel=1e-14)


def test_all_to_alls_carry_each_token_once_for_each_expert():
    at = candidate(nd=8, vd=8)
    size = local(QWEN, "1d", "roofline", *(np.ones(1) for _ in range(4)))
    lies = experts.share(QWEN, "1d", size, (at.nd, at.vd), (at.nd, at.vd), 0)
    volume = 2 * 8 * QWEN.sequence * QWEN.hidden
    took = experts.exchange_seconds(H100, QWEN, "1d", size, lies)
    rate = H100.fast_bandwidth * H100.bandwidth_efficiency
    assert took[0] == pytest.approx(2 * (7 * H100.fast_latency + 7 / 8 * volume / rate), rel=1e-12)
    assert times(H100, QWEN, "1d", "roofline", at, 8).tensor[0] > QWEN.layers * 2 * took[0] * (1 - 1e-12)


def test_a_latent_is_made_on_every_rank_and_gathered():
    size = local(DEEPSEEK, "1d", "roofline", 8.0, 1.0, 1.0, 1.0)
    by_name = {one.name: one for one in operations(DEEPSEEK, "1d", "roofline", size, 7.0)}
    rows, latent = DEEPSEEK.sequence, 1536 + 512 + 64
    assert by_name["latent"].work.flops == rows / 8 * latent * (2 * 7168 - 1)
    assert [one.volume for one in by_name["latent"].forward] == [2 * rows * latent]
    assert by_name["q"].work.flops == rows * 128 * 192 / 8 * (2 * 1536 - 1)
    assert by_name["kv"].work.flops == rows * 128 * 256 / 8 * (2 * 512 - 1)
    assert by_name["proj"].work.flops == rows * 7168 * (2 * 128 * 128 / 8 - 1)


def test_causal_attention_is_half():
    whole, half = (work.attention(8.0, 2.0, 64.0, 64, 128, 5.0, 96, causal) for causal in (False, True))
    assert (half.flops, half.backward_flops) == (whole.flops / 2, whole.backward_flops / 2)
    assert (half.moved, half.backward_moved, half.stored) == (whole.moved, whole.backward_moved, whole.stored)
    square = work.attention(8.0, 2.0, 64.0, 64, 128, 5.0)
    assert square == work.attention(8.0, 2.0, 64.0, 64, 128, 5.0, 128)
    assert whole.flops < square.flops


def test_experts_on_grids():
    at, routed = one(1, 1, 2, 8), QWEN.expert_parameters
    held = fourd.memory(QWEN, at, np.ones(1), 16)
    count = (QWEN.parameters - routed + routed / 8) / 2
    assert held.gradients[0] == pytest.approx(2 * count, rel=1e-12)
    assert held.optimizer[0] == pytest.approx(12 * QWEN.parameters / 16, rel=1e-12)
    assert held.weights[0] == pytest.approx(2 * count + 4 * 128 * 2 * 768 * 2048 / 8, rel=1e-12)
    linear = next(each for each in QWEN.blocks[0].linears if each.name == "expert fc1")
    beta = axonn.bandwidths(H100, at)
    plain = axonn.layer_communication(replace(linear, copies=1), 2, at, beta, axonn.Repeats())
    found = axonn.layer_communication(linear, 2, at, beta, axonn.Repeats())
    exchange = 7 / 8 * 2 * 2 * 8 * QWEN.sequence * 2048 / 2 / beta.data[0]
    assert found.forward[0] - plain.forward[0] == pytest.approx(exchange, rel=1e-12)
    assert found.gather[0] == pytest.approx(128 / 8 * plain.gather[0], rel=1e-12) and found.data[0] == 0


def test_a_model_s_experts_and_ted_s_are_not_both():
    with pytest.raises(ConfigError, match="has 128 experts, so that experts = 16 cannot"):
        memory(QWEN, "1d", "roofline", candidate(), 1, Setting(experts=16))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b", "deepseek-v3"])
def test_a_million_positions(name):
    trained = model.load(name, sequence=2**20)
    on = replace(H100, memory=float("inf"))
    found = answer(Question(on, trained, 1024, 1024, EVERY, "roofline"), 3)
    for plan in found.best:
        assert all(np.isfinite(value) and value >= 0 for value in (*plan.parts.values(), *plan.holds.values()))
    flops = model_flops(trained, 1024, False)
    assert flops / 1024 / H100.tensor < found.best[0].seconds < 10 * flops / 1024 / H100.tensor
    short = answer(Question(on, replace(trained, sequence=2**10), 1024, 1024, EVERY, "roofline"), 1)
    assert found.best[0].seconds > 1024 * short.best[0].seconds


def test_half_a_batch_is_no_more_work():
    at = placed(shapes(MIXTRAL, "1d", 32, 64), 32, 8)
    timed, twice = (times(H100, MIXTRAL, "1d", "roofline", at, batch) for batch in (64, 128))
    assert (timed.compute < twice.compute).all() and np.isfinite(timed.total).all()
