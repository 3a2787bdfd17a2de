"""Which expert a token goes to, and into which of its slots: DeepSpeed-MoE's gates (GShard, arXiv 2006.16668)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class Routes:
    """Where S tokens go, each to up to k experts.

    Attributes:
        experts: k × S, int64; -1 where the expert had no room.
        places: k × S, int64: the slot within the expert.
        weights: k × S, float32, differentiable: what the expert's output is multiplied by; 0 where it had no room.
        capacity: slots an expert for this rank's tokens; of a dropless gate, what its fullest expert needs.
        l_aux: the load-balancing loss, a scalar.
        exp_counts: tokens that asked for each expert.
    """

    experts: Tensor
    places: Tensor
    weights: Tensor
    capacity: int
    l_aux: Tensor
    exp_counts: Tensor


@dataclass(frozen=True)
class Gate:
    """The routing of tokens; fields are the arguments of DeepSpeed's `MoE` of these names.

    Attributes:
        dropless: no expert has a capacity; what is said of capacities and `drop_tokens` does not count.

    Raises:
        ValueError: values out of range.
    """

    k: int = 1
    capacity_factor: float = 1.0
    eval_capacity_factor: float = 1.0
    min_capacity: int = 4
    noisy_gate_policy: str | None = None
    drop_tokens: bool = True
    use_rts: bool = True
    top2_2nd_expert_sampling: bool = True
    dropless: bool = False

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"k = {self.k} sends a token to no expert; use 1 or more")
        if self.noisy_gate_policy not in (None, "None", "Jitter", "RSample"):
            raise ValueError(
                f"noisy_gate_policy = {self.noisy_gate_policy!r} is not known; use 'Jitter', 'RSample' or None"
            )
        for name in ("capacity_factor", "eval_capacity_factor"):
            if not getattr(self, name) > 0 or not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} = {getattr(self, name)} is not a factor; use a positive number")

    def jitter(self, tokens: Tensor, training: bool, generator: Callable[[Tensor], torch.Generator]) -> Tensor:
        """Tokens as the gate's weights see them: float32, times noise within 1 % where the policy says so."""
        tokens = tokens.float()
        if self.noisy_gate_policy != "Jitter" or not training:
            return tokens
        noise = torch.rand(tokens.shape, generator=generator(tokens), device=tokens.device)
        return tokens * (0.99 + 0.02 * noise)

    def random(self, training: bool) -> bool:
        """True if experts, or who finds room in them, are drawn by lot."""
        noisy = training and self.noisy_gate_policy in ("Jitter", "RSample")
        return noisy or (self.k == 1 and self.use_rts) or (self.k == 2 and self.top2_2nd_expert_sampling)

    def capacity(self, tokens: int, experts: int, training: bool) -> int | None:
        """Slots an expert for so many tokens of a rank; None where they depend on where these go."""
        if self.dropless or not self.drop_tokens:
            return None
        factor = (self.capacity_factor if training else self.eval_capacity_factor) * self.k
        return max(math.ceil(torch.tensor(tokens / experts).mul(factor)), self.min_capacity)

    def __call__(
        self,
        logits: Tensor,
        training: bool,
        used_token: Tensor | None = None,
        largest: Callable[[Tensor], int] = int,
        generator: Callable[[Tensor], torch.Generator] | None = None,
    ) -> Routes:
        """Route S tokens among E experts.

        Args:
            logits: S × E, float32.
            training: whether to draw noise, and which capacity factor holds.
            used_token: S, zero for tokens that go nowhere (with k = 1).
            largest: the maximum of a count over all ranks that exchange tokens; needed where no token is dropped.
            generator: from logits, the source of random numbers; by default `same_on_replicas`.

        Raises:
            ValueError: fewer experts than k.
        """
        tokens, experts = logits.shape
        if self.k > experts:
            raise ValueError(f"k = {self.k} experts a token, but there are {experts}; use at most {experts}")
        generator = generator or same_on_replicas
        gates = F.softmax(logits, dim=1)
        wanted = self._wanted(logits, gates, training, generator)
        asked = F.one_hot(wanted, experts)  # k × S × E
        if used_token is not None and self.k == 1:
            asked = asked * used_token.reshape(1, -1, 1).to(asked.dtype)
        exp_counts = asked.sum((0, 1)).detach()
        l_aux = self._balance(gates, asked)
        capacity = self.capacity(tokens, experts, training)
        if capacity is None:
            capacity = (int if self.dropless else largest)(exp_counts.max())
        kept, places = self._place(gates, asked, capacity, generator(logits) if self.k == 1 and self.use_rts else None)
        weights = (gates * kept).sum(2)
        if self.k > 1:
            weights = weights / weights.sum(0).clamp(min=torch.finfo(weights.dtype).eps)
        there = kept.any(2)
        return Routes(torch.where(there, wanted, -1), (places * kept).sum(2), weights, capacity, l_aux, exp_counts)

    @property
    def _drops(self) -> bool:
        return self.drop_tokens and not self.dropless

    def _wanted(
        self, logits: Tensor, gates: Tensor, training: bool, generator: Callable[[Tensor], torch.Generator]
    ) -> Tensor:
        """Each token's experts, k × S, the likeliest first."""
        noisy = self.noisy_gate_policy == "RSample" and training and self.k == 1
        if noisy:
            return (logits + _gumbel(logits, generator)).argmax(1)[None]
        if self.k == 2:
            first = gates.argmax(1)
            others = logits + _gumbel(logits, generator) if self.top2_2nd_expert_sampling else logits
            others = others.scatter(1, first[:, None], float("-inf"))
            return torch.stack([first, others.argmax(1)])
        return gates.topk(self.k, dim=1).indices.t() if self.k > 1 else gates.argmax(1)[None]

    def _balance(self, gates: Tensor, asked: Tensor) -> Tensor:
        """The mean over experts of probability times load, scaled to 1 where both are even."""
        tokens, experts = gates.shape
        if not tokens:
            return gates.sum()
        # Of top-2's choices DeepSpeed counts the first.
        counted = asked[0] if self.k == 2 else asked.sum(0)
        product = gates.mean(0) * counted.float().mean(0)
        return (
            product.sum() * experts
            if self.k == 1
            else product.mean() * experts * experts / (1 if self.k == 2 else self.k)
        )

    def _place(
        self, gates: Tensor, asked: Tensor, capacity: int, random: torch.Generator | None
    ) -> tuple[Tensor, Tensor]:
        """Who finds room (k × S × E, 0 or 1), and in which slot (k × S × E)."""
        tokens = gates.shape[0]
        if self.k == 1:
            lot = asked[0]
            if random is not None:
                lot = lot * torch.rand(lot.shape, generator=random, device=gates.device)
            room = torch.zeros_like(asked[0]).scatter_(0, lot.topk(min(capacity, tokens), dim=0).indices, 1)
            kept = asked * room
            return kept, kept.cumsum(1) - 1
        if self.k == 2:
            # All first choices come before all second ones.
            places = torch.stack([asked[0].cumsum(0) - 1, asked[1].cumsum(0) - 1 + asked[0].sum(0, keepdim=True)])
            return (asked * (places < capacity), places) if self._drops else (asked, places)
        chosen = asked.sum(0)
        if self._drops:
            likeliest = (gates * chosen).topk(min(capacity, tokens), dim=0, sorted=False).indices
            chosen = chosen * torch.zeros_like(chosen).scatter_(0, likeliest, 1)
        return asked * chosen, (chosen.cumsum(0) - 1).expand_as(asked)


def number_of(values: Tensor) -> int:
    """A number that other bits change, as good as certainly."""
    bits = values.detach().contiguous().view(torch.int32 if values.element_size() == 4 else torch.int16)
    return int(bits.long().sum())


def same_on_replicas(values: Tensor, seed: int | None = None) -> torch.Generator:
    """Random numbers that follow from `values` and a seed, by default the process's.

    So they are the same on tensor ranks, which hold the same values, and when activations are recomputed; nothing is
    communicated.
    """
    seed = number_of(values) * 1_000_003 + (torch.initial_seed() if seed is None else seed)
    return torch.Generator(values.device).manual_seed(seed % 2**63)


def _gumbel(logits: Tensor, generator: Callable[[Tensor], torch.Generator]) -> Tensor:
    uniform = torch.rand(logits.shape, generator=generator(logits), device=logits.device)
    return -torch.log(-torch.log(uniform.clamp(min=torch.finfo(uniform.dtype).tiny)))


def routes_to(indices: Tensor, weights: Tensor, experts: int) -> Routes:
    """Routes that a model's own router has chosen; nothing is dropped.

    Args:
        indices: S × k, each token's experts; one that is none of the E, as for padding, stands for no expert.
        weights: S × k, what their outputs are multiplied by.
        experts: E.
    """
    wanted = indices.t().contiguous().long()
    wanted = torch.where((wanted >= 0) & (wanted < experts), wanted, -1)
    flat = wanted.flatten()
    counts = torch.bincount(flat + 1, minlength=experts + 1)
    order = flat.argsort(stable=True)
    places = torch.empty_like(flat)
    places[order] = torch.arange(len(flat), device=flat.device) - (counts.cumsum(0) - counts)[flat[order] + 1]
    capacity = int(counts[1:].max())
    return Routes(wanted, places.view_as(wanted), weights.t(), capacity, weights.new_zeros(()), counts[1:])
