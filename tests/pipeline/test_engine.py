"""The engine against a serial run, in float64, on every division of 2 and 4 ranks, and of 8 among the thorough tests."""

from __future__ import annotations

import random
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.module import PipelineError

from axonn_plugins.autoload import activate
from axonn_plugins.config import ConfigError
from axonn_plugins.config.goldfish import Goldfish
from axonn_plugins.hosts.common.goldfish import LabelMask
from axonn_plugins.pipeline import watch
from axonn_plugins.pipeline.schedule import POLICIES, automatic_limit
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.pipeline.losing import stop_or_kill, survivors
from tests.pipeline.training import (
    Case,
    compare,
    difference,
    frozen,
    parameters,
    plain,
    ready,
    serial,
    sparse,
    start,
    tied,
    train,
    tuples,
)

activate()

from axonn_plugins.hosts.deepspeed.pipeline.batch import checkpoint_interval  # noqa: E402

CLOSE = 1e-10


def varying(microbatch: int) -> int:
    """Tokens of a microbatch, longer and shorter."""
    return (5, 9, 2, 14, 7)[microbatch % 5]


CASES: dict[int, dict[str, Case]] = {
    2: {
        "2 stages": Case(),
        "1f1b": Case(block={"schedule": "1f1b"}),
        "gpipe": Case(block={"schedule": "gpipe"}),
        "gpipe in rounds": Case(block={"schedule": "gpipe", "pipeline_limit": 2}, microbatches=5),
        "one microbatch": Case(tied, microbatches=1, optimizer="SGD", clip=0.05),
        "more microbatches than the limit": Case(microbatches=6),
        "limit 1": Case(block={"pipeline_limit": 1}, microbatches=3),
        "limit 5": Case(block={"pipeline_limit": 5}, microbatches=7),
        "tied, clipped": Case(tied, clip=0.05, microbatches=5),
        "tuples": Case(tuples, microbatches=3, optimizer="SGD"),
        "shapes that change": Case(tied, microbatches=7, tokens=varying),
        "checkpointing": Case(tied, block={"activation_checkpointing": "auto"}),
        "checkpointing by 2": Case(tuples, block={"activation_checkpointing": 2}),
        "DeepSpeed's checkpointing": Case(tuples, module={"activation_checkpoint_interval": 1}, tokens=varying),
        "DeepSpeed's checkpointing, partitioned": Case(
            tuples,
            module={"activation_checkpoint_interval": 1},
            extra={"activation_checkpointing": {"partition_activations": True}},
            optimizer="SGD",
        ),
        "tokens, DeepSpeed's checkpointing": Case(tied, module={"activation_checkpoint_interval": 2}, optimizer="SGD"),
        "times are printed": Case(extra={"wall_clock_breakdown": True, "steps_per_print": 1}),
        "uneven": Case(tied, partition="parameters"),
        "a frozen stage": Case(frozen, clip=0.05),
        "one stage": Case(tied, stages=1, microbatches=3),
        "SAMO": Case(tied, samo={"sparsity": 0.8, "exclude": ["1.up.weight"]}, microbatches=3, clip=0.05),
        "SAMO by layer": Case(samo={"sparsity": 0.9, "scope": "layer"}),
    },
    4: {
        "4 stages": Case(lambda: plain(7), stages=4, microbatches=6, optimizer="SGD"),
        "1 x 4": Case(tied, stages=1, microbatches=3, clip=0.05),
        "4 stages, tied, fewer microbatches than stages": Case(tied, stages=4, microbatches=3, clip=0.05),
        "2 x 2": Case(tied, microbatches=5, clip=0.05, tokens=varying),
        "sparse gradients, 2 x 2": Case(sparse, optimizer="SGD", clip=0.05),
        "4 stages, uneven, deterministic": Case(
            tied, stages=4, partition="type:Feed", block={"deterministic": True, "pipeline_limit": 6}, microbatches=9
        ),
        "SAMO, 2 x 2": Case(tied, samo={"sparsity": 0.8, "shard": True}, clip=0.05),
        "4 stages, 1f1b": Case(tuples, stages=4, block={"schedule": "1f1b"}, microbatches=5),
    },
    8: {
        "8 stages": Case(lambda: plain(9), stages=8, microbatches=5),
        "4 x 2": Case(lambda: tied(4), stages=4, microbatches=3),
        "2 x 4": Case(stages=2, microbatches=3, clip=0.05),
    },
}


def alive_at_most(case: Case) -> int:
    block: dict[str, Any] = case.block or {}
    default = automatic_limit(block.get("schedule", "message_driven"), case.stages, case.microbatches)
    return min(block.get("pipeline_limit", default), case.microbatches)


LEFT_OUT = {
    "2 stages",
    "gpipe",
    "more microbatches than the limit",
    "tied, clipped",
    "tuples",
    "shapes that change",
    "times are printed",
    "one stage",
    "4 stages",
    "4 stages, uneven, deterministic",
    "limit 1",
    "limit 5",
    "checkpointing by 2",
    "SAMO by layer",
    "1 x 4",
    "4 stages, 1f1b",
    "4 x 2",
    "2 x 4",
}
"""Of what others show as well."""


@pytest.mark.parametrize(("ranks", "every"), [(2, False), (4, False), *(thorough(n, True) for n in CASES)])
def test_equals_a_serial_run(ranks: int, every: bool) -> None:
    cases = {name: case for name, case in CASES[ranks].items() if every or name not in LEFT_OUT}
    for stage, found in enumerate(run_ranks(compare, ranks, cases)):
        for name, (loss, weight, alive) in found.items():
            assert loss < CLOSE and weight < CLOSE, f"{name} on rank {stage}: {loss}, {weight}"
            assert 1 <= alive <= alive_at_most(CASES[ranks][name]), name


def test_policies_are_all_tried() -> None:
    tried = {
        (case.block or {}).get("schedule", "message_driven") for cases in CASES.values() for case in cases.values()
    }
    assert tried == set(POLICIES)


BESIDE: dict[str, Case] = {
    "fp32": Case(tied, dtype="fp32", microbatches=5),
    "fp32, ZeRO-1": Case(tied, dtype="fp32", stage=1, clip=0.3),
    "bf16": Case(dtype="bf16", stage=1, clip=0.3),
    "bf16, stage 0": Case(dtype="bf16"),
    "fp16, ZeRO-1": Case(dtype="fp16", stage=1),
    "dynamic": Case(tied, dtype="fp32", tokens=varying, module={"dynamic_shape": True}),
}


BESIDE_IN_EVERY_RUN = ("fp32, ZeRO-1", "bf16, stage 0", "dynamic")
"""fp16 is compared with stock in test_overflow.py."""


def beside_stock(cases: dict[str, Case]) -> dict[str, Any]:
    ready()
    found = {}
    for name, case in cases.items():
        sides = []
        for block in (None, {}):
            one = replace(case, block=block)
            engine = start(one)
            losses = train(engine, one)
            evaluated = engine.eval_batch(iter(one.batches(4)[0][engine.grid.data_parallel_id]))
            assert evaluated.dim() == int(not engine.is_last_stage())
            sides.append((type(engine).__name__, [*losses, evaluated.item()], parameters(engine)))
            if block is not None:
                refusals(engine)
                all_losses(engine, one, evaluated.item())
            engine.destroy()
        (stock, theirs, old), (name_of_ours, ours, new) = sides
        assert (stock, name_of_ours) == ("PipelineEngine", "MessageDrivenEngine")
        found[name] = (theirs, ours, all(torch.equal(old[key], new[key]) for key in old))
    return found


def all_losses(engine: Any, case: Case, mean: float) -> None:
    """Each microbatch's, on every stage, where stock ends in an AttributeError; what is no loss is refused on all."""
    data = case.batches(4)[0][engine.grid.data_parallel_id]
    found = engine.eval_batch(iter(data), reduce_output=None)
    assert found.shape == (case.microbatches,)
    total = found.double().mean()
    dist.all_reduce(total)
    assert total.item() / dist.get_world_size() == pytest.approx(mean, rel=0.01)
    outputs = {"compute_loss": False, "reduce_output": None}
    wanted = engine.eval_batch(iter(data), **outputs)
    engine._label_mask = LabelMask(Goldfish(k=2, evaluation=True))
    same = engine.eval_batch(iter(data), **outputs)
    engine._label_mask = None
    assert engine.is_last_stage() == (wanted is not None)
    assert all(map(torch.equal, wanted or (), same or ())), "the goldfish loss weighs no outputs"
    engine.module.loss_fn = lambda outputs, labels: outputs
    with pytest.raises(ConfigError, match="no single numbers, .* pass bcast_loss=False"):
        engine.eval_batch(iter(data), reduce_output=None)


def refusals(engine: Any) -> None:
    for call in (engine.forward, engine.backward, engine.step):
        with pytest.raises(PipelineError, match="Only train_batch"):
            call()


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_equals_stock_bitwise(every: bool) -> None:
    cases = {name: case for name, case in BESIDE.items() if every or name in BESIDE_IN_EVERY_RUN}
    for found in run_ranks(beside_stock, 4, cases):
        for name, (theirs, ours, same) in found.items():
            # Stock adds the losses of microbatches in their own type, which in 16 bits rounds what is reported.
            close = theirs if name.startswith(("fp32", "dynamic")) else pytest.approx(theirs, rel=0.01)
            assert same and ours == close, f"{name}: {theirs} and {ours}"


def half_precision() -> dict[str, Any]:
    """Stage 0 in fp16, where stock is no reference, beside the serial run in float64; SGD shows a wrong scale."""
    ready()
    case = Case(dtype="fp16", optimizer="SGD", microbatches=3, steps=3)
    engine = start(case)
    losses = train(engine, case)
    wanted, weights = serial(case, 1)
    start_weights = serial(replace(case, steps=0), 1)[1]
    moved = max(float((weights[name] - start_weights[name]).abs().max()) for name in parameters(engine))
    found = {"losses": losses, "wanted": wanted, "far": difference(parameters(engine), weights), "moved": moved}
    engine.destroy()
    return found


def records() -> dict[str, Any]:
    """Events, and the same bits with delays in every message."""
    ready()
    found: dict[str, Any] = {}
    for name, block in (("plain", {}), ("deterministic", {"deterministic": True})):
        case = Case(tied, microbatches=6, block={**block, "pipeline_limit": 4})
        runs = []
        for delays in (False, True):
            engine = start(case)
            engine.record_events()
            if delays:
                delay_messages(engine)
            runs.append((train(engine, case), parameters(engine)))
            events = engine.events
            engine.destroy()
        found[name] = runs[0][0] == runs[1][0] and all(torch.equal(runs[0][1][k], runs[1][1][k]) for k in runs[0][1])
    found["kinds"] = Counter(event.kind for event in events)
    found["ordered"] = all(a.end <= b.end and a.start <= a.end for a, b in zip(events, events[1:], strict=False))
    return found


def delay_messages(engine: Any) -> None:
    wire = next(iter(engine._transport._outgoing.values())).wire
    original, draw = wire.send, random.Random(dist.get_rank())

    def send(*arguments: Any) -> Any:
        time.sleep(draw.choice([0, 0.001, 0.01]))
        return original(*arguments)

    wire.send = send


def resumed(folder: str, stages: tuple[int, ...]) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more: by the same engine, and from the checkpoint by ours, by stock and on other stages."""
    ready()
    found: dict[str, Any] = {}
    for stage in stages:
        case = Case(tied, dtype="fp32", stage=stage, steps=4, block={})
        for writer in ("ours", "stock"):
            engine = start(replace(case, block=None if writer == "stock" else {}))
            train(engine, case, range(2))
            engine.save_checkpoint(folder, tag=f"{writer}{stage}")
            dist.barrier()
            on = train(engine, case, range(2, 4))
            engine.destroy()
            for reader in ("ours", "stock"):
                engine = start(replace(case, block=None if reader == "stock" else {}))
                train(engine, case, range(1))
                engine.load_checkpoint(folder, tag=f"{writer}{stage}")
                found[f"{writer} to {reader}, stage {stage}"] = (on, train(engine, case, range(2, 4)))
                engine.destroy()
        engine = start(replace(case, stages=1))
        with pytest.raises(ConfigError, match="was written on 2 stages, .* and this run has 1; use 2, or load_opt"):
            engine.load_checkpoint(folder, tag=f"ours{stage}")
        engine.load_checkpoint(folder, tag=f"ours{stage}", load_optimizer_states=False)
        if stage == 1:
            misread(folder, case)
        whole, half = parameters(engine), start(case)
        half.load_checkpoint(folder, tag=f"ours{stage}")
        found[f"weights, stage {stage}"] = (all(torch.equal(whole[k], p) for k, p in parameters(half).items()), True)
        engine.destroy(), half.destroy()
    case = Case(frozen, stage=1, offload={})  # its first stage steps by nothing
    engine = start(case)
    train(engine, case, [1])
    engine.save_checkpoint(folder, tag="frozen")
    engine.destroy()
    engine = start(replace(case, stages=1))
    engine.load_checkpoint(folder, tag="frozen")
    found["a frozen stage"] = (engine.global_steps == 1, True)
    engine.destroy()
    return found


def misread(folder: str, case: Case) -> None:
    """ZeRO's states for an optimizer of ours, and a universal checkpoint that is not there."""
    engine = start(replace(case, offload={"bucket_size": 2048}))
    with pytest.raises(ConfigError, match="optimizer state is of another wrapper .* load_optimizer_states=False"):
        engine.load_checkpoint(folder, tag="stock1")
    engine.destroy()
    engine = start(replace(case, extra={"checkpoint": {"load_universal": True}}))
    with pytest.raises(ValueError, match="latest_universal does not exist"):
        engine.load_checkpoint(folder)
    engine.destroy()


def test_fp16_at_stage_0() -> None:
    for found in run_ranks(half_precision, 2):
        assert found["far"] < 0.05 * found["moved"], found
        assert found["losses"] == pytest.approx(found["wanted"], rel=5e-3)


def test_delays_change_no_bit_and_events_are_kept() -> None:
    for stage, found in enumerate(run_ranks(records, 2)):
        assert found["plain"] and found["deterministic"] and found["ordered"]
        kinds = found["kinds"]
        assert kinds["forward"] == kinds["backward"] == kinds["send"] == 6
        assert (
            all(kinds[kind] == 1 for kind in ("tied", "reduce", "optimizer", "loss"))
            and kinds["wait"] + kinds["transit"] > 0
        ), stage


@pytest.mark.parametrize("stage", [thorough(0), 1])
def test_checkpoints_are_deepspeeds(stage: int, tmp_path: Path) -> None:
    for found in run_ranks(resumed, 2, str(tmp_path), (stage,)):
        for name, (on, again) in found.items():
            assert on == again, name


KILLED = Case(tied, stages=4, microbatches=6, dtype="fp32", stage=1, clip=0.3, steps=4)


def stage_is_killed(when: str, folder: str) -> str:
    """Rank 1 of 4 is killed in the third batch, after a checkpoint."""
    watch._ANSWER_SECONDS = 4.0  # type: ignore[misc]
    ready()
    engine = start(KILLED)
    train(engine, KILLED, range(2))
    engine.save_checkpoint(folder)
    name = "_backward_microbatch" if when == "in the pipeline" else "_reduce_gradients"
    original = getattr(engine, name)

    def dies(*arguments: Any) -> Any:
        if dist.get_rank() == 1 and (not arguments or arguments[0] == 3):
            stop_or_kill("kill")
        return original(*arguments)

    setattr(engine, name, dies)
    for _ in range(3):
        train(engine, KILLED, range(2, 3))
    return "went on"


def one_pipeline_fails() -> str:
    """A batch of one of two pipelines cannot be read, which its script catches, while the other is still computing."""
    ready()
    case = Case(dtype="fp32", microbatches=4)
    engine = start(case)
    train(engine, case, range(1))
    fails, original = engine.grid.data_parallel_id == 0, engine._forward_microbatch

    def slow(*arguments: Any) -> Any:
        if fails and engine.is_first_stage():
            raise OSError("no such shard")
        time.sleep(0.5)
        return original(*arguments)

    engine._forward_microbatch, began, words = slow, time.monotonic(), "trained"
    try:
        train(engine, case, range(1, 2))
    except Exception as error:
        words = f"{type(error).__name__}: {error}"
    took, store = time.monotonic() - began, dist.distributed_c10d._get_default_store()
    with suppress(RuntimeError):  # rank 0, which holds the store, has ended
        store.set(f"said/{dist.get_rank()}", "")
        while fails and time.monotonic() - began < 25 and not store.check([f"said/{rank}" for rank in range(4)]):
            time.sleep(0.1)
    return f"{words} after {'a while' if took < 20 else 'all that time'}"


def test_pipelines_beside_one_that_failed_do_not_wait_for_its_gradients() -> None:
    (said,) = survivors(one_pipeline_fails, 4)
    assert said.pop(0) == "OSError: no such shard after a while"
    found = "StageLost: stage 0 (rank 0) of the pipeline ended its batch with OSError: no such shard after a while"
    assert said == dict.fromkeys((1, 2, 3), found)


def goes_on(folder: str) -> bool:
    """True if a run that nobody interrupted, and one from the checkpoint, are the same to the bit."""
    ready()
    ends = []
    for checkpoint in (None, folder):
        engine = start(KILLED)
        if checkpoint is None:
            train(engine, KILLED, range(2))
        else:
            engine.load_checkpoint(checkpoint)
        ends.append((train(engine, KILLED, range(2, 4)), parameters(engine)))
        engine.destroy()
    (losses, weights), (again, others) = ends
    return losses == again and all(torch.equal(weights[name], others[name]) for name in weights)


# In every run test_tensor_parallel.py has one die in the pipeline.
@pytest.mark.parametrize("when", [thorough("in the pipeline"), "after it"])
def test_a_killed_stage_is_named_and_the_run_resumes(when: str, tmp_path: Path) -> None:
    (said,) = survivors(stage_is_killed, 4, [(when, str(tmp_path))])
    assert set(said) == {0, 2, 3}, said
    assert all(words.startswith("StageLost: stage 1 (rank 1)") for words in said.values()), said
    # On gloo as before: a sum over four ranks in another order is another one in its last bit.
    assert all(run_ranks(goes_on, 4, str(tmp_path), backend="gloo"))


def test_interval() -> None:
    assert checkpoint_interval(0, 8) == 1, "a stage that only computes the loss"
    assert [checkpoint_interval(*sizes) for sizes in ((6, 24), (8, 32), (7, 28), (12, 48), (1, 4))] == [6, 4, 7, 6, 1]
