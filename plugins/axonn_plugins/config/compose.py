"""Which systems of the block go together: one table, from which errors and the README's table come.

Every pair does. What is refused is a setting of one that contradicts a setting of another, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations

from axonn_plugins.config import Axonn, ConfigError

SYSTEMS = ("tensor_parallel", "ted", "samo", "pipeline", "offload_optimizer", "pccl", "goldfish")
"""Keys of systems, in the order of the tables."""


@dataclass(frozen=True)
class Conflict:
    """A setting of one system that another forbids.

    Attributes:
        keys: the two systems.
        holds: whether a block with both has it.
        setting: names it, with its value.
        reason: why, and what to do.
    """

    keys: tuple[str, str]
    holds: Callable[[Axonn], bool]
    setting: Callable[[Axonn], str]
    reason: str


def _other_tensor_ranks(block: Axonn) -> bool:
    assert block.ted is not None and block.tensor_parallel is not None
    sizes = block.tensor_parallel.given
    return block.ted.tensor > 1 and sizes.get("gx", 0) * sizes.get("gy", 0) != block.ted.tensor


def _compiled(block: Axonn) -> bool:
    return block.tensor_parallel is not None and block.tensor_parallel.compile


CONFLICTS = (
    Conflict(
        ("tensor_parallel", "ted"),
        _other_tensor_ranks,
        lambda block: f"axonn.ted.tensor = {block.ted.tensor if block.ted else 1}",
        "beside axonn.tensor_parallel the ranks that split a layer are those of x and y; leave tensor out",
    ),
    Conflict(
        ("tensor_parallel", "pipeline"),
        lambda block: block.tensor_parallel is not None and block.tensor_parallel.trace_steps is not None,
        lambda block: "axonn.tensor_parallel.trace_steps",
        "a pipeline's engine records its own events, by record_events(); leave it out",
    ),
    *(
        Conflict(("tensor_parallel", other), _compiled, lambda block: "axonn.tensor_parallel.compile = true", reason)
        for other, reason in (
            ("ted", "where a token goes is known when it is there, and no compiler traces that; leave compile out"),
            ("pipeline", "stages run microbatches as messages come, which no compiler traces; leave compile out"),
        )
    ),
)
"""All pairs of systems whose settings contradict each other."""


def check(block: Axonn) -> None:
    """Refuse settings that contradict each other.

    Raises:
        ConfigError: the first.
    """
    for conflict in CONFLICTS:
        given = all(getattr(block, key) is not None for key in conflict.keys)
        if given and conflict.holds(block):
            raise ConfigError(
                f"{conflict.setting(block)} does not go with axonn.{_other(conflict, block)}: {conflict.reason}"
            )


def _other(conflict: Conflict, block: Axonn) -> str:
    first, second = conflict.keys
    return first if conflict.setting(block).startswith(f"axonn.{second}") else second


def pairs() -> list[tuple[str, str, list[str]]]:
    """All pairs of systems, each with the reasons of what is refused."""
    return [
        (first, second, [conflict.reason for conflict in CONFLICTS if conflict.keys == (first, second)])
        for first, second in combinations(SYSTEMS, 2)
    ]
