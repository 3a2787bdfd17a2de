"""PCCL's choice for each size, by what was measured and where nothing was."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.cluster.launch import launch
from axonn_plugins.pccl import Options, backend, register, tuner
from axonn_plugins.pccl.algorithms import algorithms
from axonn_plugins.pccl.backend import planner, using
from axonn_plugins.pccl.build import load
from axonn_plugins.pccl.choice import NATIVE, Choice, Measured, choose
from axonn_plugins.pccl.contest import COLLECTIVES, SIZES, Trial, candidates, contest
from axonn_plugins.pccl.links import LinkError
from axonn_plugins.pccl.network import Network
from axonn_plugins.pccl.tuner import tune
from axonn_plugins.pccl.tuning_file import key_of, read, write
from tests.pccl.stress import join

RING, BRUCK, GLOO = Choice("ring"), Choice("bruck"), Choice(NATIVE)
MEASURED = Measured({"all_gather": {2**10: {BRUCK: 1.0, RING: 4.0}, 2**20: {BRUCK: 64.0, RING: 16.0, GLOO: 8.0}}})
SHAPES = [((0, 1, 2),), ((0,), (1,), (2,)), ((0, 1), (2, 3)), ((0, 2, 4), (1, 3)), ((3, 0), (1,), (2,))]


def test_times_are_interpolated_between_sizes() -> None:
    # In the logarithms of size and time, the two lines cross at 2 ** 15.
    chosen = [MEASURED.choose("all_gather", 2**power, native=False) for power in (0, 10, 14, 16, 19)]
    assert chosen == [BRUCK] * 3 + [RING] * 2
    assert MEASURED.estimate("all_gather", 2**15)[BRUCK] == pytest.approx(8.0)
    assert MEASURED.estimate("all_gather", 2**15)[RING] == pytest.approx(8.0)


def test_the_native_library_is_taken_where_it_is_fastest_and_can() -> None:
    assert MEASURED.choose("all_gather", 2**24) == GLOO
    assert MEASURED.choose("all_gather", 2**24, native=False) == RING


def test_nothing_measured_is_no_choice() -> None:
    assert MEASURED.choose("all_reduce", 2**10) is None
    assert Measured({"all_gather": {}}).choose("all_gather", 1) is None


def test_what_was_timed_at_one_of_two_sizes_only_counts_as_slow_at_the_other() -> None:
    apart = Measured({"all_gather": {2**10: {BRUCK: 1.0}, 2**20: {RING: 1.0}}})
    assert [apart.choose("all_gather", 2**power) for power in (14, 16)] == [BRUCK, RING]
    assert apart.estimate("all_gather", 2**15) == pytest.approx({BRUCK: 8**0.5, RING: 8**0.5})


def test_beyond_the_sizes_measured() -> None:
    assert MEASURED.estimate("all_gather", 1) == {BRUCK: 1.0, RING: 4.0}
    assert MEASURED.estimate("all_gather", 2**30)[GLOO] == 8.0 * 2**10
    steps_count = Measured({"all_gather": {2**10: {BRUCK: 1.0, RING: 2.0}}})
    assert steps_count.choose("all_gather", 2**14) == BRUCK
    assert steps_count.choose("all_gather", 2**15) is None


SLOW = Network(5e-4, 6e7)


def test_times_survive_the_file(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "tuning.json"
    assert read(file, "a", None) == Measured()
    write(file, "a", None, MEASURED)
    write(file, "b", SLOW, Measured({"all_reduce": {8: {Choice("ring", 2): 0.5}}}))
    assert read(file, "a", None) == MEASURED
    assert read(file, "b", SLOW).choose("all_reduce", 8) == Choice("ring", 2)
    (beside := tmp_path / "beside").touch()
    assert file.stat().st_mode == beside.stat().st_mode  # others may read it who share the folder


def test_times_of_one_network_do_not_decide_on_another(tmp_path: Path) -> None:
    file, far, noisy = tmp_path / "tuning.json", Network(5e-3, 6e7), Network(7e-4, 5e7)
    write(file, "a", SLOW, MEASURED)
    assert read(file, "a", noisy) == MEASURED
    assert read(file, "a", far) == read(file, "a", Network(5e-4, 6e8)) == read(file, "a", None) == Measured()
    other = Measured({"all_reduce": {8: {RING: 0.5}}})
    write(file, "a", far, other)
    assert (read(file, "a", far), read(file, "a", SLOW)) == (other, MEASURED)
    write(file, "a", noisy, other)  # replaces what it is like
    assert read(file, "a", SLOW) == other and len(json.loads(file.read_text())["a"]) == 2


def test_networks_faster_than_the_processor_are_alike() -> None:
    assert Network(1e-5, 1e10).alike(Network(6e-5, 2e9))
    assert not Network(1e-5, 1e10).alike(SLOW)


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", '{"a": 1}', '{"a": [{"network": null, "times": {"b": {"8": {"ring/0": 1}}}}]}', "a folder"),
        '{"a": [{"network": null, "times": {"all_gather": {"8": {"tiny": 1}}}}]}',
        '{"a": [{"network": null, "times": {"all_reduce": {"8": {"ring": 1, "tiny": -1}}}}]}',
        '{"a": [{"network": null, "times": {"all_reduce": {"8": {"ring": NaN}}}}]}',
    ],
)
def test_a_file_that_is_not_ours_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tuning.json"
    if text == "a folder":
        file.mkdir()
    else:
        file.write_text(text)
    with pytest.raises(ValueError, match=r"tuning file .*tuning.json cannot be read .* remove it, or name another"):
        read(file, "a", None)


def test_groups_of_one_shape_share_times() -> None:
    assert (
        key_of([(0, 1), (2, 3)]) == key_of([(4, 5), (6, 7)]) != key_of([(0,), (1, 2, 3)]) == key_of([(0, 1, 2), (3,)])
    )
    assert key_of([(0, 1)], ["eth0"]) != key_of([(0, 1)], ["eth1"])


@pytest.mark.parametrize("nodes", SHAPES)
def test_all_that_may_be_chosen_exists(nodes: tuple[tuple[int, ...], ...]) -> None:
    ranks = sum(map(len, nodes))
    for collective, size in itertools.product(COLLECTIVES, SIZES):
        known = algorithms(collective, ranks)
        assert choose(collective, size, nodes).algorithm in known
        found = candidates(collective, size, nodes)
        assert len(set(found)) == len(found) > 1
        assert all(choice.algorithm in known for choice in found)


def test_thousands_of_ranks_do_not_cut_blocks_fine() -> None:
    """Of 64 nodes' blocks pieces of 32 KiB are tried, as ever; of 1,024 no less than 4 KiB, which are half a block."""
    for count, most in ((64, 4), (1024, 2), (4096, 1)):
        nodes = [range(8 * node, 8 * node + 8) for node in range(count)]
        for collective in COLLECTIVES:
            assert max(choice.chunks for choice in candidates(collective, SIZES[-1], nodes)) == most


NODES = tuple((2 * node, 2 * node + 1) for node in range(4))
Cost = Callable[[Trial], float]


def played(cost: Cost, budget: float) -> tuple[Measured, list[Trial], float]:
    """A contest in which time passes by `cost` of each call; the trials, and how long it took."""
    trials, made, now = contest(NODES, budget=budget), [], 0.0
    trial = next(trials)
    while True:
        made.append(trial)
        now += trial.calls * cost(trial)
        try:
            trial = trials.send((cost(trial), now))
        except StopIteration as end:
            return end.value, made, now


def linear(steps: Mapping[Choice, float], bytes_: Mapping[Choice, float]) -> Cost:
    """1 ms a step and 10 ms a MiB, of which a choice takes so many times more."""
    return lambda trial: 1e-3 * steps.get(trial.choice, 3) + 1e-8 * trial.size * bytes_.get(trial.choice, 2)


def test_the_fastest_is_found_at_every_size() -> None:
    ring, log = Choice("hierarchical_ring_direct", 2), Choice("hierarchical_log_direct")
    cost = linear({ring: 5, log: 1}, {ring: 1, log: 1.5})
    measured, trials, seconds = played(cost, budget=8)
    assert seconds < 8
    for collective in COLLECTIVES:
        assert list(measured.times[collective]) == list(SIZES)
        assert [measured.choose(collective, size) for size in SIZES] == [log, log, log, ring, ring]
    times = Counter((trial.collective, trial.size, trial.choice) for trial in trials)
    best = {(trial.collective, trial.size): measured.times[trial.collective][trial.size] for trial in trials}
    for (collective, size, choice), rounds in times.items():  # only what comes close to each other is called again
        found = best[collective, size]
        close = [other for other in found if found[other] <= 1.5 * min(found.values())]
        assert (rounds > 1) == (choice in close and len(close) > 1), (collective, size, choice)


def test_what_is_fast_once_and_slow_at_other_times_is_not_taken() -> None:
    steady, fickle, size = Choice("hierarchical_ring_direct", 2), Choice("ring", 2), SIZES[-1]
    turns = Counter[str]()

    def cost(trial: Trial) -> float:
        if trial.choice != fickle:
            return 1e-3 if trial.choice == steady else 2e-3
        turns[f"{trial.collective} {trial.size}"] += 1
        return 0.9e-3 if turns[f"{trial.collective} {trial.size}"] == 2 else 1.2e-3

    measured, _, _ = played(cost, budget=8)
    assert turns[f"all_reduce {size}"] > 3 and measured.choose("all_reduce", size) == steady


def test_what_has_no_chance_is_left_out_of_the_next_size() -> None:
    log = Choice("led_log")
    _, trials, _ = played(linear({log: 100}, {log: 1}), budget=8)
    tried = {trial.size for trial in trials if trial.choice == log}
    # 34 times as slow as the best at the first size, where 4 times is far; it is none of the candidates for the largest.
    assert tried == {SIZES[0], SIZES[2]}


@pytest.mark.parametrize("slower", [10, 1000])
def test_a_slow_network_gets_the_small_sizes_within_the_budget(slower: int) -> None:
    cost = linear({}, {})
    measured, trials, seconds = played(lambda trial: slower * cost(trial), budget=8)
    longest = max(trial.calls * slower * cost(trial) for trial in trials)
    at_least_two = 2 * len(COLLECTIVES) * 2 * slower * 3.1e-3  # of each collective's smallest size
    assert seconds <= max(8 + longest, at_least_two)
    for collective in COLLECTIVES:
        found = measured.times[collective]
        assert found and all(len(times) >= 2 for times in found.values())
        assert SIZES[-1] not in found


def _tuned(file: str) -> list[str]:
    os.environ["AXONN_PCCL_TUNING"] = file
    rank, size = join()
    assert not planner().measured.times or Path(file).exists()
    measured = tune(sizes=(2**12, 2**16) if rank == 0 else (2**10,))
    assert {name: list(by) for name, by in measured.times.items()} == dict.fromkeys(COLLECTIVES, [2**12, 2**16])
    pair = dist.new_group()
    assert planner(pair).measured == measured  # made later, with the same nodes
    for choice in (Choice("direct"), RING, None):
        with using(choice):
            whole, own = torch.arange(4.0 * size) + rank, torch.empty(4)
            dist.reduce_scatter_tensor(own, whole)
            assert own.tolist() == [size * (4 * rank + i) + size * (size - 1) / 2 for i in range(4)]
            dist.reduce_scatter_tensor(own, whole, dist.ReduceOp.AVG)
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
    first = launch(_tuned, 3, str(file))
    assert first[0] == first[1] == first[2]
    assert launch(_tuned, 3, str(file)) == first


def _starts(folder: str) -> list[Any]:
    """Outcome of each start of a job: the choices, or the error."""
    tuner.SIZES, made = (2**10, 2**14), Network(1e-3, 1e8)
    real = tuner.probe
    tuner.probe = lambda inner, rank, peer: made if real(inner, rank, peer) else None

    def start(name: str, options: Options) -> Any:
        where = f"file://{folder}/store-{name}"
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        dist.init_process_group("pccl", where, timedelta(seconds=40), size, rank, pg_options=options)
        found = planner().measured, [str(planner().choose(name, 2**power)) for name in COLLECTIVES for power in (9, 12)]
        value = torch.ones(5)
        dist.all_reduce(value)
        assert value.tolist() == [size] * 5
        pair = dist.new_group([0, 1])
        assert rank > 1 or planner(pair).network == (made if options.ranks_per_node == 1 else None)
        dist.destroy_process_group()
        return found

    register()
    one, apart = f"{folder}/one.json", f"{folder}/apart.json"
    found = [
        start("first", Options(tuning_file=one, tune=True)),
        start("second", Options(tuning_file=one, tune=True)),
        start("apart", Options(ranks_per_node=1, tuning_file=apart, tune=True)),
        start("again", Options(ranks_per_node=1, tuning_file=apart, tune=True)),
        start("never", Options(tuning_file=f"{folder}/never.json", tune=False)),
        start("environment", Options(tuning_file=f"{folder}/never.json")),
        start("fixed", Options("ring", tuning_file=f"{folder}/never.json", tune=True)),
    ]
    make = backend.Planner._make

    def broken(self: Any, collective: str, choice: Choice, *rest: int) -> Any:
        if self.rank == 1 and choice == RING:
            raise LinkError("the cable is cut")
        return make(self, collective, choice, *rest)

    backend.Planner._make = broken
    with pytest.raises(LinkError) as caught:
        start("broken", Options(tuning_file=f"{folder}/broken.json", tune=True))
    return [*found, str(caught.value)]


def test_a_job_tunes_once_and_the_next_reads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load()
    ranks = launch(_starts, 3, str(tmp_path))
    assert ranks[0] == ranks[1] == ranks[2]
    first, second, apart, again, *untuned, error = ranks[0]
    assert first == second != apart == again
    for measured, _ in (first, apart):
        assert {name: list(by) for name, by in measured.times.items()} == dict.fromkeys(COLLECTIVES, [2**10, 2**14])
        assert all(len(by[2**10]) > 1 for by in measured.times.values())
    assert [measured for measured, _ in untuned] == [Measured()] * 3
    assert error == "pccl: rank 1 of the group cannot be tuned: the cable is cut"
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("PCCL: ")]
    assert [re.sub(r"\d+ ways|[\d.]+ s\b", "N", line) for line in said] == [
        f"PCCL: timed N on 1 node x 3 ranks in N; kept in {tmp_path / 'one.json'}",
        f"PCCL: timed N on 3 nodes x 1 rank in N; kept in {tmp_path / 'apart.json'}",
    ]
    assert sorted(file.name for file in tmp_path.glob("*.json")) == ["apart.json", "one.json"]
