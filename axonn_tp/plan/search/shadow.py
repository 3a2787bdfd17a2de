"""A model without its weights, to see what flows where and what a split would change. One process, any device.

In a shadow each linear and embedding answers with random numbers that depend on its name and call alone. So what one
linear hands to the next is isolated: the trace says which linears' outputs reach which linears' inputs, and a run as
one *share* says whether the code between a normal layer and its transposed partner, given this share of the features,
makes this share of what the partner must see, and leaves everything else as it was. No product is ever computed.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from axonn_tp.layers.linear_split import features
from axonn_tp.plan.counted_attributes import local_counts
from axonn_tp.plan.search.answers import Answers
from axonn_tp.plan.search.dependencies import Reach

TOLERANCE = 1e-6
_LARGEST_PARAMETER = 1 << 22


class Mismatch(Exception):
    """A share computes something else than its part of the whole."""


@dataclass(frozen=True)
class Cut:
    """How one linear takes part in a share: ``parts`` None for the layer that ends a pair, else the equal matrices of its output."""

    share: int
    shares: int
    parts: int | None = 1

    def of(self, tensor: Tensor) -> Tensor:
        """This share of features in the last dim.

        Raises:
            Mismatch: they do not divide.
        """
        pieces = tensor.chunk(self.parts or 1, -1)
        if pieces[0].shape[-1] % self.shares:
            raise Mismatch(f"{tensor.shape[-1]} features do not divide by {self.shares}")
        return torch.cat([piece.chunk(self.shares, -1)[self.share] for piece in pieces], -1)


@dataclass(frozen=True)
class Local:
    """Counts of one module (see `axonn_tp.plan.counted_attributes`) divided by `shares`."""

    module: str
    names: tuple[str, ...]
    shares: int


@dataclass
class Run:
    """One pass over the whole module.

    Attributes:
        inputs: input of each linear, by name, one a call.
        made: outputs of the linears, leaves of the autograd graph, with their names.
        outputs: tensors that the pass returned.
        results: what each linear, and each watched embedding and norm, answered, one a call.
        arguments: what each module was first called with.
        read: the tensor objects that each linear was called with, and their versions, which tell whether two are one.
    """

    inputs: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    read: dict[str, list[tuple[Tensor, int]]] = field(default_factory=lambda: defaultdict(list))
    made: list[tuple[str, Tensor]] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    results: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    arguments: dict[str, tuple[tuple, dict[str, Any]]] = field(default_factory=dict)

    def tensors(self, name: str) -> tuple[tuple[int, int], ...]:
        """What the linear `name` read: equal for two linears that read the same tensors."""
        return tuple((id(tensor), version) for tensor, version in self.read[name])

    def consumers(self) -> dict[str, set[str]]:
        """By linear, the linears that read something made of its output; ``""`` is the pass' own output."""
        bits = {name: 1 << i for i, name in enumerate(self.inputs)}
        reach = Reach({id(leaf): bits[name] for name, leaf in self.made})
        found: dict[str, set[str]] = {name: set() for name in bits}
        ends = [(name, tensor) for name, tensors in self.inputs.items() for tensor in tensors]
        for end, tensor in [*ends, *(("", tensor) for tensor in self.outputs)]:
            sources = reach(tensor)
            for name, bit in bits.items():
                if sources & bit:
                    found[name].add(end)
        return found


class Shadow:
    """A copy of `model` that can be run cheaply.

    Args:
        model: the serial model, on any device including meta; it is not changed.

    Raises:
        Exception: the model cannot be copied.
    """

    def __init__(self, model: nn.Module) -> None:
        generator = torch.Generator().manual_seed(1)
        memo: dict[int, Any] = {}
        bare = set(_weights_of_shadowed(model))
        for parameter in model.parameters():
            memo[id(parameter)] = _stand_in(parameter, id(parameter) in bare, generator)
        self.model = copy.deepcopy(model, memo).eval()
        self.modules = dict(self.model.named_modules())
        self.linears = {name: size for name, module in self.modules.items() if (size := features(module))}
        for module in self.modules.values():
            _settle(module, generator)
        for number, (name, module) in enumerate(self.modules.items()):
            if name in self.linears:
                module.forward = self._linear(name, number)  # type: ignore[method-assign]
            elif is_embedding(module):
                module.forward = _embedding(module.embedding_dim, number)  # type: ignore[method-assign, assignment]
        self._run = Run()
        self._expected: Run | None = None
        self._cuts: Mapping[str, Cut] = {}
        self._seat: Answers | None = None

    def _linear(self, name: str, number: int) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:
            if self._seat is not None:
                return self._seat.linear(name, input)
            run, out = self._run, self.linears[name][1]
            call = len(run.inputs[name])
            run.inputs[name].append(input.clone())
            run.read[name].append((input, input._version))
            cut = self._cuts.get(name)
            if self._expected is not None:
                self._compare(name, call, input, cut)
            generator = torch.Generator().manual_seed(number * 1009 + call)
            output = torch.randn(*input.shape[:-1], out, generator=generator, dtype=torch.float64)
            if cut is not None and cut.parts is not None:
                output = cut.of(output)
            output.requires_grad_()
            # A view, which may be changed in place where a leaf may not.
            run.made.append((name, output))
            run.results[name].append(output.detach())
            return output.view_as(output)

        return forward

    def _compare(self, name: str, call: int, input: Tensor, cut: Cut | None) -> None:
        assert self._expected is not None
        calls = self._expected.inputs.get(name, [])
        if call >= len(calls):
            raise Mismatch(f"{name} is called more often")
        ends_pair = cut is not None and cut.parts is None
        _same(input, cut.of(calls[call]) if ends_pair else calls[call], f"the input of {name}")  # type: ignore[union-attr]

    def whole(self, name: str, arguments: tuple[tuple, dict[str, Any]]) -> Run:
        """One pass of the module `name`, of everything it holds.

        Raises:
            Exception: whatever the module raises on these arguments.
        """
        self._expected, self._cuts = None, {}
        with self._recording() as run:
            run.outputs = self._call(name, arguments)
        return run

    def share(self, name: str, run: Run, cuts: Mapping[str, Cut], counts: list[Local], compare_outputs: bool) -> None:
        """One pass as one share, compared with the whole `run` of the same module.

        Raises:
            Mismatch: it differs, and where first.
            Exception: whatever the module raises on a share's features.
        """
        self._run, self._expected, self._cuts = Run(), run, cuts
        with ExitStack() as stack:
            for local in counts:
                stack.enter_context(local_counts(self.modules[local.module], local.names, local.shares))
            outputs = self._call(name, run.arguments[name])
        for other, calls in run.inputs.items():
            if len(self._run.inputs[other]) != len(calls):
                raise Mismatch(f"{other} is called less often")
        if compare_outputs:
            if len(outputs) != len(run.outputs):
                raise Mismatch("the number of outputs differs")
            for got, expected in zip(outputs, run.outputs, strict=True):
                _same(got, expected, "the output")

    def watch(self, embeddings: Iterable[str], norms: Iterable[str]) -> None:
        """From now on runs record what these modules answer, and passes on a share of the stream ask it of the share.

        So they do of modules whose ``axonn_boundary`` is true: these take a stream however it is split, give the first of what they
        return in the same way, and the rest as in the serial model (`axonn_tp.layers.boundary`).
        """
        for name in (*embeddings, *norms):
            self.modules[name].forward = self._watched(name, self.modules[name].forward, name in set(norms))  # type: ignore[method-assign]
        for name, module in self.modules.items():
            if getattr(module, "axonn_boundary", False):
                module.forward = self._boundary(name, module.forward)  # type: ignore[method-assign]

    def _boundary(self, name: str, whole: Callable[..., tuple]) -> Callable[..., tuple]:
        def forward(input: Tensor, *rest: Any, **keywords: Any) -> tuple:
            if self._seat is None:
                self._run.inputs[name].append(input.detach().clone())
                outputs = whole(input, *rest, **keywords)
                self._run.results[name].append(outputs[0].detach())
                return outputs
            known = self._seat.boundary(name, input)
            outputs = whole(input if known is None else known[0], *rest, **keywords)
            return outputs if known is None else (known[1], *outputs[1:])

        return forward

    def _watched(self, name: str, whole: Callable[[Tensor], Tensor], norm: bool) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:
            if self._seat is not None:
                answer = self._seat.norm(name, input) if norm else self._seat.embedding(name)
                return whole(input) if answer is None else answer
            output = whole(input)
            if norm:
                self._run.inputs[name].append(input.detach().clone())
            self._run.results[name].append(output.detach())
            return output

        return forward

    def seated(self, seat: Answers, run: Run, counts: list[Local]) -> list[Tensor]:
        """What the model returns in a pass on a share of its stream.

        Raises:
            Mismatch: a layer did not get what it is to get.
            Exception: whatever the model raises on a share.
        """
        self._seat = seat
        try:
            with ExitStack() as stack:
                for local in counts:
                    stack.enter_context(local_counts(self.modules[local.module], local.names, local.shares))
                return self._call("", run.arguments[""])
        finally:
            self._seat = None

    @staticmethod
    def reaches(tensor: Tensor, leaves: list[Tensor]) -> bool:
        """Whether `tensor` was made of one of the leaves."""
        return bool(Reach({id(leaf): 1 for leaf in leaves})(tensor))

    def _call(self, name: str, arguments: tuple[tuple, dict[str, Any]]) -> list[Tensor]:
        args, keywords = tree_map(_fresh, arguments)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            outputs = self.modules[name](*args, **keywords)
        return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]

    @contextmanager
    def _recording(self) -> Iterator[Run]:
        self._run = run = Run()

        def note(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple, keywords: dict[str, Any]) -> None:
                run.arguments.setdefault(name, tree_map(_fresh, (args, keywords)))

            return hook

        with ExitStack() as stack:
            for name, module in self.modules.items():
                if next(module.children(), None) is not None:
                    stack.callback(module.register_forward_pre_hook(note(name), with_kwargs=True).remove)
            yield run


def _fresh(value: Any) -> Any:
    """A detached copy of a tensor, in the shadow's precision."""
    if not isinstance(value, Tensor):
        return value
    return value.detach().to("cpu", torch.float64 if value.is_floating_point() else None, copy=True)


def _same(got: Tensor, expected: Tensor, what: str) -> None:
    if got.shape != expected.shape:
        raise Mismatch(f"{what} has shape {tuple(got.shape)} instead of {tuple(expected.shape)}")
    if not same(got, expected):
        raise Mismatch(f"{what} has other values")


def same(got: Tensor, expected: Tensor) -> bool:
    """Whether two tensors of one shape are equal up to rounding."""
    return torch.allclose(got.detach(), expected.detach(), rtol=TOLERANCE, atol=TOLERANCE, equal_nan=True)


def _weights_of_shadowed(model: nn.Module) -> Iterator[int]:
    """Parameters that no run needs: those of linears and embeddings, unless somebody else reads them directly."""
    inside = {id(m) for mha in model.modules() if isinstance(mha, nn.MultiheadAttention) for m in mha.modules()}
    for module in model.modules():
        if id(module) not in inside and (features(module) or is_embedding(module)):
            yield from (id(p) for p in module._parameters.values() if p is not None)


def _stand_in(parameter: nn.Parameter, bare: bool, generator: torch.Generator) -> nn.Parameter:
    shape = parameter.shape
    if bare or parameter.numel() > _LARGEST_PARAMETER:
        data = torch.full((1,), 1e-3, dtype=torch.float64).expand(shape)
    else:
        # Not the model's own numbers: a gate that starts at zero would hide what passes through it.
        data = 1 + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)
    return nn.Parameter(data)


def is_embedding(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """An embedding whose forward is torch's."""
    return isinstance(module, nn.Embedding) and type(module).forward is nn.Embedding.forward


def _embedding(width: int, number: int) -> Callable[[Tensor], Tensor]:
    def forward(ids: Tensor) -> Tensor:
        columns = torch.arange(width, dtype=torch.float64) + 1
        return torch.sin((ids[..., None].double() + 1) * 12.9898 * columns + number)

    return forward


def _settle(module: nn.Module, generator: torch.Generator) -> None:
    """Make one module of the copy ready to run in float64 on the CPU: buffers, attention kernels, no caches."""
    for name, buffer in module._buffers.items():
        if buffer is not None:
            real = buffer.is_floating_point()
            value = buffer.detach().to(torch.float64 if real else buffer.dtype)
            if buffer.is_meta:
                value = torch.rand(value.shape, generator=generator, dtype=value.dtype) if real else _zeros(value)
            module._buffers[name] = value.cpu()
    config = getattr(module, "config", None)
    if getattr(config, "use_cache", None) is True:
        config.use_cache = False  # type: ignore[union-attr]
    if "flash" in str(getattr(config, "_attn_implementation", "")):
        config._attn_implementation = "sdpa"  # type: ignore[union-attr]
    if getattr(config, "_experts_implementation", None):
        config._experts_implementation = "eager"  # type: ignore[union-attr]


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)
