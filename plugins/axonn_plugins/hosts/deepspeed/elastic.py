"""Training that goes on with the ranks that are left: which of them a grid can use, and which samples each reads.

::

    config = elastic.join("ds_config.json", model)  # before deepspeed.initialize
    engine, *_ = deepspeed.initialize(model=model, config=config)
    engine.load_checkpoint("checkpoints")  # of any grid; nothing at the first start
    for batch in elastic.Batches(engine, dataset):
        loss = engine(batch)
        engine.backward(loss)
        engine.step()

The batch of a step is the same on any number of ranks, so train_batch_size must be given; what ranks do not take at a time they accumulate.

The Trainer of transformers deals out samples itself, and finds its place among them when it resumes: it needs `join` alone, and a size that is "auto"::

    config = elastic.join("ds_config.json", model)  # before TrainingArguments
    trainer = Trainer(model, TrainingArguments(folder, deepspeed=config, ...), ...)
    trainer.train(resume_from_checkpoint=elastic.last_checkpoint(folder))
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import default_collate

from axonn_plugins.config import ConfigError, parse
from axonn_plugins.hosts.common.tensor_parallel import layer_plans, options
from axonn_plugins.hosts.deepspeed.patch import read
from axonn_plugins.hosts.deepspeed.tensor import auto_sizes
from axonn_plugins.hosts.deepspeed.tensor.config import check_automatic
from axonn_tp import Grid, auto_plan

_OVER, _SEEN = "axonn/elastic/over", "axonn/elastic/seen"
_LOOK_SECONDS, _SPARES_SECONDS = 2.0, 10.0


def join(config: str | Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Keep as many ranks as a grid can use; the others stay in this call until those are done, and end with exit code 0.

    Under torchrun, whose agents start anew when a node is lost or comes back, the ranks that are there differ from start to start. The number that
    is left may divide neither the batch nor the model: then the last ranks are spare. Every rank calls it before there is a process group.

    Args:
        config: the configuration of DeepSpeed, with train_batch_size and ``axonn.tensor_parallel``, the sizes of whose grid may be "auto".
        model: the serial model.

    Returns:
        The configuration, for `deepspeed.initialize`.

    Raises:
        ConfigError: not even one rank can train with it.
    """
    raw = read(config)
    settings = parse(raw.get("axonn") or {}).tensor_parallel if isinstance(raw, dict) else None
    if settings is None:
        raise ConfigError(
            "elastic.join needs a configuration with axonn.tensor_parallel, whose grid it fits to the ranks; add it, or leave join out"
        )
    if not isinstance(raw.get("train_batch_size"), int):
        raise ConfigError(
            f"train_batch_size = {json.dumps(raw.get('train_batch_size'))} leaves open how many ranks elastic.join can keep, whose grid divides the batch of "
            "a step; give train_batch_size as a number"
        )
    check_automatic(settings, raw)
    # A kernel for inference, which DeepSpeed compiles when it starts on CPUs: a rank that is lost meanwhile leaves a lock that all would wait for.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    _refuse_shared_store()
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    used, why = usable(raw, model, world)
    if used < world:
        if rank == 0:
            print(f"axonn: {used} of {world} ranks train, the others are spare: {why}", file=sys.stderr, flush=True)
            atexit.register(_tell_spares, _store(first=True), world - used)
        elif rank >= used:
            _stand_by(_store(first=False))
        os.environ["WORLD_SIZE"] = str(used)
    return dict(raw)


def usable(raw: Mapping[str, Any], model: nn.Module, world: int) -> tuple[int, str]:
    """The most ranks, of those that are there, of which a grid divides the batch and the model; and why not more.

    Raises:
        ConfigError: no number of ranks can train.
    """
    settings = parse(raw["axonn"]).tensor_parallel
    assert settings is not None
    raw = {key: value for key, value in raw.items() if value != "auto"}  # which the Trainer fills in
    plan = (
        auto_plan(model, Grid(gx=2, gy=2), options=options(settings))[0]
        if settings.plan == "auto"
        else layer_plans(settings)
    )
    why = ""
    for ranks in range(world, 0, -1):
        refused: list[str] = []
        if (
            next(auto_sizes.candidates(model, settings, raw, ranks, plan, options(settings), 1, refused), None)
            is not None
        ):
            return ranks, why
        fixed = ", ".join(f"{axis} = {size}" for axis, size in settings.given.items())
        why = why or (refused[0].partition(";")[0] if refused else f"no grid of {ranks} ranks has {fixed}")
    raise ConfigError(
        f"axonn.tensor_parallel: none of 1 to {world} ranks can train with this configuration, for one because {why}; change it, or start more "
        "ranks: torchrun --nnodes MIN:MAX waits for MIN nodes"
    )


def last_checkpoint(folder: str | os.PathLike) -> str | None:
    """The Trainer's last checkpoint that is complete, for ``resume_from_checkpoint``; None where there is none.

    transformers' own `get_last_checkpoint` also takes one in whose saving a rank was lost, with which no start could go on.

    Args:
        folder: the Trainer's ``output_dir``.
    """
    found = {}
    for path in Path(folder).glob("checkpoint-*"):
        number = path.name.removeprefix("checkpoint-")
        try:
            json.loads((path / "trainer_state.json").read_bytes())  # which the Trainer writes last
        except (OSError, ValueError):
            continue
        if number.isdigit() and (path / "latest").is_file():
            found[int(number)] = str(path)
    return found[max(found)] if found else None


def _refuse_shared_store() -> None:
    """Refuse a store that outlives restarts.

    Raises:
        ConfigError: torchrun's agents, which may restart, keep one.
    """
    shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if shared and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        raise ConfigError(
            "torchrun keeps one store for all restarts, where ranks find the addresses of those that are gone; "
            "set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun is started, on every node"
        )


def _store(first: bool) -> dist.TCPStore:
    """The store of the ranks, which lives in rank 0's process for as long as this does."""
    return dist.TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=first,
        wait_for_workers=False,
        multi_tenant=True,
    )


def _stand_by(store: dist.TCPStore) -> None:
    """Wait for the ranks that train.

    Raises:
        SystemExit: they are done, or rank 0 is lost.
    """
    while True:
        try:
            store.wait([_OVER], timedelta(seconds=_LOOK_SECONDS))
        except dist.DistStoreError:
            continue
        except RuntimeError:
            raise SystemExit("axonn: this rank was spare, and rank 0 is lost") from None
        store.add(_SEEN, 1)
        raise SystemExit(0)


def _tell_spares(store: dist.TCPStore, spares: int) -> None:
    """Let spare ranks end as rank 0 ends, unless it ends with an error."""
    if getattr(sys, "last_value", None) is not None:
        return
    store.set(_OVER, "1")
    deadline = time.monotonic() + _SPARES_SECONDS
    while store.add(_SEEN, 0) < spares and time.monotonic() < deadline:
        time.sleep(0.05)


class Batches:
    """Microbatches of this rank, from the step on at which the engine is: on any grid a step has the same samples, each once an epoch.

    Args:
        engine: DeepSpeed's, on a grid.
        dataset: samples by their number.
        seed: of the order, another in each epoch; None: as they lie.
        collate: makes a batch of a list of samples.
    """

    def __init__(
        self,
        engine: Any,
        dataset: Sequence[Any],
        seed: int | None = 0,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        self._engine, self._dataset, self._seed, self._collate = engine, dataset, seed, collate
        self._orders: dict[int, list[int]] = {}

    def __iter__(self) -> Iterator[Any]:
        """Microbatches of every step from the engine's on, without an end."""
        step = self._engine.global_steps
        while True:
            yield from self.of(step)
            step += 1

    def of(self, step: int) -> Iterator[Any]:
        """Microbatches of one step, counted from 0."""
        for numbers in self.numbers(step):
            yield self._collate([self._dataset[number] for number in numbers])

    def numbers(self, step: int) -> Iterator[list[int]]:
        """Samples of each microbatch of a step."""
        engine, mesh = self._engine, self._engine.mesh
        micro, reader = engine.train_micro_batch_size_per_gpu(), mesh.rank("readers")
        first = step * engine.train_batch_size()
        for turn in range(engine.gradient_accumulation_steps()):
            begin = first + (turn * mesh.size("readers") + reader) * micro
            yield [self._at(place) for place in range(begin, begin + micro)]

    def _at(self, place: int) -> int:
        epoch, within = divmod(place, len(self._dataset))
        if self._seed is None:
            return within
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            # A step may reach into the next epoch, so two are kept.
            self._orders = {kept: order for kept, order in self._orders.items() if kept == epoch - 1}
            self._orders[epoch] = torch.randperm(len(self._dataset), generator=generator).tolist()
        return self._orders[epoch][within]
