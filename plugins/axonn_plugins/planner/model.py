"""Models: sizes of transformers, and of U-Nets. `load` reads one by name, path, HF config.json, or from a few numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import files
from axonn_plugins.planner.hf import is_hf, sizes_of
from axonn_plugins.planner.layers import Block, transformer
from axonn_plugins.planner.unet import UNet


@dataclass(frozen=True)
class Transformer:
    """Sizes of a transformer.

    Attributes:
        name: what a user calls it.
        layers: d.
        hidden: features of the residual stream, e.
        heads: of attention, h.
        sequence: positions of a sample, l.
        feed_forward: features within the MLP, f; 0 for 4·e. Of a gated MLP, 1.5 times as many, which have the same parameters.
        kv_heads: heads of keys and values; 0 for as many as `heads`.
        head_width: features of a head; 0 for e/h.
        vocabulary: tokens; 0 where unknown.
        untied: whether the output layer has a table of tokens of its own.
        source: where the sizes come from.

    Raises:
        ConfigError: sizes that do not go together.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    sequence: int = 2048
    feed_forward: int = 0
    kv_heads: int = 0
    head_width: int = 0
    vocabulary: int = 0
    untied: bool = False
    source: str = ""

    def __post_init__(self) -> None:
        if not self.head_width and self.hidden % self.heads:
            raise ConfigError(
                f'model "{self.name}": heads = {self.heads} does not divide hidden = {self.hidden}; choose a divisor, or give head_width'
            )
        if self.kv_heads and self.heads % self.kv_heads:
            raise ConfigError(
                f'model "{self.name}": kv_heads = {self.kv_heads} does not divide heads = {self.heads}; choose a divisor'
            )

    @property
    def f(self) -> int:
        """Features within the MLP."""
        return self.feed_forward or 4 * self.hidden

    @property
    def kv(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def q(self) -> int:
        """Features of a head."""
        return self.head_width or self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Of the layers, and of the tables of tokens where the vocabulary is known."""
        attention = self.hidden * self.q * (2 * self.heads + 2 * self.kv) + self.hidden
        mlp = 2 * self.hidden * self.f + self.f + self.hidden
        return self.layers * (attention + mlp + 4 * self.hidden) + (1 + self.untied) * self.vocabulary * self.hidden

    @property
    def blocks(self) -> tuple[Block, ...]:
        """Its layers, as 4D grids split them."""
        return transformer(
            layers=self.layers,
            sequence=self.sequence,
            hidden=self.hidden,
            inner=self.f,
            heads=self.heads,
            kv_heads=self.kv,
            width=self.q,
        )

    @property
    def described(self) -> str:
        """Its sizes in words."""
        return f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads"

    @property
    def sample(self) -> str:
        """What a sample is."""
        return f"{self.sequence} positions"

    @property
    def divides(self) -> tuple[tuple[int, ...], int]:
        """Features that gx and gy must divide, and heads that gx must."""
        return (self.hidden, self.f), self.heads


Model = Transformer | UNet
_REQUIRED = ("layers", "hidden", "heads")
_NUMBERS = [field.name for field in fields(Transformer) if field.name not in ("name", "source", "untied")]
_OPTIONAL = ("name", "source", "untied", *(key for key in _NUMBERS if key not in _REQUIRED))
_UNET = ("image", "blocks", "heads", "in_channels")
_UNET_LISTS = {"multipliers": 1, "attention_levels": 0}
_PAIR = re.compile(r"\s*([A-Za-z_]+)\s*=\s*([0-9]{1,9})\s*")


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
    least = {"vocabulary": 0, "feed_forward": 0, "kv_heads": 0, "head_width": 0}
    sizes = {key: files.whole(f"{where}: {key}", table[key], least.get(key, 1)) for key in _NUMBERS if key in table}
    untied = table.get("untied", False)
    if not isinstance(untied, bool):
        raise ConfigError(f"{where}: untied = {untied!r} is not true or false; write one of the two")
    return Transformer(name=name, source=source, untied=untied, **sizes)


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
    table = files.read(option, path)
    if is_hf(table):
        return parse(str(path), sizes_of(str(path), table), path.resolve().parent.name or "model", f"HF {path.name}")
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
    return parse(f'{option} = "{text}"', {pair[1]: int(pair[2]) for pair in pairs if pair}, "yours", "the command line")


@cache
def _all() -> dict[str, Model]:
    found: dict[str, Model] = {}
    for path in files.ours("models").values():
        table = files.read("--model", path)
        source = table.pop("source")
        found |= {name: parse(f"{path.name}: {name}", sizes, name, source) for name, sizes in table.items()}
    return found
