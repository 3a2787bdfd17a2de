"""The replacements of Megatron's modules with which a GPT model is built on the grid.

Linear layers come from the spec providers; word embedding and output layer from `megatron.core.tensor_parallel`, where
the models look them up. Norms, positions, dropout and heads are changed in modules as they are made: their classes differ
between versions and backends, their places do not.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models import backends
from megatron.core.models.common.embeddings import language_model_embedding, rotary_pos_embedding
from megatron.core.models.common.language_module import language_module
from megatron.core.models.gpt import gpt_model
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import attention, transformer_block, transformer_config, transformer_layer
from torch import Tensor, nn

from axonn_plugins.hosts.megatron import (
    chain,
    context,
    grouped,
    latent,
    loss,
    mamba,
    moe,
    mtp,
    muon,
    process_groups,
)
from axonn_plugins.hosts.megatron.embedding import PositionEmbedding, VocabParallelEmbedding
from axonn_plugins.hosts.megatron.engine_layers import (
    EngineColumnParallelLinear,
    EngineRowParallelLinear,
    LayerNormColumnParallelLinear,
)
from axonn_plugins.hosts.megatron.forward import watch_forward
from axonn_plugins.hosts.megatron.layers import ColumnParallelLinear, RowParallelLinear
from axonn_plugins.hosts.megatron.norms import split_norms
from axonn_plugins.hosts.megatron.originals import Originals
from axonn_plugins.hosts.megatron.parameters import (
    sum_over_heads,
    with_all_replicas,
    with_partial_sums,
    with_promised_sums,
)
from axonn_plugins.hosts.megatron.randomness import HeadsDropout, StreamDropout, bias_dropout_add_in_stream, seeded
from axonn_plugins.hosts.megatron.refusals import check_config, check_layers, check_model
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_plugins.hosts.megatron.sharing import heads_over, share_of_stream, stream_over, whole_stream
from axonn_tp.comm.collectives import gather_to

_originals = Originals()


def install(settings: Settings) -> None:
    """Have models made from now on split over the grid; what they read of the settings they take from `process_groups`."""
    if _originals:
        return
    for provider in _providers():
        if provider is backends.LocalSpecProvider:
            _originals.replace(provider, "column_parallel_linear", lambda self: ColumnParallelLinear)
            _originals.replace(provider, "row_parallel_linear", lambda self: RowParallelLinear)
            continue
        _originals.replace(provider, "column_parallel_linear", lambda self: EngineColumnParallelLinear)
        _originals.replace(provider, "row_parallel_linear", lambda self: EngineRowParallelLinear)
        _originals.replace(provider, "column_parallel_layer_norm_linear", lambda self: LayerNormColumnParallelLinear)
        # Of Transformer Engine's plain linears those of latents are taken alone.
        _originals.replace(provider, "linear", lambda self: EngineColumnParallelLinear)
    _originals.replace(tensor_parallel, "ColumnParallelLinear", ColumnParallelLinear)
    _originals.replace(tensor_parallel, "VocabParallelEmbedding", VocabParallelEmbedding)
    _originals.wrap(transformer_config.TransformerConfig, "__post_init__", _of_ranks_with_other_heads)
    _originals.wrap(attention.Attention, "__init__", _with_heads)
    _originals.wrap(attention.SelfAttention, "__init__", _with_head_norms)
    _originals.replace(attention, "all_gather_last_dim_from_tensor_parallel_region", _whole_qkv)
    _originals.replace(attention, "get_tensor_model_parallel_rank", lambda: process_groups.mesh().rank("x"))
    _originals.wrap(language_model_embedding.LanguageModelEmbedding, "__init__", _with_embeddings)
    _originals.wrap(transformer_layer.TransformerLayer, "__init__", _with_layer)
    _originals.wrap(transformer_block.TransformerBlock, "__init__", _with_final_norm)
    _originals.wrap(rotary_pos_embedding.RotaryEmbedding, "get_rotary_seq_len", _of_whole_sequence)
    for model, block in ((gpt_model.GPTModel, transformer_block.TransformerBlock), *mamba.install(_originals)):
        _originals.wrap(model, "__init__", _with_forward)
        _originals.wrap(block, "set_input_tensor", _takes_whole)
        _originals.wrap(block, "forward", _gives_whole)
    _originals.wrap(language_module.LanguageModule, "__init__", _of_models_that_are_split)
    _originals.wrap(DistributedDataParallel, "__init__", with_promised_sums)
    _originals.wrap(DistributedDataParallel, "finish_grad_sync", with_partial_sums)
    _originals.wrap(DistributedDataParallel, "broadcast_params", with_all_replicas)
    for part in (moe, latent, loss, mtp, muon, chain):
        part.install(_originals)
    for part in (context, grouped):
        part.install(_originals, _providers())
    seed = seeded(megatron_random.model_parallel_cuda_manual_seed)
    for module in (megatron_random, tensor_parallel):
        _originals.replace(module, "model_parallel_cuda_manual_seed", seed)


def _of_models_that_are_split(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        check_model(type(self))
        original(self, *args, **kwargs)

    return init


def _providers() -> list[type]:
    """The local one, and Transformer Engine's where Megatron can import it."""
    try:
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    except ImportError:
        return [backends.LocalSpecProvider]
    return [backends.LocalSpecProvider, TESpecProvider]


def uninstall() -> None:
    """Leave Megatron as it was before `install`; models that were made stay."""
    _originals.restore()


def _after(change: Callable[[Any], None]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """An ``__init__`` after which a module is changed."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        @wraps(original)
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            change(self)

        return init

    return make


def _of_ranks_with_other_heads(original: Callable[..., None]) -> Callable[..., None]:
    """Megatron would have all tensor ranks divide heads and query groups; those of x must, where ranks along y have the same."""

    @wraps(original)
    def check(self: Any) -> None:
        settings, tensor = process_groups.settings(), self.tensor_model_parallel_size
        groups = self.num_query_groups or self.num_attention_heads
        if tensor != settings.tensor or groups % tensor == 0:
            return original(self)
        # Which Megatron takes from the size.
        self.expert_tensor_parallel_size = self.expert_tensor_parallel_size or tensor
        self.tensor_model_parallel_size = settings.gx
        try:
            original(self)
        finally:
            self.tensor_model_parallel_size = tensor

    return check


def _with_heads(original: Callable[..., None]) -> Callable[..., None]:
    """Attention counts its heads by the tensor group of the collection that it is given."""

    @wraps(original)
    def init(self: Any, config: Any, *args: Any, pg_collection: Any = None, **kwargs: Any) -> None:
        settings, mesh = process_groups.settings(), process_groups.mesh()
        axes = heads_over(settings, mesh, config.num_query_groups)
        groups = copy.copy(pg_collection) or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        groups.tp = mesh.group("model" if len(axes) > 1 else "x")
        original(self, config, *args, pg_collection=groups, **kwargs)
        if len(axes) == 1 and mesh.size("y") > 1 and config.attention_dropout > 0:
            _share_masks(self.core_attention)

    return init


def _share_masks(core: nn.Module) -> None:
    """Ranks along y hold the same heads: let them drop the same.

    Raises:
        ValueError: the attention's dropout is out of reach.
    """
    dropout = getattr(core, "attention_dropout", None)
    if not isinstance(dropout, nn.Dropout):
        raise ValueError(
            f"attention_dropout > 0: {type(core).__name__} would drop other elements on ranks of y that hold the same heads; "
            "set it to 0, or use the local implementation"
        )
    core.attention_dropout = HeadsDropout(dropout.p)


def _whole_qkv(share: Tensor, group: object = None) -> Tensor:
    """All columns of fewer query groups than ranks of x, of which a rank then takes its queries and its group."""
    return gather_to(share, process_groups.mesh(), "x", share.dim() - 1)


@_after
def _with_head_norms(module: Any) -> None:
    """Norms of queries and keys are whole, but every rank norms its own heads."""
    settings, mesh = process_groups.settings(), process_groups.mesh()
    axes = heads_over(settings, mesh, module.config.num_query_groups)
    # Those that have the same norms in a checkpoint are all ranks of x and y, also where only those of x have other heads.
    module.tp_group = mesh.group("model")
    for norm in (module.q_layernorm, module.k_layernorm):
        for parameter in norm.parameters() if norm is not None else ():
            sum_over_heads(parameter, "model" if len(axes) > 1 else "x")


@_after
def _with_embeddings(module: Any) -> None:
    settings, mesh = process_groups.settings(), process_groups.mesh()
    axes = stream_over(settings, mesh)
    if module.add_position_embedding and axes:
        PositionEmbedding.convert(module.position_embeddings, mesh, "x" in axes)
    module.embedding_dropout = StreamDropout(module.embedding_dropout.p)


@_after
def _with_layer(module: Any) -> None:
    bias_dropout_add_in_stream(module)
    split_norms(module, ("input_layernorm", "pre_cross_attn_layernorm", "pre_mlp_layernorm"))


@_after
def _with_final_norm(module: Any) -> None:
    split_norms(module, ("final_layernorm",))


def _takes_whole(original: Callable[..., None]) -> Callable[..., None]:
    """Between pipeline stages the stream is whole, as Megatron's buffers for it are."""

    @wraps(original)
    def set_input_tensor(self: Any, input_tensor: Tensor | None) -> None:
        if input_tensor is not None:
            streams = mtp.streams_of_loss(self.config) if self.post_process else 1
            input_tensor = mtp.of_each(share_of_stream, input_tensor, streams)
        original(self, input_tensor)

    return set_input_tensor


def _gives_whole(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        output = original(self, *args, **kwargs)
        # Predictions of this stage go on with a share.
        goes_on = self.post_process or getattr(self, "axonn_predicts", False)
        return output if goes_on else whole_stream(output, process_groups.settings(), process_groups.mesh())

    return forward


def _of_whole_sequence(original: Callable[..., int]) -> Callable[..., int]:
    """Megatron reads the length of the sequence off the stream."""

    @wraps(original)
    def get_rotary_seq_len(self: Any, inference_context: Any, *args: Any, **kwargs: Any) -> int:
        length = original(self, inference_context, *args, **kwargs)
        mesh = process_groups.mesh()
        scattered = "x" in stream_over(process_groups.settings(), mesh) and inference_context is None
        return length * mesh.size("x") if scattered else length

    return get_rotary_seq_len


def _with_forward(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        check_config(config)
        original(self, config, *args, **kwargs)
        if stream_over(process_groups.settings(), process_groups.mesh()):
            check_layers(self)
        if getattr(self, "mtp_process", False):
            self.decoder.axonn_predicts = True
            self.mtp.axonn_alone = not self.post_process
        watch_forward(self)

    return init
