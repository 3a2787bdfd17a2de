"""The layer beside stock DeepSpeed-MoE with all experts on one rank, which routes each rank's tokens in the same way."""

from functools import cache, partial

import deepspeed
import deepspeed.moe.layer
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import ted_moe
from ted_moe import Groups

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


def nothing(tokens):
    """What a rank without tokens should get; stock DeepSpeed's loss is not a number then."""
    return tokens * 1.0, tokens.float().sum(), torch.zeros(EXPERTS, dtype=torch.long)


def compare(topology, kind, options, switches, tokens_of=data_tokens):
    """The layer's output, l_aux, exp_counts and gradients with stock DeepSpeed's, which has all experts on one rank."""
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
        output, l_aux, counts = serial(tokens) if tokens.numel() else nothing(tokens)
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
        # Weights of routes, and the gate, are float32.
        largest = max(2.0, float(expected_grads[name].abs().max()))
        torch.testing.assert_close(
            mine.grad,
            expected_grads[name],
            rtol=1e-5,
            atol=1e-6 * largest,
            msg=lambda text: f"{name}: {text}",  # noqa: B023
        )


CHECKPOINTS = {
    "reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
    "not reentrant": partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
    "deepspeed": deepspeed.checkpointing.checkpoint,
}
