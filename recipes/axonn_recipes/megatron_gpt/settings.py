"""Settings of a run: its command line, and the configuration that it resolves to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Literal

from tyro import conf

from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.megatron.settings import Settings as Grid
from axonn_recipes.options import Run, at_least_one, heads_fit, part, rates_and_seed

VOCABULARY = 256
"""Bytes."""
_SIZES = (
    *("ranks", "layers", "hidden", "heads", "context", "batch", "micro_batch", "steps", "tensor_model_parallel_size"),
    *("pipeline_model_parallel_size", "axonn_gx", "axonn_gy", "axonn_gz"),
)


@dataclass(frozen=True)
class Settings:
    """Everything that decides a run; names are those of the command line.

    Attributes:
        ranks: processes.
        layers: transformer layers.
        hidden: hidden size.
        heads: attention heads.
        query_groups: groups of heads that share keys and values; 0: as many as heads.
        context: bytes a sample.
        batch: samples a step.
        micro_batch: samples a microbatch.
        steps: steps.
        seed: of weights and batches.
        lr: learning rate.
        precision: of the model.
        recompute: which activations are computed again in the backward pass.
        tensor_model_parallel_impl: who splits the layers.
        tensor_model_parallel_size: for Megatron's own layers; ours take gx*gy.
        pipeline_model_parallel_size: pipeline stages.
        axonn_gx: ranks that split heads and the columns of weights.
        axonn_gy: ranks that split the hidden size.
        axonn_gz: ranks that share every weight, and split the batch.
        axonn_layout: of activations.
        swiglu: gated feed-forward layers.
        rmsnorm: RMSNorm instead of LayerNorm.
        rope: rotary positions instead of learned ones.
        untied: an output layer with weights of its own.
        distributed_optimizer: split the optimizer's state over data-parallel ranks.
        overlap_grad_reduce: sum gradients during the backward pass.
        overlap_param_gather: gather the distributed optimizer's weights during the forward pass.
        grad_reduce_in_bf16: sum gradients over data-parallel ranks in bf16 where the model is, not in fp32.
    """

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
    precision: Literal["fp32", "bf16"] = "fp32"
    recompute: Literal["none", "selective", "full"] = "none"
    tensor_model_parallel_impl: Literal["axonn3d", "megatron"] = "axonn3d"
    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    axonn_gx: int = 2
    axonn_gy: int = 1
    axonn_gz: int = 2
    axonn_layout: Literal["scattered", "replicated"] = "scattered"
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
        """The grid, or None for Megatron's own layers."""
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
        at_least_one(self, *_SIZES)
        rates_and_seed(self, "lr")
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
        from axonn_plugins.hosts.megatron.sizes import indivisible

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


@dataclass(frozen=True, kw_only=True)
class Options(Settings, Run):
    """A byte-level GPT on megatron.core alone, its layers split by Megatron or in 3D PMM.

    Attributes:
        text: a text file or folder; by itself the source of Python's standard library.
        prepare: only write the text, as PREFIX_*.bin and .idx.
        save: a folder to write a checkpoint into at the end.
        load: a checkpoint to go on from, on this grid or on another.
        compare: train on one rank by Megatron itself too, and compare.
    """

    text: Annotated[str | None, conf.arg(name="data")] = None
    prepare: Path | None = None
    save: Path | None = None
    load: Path | None = None
    compare: Annotated[bool, conf.arg(name="check")] = False


def resolve(options: Options) -> Settings:
    """The run that a command line asks for.

    Raises:
        ConfigError: it cannot be trained.
    """
    settings = Settings(**part(Settings, options))
    settings.check()
    return settings
