"""Pipeline schedules: bubbles and memory beside the orders that torch.distributed.pipelining runs, played out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed.pipelining import schedules as pipelining

from axonn_plugins import cli
from axonn_plugins.planner import machine, model
from axonn_plugins.planner.answer import Question, answer
from axonn_plugins.planner.runnable import runnable
from axonn_plugins.planner.schedules import SCHEDULES, bubble, in_flight
from axonn_plugins.planner.setting import Setting

FORWARD, INPUT, WEIGHT, WHOLE = (
    getattr(pipelining._ComputationType, name)
    for name in ("FORWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "FULL_BACKWARD")
)


def orders(schedule, parts, stages, microbatches):
    """Orders of torch's ranks, one after another."""
    made = object.__new__(getattr(pipelining, SCHEDULES[schedule].torch or "ScheduleInterleaved1F1B"))
    made.pp_group_size, made._n_microbatches, made.n_local_stages = stages, microbatches, parts
    made.num_stages, made.number_of_rounds = parts * stages, microbatches // stages
    made.microbatches_per_round = microbatches // made.number_of_rounds
    return [[one for one in made._calculate_single_rank_operations(rank) if one] for rank in range(stages)]


def played(every, seconds, last):
    """When the last rank has done its work, and the most parts of microbatches that a rank keeps."""
    done, clock, at, most = {}, [0.0] * len(every), [0] * len(every), 0
    while any(place < len(order) for place, order in zip(at, every, strict=True)):
        stuck = True
        for rank, order in enumerate(every):
            while at[rank] < len(order):
                stage, kind, which = order[at[rank]][:3]
                before = [(stage - 1, FORWARD, which)] if kind == FORWARD and stage else []
                if kind in (INPUT, WHOLE):
                    before = [(stage, FORWARD, which), *([(stage + 1, INPUT, which)] if stage < last else [])]
                if any(one not in done for one in before):
                    break
                clock[rank] = max([clock[rank], *(done[one] for one in before)]) + seconds[kind]
                done[stage, INPUT if kind == WHOLE else kind, which] = clock[rank]
                at[rank], stuck = at[rank] + 1, False
        assert not stuck
    for order in every:
        held = 0
        for one in order:
            held += (one[1] == FORWARD) - (one[1] in (WEIGHT, WHOLE))
            most = max(most, held)
    return max(clock), most


@pytest.mark.parametrize(
    ("schedule", "parts"), [("1f1b", 2), ("1f1b", 4), ("zb-h1", 1), ("zb-h1", 2), ("zb-h1", 4), ("zb-v", 2)]
)
def test_formulas_are_what_torchs_orders_take(schedule, parts):
    for stages, rounds in ((2, 2), (4, 2), (4, 8), (8, 3)):
        for f, b, w in ((1.0, 1.0, 1.0), (1.0, 1.3, 0.9), (1.0, 2.0, 0.8), (0.9, 1.7, 0.5), (1.0, 1.8, 1.7)):
            microbatches = rounds * stages
            share = {FORWARD: f / parts, INPUT: b / parts, WEIGHT: w / parts, WHOLE: (b + w) / parts}
            every = orders(schedule, parts, stages, microbatches)
            took, kept = played(every, share, parts * stages - 1)
            interleave = 1 if SCHEDULES[schedule].parts else parts
            said = bubble(schedule, interleave, stages, f, b + w, w)
            assert took - microbatches * (f + b + w) == pytest.approx(float(said), rel=1e-9), (stages, rounds, f, b, w)
            assert kept / parts <= float(in_flight(schedule, interleave, stages, microbatches)) + 1e-9
            assert kept / parts >= float(in_flight(schedule, interleave, stages, microbatches)) - 1


def asked(schedule, **fixed):
    on, setting = machine.load("h100"), Setting(schedule=schedule, recompute=True)
    return Question(
        on, model.load("gpt3-175b"), 64, 256, ("1d",), fixed={"n1": 8, "np": 8, "bm": 1, **fixed}, setting=setting
    )


def test_bubbles_of_a_model_and_what_they_cost():
    """Backward's products are half its weights' gradients, and 175B's attention and recomputation are in the rest."""
    plain, half, without = (answer(asked(name), 1).best[0] for name in ("1f1b", "zb-h1", "zb-v"))
    assert plain.parts["bubble"] / 2 < half.parts["bubble"] < plain.parts["bubble"] / 1.2
    assert without.parts["bubble"] < 0.7 * half.parts["bubble"]
    assert plain.bytes == half.bytes == without.bytes
    assert without.parts["pipeline"] == pytest.approx(2 * plain.parts["pipeline"])
    assert plain.parts["compute"] == half.parts["compute"] == without.parts["compute"]


def test_what_a_schedule_asks_of_layers_and_microbatches():
    few = replace(asked("zb-v"), batch=14)
    assert not answer(few, 1).best and answer(replace(few, batch=15), 1).best
    odd = replace(asked("zb-v", np=64, n1=1), mode="roofline", machine=replace(machine.load("h100"), memory=1e15))
    assert (
        not answer(odd, 1).best
        and answer(replace(odd, setting=Setting(schedule="zb-h1"), fixed={"np": 32, "n1": 2}), 1).best
    )


def test_who_runs_it_is_said():
    for name in ("zb-h1", "zb-v"):
        question = asked(name)
        made = runnable(question, answer(question, 1).best[0])
        assert made.ds_config is None and made.megatron is None
        assert sum(SCHEDULES[name].torch in note for note in made.notes) == 2
        assert not any("PipelineModule" in note for note in made.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--schedule zbv", '--schedule = "zbv" is not known; use "zb-v"'),
        ("--schedule zb-v --interleave 2", "--schedule zb-v has 2 parts on each stage; leave --interleave out"),
        ("--schedule zb-h1 --strategy axonn", "--schedule = zb-h1, but stages of 4D grids run 1F1B"),
    ],
)
def test_mistakes_are_one_sentence(options, message, capsys):
    assert cli.main(f"plan --model gpt3-xl --machine h100 --gpus 8 --batch 64 {options}".split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
