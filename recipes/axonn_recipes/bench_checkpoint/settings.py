"""Settings of a run, read from the command line and checked before anything is started."""

from __future__ import annotations

from dataclasses import dataclass

from axonn_plugins.config import ConfigError
from axonn_recipes.cluster_run import NUMBERS, Sizes
from axonn_recipes.models.gpt import GPTConfig
from axonn_recipes.options import Run, at_least_one, heads_fit, part


@dataclass(frozen=True, kw_only=True)
class Settings(Sizes):
    """Everything that decides what is measured.

    Attributes:
        ranks: processes of this machine, which share every weight (gz).
        every: steps from one checkpoint to the next; a round has so many.
    """

    ranks: int = 2
    every: int = 20
    hidden: int = 256
    context: int = 128
    batch: int = 16
    rounds: int = 9

    @property
    def model(self) -> GPTConfig:
        """Sizes of the model."""
        return GPTConfig(256, self.context, self.layers, self.heads, self.hidden)


@dataclass(frozen=True, kw_only=True)
class Options(Settings, Run):
    """The same training without checkpoints, with asynchronous and with synchronous ones, in turns."""


def resolve(options: Options) -> Settings:
    """The run that the command line asks for.

    Raises:
        ConfigError: the first mistake.
    """
    at_least_one(options, "ranks", "every", *NUMBERS)
    heads_fit(options.hidden, options.heads)
    if options.batch % options.ranks:
        raise ConfigError(f"--batch {options.batch} does not divide by --ranks {options.ranks}; use a multiple")
    return Settings(**part(Settings, options))
