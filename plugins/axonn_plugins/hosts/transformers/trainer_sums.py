"""Sums of the Trainer over samples, ranks and parameters, as in one process; without the block nothing is different."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from types import ModuleType
from typing import Any

import torch
from torch import nn

from axonn_plugins.goldfish import IGNORED
from axonn_plugins.hosts.transformers.accelerate_patch import replica, same
from axonn_plugins.hosts.transformers.balance import balanced
from axonn_plugins.hosts.transformers.kinds import count_votes
from axonn_plugins.hosts.transformers.last_batch import Nothing, Part, counting, last, share, weighed_by_rows
from axonn_plugins.hosts.transformers.means import in_one_process
from axonn_plugins.hosts.transformers.neftune import noisy
from axonn_plugins.hosts.transformers.padded_targets import refuse_padded_targets
from axonn_plugins.hosts.transformers.readers import as_one_reader, has_block
from axonn_plugins.hosts.transformers.tokens import of_all_readers
from axonn_plugins.hosts.transformers.unfilled import endless, shared, varying


def patch(module: ModuleType) -> None:
    """Add to ``transformers.trainer``."""
    trainer, model = module.Trainer, module.PreTrainedModel  # type: ignore[attr-defined]
    trainer._get_num_items_in_batch = _counting_items(trainer._get_num_items_in_batch)
    trainer.train = _stepping(trainer.train)
    trainer.training_step = _step_of_trainer(trainer.training_step)
    trainer.compute_loss = _loss_of_trainer(trainer.compute_loss)
    trainer.evaluation_loop = _evaluating(trainer.evaluation_loop)
    trainer._finalize_training = _finalize(trainer._finalize_training)
    trainer.store_flos = _store_flos(trainer.store_flos)
    trainer.floating_point_ops = _of_padded(trainer.floating_point_ops, lambda self: has_block(self.accelerator))
    trainer._track_num_input_tokens = _of_padded(
        trainer._track_num_input_tokens,
        lambda self: has_block(self.accelerator) and self.args.include_num_input_tokens_seen == "all",
    )
    trainer.get_num_trainable_parameters = _num_trained(trainer.get_num_trainable_parameters)
    model.num_parameters = _num_parameters(model.num_parameters)
    module.get_model_param_count = _param_count(module.get_model_param_count)  # type: ignore[attr-defined]


def _counting_items(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def count(self: Any, batches: list[Any], *rest: Any, **keywords: Any) -> Any:
        """Number of samples that are not filled in; filled-in ones are left out of `batches` as well."""
        found = last(batches[-1]) if batches else None
        if found is not None:
            batches[-1] = found.part_of(batches[-1])
        elif batches and varying():
            batches[:] = weighed_by_rows(batches, self.accelerator)
        refuse_padded_targets(self, batches)
        own = [batch.counted() if isinstance(batch, Nothing) else batch for batch in batches]
        items = original(self, own, *rest, **keywords)
        self._axonn_counted = items is not None or _by_kept(self)
        return items

    return count


def _by_kept(self: Any) -> bool:
    """True if the engine weighs the readers' losses by the targets that the goldfish loss keeps."""
    return self.model.training and _mask(self) is not None


def _mask(self: Any) -> Any:
    return getattr(self.model_wrapped, "label_mask", None)


def _without_targets(self: Any, part: Part) -> Part:
    """A row that is filled in has none, where it is targets that are counted."""
    if isinstance(part, Nothing) and _by_kept(self) and (name := _mask(self).place((), part)) is not None:
        part[name] = torch.full_like(part[name], IGNORED)
    return part


def _stepping(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def train(self: Any, *rest: Any, **keywords: Any) -> Any:
        """The Trainer's, whose steps a class derived from it may have replaced."""
        if not has_block(self.accelerator):
            return original(self, *rest, **keywords)
        with _replaced(self, training_step=_training_step):
            return original(self, *rest, **keywords)

    return train


def _step_of_trainer(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def training_step(self: Any, *given: Any, **keywords: Any) -> Any:
        """The Trainer's, which a `train` of a script's own calls as well."""
        step = partial(original, self)
        if vars(self).get("_axonn_in_step") or not has_block(self.accelerator):
            return step(*given, **keywords)
        return _training_step(self, step, *given, **keywords)

    return training_step


def _training_step(self: Any, original: Callable[..., Any], model: Any, inputs: Any, *rest: Any, **kw: Any) -> Any:
    """The trainer's own, whose loss a script may compute itself; where `compute_loss` does not, it is taken for a mean over rows."""

    def counted(loss: torch.Tensor) -> torch.Tensor:
        if self._axonn_weighed or share() == 1:
            return loss
        return loss * share() if share() else loss.nan_to_num() * 0

    def backward(_: Any, original: Callable[..., Any], loss: torch.Tensor, **named: Any) -> None:
        original(counted(loss), **named)

    self._axonn_weighed, self._axonn_in_step = False, True
    try:
        with counting(inputs), noisy(inputs), _replaced(self, compute_loss=in_one_process):
            with _replaced(self.accelerator, backward=backward):
                return counted(original(model, _without_targets(self, inputs), *rest, **kw))
    finally:
        self._axonn_in_step = False


def _evaluating(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def evaluation_loop(self: Any, *rest: Any, **keywords: Any) -> Any:
        """The Trainer's, whose steps and losses a class derived from it may have replaced."""
        if not has_block(self.accelerator):
            return original(self, *rest, **keywords)
        self.gather_function = _gathering(self)
        with _rows_of_reader(self), _replaced(self, prediction_step=_prediction_step, compute_loss=_compute_loss):
            return original(self, *rest, **keywords)

    return evaluation_loop


@contextmanager
def _rows_of_reader(self: Any) -> Iterator[None]:
    """Rows of this reader, by which its loss counts: where the script's batches are split they are fewer than it says."""
    rows = self.args.per_device_eval_batch_size
    if self.accelerator.split_batches:
        self.args.per_device_eval_batch_size = max(rows // self.accelerator.num_processes, 1)
    try:
        yield
    finally:
        self.args.per_device_eval_batch_size = rows


@contextmanager
def _replaced(self: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    before = dict(vars(self))
    for name, replacing in methods.items():
        setattr(self, name, partial(replacing, self, getattr(self, name)))
    try:
        yield
    finally:
        for name in methods:
            delattr(self, name)
            if name in before:
                setattr(self, name, before[name])


def _prediction_step(self: Any, original: Callable[..., Any], model: Any, inputs: Any, *rest: Any, **kw: Any) -> Any:
    """The trainer's own; what is gathered next is its loss, if there is one."""
    generates = getattr(self.args, "predict_with_generate", False) and not (rest or [kw.get("prediction_loss_only")])[0]
    with _counting_loss(self, model) if generates else nullcontext(model) as counted, of_all_readers(self):
        found = _predicted(self, original, counted, inputs, *rest, **kw)
    self._axonn_loss = found[0] is not None
    return found


def _predicted(self: Any, original: Callable[..., Any], model: Any, inputs: Any, *rest: Any, **kw: Any) -> Any:
    from transformers.trainer_pt_utils import find_batch_size

    found = last(inputs)
    if found is None:
        with as_one_reader(self.accelerator.device) if shared() else nullcontext():
            with balanced(self, 1):
                return original(model, inputs, *rest, **kw)
    self._axonn_counted, self._axonn_weighed, part = False, False, found.part_of(inputs)
    flat = found.cut and count_votes(self, [find_batch_size(inputs) != found.kept])[0] > 0
    with counting(part), balanced(self, part.share or 1):
        loss, logits, labels = original(model, part, *rest, **kw)
    if loss is not None:
        with nullcontext() if self._axonn_weighed else counting(part):  # a step may have computed it in its own way
            loss = self.accelerator.reduce(loss, "mean")
    if flat:  # one row whatever it holds, which is not left out by its place
        nothing = isinstance(labels, torch.Tensor) and isinstance(part, Nothing)
        return loss, logits, torch.full_like(labels, IGNORED) if nothing else labels
    if "inputs" in self.args.include_for_metrics:
        inputs.update(found.filled(inputs))
    return loss, found.filled(logits), found.filled(labels)


def _gathering(self: Any) -> Callable[..., Any]:
    """The Trainer's way to gather, without rows that fill the last batch; where it counts that batch's loss as any other, so does this."""
    of_samples = self.gather_function
    alike = of_samples == self.accelerator.gather  # as Seq2SeqTrainer has it
    as_objects = getattr(of_samples, "keywords", {}).get("use_gather_object")  # of what else is gathered so
    if alike:
        of_samples = self.accelerator.gather_for_metrics
    self._axonn_loss = False

    def gather(value: Any) -> Any:
        loss, self._axonn_loss = self._axonn_loss, False
        if loss and (alike or endless()):
            return self.accelerator.gather(value)
        return self.accelerator.gather_for_metrics(value) if loss and as_objects else of_samples(value)

    return gather


class _CountedLoss:
    """A model whose loss is the Trainer's."""

    def __init__(self, trainer: Any, model: Any) -> None:
        self._trainer, self._model, self._smoother = trainer, model, trainer.label_smoother

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        self._trainer.label_smoother = self._smoother
        try:
            loss, outputs = self._trainer.compute_loss(self._model, inputs, return_outputs=True)
        finally:
            self._trainer.label_smoother = None
        return {**outputs, "loss": loss}


@contextmanager
def _counting_loss(self: Any, model: Any) -> Iterator[_CountedLoss]:
    """For Seq2SeqTrainer, which calls the model beside ``generate`` and takes its loss, or one that it smooths, as that of all readers."""
    smoother = self.label_smoother
    try:
        counted = _CountedLoss(self, model)
        self.label_smoother = None
        yield counted
    finally:
        self.label_smoother = smoother


def _compute_loss(
    self: Any,
    original: Callable[..., Any],
    model: Any,
    inputs: Any,
    return_outputs: bool = False,
    num_items_in_batch: Any = None,
    **more: Any,
) -> Any:
    """The trainer's own, over the items of all readers also where a prediction step, as TRL's, does not count them."""
    if num_items_in_batch is None:
        num_items_in_batch = self._get_num_items_in_batch([inputs], self.args.device)
    mask = _mask(self)
    if mask is not None and model is not self.model_wrapped:  # the engine's own model, which masks nothing
        inputs = mask.arguments((), dict(inputs), model.training)[1]
    more["num_items_in_batch"] = num_items_in_batch
    return in_one_process(self, original, model, inputs, return_outputs, **more)


def _loss_of_trainer(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def compute_loss(self: Any, *given: Any, **keywords: Any) -> Any:
        return in_one_process(self, partial(original, self), *given, own=False, **keywords)

    return compute_loss


def _finalize(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def finalize(self: Any, *rest: Any, **keywords: Any) -> Any:
        """The loss of steps after the last that was logged is that of all readers."""
        if same() > 1 or has_block(self.accelerator):
            self._tr_loss = self.accelerator.reduce(self._tr_loss, "mean")
        return original(self, *rest, **keywords)

    return finalize


def _store_flos(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def store(self: Any) -> None:
        """Store the rows of every reader once."""
        if replica():
            self.current_flos *= 0  # of the type that it has on the others
        original(self)

    return store


def _of_padded(original: Callable[..., Any], counts: Callable[[Any], bool]) -> Callable[..., Any]:
    @wraps(original)
    def counted(self: Any, inputs: Any) -> Any:
        """The trainer's own count, without what is filled in; where padding `counts`, rows are as long as one process pads them."""
        rows = inputs.counted() if isinstance(inputs, Nothing) else inputs
        return original(self, _as_long_as_all(self, rows) if counts(self) else rows)

    return counted


def _as_long_as_all(self: Any, inputs: Any) -> Any:
    """Inputs whose first is of no values, as long as the longest of all readers; all readers call it."""
    name = getattr(self.model, "main_input_name", "input_ids")
    rows = inputs.get(name) if isinstance(inputs, Mapping) else None
    if not isinstance(rows, torch.Tensor) or rows.dim() < 2 or self.accelerator.num_processes == 1:
        return inputs
    counted = len(rows) > 0
    every = self.accelerator.gather(counted * torch.tensor([rows.shape], device=self.accelerator.device))
    if "position_ids" in inputs and int(every[:, 0].max()) == 1:  # samples that follow each other in one row
        return inputs
    longest = every[:, 1:].max(0).values.tolist()
    return {**inputs, name: rows.new_empty(()).expand(len(rows), *longest)}


def absent(parameters: Iterable[nn.Parameter]) -> int:
    """Elements of the serial parameters that this rank does not have."""
    layouts = [(parameter, getattr(parameter, "axonn_layout", None)) for parameter in parameters]
    return sum(math.prod(layout.serial_shape) - p.numel() for p, layout in layouts if layout is not None)


def _num_parameters(original: Callable[..., int]) -> Callable[..., int]:
    @wraps(original)
    def num_parameters(self: Any, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        embeddings = [m.weight for m in self.modules() if exclude_embeddings and isinstance(m, nn.Embedding)]
        left_out = {id(weight) for weight in embeddings}
        counted = (p for p in self.parameters() if (p.requires_grad or not only_trainable) and id(p) not in left_out)
        return original(self, only_trainable, exclude_embeddings) + absent(counted)

    return num_parameters


def _num_trained(original: Callable[..., int]) -> Callable[..., int]:
    @wraps(original)
    def get_num_trainable_parameters(self: Any) -> int:
        return original(self) + absent(p for p in self.model.parameters() if p.requires_grad)

    return get_num_trainable_parameters


def _param_count(original: Callable[..., int]) -> Callable[..., int]:
    @wraps(original)
    def count(model: Any, trainable_only: bool = False) -> int:
        return original(model, trainable_only) + absent(
            p for p in model.parameters() if p.requires_grad or not trainable_only
        )

    return count
