"""Sparsity that grows over a run: pruned each so many steps, while the network trains on and recovers."""

from __future__ import annotations

from dataclasses import dataclass

from samo.pruning import require_sparsity

POWERS = {"cubic": 3, "linear": 1}


@dataclass(frozen=True)
class Schedule:
    """Sparsity from `initial` to `final` (Zhu & Gupta, arXiv 1710.01878, equation 1; "linear" has the power 1 in place of 3).

    ::

        schedule = samo.Schedule(0.9, start_step=100, end_step=1100, interval=100)
        for step in range(1, steps + 1):
            train(...)
            if schedule.due(step):
                optimizer.prune(samo.magnitude(model, schedule.sparsity(step)))

    Attributes:
        final: the sparsity from `end_step` on.
        start_step: optimizer steps before the first pruning, to `initial`.
        end_step: steps after which no more is pruned.
        interval: steps from one pruning to the next; the last one is at `end_step`, also where this does not divide the time.
        initial: the sparsity of the first pruning.
        shape: "cubic", fast at first, or "linear".

    Raises:
        ValueError: one of these is not allowed.
    """

    final: float
    start_step: int
    end_step: int
    interval: int
    initial: float = 0.0
    shape: str = "cubic"

    def __post_init__(self) -> None:
        require_sparsity(self.final)
        require_sparsity(self.initial)
        if self.initial > self.final:
            raise ValueError(
                f"initial = {self.initial} is more than the sparsity {self.final} that the schedule ends with; use a smaller one"
            )
        if self.shape not in POWERS:
            raise ValueError(f"shape = {self.shape!r} is not a shape of a schedule; use 'cubic' or 'linear'")
        if self.interval < 1 or self.start_step < 0:
            raise ValueError(
                f"interval = {self.interval} with start_step = {self.start_step} are not steps; use an interval of at least 1, and "
                "begin at 0 or later"
            )
        if self.end_step <= self.start_step:
            raise ValueError(
                f"end_step = {self.end_step} is not after start_step = {self.start_step}; use a later one, or no schedule"
            )

    def due(self, step: int) -> bool:
        """True if it is time to prune after so many optimizer steps."""
        if not self.start_step <= step <= self.end_step:
            return False
        return step == self.end_step or (step - self.start_step) % self.interval == 0

    def sparsity(self, step: int) -> float:
        """The sparsity after so many optimizer steps: that of the last pruning that was due; 0 before the first."""
        if step < self.start_step:
            return 0.0
        if step >= self.end_step:
            return self.final
        past = (step - self.start_step) // self.interval * self.interval
        left = 1 - past / (self.end_step - self.start_step)
        return self.final + (self.initial - self.final) * left ** POWERS[self.shape]
