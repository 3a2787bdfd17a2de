"""The goldfish loss (Hans et al., arXiv 2406.10209): some targets are left out of the loss, so that no text is learned word for word.

A target is left out or kept by what stands before it, so a passage has the same mask each time it is read. The loss is the mean over
the targets that are kept, as `torch.nn.functional.cross_entropy` computes it of labels with -100.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, get_args

import torch
from torch import Tensor

Strategy = Literal["hash", "ordered_hash", "static", "seeded"]
IGNORED = -100
"""The label of a position that does not count."""
PUBLISHED_SEED = 2971215073
_SIZE = 1_000_003
_FACTOR = 6364136223846793005  # Knuth's, for sums modulo 2^64


def goldfish_mask(
    labels: Tensor, k: int, h: int = 13, *, strategy: Strategy = "hash", seed: int = PUBLISHED_SEED
) -> Tensor:
    """Which targets are left out of the loss: one of k on average.

    - ``hash``: as published ("hash-table"), bit for bit: by the product of a target and the h - 1 before it. The first h - 1 targets of a
      row are kept. The product does not see the order of the h, and is 0 if any of them has the id 0: then k up to 4 leaves all h targets
      out, and larger k none.
    - ``ordered_hash``: by a sum over the same h targets that sees their order, and for which 0 is an id as any other.
    - ``static``: targets 0, k, 2k, … of each row.
    - ``seeded``: by the place in the row, drawn once by the seed, for all rows alike.

    The table of what is drawn is made on the CPU, so that the mask is the same on every device.

    Args:
        labels: integers (..., tokens), whole rows: each label is the target at its place. Labels of -100 count in the hashes as any other.
        k: one of so many is left out; at least 1, which leaves out all that the strategy may.
        h: targets that decide by a hash; at least 1. A row of fewer is kept whole.
        strategy: see above.
        seed: of the table.

    Returns:
        Booleans of labels' shape, true where a target is left out.

    Raises:
        ValueError: k, h, the strategy, or labels that are no integers.
    """
    check(k, h, strategy)
    if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.is_floating_point() or labels.is_complex():
        raise ValueError(
            f"labels are {_kind(labels)}, and the goldfish mask is of integers (..., tokens); give token ids"
        )
    tokens, ids = labels.shape[-1], labels.long()
    places = torch.arange(tokens, device=labels.device)
    if strategy == "static":
        return (places % k == 0).expand(labels.shape).clone()
    table = _left_out(k, seed, str(labels.device))
    if strategy == "seeded":
        return table[places % _SIZE].expand(labels.shape).clone()
    mask = torch.zeros(labels.shape, dtype=torch.bool, device=labels.device)
    if tokens >= h:
        windows = ids.unfold(-1, h, 1)
        mask[..., h - 1 :] = table[(windows.prod(-1) if strategy == "hash" else _ordered(windows)) % _SIZE]
    return mask


def goldfish_labels(
    labels: Tensor,
    k: int,
    h: int = 13,
    *,
    strategy: Strategy = "hash",
    seed: int = PUBLISHED_SEED,
    shifts: bool = False,
) -> Tensor:
    """Labels with -100 where `goldfish_mask` leaves a target out; other arguments are its own.

    Args:
        labels: integers (..., tokens), whole rows.
        k: one of so many is left out; at least 1.
        h: targets that decide by a hash.
        strategy: of `goldfish_mask`.
        seed: of the table.
        shifts: whether the model moves labels on by one itself, as causal models of transformers do. Then the first label of a row is no
            target, and the mask is that of the others.

    Returns:
        New labels of the same shape and type.

    Raises:
        ValueError: as `goldfish_mask`.
    """
    if shifts and isinstance(labels, Tensor) and labels.dim():
        rest = goldfish_labels(labels[..., 1:], k, h, strategy=strategy, seed=seed)
        return torch.cat([labels[..., :1], rest], -1)
    return labels.masked_fill(goldfish_mask(labels, k, h, strategy=strategy, seed=seed), IGNORED)


def check(k: int, h: int, strategy: str) -> None:
    """Refuse what gives no mask.

    Raises:
        ValueError: names the argument.
    """
    for name, value, least in (("k", k, 1), ("h", h, 1)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} = {value!r} is not an integer of at least {least}; correct its value")
    if strategy not in get_args(Strategy):
        raise ValueError(f"strategy = {strategy!r} is not known; use one of {', '.join(get_args(Strategy))}")


def _ordered(windows: Tensor) -> Tensor:
    keys = torch.zeros_like(windows[..., 0])
    for at in range(windows.shape[-1]):
        keys = keys * _FACTOR + windows[..., at] + 1
    return keys


@lru_cache(maxsize=8)
def _left_out(k: int, seed: int, device: str) -> Tensor:
    drawn = torch.rand(_SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return (drawn < 1 / k).to(device)


def _kind(value: object) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
