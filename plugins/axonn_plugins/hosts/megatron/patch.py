"""Changes to Megatron, and their time: its parser at import, all else once the flags have asked for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from axonn_plugins.config.base import Block
from axonn_plugins.hosts.megatron.settings import Settings


def arm(module: ModuleType) -> None:
    """Give a `megatron.training.arguments` module our flags; harmless when called again, and nothing heavy is imported."""
    from axonn_plugins.hosts.megatron import arguments

    arguments.add_flags(module)


def install(settings: Settings) -> None:
    """Replace Megatron's tensor parallelism by ours in this process, before it makes its process groups.

    Scripts on megatron.core alone call this themselves. Called again, the last settings count for models made after it.
    """
    from axonn_plugins.hosts.megatron import checkpoint, enums, process_groups, spec

    process_groups.install(settings)
    spec.install(settings)
    checkpoint.install()
    enums.readable()


def install_components(blocks: Mapping[str, Block]) -> None:
    """Have the block's other systems, and those of one's own, take part in this process' training, before it makes process groups.

    Args:
        blocks: by key.
    """
    from axonn_plugins.config import Goldfish, Pccl, Ted
    from axonn_plugins.hosts.megatron import collectives, enums, moments, recompute

    enums.readable()
    others = {}
    for key, block in blocks.items():
        if isinstance(block, Pccl):
            collectives.install(block)
        elif isinstance(block, Ted):
            recompute.install(block)
        elif isinstance(block, Goldfish):
            from axonn_plugins.hosts.megatron import goldfish

            goldfish.install(block)
        else:
            others[key] = block
    if others:
        moments.install(others)


def compare_ranks(args: Any) -> None:
    """Have ranks that were started with other flags of ours told so before process groups are made.

    Called after `install`, and before `install_components`: what ranks say then goes by PCCL where collectives are to be its.
    """
    from axonn_plugins.hosts.megatron import agreement

    agreement.install(args)


def uninstall() -> None:
    """Leave Megatron as it was before `install` and `install_components`; models and groups that were made stay."""
    from axonn_plugins.hosts.megatron import (
        agreement,
        checkpoint,
        collectives,
        goldfish,
        moments,
        process_groups,
        recompute,
        spec,
    )

    moments.uninstall()
    goldfish.uninstall()
    recompute.uninstall()
    collectives.uninstall()
    agreement.uninstall()
    checkpoint.uninstall()
    spec.uninstall()
    process_groups.uninstall()
