"""The two ways to train the quickstart: in 3D PMM under DeepSpeed, and serially in plain PyTorch."""

from __future__ import annotations

import math
import random
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.observe.ledger_report import write_ledger
from axonn_recipes.data import Corpus
from axonn_recipes.models.gpt import GPT
from axonn_recipes.quickstart.settings import Settings
from axonn_tp import Grid
from axonn_tp.checkpoint.planner import Place
from axonn_tp.checkpoint.randomness import source_rank

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
VALIDATION_BATCHES = 8
_STEP = re.compile(r"step_\d+")


class Side(Protocol):
    """A side as the training loop sees it."""

    first: bool

    def step(self, number: int) -> tuple[float, float]:
        """Train on the batch of step `number`; returns its loss and gradient norm over all ranks."""

    def watched_step(self, number: int) -> tuple[float, float, dict[str, float]]:
        """The same, and what this rank communicated: calls, bytes and seconds waited, by axis."""

    def validate(self) -> float:
        """Loss on the held-out text."""

    def any_rank(self, flag: bool) -> bool:
        """True if the flag is set on any rank."""

    def save(self, number: int) -> Path:
        """Write a checkpoint of the state after step `number`; complete or absent."""

    def load(self) -> int:
        """Restore the last complete checkpoint; returns its step, 0 where there is none."""

    def close(self) -> None:
        """Let go of the ranks."""


def _batch(settings: Settings, corpus: Corpus, part: str, number: int) -> tuple[Tensor, Tensor]:
    return corpus.batch(part, settings.batch, settings.context, seed=settings.seed * 1_000_003 + number)


def _drop_old(folder: Path, keep: int) -> None:
    """Keep the newest complete checkpoints; what a save that died left beside them does not count."""
    for old in sorted(found for found in folder.iterdir() if _STEP.fullmatch(found.name))[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


class Parallel:
    """3D PMM through `deepspeed.initialize`, as any DeepSpeed script would call it."""

    def __init__(
        self, settings: Settings, corpus: Corpus, run: Path, keep: int = 2, trace: tuple[int, int] | None = None
    ) -> None:
        import deepspeed

        self.settings, self.corpus, self.folder, self.keep = settings, corpus, run / "checkpoints", keep
        torch.manual_seed(settings.seed)
        model = GPT(settings.model)
        if settings.precision == "fp64":
            model.double()
        config = settings.ds_config()
        if trace is not None:
            config["axonn"]["tensor_parallel"] |= {"trace_steps": [*trace], "trace_folder": str(run)}
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self.first = dist.get_rank() == 0

    def _share(self, part: str, number: int) -> list[Tensor]:
        mesh = self.engine.mesh
        return [mesh.shard_batch(t).to(mesh.device) for t in _batch(self.settings, self.corpus, part, number)]

    def _mean(self, value: Tensor) -> float:
        """Mean over all ranks; those of one x-y plane hold the same value."""
        total = value.detach().double()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size()

    def step(self, number: int) -> tuple[float, float]:  # noqa: D102
        for group in self.engine.optimizer.param_groups:
            group["lr"] = self.settings.lr_at(number)
        loss = self.engine(*self._share("training", number))
        self.engine.backward(loss)
        self.engine.step()
        return self._mean(loss), float(self.engine.get_global_grad_norm() or math.nan)

    def watched_step(self, number: int) -> tuple[float, float, dict[str, float]]:  # noqa: D102
        with Ledger(self.engine.mesh.axis_names()) as ledger:
            loss, norm = self.step(number)
        if self.first:
            write_ledger(ledger.entries, number, self.folder.parent)
        seen: dict[str, float] = {}
        for axis, (calls, sent) in ledger.by_axis().items():
            seen |= {f"{axis}_calls": calls, f"{axis}_bytes": float(sent)}
        return loss, norm, seen | {f"{axis}_exposed_s": waited for axis, waited in ledger.exposed_by_axis().items()}

    @torch.no_grad()
    def validate(self) -> float:  # noqa: D102
        self.engine.eval()
        losses = [self._mean(self.engine(*self._share("validation", n))) for n in range(VALIDATION_BATCHES)]
        self.engine.train()
        return sum(losses) / len(losses)

    def any_rank(self, flag: bool) -> bool:  # noqa: D102
        flags = torch.tensor([float(flag)], device=self.engine.mesh.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def save(self, number: int) -> Path:  # noqa: D102
        tag = f"step_{number:06d}"
        random_states: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(random_states, torch.get_rng_state())
        state = {"step": number, "random_states": random_states, "grid": asdict(self.engine.mesh.grid)}
        self.engine.save_checkpoint(str(self.folder), tag, client_state=state)
        if self.first:
            _drop_old(self.folder, self.keep)
        return self.folder / tag

    def load(self) -> int:  # noqa: D102
        _, state = self.engine.load_checkpoint(str(self.folder))
        if not state:
            return 0
        mesh = self.engine.mesh
        source = source_rank(Place(mesh.grid, mesh.coordinates), Grid(**state["grid"]))
        torch.set_rng_state(state["random_states"][source])
        return state["step"]

    def close(self) -> None:  # noqa: D102
        self.engine.destroy()
        dist.destroy_process_group()


class Serial:
    """One process, plain PyTorch; in bf16 with float32 masters, as DeepSpeed trains."""

    first = True

    def __init__(self, settings: Settings, corpus: Corpus, run: Path, keep: int = 2) -> None:
        self.settings, self.corpus, self.folder, self.keep = settings, corpus, run / "checkpoints", keep
        torch.manual_seed(settings.seed)
        random.seed(settings.seed)
        np.random.seed(settings.seed)  # noqa: NPY002
        self.model = GPT(settings.model)
        self.dtype = DTYPES[settings.precision]
        if settings.precision == "fp64":
            self.model.double()
        elif settings.precision == "bf16":
            # DeepSpeed's float32 masters start from the half-precision weights.
            self.model.bfloat16().float()
        config = settings.ds_config()
        self.clip = config["gradient_clipping"]
        chosen = {key: value for key, value in config["optimizer"]["params"].items() if key != "torch_adam"}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **chosen)

    def _loss(self, part: str, number: int) -> Tensor:
        weights = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, weights, _batch(self.settings, self.corpus, part, number))

    def step(self, number: int) -> tuple[float, float]:  # noqa: D102
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr_at(number)
        loss = self._loss("training", number)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item(), norm.item()

    def watched_step(self, number: int) -> tuple[float, float, dict[str, float]]:  # noqa: D102
        return *self.step(number), {}

    @torch.no_grad()
    def validate(self) -> float:  # noqa: D102
        return sum(self._loss("validation", n).item() for n in range(VALIDATION_BATCHES)) / VALIDATION_BATCHES

    def any_rank(self, flag: bool) -> bool:  # noqa: D102
        return flag

    def save(self, number: int) -> Path:  # noqa: D102
        final, aside = self.folder / f"step_{number:06d}", self.folder / "incomplete"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        state = {"step": number, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(state, aside / "state.pt")
        shutil.rmtree(final, ignore_errors=True)
        aside.rename(final)
        _drop_old(self.folder, self.keep)
        return final

    def load(self) -> int:  # noqa: D102
        found = sorted(self.folder.glob("step_*/state.pt"))
        if not found:
            return 0
        state = torch.load(found[-1])
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return state["step"]

    def close(self) -> None:  # noqa: D102
        pass
