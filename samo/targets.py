"""Which parameters of a model are pruned: matrices and convolutions, and what patterns of names add or take away."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from samo.routers import routers_in

Parameters = nn.Module | Iterable[tuple[str, Tensor]]


def names_of(model: Parameters) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A model's parameters, those that modules share once, and by every name of a parameter the one it has here.

    Args:
        model: a module, or pairs of name and parameter.
    """
    pairs = model.named_parameters(remove_duplicate=False) if isinstance(model, nn.Module) else model
    parameters: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, parameter in pairs:
        known = first.setdefault(id(parameter), name)
        aliases[name] = known
        parameters[known] = parameter
    return parameters, aliases


def targets(
    model: Parameters,
    include: Sequence[str] | None = None,
    exclude: Sequence[str] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """The parameters to prune, in the order of the model, frozen ones too.

    By default all floating-point parameters of two dims or more, of which two are not 1: scales of channels or of weight
    normalisation and class tokens are vectors in whatever dims they stand. Not the tables of `nn.Embedding`: as in pruned
    transformers commonly published, of which each row is read for few tokens. An output layer tied to such a table stays
    whole with it. Nor routers of mixtures (`samo.routers`), each row of which decides for a whole expert, and which are few
    of all elements. Pairs of names and parameters do not say which are tables or routers: name these in `exclude`.

    Args:
        model: a module, or pairs of name and parameter.
        include: patterns (``*``, ``?``, ``[...]``) of names: only these, tables of embeddings and routers too. Vectors, such as biases
            and the weights of norms, are never pruned. ``["*"]`` is every tensor of two dims or more.
        exclude: patterns of names: not these.
        shapes: by name, of the whole parameter where `model` holds a part of it.

    Raises:
        ValueError: a pattern fits no parameter, or only vectors.
    """
    parameters, aliases = names_of(model)
    sizes = {name: shapes[name] if shapes else parameter.shape for name, parameter in parameters.items()}
    able = [name for name, parameter in parameters.items() if len(sizes[name]) > 1 and parameter.is_floating_point()]
    if include is not None:
        chosen = _matching("include", include, aliases, able).intersection(able)
    else:
        modules = [model] if isinstance(model, nn.Module) else []
        whole = {id(parameter) for module in modules for parameter in [*tables_in(module), *routers_in(module)]}
        chosen = {n for n in able if id(parameters[n]) not in whole and sum(size != 1 for size in sizes[n]) > 1}
    if exclude is not None:
        chosen -= _matching("exclude", exclude, aliases, None)
    return {name: parameters[name] for name in able if name in chosen}


def nearest(name: str, known: Iterable[str]) -> str:
    """The name that is most like this one, for messages; "none" where none is known."""
    found = difflib.get_close_matches(name.replace("*", "0"), list(known), n=1, cutoff=0.0)
    return repr(found[0]) if found else "none"


def tables_in(model: nn.Module) -> list[Tensor]:
    """The tables of a model's embeddings."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    found = (module._parameters.get("weight") for module in model.modules() if isinstance(module, kinds))
    return [weight for weight in found if weight is not None]


def _matching(key: str, patterns: Sequence[str], aliases: Mapping[str, str], able: Sequence[str] | None) -> set[str]:
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f'{key} = {patterns!r} is not a list of patterns of names; write for instance ["*.fc1.weight"]'
        )
    found: set[str] = set()
    for pattern in patterns:
        names = {known for name, known in aliases.items() if fnmatchcase(name, pattern)}
        if not names:
            raise ValueError(
                f"{key} pattern {pattern!r} matches no parameter; the nearest name is {nearest(pattern, aliases)}"
            )
        if able is not None and not names.intersection(able):
            raise ValueError(
                f"{key} pattern {pattern!r} matches only vectors such as {min(names)!r}, which are not pruned; name tensors "
                "of two dims or more"
            )
        found |= names
    return found


def require_values(parameters: Mapping[str, Tensor]) -> None:
    """Refuse parameters without values.

    Raises:
        ValueError: one is on the meta device.
    """
    for name, parameter in parameters.items():
        if parameter.device == torch.device("meta"):
            raise ValueError(f"{name!r} is on the meta device, which holds no magnitudes; give the model memory first")
