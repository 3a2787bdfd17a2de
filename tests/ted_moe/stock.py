"""The common part of tests of the layer: stock DeepSpeed-MoE beside it, hard routing, and forms of checkpoint."""

from functools import partial
from itertools import product

import deepspeed
import torch.utils.checkpoint

import ted_moe
from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.ted.stock import FEATURES, Comparison, data_tokens, differences
from ted_moe import Topology
from tests.distributed import BACKEND

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


def factorisations(ranks):
    """Pairs of a tensor and an expert size that divide so many ranks, a power of two."""
    sizes = [1 << power for power in range(ranks.bit_length())]
    return [(tensor, expert) for tensor, expert in product(sizes, sizes) if tensor * expert <= ranks]


def topologies_of(ranks):
    """Both sizes, the larger of each, experts alone, and experts that are whole."""
    if ranks == 4:
        return Topology(4, 2, 2), Topology(4, 4, 1), Topology(4, 1, 4), Topology(4, 2, 2, False)
    return Topology(8, 2, 4), Topology(8, 4, 2), Topology(8, 1, 8), Topology(8, 2, 4, False)


def wild_tokens(data):
    """Ranks with all tokens for one expert, each for another, ranks with many or with few, and one with none, of two as well."""
    count = (34, 0, 21, 1, 8, 13, 2, 5)[data]
    tokens = data_tokens(data, 40, seed=2)
    return tokens[:, :1].repeat(1, count, 1) if data % 2 == 0 else tokens[:, :count]


def recomputed(layer, groups):
    """Collectives of a layer by checkpoint and place of the stash, which all give the same gradients."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that nothing here needs
    deepspeed.init_distributed(BACKEND)
    deepspeed.checkpointing.configure(None)
    found, grads = {}, []
    for name, checkpoint in CHECKPOINTS.items():
        for stash in (None, "device", "cpu"):
            torch.manual_seed(1 + groups.rank("data"))
            tokens = torch.randn(17, FEATURES).requires_grad_()
            function = layer if stash is None else ted_moe.Stashing(layer, stash)
            layer.zero_grad()
            with Ledger(groups.axis_names()) as ledger:
                output, l_aux, _ = checkpoint(function, tokens * 1.0)
                (output.square().sum() + l_aux).backward()
            grads.append([tokens.grad, *(parameter.grad.clone() for parameter in layer.parameters())])
            found[name, stash] = ledger.entries
    for mine in grads[1:]:
        for one, other in zip(mine, grads[0], strict=True):
            torch.testing.assert_close(one, other)
    return found
