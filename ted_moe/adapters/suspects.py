"""Mixtures by their looks: what holds a router's scores and as many experts, in whatever form."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def suspect(model: nn.Module) -> str | None:
    """The first module that looks like a mixture of experts, in words; None where there is none.

    One holds E things alike in a list, or matrices in stacks of E, and a matrix that makes E scores of a token. A list of the
    outermost module is not one: layers stand there beside a head of E classes.

    Args:
        model: in which no experts were found that are understood.
    """
    for name, module in model.named_modules():
        scored = dict(_scores(module))
        for held, count in (*(_lists(module) if name else ()), *_stacks(module)):
            if count in scored:
                layer = f"layer {name}" if name else "the model"
                return f"{layer} ({type(module).__name__}) has {count} scores by {scored[count]} and {count} experts in {held}"
    return None


def _scores(module: nn.Module) -> Iterator[tuple[int, str]]:
    """Numbers of scores of a token, and by what they are made."""
    for name, child in module.named_children():
        matrices = [parameter for parameter in child.parameters() if parameter.dim() > 1]
        if len(matrices) == 1 and matrices[0].dim() == 2 and not isinstance(child, nn.Embedding):
            yield matrices[0].shape[0], name
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.dim() == 2:
            yield from ((size, name) for size in parameter.shape)


def _lists(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Lists of modules that are alike, each with matrices, of a module itself or of one within."""
    for prefix, holder in (("", module), *module.named_children()):
        for name, child in holder.named_children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict) and len(child) > 1:
                kinds = {(type(one), *(tuple(p.shape) for p in one.parameters())) for one in child.children()}
                if len(kinds) == 1 and any(parameter.dim() > 1 for parameter in child.parameters()):
                    yield f"{prefix}.{name}" if prefix else name, len(child)


def _stacks(module: nn.Module) -> Iterator[tuple[str, int]]:
    """Stacks of matrices, two of one length or more, of a module itself or of one within."""
    for prefix, holder in (("", module), *module.named_children()):
        held = [] if isinstance(holder, nn.modules.conv._ConvNd) else list(holder._parameters.items())
        sizes = [
            (name, parameter.shape[0]) for name, parameter in held if parameter is not None and parameter.dim() > 2
        ]
        for name, size in sizes:
            if size > 1 and [other for _, other in sizes].count(size) > 1:
                yield f"{prefix}.{name}" if prefix else name, size
