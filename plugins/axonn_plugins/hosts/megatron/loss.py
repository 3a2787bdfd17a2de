"""Megatron's cross-entropy of logits whose vocabulary is split over x, or over x and y."""

from __future__ import annotations

from torch import Tensor

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.sharing import logits_over
from axonn_tp.layers.cross_entropy import split_cross_entropy


def language_model_loss(model: object, labels: Tensor, logits: Tensor) -> Tensor:
    """The loss of every token, computed in float32: labels (batch, sequence), logits (sequence, batch, share) → (batch, sequence).

    A label outside of the vocabulary, which a loss mask leaves out, has loss 0.
    """
    mesh, settings = process_groups.mesh(), process_groups.settings()
    labels = labels.transpose(0, 1)
    axes = logits_over(settings)
    classes = logits.shape[-1]
    for axis in axes:
        classes *= mesh.size(axis)
    elsewhere = (labels < 0) | (labels >= classes)
    targets = labels.masked_fill(elsewhere, 0)
    losses = split_cross_entropy(logits, targets, mesh, axes)
    return losses.masked_fill(elsewhere, 0).transpose(0, 1).contiguous()
