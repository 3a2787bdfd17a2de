"""Labels of padding that count as targets: their number depends on how far a reader pads its rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.config import ConfigError
from axonn_plugins.goldfish import IGNORED
from axonn_plugins.hosts.transformers.balance import balances
from axonn_plugins.hosts.transformers.last_batch import Nothing
from axonn_plugins.hosts.transformers.readers import has_block


def refuse_padded_targets(self: Any, batches: list[Any]) -> None:
    """Refuse batches of a Trainer of which readers would count other numbers of labels than one process; all ranks call it.

    Raises:
        ConfigError: labels of padding count, and readers have padded to different lengths; the same on all ranks.
    """
    if not has_block(self.accelerator) or self.accelerator.num_processes == 1:
        return
    facts = []
    for batch in batches:
        labels: Any = batch.get("labels") if isinstance(batch, Mapping) and not isinstance(batch, Nothing) else None
        read = isinstance(labels, Tensor) and labels.dim() == 2 and not labels.is_floating_point()
        width = labels.size(1) if read else 0
        facts += [int(read and _counts_padding(self, batch, labels)), width, -width if read else -(2**31)]
    if not facts:
        return
    found = torch.tensor(facts, device=self.accelerator.device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    for counts, longest, shortest in found.view(-1, 3).tolist():
        if counts and longest != -shortest:
            raise ConfigError(
                "labels of padding count as targets, or are routed to experts whose balance is part of the loss, and readers pad their rows to different "
                f"lengths ({-shortest} and {longest}), so that the loss would depend on the grid; give padding the label {IGNORED} and a mixture's decoder a "
                'decoder_attention_mask, or pad all batches to one length (padding = "max_length")'
            )


def _counts_padding(self: Any, batch: Mapping[str, Any], labels: Tensor) -> bool:
    mask, config = batch.get("attention_mask"), getattr(self.model, "config", None)
    routed = getattr(config, "is_encoder_decoder", False) and getattr(config, "output_router_logits", False)
    if routed and "decoder_attention_mask" not in batch and balances(self.model):
        return True
    if isinstance(mask, Tensor) and mask.shape == labels.shape:
        return bool(((mask == 0) & (labels != IGNORED)).any())
    pad = getattr(config, "pad_token_id", None)
    if pad is None or pad == getattr(config, "eos_token_id", None):  # which ends rows that are not padded
        return False
    return bool((labels[:, [0, -1]] == pad).any())
