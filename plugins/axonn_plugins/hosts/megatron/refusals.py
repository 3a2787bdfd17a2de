"""The table of `features` held against a script's arguments and a model's config, and what neither knows named in a warning."""

from __future__ import annotations

import argparse
import enum
import importlib.util
import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from axonn_plugins.config.base import ConfigError
from axonn_plugins.hosts.megatron import engine
from axonn_plugins.hosts.megatron.components import OWNERS
from axonn_plugins.hosts.megatron.features import ALIKE, EIGHT_BITS, FEATURES, MIXERS, MODELS, MUON, SHARED, Feature
from axonn_plugins.hosts.megatron.known import KNOWN
from axonn_plugins.observe.doctor import MEGATRON_BELOW, MEGATRON_FROM

IMPL = "--tensor-model-parallel-impl axonn3d"
TESTED = f"megatron-core>={'.'.join(map(str, MEGATRON_FROM))},<{'.'.join(map(str, MEGATRON_BELOW))}"


def check_arguments(args: Any, mixers: bool = False) -> None:
    """Refuse the first argument that does not go with a grid.

    Args:
        args: Megatron's.
        mixers: the script is of models with Mamba mixers.

    Raises:
        ConfigError: says which, why and what to do.
    """
    _check_table(args, FEATURES, IMPL)
    if mixers:
        _check_table(args, MIXERS, f"Mamba mixers beside {IMPL}")
    else:
        _check_table(args, ALIKE, IMPL)
    if args.optimizer == "muon":
        _check_muon(args)
    _check_sgd(args)
    _check_local(args)
    ranks = getattr(args, "context_parallel_size", 1)
    if ranks > 1:
        _check_table(args, SHARED, f"--context-parallel-size {ranks} beside {IMPL}")
    if getattr(args, "fp8", None):
        _check_table(args, EIGHT_BITS, f"--fp8-format {args.fp8} beside {IMPL}")
    _check_start(args)


def _check_table(args: Any, features: Iterable[Feature], beside: str) -> None:
    for feature in features:
        value = getattr(args, feature.name, None)
        if refused(feature, value):
            words = " ".join(map(str, value)) if isinstance(value, list) else getattr(value, "name", value)
            shown = feature.flag if isinstance(value, bool) else f"{feature.flag} {words}"
            raise ConfigError(f"{shown} does not go with {beside}: {feature.why}; {feature.remedy}")


def check_config(config: Any) -> None:
    """The same of a `TransformerConfig`: a script on megatron.core alone has no arguments.

    Raises:
        ConfigError: names the field.
    """
    eight = EIGHT_BITS if getattr(config, "fp8", None) else ()
    for feature in (*FEATURES, *eight):
        value = getattr(config, feature.name, None)
        if refused(feature, value):
            shown = getattr(value, "name", None) or repr(value)
            raise ConfigError(f"{feature.name} = {shown} does not go with axonn3d: {feature.why}; {feature.remedy}")
    if eight and engine.load() is None:
        raise ConfigError(
            f"fp8 = {config.fp8!r} needs transformer-engine, 2.2 or later, which is not installed; install it, or set None"
        )


def check_model(kind: type) -> None:
    """Refuse a model whose layers are not replaced: a script of one's own may import several kinds.

    Args:
        kind: the model's class.

    Raises:
        ConfigError: says which, and why.
    """
    for base in kind.__mro__:
        if base.__name__ in MODELS:
            model, why = MODELS[base.__name__]
            raise ConfigError(
                f"axonn3d does not split {model} ({kind.__name__}): {why}; use GPTModel or MambaModel, or leave the grid out"
            )


_THEIRS = ("megatron.core.tensor_parallel.layers", "megatron.core.extensions.transformer_engine")


def check_layers(model: nn.Module) -> None:
    """Refuse Megatron's own split layers in a model whose stream is split: they would read a share of it as whole.

    Args:
        model: that was just made.

    Raises:
        ConfigError: names the first one.
    """
    for name, module in model.named_modules():
        kinds = type(module).__mro__
        theirs = any(one.__module__ in _THEIRS and one.__name__.endswith(("Linear", "Embedding")) for one in kinds)
        if theirs and not kinds[0].__module__.startswith("axonn_plugins."):
            raise ConfigError(
                f"{name} is a {kinds[0].__name__} of Megatron's own split, which axonn3d does not know: its specs are of other layers once "
                "Megatron is initialised; make them by get_gpt_layer_local_spec and the like after that, not when the script is imported"
            )


def _check_muon(args: Any) -> None:
    _check_table(args, MUON, f"--optimizer muon beside {IMPL}")
    split = any(getattr(args, f"axonn_{axis}") not in (None, "1") for axis in ("gx", "gy"))
    if split and args.axonn_muon_mode_given and args.muon_tp_mode == "blockwise":
        raise ConfigError(
            f"--muon-tp-mode blockwise does not go with {IMPL}: it orthogonalises each rank's share by itself, another update on each grid; "
            "use duplicated, which is what is done, or leave it out"
        )
    if importlib.util.find_spec("emerging_optimizers") is None:
        raise ConfigError(
            "--optimizer muon is that of emerging-optimizers, which is not installed; install it, or use adam or sgd"
        )


def _check_sgd(args: Any) -> None:
    """Megatron would assert it once the model is made; an optimizer of ours shares SGD's states out, too."""
    if args.optimizer == "sgd" and _deals_out(args) and not getattr(args, "optimizer_cpu_offload", False):
        raise ConfigError(
            "--use-distributed-optimizer does not go with --optimizer sgd: Megatron's shares out states of Adam alone; leave it out, or add "
            "--axonn-offload-optimizer"
        )


def _deals_out(args: Any) -> bool:
    """True if Megatron's own optimizer shares states out among data-parallel ranks."""
    ours = not OWNERS.isdisjoint(getattr(args, "axonn_components", ()))
    return getattr(args, "use_distributed_optimizer", False) and not ours


def _check_local(args: Any) -> None:
    """Megatron would say it in the first such save, of a flag that nobody gave."""
    if getattr(args, "non_persistent_ckpt_type", None) == "local" and _deals_out(args):
        raise ConfigError(
            f"--non-persistent-ckpt-type local does not go with --use-distributed-optimizer beside {IMPL}: states are saved so that any grid "
            "reads them, and Megatron keeps no local checkpoints of that kind; use global, or leave one of the two out"
        )


def _check_start(args: Any) -> None:
    """Refuse settings under which initial weights, recomputation or repeated runs would differ."""
    if getattr(args, "init_method_xavier_uniform", False) and not args.use_cpu_initialization:
        raise ConfigError(
            f"--init-method-xavier-uniform does not go with {IMPL}: it reads the size of a matrix, and a rank draws a block of one; "
            "add --use-cpu-initialization, where it draws the whole"
        )
    if "moe_act" in (getattr(args, "recompute_modules", None) or ()):
        raise ConfigError(
            f"--recompute-modules moe_act does not go with {IMPL}: what it recomputes lies within an expert's MLP, which is called as one; "
            "use moe in its place"
        )
    if getattr(args, "deterministic_mode", False) and args.axonn_tune_matmuls:
        raise ConfigError(
            "--axonn-tune-matmuls does not go with --deterministic-mode, as time decides which products are kept; leave one of them out"
        )


def refused(feature: Feature, value: Any) -> bool:
    """True if a value is none that goes with a grid; by type, too: True is not the size 1."""
    value = value.value if isinstance(value, enum.Enum) else value
    return value is not None and not any(value == one and type(value) is type(one) for one in feature.allowed)


def unknown(
    parser: argparse.ArgumentParser, actions: Iterable[argparse.Action], found: argparse.Namespace
) -> list[str]:
    """Arguments that are not in `known` and have another value than their default, as they are written.

    Args:
        parser: Megatron's.
        actions: its own, without what a script adds.
        found: what was parsed.
    """
    given = {}
    for action in actions:
        if action.dest in KNOWN or not hasattr(found, action.dest):
            continue
        value, default = getattr(found, action.dest), parser.get_default(action.dest)
        if isinstance(default, str):
            default = parser._get_value(action, default)
        if value != default:
            flag = action.option_strings[0]
            given[action.dest] = flag if isinstance(value, bool) else f"{flag} {value}"
    return list(given.values())


def warn_of_unknown(args: Any) -> None:
    """Name in one warning, on rank 0, what nobody has looked at."""
    if args.axonn_unknown and args.rank == 0:
        warnings.warn(
            f"axonn: {', '.join(args.axonn_unknown)}: not known when axonn3d was tested with {TESTED}, so that it may change nothing, "
            "or something wrong; leave it out, or compare the losses with those of --tensor-model-parallel-impl megatron",
            stacklevel=2,
        )
