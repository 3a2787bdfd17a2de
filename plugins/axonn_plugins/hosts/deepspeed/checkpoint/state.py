"""An engine's state by the serial model's names."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from axonn_plugins.hosts.common.portable import PortableState
from axonn_plugins.hosts.deepspeed.data_efficiency import parts_with_state
from axonn_tp.checkpoint import CheckpointError
from axonn_tp.checkpoint.dealt import DealtNames
from axonn_tp.checkpoint.state import Notes

_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class EngineState(PortableState):
    """The state of an engine that is saved besides DeepSpeed's own files.

    Args:
        engine: one of ours.
        names: of experts and layers, where ranks have different ones.
        apart: whether the ranks of other stages have other parameters.
    """

    def __init__(self, engine: DeepSpeedEngine, names: DealtNames | None = None, apart: bool = False) -> None:
        self.engine = engine
        composition = getattr(engine, "composition", None)
        super().__init__(engine.module, engine.mesh, engine.optimizer, composition, engine.lr_scheduler, names, apart)

    def counters(self) -> dict[str, int]:
        """DeepSpeed's."""
        return {name: getattr(self.engine, name) for name in _COUNTERS}

    def take_counters(self, saved: dict[str, int]) -> None:
        """Go on with those of an engine, or with the steps alone that another host counts."""
        if "global_steps" in saved:
            samples = saved["global_steps"] * self.engine.train_batch_size()
            saved = {"global_samples": samples, "skipped_steps": 0, **saved}
        for name, value in saved.items():
            setattr(self.engine, name, value)

    def parts(self) -> dict[str, Any]:
        """DeepSpeed's curricula."""
        return parts_with_state(self.engine)

    def scale(self) -> Notes:
        """The scaler's numbers."""
        scaler = self._scaler
        return {} if scaler is None else {"loss_scaler": dict(vars(scaler))}

    def take_scale(self, notes: Notes) -> None:
        """Go on with a scaler of the same kind; of another host with its scale where both move."""
        scaler, saved, other = self._scaler, notes.get("loss_scaler", {}), notes.get("loss_scale") or {}
        if scaler is None:
            return
        if vars(scaler).keys() == saved.keys():  # else the other one was static, or dynamic
            vars(scaler).update(saved)
        elif scaler.dynamic and other.get("dynamic"):
            scaler.cur_scale = other["scale"]

    def refresh(self) -> None:
        """Have float32 weights be those that were read."""
        if hasattr(self.held, "refresh_fp32_params"):
            self.held.refresh_fp32_params()

    def load(self, reading: Any, states: bool, schedule: bool, counters: bool, strict: bool = True) -> Any:
        """See `PortableState.load`.

        Raises:
            CheckpointError: see there; this run has a schedule, and the checkpoint has none.
        """
        if schedule and self.scheduler is not None and "scheduler" not in reading.notes:
            raise CheckpointError(
                "the checkpoint was saved without a schedule of the learning rate, and this run has one; pass load_lr_scheduler_states=False to have "
                "it begin anew"
            )
        return super().load(reading, states, schedule, counters, strict)

    @property
    def _scaler(self) -> Any:
        return getattr(self.engine.optimizer, "loss_scaler", None)
