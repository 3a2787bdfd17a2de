"""Wrap `DeepSpeedConfig.__init__`, through which every configuration passes; nothing heavy is imported without a block."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from axonn_plugins.hosts.deepspeed import roll
from axonn_plugins.observe.timeline import steps


def patch(module: ModuleType) -> None:
    """Make a `deepspeed.runtime.config` module look for the block; harmless when called again."""
    config_class = module.DeepSpeedConfig
    original = config_class.__init__
    if getattr(original, "axonn", False):
        return

    def __init__(self: Any, config: Any, mpu: Any = None, *args: Any, **kwargs: Any) -> None:
        if getattr(mpu, "axonn", False):  # of an engine of ours, as deepspeed.checkpointing.configure may be given it
            original(self, config, mpu, *args, **kwargs)
            return
        parsed = read(config)
        block = isinstance(parsed, dict) and parsed.get("axonn") is not None
        roll.note(block)
        if steps.asked():
            _watch_steps()
        if isinstance(parsed, dict):
            refuse_misplaced(parsed)
        if not block:
            hook = sys.modules.get("axonn_plugins.hosts.deepspeed.config_hook")
            if hook is not None:
                hook.step_aside()
            original(self, config, mpu, *args, **kwargs)
            return
        from axonn_plugins.hosts.deepspeed import config_hook

        unit, obeyed = config_hook.configure(self, parsed, mpu)
        config_hook.refuse_mesh(getattr(self, "axonn", None), *args, **kwargs)
        original(self, obeyed, unit, *args, **kwargs)

    __init__.axonn = True  # type: ignore[attr-defined]
    config_class.__init__ = __init__


def refuse_misplaced(raw: Mapping[str, Any]) -> None:
    """DeepSpeed passes over keys that it does not know, and would train without what was asked for.

    Raises:
        ConfigError: a key that is nearly "axonn", or one of the block's outside of it.
    """
    for key in raw:
        if key in ("samo", "ted", "pccl", "goldfish"):
            remedy = f'belongs into the block; write "axonn": {{"{key}": ...}}'
        elif (
            isinstance(key, str)
            and key != "axonn"
            and difflib.get_close_matches(key.casefold(), ["axonn"], cutoff=0.75)
        ):
            remedy = 'is no key of DeepSpeed\'s; write "axonn"'
        else:
            continue
        from axonn_plugins.config import ConfigError
        from axonn_plugins.hosts.deepspeed.config_hook import one_sentence_for_mistakes

        one_sentence_for_mistakes()
        raise ConfigError(f'"{key}" in DeepSpeed\'s configuration {remedy}, or remove it')


def _watch_steps() -> None:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine

    steps.step_asked()  # a mistake in it is said before any group is made
    steps.before(DeepSpeedEngine, "forward")
    steps.after(DeepSpeedEngine, "step")
    steps.before(PipelineEngine, "train_batch")
    steps.after(PipelineEngine, "train_batch")


def read(config: Any) -> Any:
    """The configuration as a dict where it can be read; what cannot be is left to DeepSpeed to refuse."""
    if isinstance(config, dict):
        return config
    try:
        if os.path.exists(config):
            with open(config) as file:
                return parsed(file.read())
        import base64

        import hjson

        return hjson.loads(base64.urlsafe_b64decode(config).decode("utf-8"))
    except Exception:
        return None


def parsed(text: str) -> Any:
    """A configuration's text as DeepSpeed reads a file: JSON in which there may be comments, and no key twice.

    Raises:
        ValueError: it is none.
    """
    import hjson
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    return hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
