"""Models: sizes of transformers, and of U-Nets. `load` reads one by name, path, HF config.json, or from a few numbers."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import files
from axonn_plugins.planner.hf import is_hf, sizes_of
from axonn_plugins.planner.hf_counts import counted
from axonn_plugins.planner.sizes import Transformer as Transformer
from axonn_plugins.planner.unet import UNet

Model = Transformer | UNet
_REQUIRED = ("layers", "hidden", "heads")
_FLAGS = ("untied", "gated", "attention_gate")
_TEXTS = ("name", "source", "kinds")
_NUMBERS = [field.name for field in fields(Transformer) if field.name not in (*_TEXTS, *_FLAGS)]
_OPTIONAL = (*_TEXTS, *_FLAGS, *(key for key in _NUMBERS if key not in _REQUIRED))
_UNET = ("image", "blocks", "heads", "in_channels")
_UNET_LISTS = {"multipliers": 1, "attention_levels": 0}
_PAIR = re.compile(r"\s*([A-Za-z_]+)\s*=\s*([0-9]{1,9}|true|false)\s*")


def names() -> list[str]:
    """The models that we have sizes of."""
    return list(_all())


def load(name: str, option: str = "--model", sequence: int | None = None) -> Model:
    """A model by name, by the path of its file or of HF's config.json (or its folder), or from numbers: ``layers=24,hidden=2048,heads=16``.

    Args:
        name: one of these.
        option: what gave it, for errors.
        sequence: positions of a sample, instead of the model's.

    Raises:
        ConfigError: there is no such model, or its sizes are wrong.
    """
    known = _all()
    if name.lower() in known:
        model = known[name.lower()]
    elif "=" in name and not Path(name).exists():
        model = _from_numbers(name, option)
    elif files.is_path(name) or Path(name).is_dir():
        model = _from_file(Path(name), option)
    else:
        raise ConfigError(
            f'{option} = "{name}" is not known; use "{files.nearest(name, known)}", another of {", ".join(known)}, the path of a TOML or '
            "JSON file or of HF's config.json, or numbers such as layers=24,hidden=2048,heads=16"
        )
    if sequence is not None and isinstance(model, Transformer):
        return replace(model, sequence=files.whole("--sequence", sequence))
    return model


def parse(where: str, table: dict[str, Any], name: str, source: str = "") -> Model:
    """A model from the keys of its file.

    Args:
        where: the file, for errors.
        table: its keys.
        name: the model's, where the table does not say.
        source: likewise.

    Raises:
        ConfigError: a key is missing, unknown, or its value is wrong.
    """
    name = files.text(f"{where}: name", table.get("name", name))
    source = files.text(f"{where}: source", table["source"]) if "source" in table else source
    if "channels" in table:
        return UNet(name=name, source=source, **_unet(where, table))
    files.keys(where, table, _REQUIRED, _OPTIONAL)
    limits = {key: (0, 10**9) for key in _NUMBERS if key not in (*_REQUIRED, "sequence", "sparse_every")} | {
        "other": (0, 10**12)
    }
    sizes: dict[str, Any] = {
        key: files.whole(f"{where}: {key}", table[key], *limits.get(key, ())) for key in _NUMBERS if key in table
    }
    if "kinds" in table:
        sizes["kinds"] = files.text(f"{where}: kinds", table["kinds"])
    for key in _FLAGS:
        if key in table:
            sizes[key] = files.truth(f"{where}: {key}", table[key])
    return Transformer(name=name, source=source, **sizes)


def _unet(where: str, table: dict[str, Any]) -> dict[str, Any]:
    files.keys(where, table, ("channels",), ("name", "source", *_UNET, *_UNET_LISTS))
    sizes: dict[str, Any] = {
        "blocks_of_a_level" if key == "blocks" else key: files.whole(f"{where}: {key}", table[key], most=2**20)
        for key in ("channels", *_UNET)
        if key in table
    }
    for key, least in _UNET_LISTS.items():
        if key in table:
            sizes[key] = files.wholes(f"{where}: {key}", table[key], least)
    return sizes


def _from_file(path: Path, option: str) -> Model:
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ConfigError(
            f'{option} = "{path}" is no file; give the path of a TOML or JSON file or of a model\'s folder with its config.json (of a model '
            "of the Hugging Face hub: hf download NAME config.json --local-dir FOLDER), or a name that axonn plan --help lists"
        )
    table = files.read(option, path)
    if is_hf(table):
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        found = parse(str(path), sizes_of(str(path), table), name or "model", f"HF {path.name}")
        assert isinstance(found, Transformer)
        whole = counted(table)
        return found if whole is None else replace(found, other=found.other + whole - found.parameters)
    return parse(str(path), table, path.stem)


def _from_numbers(text: str, option: str) -> Model:
    pairs = [_PAIR.fullmatch(part) for part in text.split(",")]
    if not all(pairs):
        raise ConfigError(
            f'{option} = "{text}" does not give sizes; write name=number pairs with commas, such as layers=24,hidden=2048,heads=16'
        )
    given = [pair[1] for pair in pairs if pair]
    twice = [key for key in given if given.count(key) > 1]
    if twice:
        raise ConfigError(f'{option} = "{text}" gives {twice[0]} twice; give it once')
    return parse(
        f'{option} = "{text}"', {pair[1]: _value(pair[2]) for pair in pairs if pair}, "yours", "the command line"
    )


def _value(text: str) -> int | bool:
    return text == "true" if text in ("true", "false") else int(text)


@cache
def _all() -> dict[str, Model]:
    found: dict[str, Model] = {}
    for path in files.ours("models").values():
        table = files.read("--model", path)
        source = table.pop("source")
        found |= {name: parse(f"{path.name}: {name}", sizes, name, source) for name, sizes in table.items()}
    return found
