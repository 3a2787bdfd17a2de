"""Order of a stage's work, given the messages that have arrived: Algorithm 2 of the dissertation, and 1F1B and GPipe beside it.

A `Stage` knows nothing of tensors, processes or time. Messages from a neighbour arrive in the order in which they were
sent, and the last stage turns each forward pass into a backward pass; so every policy runs forward passes, and backward
passes, in the order of their microbatches on every stage, and gradients are summed in one order. What the policies
choose is how the two kinds interleave.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

Policy = Literal["message_driven", "1f1b", "gpipe"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
Pass = Literal["forward", "backward"]


class Action(NamedTuple):
    """A pass of one microbatch over a stage.

    Attributes:
        kind: forward or backward.
        microbatch: counted from 0.
        alone: a forward pass of the first stage, whose microbatch is in the pipeline by itself.
    """

    kind: Pass
    microbatch: int
    alone: bool = False


def default_limit(policy: Policy, stages: int, microbatches: int) -> int:
    """Microbatches in flight by default: as many as stages (3.2.1), in GPipe all."""
    return microbatches if policy == "gpipe" else stages


def automatic_limit(policy: Policy, stages: int, microbatches: int) -> int:
    """The number for ``"pipeline_limit": "auto"``: in message_driven twice the stages, else the default.

    With as many as stages, a stage whose oldest microbatch is late has nothing to go on with: links and uneven stages then
    cost what a second set of activations hides.
    """
    default = default_limit(policy, stages, microbatches)
    return 2 * default if policy == "message_driven" else default


class Stage:
    """One stage in one batch.

    Args:
        policy: message_driven: whatever has arrived. 1f1b: a fixed order, in which stage i of G makes G - i forward passes
            and then alternates, so that a limit above G changes nothing. gpipe: forward passes of `limit` microbatches, then their backward passes.
        stage: counted from 0.
        stages: G_inter.
        microbatches: of the batch.
        limit: ``pipeline_limit``: microbatches that are in the pipeline at most; by default `default_limit`.
        backward: False: forward passes only.
        apart: of the first stage in message_driven: true of a microbatch, asked once and in order, that is to be in the pipeline by itself. As the
            other stages work on what has arrived they need not know.

    Attributes:
        forwards: forward passes given out.
        backwards: backward passes given out.

    Raises:
        ValueError: a number that is too small, or an unknown policy.
    """

    def __init__(
        self,
        policy: Policy,
        stage: int,
        stages: int,
        microbatches: int,
        limit: int | None = None,
        *,
        backward: bool = True,
        apart: Callable[[int], bool] | None = None,
    ) -> None:
        limit = default_limit(policy, stages, microbatches) if limit is None else limit
        if policy not in POLICIES:
            raise ValueError(f"policy = {policy!r} is not known; use one of {', '.join(POLICIES)}")
        if not 0 <= stage < stages or microbatches < 1 or limit < 1:
            raise ValueError(
                f"stage = {stage} of {stages}, microbatches = {microbatches} and limit = {limit} make no pipeline; count stages from 0, "
                "and have at least one microbatch in it"
            )
        self.policy, self.stage, self.stages, self.microbatches = policy, stage, stages, microbatches
        self.limit = min(limit, microbatches)
        self._window = max(limit, stages) if policy == "message_driven" else stages
        self._last: Pass = "backward"
        self.forwards = self.backwards = 0
        self._backward = backward
        self._inputs = microbatches if stage == 0 else 0
        self._gradients = 0
        self._apart = apart
        self._answers: tuple[bool, ...] = ()
        self._alone = -1

    @property
    def is_first(self) -> bool:
        """True if the stage reads the batch."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if the stage computes the loss."""
        return self.stage == self.stages - 1

    @property
    def alive(self) -> int:
        """Microbatches whose activations are kept for backward."""
        return self.forwards - self.backwards if self._backward else 0

    @property
    def finished(self) -> bool:
        """True if nothing is left to do."""
        return self.forwards == self.microbatches and (not self._backward or self.backwards == self.microbatches)

    def input_arrived(self, microbatch: int) -> None:
        """The stage before sent its output.

        Raises:
            ValueError: it is not that of the next microbatch.
        """
        if self.is_first or microbatch != self._inputs or microbatch >= self.microbatches:
            raise ValueError(f"the input of microbatch {microbatch} arrived at stage {self.stage} out of turn")
        self._inputs += 1

    def gradient_arrived(self, microbatch: int) -> None:
        """The stage after sent the gradient of this one's output.

        Raises:
            ValueError: it is not that of the next microbatch, or this stage has not sent its output.
        """
        if self.is_last or microbatch != self._gradients or microbatch >= self.forwards:
            raise ValueError(f"the gradient of microbatch {microbatch} arrived at stage {self.stage} out of turn")
        self._gradients += 1

    @property
    def kept_at_most(self) -> int:
        """Activations that this stage may keep at a time.

        A microbatch whose gradient is yet to come to stage i has its forward pass ahead on the stages after it, so that more than
        G - i of G in flight would only wait here, and what waits delays what follows. In GPipe: all of a round.
        """
        return self.limit if self.policy == "gpipe" else min(self.limit, self._window - self.stage)

    @property
    def in_fixed_order(self) -> bool:
        """True if the next action does not depend on the order in which messages arrive."""
        return self.policy != "message_driven" or self.is_last or not self._backward

    def next(self) -> Action | None:
        """The next action, taken as done; None: wait for a message, or `finished`."""
        forward, backward = self.may("forward"), self.may("backward")
        if not (forward or backward):
            return None
        # Where both could run, what ran last would keep one neighbour supplied and let the other wait. The last stage has its
        # gradient at once.
        goes_back = backward and (not forward or self.is_last or self._last == "forward")
        return self.take("backward" if goes_back else "forward")

    def may(self, kind: Pass) -> bool:
        """True if the next pass of a kind could be computed now."""
        return self._may_forward() if kind == "forward" else self._may_backward()

    def take(self, kind: Pass) -> Action:
        """The next pass of a kind that `may` be computed, taken as done."""
        self._last = kind
        if kind == "forward":
            alone = self._goes_alone()
            self._alone = self.forwards if alone else self._alone
            self.forwards += 1
            return Action(kind, self.forwards - 1, alone)
        self.backwards += 1
        return Action(kind, self.backwards - 1)

    def _may_forward(self) -> bool:
        if self.forwards == self._inputs:
            return False
        if not self._backward:
            return True
        if self.policy == "gpipe":
            return self.forwards < self._round_end
        if self.alive == 0:
            return True
        return self._alone < self.backwards and self.alive < self.kept_at_most and not self._goes_alone()

    def _goes_alone(self) -> bool:
        """True if the next microbatch is to be in the pipeline by itself."""
        if self._apart is None:
            return False
        if len(self._answers) == self.forwards:
            self._answers += (self._apart(self.forwards),)
        return self._answers[self.forwards]

    def _may_backward(self) -> bool:
        if not self._backward or self.backwards == (self.forwards if self.is_last else self._gradients):
            return False
        if self.policy == "gpipe":
            return self.forwards == min(self._round_end, self.microbatches)
        if self.policy == "1f1b":
            return self.alive == self.kept_at_most or self.forwards == self.microbatches
        return True

    @property
    def _round_end(self) -> int:
        return (self.backwards // self.limit + 1) * self.limit
