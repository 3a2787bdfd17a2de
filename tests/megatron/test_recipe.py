"""The recipe's driver on megatron.core alone: any grid trains as Megatron itself does on one rank."""

from __future__ import annotations

import queue
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from axonn_plugins.cli.options import read
from axonn_plugins.config import ConfigError
from axonn_recipes.data import load
from axonn_recipes.megatron_gpt.recipe import main
from axonn_recipes.megatron_gpt.settings import VOCABULARY, Options, Settings, resolve

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
# Before ranks are forked, which then need not import Megatron each.
from megatron.core.dist_checkpointing.strategies import filesystem_async

from axonn_recipes.megatron_gpt.train import train
from tests import groups
from tests.distributed import run_ranks
from tests.matrix import chosen, names, thorough

STOCK = Settings(
    ranks=1,
    layers=2,
    hidden=32,
    heads=8,
    context=16,
    batch=4,
    micro_batch=1,
    steps=4,
    tensor_model_parallel_impl="megatron",
)
PLAIN = replace(STOCK, tensor_model_parallel_impl="axonn3d")
LLAMA = {"swiglu": True, "rmsnorm": True, "rope": True, "untied": True, "query_groups": 4}
SPLIT = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}


def on(gx: int, gy: int, gz: int, gdata: int, pipeline: int = 1, **changes: object) -> Settings:
    sizes = {"ranks": gx * gy * gz * gdata * pipeline, "axonn_gx": gx, "axonn_gy": gy, "axonn_gz": gz}
    return replace(PLAIN, **sizes, pipeline_model_parallel_size=pipeline, **changes)  # type: ignore[arg-type]


STEPS = 2
"""Of the grids, which are compared with as many of one rank's."""
Curve = tuple[list[float], list[float]]
"""Losses and norms."""
GRIDS_OF_4 = [
    (gx, gy, gz, 4 // (gx * gy * gz))
    for gx in (1, 2, 4)
    for gy in (1, 2, 4)
    for gz in (1, 2, 4)
    if 4 % (gx * gy * gz) == 0
]
CASES = {
    "plain": [on(2, 2, 1, 1)],
    "plain on every grid": [on(*grid) for grid in GRIDS_OF_4],
    "accumulated": [on(2, 1, 2, 1, micro_batch=1)],
    "recomputed": [on(1, 2, 2, 1, recompute="selective")],
    "recomputed in full": [on(2, 1, 2, 1, recompute="full")],
    "split optimizer": [on(1, 1, 2, 2, **SPLIT)],
    "split optimizer beside y": [on(1, 2, 1, 2, **SPLIT)],
    "pipeline": [on(1, 1, 2, 1, 2), on(2, 1, 1, 1, 2)],
    "llama in stages": [on(1, 2, 1, 1, 2, **LLAMA)],
    "llama": [on(2, 1, 2, 1, **LLAMA), on(2, 2, 1, 1, **LLAMA)],
    "eight": [on(2, 2, 2, 1), on(2, 1, 2, 2), on(2, 2, 1, 2)],
}


def _curves(cases: list[tuple[Settings, Path | None, Path | None]], prefix: Path) -> list[Curve]:
    """Losses and norms of runs one after another on the same ranks; each may load and save a checkpoint."""
    warnings.filterwarnings("ignore")
    groups.reuse()
    filesystem_async._results_queue = queue.Queue()  # as in test_checkpoint
    curves = [((found := train(case, prefix, None, load, save)).losses, found.norms) for case, load, save in cases]
    dist.destroy_process_group()
    return curves


def first_of(curve: Curve) -> Curve:
    """Of the steps that grids take."""
    return curve[0][:STEPS], curve[1][:STEPS]


def apart(wanted: Curve, found: Curve) -> float:
    assert len(found[0]) == len(wanted[0])
    return max(
        abs(a - b) / abs(a) for one, two in zip(wanted, found, strict=True) for a, b in zip(one, two, strict=True)
    )


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from axonn_recipes.megatron_gpt.text import prepare

    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_bytes(bytes(range(32, 127)) * 40 + Path(__file__).read_bytes() * 3)
    prepare(load(str(folder / "text.txt"), 64), folder / "text", VOCABULARY)
    return folder / "text"


@pytest.fixture(scope="module")
def stock(prefix: Path) -> dict[bool, Curve]:
    """Megatron's own curves on one rank, of the plain model and of the one with everything."""
    plain, llama = run_ranks(_curves, 1, [(STOCK, None, None), (replace(STOCK, **LLAMA), None, None)], prefix)[0]
    return {False: plain, True: llama}


@pytest.fixture(scope="module")
def ours(request: pytest.FixtureRequest, prefix: Path) -> dict[str, list[Curve]]:
    """Curves of all cases, by name: one start for each number of ranks."""
    found: dict[str, list[Curve]] = {}
    for ranks in (4, 8):
        of_size = {name: cases for name, cases in chosen(request, CASES).items() if cases[0].ranks == ranks}
        runs = [(replace(case, steps=STEPS), None, None) for cases in of_size.values() for case in cases]
        curves = iter(run_ranks(_curves, ranks, runs, prefix)[0] if runs else [])
        found |= {name: [next(curves) for _ in cases] for name, cases in of_size.items()}
    return found


EVERY_RUN = {"plain", "recomputed", "split optimizer", "llama in stages"}


@pytest.mark.parametrize("name", names(CASES, EVERY_RUN))
def test_grids_train_as_one_rank(name: str, ours: dict[str, list[Curve]], stock: dict[bool, Curve]) -> None:
    differences = {
        f"{case.grid} pipeline {case.pipeline_model_parallel_size}": apart(first_of(stock[case.rmsnorm]), curve)
        for case, curve in zip(CASES[name], ours[name], strict=True)
    }
    assert {where: value for where, value in differences.items() if not value < 1e-5} == {}


@pytest.mark.parametrize(
    ("split", "every"), [thorough({}, True), thorough(SPLIT, True), (SPLIT, False)], ids=["whole", "split", "one split"]
)
def test_a_checkpoint_goes_on_on_another_grid(
    prefix: Path, stock: dict, tmp_path: Path, split: dict, every: bool
) -> None:
    half = {"steps": STOCK.steps // 2, **split}
    begun = on(2, 1, 2, 1, **half)
    other = on(1, 2, 1, 2, **half)
    # Without apex, Megatron itself cannot load a distributed optimizer's state.
    stocks: dict = {} if split else {"tensor_model_parallel_impl": "megatron", "tensor_model_parallel_size": 2}
    another = replace(other, **stocks) if stocks else on(1, 1, 4, 1, **half)
    loaded = [(one, tmp_path / "saved", None) for one in ((other, another) if every else (other,))]
    first, *others = run_ranks(_curves, 4, [(begun, None, tmp_path / "saved"), *loaded], prefix)[0]
    for second in others:
        assert apart(stock[False], (first[0] + second[0], first[1] + second[1])) < 1e-5


def test_text_is_prepared_and_read(prefix: Path) -> None:
    from axonn_recipes.megatron_gpt.text import read

    corpus = read(prefix)
    wanted = load(str(prefix.with_suffix(".txt")), 64)
    assert corpus.training.tolist() == wanted.training.tolist()
    assert corpus.validation.tolist() == wanted.validation.tolist()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--ranks", "6"], "--ranks 6 is no multiple of the 4"),
        (["--heads", "3", "--hidden", "96"], "--axonn-gx 2"),
        (["--batch", "6"], "--batch 6 is no multiple"),
        (["--layers", "3", "--pipeline-model-parallel-size", "2", "--ranks", "8"], "--layers 3 do not divide"),
        (["--overlap-param-gather"], "--overlap-param-gather needs"),
        (["--query-groups", "3"], "--query-groups 3 does not divide"),
        (["--steps", "0"], "--steps 0"),
    ],
)
def test_mistakes_are_one_sentence(options: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as error:
        resolve(read(Options, options))
    assert "\n" not in str(error.value)


def test_dry_run_says_what_would_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "--axonn-gy", "2", "--axonn-gz", "1"]) == 0
    assert "gx 2 gy 2 gz 1 data 1" in capsys.readouterr().out
