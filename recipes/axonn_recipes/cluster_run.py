"""What the benchmarks of a GPT on an emulated cluster share: sizes, options and their checks."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import add_numbers

NUMBERS = ("layers", "hidden", "heads", "context", "batch", "rounds")


@dataclass(frozen=True, kw_only=True)
class ClusterRun:
    """Where and with which GPT a benchmark runs; sizes are counts.

    Attributes:
        nodes: emulated nodes.
        ranks_per_node: ranks on each.
        latency: between nodes, one way, as for a cluster.
        bandwidth: of a node in each direction, as for a cluster.
        layers: transformer blocks.
        hidden: features of the residual stream.
        heads: attention heads.
        context: tokens a sequence.
        batch: sequences a step, over all ranks.
        rounds: timed steps of every side.
        seed: of weights and data.
    """

    nodes: int
    ranks_per_node: int
    latency: str
    bandwidth: str | None
    layers: int
    hidden: int
    heads: int
    context: int
    batch: int
    rounds: int
    seed: int = 1

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.nodes * self.ranks_per_node

    @property
    def model(self) -> GPTConfig:
        """Sizes of the model."""
        return GPTConfig(256, self.context, self.layers, self.heads, self.hidden)

    @property
    def tokens(self) -> int:
        """Tokens a step, over all ranks."""
        return self.batch * self.context


def add_model(made: argparse.ArgumentParser, hidden: int, context: int, batch: int, rounds: int) -> None:
    """The options for the GPT, its batch and the rounds, the `NUMBERS`, with these defaults."""
    add_numbers(
        made,
        (
            ("layers", 4, "transformer blocks"),
            ("hidden", hidden, "features of the residual stream"),
            ("heads", 8, "attention heads"),
            ("context", context, "tokens a sequence"),
            ("batch", batch, "sequences a step, over all ranks"),
            ("rounds", rounds, "timed steps of every side; sides take turns"),
        ),
    )
