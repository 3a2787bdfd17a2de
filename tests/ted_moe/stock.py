"""The common part of tests of the layer: stock DeepSpeed-MoE beside it, hard routing, and forms of checkpoint."""

from functools import partial

import deepspeed
import torch.utils.checkpoint

from axonn_plugins.ted.stock import Comparison, data_tokens, differences

BAR = 1e-6
CHECKPOINTS = {
    "reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    "not reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "deepspeed": deepspeed.checkpointing.checkpoint,
    "deepspeed, not reentrant": deepspeed.checkpointing.non_reentrant_checkpoint,
}


def compare(topology, kind, options, switches, tokens=data_tokens):
    case = Comparison(topology, kind, options, switches, tokens)
    found = differences(case)
    assert max(found.values()) <= BAR, (found, case)


def wild_tokens(data):
    """Ranks with all tokens for one expert, each for another, ranks with many or with few, and one with none."""
    count = (21, 1, 34, 0, 8, 13, 2, 5)[data]
    tokens = data_tokens(data, 40, seed=2)
    return tokens[:, :1].repeat(1, count, 1) if data % 2 == 0 else tokens[:, :count]
