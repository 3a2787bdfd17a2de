"""A small GPT on megatron.core alone, trained on a grid or by Megatron itself; the same data for both."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
from megatron.core.models.gpt import GPTModel, gpt_layer_specs
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils import get_batch_on_this_cp_rank, unwrap_model

from axonn_plugins.hosts.megatron import cpu, process_groups, spec
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_tp import layout_of
from tests import groups
from tests.megatron import mamba_double, muon_double

VOCABULARY, SEQUENCE, BATCH, FEW = 64, 16, 8, 4
"""Sequences of a step: `FEW` where each is a microbatch, whose calls are what takes time."""


@dataclass(frozen=True)
class Case:
    """Options of a run.

    Attributes:
        settings: of our grid; Megatron's own layers when None.
        tensor: Megatron's tensor-parallel size, for its own layers.
        pipeline: stages.
        steps: of the optimizer.
        micro_batches: that make a step, on each rank.
        dtype: of parameters.
        config: of the transformer, over the defaults below.
        model: keywords of the model, over the defaults below.
        ddp: of the gradient buffers.
        optimizer: of the optimizer.
        expected: weights after the last step, by name, to compare with.
        engine: build the layers as for Transformer Engine, whose attention and norms are Megatron's own here.
        experts: ranks with different experts, and how many split one; as many as split other layers where None.
        context: ranks that share a sequence.
        batch: sequences that all ranks read in a step.
        masked: leave targets out of the loss, more in some places than in others.
        packed: lengths of the sequences that lie end to end in a row; Megatron's own layers see them by a mask.
        pattern: layers of a hybrid model, each a letter of Megatron's.
        smoothed: the loss is a script's own, of the model's logits, with labels that are smoothed so much.
        frozen: parts of the names of parameters that are not trained.
    """

    settings: Settings | None = None
    tensor: int = 1
    pipeline: int = 1
    steps: int = 2
    micro_batches: int = 1
    dtype: torch.dtype = torch.float32
    config: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    expected: dict[str, Any] = field(default_factory=dict)
    engine: bool = False
    experts: tuple[int, int | None] = (1, None)
    context: int = 1
    batch: int = BATCH
    masked: bool = False
    packed: tuple[int, ...] = ()
    pattern: str = ""
    smoothed: float | None = None
    frozen: tuple[str, ...] = ()

    def on(self, settings: Settings | None, **changes: Any) -> Case:
        """The same run on a grid."""
        return replace(self, settings=settings, **changes)


def on_cpu() -> None:
    """Let this process, a fork of one that has imported Megatron, run it on the CPU, one case after another."""
    cpu.enable_core()
    groups.reuse()


def _instances(case: Case) -> int:
    return case.ddp.get("num_distributed_optimizer_instances", 1)


@contextmanager
def grouped(case: Case, gloo: bool = False) -> Iterator[None]:
    """Megatron's process groups, for this case and others of the same grid."""
    if case.settings is not None:
        process_groups.install(case.settings)
    tensor = case.tensor if case.settings is None else case.settings.tensor
    parallel_state.initialize_model_parallel(
        tensor,
        case.pipeline,
        context_parallel_size=case.context,
        expert_model_parallel_size=case.experts[0],
        expert_tensor_parallel_size=case.experts[1],
        create_gloo_process_groups=gloo,
        num_distributed_optimizer_instances=_instances(case),
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()
        process_groups.uninstall()


@contextmanager
def layered(case: Case) -> Iterator[None]:
    """Our layers where the case asks for them, within `grouped`."""
    if case.settings is not None:
        process_groups.install(case.settings)
        spec.install(case.settings)
    tensor_parallel.model_parallel_cuda_manual_seed(123, force_reset_rng=True)
    # What Megatron logs of a model, by layer.
    get_moe_layer_wise_logging_tracker().clear()
    MTPLossLoggingHelper.tracker.clear()
    try:
        yield
    finally:
        spec.uninstall()


@contextmanager
def parallel(case: Case, gloo: bool = False) -> Iterator[None]:
    """Both, for one case; `gloo`: with the groups that checkpoints of a distributed optimizer need."""
    with grouped(case, gloo), layered(case):
        yield


def _engine_layers(config: TransformerConfig) -> Any:
    def attention(self: Any) -> type:
        return DotProductAttention

    def norm(self: Any, **kwargs: Any) -> type:
        return WrappedTorchNorm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpt_layer_specs, "TESpecProvider", TESpecProvider, raising=False)
        patch.setattr(TESpecProvider, "core_attention", attention)
        patch.setattr(TESpecProvider, "layer_norm", norm)
        return gpt_layer_specs.get_gpt_layer_with_transformer_engine_spec(
            qk_layernorm=config.qk_layernorm, multi_latent_attention=config.multi_latent_attention
        )


def train_all(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Call `train` for each case, on this rank, a grid at a time: groups take longer to make than a case to run."""
    on_cpu()
    if any(case.pattern for case in cases.values()):
        mamba_double.install()
    if any(case.optimizer.get("optimizer") == "muon" for case in cases.values()):
        muon_double.install()
    grids: dict[tuple, list[str]] = defaultdict(list)
    for name, case in cases.items():
        sizes = case.settings and (case.settings.gx, case.settings.gy, case.settings.gz)
        grids[sizes, case.tensor, case.pipeline, case.experts, case.context, _instances(case)].append(name)
    found = {}
    for names in grids.values():
        with grouped(cases[names[0]]):
            for name in names:
                with layered(cases[name]):
                    found[name] = train(cases[name])
    return found


def configuration(case: Case) -> TransformerConfig:
    """A transformer of two layers."""
    defaults: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 8,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "persist_layer_norm": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "pipeline_model_parallel_size": case.pipeline,
        "pipeline_dtype": case.dtype,
        "tensor_model_parallel_size": case.tensor if case.settings is None else case.settings.tensor,
        "params_dtype": case.dtype,
        "bf16": case.dtype == torch.bfloat16,
        "fp16": case.dtype == torch.float16,
        "context_parallel_size": case.context,
        "expert_model_parallel_size": case.experts[0],
        "expert_tensor_parallel_size": case.experts[1],
    }
    kind = MLATransformerConfig if case.config.get("multi_latent_attention") else TransformerConfig
    return kind(**{**defaults, **case.config})


def build(case: Case) -> DistributedDataParallel:
    """This rank's model, the same whatever the grid."""
    torch.manual_seed(1)
    config = configuration(case)
    layers = _engine_layers(config) if case.engine and not case.pattern else _layers(config)
    keywords: dict[str, Any] = {
        "mtp_block_spec": _predictions(config),
        "vocab_size": VOCABULARY,
        "max_sequence_length": SEQUENCE,
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
        **case.model,
    }
    if case.pattern:
        del keywords["mtp_block_spec"]
        model: Any = mamba_double.build(config, case.pattern, case.engine, keywords)
    else:
        model = GPTModel(config, layers, **keywords)
    if case.dtype.itemsize == 2:
        model = Float16Module(config, model)
    elif case.dtype == torch.float64:
        model.double()  # mixers keep some of their weights in float32
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in case.frozen))
    return DistributedDataParallel(config, DistributedDataParallelConfig(**case.ddp), model)


def _layers(config: TransformerConfig) -> Any:
    if config.num_moe_experts is not None:
        return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    return gpt_layer_specs.get_gpt_layer_local_spec(
        normalization=config.normalization,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
    )


def _predictions(config: TransformerConfig) -> Any:
    if config.mtp_num_layers is None:
        return None
    last = gpt_layer_specs.get_gpt_decoder_layer_specs(
        config, use_transformer_engine=False, normalization=config.normalization
    )[-1]
    return gpt_layer_specs.get_gpt_mtp_block_spec(config, last, use_transformer_engine=False)


def train(case: Case) -> dict[str, Any]:
    """Losses and gradient norms of all steps, what replicas hold, and the weights where a case asks for them."""
    model = build(case)
    optimizer = _optimizer(case, model)
    config = model.module.config
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
    if case.ddp.get("overlap_grad_reduce"):
        config.no_sync_func = model.no_sync
    losses, norms, zeros = [], [], []
    for step in range(case.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses.append(_step(case, model, step))
        _, norm, empty = optimizer.step()
        norms.append(float(norm))
        zeros.append(empty)
    if case.ddp.get("overlap_param_gather"):
        model.disable_forward_pre_hook()
    told = {"losses": losses, "norms": norms, "zeros": zeros}
    return {**told, "replicas": _replicas(model), "weights": _weights(model, case)}


def _optimizer(case: Case, model: DistributedDataParallel) -> Any:
    keywords = {"optimizer": "adam", "lr": 1e-2, "clip_grad": 0.5, "weight_decay": 0.1, **case.optimizer}
    keywords["use_distributed_optimizer"] = bool(case.ddp.get("use_distributed_optimizer"))
    if case.dtype.itemsize == 2:
        keywords |= {
            "bf16": case.dtype == torch.bfloat16,
            "fp16": case.dtype == torch.float16,
            "initial_loss_scale": 256,
        }
    make = get_megatron_optimizer
    if keywords["optimizer"] == "muon":
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer as make
    return make(OptimizerConfig(params_dtype=case.dtype, **keywords), [model], use_gloo_process_groups=False)


def _step(case: Case, model: DistributedDataParallel, step: int) -> float:
    ranks = parallel_state.get_data_parallel_world_size()
    size = case.batch // ranks // case.micro_batches
    first = parallel_state.get_data_parallel_rank() * size * case.micro_batches
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (case.batch, SEQUENCE + 1), generator=generator)
    weights = torch.ones(case.batch, SEQUENCE)
    if case.masked:
        weights = (torch.rand(case.batch, SEQUENCE, generator=generator) < torch.linspace(0.2, 1, SEQUENCE)).float()
    here = slice(first, first + size * case.micro_batches)
    mine = iter(zip(tokens[here].split(size), weights[here].split(size), strict=True))
    results = get_forward_backward_func()(
        forward_step_func=partial(_forward, case),
        data_iterator=mine,
        model=model,
        num_microbatches=case.micro_batches,
        seq_length=SEQUENCE,
        micro_batch_size=size,
        forward_only=False,
    )
    both = torch.tensor([float(sum(result[name] for result in results)) for name in ("loss", "tokens")])
    dist.all_reduce(both, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.broadcast(
        both, parallel_state.get_pipeline_model_parallel_last_rank(), parallel_state.get_pipeline_model_parallel_group()
    )
    return float(both[0] / both[1])


def loss_of(
    model: Any, tokens: torch.Tensor, weights: torch.Tensor | None = None, smoothed: float | None = None
) -> torch.Tensor:
    """Run a stage on (batch, sequence + 1) tokens; the last one gives losses (batch, share of the sequence).

    Args:
        model: this stage's.
        tokens: whole sequences.
        weights: this rank's, of its tokens' losses.
        smoothed: see `Case`.
    """
    positions = torch.arange(SEQUENCE).expand(len(tokens), -1).contiguous()
    mask = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)[None, None]
    whole = {"tokens": tokens[:, :-1].contiguous(), "positions": positions, "attention_mask": mask}
    here = get_batch_on_this_cp_rank({**whole, "labels": tokens[:, 1:].contiguous()})
    told = {"loss_mask": weights} if isinstance(unwrap_model(model), GPTModel) else {}  # for predictions
    given, labels = (here["tokens"], here["positions"], here["attention_mask"]), here["labels"]
    if smoothed is None:
        return model(*given, labels=labels, **told)
    return vocab_parallel_cross_entropy(model(*given).float(), labels, smoothed)


def packed_loss_of(model: Any, tokens: torch.Tensor, lengths: tuple[int, ...], by_lengths: bool) -> torch.Tensor:
    """The same where each row is sequences end to end, and all rows lie in one; told by where sequences begin, or by a mask."""
    every = torch.tensor(lengths).repeat(len(tokens))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), every.cumsum(0)]).int()
    longest, number = max(lengths), torch.arange(len(every)).repeat_interleave(every)
    positions = torch.arange(len(number)) - starts[:-1].repeat_interleave(every)
    mask = (number[:, None] != number).logical_or(torch.ones(len(number), len(number), dtype=torch.bool).triu(1))
    packed = PackedSeqParams("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest)
    told = {"packed_seq_params": packed} if by_lengths else {}
    inputs, labels = (part.reshape(1, -1) for part in (tokens[:, :-1], tokens[:, 1:]))
    losses = model(inputs, positions[None], None if by_lengths else mask[None, None], labels=labels, **told)
    return losses.view(len(tokens), -1)


def _forward(case: Case, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], model: Any) -> tuple[torch.Tensor, Any]:
    tokens, weights = next(batches)
    if case.packed:
        return packed_loss_of(model, tokens, case.packed, case.settings is not None), partial(_sum, weights)
    weights = get_batch_on_this_cp_rank({"weights": weights})["weights"]
    return loss_of(model, tokens, weights, case.smoothed), partial(_sum, weights)


def _sum(weights: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """As pretrain_gpt.py's: a microbatch's loss, and of how many targets."""
    loss, tokens = (output.float() * weights).sum(), weights.sum().int()
    return loss, tokens, {"loss": loss.detach().clone(), "tokens": tokens}


def _replicas(model: torch.nn.Module) -> dict[str, str]:
    """By parameter and this rank's place on the axes that split it, a checksum: the same wherever the key is."""
    stage = parallel_state.get_pipeline_model_parallel_rank()
    found = {}
    for name, parameter in model.named_parameters():
        layout = layout_of(parameter)
        at = process_groups.mesh().coordinates if hasattr(parameter, "axonn_layout") else {}
        place = [at[axis] for axis in sorted(layout.axes)]
        found[f"{stage} {name} {place}"] = hashlib.sha1(_numbers(parameter).tobytes()).hexdigest()
    return found


def _weights(model: torch.nn.Module, case: Case) -> dict[str, Any]:
    """All parameters in full from Megatron's own layers; from ours, their distance from these."""
    names = {name.removeprefix("module."): parameter for name, parameter in model.named_parameters()}
    if case.settings is None:
        return {name: _numbers(parameter) for name, parameter in names.items()}
    if not case.expected:
        return {}
    mesh, worst = process_groups.mesh(), {}
    for name, parameter in names.items():
        whole = torch.from_numpy(case.expected[name])
        share = layout_of(parameter).shard(whole, mesh.grid, mesh.coordinates)
        worst[name] = float((parameter.detach().reshape(-1) - share.reshape(-1)).abs().max())
    return worst


def _numbers(parameter: torch.Tensor) -> Any:
    return parameter.detach().float().numpy().copy()
