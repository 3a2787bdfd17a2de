"""Forward and backward passes of one microbatch over one stage, as DeepSpeed's PipelineEngine makes them, without its clones."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from axonn_plugins.hosts.common.goldfish import LabelMask, Weight
from axonn_plugins.hosts.deepspeed.optim.wrapped import EngineOptimizer
from axonn_plugins.pipeline.packing import Message
from axonn_tp.context.model import Part

Values = Tensor | tuple[Tensor, ...]


@dataclass
class Kept:
    """The tensors that a stage keeps of a microbatch from forward to backward.

    Attributes:
        inputs: leaves whose gradients go to the stage before.
        wanted: by input: whether that stage asks for it.
        outputs: that want a gradient from the stage after.
        loss: on the last stage.
        call: of the stage on its shares, where ranks share sequences.
    """

    inputs: tuple[Tensor, ...]
    wanted: tuple[bool, ...]
    outputs: tuple[Tensor, ...]
    loss: Tensor | None
    call: Any = None


class _SameMemory(torch.autograd.Function):
    """A leaf's values, which a layer may change in place as it may not change a leaf or its view."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor) -> Tensor:
        return leaf.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def with_length(message: Message, call: Any) -> Message:
    """A message of shares, which also says how many tokens a sequence has.

    Args:
        message: a stage's outputs.
        call: that made them; None where nothing of it was on shares, as where no input has samples and tokens.

    Raises:
        ValueError: nothing was.
    """
    if call is None:
        raise ValueError(
            "no input of the pipeline has (samples, tokens, ...) in its first dims, which ranks could share"
        )
    length = torch.tensor([call.tokens], device=call.places.device)
    return message._replace(tensors=(*message.tensors, length), differentiable=(*message.differentiable, False))


def without_length(message: Message) -> tuple[Message, int]:
    """The message that `with_length` was given, and the tokens."""
    *tensors, length = message.tensors
    assert length is not None
    return message._replace(tensors=tuple(tensors), differentiable=message.differentiable[:-1]), int(length)


def checkpoint_layers(function: Any, *inputs: Tensor) -> Any:
    """Activation checkpointing in which weights get their gradients also where no input wants one."""
    return checkpoint(function, *inputs, use_reentrant=False)


_OTHERS = (checkpoint_layers, checkpointing.non_reentrant_checkpoint)
"""Functions of activation checkpointing that are not reentrant."""


def keep_gradients(reentrant: Callable[..., Any]) -> Callable[..., Any]:
    """A reentrant checkpoint, as DeepSpeed's is by default, which leaves layers that read no gradient's input to another.

    Their weights would have no gradients, nor would all before the next stage: those of the layers that read tokens.
    """

    @wraps(reentrant)
    def checkpointed(function: Any, *inputs: Any) -> Any:
        def of_views(*given: Any) -> Any:
            # What a layer hands on as it was keeps its values when DeepSpeed, which partitions its inputs, takes theirs away.
            return function(*(value.view_as(value) if isinstance(value, Tensor) else value for value in given))

        wanted = any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        return (reentrant if wanted or not torch.is_grad_enabled() else checkpoint_layers)(of_views, *inputs)

    return checkpointed


def _as_tuple(values: Any, what: str) -> tuple[Tensor, ...]:
    found = (values,) if isinstance(values, Tensor) else values
    if isinstance(found, (tuple, list)) and all(isinstance(value, Tensor) for value in found):
        return tuple(found)
    odd = next(
        value for value in (found if isinstance(found, (tuple, list)) else [found]) if not isinstance(value, Tensor)
    )
    among = " in a tuple" if odd is not values else ""
    raise TypeError(
        f"{what} of a pipeline stage is {type(odd).__name__}{among}; make it a tensor or a tuple of tensors"
    )


class StagePasses(PipelineEngine):
    """The part of the engine that computes."""

    _ahead: deque[Any]
    _kept: dict[int, Kept]
    _label_mask: LabelMask | None
    most_alive: int
    total_loss: Any
    total_additional_losses: Any

    def _forward_microbatch(self, microbatch: int, message: Message | None, training: bool) -> Message | None:
        """One forward pass.

        Args:
            microbatch: counted from 0 in the batch.
            message: from the stage before; None on the first.
            training: whether there will be a backward pass.

        Returns:
            What goes to the stage after; None on the last.
        """
        batch: Any = self._agreed_batch() if self.is_first_stage() or self.is_last_stage() else None
        leaves: tuple[Tensor, ...] = ()
        wanted: tuple[bool, ...] = ()
        sequences = getattr(self.module, "axonn_sequences", None)
        tokens: int | None = None
        if message is not None and sequences is not None:
            message, tokens = without_length(message)
        if message is None:
            inputs = self._loaded(batch[0])
        else:
            leaves, wanted, inputs = self._received(message, training)
        if sequences is not None:
            sequences.part = Part(tokens, self.is_last_stage())
        outputs, call = self._outputs(inputs), None
        if sequences is not None:  # what comes behind is of whole outputs
            call, sequences.now = sequences.now, None
        if not self.module.training:
            checkpointing.reset()
        sent: Message | None = None
        loss: Any = None
        differentiable: tuple[Tensor, ...] = ()
        if self.is_last_stage():
            loss = self._loss_of(outputs, *self._masked(batch))
        else:
            tensors = _as_tuple(outputs, "the output")
            flags = tuple(tensor.requires_grad for tensor in tensors)
            sent = Message(microbatch, tensors, isinstance(outputs, Tensor), flags)
            sent = sent if sequences is None else with_length(sent, call)
            differentiable = tuple(tensor for tensor in tensors if tensor.requires_grad)
        if training:
            self._kept[microbatch] = Kept(leaves, wanted, differentiable, loss, call)
            self.most_alive = max(self.most_alive, len(self._kept))
        return sent

    def _agreed_batch(self) -> Any:
        return self._unread_batch()

    def _unread_batch(self) -> Any:
        """The next one, which may have been read ahead."""
        return self._ahead.popleft() if self._ahead else self._next_batch()

    def _masked(self, batch: Any) -> tuple[Any, Weight | None]:
        """A batch with labels in which the goldfish loss leaves targets out, and what its loss is multiplied by."""
        mask = self._label_mask
        if mask is None or not self._compute_loss or not mask.active(self.module.training):
            return batch, None
        labels = mask.several(batch[1])
        rows = labels if isinstance(labels, Tensor) else labels[mask.block.labels]
        readers = self.grid.get_data_parallel_group()
        return (batch[0], labels), mask.weight_of(rows, readers, self.device)

    def _outputs(self, inputs: Values) -> Any:
        # Not through PipelineEngine, which has no forward.
        return DeepSpeedEngine.forward(self, inputs)

    def _backward_microbatch(self, microbatch: int, message: Message | None) -> Message | None:
        """One backward pass.

        Args:
            microbatch: counted from 0 in the batch.
            message: gradients from the stage after; None on the last.

        Returns:
            What goes to the stage before; None on the first.
        """
        kept = self._kept.pop(microbatch)
        if kept.call is not None:  # what is computed again is on that microbatch's tokens
            self.module.axonn_sequences.now = kept.call
        if message is None:
            assert kept.loss is not None
            self._look_at(kept.loss)
            DeepSpeedEngine.backward(self, kept.loss)
        else:
            pairs = [(o, g) for o, g in zip(kept.outputs, message.tensors, strict=True) if g is not None]
            if pairs:
                self._backward_from(*zip(*pairs, strict=True))
        if kept.call is not None:
            self.module.axonn_sequences.now = None
        if self.is_first_stage():
            return None
        gradients = tuple(leaf.grad for leaf, wanted in zip(kept.inputs, kept.wanted, strict=True) if wanted)
        return Message(microbatch, gradients, False, tuple(False for _ in gradients))

    def _look_at(self, loss: Tensor) -> None:
        """Nothing to look for where a stage has whole weights."""

    def _backward_from(self, outputs: Any, gradients: Any) -> None:
        later = self.using_bf16_optimizer
        if later:
            self.optimizer.clear_lp_grads()
        # DeepSpeed's hooks ask whether the engine runs backward or the user does.
        self._running_engine_backward = True
        try:
            torch.autograd.backward(outputs, gradients)
        finally:
            self._running_engine_backward = False
            if isinstance(self.optimizer, EngineOptimizer):
                self.optimizer.exit_backward()
        # A hook of DeepSpeed's has started them, and only the last stage's backward stops them.
        self._stop_timers((*self.engine_timers.backward_inner_timers, *self.engine_timers.backward_timers))
        if later and not self._config.bfloat16_config.immediate_grad_update:
            self.optimizer.update_hp_grads(clear_lp_grads=False)

    @property
    def _reentrant(self) -> bool:
        """True if a checkpointed layer sees its weights' gradients only where an input wants one."""
        return self.module.activation_checkpoint_interval > 0 and self.module.activation_checkpoint_func not in _OTHERS

    def _keep_gradients(self) -> None:
        if self.module.activation_checkpoint_func not in _OTHERS:
            self.module.activation_checkpoint_func = keep_gradients(self.module.activation_checkpoint_func)

    def _loaded(self, given: Any) -> Values:
        """A batch's inputs, copied, for layers may change them in place."""
        moved = tuple(
            x.clone().detach() if x.device == self.device else x.to(self.device) for x in _as_tuple(given, "the input")
        )
        if self._reentrant:  # which may take the values of what it is given away, and put them back in another shape
            moved = tuple(_SameMemory.apply(x.requires_grad_()) if x.is_floating_point() else x for x in moved)
        return moved[0] if isinstance(given, Tensor) else moved

    def _received(self, message: Message, training: bool) -> tuple[tuple[Tensor, ...], tuple[bool, ...], Values]:
        leaves, wanted, inputs = [], [], []
        everything = self._reentrant
        for tensor, differentiable in zip(message.tensors, message.differentiable, strict=True):
            assert tensor is not None
            leaf = training and (differentiable or (everything and tensor.is_floating_point()))
            if leaf:
                leaves.append(tensor.requires_grad_())
                wanted.append(differentiable)
            inputs.append(_SameMemory.apply(tensor) if leaf else tensor)
        return tuple(leaves), tuple(wanted), inputs[0] if message.single else tuple(inputs)

    def _labels(self, given: Any) -> Any:
        if isinstance(given, Tensor):
            return given.to(self.device)
        if isinstance(given, (tuple, list)):
            return tuple(label.to(self.device).detach() if isinstance(label, Tensor) else label for label in given)
        return given

    def _loss_of(self, outputs: Any, batch: Any, weight: Weight | None) -> Any:
        if self._compute_loss and self.module.loss_fn is not None:
            with weight or nullcontext():
                self.loss = self.module.loss_fn(outputs, self._labels(batch[1]))
        else:
            # Some models return the loss themselves.
            self.loss = outputs
        if weight is not None:
            self.loss = weight.of(self.loss)
        if self.eval_return_logits:
            self.outputs = outputs
        single = isinstance(self.loss, Tensor)
        self.fwd_outputs.append(self.loss.detach() if single else [part.detach() for part in self.loss])
        if not self.module.training:
            return self.loss
        self.total_loss = _added(self.total_loss, self.loss)
        more = self.module.get_additional_losses()
        if more is not None:
            totals = OrderedDict() if self.total_additional_losses is None else self.total_additional_losses
            for name, value in more.items():
                totals[name] = _added(totals.get(name), value)
            self.total_additional_losses = totals
        return self.loss


def _added(total: Any, loss: Any) -> Any:
    if isinstance(loss, Tensor):
        return loss.detach().clone() if total is None else total.add_(loss.detach())
    if total is None:
        return [part.detach().clone() for part in loss]
    return [before.add_(part.detach()) for before, part in zip(total, loss, strict=True)]
