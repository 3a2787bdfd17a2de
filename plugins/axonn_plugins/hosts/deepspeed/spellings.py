"""DeepSpeed's other spellings of what the checks of the block look at: it reads them, and the checks would not see them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TRUE, _FALSE = {"1", "true", "t", "yes", "y", "on"}, {"0", "false", "f", "no", "n", "off"}
_SWITCHES = {
    "checkpoint": ("load_universal",),
    "compile": ("deepcompile",),
    "zero_optimization": ("compute_grad_norm", "contiguous_gradients", "reduce_scatter"),
}
_TYPES = {"data_types": "grad_accum_dtype", "torch_autocast": "dtype"}


def as_understood(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with ``bfloat16`` as ``bf16``, 1 and "true" as true, "torch.float16" as "float16".

    Args:
        raw: as a script gave it.

    Returns:
        A copy that DeepSpeed reads as it does `raw`.
    """
    made = dict(raw)
    if made.get("bf16") is None and isinstance(made.get("bfloat16"), Mapping):
        made["bf16"] = made.pop("bfloat16")
    for key, value in made.items():
        if isinstance(value, Mapping):
            made[key] = _section(key, value)
    return made


def _section(key: str, value: Mapping[str, Any]) -> Mapping[str, Any]:
    """A section; itself where all is as the checks know it."""
    changed = {name: _truth(value[name]) for name in ("enabled", *_SWITCHES.get(key, ())) if name in value}
    kind = value.get(_TYPES.get(key, ""))
    if isinstance(kind, str):
        plain = kind.removeprefix("torch.")
        changed[_TYPES[key]] = "float32" if plain == "float" else plain
    return value if all(value[name] is one for name, one in changed.items()) else {**value, **changed}


def _truth(value: Any) -> Any:
    """True or false, where DeepSpeed reads a value as that."""
    word = str(int(value) if value in (0, 1) else value).casefold() if isinstance(value, str | int | float) else ""
    return True if word in _TRUE else False if word in _FALSE else value
