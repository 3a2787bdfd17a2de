"""What a run is: its command line and what that resolves to."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.megatron.settings import LAYOUTS
from axonn_plugins.hosts.megatron.settings import Settings as Grid
from axonn_recipes.options import add_numbers, add_run, at_least_one, heads_fit

IMPLS = ("axonn3d", "megatron")
VOCABULARY = 256
"""Bytes."""
_SIZES = (
    ("ranks", 4, "processes"),
    ("layers", 4, "transformer layers"),
    ("hidden", 128, "hidden size"),
    ("heads", 8, "attention heads"),
    ("query-groups", 0, "groups of heads that share keys and values; 0: as many as heads"),
    ("context", 64, "bytes a sample"),
    ("batch", 16, "samples a step"),
    ("micro-batch", 2, "samples a microbatch"),
    ("steps", 100, "steps"),
    ("seed", 1234, "of weights and batches"),
    ("tensor-model-parallel-size", 1, "for Megatron's own layers; ours take gx*gy"),
    ("pipeline-model-parallel-size", 1, "pipeline stages"),
    ("axonn-gx", 2, "ranks that split heads and the columns of weights"),
    ("axonn-gy", 1, "ranks that split the hidden size"),
    ("axonn-gz", 2, "ranks that share every weight, and split the batch"),
)
_SWITCHES = (
    ("swiglu", "gated feed-forward layers"),
    ("rmsnorm", "RMSNorm instead of LayerNorm"),
    ("rope", "rotary positions instead of learned ones"),
    ("untied", "an output layer with weights of its own"),
    ("distributed-optimizer", "split the optimizer's state over data-parallel ranks"),
    ("overlap-grad-reduce", "sum gradients during the backward pass"),
    ("overlap-param-gather", "gather the distributed optimizer's weights during the forward pass"),
    ("grad-reduce-in-bf16", "sum gradients over data-parallel ranks in bf16 where the model is, not in fp32"),
)


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run; names are those of the command line."""

    ranks: int = 4
    layers: int = 4
    hidden: int = 128
    heads: int = 8
    query_groups: int = 0
    context: int = 64
    batch: int = 16
    micro_batch: int = 2
    steps: int = 100
    seed: int = 1234
    lr: float = 1e-3
    precision: str = "fp32"
    recompute: str = "none"
    tensor_model_parallel_impl: str = "axonn3d"
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    axonn_gx: int = 2
    axonn_gy: int = 1
    axonn_gz: int = 2
    axonn_layout: str = LAYOUTS[0]
    swiglu: bool = False
    rmsnorm: bool = False
    rope: bool = False
    untied: bool = False
    distributed_optimizer: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    grad_reduce_in_bf16: bool = False

    @property
    def grid(self) -> Grid | None:
        """Ours, or None for Megatron's own layers."""
        if self.tensor_model_parallel_impl == "megatron":
            return None
        return Grid(self.axonn_gx, self.axonn_gy, self.axonn_gz, layout=self.axonn_layout)

    @property
    def tensor(self) -> int:
        """Megatron's tensor-parallel size."""
        return self.tensor_model_parallel_size if self.grid is None else self.grid.tensor

    @property
    def data(self) -> int:
        """Megatron's data-parallel ranks, our z among them."""
        return self.ranks // (self.tensor * self.pipeline_model_parallel_size)

    @property
    def micro_batches(self) -> int:
        """Microbatches of a step on each rank."""
        return self.batch // (self.micro_batch * self.data)

    @property
    def groups(self) -> int:
        """Heads that have keys and values of their own."""
        return self.query_groups or self.heads

    @property
    def ffn(self) -> int:
        """Columns of the feed-forward layer."""
        return 4 * self.hidden

    def stock(self) -> Settings:
        """The same training by Megatron itself on one rank."""
        return replace(
            self,
            ranks=1,
            tensor_model_parallel_impl="megatron",
            tensor_model_parallel_size=1,
            pipeline_model_parallel_size=1,
            overlap_param_gather=False,
        )

    def check(self) -> None:
        """Refuse what cannot be trained.

        Raises:
            ConfigError: the first mistake.
        """
        at_least_one(self, *(name.replace("-", "_") for name, *_ in _SIZES if name not in ("query-groups", "seed")))
        heads_fit(self.hidden, self.heads)
        if self.query_groups < 0 or self.heads % self.groups:
            raise ConfigError(
                f"--query-groups {self.query_groups} does not divide --heads {self.heads}; choose a divisor"
            )
        z = 1 if self.grid is None else self.grid.gz
        model = self.tensor * self.pipeline_model_parallel_size
        if self.ranks % (model * z):
            raise ConfigError(
                f"--ranks {self.ranks} is no multiple of the {model * z} ranks that the tensor, pipeline and z sizes take; change one"
            )
        if self.layers % self.pipeline_model_parallel_size:
            raise ConfigError(
                f"--layers {self.layers} do not divide by --pipeline-model-parallel-size {self.pipeline_model_parallel_size}; use a multiple"
            )
        if self.batch % (self.micro_batch * self.data):
            raise ConfigError(
                f"--batch {self.batch} is no multiple of --micro-batch {self.micro_batch} times {self.data} data-parallel ranks; change one"
            )
        if self.overlap_param_gather and not (self.distributed_optimizer and self.overlap_grad_reduce):
            raise ConfigError(
                "--overlap-param-gather needs --distributed-optimizer and --overlap-grad-reduce; add them, or leave it out"
            )
        self._check_shares()

    def _check_shares(self) -> None:
        if self.grid is None:
            for name, size in (("--heads", self.heads), ("--query-groups", self.groups)):
                if size % self.tensor:
                    raise ConfigError(
                        f"{name} {size} does not divide by --tensor-model-parallel-size {self.tensor}; change one"
                    )
            return
        from axonn_plugins.hosts.megatron.rules import indivisible

        sizes = SimpleNamespace(
            num_attention_heads=self.heads,
            num_query_groups=self.groups,
            group_query_attention=self.groups != self.heads,
            hidden_size=self.hidden,
            ffn_hidden_size=self.ffn,
            seq_length=self.context,
        )
        if mistake := indivisible(sizes, self.grid):
            raise ConfigError(mistake)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="axonn train megatron_gpt", description=__doc__)
    add_numbers(made, _SIZES)
    made.add_argument("--lr", type=float, default=1e-3, help="learning rate (default 0.001)")
    made.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="(default fp32)")
    made.add_argument("--recompute", choices=("none", "selective", "full"), default="none", help="(default none)")
    made.add_argument(
        "--tensor-model-parallel-impl",
        choices=IMPLS,
        default=IMPLS[0],
        help=f"who splits the layers (default {IMPLS[0]})",
    )
    made.add_argument("--axonn-layout", choices=LAYOUTS, default=LAYOUTS[0], help=f"(default {LAYOUTS[0]})")
    for name, text in _SWITCHES:
        made.add_argument(f"--{name}", action="store_true", help=text)
    made.add_argument("--data", help="a text file or folder (default: the source of Python's standard library)")
    made.add_argument("--prepare", type=Path, metavar="PREFIX", help="only write the text as PREFIX_*.bin and .idx")
    made.add_argument("--save", type=Path, metavar="FOLDER", help="write a checkpoint at the end")
    made.add_argument("--load", type=Path, metavar="FOLDER", help="go on from a checkpoint, on this grid or on another")
    made.add_argument("--check", action="store_true", help="train on one rank by Megatron itself too, and compare")
    add_run(made, "megatron_gpt")
    return made


def resolve(options: argparse.Namespace) -> Settings:
    """The run that a command line asks for.

    Raises:
        ConfigError: it cannot be trained.
    """
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    settings.check()
    return settings
