"""The matmul tuner: every mode computes the same, the fastest runs, and only a sound cache is believed."""

from __future__ import annotations

import json
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from axonn_tp.layers.product import Matmul
from axonn_tp.layers.tuning import MODES, Product, TunedMatmul, Tuner, matmul_as, measure, product_of
from axonn_tp.layers.tuning_cache import Machine, read_times, write_times
from tests.distributed import run_ranks

CPU = torch.device("cpu")
PRODUCT = Product(4, 6, 5, "float64", "NT")
NAME = "4x6x5 float64 NT"


def operands(given: str = "NT", m: int = 4, k: int = 6, n: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randn(m, k, dtype=torch.float64) if given[0] == "N" else torch.randn(k, m, dtype=torch.float64).t()
    b = torch.randn(k, n, dtype=torch.float64) if given[1] == "N" else torch.randn(n, k, dtype=torch.float64).t()
    return a, b


class Clock:
    """Says what it was told that each mode takes, and counts how often it was asked."""

    def __init__(self, **seconds: float) -> None:
        self.seconds, self.asked = seconds, 0

    def __call__(self, runs: list, device: torch.device) -> list[float]:
        self.asked += 1
        assert len(runs) == len({id(run) for run in runs})
        # The given mode is first, the others in order.
        given = product_of(*operands()).given
        return [self.seconds[mode] for mode in (given, *(mode for mode in MODES if mode != given))]


@pytest.mark.parametrize("given", ["NN", "NT", "TN", "TT"])
def test_every_mode_is_the_plain_product(given: str) -> None:
    a, b = operands(given)
    assert product_of(a, b) == Product(4, 6, 5, "float64", given)
    for mode in (*MODES, "TT"):
        torch.testing.assert_close(matmul_as(a, b, mode), a @ b, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(Tuner(CPU).matmul(a, b), a @ b, rtol=1e-12, atol=1e-12)


def test_the_three_products_of_a_linear_are_the_three_modes() -> None:
    rows, weight, grad = torch.randn(8, 6), torch.randn(5, 6), torch.randn(8, 5)
    assert [product_of(*pair).given for pair in ((rows, weight.t()), (grad, weight), (grad.t(), rows))] == [
        "NT",
        "NN",
        "TN",
    ]


@pytest.mark.parametrize("fastest", [0, 1, 2])
def test_the_operation_of_a_linear_through_a_tuner(fastest: int) -> None:
    def timer(runs: list, device: torch.device) -> list[float]:
        return [1.0 if index == fastest else 9.0 for index in range(len(runs))]

    operation, plain = TunedMatmul(Tuner(CPU, timer=timer)), Matmul()
    input, weight, bias = (torch.randn(*s, dtype=torch.float64) for s in ((2, 4, 6), (5, 6), (5,)))
    grad = torch.randn(2, 4, 5, dtype=torch.float64)
    for got, expected in (
        (operation.forward(input, weight, bias), plain.forward(input, weight, bias)),
        (operation.grad_input(grad, weight, input.shape), plain.grad_input(grad, weight, input.shape)),
        (operation.grad_weight(grad, input, weight.shape), plain.grad_weight(grad, input, weight.shape)),
    ):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    assert {product.given for product in operation.tuner.times} == set(MODES)


def test_the_fastest_is_kept_and_asked_for_once() -> None:
    clock = Clock(NN=1.0, NT=2.0, TN=3.0)
    tuner = Tuner(CPU, timer=clock)
    for _ in range(3):
        tuner.matmul(*operands())
    assert clock.asked == 1 and tuner.choice(PRODUCT) == "NN" and tuner.gain(PRODUCT) == 2
    assert "2.00x" in tuner.table() and "2000.000" in tuner.table()


def test_next_to_no_gain_changes_nothing() -> None:
    tuner = Tuner(CPU, timer=Clock(NN=1.0, NT=1.01, TN=3.0))
    tuner.matmul(*operands())
    assert tuner.choice(PRODUCT) == "NT" and tuner.gain(PRODUCT) == 1


def test_after_the_first_step_new_shapes_run_as_given(capsys: pytest.CaptureFixture) -> None:
    tuner = Tuner(CPU, timer=Clock(NN=1.0, NT=2.0, TN=3.0))
    tuner.matmul(*operands())
    tuner.finish()
    assert "4  6  5  float64     NT" in capsys.readouterr().out
    a, b = operands("NN", 7)
    assert torch.equal(tuner.matmul(a, b), a @ b) and set(tuner.times) == {PRODUCT}
    assert tuner.matmul(a[:0], b).shape == (0, 5)


def test_measuring_measures() -> None:
    a = torch.randn(64, 64)
    few, many = measure([lambda: a @ a, lambda: [a @ a for _ in range(50)][0]], CPU, budget=0.01)
    assert 0 < few < many


def test_what_does_not_fit_is_not_chosen() -> None:
    def full() -> torch.Tensor:
        raise torch.OutOfMemoryError

    a = torch.randn(8, 8)
    fits, does_not = measure([lambda: a @ a, full], CPU, budget=0.001)
    assert fits < float("inf") == does_not


def test_the_cache_spares_the_next_run_its_measurements(tmp_path: Path) -> None:
    first = Tuner(CPU, tmp_path, Clock(NN=1.0, NT=2.0, TN=float("inf")))
    first.matmul(*operands())
    first.finish()
    clock = Clock()
    second = Tuner(CPU, tmp_path, clock)
    second.matmul(*operands())
    assert clock.asked == 0 and second.times == first.times and second.choice(PRODUCT) == "NN"
    write_times(tmp_path, Machine.of(CPU), {"1x2x3 float32 NN": GOOD})
    assert set(read_times(tmp_path, Machine.of(CPU))) == {NAME, "1x2x3 float32 NN"}
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".lock"}


def test_what_stages_measure_apart_is_kept(tmp_path: Path) -> None:
    names = [f"{size}x2x3 float32 NN" for size in range(1, 33)]
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda name: write_times(tmp_path, Machine.of(CPU), {name: GOOD}), names))
    assert set(read_times(tmp_path, Machine.of(CPU))) == set(names)


def test_another_library_has_times_of_its_own(tmp_path: Path) -> None:
    here = Machine.of(CPU)
    write_times(tmp_path, here, {NAME: {"NN": 1.0, "NT": 2.0, "TN": 3.0}})
    other = Machine(here.device, "0.0", here.library, here.threads, here.precision)
    assert read_times(tmp_path, other) == {}
    here.file(tmp_path).rename(other.file(tmp_path))
    with pytest.warns(UserWarning, match="measured on another machine"):
        assert read_times(tmp_path, other) == {}


GOOD = {"NN": 1.0, "NT": 2.0, "TN": 3.0}


@pytest.mark.parametrize(
    ("name", "times"),
    [
        (NAME, {"NN": 1.0, "NT": 2.0}),
        (NAME, {**GOOD, "XX": 1.0}),
        (NAME, {**GOOD, "NN": -1.0}),
        (NAME, {**GOOD, "NN": "fast"}),
        (NAME, {**GOOD, "NT": float("inf")}),
        (NAME, {**GOOD, "NN": float("nan")}),
        (NAME, 1.0),
        ("4x6 float64 NT", GOOD),
    ],
)
def test_entries_that_are_no_times_are_not_believed(tmp_path: Path, name: str, times: object) -> None:
    write_times(tmp_path, Machine.of(CPU), {"1x1x1 float64 NT": GOOD})
    path = Machine.of(CPU).file(tmp_path)
    content = json.loads(path.read_text())
    content["products"][name] = times
    path.write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="not times of matmuls"):
        assert read_times(tmp_path, Machine.of(CPU)) == {}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"machine": 1}', "\x00\xff"])
def test_a_broken_file_is_ignored_and_replaced(tmp_path: Path, content: str) -> None:
    path = Machine.of(CPU).file(tmp_path)
    path.write_text(content)
    with pytest.warns(UserWarning, match="is ignored"):
        tuner = Tuner(CPU, tmp_path, Clock(**GOOD))
    tuner.matmul(*operands())
    tuner.finish()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_times(tmp_path, Machine.of(CPU)) == {NAME: GOOD}


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="could not be written"):
        write_times(tmp_path / "file" / "folder", Machine.of(CPU), {NAME: GOOD})


def ranks_that_disagree(folder: Path) -> dict[Product, dict[str, float]]:
    seconds = [GOOD, {"NN": 9.0, "NT": 2.0, "TN": 3.0}][dist.get_rank()]
    tuner = Tuner(CPU, folder, Clock(**seconds))
    tuner.matmul(*operands())
    tuner.finish()
    return tuner.times


def test_all_ranks_follow_rank_0(tmp_path: Path) -> None:
    assert run_ranks(ranks_that_disagree, 2, tmp_path) == [{PRODUCT: GOOD}] * 2
    assert read_times(tmp_path, Machine.of(CPU)) == {NAME: GOOD}


def test_a_file_system_without_locks_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def acquire(*given: object, **named: object) -> None:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr("filelock.FileLock.acquire", acquire)
    with pytest.warns(UserWarning, match="could not be written, so .* flock"):
        write_times(tmp_path, Machine.of(CPU), {NAME: GOOD})
