"""Rules on our flags and Megatron's own; each wrong combination is one sentence, before any group is made."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import re
import sys
import warnings
from typing import Any

from axonn_plugins import build_locks
from axonn_plugins.config.base import ConfigError
from axonn_plugins.hosts.megatron.connections import set_connections
from axonn_plugins.hosts.megatron.expert_groups import Blocks, blocks_of, topology_of
from axonn_plugins.hosts.megatron.features import MODELS
from axonn_plugins.hosts.megatron.refusals import IMPL, TESTED, check_arguments, warn_of_unknown
from axonn_plugins.hosts.megatron.settings import LAYOUTS, OVERLAPS, Settings
from axonn_plugins.hosts.megatron.sizes import attention_widths, check_instances, mistaken
from axonn_plugins.names import require
from axonn_plugins.observe.doctor import MEGATRON_BELOW
from axonn_tp import Grid

AXES = ("gx", "gy", "gz")
_SIZES = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels"),
    *("seq_length", "micro_batch_size", "make_vocab_size_divisible_by", "pipeline_model_parallel_size"),
    *("num_virtual_stages_per_pipeline_rank", "context_parallel_size"),
)


def before(args: Any) -> Settings:
    """Read the flags and set Megatron's tensor-model-parallel size, before its own validation, which pads the vocabulary to it.

    Args:
        args: as parsed, with our flags.

    Raises:
        ConfigError: the first mistake.
    """
    require("--tensor-model-parallel-impl=axonn3d", "axonn_tp", "ted_moe")
    build_locks.warn()
    check_host()
    mixers = _check_script()
    check_arguments(args, mixers)
    warn_of_unknown(args)
    _check_engine(args)
    _check_sizes(args)
    sizes = {axis: _size(args, axis) for axis in AXES}
    set_connections(args, sizes)
    if "auto" in sizes.values():
        if mixers:
            raise ConfigError(
                "sizes auto do not go with Mamba mixers, which the planner does not know of; give numbers to --axonn-gx, -gy and -gz"
            )
        from axonn_plugins.hosts.megatron.auto_sizes import choose_sizes

        sizes = {**sizes, **choose_sizes(args, {axis: n for axis, n in sizes.items() if isinstance(n, int)})}
    settings = _settings(args, {axis: int(size) for axis, size in sizes.items()})
    _check_world(args, settings)
    _check_tensor_size(args, settings)
    check_instances(args, _blocks(args, settings).known)
    args.tensor_model_parallel_size = settings.tensor
    # Both are on by default and change no number.
    args.gradient_accumulation_fusion, args.no_persist_layer_norm = _fuses(args, settings), True
    args.axonn_gx, args.axonn_gy, args.axonn_gz = settings.gx, settings.gy, settings.gz
    # What only the ranks that saved it can read would be read by others of the same number.
    args.dist_ckpt_optim_fully_reshardable = args.use_distributed_optimizer and _formats(args)[-1] == "torch_dist"
    return settings


def after(args: Any, settings: Settings) -> None:
    """Check the sizes that Megatron's validation derived.

    Args:
        args: validated.
        settings: what `before` returned.

    Raises:
        ConfigError: the first mistake.
    """
    mistake = mistaken(args, settings)
    if mistake is not None:
        raise ConfigError(mistake)
    _check_batch(args, settings)
    _check_rows(args, settings)
    _check_shared(args, settings)


def check_host() -> None:
    """Ask megatron.core for what we stand on.

    Raises:
        ConfigError: it lacks something.
    """
    from megatron import core
    from megatron.core import parallel_state

    version = str(getattr(core, "__version__", "of unknown version"))
    makes = inspect.signature(parallel_state.initialize_model_parallel).parameters
    lacks = [name for name in ("expert_model_parallel_size", "expert_tensor_parallel_size") if name not in makes]
    if importlib.util.find_spec("megatron.core.models.backends") is None:
        lacks.append("megatron.core.models.backends")
    if lacks:
        raise ConfigError(f"{IMPL} needs {lacks[0]}, which megatron-core {version} has not; install {TESTED}")
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers >= MEGATRON_BELOW:
        warnings.warn(f"axonn: megatron-core {version} is newer than what was tested, {TESTED}", stacklevel=2)


def _check_script() -> bool:
    """Refuse scripts of other models, which are known by what they import.

    Returns:
        Whether it is one of models with Mamba mixers.
    """
    main = vars(sys.modules["__main__"])
    for name, (model, why) in MODELS.items():
        if name in main and "GPTModel" not in main:
            raise ConfigError(
                f"{IMPL} does not split {model}: {why}; use pretrain_gpt.py or pretrain_mamba.py, or leave the flag out"
            )
    mixers = "GPTModel" not in main and not {"MambaModel", "mamba_builder"}.isdisjoint(main)
    if mixers and importlib.util.find_spec("mamba_ssm") is None:
        raise ConfigError("Mamba mixers are computed by mamba-ssm, which is not installed; pip install mamba-ssm")
    return mixers


def _check_engine(args: Any) -> None:
    if args.transformer_impl == "transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            "--transformer-impl transformer_engine, the default, needs transformer-engine, which is not installed; install it, or use local"
        )


def _fuses(args: Any, settings: Settings) -> bool:
    """True if weight gradients are to be added to main gradients by a kernel, it is installed, and no sum over z comes between."""
    kernel = "transformer_engine" if args.transformer_impl == "transformer_engine" else "fused_weight_gradient_mlp_cuda"
    wanted = getattr(args, "gradient_accumulation_fusion", False)
    # Experts are Megatron's own layers, whose kernel is always apex's.
    plain = settings.gz == 1 and not getattr(args, "num_experts", None) and not settings.tune_matmuls
    return wanted and plain and importlib.util.find_spec(kernel) is not None


def _size(args: Any, axis: str) -> int | str:
    value = getattr(args, f"axonn_{axis}")
    if value is None:
        return 1
    if value == "auto":
        return "auto"
    if re.fullmatch(r"[1-9][0-9]{0,5}", str(value)):
        return int(value)
    raise ConfigError(f"--axonn-{axis} {value} is neither an integer of at least 1 nor auto; correct it")


def _settings(args: Any, sizes: dict[str, int]) -> Settings:
    layout = args.axonn_layout or LAYOUTS[0]
    if layout not in LAYOUTS:
        near = difflib.get_close_matches(layout, LAYOUTS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"--axonn-layout {layout} is not known; use {near}, or another of {', '.join(LAYOUTS)}")
    overlap = _overlap(args.axonn_overlap)
    settings = Settings(
        **sizes,
        layout=layout,
        overlap_all_reduce="all-reduce" in overlap,
        overlap_reduce_scatter="reduce-scatter" in overlap,
        overlap_all_gather="all-gather" in overlap,
        cache_gathers=_cache(args.axonn_gather_cache),
        tune_matmuls=bool(args.axonn_tune_matmuls),
    )
    return settings


def _overlap(words: list[str] | None) -> tuple[str, ...]:
    if words is None or words == ["all"]:
        return OVERLAPS
    if words == ["none"]:
        return ()
    for word in words:
        if word not in OVERLAPS:
            allowed = f"some of {', '.join(OVERLAPS)}, or all alone, or none alone"
            raise ConfigError(f"--axonn-overlap {' '.join(words)}: {word} is not one of these; use {allowed}")
    if not words:
        raise ConfigError("--axonn-overlap has no value; use none, all, or some of " + ", ".join(OVERLAPS))
    return tuple(words)


def _cache(value: str | None) -> int | str:
    if value is None:
        return 0
    if re.fullmatch(r"[0-9]{1,6}", value):
        return int(value)
    if re.fullmatch(r"all|\d+(\.\d+)?([KMG]i)?B", value):
        return value
    raise ConfigError(
        f"--axonn-gather-cache {value} is neither a number of layers, all, nor a size such as 2GiB; correct it"
    )


def _grid(settings: Settings) -> str:
    return f"--axonn-gx {settings.gx}, --axonn-gy {settings.gy}, --axonn-gz {settings.gz}"


def _check_sizes(args: Any) -> None:
    """Megatron takes some of these below 1, and we divide by them or split them."""
    for name in _SIZES:
        value = getattr(args, name, None)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value} is less than 1; give a positive number")


def _check_world(args: Any, settings: Settings) -> None:
    stages = args.pipeline_model_parallel_size
    ranks = settings.tensor * settings.gz * stages
    if args.world_size % ranks:
        also = f", --pipeline-model-parallel-size {stages}" if stages > 1 else ""
        raise ConfigError(
            f"{_grid(settings)}{also} take {ranks} ranks, of which the {args.world_size} of this run are no multiple; "
            f"choose sizes whose product divides {args.world_size}, or use another number of ranks"
        )
    if args.world_size // stages // settings.tensor % args.context_parallel_size:
        raise ConfigError(
            f"--context-parallel-size {args.context_parallel_size} does not divide the {args.world_size // stages // settings.tensor} ranks of a "
            f"stage that differ in their tokens, {args.world_size} by gx*gy = {settings.tensor} and {stages} stages; choose a divisor"
        )
    if args.context_parallel_size > 1 and args.num_attention_heads and getattr(args, "cp_comm_type", None) == ["a2a"]:
        _check_dealt(args, settings)


def _check_dealt(args: Any, settings: Settings) -> None:
    """The same split of heads as `sharing.heads_over`."""
    heads = args.num_attention_heads
    groups = args.num_query_groups if getattr(args, "group_query_attention", False) else heads
    ranks = settings.tensor if settings.layout == "scattered" and groups % settings.tensor == 0 else settings.gx
    if heads // ranks % args.context_parallel_size:
        raise ConfigError(
            f"--cp-comm-type a2a deals out the {heads // ranks} attention heads that the grid leaves a rank, of {heads}, among "
            f"--context-parallel-size {args.context_parallel_size} ranks, which do not divide; use p2p or all_gather"
        )


def _blocks(args: Any, settings: Settings) -> Blocks:
    """The blocks of experts and weights on the ranks of a stage.

    Raises:
        ConfigError: sizes of experts that do not lie in those of the grid.
    """
    ranks = args.world_size // args.pipeline_model_parallel_size
    grid = Grid.for_world(ranks, settings.gx, settings.gy, settings.gz)
    try:
        return blocks_of(
            grid, topology_of(grid, args.expert_model_parallel_size or 1, args.expert_tensor_parallel_size)
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _check_tensor_size(args: Any, settings: Settings) -> None:
    size = args.tensor_model_parallel_size
    if args.axonn_tensor_size_given and size != settings.tensor:
        raise ConfigError(
            f"--tensor-model-parallel-size {size} is not gx*gy = {settings.gx}*{settings.gy} = {settings.tensor}; "
            "leave it out, since the grid says it"
        )
    size = None if getattr(args, "pad_vocab_size", True) else args.vocab_size
    if size is not None and size % settings.tensor:
        raise ConfigError(
            f"--vocab-size {size} does not divide by gx*gy = {settings.tensor}, and --no-pad-vocab-size leaves it so; drop that"
        )
    shards = getattr(args, "tensor_parallel_num_weight_shards", None)
    if shards not in (None, settings.tensor):
        raise ConfigError(
            f"--tensor-parallel-num-weight-shards {shards} does not go with {IMPL}: --axonn-gz shares weights; leave it out"
        )
    padded = getattr(args, "padded_vocab_size", None)
    if padded is not None and padded % settings.tensor:
        raise ConfigError(
            f"--padded-vocab-size {padded} does not divide by gx*gy = {settings.tensor}; leave it out, or give a multiple"
        )


def _formats(args: Any) -> list[str]:
    """Formats of checkpoints: that of the run, and that into which it converts one."""
    return [one for one in (args.ckpt_format, getattr(args, "ckpt_convert_format", None)) if one is not None]


def _check_rows(args: Any, settings: Settings) -> None:
    """In a torch_dist checkpoint a share over z is whole rows of a weight."""
    asked = args.save or args.load or getattr(args, "pretrained_checkpoint", None)
    if "torch_dist" not in _formats(args) or not asked:
        return
    gx, gy, gz, both = settings.gx, settings.gy, settings.gz, 2 if args.swiglu or vars(args).get("quick_geglu") else 1
    shared = getattr(args, "moe_shared_expert_intermediate_size", None) or 0
    words = getattr(args, "padded_vocab_size", None) or args.make_vocab_size_divisible_by * gx * gy
    for rows, what in (
        (args.hidden_size // gy, "--hidden-size by gy"),
        *((width // gx, f"{name} by gx") for name, width in attention_widths(args)),
        (both * args.ffn_hidden_size // gx, "--ffn-hidden-size by gx"),
        (both * shared // gx, "--moe-shared-expert-intermediate-size by gx"),
        *([(args.hidden_size // gx, "--hidden-size by gx")] if args.mtp_num_layers else []),
        (words // gx, "--padded-vocab-size, or --make-vocab-size-divisible-by times gx*gy, by gx"),
    ):
        if rows % gz:
            raise ConfigError(
                f"--axonn-gz {gz} does not divide the {rows} rows ({what}) of a weight's block, as --ckpt-format torch_dist needs; "
                "use a gz that does, or --ckpt-format torch"
            )


def _check_shared(args: Any, settings: Settings) -> None:
    """Megatron sums the norms of z's shares as those of experts, and asserts that none of these is a copy."""
    if args.log_params_norm and _blocks(args, settings).between is not None:
        raise ConfigError(
            f"--log-params-norm does not go with --expert-model-parallel-size {args.expert_model_parallel_size} beside --axonn-gz "
            f"{settings.gz}, where some parameters have copies that Megatron would count; leave it out, or make the two equal"
        )
    several = settings.gz > 1 and args.pipeline_model_parallel_size > 1
    if args.log_params_norm and several and args.mtp_num_layers:
        raise ConfigError(
            f"--log-params-norm does not go with {IMPL} where the last pipeline stage has a copy of the embeddings for --mtp-num-layers "
            f"{args.mtp_num_layers}, split by --axonn-gz {settings.gz}; leave it out"
        )
    if args.log_params_norm and several and not args.untie_embeddings_and_output_weights:
        raise ConfigError(
            f"--log-params-norm does not go with {IMPL} where embeddings are tied over pipeline stages and split by --axonn-gz "
            f"{settings.gz}; leave it out, or give --untie-embeddings-and-output-weights"
        )


def _of_z(args: Any, settings: Settings) -> str:
    ranks = args.context_parallel_size
    if ranks == 1:
        return f"which include --axonn-gz {settings.gz}"
    return f"of which each is --context-parallel-size {ranks} ranks"


def _check_batch(args: Any, settings: Settings) -> None:
    """The same that Megatron asserts later, in our words: of its data-parallel ranks, some are our z."""
    at_once = args.micro_batch_size * args.data_parallel_size
    less = getattr(args, "decrease_batch_size_if_needed", False)
    sizes = [("--global-batch-size", args.global_batch_size)]
    ramp = getattr(args, "rampup_batch_size", None) or ()
    sizes += [("--rampup-batch-size", int(size)) for size in ramp[: 1 if less else 2]]
    for flag, size in sizes:
        if size < at_once if less else size % at_once:
            raise ConfigError(
                f"{flag} {size} {'is less than' if less else 'does not divide by'} --micro-batch-size {args.micro_batch_size} times the "
                f"{args.data_parallel_size} data-parallel ranks, {_of_z(args, settings)}; use a multiple of {at_once}"
            )
