"""Megatron's cross-entropy of logits whose vocabulary is split over x, or over x and y."""

from __future__ import annotations

from typing import Any

from megatron.core.fusions import fused_cross_entropy
from megatron.core.tensor_parallel import cross_entropy
from torch import Tensor

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.sharing import logits_over
from axonn_tp.layers.cross_entropy import split_cross_entropy


def install(originals: Originals) -> None:
    """Have Megatron's functions, which models call and scripts may have imported, know of which words a rank's logits are."""
    for module in (cross_entropy, fused_cross_entropy):
        originals.replace(module, "_VocabParallelCrossEntropy", VocabParallelCrossEntropy)


class VocabParallelCrossEntropy:
    """In the place of what these functions call."""

    @staticmethod
    def apply(logits: Tensor, labels: Tensor, *others: Any) -> Tensor:
        """The loss of every token, in float32 at least: logits (…, share) and labels (…) → (…).

        A label outside of the vocabulary, which a loss mask leaves out, has loss 0.

        Args:
            logits: of this rank's words.
            labels: numbers of words.
            others: how much of a target all other words share, where it is a float, and a group, which is the mesh's.
        """
        mesh, axes = process_groups.mesh(), logits_over(process_groups.settings())
        words = logits.shape[-1]
        for axis in axes:
            words *= mesh.size(axis)
        elsewhere = (labels < 0) | (labels >= words)
        smoothing = next((one for one in others if isinstance(one, float)), 0.0) * words / (words - 1)
        losses = split_cross_entropy(logits, labels.masked_fill(elsewhere, 0), mesh, axes, smoothing)
        return losses.masked_fill(elsewhere, 0)
