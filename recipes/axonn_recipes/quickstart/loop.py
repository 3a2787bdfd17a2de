"""The training loop: steps, the line a step, metrics, checkpoints, and a clean stop on SIGINT or SIGTERM."""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import torch
from tqdm import tqdm

from axonn_plugins.observe.metrics import MetricsLogger, flops_per_token, format_step, peak_flops, process_memory_bytes
from axonn_recipes.quickstart.settings import Settings
from axonn_recipes.quickstart.sides import Side


@dataclass
class Outcome:
    """The end of a run: losses by step, validation loss at the end, and the signal that stopped it, if one did."""

    losses: dict[int, float] = field(default_factory=dict)
    validation: float | None = None
    stopped_by: int | None = None
    step: int = 0


class _Stop:
    """Remembers the last signal that asked to stop."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)

    def forget(self) -> None:
        """From now on signals end the process."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal = number


def _step(side: Side, number: int, every: int) -> tuple[float, float, dict[str, float]]:
    """Loss, gradient norm, and what was communicated where it was watched."""
    # Watching costs some time, so it is the step before the one whose speed is printed.
    if (number + 1) % every == 0 and number > 2:
        return side.watched_step(number)
    return *side.step(number), {}


def train(side: Side, settings: Settings, run: Path, resume: bool, save_every: int, matmul: int) -> Outcome:
    """Train to the last step, or until a signal; save on the way and at the end.

    Args:
        side: serial or parallel.
        settings: the run's.
        run: its folder.
        resume: go on from the last complete checkpoint.
        save_every: steps between checkpoints.
        matmul: parameters that multiply activations, for MFU.
    """
    stop = _Stop()
    done = side.load() if resume else 0
    metrics = MetricsLogger(run, resume_step=done if resume else None) if side.first else None
    if resume and side.first:
        print(f"going on after step {done}" if done else "no checkpoint was complete: starting from step 0", flush=True)
    show = side.first
    bar = tqdm(
        total=settings.steps, initial=done, unit="step", disable=None if show else True, leave=False, file=sys.stderr
    )
    every = max(1, settings.steps // 30)
    flops = flops_per_token(matmul, settings.layers, settings.hidden, settings.context)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    peak = peak_flops(name, settings.precision)
    ranks = 1 if settings.serial else settings.ranks
    outcome, waited = Outcome(step=done), {}
    for number in range(done + 1, settings.steps + 1):
        began = time.perf_counter()
        loss, norm, communicated = _step(side, number, every)
        if communicated:
            waited = {name.removesuffix("_exposed_s"): s for name, s in communicated.items() if name.endswith("_s")}
        rate = settings.batch * settings.context / (time.perf_counter() - began)
        outcome.losses[number], outcome.step = loss, number
        if metrics is not None:
            lr, memory = settings.lr_at(number), process_memory_bytes()
            utilisation = None if peak is None else rate * flops / (peak * ranks)
            metrics.log(
                number,
                loss=loss,
                grad_norm=norm,
                lr=lr,
                tokens_per_s=rate,
                memory_bytes=memory,
                mfu=utilisation,
                **communicated,
            )
            if show and (number % every == 0 or number in (1, settings.steps)):
                line = format_step(number, settings.steps, loss, norm, lr, rate, memory, utilisation)
                line += (
                    "  waited " + ", ".join(f"{axis} {s * 1e3:.0f} ms" for axis, s in waited.items()) if waited else ""
                )
                tqdm.write(line, file=sys.stdout)
                sys.stdout.flush()
            bar.update()
        if side.any_rank(stop.signal is not None):
            outcome.stopped_by = stop.signal or signal.SIGTERM
            break
        if number % save_every == 0 and number < settings.steps:
            side.save(number)
    bar.close()
    if outcome.step > done:
        side.save(outcome.step)
    if outcome.stopped_by is None and side.any_rank(stop.signal is not None):  # while the last step was saved
        outcome.stopped_by = stop.signal or signal.SIGTERM
    if outcome.stopped_by is None:
        stop.forget()  # everything is saved, and validating takes a while
        outcome.validation = side.validate()
    if metrics is not None:
        if outcome.validation is not None:
            metrics.log(settings.steps, val_loss=outcome.validation)
        metrics.finish()
    side.close()
    return outcome
