"""The goldfish loss under Megatron: each sample's loss mask, of its own whole row of labels, before anything is split."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.datasets.utils import Split

from axonn_plugins.config import ConfigError
from axonn_plugins.config.goldfish import Goldfish
from axonn_plugins.goldfish import goldfish_mask
from axonn_plugins.hosts.megatron.arguments import fail
from axonn_plugins.hosts.megatron.originals import Originals

_originals = Originals()


def install(block: Goldfish) -> None:
    """Have samples of Megatron's `GPTDataset` leave targets out of the loss; the last block counts."""
    _originals.restore()
    _originals.wrap(GPTDataset, "__getitem__", lambda original: _masked(original, block))
    _originals.wrap(BlendedMegatronDatasetBuilder, "__init__", _checked)


def uninstall() -> None:
    """Leave Megatron as it was before `install`."""
    _originals.restore()


def _masked(original: Callable[..., dict[str, Any]], block: Goldfish) -> Callable[..., dict[str, Any]]:
    @wraps(original)
    def __getitem__(self: Any, idx: int | None) -> dict[str, Any]:
        sample = original(self, idx)
        if self.index_split is not Split.train and not block.evaluation:
            return sample
        dropped = goldfish_mask(sample["labels"], block.k, block.h, strategy=block.strategy, seed=block.seed)
        return {**sample, "loss_mask": sample["loss_mask"].masked_fill(dropped, 0)}

    return __getitem__


def _checked(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, cls: Any, *rest: Any, **named: Any) -> None:
        if getattr(cls, "__getitem__", None) is not GPTDataset.__getitem__:
            fail(
                ConfigError(
                    f"--axonn-goldfish masks the samples of Megatron's GPTDataset, and this script reads a {cls.__name__}; leave the flag out, and "
                    "mask its samples by axonn_plugins.goldfish.goldfish_mask"
                )
            )
        original(self, cls, *rest, **named)

    return __init__
