"""SAMO and the offloaded optimizer in Megatron-LM's own pretrain_gpt.py, with and without a grid, beside Megatron's optimizer."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from axonn_plugins.samo.gradients import FirstGradients
from tests.megatron.harness import run
from tests.megatron.test_own_system import NOISE, SCRIPT, apart
from tests.megatron.test_pretrain import HYBRID, flags, needs_script, stock, with_doubles

SAMO = ["--axonn-samo", json.dumps({"sparsity": 0.9})]
OFFLOAD = ["--axonn-offload-optimizer", json.dumps({"bucket_size": 4096})]
SHARED = "--use-distributed-optimizer"
FEW = ["--train-iters", "6"]
TORCH_DIST = ["--ckpt-format", "torch_dist"]


def frugal(most: float) -> list[str]:
    """End a run that holds more bytes beside the weights for each element that is kept."""
    return ["--axonn-frugal", json.dumps({"most": most})]


@needs_script
def test_samo_is_masked_dense_training_on_every_grid() -> None:
    """Over 20 steps, with weight decay and clipping, by Megatron's own optimizer on one rank."""
    ranks, words = stock("swiglu", *SAMO)
    cases = {"masked": stock("swiglu", "--axonn-masked"), "one": (ranks, [*words, *frugal(14)])}
    for grid in ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1)):
        cases[f"{grid}"] = flags(grid, "swiglu", *SAMO)
    cases["(1, 1, 2, 2), shared"] = flags((1, 1, 2, 2), "swiglu", SHARED, *SAMO)
    cases["(2, 2, 1, 1), in host memory"] = flags((2, 2, 1, 1), "swiglu", *SAMO, *OFFLOAD)
    cases["data, shared"] = 2 * ranks, [*words, SHARED]
    cases["tensor"] = 2 * ranks, [*words, "--tensor-model-parallel-size", "2"]
    found = run(SCRIPT, cases)
    assert apart(found.pop("masked"), found) == {}


@needs_script
def test_beside_systems_of_ones_own_and_other_optimizers() -> None:
    sgd = ["--optimizer", "sgd", "--lr", "0.1", *FEW]
    dynamic = ["--fp16", "--initial-loss-scale", "67108864", "--hysteresis", "1", "--train-iters", "12"]
    pairs = {
        "noise": (stock("plain", "--axonn-masked", *NOISE), flags((1, 1, 2, 1), "plain", *SAMO, *NOISE)),
        "offloaded": (stock("llama", *NOISE), flags((2, 1, 1, 1), "llama", *OFFLOAD, *NOISE)),
        "sgd": (stock("plain", "--axonn-masked", *sgd), flags((1, 2, 1, 1), "plain", *SAMO, *sgd)),
        "recomputed": (
            stock("plain", "--axonn-masked", *FEW),
            flags((2, 1, 1, 1), "recompute full", *SAMO, "--axonn-ted", *FEW),
        ),
        "fp16": (stock("plain", *dynamic), (2, [*stock("plain", *OFFLOAD, *dynamic)[1], SHARED])),
    }
    cases = {f"{name} {part}": case for name, pair in pairs.items() for part, case in enumerate(pair)}
    found = run(SCRIPT, cases)
    for name in pairs:
        wanted = found[f"{name} 0"]
        assert "error" not in wanted, wanted["error"]
        assert apart(wanted, {name: found[f"{name} 1"]}, 2e-3 if name == "fp16" else 1e-5) == {}
    # The first steps overflow, and are skipped.
    assert 1 < len(found["fp16 0"]["norms"]) < 12


def interrupted(folder: Path) -> tuple[list[str], list[str]]:
    """Flags that save the third of six iterations and end, and flags that go on from there."""
    save = ["--save", str(folder), "--save-interval", "3", "--exit-interval", "3"]
    return [*FEW, *TORCH_DIST, *save], [*FEW, *TORCH_DIST, "--load", str(folder), "--no-load-rng"]


def last(straight: dict) -> dict:
    """Iterations after the third."""
    assert "error" not in straight, straight["error"]
    return {what: straight[what][3:] for what in ("losses", "norms")}


@needs_script
def test_runs_go_on_pruned_on_other_grids_and_in_stages(tmp_path: Path) -> None:
    """Embeddings, which stages share, are pruned too."""
    whole = ["--axonn-samo", json.dumps({"sparsity": 0.5, "include": ["*"]})]
    begin, load = interrupted(tmp_path)
    cases = {"straight": stock("plain", *whole, *FEW), "begin": flags((2, 1, 1, 1), "plain", *whole, *begin)}
    cases["(1, 1, 2, 1), shared"] = flags((1, 1, 2, 1), "plain", SHARED, *whole, *load)
    cases["(2, 1, 1, 1) on each of two stages"] = flags((2, 1, 1, 1), "plain", *whole, *load, stages=2)
    words = stock("plain", *whole, *load)[1]
    cases["stages, shared, in host memory"] = 4, [*words, "--pipeline-model-parallel-size", "2", SHARED, *OFFLOAD]
    # Masks are in the checkpoint, and not made anew by what flags say.
    cases["other flags"] = stock("plain", "--axonn-samo", json.dumps({"sparsity": 0.7}), *load)
    found = run(SCRIPT, cases)
    straight, begun = found.pop("straight"), found.pop("begin")
    assert "error" not in begun, begun["error"]
    assert apart(last(straight), found) == {}


@needs_script
def test_checkpoints_are_those_of_megatrons_optimizer(tmp_path: Path) -> None:
    """Pruned weights are zero in them, so that each prunes by magnitude what the other has pruned."""
    ours, theirs = interrupted(tmp_path / "ours"), interrupted(tmp_path / "theirs")
    masked = "--axonn-masked"
    cases = {"masked": stock("plain", masked, *FEW), "theirs begins": stock("plain", masked, *theirs[0])}
    cases["ours begins"] = flags((1, 2, 1, 1), "plain", *SAMO, *ours[0])
    cases["ours"] = flags((2, 1, 1, 1), "plain", *SAMO, *theirs[1])
    cases["theirs"] = stock("plain", masked, *ours[1])
    # Which counts no steps.
    sgd, (begin, load) = ["--optimizer", "sgd", "--lr", "0.1"], interrupted(tmp_path / "sgd")
    cases["sgd"] = stock("plain", masked, *sgd, *FEW)
    cases["sgd begins"] = flags((1, 2, 1, 1), "plain", *SAMO, *sgd, *begin)
    cases["sgd goes on"] = stock("plain", *SAMO, *sgd, *load)
    found = run(SCRIPT, cases)
    by_sgd, begun_by_sgd, gone_on = (found.pop(name) for name in ("sgd", "sgd begins", "sgd goes on"))
    assert "error" not in begun_by_sgd, begun_by_sgd["error"]
    assert apart(last(by_sgd), {"sgd": gone_on}) == {}
    masked_run = found.pop("masked")
    begun = [found.pop(name).get("error") for name in ("ours begins", "theirs begins")]
    assert begun == [None, None]
    assert apart(last(masked_run), found) == {}


@needs_script
def test_a_model_is_pruned_at_its_step_though_interrupted_before(tmp_path: Path) -> None:
    """By its step, or by a search that has compared masks before and after."""
    found_early = {"early_bird": {"interval": 1, "window": 3, "epsilon": 1.0}}
    blocks = {
        "step": {"sparsity": 0.9, "start_step": 4, "include": ["*"]},
        "search": {"sparsity": 0.5, "pruner": found_early},
        "schedule": {"sparsity": 0.8, "start_step": 1, "schedule": {"end_step": 5, "interval": 2, "initial": 0.4}},
    }
    cases = {}
    for name, block in blocks.items():
        samo = ["--axonn-samo", json.dumps(block)]
        begin, load = interrupted(tmp_path / name)
        cases[f"{name} straight"] = stock("plain", *samo, *FEW)
        cases[f"{name} begins"] = stock("plain", *samo, *begin)
        cases[f"{name} goes on"] = flags((1, 1, 2, 1), "plain", *samo, *load)
        cases[f"{name} in stages"] = flags((1, 1, 2, 1), "plain", SHARED, *samo, *load, stages=2)
    found = run(SCRIPT, cases)
    dense = found["step straight"]["losses"]
    assert dense[:3] == found["search straight"]["losses"][:3] and dense[4] != found["search straight"]["losses"][4]
    for name in blocks:
        others = {other: found[other] for other in (f"{name} goes on", f"{name} in stages")}
        assert apart(last(found[f"{name} straight"]), others) == {}


@needs_script
def test_in_16_bits(tmp_path: Path) -> None:
    """Gradients are summed in float32 as in Megatron; float32 weights and the loss's scale go on."""
    half = {"bf16": ["--bf16"], "fp16": ["--fp16", "--loss-scale", "256"]}
    cases = {}
    for name, more in half.items():
        begin, load = interrupted(tmp_path / name)
        cases[f"{name} masked"] = stock("swiglu", "--axonn-masked", *more, *FEW)
        cases[f"{name} begins"] = flags((1, 1, 2, 1), "swiglu", SHARED, *SAMO, *more, *begin)
        ranks, words = stock("swiglu", *SAMO, *more, *load)
        cases[f"{name} goes on"] = ranks, [*words, *frugal(18 if name == "bf16" else 16)]
        cases[f"{name} dense"] = stock("swiglu", *more, *FEW)
        cases[f"{name} in host memory"] = 2, [*stock("swiglu", *OFFLOAD, *more, *FEW)[1], SHARED]
    found = run(SCRIPT, cases)
    for name in half:
        assert found[f"{name} begins"].get("error") is None, found[f"{name} begins"]
        assert apart(last(found[f"{name} masked"]), {name: found[f"{name} goes on"]}, 2e-3) == {}
        assert apart(found[f"{name} dense"], {name: found[f"{name} in host memory"]}, 2e-3) == {}


@needs_script
@pytest.mark.timeout(1800)
def test_beside_mamba_mixers(tmp_path: Path) -> None:
    """Pruned and in host memory, also from a checkpoint of another grid."""
    begin, load = interrupted(tmp_path / "saved")
    cases = {
        "masked": stock("swiglu", "--axonn-masked", *HYBRID, *FEW),
        "one": stock("swiglu", *SAMO, *HYBRID, *FEW),
        "(2, 1, 2, 1), in host memory": flags((2, 1, 2, 1), "swiglu", *SAMO, *OFFLOAD, *HYBRID, *FEW),
        "(1, 2, 1, 2), shared": flags((1, 2, 1, 2), "swiglu", SHARED, *SAMO, *HYBRID, *FEW),
        "begins": flags((2, 1, 1, 1), "swiglu", *SAMO, *HYBRID, *begin),
        "goes on": flags((1, 1, 2, 1), "swiglu", SHARED, *SAMO, *HYBRID, *load),
    }
    found = run(with_doubles(tmp_path, "pretrain_mamba.py", "mamba_double"), cases, 1800)
    begun, masked = found.pop("begins"), found.pop("masked")
    assert "error" not in begun, begun["error"]
    assert apart(last(masked), {"goes on": found.pop("goes on")}) == {}
    assert apart(masked, found) == {}


def test_states_of_megatrons_distributed_optimizer_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    optimizer = _bare()
    with pytest.raises(SystemExit):
        optimizer.sharded_state_dict({}, True, {"distrib_optim_sharding_type": "fully_reshardable"})
    assert re.search(r"--load: .* --use-distributed-optimizer, .*; save it without", capsys.readouterr().err)


def test_a_gradient_that_is_not_a_number_ends_the_run() -> None:
    optimizer = _bare()
    optimizer.optimizer = Namespace(step=int, total_norm=torch.tensor(torch.nan), overflow=False)
    optimizer.host, optimizer.composition, optimizer._check = Namespace(steps=6), Namespace(stepped=int), True
    with pytest.raises(RuntimeError, match="norm in iteration 7 is nan; lower --lr, or give --no-check"):
        optimizer.step()
    optimizer._check = False
    assert optimizer.step()[0]


def test_a_regrowth_that_is_owed_when_a_checkpoint_is_written_is_made_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where gradients overflowed in the step that it was due in."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from axonn_plugins.hosts.megatron import states_checkpoint

    alone = Namespace(get_world_size=lambda: 1, all_gather_object=lambda every, mine: every.__setitem__(0, mine))
    monkeypatch.setattr(states_checkpoint, "dist", alone)
    pruning = Namespace(pruned=True, owed=True, masks=lambda optimizer: {}, search_state=lambda: ([], None))
    pruning.first_gradients, optimizer = None, _around(pruning)
    notes, _ = states_checkpoint._masks(optimizer)
    pruning.owed = False
    states_checkpoint.take(optimizer, {"optimizer": {"state": {}}, states_checkpoint.NOTES: notes})
    assert pruning.owed


def test_first_gradients_of_before_a_checkpoint_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of `snip` over several batches: a run that went on began to gather anew, and was pruned later and by others."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from axonn_plugins.hosts.megatron import states_checkpoint

    alone = Namespace(get_world_size=lambda: 1, all_gather_object=lambda every, mine: every.__setitem__(0, mine))
    monkeypatch.setattr(states_checkpoint, "dist", alone)
    weights = {name: nn.Parameter(torch.rand(3, 5, dtype=torch.float64)) for name in ("first", "without any")}
    before, after = (FirstGradients(weights, 3) for _ in range(2))
    before.go_on(2, {"first": torch.randn(3, 5, dtype=torch.float64)})
    pruning = Namespace(pruned=False, owed=False, first_gradients=before, search_state=lambda: ([], None))
    pruning.resume_search, optimizer = lambda *given: None, _around(pruning, weights)
    notes, found = states_checkpoint._masks(optimizer)
    parts = {
        key: {n: states_checkpoint._part(found, key, *one) for n, one in enumerate(weights.items())}
        for key in notes["names"]
    }
    pruning.first_gradients = after
    saved = {"optimizer": {"state": {}}, states_checkpoint.NOTES: notes, states_checkpoint._MASKS: parts}
    states_checkpoint.take(optimizer, saved)
    assert after.taken == 2 and not after.complete
    sums = [first.so_far(optimizer.optimizer) for first in (before, after)]
    assert sums[1].keys() == {"first"} and torch.equal(sums[0]["first"], sums[1]["first"])


def _around(pruning: Any, weights: dict[str, nn.Parameter] | None = None) -> Any:
    """What a checkpoint asks of an optimizer that has pruned."""
    named, held = weights or {}, Namespace(load_state_dict=repr, stage=0)
    host = Namespace(serial_names=lambda: {parameter: name for name, parameter in named.items()})
    return Namespace(
        **{"composition": Namespace(pruning=pruning), "optimizer": held, "host": host, "grad_scaler": None},
        **{"get_parameters": lambda: [*named.values()], "config": Namespace(optimizer="adam"), "param_groups": []},
    )


def _bare() -> Any:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from axonn_plugins.hosts.megatron.states_optimizer import StateOptimizer

    return object.__new__(StateOptimizer)
