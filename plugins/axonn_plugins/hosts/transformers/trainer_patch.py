"""The HF Trainer counts readers, not ranks, where it deals out samples; without the block nothing is different."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from types import ModuleType
from typing import Any

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.patch import read
from axonn_plugins.hosts.transformers import evaluating_first, neftune, trainer_sums
from axonn_plugins.hosts.transformers.accelerate_patch import has_state, notice, same
from axonn_plugins.hosts.transformers.asking import ask
from axonn_plugins.hosts.transformers.kinds import count_votes
from axonn_plugins.hosts.transformers.readers import Readers, has_block, replicas
from axonn_plugins.hosts.transformers.sizes import open_sizes, settle
from axonn_plugins.hosts.transformers.tokens import refuse_heads, refuse_orders

_MICRO = "train_micro_batch_size_per_gpu"
_SIZE, _BOTH = ("world_size",), ("world_size", "process_index")
# The Trainer's methods, and what of its arguments counts readers while they run. Elsewhere they count ranks, each of
# which writes a file of its own.
_METHODS = {
    "_get_dataloader": _BOTH,
    "_get_train_sampler": _BOTH,
    "get_total_train_batch_size": _SIZE,
    "training_step": _SIZE,
    "evaluate": _SIZE,
    "predict": _SIZE,
}
_counting: Counter[str] = Counter()


def patch_configuration(module: ModuleType) -> None:
    """Add to ``transformers.integrations.deepspeed``; harmless when called again."""
    kind = module.HfTrainerDeepSpeedConfig
    original = kind.trainer_config_process
    if getattr(original, "axonn", False):
        return

    @wraps(original)
    def trainer_config_process(self: Any, args: Any, auto_find_batch_size: bool = False) -> None:
        """The Trainer's; while sizes are "auto", so are a rank's samples, and those of a step need not be what it counts."""
        unsettled, micro = open_sizes(self.config), self.config.get(_MICRO)
        original(self, Readers(args, replicas(self.config, args.world_size)), auto_find_batch_size or unsettled)
        if unsettled and micro == "auto":
            self.config[_MICRO] = micro

    trainer_config_process.axonn = True  # type: ignore[attr-defined]
    kind.trainer_config_process = trainer_config_process


def patch_arguments(module: ModuleType) -> None:
    """Add to ``transformers.training_args``; harmless when called again."""
    kind = module.TrainingArguments
    if getattr(kind, "axonn", False):
        return
    kind.axonn = True
    for name in _BOTH:
        setattr(kind, name, _counted(name, getattr(kind, name)))
    original = kind.__post_init__

    @wraps(original)
    def __post_init__(self: Any) -> None:
        if self.deepspeed:
            notice(read(self.deepspeed))
        with _readers(_SIZE, -_counting["world_size"]):
            original(self)

    kind.__post_init__ = __post_init__

    def __init_subclass__(derived: Any, **named: Any) -> None:
        """A class that others derive, as TRL's, works out batches of all readers when its arguments are known."""
        super(kind, derived).__init_subclass__(**named)
        if "__post_init__" in vars(derived):
            derived.__post_init__ = _within(derived.__post_init__, _SIZE)

    kind.__init_subclass__ = classmethod(__init_subclass__)


def patch_trainer(module: ModuleType) -> None:
    """Add to ``transformers.trainer``; harmless when called again."""
    trainer = module.Trainer
    if getattr(trainer, "axonn", False):
        return
    trainer.axonn = True
    from transformers.integrations import neftune as theirs

    neftune.patch(theirs)
    for name, what in _METHODS.items():
        setattr(trainer, name, _within(getattr(trainer, name), what))
    trainer._get_num_items_in_batch = _of_kept_targets(trainer._get_num_items_in_batch)
    for name in ("_get_train_sampler", "_get_eval_sampler"):
        setattr(trainer, name, _grouping(getattr(trainer, name), module.LengthGroupedSampler))
    trainer.__init__ = _choosing(trainer.__init__)
    trainer.train = _making(trainer.train)
    trainer.call_model_init = _made(trainer.call_model_init)
    trainer._hp_search_setup = _choosing_anew(trainer._hp_search_setup)
    trainer.create_accelerator_and_postprocess = _marking(trainer.create_accelerator_and_postprocess)
    trainer_sums.patch(module)
    evaluating_first.patch(module)
    with suppress(ImportError):  # of older transformers
        from transformers.trainer_jit_checkpoint import JITCheckpointCallback

        _save_together(JITCheckpointCallback)


def _save_together(kind: Any) -> None:
    """Let a checkpoint that SIGTERM asks for be that of a step's end on all ranks, as soon as one was told.

    A rank's signal comes when it comes, and under DeepSpeed weights are another step's already where the callback looks before `optimizer.step`.
    """

    def ends(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def on_step_end(self: Any, *given: Any, **named: Any) -> None:
            manager = self.jit_manager
            if manager and has_block(self.trainer.accelerator):
                manager.is_checkpoint_requested = count_votes(self.trainer, [manager.is_checkpoint_requested])[0] > 0
            original(self, *given, **named)

        return on_step_end

    def waits(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def elsewhere(self: Any, *given: Any, **named: Any) -> None:
            if not (self.jit_manager and has_block(self.trainer.accelerator)):
                original(self, *given, **named)

        return elsewhere

    kind.on_step_end = ends(kind.on_step_end)
    for name in ("on_pre_optimizer_step", "on_step_begin", "on_epoch_end"):
        setattr(kind, name, waits(getattr(kind, name)))


def _choosing(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, *inputs: Any, **keywords: Any) -> None:
        original(self, *inputs, **keywords)
        self.axonn_optimizers = self.optimizer, self.lr_scheduler
        _settle_open(self, self.model)
        refuse_orders(self)
        refuse_heads(self)

    return __init__


def _making(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def train(self: Any, *given: Any, **named: Any) -> Any:
        """The Trainer's, which in a search makes the trial's model before or behind its arguments, by its version."""
        self.axonn_made = False
        try:
            return original(self, *given, **named)
        finally:
            vars(self).pop("axonn_made", None)

    return train


def _made(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call_model_init(self: Any, *given: Any, **named: Any) -> Any:
        model = original(self, *given, **named)
        if hasattr(self, "axonn_made"):
            self.axonn_made = True
            _settle_open(self, model)
        return model

    return call_model_init


def _choosing_anew(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def _hp_search_setup(self: Any, trial: Any) -> None:
        """The Trainer's, which reads the configuration again for each trial; batches are the script's, or the trial's, until sizes are chosen for them."""
        for name, (given, settled) in vars(self).get("axonn_batches", {}).items():
            if trial is not None and getattr(self.args, name) == settled:
                setattr(self.args, name, given)
        original(self, trial)
        if getattr(self, "axonn_made", False):
            _settle_open(self, self.model)

    return _hp_search_setup


def _settle_open(self: Any, model: Any) -> None:
    """Choose the sizes that the configuration leaves open."""
    plugin = getattr(self.accelerator.state, "deepspeed_plugin", None)
    if plugin is None or not open_sizes(plugin.deepspeed_config):
        return
    args = self.args
    micro, steps = args.per_device_train_batch_size, args.gradient_accumulation_steps
    of_reader = settle(plugin.deepspeed_config, model, micro, steps, self.accelerator.state.num_processes)
    read = max(args.per_device_eval_batch_size * of_reader // micro, 1)
    chosen = {"per_device_train_batch_size": of_reader, "per_device_eval_batch_size": read}
    self.axonn_batches = {name: (getattr(args, name), size) for name, size in chosen.items()}
    for name, size in chosen.items():
        setattr(args, name, size)
    self._train_batch_size = args.train_batch_size


def _marking(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def create_accelerator_and_postprocess(self: Any) -> None:
        original(self)
        self.accelerator.axonn_trainer = has_block(self.accelerator)
        if self.accelerator.axonn_trainer:
            self.args.average_tokens_across_devices = True  # readers are one process, which has no mean of its own
            if hasattr(self, "_precompute_ref_logps"):
                self._precompute_ref_logps = partial(_precomputing, self.accelerator, self._precompute_ref_logps)

    return create_accelerator_and_postprocess


def _precomputing(accelerator: Any, original: Callable[..., Any], dataset: Any, *rest: Any, **named: Any) -> Any:
    """TRL's reference of each sample; loaders are filled up meanwhile with the first samples, as Accelerate's are.

    Raises:
        ConfigError: rank 0 would write it where no other finds it.
    """
    if accelerator.state.num_processes > 1 and not getattr(dataset, "cache_files", True):
        raise ConfigError(
            "precompute_ref_log_probs = True needs a dataset that is in files: of one in memory, each process keeps what it computes in a temporary "
            "folder of its own; read it with datasets.load_dataset or load_from_disk, or leave the argument out"
        )
    accelerator.axonn_trainer = False
    try:
        return original(dataset, *rest, **named)
    finally:
        accelerator.axonn_trainer = True


def _grouping(original: Callable[..., Any], kind: type) -> Callable[..., Any]:
    @wraps(original)
    def sampler(self: Any, *rest: Any, **named: Any) -> Any:
        """The Trainer's own; what is grouped by length are batches that all readers read together."""
        found = original(self, *rest, **named)
        if isinstance(found, kind) and has_block(self.accelerator) and not self.accelerator.split_batches:
            found.batch_size *= self.accelerator.num_processes  # type: ignore[attr-defined]
        return found

    return sampler


def _of_kept_targets(original: Callable[..., Any]) -> Callable[..., Any]:
    """The divisor of a step's losses, of the targets that the goldfish loss keeps."""

    @wraps(original)
    def count(self: Any, batch_samples: list, *rest: Any, **keywords: Any) -> Any:
        mask = getattr(self.model_wrapped, "label_mask", None)
        if mask is not None:
            batch_samples = [mask.arguments((), dict(batch), self.model.training)[1] for batch in batch_samples]
        return original(self, batch_samples, *rest, **keywords)

    return count


def _counted(name: str, original: property) -> property:
    def get(self: Any) -> int:
        assert original.fget is not None
        found: int = original.fget(self)
        if name == "world_size":
            found *= ask()
        return found // _same(self, found) if _counting[name] else found

    return property(get, doc=original.__doc__)


def _same(args: Any, found: int) -> int:
    """Ranks in a row that are one reader, also before there is an Accelerator; of `found` ranks, then."""
    plugin = None if has_state() else getattr(args, "deepspeed_plugin", None)
    return same() if plugin is None else replicas(plugin.deepspeed_config, found)


def _within(method: Callable[..., Any], what: tuple[str, ...]) -> Callable[..., Any]:
    @wraps(method)
    def counting(self: Any, *inputs: Any, **keywords: Any) -> Any:
        with _readers(what):
            return method(self, *inputs, **keywords)

    return counting


@contextmanager
def _readers(what: tuple[str, ...], times: int = 1) -> Iterator[None]:
    changes = dict.fromkeys(what, times)
    _counting.update(changes)
    try:
        yield
    finally:
        _counting.subtract(changes)
