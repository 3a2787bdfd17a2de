"""The schedule's properties: exhaustively for small pipelines, and with random times."""

from __future__ import annotations

import random
from itertools import product

import pytest

from axonn_plugins.pipeline.events import Event, from_tensor, to_tensor
from axonn_plugins.pipeline.schedule import POLICIES, Action, Policy, Stage, automatic_limit, default_limit
from axonn_plugins.pipeline.simulate import Simulated, simulate

State = tuple[tuple[int, ...], ...]


class Orders:
    """Walks every order in which messages may arrive and stages may act; states that were seen are not walked again."""

    def __init__(self, policy: Policy, stages: int, microbatches: int, limit: int) -> None:
        self.arguments = (policy, stages, microbatches, limit)
        self.stages, self.microbatches, self.limit = stages, microbatches, limit
        self.seen: set[tuple] = set()
        self.ends = 0

    def walk(self) -> None:
        policy, stages, microbatches, limit = self.arguments
        first = [Stage(policy, i, stages, microbatches, limit) for i in range(stages)]
        stack = [(first, tuple([0] * stages), tuple([0] * stages))]
        while stack:
            machines, inputs, gradients = stack.pop()
            key = (tuple(tuple(vars(m).values()) for m in machines), inputs, gradients)
            if key in self.seen:
                continue
            self.seen.add(key)
            following = list(self.moves(machines, inputs, gradients))
            if not following:
                self.ends += 1
                assert all(m.finished and m.alive == 0 for m in machines), "deadlock"
            stack.extend(following)

    def moves(self, machines: list[Stage], inputs: tuple[int, ...], gradients: tuple[int, ...]):
        """`inputs` and `gradients`: messages delivered to each stage."""
        for i in range(self.stages):
            copies = [copy(m) for m in machines]
            if (action := copies[i].next()) is not None:
                self.check(copies, i, action)
                yield copies, inputs, gradients
            if i > 0 and inputs[i] < machines[i - 1].forwards:
                copies = [copy(m) for m in machines]
                copies[i].input_arrived(inputs[i])
                yield copies, raised(inputs, i), gradients
            if i < self.stages - 1 and gradients[i] < machines[i + 1].backwards:
                copies = [copy(m) for m in machines]
                copies[i].gradient_arrived(gradients[i])
                yield copies, inputs, raised(gradients, i)

    def check(self, machines: list[Stage], i: int, action: Action) -> None:
        stage = machines[i]
        done = stage.forwards if action.kind == "forward" else stage.backwards
        assert action.microbatch == done - 1
        assert stage.backwards <= stage.forwards
        assert stage.alive <= stage.kept_at_most <= self.limit
        assert machines[0].forwards - machines[0].backwards <= self.limit


def copy(stage: Stage) -> Stage:
    made = object.__new__(Stage)
    vars(made).update(vars(stage))
    return made


def raised(counts: tuple[int, ...], i: int) -> tuple[int, ...]:
    return (*counts[:i], counts[i] + 1, *counts[i + 1 :])


@pytest.mark.parametrize("policy", POLICIES)
def test_every_order_of_arrival(policy: Policy) -> None:
    for stages, microbatches, limit in product((1, 2, 3), (1, 2, 3, 4), (1, 2, 3, 5)):
        orders = Orders(policy, stages, microbatches, limit)
        orders.walk()
        assert orders.ends == 1, "all orders end with everything done"


def passes(result: Simulated, i: int) -> list[tuple[str, int]]:
    return [(event.kind, event.microbatch) for event in result.events[i] if event.kind in ("forward", "backward")]


@pytest.mark.parametrize("policy", POLICIES)
def test_random_times(policy: Policy) -> None:
    for seed in range(60):
        draw = random.Random(seed)
        stages, microbatches = draw.randint(1, 6), draw.randint(1, 20)
        limit = draw.choice([None, 1, 2, stages, stages + 3])
        result = simulate(
            policy,
            stages,
            microbatches,
            lambda i, a, d=draw: d.uniform(0.1, 3),
            lambda a, b, m, d=draw: d.uniform(0, 5),
            limit,
        )
        most = default_limit(policy, stages, microbatches) if limit is None else limit
        for i in range(stages):
            done = passes(result, i)
            for kind in ("forward", "backward"):
                assert [m for k, m in done if k == kind] == list(range(microbatches))
            assert all(done.index(("forward", m)) < done.index(("backward", m)) for m in range(microbatches))
            assert result.alive[i] <= most
            for before, after in zip(result.events[i], result.events[i][1:], strict=False):
                assert before.end == pytest.approx(after.start), "a stage computes, or waits"


def test_waits_for_what_is_under_way_are_told_apart() -> None:
    """Two stages, one microbatch, links of half a unit: the first waits two passes and two links, the second a pass and one."""
    result = simulate("message_driven", 2, 1, lambda i, a: 1.0, lambda a, b, m: 0.5)
    seconds = [
        {k: sum(e.end - e.start for e in events if e.kind == k) for k in ("wait", "transit")}
        for events in result.events
    ]
    assert seconds == [{"wait": 2.5, "transit": 0.5}, {"wait": 1.0, "transit": 0.5}]


@pytest.mark.parametrize("policy", ["message_driven", "1f1b"])
def test_last_stage_goes_back_at_once(policy: Policy) -> None:
    result = simulate(policy, 3, 5, lambda i, a: 1.0)
    assert passes(result, 2) == [(kind, m) for m in range(5) for kind in ("forward", "backward")]
    assert result.alive[2] == 1


def test_figure_4_3() -> None:
    """Three stages, five microbatches, one unit forward and two back: every stage idles six units."""
    for policy in POLICIES:
        result = simulate(policy, 3, 5, lambda i, a: 1.0 if a.kind == "forward" else 2.0)
        assert result.seconds == 5 * 3 + 6


def test_1f1b_keeps_its_order_whatever_the_times() -> None:
    even = simulate("1f1b", 4, 9, lambda i, a: 1.0)
    draw = random.Random(3)
    other = simulate("1f1b", 4, 9, lambda i, a: draw.uniform(0.1, 3), lambda a, b, m: draw.uniform(0, 4))
    assert [passes(even, i) for i in range(4)] == [passes(other, i) for i in range(4)]
    assert even.alive == [4, 3, 2, 1]


def test_limits() -> None:
    assert [default_limit(policy, 4, 16) for policy in POLICIES] == [4, 4, 16]
    assert [automatic_limit(policy, 4, 16) for policy in POLICIES] == [8, 4, 16]


def test_gpipe_in_rounds() -> None:
    result = simulate("gpipe", 2, 5, lambda i, a: 1.0, limit=2)
    rounds = [("forward", (0, 1)), ("backward", (0, 1)), ("forward", (2, 3)), ("backward", (2, 3))]
    wanted = [(kind, m) for kind, round_ in rounds for m in round_] + [("forward", 4), ("backward", 4)]
    assert passes(result, 0) == passes(result, 1) == wanted
    assert simulate("gpipe", 2, 5, lambda i, a: 1.0).alive == [5, 5]


def test_message_driven_uses_what_the_limit_allows() -> None:
    """A slow link: with more in flight than stages its latency is hidden, which a fixed order cannot do."""
    seconds = {
        (policy, limit): simulate(
            policy, 4, 16, lambda i, a: 1.0 if a.kind == "forward" else 2.0, lambda a, b, m: 0.5, limit
        ).seconds
        for policy in ("message_driven", "1f1b")
        for limit in (None, 8)
    }
    assert seconds["message_driven", None] <= seconds["1f1b", None] == seconds["1f1b", 8]
    assert seconds["message_driven", 8] < 0.9 * seconds["1f1b", 8]


def test_forward_only() -> None:
    stage = Stage("message_driven", 0, 3, 7, 2, backward=False)
    assert [stage.next() for _ in range(7)] == [Action("forward", m) for m in range(7)]
    assert stage.finished and stage.next() is None and stage.alive == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("zigzag", 0, 2, 3), "policy = 'zigzag'"),
        (("1f1b", 2, 2, 3), "stage = 2 of 2"),
        (("1f1b", 0, 2, 0), "microbatches = 0"),
        (("1f1b", 0, 2, 3, 0), "limit = 0"),
    ],
)
def test_refusals(arguments: tuple, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Stage(*arguments)


def test_messages_out_of_turn() -> None:
    stage = Stage("message_driven", 1, 3, 3)
    with pytest.raises(ValueError, match="input of microbatch 1 arrived at stage 1"):
        stage.input_arrived(1)
    stage.input_arrived(0)
    with pytest.raises(ValueError, match="gradient of microbatch 0"):
        stage.gradient_arrived(0)


def test_events_as_numbers() -> None:
    events = [Event("wait", 3, 0.25, 1.5), Event("loss", -1, 1.5, 2.0)]
    assert from_tensor(to_tensor(events)) == events
    assert from_tensor(to_tensor([])) == []


def test_microbatches_that_are_apart_are_alone() -> None:
    """The first stage lets one into an empty pipeline, and the next when it is back; it asks of each once, in order."""
    asked: list[int] = []

    def apart(microbatch: int) -> bool:
        asked.append(microbatch)
        return microbatch in (2, 3)

    stage = Stage("message_driven", 0, 3, 6, 6, apart=apart)
    done = []
    while not stage.finished:
        action = stage.next()
        if action is None:
            stage.gradient_arrived(stage.backwards)
            continue
        done.append(action)
        assert not action.alone or stage.alive == 1
    forwards = [place for place, action in enumerate(done) if action.kind == "forward"]
    assert [place for place, action in enumerate(done) if action.alone] == forwards[2:4] == [4, 6]
    assert asked == list(range(6)) and forwards[4:] == [8, 9]
