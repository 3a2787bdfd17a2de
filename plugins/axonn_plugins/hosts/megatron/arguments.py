"""The flags on every script that parses its arguments by megatron.training, checked together with Megatron's own.

Nothing of Megatron is touched but its parser and its `validate_args`; without our flags neither leaves a trace.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import sys
import traceback
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any, NoReturn

from axonn_plugins.autoload import on_import
from axonn_plugins.config.base import ConfigError
from axonn_plugins.hosts.megatron import components
from axonn_plugins.hosts.megatron.settings import LAYOUTS, OVERLAPS
from axonn_plugins.observe.timeline import steps

IMPLS = ("megatron", "axonn3d")
_IMPL = "--tensor-model-parallel-impl"
_OVERLAP, _TUNE = "--axonn-overlap", "--axonn-tune-matmuls"


def add_flags(module: ModuleType) -> None:
    """Wrap the parser's making and the validation of a `megatron.training.arguments` module; harmless when called again."""
    if getattr(getattr(module, "validate_args", None), "axonn", False):
        return
    if not hasattr(module, "add_megatron_arguments") or not hasattr(module, "validate_args"):
        warnings.warn(f"axonn: {module.__name__} has no parser that we know, so {_IMPL} is not there", stacklevel=2)
        return
    add_arguments, validate = module.add_megatron_arguments, module.validate_args

    @functools.wraps(add_arguments)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        return add_group(add_arguments(parser))

    @functools.wraps(validate)
    def validate_args(args: Any, *rest: Any, **named: Any) -> Any:
        try:
            if steps.asked():
                steps.step_asked()
                on_import("megatron.training.training", _watch_steps)
            blocks = components.read(args)
            result = _with_grid(validate, args, *rest, **named)
        except ConfigError as error:
            fail(error)
        if blocks or hasattr(args, "tensor_model_parallel_impl"):
            from axonn_plugins.hosts.megatron import patch

            patch.compare_ranks(args)
            if blocks:
                components.take_over(args, blocks)
                patch.install_components(blocks)
        return result

    validate_args.axonn = True  # type: ignore[attr-defined]
    module.add_megatron_arguments, module.validate_args = add_megatron_arguments, validate_args  # type: ignore[attr-defined]
    importer = sys.modules.get("megatron.training.initialize")
    if getattr(importer, "validate_args", None) is validate:
        importer.validate_args = validate_args  # type: ignore[union-attr]


def _watch_steps(module: ModuleType) -> None:
    """Have a step of Megatron's training say when it has ended."""
    train_step = module.train_step
    if getattr(train_step, "watched", False):
        return

    @functools.wraps(train_step)
    def watched(*args: Any, **named: Any) -> Any:
        steps.step_begins()
        result = train_step(*args, **named)
        steps.step_ended()
        return result

    watched.watched = True  # type: ignore[attr-defined]
    module.train_step = watched  # type: ignore[attr-defined]


def _with_grid(validate: Callable[..., Any], args: Any, *rest: Any, **named: Any) -> Any:
    """Megatron's validation, between that of our grid where there is one, which is then installed."""
    if not hasattr(args, "tensor_model_parallel_impl"):
        return validate(args, *rest, **named)
    from axonn_plugins.hosts.megatron import patch, rules

    settings = rules.before(args)
    try:
        result = validate(args, *rest, **named)
    except Exception as error:
        said = _in_a_line(error)
        raise ConfigError(f"Megatron refuses these arguments: {said}; change what it names") from error
    rules.after(args, settings)
    patch.install(settings)
    return result


def _in_a_line(error: Exception) -> str:
    """The text of a refusal; of an assertion without one, and of any other error, the line as well."""
    said = " ".join(str(error).split())
    if said and isinstance(error, (AssertionError, ValueError, RuntimeError)):
        return said
    raised = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{raised.line} ({raised.filename.rpartition('/')[2]}, line {raised.lineno})"
    return f"{said}: {where}" if said else where


def fail(error: ConfigError) -> NoReturn:
    """Say what is wrong as argparse does, without its usage of several hundred lines."""
    print(f"{sys.argv[0].rpartition('/')[2]}: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def add_group(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """The flags in a group of their own, and a parser that forgets them where they are not used.

    Values are taken as text: `rules` refuses them in one sentence, where argparse would print the whole usage.
    """
    hosts = list(parser._actions)  # a script may add others of its own
    group = parser.add_argument_group(title="axonn", description="axonn-plugins")

    def add(flag: str, **how: Any) -> None:
        # Without a value where one must be, argparse would print the whole usage.
        optional: dict[str, Any] = {} if "nargs" in how or "action" in how else {"nargs": "?", "const": ""}
        group.add_argument(flag, **optional, **how)

    add(
        _IMPL,
        default="megatron",
        metavar="{" + ",".join(IMPLS) + "}",
        help="who splits the layers: Megatron itself (the default), or AxoNN's 3D parallel matrix multiplication",
    )
    size = "an integer, or auto: the planner chooses for this model and machine (default: 1)"
    add("--axonn-gx", metavar="N", help=f"ranks that split attention heads and the columns of weights; {size}")
    add("--axonn-gy", metavar="N", help=f"ranks that split the hidden size and the rows of weights; {size}")
    add(
        "--axonn-gz",
        metavar="N",
        help=f"ranks that share every weight and split the batch, a part of the data-parallel ranks; {size}",
    )
    add(
        "--axonn-layout",
        metavar="{" + ",".join(LAYOUTS) + "}",
        help="scattered: no activation is stored, no attention computed twice (the default); replicated: the papers'",
    )
    add(
        _OVERLAP,
        nargs="*",
        metavar="COLLECTIVE",
        help=f"collectives that run while the device computes: {', '.join(OVERLAPS)}, or all (the default), or none",
    )
    add(
        "--axonn-gather-cache",
        metavar="N",
        help="under recomputation, layers that keep their gathered weight: a number, all, or a size such as 2GiB (default: 0)",
    )
    add(
        _TUNE,
        action="store_true",
        default=None,
        help="time the first step's products as NN, NT and TN, and keep the fastest",
    )
    try:
        components.add(group)
    except ConfigError as error:
        fail(error)
    _settle_what_is_parsed(parser, hosts, group)
    return parser


def _settle_what_is_parsed(
    parser: argparse.ArgumentParser, hosts: list[argparse.Action], group: argparse._ArgumentGroup
) -> None:
    """Have the parser check our flags, and forget them where they are not used.

    Args:
        parser: of the script.
        hosts: its arguments that are not ours.
        group: ours.
    """
    parse = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> tuple[argparse.Namespace, list[str]]:
        words = [str(word) for word in (sys.argv[1:] if args is None else args)]
        try:
            _check_words(words, [flag for action in group._group_actions for flag in action.option_strings])
            found, rest = parse(args, namespace)
            components.settle(found)
            _settle(found, {word.partition("=")[0] for word in words})
        except ConfigError as error:
            fail(error)
        if hasattr(found, "tensor_model_parallel_impl"):
            from axonn_plugins.hosts.megatron.refusals import unknown

            found.axonn_unknown = unknown(parser, hosts, found)
        return found, rest

    parser.parse_known_args = parse_known_args  # type: ignore[assignment,method-assign]


def _check_words(words: list[str], ours: list[str]) -> None:
    """Refuse what argparse would answer with its whole usage.

    Args:
        words: of the command line.
        ours: our flags.

    Raises:
        ConfigError: the first mistake.
    """
    last, values = "", 0
    for word in words:
        flag, equals, value = word.partition("=")
        if not word.startswith("-") or word[1:2].isdigit():
            values += 1
            if last == _OVERLAP or last not in ours or values <= (last != _TUNE):
                continue
            raise ConfigError(f"{last} is followed by {word}, a value too many; leave that out")
        if flag in components.REFUSED:
            why, remedy = components.REFUSED[flag]
            raise ConfigError(f"{flag} does not go with Megatron: {why}; {remedy}")
        if flag.startswith("--axonn") and flag not in ours:
            near = difflib.get_close_matches(flag, ours, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"{flag} is not known; use {near}, or another of {', '.join(ours[1:])}; a system of your own must be imported "
                "before arguments are parsed"
            )
        if flag == _TUNE and equals:
            raise ConfigError(f"{_TUNE} takes no value; leave ={value} out")
        last, values = flag, int(bool(equals))


def _settle(found: argparse.Namespace, given: set[str]) -> None:
    """Leave our flags in the namespace only where they are used, and whether Megatron's own size came with them."""
    ours = [name for name in vars(found) if name.startswith("axonn_") and name != "axonn_components"]
    for name in ("tensor_model_parallel_impl", *ours):
        if getattr(found, name) == "":
            raise ConfigError(f"--{name.replace('_', '-')} has no value; give one, or leave it out")
    used = [name for name in ours if getattr(found, name) is not None]
    impl = found.tensor_model_parallel_impl
    if impl == "axonn3d":
        if getattr(found, "yaml_cfg", None) is not None:
            raise ConfigError(
                f"--yaml-cfg does not go with {_IMPL} axonn3d, whose flags it would drop; give flags instead"
            )
        found.axonn_tensor_size_given = "--tensor-model-parallel-size" in given
        found.axonn_muon_mode_given = "--muon-tp-mode" in given
        return
    if impl != "megatron":
        raise ConfigError(f"{_IMPL} {impl} is not known; use megatron or axonn3d")
    if used:
        flag = "--" + used[0].replace("_", "-")
        raise ConfigError(
            f"{flag} is given without {_IMPL} axonn3d, so that it would change nothing; add that, or leave it out"
        )
    for name in ("tensor_model_parallel_impl", *ours):
        delattr(found, name)
