"""What PCCL takes for which size, by what was measured and where nothing was."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from plugins.launch import launch
from plugins.pccl.algorithms import algorithms
from plugins.pccl.backend import planner, using
from plugins.pccl.build import load
from plugins.pccl.choice import NATIVE, Choice, Measured, choose
from plugins.pccl.tuner import COLLECTIVES, SIZES, candidates, tune
from plugins.pccl.tuning_file import key_of, read, write
from tests.pccl.stress import join

RING, BRUCK, GLOO = Choice("ring"), Choice("bruck"), Choice(NATIVE)
MEASURED = Measured({"all_gather": {2**10: {BRUCK: 1.0, RING: 4.0}, 2**20: {BRUCK: 64.0, RING: 16.0, GLOO: 8.0}}})
SHAPES = [((0, 1, 2),), ((0,), (1,), (2,)), ((0, 1), (2, 3)), ((0, 2, 4), (1, 3)), ((3, 0), (1,), (2,))]


def test_times_are_interpolated_between_sizes() -> None:
    # In the logarithms of size and time, the two lines cross at 2 ** 15.
    assert [MEASURED.choose("all_gather", 2**power) for power in (0, 10, 14, 16, 19)] == [BRUCK] * 3 + [RING] * 2
    assert MEASURED.estimate("all_gather", 2**15)[BRUCK] == pytest.approx(8.0)
    assert MEASURED.estimate("all_gather", 2**15)[RING] == pytest.approx(8.0)


def test_the_native_library_is_taken_where_it_is_fastest_and_can() -> None:
    assert MEASURED.choose("all_gather", 2**24) == GLOO
    assert MEASURED.choose("all_gather", 2**24, native=False) == RING


def test_nothing_measured_is_no_choice() -> None:
    assert MEASURED.choose("all_reduce", 2**10) is None
    assert Measured({"all_gather": {}}).choose("all_gather", 1) is None


def test_sizes_without_a_common_choice_go_by_the_smaller() -> None:
    apart = Measured({"all_gather": {2**10: {BRUCK: 1.0}, 2**20: {RING: 1.0}}})
    assert apart.choose("all_gather", 2**15) == BRUCK


def test_times_survive_the_file(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "tuning.json"
    assert read(file, "a") == Measured()
    write(file, "a", MEASURED)
    write(file, "b", Measured({"all_reduce": {8: {Choice("ring", 2): 0.5}}}))
    assert read(file, "a") == MEASURED
    assert read(file, "b").choose("all_reduce", 8) == Choice("ring", 2)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": {"all_gather": {"8": {"ring/0": 1}}}}'])
def test_a_file_that_is_not_ours_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tuning.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"tuning file .*tuning.json cannot be read .* remove it, or name another"):
        read(file, "a")


def test_groups_of_one_shape_share_times() -> None:
    assert key_of([(0, 1), (2, 3)]) == key_of([(4, 5), (6, 7)]) != key_of([(0,), (1, 2, 3)])


@pytest.mark.parametrize("nodes", SHAPES)
def test_all_that_may_be_chosen_exists(nodes: tuple[tuple[int, ...], ...]) -> None:
    ranks = sum(map(len, nodes))
    for collective, size in itertools.product(COLLECTIVES, SIZES):
        known = algorithms(collective, ranks)
        assert choose(collective, size, nodes).algorithm in known
        found = candidates(collective, size, nodes)
        assert found[-1] == GLOO and len(set(found)) == len(found) > 2
        assert all(choice.algorithm in known for choice in found[:-1])


def _tuned(file: str) -> list[str]:
    os.environ["AXONN_PCCL_TUNING"] = file
    rank, size = join()
    measured = tune(sizes=(2**12, 2**16))
    assert {name: list(by) for name, by in measured.times.items()} == dict.fromkeys(COLLECTIVES, [2**12, 2**16])
    pair = dist.new_group()
    assert planner(pair).measured == measured  # made later, with the same nodes
    for choice in (GLOO, RING, None):
        with using(choice):
            whole, own = torch.arange(4.0 * size) + rank, torch.empty(4)
            dist.reduce_scatter_tensor(own, whole)
            assert own.tolist() == [size * (4 * rank + i) + size * (size - 1) / 2 for i in range(4)]
            dist.reduce_scatter_tensor(own, whole, dist.ReduceOp.AVG)  # which gloo cannot do
            assert own.tolist() == [4 * rank + i + (size - 1) / 2 for i in range(4)]
            dist.all_gather_into_tensor(whole, own)
            assert whole.tolist() == [i + (size - 1) / 2 for i in range(4 * size)]
            dist.all_reduce(own)
            dist.barrier()
    chosen = [str(planner().choose(name, 2**power)) for name in COLLECTIVES for power in range(4, 20)]
    dist.destroy_process_group()
    return chosen


def test_ranks_measure_agree_and_keep(tmp_path: Path) -> None:
    load()
    file = tmp_path / "tuning.json"
    first = launch(_tuned, 3, str(file), timeout=120)
    assert first[0] == first[1] == first[2]
    assert launch(_tuned, 3, str(file), timeout=120) == first
