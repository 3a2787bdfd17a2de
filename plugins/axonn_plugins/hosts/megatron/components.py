"""Flags of the block's other keys: systems of one's own, SAMO, offloading and PCCL. Their values are what stands under the key, as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from axonn_plugins.config.base import Block, ConfigError
from axonn_plugins.config.systems import REGISTERED
from axonn_plugins.hosts.megatron.features import Feature
from axonn_plugins.names import require

REFUSED = {
    "--axonn-pipeline": (
        "its schedules own the order of microbatches, in place of which ours has messages",
        "use --pipeline-model-parallel-size, or train a PipelineModule under DeepSpeed",
    ),
}
"""Keys of the block that Megatron has no place for: why, and what to use."""

_OWN = "its gradients are shares that no gradient buffer of Megatron's holds"
_FEATURES = (
    Feature("use_megatron_fsdp", _OWN, "use --use-distributed-optimizer"),
    Feature("use_custom_fsdp", _OWN, "use --use-distributed-optimizer"),
    Feature("use_torch_fsdp2", _OWN, "use --use-distributed-optimizer"),
    Feature(
        "num_experts",
        "each rank counts its experts from 0, so that parameters have no names of a serial model",
        "train the model with TED under DeepSpeed, where systems of one's own see experts",
        (0,),  # as Megatron, which takes it for none
    ),
    Feature("gtp_weight_remat_size", "its shares of weights have no layout that a system knows", "leave it at 1", (1,)),
    Feature("use_tp_pp_dp_mapping", "ranks of a pipeline stage must be next to each other"),
    Feature("optimizer_cuda_graph", "the optimizer's step would be replayed without the system"),
)
"""Features that do not go with systems of one's own, SAMO and offloading."""

OWNERS = frozenset(("samo", "offload_optimizer"))
"""Keys for which gradients and optimizer states are ours, and not Megatron's."""
_STEP = "gradients are summed over data-parallel ranks in the step, by an optimizer of ours"
_FORM = "our optimizer keeps states in float32"
_STATES = (
    Feature("overlap_grad_reduce", _STEP),
    Feature("overlap_param_gather", _STEP),
    Feature("num_distributed_optimizer_instances", _STEP, "leave it at 1", (1,)),
    Feature("context_parallel_size", "its ranks' gradients are summed in Megatron's buffers", "leave it at 1", (1,)),
    Feature(
        "sequence_parallel",
        "its gradients of norms are summed in Megatron's buffers",
        "leave it out, or split tokens by --tensor-model-parallel-impl axonn3d",
    ),
    Feature("calculate_per_token_loss", "gradients are divided by tokens in Megatron's buffers"),
    Feature("log_num_zeros_in_grad", "gradients are not kept whole until they could be counted"),
    Feature("check_for_large_grads", "Megatron looks for them in buffers of its own"),
    Feature("optimizer", "a step has parts of weights, of which others want all", "use adam or sgd", ("adam", "sgd")),
    Feature(
        "optimizer_cpu_offload",
        "it moves states of Megatron's optimizer",
        "leave it out, and use --axonn-offload-optimizer",
    ),
    Feature("use_precision_aware_optimizer", _FORM),
    Feature(
        "qk_clip", "it rescales weights beside an optimizer's float32 ones, which ours has elsewhere and puts back"
    ),
    Feature("fp8_param_gather", _FORM),
    Feature("load_main_params_from_ckpt", _FORM),
    Feature("ddp_reduce_scatter_with_fp32_accumulation", _STEP, "leave it out; --bf16 sums in float32"),
    Feature("nccl_ub", "it registers Megatron's buffers"),
    Feature("save_wgrads_interval", "Megatron reads them in buffers of its own", "leave it out", ()),
    Feature("perform_rl_step", "it moves states of Megatron's optimizer"),
    Feature("ckpt_convert_format", "it converts states of Megatron's optimizer", "convert without it", ()),
    Feature(
        "ckpt_format",
        "masks and states are saved whole by Megatron's dist_checkpointing",
        "use torch_dist",
        ("torch_dist",),
    ),
)
"""Features that do not go with SAMO and offloading."""


_OF_NCCL = "it is for NCCL's own groups, and PCCL's stand before them"
_OF_GROUPS = (
    Feature("nccl_communicator_config_path", _OF_NCCL, "leave it out", ()),
    Feature("high_priority_stream_groups", _OF_NCCL, "leave it out", ([],)),
    Feature("nccl_ub", _OF_NCCL, written="--use-nccl-ub"),
    Feature("fake_process_group", "ranks that are not there do not answer it"),
)
"""Features that do not go with PCCL."""

_HELPS = {
    "pccl": "collectives by PCCL",
    "samo": "training of a pruned network with compressed state",
    "offload_optimizer": "float32 weights and optimizer state in host memory",
    "ted": "communication-aware checkpointing of a grid",
    "goldfish": "the goldfish loss, which leaves targets out against memorization",
}
_NUMBERS = {
    "k": "one of so many targets is left out of the loss",
    "h": "targets whose hash decides which (default: 13)",
}
_OF_SAMPLES = (
    Feature(
        "dataloader_type",
        "it masks samples of Megatron's datasets",
        "use single or cyclic",
        (None, "single", "cyclic", "batch"),
    ),
)
_PACKAGES = {"samo": ("samo", "axonn_tp"), "offload_optimizer": ("samo", "axonn_tp"), "ted": ("ted_moe",)}
_TED = ("communication_aware_checkpointing", "stash")
_TED_OF_EXPERTS = ("duplicate_token_dropping", "fused", "overlap_degree")


def flag(key: str) -> str:
    """As a key is written on the command line."""
    return "--axonn-" + key.replace("_", "-")


def add(group: argparse._ArgumentGroup) -> None:
    """Add a flag for each of our keys, and one for each key that somebody's system has registered.

    Args:
        group: with our other flags.

    Raises:
        ConfigError: a key's flag is one of ours already.
    """
    ours = {option for action in group._group_actions for option in action.option_strings} | REFUSED.keys()
    helps = dict(_HELPS)
    helps |= {key: (one.system.__doc__ or key).split("\n")[0] for key, one in REGISTERED.items()}
    for key, said in helps.items():
        if flag(key) in ours:
            raise ConfigError(f"{flag(key)} is another flag, so that a system cannot have the key {key}; rename that")
        text = f"{said.rstrip('.')}; what stands under the key {key} of the block, as JSON (default: {{}})"
        group.add_argument(flag(key), nargs="?", const="{}", metavar="JSON", help=text.replace("%", "%%"))
    for name, said in _NUMBERS.items():
        group.add_argument(f"{flag('goldfish')}-{name}", nargs="?", const="", metavar="N", help=said)


def settle(found: argparse.Namespace) -> None:
    """Collect what was given in `axonn_components`, and leave nothing else in the namespace.

    Raises:
        ConfigError: a flag has no value, or would be dropped.
    """
    _settle_numbers(found)
    given = {}
    for key in (*_HELPS, *REGISTERED):
        text = vars(found).pop(f"axonn_{key}", None)
        if text == "":
            raise ConfigError(f"{flag(key)} has no value; give one, or leave = out")
        if text is not None:
            given[key] = text
    if not given:
        return
    if getattr(found, "yaml_cfg", None) is not None:
        raise ConfigError(
            f"--yaml-cfg does not go with {flag(next(iter(given)))}, which it would drop; give flags instead"
        )
    found.axonn_components = given


def _settle_numbers(found: argparse.Namespace) -> None:
    """Make the JSON of the goldfish loss of its numbers."""
    given = {name: vars(found).pop(f"axonn_goldfish_{name}", None) for name in _NUMBERS}
    numbers = {}
    for name, text in given.items():
        if text is None:
            continue
        written = f"{flag('goldfish')}-{name}"
        if not text:
            raise ConfigError(f"{written} has no value; give one, or leave it out")
        if not text.isdecimal():
            raise ConfigError(f"{written} {text} is not an integer; give a number such as 13")
        if found.axonn_goldfish is not None:
            raise ConfigError(
                f"{written} is given beside {flag('goldfish')}, which has the key {name}; give one of them"
            )
        numbers[name] = int(text)
    if numbers:
        found.axonn_goldfish = json.dumps(numbers)


def read(args: Any) -> dict[str, Block]:
    """Blocks by key, held against Megatron's arguments.

    Args:
        args: as parsed.

    Raises:
        ConfigError: the first mistake.
    """
    blocks = dict(_blocks(getattr(args, "axonn_components", {})))
    for key in blocks:
        require(flag(key), *_PACKAGES.get(key, ()))
    if "pccl" in blocks:
        _check("pccl", args, _OF_GROUPS)
    if "ted" in blocks:
        _check_ted(args, blocks["ted"])
    if "goldfish" in blocks:
        _check_goldfish(args, blocks["goldfish"])
    for key in blocks:
        if key not in ("pccl", "ted", "goldfish"):
            _check(key, args, (*_FEATURES, *_STATES) if key in OWNERS else _FEATURES)
    if "samo" in blocks:
        _check_masks(args, blocks["samo"])
    offload = blocks.get("offload_optimizer")
    if offload is not None and "coarsening" in offload.model_fields_set:
        raise ConfigError(
            f"{flag('offload_optimizer')} has the key coarsening, which does not go with Megatron: {_STEP}; leave it out"
        )
    return blocks


def take_over(args: Any, blocks: Mapping[str, Block]) -> None:
    """Have Megatron leave to our optimizer what is its own, once the arguments are validated.

    Args:
        args: validated; of ``--use-distributed-optimizer`` becomes `axonn_stage`, which is ZeRO's.
        blocks: by key.
    """
    if not OWNERS.isdisjoint(blocks):
        args.axonn_stage, args.use_distributed_optimizer = int(args.use_distributed_optimizer), False
        args.gradient_accumulation_fusion = False


def _blocks(given: Mapping[str, str]) -> Iterator[tuple[str, Block]]:
    from axonn_plugins import config

    for key, text in given.items():
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigError(
                f"""{flag(key)} {text} is not JSON ({error}); write it as '{{"name": value}}', in quotes for the shell"""
            ) from None
        if value is None:
            raise ConfigError(f"{flag(key)} null is not an object; write it in braces, or leave it out")
        found = config.parse({key: value})
        yield key, getattr(found, key) if key in _HELPS else found.others[key]


def _check(key: str, args: Any, features: Iterable[Feature]) -> None:
    from axonn_plugins.hosts.megatron.refusals import refused

    for feature in features:
        value = getattr(args, feature.name, None)
        if refused(feature, value):
            words = " ".join(map(str, value)) if isinstance(value, list) else value
            shown = feature.flag if isinstance(value, bool) else f"{feature.flag} {words}"
            raise ConfigError(f"{shown} does not go with {flag(key)}: {feature.why}; {feature.remedy}")


def _check_masks(args: Any, block: Any) -> None:
    """Megatron would save what its first checkpoint of the run had, without the masks that come later, and no run could go on from it."""
    later = block.start_step > 0 or block.search is not None or block.snip is not None
    if later and getattr(args, "ckpt_assume_constant_structure", False):
        raise ConfigError(
            f"--ckpt-assume-constant-structure does not go with {flag('samo')} whose masks come during training, as with start_step, early_bird or "
            "snip: they would be in no checkpoint; leave it out"
        )


def _check_ted(args: Any, block: Any) -> None:
    of_experts = _TED_OF_EXPERTS if getattr(args, "num_experts", None) else ()
    for key in sorted(block.model_fields_set.difference(_TED, of_experts)):
        why, remedy = ("Megatron's own flags say where experts are and what they take", "use those of --num-experts")
        if key in _TED_OF_EXPERTS:
            why, remedy = ("it is of experts, and --num-experts is not given", "give that, or leave the key out")
        if key == "tile_size":
            other = "use --axonn-offload-optimizer, whose bucket_size is that of tiles"
            why, remedy = ("its own optimizers step whole", "leave it out" if of_experts else other)
        raise ConfigError(f"{flag('ted')} has the key {key}, which does not go with Megatron: {why}; {remedy}")
    nothing = f"so that {flag('ted')} would change nothing"
    changes_experts = not block.model_fields_set.isdisjoint(of_experts)
    if not block.communication_aware_checkpointing and not changes_experts:
        raise ConfigError(f"communication_aware_checkpointing is false, {nothing}; leave the flag out")
    if getattr(args, "tensor_model_parallel_impl", None) != "axonn3d":
        raise ConfigError(
            f"Megatron's own layers call collectives whose results cannot be kept, {nothing}; add --tensor-model-parallel-impl axonn3d"
        )
    if getattr(args, "fp8", None):
        raise ConfigError(
            f"{flag('ted')} does not go with --fp8-format {args.fp8}: Megatron recomputes by Transformer Engine's checkpoint then, which keeps "
            "nothing; leave one of the two out"
        )
    modules = getattr(args, "recompute_modules", None) or ()
    mixtures = of_experts and ("moe" in modules or getattr(args, "moe_layer_recompute", False))
    if args.recompute_granularity != "full" and not mixtures and not changes_experts:
        raise ConfigError(f"nothing with collectives is recomputed, {nothing}; add --recompute-granularity full")


def _check_goldfish(args: Any, block: Any) -> None:
    _check("goldfish", args, _OF_SAMPLES)
    for key in ("labels", "shifts"):
        if key in block.model_fields_set:
            raise ConfigError(
                f"{flag('goldfish')} has the key {key}, which does not go with Megatron: its datasets say which labels are targets; leave it out"
            )
