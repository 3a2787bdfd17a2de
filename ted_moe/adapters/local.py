"""A module's own code run on some of its experts, or on shares of them: in trials on random ones, and on this rank's in training."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ted_moe.adapters.lists import each, numbered

TOLD = re.compile(r"(^|_)experts?(_|$)")
_ROUTING = re.compile(r"per_tok|top_?k|shared|zero|group|first|capacity|bias|hash")
_INNER = re.compile(r"intermediate|ffn|inner|expert_dim")
_APART = {"_parameters", "_modules", "_buffers", "mesh", "layouts", "home", "forward", "_compiled_call_impl"}


def numbers_of(module: nn.Module, pattern: re.Pattern) -> dict[str, int]:
    """Whole numbers that a module holds by names of a pattern, but those that speak of routing."""
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) is int and pattern.search(name) and not _ROUTING.search(name)
    }


class Local:
    """A module's own code with parameters that are given in each call: those of some of its experts, or shares of them.

    Args:
        module: the experts, before they are split.
        count: how many the module has, and how many are given here.
        inner: by what its inner features are divided.
        lists: prefixes of the names of lists of experts, of which the first are taken.
        trial: whether the module's buffers are to stay what they are; else what a script sets on the module and within holds here, too.
    """

    def __init__(
        self,
        module: nn.Module,
        count: tuple[int, int],
        inner: int = 1,
        lists: Collection[str] = (),
        trial: bool = True,
    ) -> None:
        self._holders: dict[str, nn.Module] = {}
        self._before: dict[str, dict[str, Any]] = {}
        self._followed: list[tuple[nn.Module, nn.Module, dict[str, Any]]] = []
        self._lists, self._trial = lists, trial
        self._code = self._copy(module, "", count, inner)

    def _copy(self, module: nn.Module, name: str, count: tuple[int, int], inner: int) -> nn.Module:
        made = copy.copy(module)
        made._parameters = _absent(module)
        left = numbered(module)[count[1] :] if name in self._lists else []
        made._modules = {
            key: child
            if child is None or next(child.parameters(), None) is None
            else self._copy(child, f"{name}{key}.", count, inner)
            for key, child in module._modules.items()
            if all(child is not other for other in left)
        }
        # Ours, such as those of shared sequences, which come later, are about what experts are called with, not about rows.
        vars(made).update({key: copy.copy(value) for key, value in vars(made).items() if "_hooks" in key})
        whole, here = count
        vars(made).update({key: here for key, value in numbers_of(module, TOLD).items() if value == whole})
        vars(made).update({key: value // inner for key, value in numbers_of(module, _INNER).items()})
        if self._trial:  # what it does to buffers is not to be seen in the module
            made._buffers = {key: None if one is None else one.clone() for key, one in module._buffers.items()}
            self._before[name] = {**vars(module), **module._buffers}
        else:
            self._followed.append((made, module, _set_on(module, not name)))
        self._holders[name] = made
        return made

    def _follow(self) -> None:
        """Scripts change modules between steps, as a scale, or whether adapters are on; what the code sets itself stays."""
        for made, module, before in self._followed:
            now = _set_on(module, made is self._code)
            for key in now.keys() | before.keys():
                if key not in now:
                    vars(made).pop(key, None)
                elif key not in before or not _same(before[key], now[key]):
                    vars(made)[key] = now[key]
            before.clear()
            before.update(now)

    def tell_apart(self, count: int) -> None:
        """Buffers with a number for each of all experts differ from the second on: a script may set them later."""
        for made in self._holders.values():
            for buffer in made._buffers.values():
                if buffer is not None and buffer.dim() and len(buffer) == count and not buffer.is_meta:
                    others = buffer[1:]
                    if buffer.is_floating_point():
                        others += 1 + torch.arange(1, count).to(others).view(-1, *[1] * (buffer.dim() - 1))
                    elif buffer.dtype == torch.bool:
                        others ^= True

    def changed(self) -> str | None:
        """The name of a buffer or of an attribute with a tensor that calls have changed; None: there is none."""
        for name, made in self._holders.items():
            for key, value in {**vars(made), **made._buffers}.items():
                before = self._before[name].get(key)
                if isinstance(value, Tensor) and not (isinstance(before, Tensor) and torch.equal(value, before)):
                    return f"{name}{key}"
        return None

    def __call__(self, parameters: Mapping[str, Tensor], training: bool, *arguments: Tensor) -> Tensor:
        """Run the module on (hidden, indices, weights) with other parameters, and return its output."""
        try:
            for name, tensor in each(parameters):
                holder, _, own = name.rpartition(".")
                self._holders[f"{holder}." if holder else ""]._parameters[own] = tensor  # type: ignore[assignment]
            if self._trial:
                for holder_ in self._holders.values():
                    holder_.training = training
            self._follow()
            return self._code.forward(*arguments)
        finally:
            for holder_ in self._holders.values():
                holder_._parameters = _absent(holder_)


def _set_on(module: nn.Module, outermost: bool) -> dict[str, Any]:
    """Attributes of a module that its copy has as they are; hooks only of modules within, without ours."""
    found = {}
    for key, value in vars(module).items():
        if "_hooks" in key and isinstance(value, dict):
            if not outermost:
                found[key] = OrderedDict((n, h) for n, h in value.items() if not _ours(h))
        elif key not in _APART and not key.startswith("axonn_"):
            found[key] = value
    return found


def _ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("axonn_")


def _same(before: Any, now: Any) -> bool:
    return before is now or (isinstance(now, OrderedDict) and isinstance(before, OrderedDict) and before == now)


def _absent(module: nn.Module) -> dict[str, Any]:
    """Parameters that a module may have and has not, such as biases."""
    return {name: None for name, parameter in module._parameters.items() if parameter is None}
