"""Attention of a block of queries to a block of keys, and its gradients given the log-sum-exp over all keys.

Blocks of one query are merged by their log-sum-exps (`Merged`), and each block's gradient needs nothing of the others but the
merged output and log-sum-exp. Where torch has a fused kernel for the device and type it is used; otherwise scores are made.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


@dataclass(frozen=True)
class Scores:
    """The settings by which queries and keys become scores.

    Attributes:
        scale: times q·k.
        softcap: scores are softcap·tanh(score / softcap); as they are where 0.
        dropout: of probabilities.
    """

    scale: float
    softcap: float = 0.0
    dropout: float = 0.0

    def fused(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
        """The fused kernel that can compute a block: ``"cpu"``, ``"flash"`` or none, ``""``."""
        if self.softcap or self.dropout or k.shape[-1] != v.shape[-1]:
            return ""
        if q.device.type == "cpu":
            return "cpu"
        half = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256 and not q.shape[-1] % 8
        return "flash" if q.device.type == "cuda" and half and mask is None else ""


def _each_query_head(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _added(mask: Tensor | None, like: Tensor) -> Tensor | None:
    return None if mask is None else like.new_zeros(mask.shape).masked_fill_(~mask, -math.inf)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scores: Scores, causal: bool, mask: Tensor | None, seed: int
) -> tuple[Tensor, Tensor, tuple]:
    """Output (b, h, queries, head of v), log-sum-exp (b, h, queries) and what `backward` is to be given.

    Args:
        q: (b, h, queries, head).
        k: (b, g, keys, head), g dividing h.
        v: (b, g, keys, head of v).
        scores: how scores are made.
        causal: as many queries as keys, each of which sees itself and what is before it.
        mask: true where a query sees a key, (b or 1, 1, queries, keys); a query that sees none gives 0, and −∞.
        seed: of dropout.
    """
    heads = q.shape[1]
    k, v = _each_query_head(k, heads), _each_query_head(v, heads)
    kernel = scores.fused(q, k, v, mask)
    if kernel == "cpu":
        out, lse = _cpu(q, k, v, 0.0, causal, attn_mask=_added(mask, q), scale=scores.scale)
        if mask is not None:
            lse = lse.masked_fill(~mask.any(-1), -math.inf)
        return out, lse, ()
    if kernel == "flash":
        out, lse, *rest, _ = _flash(q, k, v, 0.0, causal, False, scale=scores.scale)
        return out, lse, tuple(rest)
    logits, _ = _logits(q, k, scores, causal, mask)
    lse = torch.logsumexp(logits, -1)
    weights = (logits - lse[..., None]).exp().nan_to_num(0.0)
    if scores.dropout:
        weights = weights * _kept(weights, scores.dropout, seed)
    return (weights @ v.to(weights)).to(q.dtype), lse, ()


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scores: Scores,
    causal: bool,
    mask: Tensor | None,
    seed: int,
    kept: tuple,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; `out` and `lse` are those over all keys, `kept` what `forward` has returned."""
    heads, groups = q.shape[1], k.shape[1]
    k, v = _each_query_head(k, heads), _each_query_head(v, heads)
    kernel = scores.fused(q, k, v, mask)
    if kernel == "cpu":
        made = _cpu_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=_added(mask, q), scale=scores.scale)
    elif kernel == "flash":
        made = _flash_backward(grad, q, k, v, out, lse, *kept[:4], 0.0, causal, *kept[4:], scale=scores.scale)
    else:
        made = _made(grad, q, k, v, out, lse, scores, causal, mask, seed)
    dq, dk, dv = made
    if groups != heads:
        dk, dv = (t.unflatten(1, (groups, -1)).sum(2) for t in (dk, dv))
    return dq, dk, dv


def _made(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scores: Scores,
    causal: bool,
    mask: Tensor | None,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor]:
    logits, capped = _logits(q, k, scores, causal, mask)
    weights = (logits - lse[..., None]).exp()
    grad, wide = grad.to(weights), weights
    d_weights = grad @ v.to(weights).mT
    if scores.dropout:
        drop = _kept(weights, scores.dropout, seed)
        d_weights, wide = d_weights * drop, weights * drop
    d_logits = weights * (d_weights - (grad * out.to(grad)).sum(-1, keepdim=True))
    if capped is not None:
        d_logits = d_logits * (1 - capped.square())
    d_logits = d_logits * scores.scale
    dq, dk = d_logits @ k.to(weights), d_logits.mT @ q.to(weights)
    return dq.to(q.dtype), dk.to(k.dtype), (wide.mT @ grad).to(v.dtype)


def _logits(q: Tensor, k: Tensor, scores: Scores, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scores, and their tanh where they are capped; in float32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    logits, capped = (q.to(wide) @ k.to(wide).mT) * scores.scale, None
    if scores.softcap:
        capped = torch.tanh(logits / scores.softcap)
        logits = capped * scores.softcap
    if causal:
        mask = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril()
    return logits if mask is None else logits.masked_fill(~mask, -math.inf), capped


def _kept(weights: Tensor, dropout: float, seed: int) -> Tensor:
    generator = torch.Generator(weights.device).manual_seed(seed)
    drawn = torch.rand(weights.shape, generator=generator, device=weights.device)
    return (drawn >= dropout).to(weights) / (1 - dropout)


class Merged:
    """The output over several blocks of keys.

    Args:
        q: the queries, (b, h, tokens, head).
        head: of v.
        sink: a score of each head that every query sees and that has no value, (h,); none when None.
    """

    def __init__(self, q: Tensor, head: int, sink: Tensor | None) -> None:
        self._wide, self._fresh = torch.promote_types(q.dtype, torch.float32), sink is None
        self.out = torch.zeros((*q.shape[:-1], head), dtype=self._wide, device=q.device)
        self.lse = torch.full(q.shape[:-1], -math.inf, dtype=self._wide, device=q.device)
        if sink is not None:
            self.lse = sink.to(self._wide).view(1, -1, 1).expand(q.shape[:-1]).clone()

    def add(self, rows: tuple[int, int], out: Tensor, lse: Tensor) -> None:
        """One block's output and log-sum-exp of some of the queries."""
        fresh, self._fresh = self._fresh, False
        if fresh and lse.shape == self.lse.shape:
            self.out, self.lse = out.to(self._wide), lse.to(self._wide)
            return
        old_out, old = self.out[:, :, slice(*rows)], self.lse[:, :, slice(*rows)]
        new = torch.logaddexp(old, lse)
        shown = new.masked_fill(new == -math.inf, 0.0)
        old_out.mul_((old - shown).exp()[..., None]).add_(out * (lse - shown).exp()[..., None])
        old.copy_(new)


def sink_gradient(sink: Tensor, grad: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """Gradient of `Merged`'s sink: a probability without a value takes part of every other."""
    delta = (grad * out).sum(-1).to(lse)
    share = (sink.to(lse).view(1, -1, 1) - lse).exp()
    return -(share * delta).sum((0, 2)).to(sink.dtype)
