"""Flags of the block's other keys: systems of one's own and PCCL. Their values are what stands under the key, as JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from axonn_plugins.config.base import Block, ConfigError
from axonn_plugins.config.systems import REGISTERED
from axonn_plugins.hosts.megatron.features import Feature

_BUFFERS = "DistributedDataParallel owns the gradients' buffers, and its optimizers the float32 weights"
REFUSED = {
    "--axonn-samo": (
        f"{_BUFFERS}, all of a dense network, in place of which SAMO keeps unpruned elements alone",
        "train the pruned network under DeepSpeed, or in a loop of your own by axonn_plugins.hosts.plain.compose",
    ),
    "--axonn-ted": (
        f"{_BUFFERS}, in place of which TED has tiles, and its MoE layers own the dispatch of tokens, which TED replaces",
        "use Megatron's --num-experts and --expert-model-parallel-size, or train with TED under DeepSpeed",
    ),
    "--axonn-offload-optimizer": (
        f"{_BUFFERS}, which offloading takes from them and keeps in buckets of its own",
        "use Megatron's --optimizer-cpu-offload, or train under DeepSpeed",
    ),
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
        (),
    ),
    Feature("gtp_weight_remat_size", "its shares of weights have no layout that a system knows", "leave it at 1", (1,)),
    Feature("use_tp_pp_dp_mapping", "ranks of a pipeline stage must be next to each other"),
    Feature("optimizer_cuda_graph", "the optimizer's step would be replayed without the system"),
)
"""What systems of one's own do not go with."""


def flag(key: str) -> str:
    """As a key is written on the command line."""
    return "--axonn-" + key.replace("_", "-")


def add(group: argparse._ArgumentGroup) -> None:
    """Add a flag for PCCL and one for each key that somebody's system has registered.

    Args:
        group: with our other flags.

    Raises:
        ConfigError: a key's flag is one of ours already.
    """
    ours = {option for action in group._group_actions for option in action.option_strings} | REFUSED.keys()
    helps = {"pccl": "collectives of CPU tensors by PCCL"}
    helps |= {key: (one.system.__doc__ or key).split("\n")[0] for key, one in REGISTERED.items()}
    for key, said in helps.items():
        if flag(key) in ours:
            raise ConfigError(f"{flag(key)} is another flag, so that a system cannot have the key {key}; rename that")
        text = f"{said.rstrip('.')}; what stands under the key {key} of the block, as JSON (default: {{}})"
        group.add_argument(flag(key), nargs="?", const="{}", metavar="JSON", help=text.replace("%", "%%"))


def settle(found: argparse.Namespace) -> None:
    """Collect what was given in `axonn_components`, and leave nothing else in the namespace.

    Raises:
        ConfigError: a flag has no value, or would be dropped.
    """
    given = {}
    for key in ("pccl", *REGISTERED):
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


def read(args: Any) -> dict[str, Block]:
    """Blocks by key, held against Megatron's arguments.

    Args:
        args: as parsed.

    Raises:
        ConfigError: the first mistake.
    """
    blocks = dict(_blocks(getattr(args, "axonn_components", {})))
    if "pccl" in blocks:
        _check_device()
    for key in blocks:
        if key != "pccl":
            _check(key, args)
    return blocks


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
        yield key, found.pccl if found.pccl is not None else found.others[key]


def _check(key: str, args: Any) -> None:
    from axonn_plugins.hosts.megatron.refusals import refused

    for feature in _FEATURES:
        value = getattr(args, feature.name, None)
        if refused(feature, value):
            shown = feature.flag if isinstance(value, bool) else f"{feature.flag} {value}"
            raise ConfigError(f"{shown} does not go with {flag(key)}: {feature.why}; {feature.remedy}")


def _check_device() -> None:
    from axonn_plugins.hosts.megatron import cpu

    if not cpu.enabled():
        raise ConfigError(
            f"{flag('pccl')} is for CPU tensors, and Megatron trains on CUDA, where NCCL is; leave it out, or set {cpu.SWITCH}=1 on a "
            "machine without a GPU"
        )
