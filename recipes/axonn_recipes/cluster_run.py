"""The common part of benchmarks of a GPT on an emulated cluster: sizes and options."""

from __future__ import annotations

from dataclasses import dataclass, fields

from axonn_recipes.bench.wire import Wire
from axonn_recipes.models.gpt import GPTConfig


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A GPT's depth and batch, and how often it is timed; sizes are counts.

    Attributes:
        layers: transformer blocks.
        heads: attention heads.
        context: tokens a sequence.
        batch: sequences a step, over all ranks.
        rounds: timed steps of every side; sides take turns.
    """

    layers: int = 4
    heads: int = 8
    context: int
    batch: int
    rounds: int


@dataclass(frozen=True, kw_only=True)
class Sizes(Batch):
    """A GPT, its batch, and how often it is timed.

    Attributes:
        hidden: features of the residual stream.
    """

    hidden: int


NUMBERS = tuple(field.name for field in fields(Sizes))


@dataclass(frozen=True, kw_only=True)
class Place(Wire):
    """An emulated cluster.

    Attributes:
        nodes: emulated nodes.
        ranks_per_node: ranks on each.
        latency: between nodes, one way, such as 100us.
        bandwidth: of a node in each direction, such as 500Mbit; by itself there is no limit.
    """

    nodes: int
    ranks_per_node: int
    latency: str
    bandwidth: str | None


@dataclass(frozen=True, kw_only=True)
class ClusterRun(Sizes, Place):
    """Where and with which GPT a benchmark runs.

    Attributes:
        seed: of weights and data.
    """

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
