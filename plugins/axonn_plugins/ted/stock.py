"""TED's layer beside stock DeepSpeed-MoE with all experts on one rank, which routes each rank's tokens in the same way.

So the reference needs no collective: stock's own gather over tensor ranks crashes on gloo, and some capacities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import deepspeed
import deepspeed.moe.layer
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import ted_moe
from ted_moe import Groups, Topology

FEATURES, EXPERTS = 12, 8


class Small(nn.Linear):
    """A linear with an initialisation of its own."""

    def reset_parameters(self) -> None:  # noqa: D102
        nn.init.normal_(self.weight, std=0.02)
        nn.init.zeros_(self.bias)


class Plain(nn.Module):
    """Fully connected, gelu, fully connected."""

    def __init__(self, inner: int = 24) -> None:
        super().__init__()
        self.fc1, self.fc2 = Small(FEATURES, inner), nn.Linear(inner, FEATURES)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        return self.fc2(F.gelu(self.fc1(tokens)))


class Gated(nn.Module):
    """As Llama's."""

    def __init__(self, inner: int = 16) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(FEATURES, inner, bias=False), nn.Linear(FEATURES, inner, bias=False)
        self.down_proj = nn.Linear(inner, FEATURES, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        return self.down_proj(F.silu(self.gate_proj(tokens)) * self.up_proj(tokens))


class Residual(nn.Module):
    """Reads its input twice, so the sums cannot be left to the layer around it."""

    def __init__(self, inner: int = 24) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(FEATURES), Plain(inner)

    def forward(self, tokens: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        return tokens + self.mlp(self.norm(tokens)), None


class Single(nn.Module):
    """Nothing to split."""

    def __init__(self, inner: int = 0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(FEATURES))

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: D102
        return torch.tanh(tokens * self.scale)


def data_tokens(data: int, count: int = 13, seed: int = 0) -> Tensor:
    """Random tokens of a data rank, (1, count, M) in float64."""
    generator = torch.Generator().manual_seed(1000 * seed + data)
    return torch.randn(1, count, FEATURES, generator=generator, dtype=torch.float64) * (1 + data)


@cache
def groups_of(topology: Topology) -> Groups:
    """A topology's process groups, made once."""
    return Groups(topology)


@dataclass(frozen=True)
class Comparison:
    """The two sides of a comparison, and its sizes.

    Attributes:
        topology: of TED.
        kind: makes an expert.
        options: arguments of both layers.
        switches: arguments of TED's alone.
        tokens: a data rank's, (1, S, M) in float64; S may be 0.
        experts: in all.
        dtype: of tokens and experts; gates are in float32 always.
        device: where both run.
        training: or evaluation, which has a capacity of its own.
    """

    topology: Topology
    kind: Callable[[], nn.Module]
    options: dict[str, Any]
    switches: dict[str, Any] = field(default_factory=dict)
    tokens: Callable[[int], Tensor] = data_tokens
    experts: int = EXPERTS
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    training: bool = True

    def stock(self) -> nn.Module:
        """DeepSpeed's layer with all experts."""
        deepspeed.utils.groups.mpu = None
        layer = deepspeed.moe.layer.MoE(FEATURES, self.kind(), self.experts, **self.options)
        generator = torch.Generator().manual_seed(7)
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
        return self._placed(layer, layer.deepspeed_moe.gate.wg)

    def ted(self, groups: Groups, full: dict[str, Tensor]) -> ted_moe.MoE:
        """TED's layer with this rank's part of the same weights."""
        with torch.device(self.device):
            layer = ted_moe.MoE(
                FEATURES,
                self.kind(),
                self.experts,
                self.topology.expert,
                groups=groups,
                **self.options,
                **self.switches,
            )
        self._placed(layer, layer.gate)
        layer.load_state_dict(part_of(layer, full, groups))
        return layer

    def _placed(self, layer: Any, gate: nn.Module) -> Any:
        layer.to(device=self.device, dtype=self.dtype)
        gate.float()
        return layer.train(self.training)


def part_of(layer: ted_moe.MoE, full: dict[str, Tensor], groups: Groups) -> dict[str, Tensor]:
    """This rank's part of stock's tensors, by our names."""
    found = {}
    for name, _ in layer.named_parameters():
        before, experts, after = name.partition(".deepspeed_experts.")
        number, _, rest = after.partition(".")
        first = groups.rank("expert") * len(layer.local)
        value = full[f"{before}{experts}{int(number) + first}.{rest}" if experts else name]
        module, _, own = name.rpartition(".")
        split = getattr(layer.get_submodule(module), "splits", {}).get(own)
        if split is not None:
            dim, parts = split
            size, rank = groups.size("tensor"), groups.rank("tensor")
            value = torch.cat([part.chunk(size, dim)[rank] for part in value.chunk(parts, dim)], dim)
        found[name] = value
    return found


@dataclass
class _Pass:
    """The results of a forward and a backward."""

    output: Tensor
    l_aux: Tensor
    counts: Tensor
    grad: Tensor

    @classmethod
    def of(cls, layer: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], tokens: Tensor, data: int) -> _Pass:
        tokens = tokens.detach().requires_grad_()
        output, l_aux, counts = layer(tokens)
        generator = torch.Generator().manual_seed(5 + data)
        weights = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        ((output * weights).sum() + 3 * l_aux).backward()
        assert tokens.grad is not None
        return cls(output.detach(), l_aux.detach(), counts.cpu(), tokens.grad)


def differences(case: Comparison) -> dict[str, float]:
    """Largest difference of what TED's layer gives from what stock's gives, by kind, relative to the largest value.

    Gradients of parameters are relative to the largest of their kind; the mean over data ranks is what is compared.
    """
    groups = groups_of(case.topology)
    serial, mine = case.stock(), groups.rank("data")
    layer = case.ted(groups, serial.state_dict())
    expected = None
    for data in range(case.topology.data):
        tokens = case.tokens(data).to(device=case.device, dtype=case.dtype)
        found = _Pass.of(serial if tokens.numel() else _nothing(case.experts), tokens, data)
        expected = found if data == mine else expected
    tokens = case.tokens(mine).to(device=case.device, dtype=case.dtype)
    found = _Pass.of(layer, tokens, mine)
    ted_moe.sync_gradients(layer.parameters(), groups)
    assert expected is not None
    grads = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad) / case.topology.data
        for name, p in serial.named_parameters()
    }
    pairs = {
        "output": [(found.output, expected.output)],
        "l_aux": [(found.l_aux, expected.l_aux)],
        "exp_counts": [(found.counts, expected.counts)],
        "input gradient": [(found.grad, expected.grad)],
    }
    wanted = part_of(layer, grads, groups)
    for name, parameter in layer.named_parameters():
        kind = "gate" if ".gate." in name else "expert" if ".experts." in name else "dense"
        assert parameter.grad is not None
        pairs.setdefault(f"{kind} gradient", []).append((parameter.grad, wanted[name]))
    return {kind: _relative(values) for kind, values in pairs.items()}


def _nothing(experts: int) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Results that a rank without tokens should get; stock DeepSpeed's loss is not a number then."""
    return lambda tokens: (tokens * 1.0, tokens.float().sum(), torch.zeros(experts, dtype=torch.long))


def _relative(pairs: list[tuple[Tensor, Tensor]]) -> float:
    scale = max((float(theirs.abs().max()) for _, theirs in pairs if theirs.numel()), default=0.0)
    largest = max((float((mine - theirs).abs().max()) for mine, theirs in pairs if mine.numel()), default=0.0)
    return largest / scale if scale else float("inf") if largest else 0.0


def over_ranks(found: dict[str, float]) -> dict[str, float]:
    """The largest on any rank; not a number counts as infinite."""
    values = torch.tensor([value if value == value else float("inf") for value in found.values()])
    if torch.cuda.is_available() and dist.get_backend() == "nccl":
        values = values.cuda()
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(found, values.tolist(), strict=True))
