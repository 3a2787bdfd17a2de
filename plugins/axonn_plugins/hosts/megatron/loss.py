"""Megatron's cross-entropy of logits whose vocabulary is split over x, or over x and y."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core.fusions import fused_cross_entropy
from megatron.core.tensor_parallel import cross_entropy, mappings
from torch import Tensor

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.layers import HEADS
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.sharing import logits_over
from axonn_tp.layers.cross_entropy import split_cross_entropy


def install(originals: Originals) -> None:
    """Have Megatron's functions, which models call and scripts may have imported, know of which words a rank's logits are."""
    for module in (cross_entropy, fused_cross_entropy):
        originals.replace(module, "_VocabParallelCrossEntropy", VocabParallelCrossEntropy)
    originals.wrap(mappings, "_GatherFromModelParallelRegion", _but_for_logits)


def _but_for_logits(original: Any) -> Any:
    """Megatron's `gather_from_tensor_model_parallel_region` calls it, which scripts do with logits."""

    class Gather:
        @staticmethod
        def apply(share: Tensor, group: dist.ProcessGroup) -> Tensor:
            mesh, axes = process_groups.mesh(), logits_over(process_groups.settings())
            in_order = mesh.size("y") == 1 or (mesh.size("x") == 1 and "y" in axes)
            logits = any(head.output_size_per_partition == share.shape[-1] for head in HEADS)
            if group == mesh.group("model") and logits and not in_order:
                raise ValueError(
                    "gather_from_tensor_model_parallel_region of logits would mix up words: ranks of axonn3d have theirs in the order of x, "
                    "within it of y; call the model with runtime_gather_output=True, or make it with parallel_output=False"
                )
            return original.apply(share, group)

    return Gather


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
