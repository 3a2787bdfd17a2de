"""Loss scaling for 16-bit floats: a fixed factor, or one that halves when gradients overflow and doubles when they long have not."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class LossScale:
    """The factor, and how it changes.

    Attributes:
        scale: by which the loss is multiplied before backward.
        dynamic: whether it changes.
        growth_interval: steps without overflow after which it doubles.
        least: below which it does not fall.
        steps: without overflow so far.
    """

    scale: float = 2.0**16
    dynamic: bool = True
    growth_interval: int = 2000
    least: float = 1.0
    steps: int = 0

    @staticmethod
    def make(given: LossScale | float | str | None) -> LossScale | None:
        """From "dynamic", a number, a `LossScale` or None.

        Raises:
            ValueError: none of these.
        """
        if given is None or isinstance(given, LossScale):
            return given
        if given == "dynamic":
            return LossScale()
        if isinstance(given, (int, float)) and given > 0:
            return LossScale(float(given), dynamic=False)
        raise ValueError(
            f"loss_scale = {given!r} is not a scale; use 'dynamic', a positive number, a LossScale or None"
        )

    def update(self, overflow: bool) -> None:
        """Take note of how a step went."""
        if not self.dynamic:
            return
        self.steps = 0 if overflow else self.steps + 1
        if overflow:
            self.scale = max(self.scale / 2, self.least)
        elif self.steps == self.growth_interval:
            self.scale, self.steps = self.scale * 2, 0

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the scale that `state_dict` returned."""
        for key, value in state.items():
            setattr(self, key, value)
