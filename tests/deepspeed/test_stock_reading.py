"""Runs of stock DeepSpeed go on on a grid, and back, with weights, optimizer states, schedule and counts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mixtral import modeling_mixtral  # noqa: F401  which ranks inherit

from axonn_plugins.cli.convert import main as convert
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common.complete import nothing_in
from axonn_plugins.hosts.deepspeed.checkpoint.stock_reading import OPTIMIZER
from axonn_plugins.hosts.deepspeed.checkpoint.stock_refusals import STATES
from axonn_plugins.hosts.deepspeed.checkpoint.to_stock import to_stock
from axonn_plugins.optim.loss_scale import LossScale
from axonn_tp.checkpoint.optimizer import optimizer_state, whole_pieces
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.state import model_state
from axonn_tp.checkpoint.training import write
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.test_checkpoint import ROUNDING, fresh
from tests.deepspeed.test_engine import GPT_PLAN, gpt, ids
from tests.deepspeed.training import Case, attempt, config_of, start, train, two_groups
from tests.distributed import run_ranks
from tests.matrix import chosen, names

AT = 3
"""Steps before a checkpoint."""
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}}}


def case(stage: int, dtype: str, grid: tuple[int, int, int] = (1, 1, 1), **changes: Any) -> Case:
    return Case(gpt, ids, grid, GPT_PLAN, stage, dtype, steps=AT + 2, **{"extra": dict(SCHEDULE), **changes})


class Mixture(nn.Module):
    """A mixture of transformers' that gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"vocab_size": 51, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
        config: Any = AutoConfig.for_model(
            "mixtral", **sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=4
        )
        self.model = AutoModelForCausalLM.from_config(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # noqa: D102
        logits = self.model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def alone(**system: Any) -> dict[str, Any]:
    """Weights that nothing splits."""
    return {"extra": {**SCHEDULE, "axonn": system}}


RATES: list[Any] = [lambda step: 1 / (step + 1), lambda step: 1 / (step + 2)]
GROUPED: dict[str, Any] = {"optimizer": "client", "groups": two_groups, "lambdas": RATES, "extra": {}}
FP16: dict[str, Any] = {
    "extra": {**SCHEDULE, "fp16": {"enabled": True, "initial_scale_power": 6, "loss_scale_window": 2}}
}
# Stock's own optimizers of 16 bits without ZeRO keep their states in another way, which is not written.
NOT_BACK = ("bf16 zero0", "bf16 zero0 offload")
# What stock saves on four ranks, and the grid and stage where it goes on.
MOVES = {
    "fp32 zero0": (case(0, "fp32"), case(0, "fp32", (2, 1, 2))),
    "fp32 zero1": (case(1, "fp32"), case(2, "fp32", (1, 2, 2))),
    "fp32 zero2 groups": (case(2, "fp32", **GROUPED), case(0, "fp32", (2, 2, 1), **GROUPED)),
    "bf16 zero1": (case(1, "bf16"), case(1, "bf16", (2, 1, 1))),
    "bf16 zero0": (case(0, "bf16"), case(1, "bf16", (1, 1, 4))),
    "fp16 zero2": (case(2, "fp16", **FP16), case(1, "fp16", (1, 1, 2), **FP16)),
}
UNSCALED = case(0, "fp16", **FP16), case(0, "fp16", (2, 1, 2), **FP16)
# The other systems of the block, without a grid.
ALONE = {
    "fp32 zero1 offload": (case(1, "fp32"), case(1, "fp32", **alone(offload_optimizer={}))),
    "bf16 zero0 offload": (case(0, "bf16"), case(2, "bf16", **alone(offload_optimizer={}))),
    "fp32 zero2 mixture": (
        replace(case(2, "fp32"), build=Mixture),
        replace(case(1, "fp32", **alone(ted={"expert": 2, "tensor": 2})), build=Mixture),
    ),
}
MOVES |= ALONE
BACK = {f"{name} and back": pair for name, pair in MOVES.items() if name not in NOT_BACK}
EVERY_RUN = {"fp32 zero2 groups", "fp16 zero2", "bf16 zero0 offload", "bf16 zero1 and back", "fp32 zero2 mixture"}


def begin_stock(run: Case, added: float = 0.0) -> Any:
    """An engine of stock DeepSpeed, whose weights are those of the run and so much."""
    model = run.model()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(added)
    config = config_of(run)
    del config["axonn"]
    keywords: dict[str, Any] = {"model_parameters": run.groups(model)[0]["params"]}
    if run.optimizer == "client":
        optimizer = run.make_optimizer(run.groups(model))
        assert run.lambdas is not None
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, run.lambdas)
        keywords = {"optimizer": optimizer, "lr_scheduler": scheduler}
    engine = deepspeed.initialize(model=model, config=config, **keywords)[0]
    assert type(engine) is deepspeed.DeepSpeedEngine
    return engine


def train_stock(engine: Any, steps: Any) -> list[float]:
    rank, world, losses = dist.get_rank(), dist.get_world_size(), []
    for step in steps:
        total = torch.zeros((), dtype=torch.float64)
        for micro in step:
            loss = engine(*(t.chunk(world)[rank] for t in micro))
            engine.backward(loss)
            engine.step()
            total += loss.detach().double() / len(step)
        dist.all_reduce(total)
        losses.append(total.item() / world)
    return losses


def go_on(run: Case, folder: str, **keywords: Any) -> Any:
    engine = fresh(run)
    path, client = engine.load_checkpoint(folder, **keywords)
    assert path is not None
    found = client, engine.global_steps, engine.get_lr(), train(engine, run.batches()[AT:])["losses"]
    engine.destroy()
    return found


def narrower() -> Any:
    model = gpt()
    del model.blocks[0].fc2.bias
    model.blocks[0].fc2.register_parameter("bias", None)
    return model


def to_a_grid(run: Case, there: Case, place: str, **keywords: Any) -> Any:
    engine = begin_stock(run)
    train_stock(engine, run.batches()[:AT])
    engine.save_checkpoint(place, client_state={"epoch": 4})
    rates = engine.get_lr()
    expected = {"epoch": 4}, AT, rates, train_stock(engine, run.batches()[AT:])
    engine.destroy()
    return expected, go_on(there, place, **keywords)


def and_back(run: Case, there: Case, place: str) -> Any:
    """A grid's checkpoint is converted, and stock goes on."""
    engine = start(there)
    train(engine, there.batches()[:AT])
    engine.save_checkpoint(place, "half", client_state={"epoch": 4})
    expected = {"epoch": 4}, AT, engine.get_lr(), train(engine, there.batches()[AT:])["losses"]
    engine.destroy()
    if dist.get_rank() == 0:
        options = ["--to", "deepspeed", "--ranks", str(dist.get_world_size()), "--zero", str(run.stage)]
        assert convert([f"{place}/half", f"{place}-stock", *options]) == 0
    dist.barrier()
    engine = begin_stock(run, 0.1)
    _, client = engine.load_checkpoint(f"{place}-stock")
    found = {"epoch": client["epoch"]}, engine.global_steps, engine.get_lr(), train_stock(engine, run.batches()[AT:])
    engine.destroy()
    return expected, found


def moved(folder: str, wanted: dict[str, tuple[Case, Case]]) -> dict[str, Any]:
    type(get_accelerator()).is_fp16_supported = lambda self: True
    return {
        name: attempt(and_back if name in BACK else to_a_grid, *pair, f"{folder}/{name}")
        for name, pair in wanted.items()
    }


def unscaled(folder: str) -> dict[str, Any]:
    """In fp16 without ZeRO: as DeepSpeed saves it, its weights alone, and as an older one would have."""
    type(get_accelerator()).is_fp16_supported = lambda self: True
    run, there = UNSCALED
    expected, found = to_a_grid(run, replace(there, stage=1), folder, load_optimizer_states=False)
    told = {"unscaled": attempt(go_on, there, folder), "unscaled weights": (expected[3][0], found[3][0])}
    file = next(Path(folder).glob(f"*/{STATES}"))
    dist.barrier()
    if dist.get_rank() == 0:
        torch.save(torch.load(file, weights_only=False) | {"ds_version": "0.18.2"}, file)
    dist.barrier()
    return told | {"scaled": attempt(go_on, there, folder)}


def otherwise(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    run, there = MOVES["fp32 zero1"]
    engine = begin_stock(run)
    train_stock(engine, run.batches()[:AT])
    engine.save_checkpoint(f"{folder}/fp32 zero1", client_state={"epoch": 4})
    engine.destroy()
    samo = case(1, "fp32", **alone(samo={"sparsity": 0.5}))
    found["pruned"] = attempt(go_on, samo, f"{folder}/fp32 zero1")
    found["weights"] = attempt(lambda: go_on(there, f"{folder}/fp32 zero1", load_module_only=True)[:2])
    sgd = replace(there, extra={"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}, stage=0)
    found["another optimizer"] = attempt(go_on, sgd, f"{folder}/fp32 zero1")
    found["another model"] = attempt(go_on, replace(there, build=narrower), f"{folder}/fp32 zero1")
    found |= unscaled(f"{folder}/fp16 zero0")
    for kind, file in (
        ("of stages", "layer_00-model_states.pt"),
        ("of tensor parallelism", "mp_rank_01_model_states.pt"),
    ):
        if dist.get_rank() == 0:
            (Path(folder) / kind / "one").mkdir(parents=True)
            (Path(folder) / kind / "one" / file).touch()
        dist.barrier()
        engine = start(there)
        found[kind] = attempt(engine.load_checkpoint, f"{folder}/{kind}", "one")
        engine.destroy()
    return found


@pytest.fixture(scope="module")
def moves(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(moved, 4, str(tmp_path_factory.mktemp("stock")), chosen(request, MOVES | BACK))


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(otherwise, 4, str(tmp_path_factory.mktemp("otherwise")))


@pytest.mark.parametrize("name", names(MOVES | BACK, EVERY_RUN))
def test_goes_on(name: str, moves: list[dict[str, Any]]) -> None:
    for rank in moves:
        assert not isinstance(rank[name], str), rank[name]
        expected, got = rank[name]
        assert got[:2] == expected[:2] and got[2] == pytest.approx(expected[2])
        assert got[3] == pytest.approx(expected[3], rel=ROUNDING[name[:4]])


def test_is_pruned(ranks: list[dict[str, Any]]) -> None:
    assert not isinstance(ranks[0]["pruned"], str), ranks[0]["pruned"]
    assert ranks[0]["pruned"][:2] == ({"epoch": 4}, AT)


def test_weights_alone(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["weights"] == ({"epoch": 4}, 0), ranks[0]["weights"]


def test_gradients_that_were_not_scaled(ranks: list[dict[str, Any]]) -> None:
    assert "gradients that were too small, in the end 128 times" in ranks[0]["unscaled"], ranks[0]["unscaled"]
    assert ranks[0]["unscaled weights"][1] == pytest.approx(ranks[0]["unscaled weights"][0], rel=1e-5)
    assert ranks[0]["scaled"][:2] == ({"epoch": 4}, AT), ranks[0]["scaled"]


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("another optimizer", "has betas and SGD has momentum; use the same optimizer"),
        ("another model", "which the model has not"),
        ("of stages", "load it under a PipelineModule"),
        ("of tensor parallelism", "was written with tensor parallelism"),
    ],
)
def test_refused(mistake: str, words: str, ranks: list[dict[str, Any]]) -> None:
    answers = {str(rank[mistake]).splitlines()[0] for rank in ranks}
    assert len(answers) == 1
    answer = answers.pop()
    assert answer.startswith("ConfigError: ") and one_sentence(answer) and words in answer, answer


@pytest.mark.parametrize("kind", ["dense", "pruned", "of plain PyTorch"])
def test_all_of_a_checkpoint_becomes_stocks(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """How far curricula are was left out; masks, of which stock knows nothing, are told; and the current folder has a name, too."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    shards, notes = model_state(model)
    states, kept = optimizer_state(optimizer, whole_pieces(model, optimizer))
    rest = {"counters": {"global_steps": 1}, "data": {"data_sampler": {"consumed_samples": 7}, "random_ltd": {"a": 1}}}
    notes = {"model": notes, "extra": {"epoch": 4}, "optimizer": kept, "samo": {"pruned": kind == "pruned"}, **rest}
    if alone := kind == "of plain PyTorch":
        notes |= {"extra": 4, "data": {}, "loss_scale": LossScale(8.0, growth_interval=100, steps=3).state_dict()}
    write(tmp_path / "one" / ("" if alone else "axonn"), shards | states, notes, Ranks(None))
    monkeypatch.chdir(tmp_path / "one")
    said = to_stock(Path("." if kind == "pruned" else "../one"), tmp_path / "stock", 2, 1)
    assert (tmp_path / "stock" / "latest").read_text() == "one"
    assert ("its masks do not go along" in said) == (kind == "pruned")
    saved = torch.load(tmp_path / "stock" / "one" / STATES, weights_only=False)
    assert saved["global_steps"] == 1 and saved["skipped_steps"] == 0
    if alone:
        file = tmp_path / "stock" / "one" / f"zero_pp_rank_1_{OPTIMIZER}"
        scaler = torch.load(file, weights_only=False)["optimizer_state_dict"]["loss_scaler"]
        assert saved["extra"] == 4 and (scaler.cur_scale, scaler.scale_window, scaler.cur_iter) == (8.0, 100, 3)
        return
    assert saved["data_sampler"] == {"consumed_samples": 7} and saved["random_ltd"] == {"a": 1} and saved["epoch"] == 4
    with pytest.raises(ConfigError, match="cannot be made"):
        to_stock(tmp_path / "one", tmp_path / "stock" / "latest" / "there", 2, 1)


def test_a_folder_without_checkpoints_is_told(tmp_path: Path) -> None:
    assert nothing_in(str(tmp_path / "typo")) == f"{tmp_path / 'typo'} does not exist: no checkpoint was loaded"
    assert nothing_in(str(tmp_path)) == f"there is no checkpoint in {tmp_path}: none was loaded"
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "mp_rank_00_model_states.pt").touch()
    assert nothing_in(str(tmp_path)).endswith("pass the tag that you mean: one")
    with pytest.raises(ConfigError, match="is itself a checkpoint; load it by load_checkpoint"):
        nothing_in(str(tmp_path / "one"))
