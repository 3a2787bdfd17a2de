"""Accelerate counts readers, not ranks, where it deals out samples and steps; without the block nothing is different.

``Accelerator.num_processes`` and ``process_index`` are the readers' there. Its `state` still counts ranks, for the main
process, for files of each rank and for collectives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from axonn_plugins import build_locks
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.patch import read
from axonn_plugins.hosts.transformers.asking import ask
from axonn_plugins.hosts.transformers.clipping import saying
from axonn_plugins.hosts.transformers.readers import Readers, replicas
from axonn_plugins.hosts.transformers.sizes import open_sizes, read_by, settle
from axonn_plugins.hosts.transformers.tied import keeping_ties

_MICRO = "train_micro_batch_size_per_gpu"


def patch(module: ModuleType) -> None:
    """Add to ``accelerate.accelerator``; harmless when called again."""
    accelerator = module.Accelerator
    if getattr(accelerator, "axonn", False):
        return
    accelerator.axonn = True
    from accelerate import data_loader, scheduler, utils
    from accelerate.state import PartialState
    from accelerate.utils.dataclasses import DeepSpeedPlugin
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    for name in ("num_processes", "process_index"):
        setattr(accelerator, name, _of_readers(name))
    accelerator.is_last_process = property(lambda self: self.state.is_last_process)
    for name, counting in {"gather": _gather, "gather_object": _gather_object, "reduce": _reduce}.items():
        counted = counting(getattr(module, name))
        for holder in (module, utils):  # scripts import them by name
            setattr(holder, name, counted)
    accelerator.check_trigger = _check_trigger(accelerator.check_trigger)
    accelerator.split_between_processes = _split_between_processes
    accelerator.clip_grad_norm_ = saying(accelerator.clip_grad_norm_)
    accelerator.get_state_dict = keeping_ties(accelerator.get_state_dict)
    accelerator._prepare_deepspeed = _preparing(accelerator._prepare_deepspeed)
    accelerator.prepare_data_loader = _with_sizes(accelerator.prepare_data_loader)
    dispatcher = data_loader.DataLoaderDispatcher
    dispatcher.__init__ = _dispatching(dispatcher.__init__)
    scheduler.AcceleratorState = _counting(scheduler.AcceleratorState)
    PartialState._prepare_backend = _on_cpu(PartialState._prepare_backend)
    HfDeepSpeedConfig.__init__ = _noticing(HfDeepSpeedConfig.__init__)
    DeepSpeedPlugin.deepspeed_config_process = _leaving_ours(DeepSpeedPlugin.deepspeed_config_process)


def same() -> int:
    """Ranks in a row that are one reader, by the DeepSpeed configuration that Accelerate now uses."""
    from accelerate.state import AcceleratorState

    if not has_state():
        return 1
    state = AcceleratorState()
    plugin = state.deepspeed_plugin
    return 1 if plugin is None else replicas(plugin.deepspeed_config, state.num_processes)


def has_state() -> bool:
    """True once Accelerate has begun."""
    from accelerate.state import AcceleratorState

    return bool(AcceleratorState._shared_state)


_noticed = False


def notice(raw: Any) -> None:
    """Remember a DeepSpeed configuration with the block before Accelerate has looked for a backend."""
    global _noticed
    _noticed |= isinstance(raw, Mapping) and "axonn" in raw


def _noticing(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **keywords)
        notice(self.config)

    return __init__


def _launched_with_block() -> bool:
    """True if accelerate launch was given a configuration that holds the block."""
    raw = read(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none"))
    return isinstance(raw, Mapping) and "axonn" in raw


def _on_cpu(original: Callable[..., tuple]) -> Callable[..., tuple]:
    """Accelerate knows no backend for DeepSpeed on CPUs, where every rank would take itself to be alone: gloo is it."""

    @wraps(original)
    def prepare(self: Any, cpu: bool = False, *rest: Any, **keywords: Any) -> tuple:
        backend, kind = original(self, cpu, *rest, **keywords)
        distributed = not cpu and int(os.environ.get("LOCAL_RANK", -1)) != -1
        asked = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        if not (distributed and asked and (_noticed or _launched_with_block())):
            return backend, kind
        build_locks.warn()  # DeepSpeed builds its own kernel for this backend before it looks at a configuration
        return backend or "gloo", kind

    return prepare


def replica() -> bool:
    """True if another rank before this one reads the same."""
    found = same()
    return found > 1 and dist.get_rank() % found > 0


def _of_readers(name: str) -> property:
    def counted(self: Any) -> int:
        found: int = getattr(self.state, name) // same()
        if name == "process_index":  # of who is asked which one it is, and not how many there are
            return found
        return found * ask()

    return property(counted)


def _gather(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def gather(tensor: Any) -> Any:
        """Gather from every reader once, and only rows that are its own."""
        from accelerate.utils.operations import recursively_apply

        from axonn_plugins.hosts.transformers.last_batch import divides
        from axonn_plugins.hosts.transformers.uneven import gathered

        each, tensor = same(), getattr(tensor, "axonn_whole", tensor)

        def of_readers(one: torch.Tensor) -> torch.Tensor:
            whole, ranks = original(one), dist.get_world_size()
            rows = whole.reshape(ranks, whole.shape[0] // ranks, *whole.shape[1:])
            return rows[::each].flatten(0, 1)

        if not divides():
            return recursively_apply(gathered, tensor, of_readers, error_on_other_type=True)
        return original(tensor) if each == 1 else recursively_apply(of_readers, tensor, error_on_other_type=True)

    return gather


def _gather_object(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def gather_object(objects: Any) -> Any:
        from axonn_plugins.hosts.transformers.last_batch import share

        return original([] if replica() or not share() else objects)

    return gather_object


def _reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def reduce(tensor: Any, reduction: str = "mean", scale: float = 1.0) -> Any:
        """A sum has every reader once, and a mean each by the rows that it computes on."""
        from accelerate.utils.operations import recursively_apply

        from axonn_plugins.hosts.transformers.last_batch import share

        if not share() or reduction in ("sum", "none") and replica():
            tensor = recursively_apply(torch.zeros_like, tensor)
        elif reduction == "mean" and share() != 1:
            tensor = recursively_apply(lambda one: one * share(), tensor)
        return original(tensor, reduction, scale)

    return reduce


def _check_trigger(original: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(original)
    def check_trigger(self: Any) -> bool:
        """Accelerate's own, for whichever rank has set it."""
        if same() > 1:
            flag = torch.tensor(int(self.flag_tensor or 0), device=self.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            self.flag_tensor = flag
        return original(self)

    return check_trigger


def _split_between_processes(self: Any, inputs: Any, apply_padding: bool = False) -> Any:
    """Split over readers; see Accelerate's."""
    from accelerate.state import PartialState

    state, each = PartialState(), same()
    counted = state if each == 1 else Readers(state, each)
    return PartialState.split_between_processes(counted, inputs, apply_padding=apply_padding)


def _dispatching(original: Callable[..., None]) -> Callable[..., None]:
    """The loader of which rank 0 reads all: it reads a batch for each reader, and a rank takes its reader's."""

    @wraps(original)
    def __init__(self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **keywords)
        each = same()
        if each > 1:
            self.state, self.slice_fn = _Dispatched(self.state, each), _slice_of_reader(self.slice_fn, each)

    return __init__


class _Dispatched(Readers):
    def __getattr__(self, name: str) -> Any:
        return getattr(self._counted, name) if name == "process_index" else super().__getattr__(name)


def _slice_of_reader(original: Callable[..., Any], each: int) -> Callable[..., Any]:
    def of_reader(data: Any, part: slice, process_index: int, num_processes: int) -> Any:
        size, reader = part.stop - part.start, process_index // each
        if part.start == process_index * size:  # not the beginning of the first batch, which every rank keeps
            part = slice(reader * size, (reader + 1) * size)
        return original(data, part, process_index=reader, num_processes=num_processes)

    return of_reader


def _counting(original: Any) -> Callable[..., Any]:
    """The state that a scheduler asks how many steps of one process a step of all is: as many as it has batches of the script's."""

    def state() -> Any:
        counted = original()
        read = getattr(counted.deepspeed_plugin, "axonn_batches", None)
        return Readers(counted, same()) if read is None else SimpleNamespace(num_processes=read)

    return state


def _preparing(original: Callable[..., tuple]) -> Callable[..., tuple]:
    @wraps(original)
    def prepare(self: Any, *given: Any) -> tuple:
        """Accelerate's, after the sizes that are "auto" were chosen for the model among what is prepared."""
        from axonn_plugins.hosts.transformers.boxes import count_boxes

        plugin = self.deepspeed_plugin
        raw = plugin.deepspeed_config
        models = [one for one in given if isinstance(one, nn.Module)]
        loaders = [one for one in given if isinstance(one, DataLoader)]
        if models and isinstance(raw, Mapping) and "axonn" in raw:
            _refuse_second(self, models[0], given)
            _refuse_sizes(self)
            count_boxes(models[0])
        if models and open_sizes(raw):
            steps = raw.get("gradient_accumulation_steps")
            steps = steps if isinstance(steps, int) else self.gradient_accumulation_steps
            micro = min((one.batch_size for one in loaders if one.batch_size), default=raw.get(_MICRO))
            if not isinstance(micro, int):
                raise ConfigError(
                    'axonn.tensor_parallel has sizes that are "auto", and accelerator.prepare was given a model without a DataLoader that has a '
                    "batch_size; give it both in one call, or write train_micro_batch_size_per_gpu as a number"
                )
            of_reader = settle(raw, models[0], micro, steps, 1 if self.split_batches else self.state.num_processes)
            plugin.axonn_batches = max(raw["train_batch_size"] // (micro * steps), 1)
            if not self.split_batches:
                given = tuple(
                    read_by(one, max(one.batch_size * of_reader // micro, 1) if one.batch_size else of_reader)
                    if isinstance(one, DataLoader)
                    else one
                    for one in given
                )
        return original(self, *given)

    return prepare


def _refuse_second(accelerator: Any, model: nn.Module, given: tuple) -> None:
    """Refuse to train a model by another's engine.

    Raises:
        ConfigError: the Accelerator has prepared another model, to whose engine its `backward` gives every loss.
    """
    known = accelerator.deepspeed_engine_wrapped
    trained = any(hasattr(one, "param_groups") or type(one).__name__ == "DummyOptim" for one in given)
    if known is not None and trained and known.engine.module is not model:
        raise ConfigError(
            f"accelerator.prepare was given a second model, {type(model).__name__}, with an optimizer, and under DeepSpeed accelerator.backward knows "
            f"the engine of the first alone, {type(known.engine.module).__name__}; give each model an Accelerator of its own "
            '(Accelerator(deepspeed_plugins={"first": ..., "second": ...})), or make both parts of one module with one optimizer'
        )


def _refuse_sizes(accelerator: Any) -> None:
    """Refuse ranks that Accelerate lets read the same besides those of the block: steps would have fewer samples.

    Raises:
        ConfigError: names the size.
    """
    for size in ("tp_size", "cp_size", "sp_size"):
        if (found := getattr(getattr(accelerator, "parallelism_config", None), size, 1)) > 1:
            raise ConfigError(
                f"{size} = {found} in Accelerate's ParallelismConfig stands beside the axonn block, which says itself which ranks read the same data; leave "
                "it out, and write gx, gy and gz, or gz.sequence, in axonn.tensor_parallel"
            )


def _with_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def prepare_data_loader(self: Any, *given: Any, **keywords: Any) -> Any:
        from axonn_plugins.hosts.transformers.unfilled import end_with_samples, keep_whole, redraw

        if self.deepspeed_plugin is not None and open_sizes(self.deepspeed_plugin.deepspeed_config):
            raise ConfigError(
                'axonn.tensor_parallel has sizes that are "auto", and accelerator.prepare was given a DataLoader before the model that they are chosen '
                "for; give it both in one call, or write gx, gy and gz as numbers"
            )
        trains, loader = getattr(self, "axonn_trainer", False), given[0] if given else keywords["data_loader"]
        if trains and self.num_processes > 1:
            if self.dispatch_batches is False and isinstance(loader.dataset, IterableDataset):
                keep_whole(loader)
            if not self.use_seedable_sampler and not self.dispatch_batches:
                redraw(loader, self.device)
        found = original(self, *given, **keywords)
        # TRL's trainers of generated text number the rows of all readers, which have to be equally many.
        lists = getattr(loader.collate_fn, "__name__", "") == "identity"
        return end_with_samples(found, together=lists) if trains else found

    return prepare_data_loader


def _leaving_ours(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def deepspeed_config_process(self: Any, prefix: str = "", *rest: Any, **keywords: Any) -> None:
        """Accelerate's, which takes every "auto" for one of its own: not those of our block."""
        if prefix.partition(".")[0] != "axonn":
            original(self, prefix, *rest, **keywords)

    return deepspeed_config_process
