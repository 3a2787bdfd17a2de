"""Checkpoints of a grid go on on another and in stock Megatron, with losses of a run that was not interrupted."""

from __future__ import annotations

import pickle
import queue
import re
import signal
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import finalize_model_grads
from megatron.core.extensions import transformer_engine
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.transformer.enums import AttnBackend

from axonn_plugins.hosts.megatron import checkpoint, checkpoint_optimizer, checkpoint_training, enums, process_groups
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_tp import Grid, Layout, factorisations
from tests.distributed import run_ranks
from tests.matrix import chosen, names, thorough
from tests.megatron import harness, training
from tests.megatron.test_layers import LLAMA, TIED
from tests.megatron.training import Case

METADATA = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
SHARDED = {"use_distributed_optimizer": True}
CASES = {
    "tied": TIED,
    "llama": LLAMA,
    "bf16": Case(dtype=torch.bfloat16, ddp={"grad_reduce_in_fp32": True}, model=TIED.model),
    "sharded": Case(config={"gated_linear_unit": True}, ddp=SHARDED),
    "sharded bf16": Case(dtype=torch.bfloat16, ddp={"grad_reduce_in_fp32": True, **SHARDED}),
    # The few parameters that z does not split end before the last data-parallel ranks' shares of the optimizer begin.
    "empty shards": replace(LLAMA, ddp=SHARDED),
    # Embeddings and output layer have a learning rate of their own, and Megatron's keys of groups do not tell.
    "decoupled": replace(LLAMA, optimizer=(decoupled := {"decoupled_lr": 0.1})),
    "decoupled sharded": replace(LLAMA, ddp=SHARDED, optimizer=decoupled),
    # Which counts no steps, and of whose state Megatron makes none to load into.
    "sgd": replace(LLAMA, optimizer={"optimizer": "sgd", "lr": 0.1}),
    # Ranks of y have the same heads, and all ranks of x and y the same norms of queries and keys.
    "norms of heads": replace(LLAMA, config={**LLAMA.config, "num_query_groups": 1, "qk_layernorm": True}),
    # All that is trained is split over z, so that Megatron's optimizer of all else has nothing.
    "attention alone": (attention := replace(LLAMA, frozen=("norm", "mlp", "embedding", "output"))),
    "attention alone sharded": replace(attention, ddp=SHARDED),
    "pipeline": TIED.on(None, pipeline=2, micro_batches=2),
    # The last stage has a copy of the word embeddings.
    "predicting pipeline": Case(
        config={"mtp_num_layers": 1}, model={"position_embedding_type": "rope"}, pipeline=2, micro_batches=2
    ),
}
STAGES = 2
OVER = [{"settings": settings, "context": 2} for settings in (Settings(1, 1, 2), Settings(2))]
"""Places where two ranks share every sequence."""
ROUTES: dict[str, tuple[Any, list[Any]]] = {
    "2121": (Settings(2, 1, 2), [Settings(2, 1, 2), Settings(1, 2, 1), None, STAGES]),
    "112": (Settings(1, 1, 2), [Settings(1, 2, 1), Settings(2, 1, 1)]),
    "1212": (Settings(1, 2, 1), [Settings(2, 1, 2, "replicated")]),
    "stock": (None, [Settings(1, 2, 1), Settings(1, 2, 2), STAGES]),
    "instances": (
        {"settings": Settings(1, 1, 2), "ddp": {**SHARDED, "num_distributed_optimizer_instances": 2}},
        [Settings(2)],
    ),
    "shared": (OVER[0], [OVER[1], Settings(1, 2, 2), None]),
}
"""From which settings to which; None is stock Megatron of tensor-parallel size 2, `STAGES` gx = 2 on each of two pipeline stages."""
TAKEN = {
    "llama": ["2121", "1212", "stock"],
    "empty shards": ["112", "shared", "instances"],
    "decoupled": ["112", "1212"],
    "decoupled sharded": ["112"],
    "sgd": ["112"],
    "norms of heads": ["1212"],
    "attention alone": ["112", "1212"],
    "pipeline": ["112", "stock"],
    "predicting pipeline": ["112"],
}
"""Routes by case; others go from 2121."""
SOME = {
    "tied 2121": [0, 2],
    "llama 1212": [0],
    "bf16 2121": [1],
    "sharded 2121": [2],
    "sharded bf16 2121": [3],
    "empty shards shared": [0],
    "empty shards instances": [0],
    "decoupled 1212": [0],
    "decoupled sharded 112": [0],
    "sgd 112": [0],
    "norms of heads 1212": [0],
    "attention alone 112": [0],
    "pipeline stock": [0],
    "predicting pipeline 112": [1],
}
"""Routes in every run, and which of their ends; but for the sharded case's, which `empty shards` has, too."""


def start(case: Case) -> tuple[Any, Any]:
    """A model and its optimizer."""
    model = training.build(case)
    half = case.dtype == torch.bfloat16
    config = OptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": 1e-2,
            "clip_grad": 0.5,
            "weight_decay": 0.1,
            "params_dtype": case.dtype,
            "bf16": half,
            **case.optimizer,
        },
        use_distributed_optimizer=(split := bool(case.ddp.get("use_distributed_optimizer"))),
    )
    optimizer = get_megatron_optimizer(config, [model], use_gloo_process_groups=split)
    model.module.config.finalize_model_grads_func = finalize_model_grads
    model.module.config.grad_scale_func = optimizer.scale_loss
    return model, optimizer


def steps(case: Case, model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Losses and norms of some steps."""
    told = []
    for step in range(first, last):
        for group in optimizer.param_groups:
            group["lr"] = group["max_lr"]  # as Megatron's scheduler of a constant rate
        model.zero_grad_buffer()
        optimizer.zero_grad()
        told.append(training._step(case, model, step))
        told.append(float(optimizer.step()[1]))
    return told


def state(model: Any, optimizer: Any, is_loading: bool = False) -> dict[str, Any]:
    """The state that Megatron's scripts save and load."""
    metadata = {**METADATA, "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    weights = model.module.sharded_state_dict(metadata=metadata)
    found = {"model": weights}
    return {**found, "optimizer": optimizer.sharded_state_dict(found, is_loading=is_loading, metadata=metadata)}


def on(
    case: Case, place: Settings | None | int | tuple[Settings | None, tuple[int, int | None]] | dict[str, Any]
) -> Case:
    if isinstance(place, dict):
        return case.on(**place)
    if isinstance(place, tuple):  # and where experts are
        return case.on(place[0], experts=place[1])
    return case.on(Settings(2), pipeline=STAGES) if place == STAGES else case.on(place, tensor=2)


def interrupted(case: Case, folder: str, settings: Any, others: list[Any]) -> dict[str, list[float]]:
    """Three steps at once on `settings`, and the last two of them from a checkpoint elsewhere."""
    gloo = bool(case.ddp.get("use_distributed_optimizer"))
    with training.parallel(on(case, settings), gloo), pytest.MonkeyPatch.context() as patch:
        if on(case, settings).settings is None:
            # Stock Megatron saves by itself.
            patch.setattr(ChainedOptimizer, "sharded_state_dict", ChainedOptimizer.sharded_state_dict.__wrapped__)
        model, optimizer = start(on(case, settings))
        told = {"first": steps(case, model, optimizer, 0, 1)}
        dist_checkpointing.save(state(model, optimizer), folder, validate_access_integrity=True)
        told["whole"] = steps(case, model, optimizer, 1, 3)
    for other in others:
        with training.parallel(on(case, other), gloo):
            model, optimizer = start(on(case, other))
            loaded = dist_checkpointing.load(state(model, optimizer, True), folder)
            model.module.load_state_dict(loaded["model"])
            optimizer.load_state_dict(loaded["optimizer"])
            told[str(other)] = steps(case, model, optimizer, 1, 3)
    return told


def all_routes(wanted: list[str], folder: str, every: bool) -> dict[str, dict[str, list[float]]]:
    training.on_cpu()
    # In its place Megatron starts a process that imports everything again, for saving in the background.
    filesystem_async._results_queue = queue.Queue()
    found = {}
    for name in wanted:
        for route in TAKEN.get(name, ["2121"]):
            settings, others = ROUTES[route]
            if not every:
                others = [others[at] for at in SOME.get(f"{name} {route}", [])]
                if not others:
                    continue
            if CASES[name].pipeline > 1:
                others = [one for one in others if not isinstance(one, Settings) or one.gz == 1]
            place = Path(folder, f"{name}-{route}".replace(" ", "-"))
            if dist.get_rank() == 0:
                place.mkdir()
            dist.barrier()
            checkpoint.install()
            found[f"{name} {route}"] = interrupted(CASES[name], str(place), settings, others)
            checkpoint.uninstall()
    return found


@pytest.fixture(scope="module", params=[False, thorough(True)], ids=["some", "every"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return run_ranks(
        all_routes, 4, list(chosen(request, CASES)), str(tmp_path_factory.mktemp("checkpoints")), request.param
    )


LESS = {"sharded", "bf16", "decoupled", "pipeline", "attention alone sharded"}


@pytest.mark.parametrize("name", names(CASES, CASES.keys() - LESS))
def test_a_checkpoint_goes_on_anywhere(runs: list[dict], name: str) -> None:
    tolerance = 1e-2 if "bf16" in name else 2e-5
    routes = {route: told for route, told in runs[0].items() if route.rsplit(" ", 1)[0] == name}
    assert routes
    for route, told in routes.items():
        for other, losses in told.items():
            if other not in ("first", "whole"):
                assert np.allclose(losses, told["whole"], rtol=tolerance), (route, other, losses, told["whole"])


needs_script = pytest.mark.skipif(bool(harness.missing()), reason=harness.missing())


_BACKGROUND = ["--async-save", "--use-persistent-ckpt-worker"]  # without the second Megatron saves at once after all


@needs_script
@pytest.mark.parametrize("asynchronous", [[], _BACKGROUND], ids=["at once", "in the background"])
def test_the_pretrain_script(tmp_path: Path, asynchronous: list[str]) -> None:
    """A checkpoint after 4 iterations on (2, 1, 2, 1) goes on on (1, 2, 1, 2) and in stock Megatron of two tensor ranks; its own, with us."""
    common = [*harness.CPU, *harness.MODEL, *harness.MOCK, "--train-iters", "8"]
    impl = ["--tensor-model-parallel-impl", "axonn3d"]
    ours, theirs = str(tmp_path / "ours"), str(tmp_path / "theirs")
    save, load = [*asynchronous, "--save-interval", "4", "--exit-interval", "4", "--save"], ["--load"]
    found = harness.run(
        Path(harness.CHECKOUT, "pretrain_gpt.py"),
        {
            "whole": (1, common),
            "first": (4, [*common, *impl, "--axonn-gx", "2", "--axonn-gz", "2", *save, ours]),
            "elsewhere": (4, [*common, *impl, "--axonn-gy", "2", *load, ours]),
            "stock": (2, [*common, "--tensor-model-parallel-size", "2", *load, ours]),
            "stock saves": (2, [*common, "--tensor-model-parallel-size", "2", *save, theirs]),
            "loaded": (4, [*common, *impl, "--axonn-gx", "2", "--axonn-gz", "2", *load, theirs]),
        },
    )
    first, last = (
        {what: found["whole"][what][part] for what in ("losses", "norms")} for part in (slice(4), slice(4, 8))
    )
    for name in ("first", "elsewhere", "stock", "stock saves", "loaded"):
        wanted = first if name in ("first", "stock saves") else last
        assert harness.difference(wanted, found[name]) < 1e-5, (name, found[name])


@needs_script
@pytest.mark.parametrize("optimizer", [[], ["--use-distributed-optimizer"]], ids=["whole", "split"])
def test_files_of_format_torch(tmp_path: Path, optimizer: list[str]) -> None:
    """They go on on the grid that saved them; stock Megatron reads those of a grid that splits as it does, over x alone."""
    common = [*harness.CPU, *harness.MODEL, *harness.MOCK, *optimizer, "--train-iters", "8", "--ckpt-format", "torch"]
    impl = ["--tensor-model-parallel-impl", "axonn3d"]
    xz, y, x = (
        [*common, *impl, *grid] for grid in (["--axonn-gx=2", "--axonn-gz=2"], ["--axonn-gy=2"], ["--axonn-gx=2"])
    )
    save, load = (["--save-interval", "4", "--exit-interval", "4", "--save"], ["--load"])
    stock = (4, [*common, "--tensor-model-parallel-size=2", *load, str(tmp_path / "x")])
    found = harness.run(
        Path(harness.CHECKOUT, "pretrain_gpt.py"),
        {
            "whole": (1, common),
            "xz saves": (4, [*xz, *save, str(tmp_path / "xz")]),
            "xz loads": (4, [*xz, *load, str(tmp_path / "xz")]),
            "y is refused": (4, [*y, *load, str(tmp_path / "xz")]),
            "x saves": (4, [*x, *save, str(tmp_path / "x")]),
            "x loads": (4, [*x, *load, str(tmp_path / "x")]),
            "xz is refused": (4, [*xz, *load, str(tmp_path / "x")]),
            # Megatron 0.16 itself cannot load its split optimizer's state in fp32 from this format.
            **({} if optimizer else {"stock loads": stock}),
        },
    )
    for name, result in found.items():
        if name.endswith("refused"):
            assert "files of format torch are of" in result["error"] and "torch_dist" in result["error"], result
        elif name != "whole":
            part = slice(4) if name.endswith("saves") else slice(4, 8)
            wanted = {what: found["whole"][what][part] for what in ("losses", "norms")}
            assert harness.difference(wanted, result) < 1e-5, (name, result)


def test_without_a_file_for_this_rank_the_exit_code_is_not_zero(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_groups, "settings", lambda: Settings(2, 1, 4))

    def load(load_dir: str, args: Any, code: int | None = None) -> None:
        raise SystemExit(code)

    take = checkpoint_training._of_these_ranks(load)
    for missing, code, told in ((False, None, 2), (True, None, None), (False, 3, 3)):
        args = Namespace(exit_on_missing_checkpoint=missing, pipeline_model_parallel_size=1)
        with pytest.raises(SystemExit) as stopped:
            take("saved", args, code)
        assert stopped.value.code == told
    assert "--load saved: files of format torch are of the ranks that saved them" in capsys.readouterr().err


def test_files_of_experts_that_other_ranks_split_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_groups, "settings", lambda: Settings(2, 1, 1))
    saved = Namespace(axonn_gx=2, axonn_gy=1, axonn_gz=1, axonn_layout=None, expert_tensor_parallel_size=1)
    here = Namespace(pipeline_model_parallel_size=1, num_experts=4, expert_model_parallel_size=1)
    for args in (saved, here):
        vars(args).update(vars(here))

    def load(load_dir: str, args: Any) -> tuple[Any, ...]:
        return {"args": saved}, None, False, Namespace(name="LEGACY")

    here.expert_tensor_parallel_size = 1
    checkpoint_training._of_these_ranks(load)("saved", here)
    here.expert_tensor_parallel_size = 2
    with pytest.raises(SystemExit):
        checkpoint_training._of_these_ranks(load)("saved", here)
    said = capsys.readouterr().err
    assert "of gx, gy, gz = 2, 1, 1, experts over 1 rank, split over 1, not gx, gy, gz = 2, 1, 1; load them" in said


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"axonn_gx": 2, "axonn_gy": 2, "axonn_gz": 1, "axonn_layout": None}, None),
        (
            {"axonn_gx": 2, "axonn_gy": 2, "axonn_gz": 1, "axonn_layout": "replicated"},
            "are of gx, gy, gz = 2, 2, 1 in the replicated layout, not gx, gy, gz = 2, 2, 1 in the scattered layout;",
        ),
        ({"tensor_model_parallel_size": 4}, "are of gx, gy, gz = 4, 1, 1, not gx"),
        (
            {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2},
            "gx, gy, gz = 4, 1, 1 on each of 2 pipeline stages, not gx",
        ),
    ],
)
def test_files_of_another_grid_are_refused(
    saved: dict[str, Any],
    words: str | None,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_groups, "settings", lambda: Settings(2, 2))
    # With --ckpt-format torch_dist, the default, Megatron reads them, too, and compares no sizes.
    args = Namespace(use_dist_ckpt=True, load="saved", pipeline_model_parallel_size=1, finetune=False)
    read = ({"args": Namespace(**{"pipeline_model_parallel_size": 1, **saved})}, "", False, Namespace(name="LEGACY"))
    load = checkpoint_training._of_these_ranks(lambda load_dir, args: read)
    if words is None:
        assert load("saved", args) == read
        return
    with pytest.raises(SystemExit):
        load("saved", args)
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (
            {"distrib_optim_sharding_type": "dp_reshardable"},
            "of type dp_reshardable, which only the ranks that saved it can read; save it with",
        ),
        ({}, "it was saved without --use-distributed-optimizer, .*; load it without that, or with --no-load-optim"),
    ],
)
def test_states_of_another_form_are_refused(
    metadata: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    take = checkpoint_optimizer._on_any_ranks(None)
    with pytest.raises(SystemExit):
        take(None, {}, True, metadata=metadata)
    assert re.search(words, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("module", "name"),
    [(checkpoint, "CudaRNGStatesTracker"), (transformer_engine, "TECudaRNGStatesTracker")],
    ids=["megatron's", "transformer engine's"],
)
def test_random_states_of_another_grid_are_left(module: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[dict[str, int]] = []
    kind = type("Tracker", (), {"states_": {}, "set_states": lambda self, states: loaded.append(states)})
    monkeypatch.setattr(module, name, kind)
    checkpoint.install()
    try:
        tracker: Any = kind()
        tracker.states_ = {"model-parallel-rng": 1, "axonn-2-1-scattered": 2}
        tracker.set_states({"model-parallel-rng": 3})
        tracker.set_states({"model-parallel-rng": 3, "axonn-1-2-scattered": 4})
        assert not loaded
        tracker.set_states({"model-parallel-rng": 3, "axonn-2-1-scattered": 4})
        assert len(loaded) == 1
    finally:
        checkpoint.uninstall()


LAYOUTS = {
    "column": Layout((24, 8), ((0, "x"), (1, "y")), over_z=True),
    "row": Layout((8, 24), ((0, "y"), (1, "x")), over_z=True),
    "gated": Layout((48, 8), ((0, "x"), (1, "y")), parts=2, over_z=True),
    "gated bias": Layout((48,), ((0, "x"), (0, "y")), parts=2),
    "norm": Layout((8,), ((0, "y"),)),
    "whole": Layout((5, 3)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pieces_make_the_whole(name: str) -> None:
    layout = LAYOUTS[name]
    whole = torch.randn(layout.shape)
    for world in (1, 2, 4, 6, 8, 12):
        for grid in factorisations(world):
            if layout.padded(grid) != layout.shape or (layout.over_z and layout.block_shape(grid)[0] % grid.gz):
                continue
            made, main = torch.full(layout.shape, torch.nan), torch.zeros(layout.shape)
            for rank in range(world):
                at = grid.coordinates(rank)
                found = checkpoint.pieces(layout, grid, at)
                shard = layout.shard(whole, grid, at).reshape(-1, *layout.block_shape(grid)[1:])
                size = layout.shape[0] // found.count
                for piece, number in zip(shard.split(size), found.numbers, strict=True):
                    where = [slice(number * size, (number + 1) * size)]
                    for dim, index, count in found.offsets:
                        width = layout.shape[dim] // count
                        where.append(slice(index * width, (index + 1) * width))
                    made[tuple(where)] = piece
                    main[tuple(where)] += found.replica == (0, 0)
            assert torch.equal(made, whole) and (main == 1).all(), grid


def test_shares_that_are_not_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="a weight of 6 rows does not divide by gz = 4"):
        checkpoint.pieces(LAYOUTS["column"], Grid(gx=4, gz=4), {"x": 0, "y": 0, "z": 0, "data": 0})


@pytest.mark.parametrize("nested", [False, True])
def test_two_optimizers_as_one_and_back(nested: bool) -> None:
    def part(number: int, decays: list[float]) -> dict[str, Any]:
        groups = [
            {
                "params": [i],
                "wd_mult": wd,
                "lr_mult": 1.0,
                "is_expert_parallel": bool(number),
                "is_decoupled_lr": False,
                "lr": 0.5,
            }
            for i, wd in enumerate(decays)
        ]
        inner = {
            "param_groups": groups,
            "state": {0: {"exp_avg": f"{number} 0"}, 1: {"exp_avg": f"{number} 1"}, "common_step": 7},
        }
        scaled = {
            "optimizer": inner,
            "fp32_from_fp16_params": [[f"{number} {i}"] for i, _ in enumerate(decays)],
            "grad_scaler": 3,
        }
        return scaled if nested else inner

    parts = [part(0, [1.0, 0.0]), part(1, [1.0])]
    joined = checkpoint_optimizer.join(parts)
    inner = joined["optimizer"] if nested else joined
    assert [(one["wd_mult"], one["is_expert_parallel"]) for one in inner["param_groups"]] == [
        (1.0, False),
        (0.0, False),
    ]
    assert all("params" not in one for one in inner["param_groups"]) and inner["state"]["common_step"] == 7
    now = [(one["optimizer"] if nested else one)["param_groups"] for one in parts]
    assert checkpoint_optimizer.separate(joined, now) == parts


@pytest.mark.parametrize("nested", [False, True])
def test_two_optimizers_that_stock_megatron_saved_are_one(nested: bool) -> None:
    """Two of a chain have no tensors under their numbers, whose names are the same as those of one."""

    def part(number: int, decays: list[float]) -> dict[str, Any]:
        kept = {"lr_mult": 1.0, "is_expert_parallel": bool(number), "is_decoupled_lr": False, "lr": 0.5}
        inner = {"param_groups": [{**kept, "wd_mult": wd, "params": []} for wd in decays], "state": {"common_step": 7}}
        return {"optimizer": inner, "fp32_from_fp16_params": [[]], "grad_scaler": 3} if nested else inner

    state: dict[str, Any] = {"state": {0: "a", 1: "b"}, "param_groups": [{"params": [0]}, {"params": [1]}]}
    here = {"optimizer": state, "fp32_from_fp16_params": [["c"], ["d"]]} if nested else state
    found = checkpoint_optimizer.as_of_one({0: part(0, [1.0, 0.0]), 1: part(1, [1.0]), **here})
    inner = found["optimizer"] if nested else found
    assert inner["state"] == {0: "a", 1: "b", "common_step": 7}
    assert [(one["wd_mult"], one["params"], one["lr"]) for one in inner["param_groups"]] == [
        (1, [0], 0.5),
        (0, [1], 0.5),
    ]
    assert not nested or (found["grad_scaler"] == 3 and found["fp32_from_fp16_params"] == [["c"], ["d"]])
    of_kinds = {0: part(0, [1.0]), 1: part(1, [0.0])}
    assert checkpoint_optimizer.as_of_one(dict(of_kinds)) == of_kinds


def test_groups_that_were_not_saved_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    """As with --decoupled-lr in this run alone."""
    kept = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False, "is_expert_parallel": False}
    now = [[{**kept, "params": [0]}], [{**kept, "is_decoupled_lr": True, "params": [0]}]]
    with pytest.raises(SystemExit):
        checkpoint_optimizer.separate({"param_groups": [kept], "state": {}}, now)
    said = capsys.readouterr().err
    assert "with wd_mult = 1.0, lr_mult = 1.0, is_decoupled_lr = True" in said and "--no-load-optim" in said


def test_an_optimizer_of_nothing_leaves_no_list_in_a_checkpoint() -> None:
    """As Muon's of what z does not split: stored, it would not fit where one optimizer has all."""
    kept = {"wd_mult": 1.0, "lr_mult": 1.0, "is_decoupled_lr": False}
    groups = [{**kept, "params": params, "is_expert_parallel": bool(params)} for params in ([], [0])]
    parts = [
        {
            "optimizer": {"param_groups": [group], "state": {}},
            "fp32_from_fp16_params": [["master"] * len(group["params"])],
        }
        for group in groups
    ]
    joined = checkpoint_optimizer.join(parts)
    assert joined["fp32_from_fp16_params"] == [["master"]]
    found = checkpoint_optimizer.separate(joined, [[group] for group in groups])
    assert [one["fp32_from_fp16_params"] for one in found] == [[[]], [["master"]]]


class _ByName:
    """Saved as the name of another's attribute."""

    def __init__(self, kind: type, name: str) -> None:
        self.call = getattr, (kind, name)

    def __reduce__(self) -> Any:
        return self.call


def test_enumerations_are_read_as_early_pythons_save_them_and_nothing_else_is(tmp_path: Path) -> None:
    """Python 3.11.2 has `getattr` and `signal.SIGTERM` in the arguments of every checkpoint."""
    enums.readable()
    file = tmp_path / "common.pt"
    torch.save(Namespace(attention_backend=_ByName(AttnBackend, "auto"), exit_signal=signal.SIGTERM), file)
    read = torch.load(file)
    assert read.attention_backend is AttnBackend.auto and read.exit_signal is signal.SIGTERM
    for kind, name in ((AttnBackend, "__init__"), (AttnBackend, "mro"), (Namespace, "_get_kwargs")):
        torch.save(_ByName(kind, name), file)
        with pytest.raises(pickle.UnpicklingError, match="no member of an enumeration"):
            torch.load(file)
