"""The layer against stock DeepSpeed-MoE with all experts on one rank, which routes each rank's tokens in the same way."""

from collections import Counter, defaultdict
from functools import cache, partial

import deepspeed
import deepspeed.moe.layer
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import ted_moe
from plugins.ledger import Ledger
from ted_moe import Groups, Topology
from tests.distributed import run_ranks

FEATURES, EXPERTS = 12, 8


class Small(nn.Linear):
    """A linear with an initialisation of its own."""

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = Small(FEATURES, 24), nn.Linear(24, FEATURES)

    def forward(self, tokens):
        return self.fc2(F.gelu(self.fc1(tokens)))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(FEATURES, 16, bias=False), nn.Linear(FEATURES, 16, bias=False)
        self.down_proj = nn.Linear(16, FEATURES, bias=False)

    def forward(self, tokens):
        return self.down_proj(F.silu(self.gate_proj(tokens)) * self.up_proj(tokens))


class Residual(nn.Module):
    """Reads its input twice, so the sums cannot be left to the layer around it."""

    def __init__(self):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(FEATURES), Plain()

    def forward(self, tokens):
        return tokens + self.mlp(self.norm(tokens)), None


class Single(nn.Module):
    """Nothing to split."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(FEATURES))

    def forward(self, tokens):
        return torch.tanh(tokens * self.scale)


def reference(expert, **options):
    deepspeed.utils.groups.mpu = None
    layer = deepspeed.moe.layer.MoE(FEATURES, expert, EXPERTS, **options)
    generator = torch.Generator().manual_seed(7)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
    layer.deepspeed_moe.gate.wg.float()
    return layer


def part_of(layer, full, groups):
    """This rank's part of the reference's tensors, by our names."""
    found = {}
    for name, _ in layer.named_parameters():
        before, experts, after = name.partition(".deepspeed_experts.")
        number, _, rest = after.partition(".")
        value = full[
            f"{before}{experts}{int(number) + groups.rank('expert') * len(layer.local)}.{rest}" if experts else name
        ]
        module, _, own = name.rpartition(".")
        split = getattr(layer.get_submodule(module), "splits", {}).get(own)
        if split is not None:
            size, rank = groups.size("tensor"), groups.rank("tensor")
            value = torch.cat([part.chunk(size, split[0])[rank] for part in value.chunk(split[1], split[0])], split[0])
        found[name] = value
    return found


def data_tokens(data, count=13, seed=0):
    generator = torch.Generator().manual_seed(1000 * seed + data)
    return torch.randn(1, count, FEATURES, generator=generator, dtype=torch.float64) * (1 + data)


@cache
def groups_of(topology):
    return Groups(topology)


def compare(topology, kind, options, switches, tokens_of=data_tokens):
    groups = groups_of(topology)
    serial = reference(kind(), **options)
    layer = ted_moe.MoE(FEATURES, kind(), EXPERTS, topology.expert, groups=groups, **options, **switches).double()
    layer.deepspeed_moe["gate"]["wg"].float()
    layer.load_state_dict(part_of(layer, serial.state_dict(), groups))
    data = groups.rank("data")
    direction = torch.Generator().manual_seed(5)
    grads = {name: torch.zeros_like(p) for name, p in serial.named_parameters()}
    for other in range(topology.data):
        tokens = tokens_of(other).requires_grad_()
        serial.zero_grad()
        output, l_aux, counts = serial(tokens)
        weights = torch.randn(output.shape, generator=direction, dtype=torch.float64)
        ((output * weights).sum() + 3 * l_aux).backward()
        for name, parameter in serial.named_parameters():
            if parameter.grad is not None:
                grads[name] += parameter.grad / topology.data
        if other == data:
            expected = output.detach(), l_aux.detach(), counts, tokens.grad, weights
    tokens = tokens_of(data).requires_grad_()
    output, l_aux, counts = layer(tokens)
    ((output * expected[4]).sum() + 3 * l_aux).backward()
    ted_moe.sync_gradients(layer.parameters(), groups)
    torch.testing.assert_close(output, expected[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(l_aux, expected[1], rtol=1e-6, atol=0)
    assert torch.equal(counts, expected[2])
    torch.testing.assert_close(tokens.grad, expected[3], rtol=1e-6, atol=1e-6)
    expected_grads = part_of(layer, grads, groups)
    for name, mine in layer.named_parameters():
        torch.testing.assert_close(
            mine.grad,
            expected_grads[name],
            rtol=1e-5,
            atol=2e-6,
            msg=lambda text: f"{name}: {text}",  # noqa: B023
        )


OPTIONS = [
    {"k": 1, "use_rts": False, "capacity_factor": 1.0, "min_capacity": 1},
    {"k": 2, "top2_2nd_expert_sampling": False, "capacity_factor": 0.9, "min_capacity": 3, "use_residual": True},
    {"k": 4, "capacity_factor": 0.7, "min_capacity": 0},
    {"k": 1, "use_rts": False, "drop_tokens": False},
    {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False},
]
SWITCHES = [{}, {"fused": False}, {"duplicate_token_dropping": False}]


def everywhere():
    found = 0
    for tensor in (1, 2, 4, 8):
        for expert in (size for size in (1, 2, 4, 8) if tensor * size <= 8):
            for number, options in enumerate(OPTIONS):
                kind = (Plain, Gated, Residual, Single)[(number + tensor + expert) % 4]
                for switches in SWITCHES if tensor > 1 else SWITCHES[:1]:
                    compare(Topology(8, tensor, expert), kind, options, switches)
                    found += 1
            if tensor > 1:
                for kind in (Plain, Single):
                    compare(Topology(8, tensor, expert, expert_tensor_parallel=False), kind, OPTIONS[1], {})
    return found


def hard_routing():
    """All tokens of some ranks to one expert, wildly different loads, on every rank another number of tokens kept."""

    def tokens_of(data):
        tokens = data_tokens(data, 21, seed=2)
        return tokens.clone() if data % 2 else tokens[:, :1].repeat(1, 21, 1)

    for topology in (Topology(8, 2, 4), Topology(8, 4, 2), Topology(8, 1, 8)):
        for options in OPTIONS:
            compare(topology, Plain, options, {}, tokens_of)


def counted():
    """(op, axis) -> calls and elements of a forward and a backward, by kind of layer."""
    found = {}
    for name, switches in {
        "fused": {},
        "dropped": {"fused": False},
        "plain": {"duplicate_token_dropping": False},
    }.items():
        groups = groups_of(Topology(8, 2, 4))
        layer = ted_moe.MoE(FEATURES, Plain(), EXPERTS, 4, capacity_factor=0.8, groups=groups, **switches)
        tokens = torch.randn(50, FEATURES).requires_grad_()
        with Ledger(groups.axis_names()) as ledger:
            output, l_aux, _ = layer(tokens)
            (output.sum() + l_aux).backward()
        totals = defaultdict(lambda: (0, 0))
        for each in ledger.collectives:
            calls, elements = totals[each.op, each.axis]
            totals[each.op, each.axis] = calls + 1, elements + each.elements
        found[name] = dict(totals)
    return found


CHECKPOINTS = {
    "reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    "not reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "deepspeed": deepspeed.checkpointing.checkpoint,
}


def checkpointed():
    """Losses, gradients and collectives with every form of checkpoint, stashed and not."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that nothing here needs
    deepspeed.init_distributed("gloo")
    deepspeed.checkpointing.configure(None)
    groups = groups_of(Topology(4, 2, 2))
    found = {}
    layer = ted_moe.MoE(FEATURES, Plain(), EXPERTS, 2, k=2, groups=groups)
    for name, checkpoint in CHECKPOINTS.items():
        for stash in (None, "device", "cpu"):
            torch.manual_seed(1)
            tokens = torch.randn(16, FEATURES).requires_grad_()
            function = layer if stash is None else ted_moe.Stashing(layer, stash)
            layer.zero_grad()
            with Ledger(groups.axis_names()) as ledger:
                output, l_aux, _ = checkpoint(function, tokens * 1.0)
                kept = stash and function.nbytes
                (output.square().sum() + l_aux).backward()
            grads = [tokens.grad, *(parameter.grad.clone() for parameter in layer.parameters())]
            ops = Counter((each.op, each.axis) for each in ledger.collectives)
            found[name, stash] = grads, ops, kept, stash and function.nbytes
    wanted = found["reentrant", None][0]
    for grads, _, _, _ in found.values():
        for mine, theirs in zip(grads, wanted, strict=True):
            torch.testing.assert_close(mine, theirs)
    return {key: value[1:] for key, value in found.items()}


def test_bytes_on_the_wire():
    slots = EXPERTS * 6 * FEATURES  # 0.8 · 50 / 8 = 5 slots, and one of padding
    unpadded = EXPERTS * 5 * FEATURES
    for found in run_ranks(counted, 8):
        # The last all-gather and the mirror of the drop; the gather to the experts and the mirror of the last drop.
        gathers = {("all_gather", "tensor"): (4, 4 * slots // 2)}
        assert found["plain"].pop(("all_to_all", "expert")) == (4, 4 * unpadded)
        assert found["plain"] == {("all_reduce", "tensor"): (4, 2 * unpadded)}
        assert found["dropped"].pop(("all_to_all", "expert")) == (4, 4 * slots // 2)
        assert found["dropped"] == {("all_reduce", "tensor"): (4, 2 * slots)} | gathers
        assert found["fused"].pop(("all_to_all", "expert")) == (4, 4 * slots // 2)
        # A reduce-scatter sends half of what an all-reduce does.
        assert found["fused"] == {("reduce_scatter", "tensor"): (2, 2 * slots)} | gathers


def test_a_recomputation_communicates_nothing():
    for found in run_ranks(checkpointed, 4):
        for (name, stash), (ops, kept, left) in found.items():
            recomputed = 0 if stash else 1
            assert ops["all_to_all", "expert"] == 4 + 2 * recomputed, (name, stash)
            assert ops["all_gather", "tensor"] == 4 + 2 * recomputed, (name, stash)
            assert ops["reduce_scatter", "tensor"] == 2 + recomputed, (name, stash)
            if stash:
                slots = EXPERTS * 4 * FEATURES * 4  # bytes
                assert kept == 2 * slots + 3 * slots // 2 and left == 0, (name, stash)


def test_equals_stock_on_all_factorisations_of_eight():
    assert run_ranks(everywhere, 8, timeout=600)[0] >= 100


def test_hard_routing_neither_differs_nor_hangs():
    run_ranks(hard_routing, 8)


@pytest.mark.parametrize(
    "keywords, message",
    [
        ({"num_experts": 3, "ep_size": 2}, "ep_size = 2 does not divide num_experts = 3"),
        ({"num_experts": 4, "ep_size": 2}, "ep_size = 2 needs process groups"),
        ({"k": 9}, "k = 9 experts a token"),
    ],
)
def test_wrong_arguments(keywords, message):
    with pytest.raises(ValueError, match=message):
        ted_moe.MoE(FEATURES, Plain(), **keywords)(torch.randn(16, FEATURES))
