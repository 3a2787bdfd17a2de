"""Rules: the kind of a layer, and its place in the parallel model, with the layouts and collectives that follow from it."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from axonn_tp.comm.collectives import Collective
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import Grid
from axonn_tp.layers.conv import conv_collectives, conv_layout, positions_made
from axonn_tp.layers.cross_entropy import loss_collectives
from axonn_tp.layers.embedding import embedding_collectives, embedding_layout
from axonn_tp.layers.group_norm import group_norm_layout
from axonn_tp.layers.layer_norm import norm_collectives, norm_layout
from axonn_tp.layers.linear_split import LinearSplit, features, linear_collectives
from axonn_tp.layers.rms_norm import rms_norm_collectives, rms_norm_layout
from axonn_tp.options import Options

KINDS: dict[str, str] = {
    "normal": "linear or convolution: contracts over y, output split over x",
    "transposed": "linear or convolution: contracts over x, output split over y, or whole where no embedding starts a split stream",
    "head": "linear: like normal, its output features padded to a multiple of gx",
    "self_contained": "linear or convolution: whole features in and out, sizes padded where needed; what unnamed ones become",
    "embedding": "embedding: vocabulary over x, features over y; from here on features are split over y",
    "norm": "LayerNorm or RMSNorm over features split over y",
    "group_norm": "GroupNorm between a normal and a transposed layer, over channels split as the normal one leaves them",
    "loss": "CrossEntropyLoss over a vocabulary split over x",
    "replicated": "left as it is, the same on every rank of x and y",
}


@dataclass(frozen=True)
class LayerPlan:
    """The kind of a layer in the parallel model, and its settings.

    Attributes:
        kind: a key of `KINDS`.
        parts: for linears, see `LinearSplit`.
        heads: for linears, see `LinearSplit`.
        counts: for normal layers: integer attributes (``name`` or ``config.name``) of the module that holds the layer,
            which its forward reads and which must be divided by the number of shares, such as ``num_heads``; ``x.shape[-1]``
            for the width of the forward's argument ``x``, see `axonn_tp.layers.as_share`.
        reads: for normal layers: a word for the tensor that it reads; layers of one module with the same word enter it
            together. None: layers of one module with equally many input features, up to a transposed one, read one tensor.
        whole_tokens: for embeddings: the stream keeps all its tokens on every rank of x in the scattered layout too, for
            code that counts the tokens of an activation.
    """

    kind: str
    parts: int = 1
    heads: int | None = None
    counts: tuple[str, ...] = ()
    reads: str | None = None
    whole_tokens: bool = False

    @classmethod
    def of(cls, pattern: str, value: LayerPlan | str | Mapping[str, Any]) -> LayerPlan:
        """A layer's plan in any of its forms: an object of this class, a kind, or what JSON has: a kind and other keys.

        Args:
            pattern: of the names that it is for.
            value: one of the forms.

        Raises:
            ValueError: it is none of them.
        """
        if isinstance(value, cls):
            return value
        given = {"kind": value} if isinstance(value, str) else value
        if not isinstance(given, Mapping) or "kind" not in given:
            raise ValueError(
                f'plan {pattern!r}: {value!r} does not say what the layer becomes; give a kind such as "normal", an object with a "kind", or a '
                "LayerPlan"
            )
        for key, found in given.items():
            if key not in _FORMS:
                near = difflib.get_close_matches(str(key), _FORMS, n=1, cutoff=0.0)[0]
                raise ValueError(f"plan {pattern!r}: {key!r} is not a key of a layer's plan; the nearest is {near!r}")
            form, fits = _FORMS[key]
            if not fits(found):
                raise ValueError(f"plan {pattern!r}: {key} = {found!r} is not {form}; correct it")
        return cls(**{**given, "counts": tuple(given.get("counts", ()))})


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _are_words(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value)


_FORMS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "kind": (f"one of {', '.join(KINDS)}", lambda value: isinstance(value, str) and value in KINDS),
    "parts": ("an integer of at least 1", _is_size),
    "heads": ("an integer of at least 1 or None", lambda value: value is None or _is_size(value)),
    "counts": ("a list of names", _are_words),
    "reads": ("a word or None", lambda value: value is None or isinstance(value, str)),
    "whole_tokens": ("true or false", lambda value: isinstance(value, bool)),
}

Plan = Mapping[str, "LayerPlan | str | Mapping[str, Any]"]
"""Layers by name pattern; see `LayerPlan.of`."""


@dataclass
class Placement:
    """One module's place in the parallel model.

    Attributes:
        readers: names of the layers that read the same tensor as this one, itself included, the first one first; none
            where it is alone.
    """

    name: str
    module: nn.Module = field(repr=False)
    kind: str
    split: LinearSplit | None = None
    options: Options = field(default=Options(), repr=False)
    scatter_tokens: bool = False
    classes: int | None = None
    tied: bool = False
    scatter: bool = False
    counts: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()

    def _size(self) -> tuple[int, int]:
        """(out, in) features of a linear."""
        if isinstance(self.module, nn.Linear):
            return self.module.out_features, self.module.in_features
        size = features(self.module)
        assert size is not None
        return size[1], size[0]

    def layouts(self) -> dict[str, Layout]:
        """Layouts of the module's own parameters, by name."""
        module = self.module
        own = {name: tuple(p.shape) for name, p in module._parameters.items() if p is not None}
        if isinstance(module, _ConvNd) and self.split is not None:
            bias = {"bias": self.split.bias_layout(module.out_channels)} if "bias" in own else {}
            return {"weight": conv_layout(module, self.split), **bias}
        if self.split is not None:
            bias = {"bias": self.split.bias_layout(self._size()[0])} if "bias" in own else {}
            return {"weight": self.split.weight_layout(*self._size()), **bias}
        if self.kind == "embedding":
            return {"weight": embedding_layout(own["weight"], self.tied)}
        if self.kind == "group_norm":
            return {name: group_norm_layout(shape[0], self.inner_axes) for name, shape in own.items()}
        if not isinstance(module, nn.LayerNorm):
            return {name: rms_norm_layout(shape[0], self.scatter_tokens) for name, shape in own.items()}
        return {name: norm_layout(shape, self.scatter_tokens) for name, shape in own.items()}

    def collectives(self, tokens: int, grid: Grid) -> list[Collective]:
        """Collectives of one forward and backward pass over `tokens` rows of this rank's x-y plane.

        Rows of a convolution are images × positions of its input; its padding is taken to keep the image's size. What
        a GroupNorm communicates, where a group is cut, depends on the number of images and is left out.
        """
        module = self.module
        if isinstance(module, _ConvNd) and self.split is not None:
            made = positions_made(module, tokens)
            return conv_collectives(module, tokens, made, grid, self.split, self.options)
        if self.split is not None:
            n, k = self._size()
            enters = not self.readers or self.readers[0] == self.name
            return linear_collectives(tokens, k, n, grid, self.split, self.options, enters)
        if self.kind == "embedding":
            return embedding_collectives(tokens, self.layouts()["weight"], grid, self.scatter_tokens)
        if self.kind == "norm":
            count = norm_collectives if isinstance(module, nn.LayerNorm) else rms_norm_collectives
            return count(tokens // grid.gx if self.scatter_tokens else tokens, grid)
        if self.kind == "loss":
            return loss_collectives(tokens, grid, self.loss_axes, module.label_smoothing)  # type: ignore[arg-type]
        return []

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Axes over which the classes of a loss are split."""
        return ("x", "y") if self.options.scattered else ("x",)

    @property
    def inner_axes(self) -> tuple[str, ...]:
        """Axes over which the channels between a normal and a transposed layer are split."""
        return ("x", "y") if self.scatter else ("x",)


def linear_split(
    layer: LayerPlan,
    stream_split: bool = False,
    scatter_tokens: bool = False,
    loss_split: bool = False,
    scatter: bool = False,
) -> LinearSplit:
    """The use that a linear or a convolution of a plan makes of the grid.

    Args:
        layer: its plan.
        stream_split: the plan has an embedding, after which features are split over y.
        scatter_tokens: and tokens are scattered over x.
        loss_split: the plan has a loss over a split vocabulary.
        scatter: features between the pair are scattered over both axes.
    """
    stream = "tokens" if scatter_tokens else "split" if stream_split else "whole"
    inner = "features" if scatter else "split"
    takes, gives = {
        "normal": (stream, inner),
        "transposed": (inner, stream),
        "head": (stream, inner if loss_split else "whole"),
        "self_contained": ("whole", "whole"),
    }[layer.kind]
    return LinearSplit(
        transposed=layer.kind == "transposed",
        parts=layer.parts,
        heads=layer.heads,
        takes=takes,
        gives=gives,
        pad=layer.kind == "self_contained",
        pad_vocabulary=layer.kind == "head",
    )
