"""``from_pretrained`` leaves weights in their files where the model will be split; else nothing is different.

As with ZeRO-3 that is once the DeepSpeed configuration is known: `TrainingArguments`, `Accelerator` or `HfDeepSpeedConfig` came
before. Each rank then reads its shards when the engine splits the model. Code that uses a weight before finds it whole.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any
from zipfile import is_zipfile


def patch(module: ModuleType) -> None:
    """Add to ``transformers.modeling_utils``; harmless when called again."""
    kind = module.PreTrainedModel
    original = getattr(kind, "_load_pretrained_model", None)
    if original is not None and not getattr(original, "axonn", False):
        kind._load_pretrained_model = staticmethod(_loading(original))
        kind.resize_token_embeddings = _resizing(kind.resize_token_embeddings)


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load(model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *rest: Any, **named: Any) -> Any:
        """The loader of transformers, which renames, joins and counts what it is given: tensors that are not read yet."""
        if state_dict is not None or not _apt(checkpoint_files, load_config) or not (_asked_for() or _will_split()):
            return original(model, state_dict, checkpoint_files, load_config, *rest, **named)
        from axonn_tp.checkpoint import lazily
        from axonn_tp.grid.lazy import recording

        lazy = lazily.of_files([Path(file) for file in checkpoint_files])
        with recording():
            return original(model, lazy, checkpoint_files, load_config, *rest, **named)

    load.axonn = True  # type: ignore[attr-defined]
    return load


def _resizing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def resize_token_embeddings(
        self: Any, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None, *rest: Any, **named: Any
    ) -> Any:
        """The model's own, which reads shards as whole weights.

        Raises:
            ConfigError: the model is split.
        """
        changes = pad_to_multiple_of is not None or new_num_tokens not in (
            None,
            self.config.get_text_config().vocab_size,
        )
        if changes and any(hasattr(parameter, "axonn_layout") for parameter in self.parameters()):
            from axonn_plugins.config import ConfigError

            raise ConfigError(
                f"resize_token_embeddings({new_num_tokens}) of a model that is split over ranks already, where embeddings and heads may be shards; call "
                "it before the Trainer, accelerator.prepare or deepspeed.initialize takes the model"
            )
        return original(self, new_num_tokens, pad_to_multiple_of, *rest, **named)

    return resize_token_embeddings


def _apt(files: Any, load_config: Any) -> bool:
    """True if a folder's weights are only read and renamed, for the CPU."""
    placed = getattr(load_config, "device_map", None) or {}
    others = (getattr(load_config, name, None) for name in ("hf_quantizer", "device_mesh"))
    if not files or any(other is not None for other in others) or any(str(where) != "cpu" for where in placed.values()):
        return False
    return all(str(file).endswith(".safetensors") or str(file).endswith(".bin") and is_zipfile(file) for file in files)


def _asked_for() -> bool:
    """True within `axonn_tp.checkpoint.lazy_loading`."""
    module = sys.modules.get("axonn_tp.checkpoint.lazily")
    return module is not None and module.wanted()


def _will_split() -> bool:
    """True if the DeepSpeed configuration that is in force splits models."""
    from transformers.integrations.deepspeed import deepspeed_config, is_deepspeed_zero3_enabled

    raw = deepspeed_config()
    block = raw.get("axonn") if isinstance(raw, Mapping) else None
    if not isinstance(block, Mapping) or is_deepspeed_zero3_enabled():
        return False
    return "tensor_parallel" in block or "ted" in block
