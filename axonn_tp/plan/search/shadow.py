"""A model without its weights, to see what flows where and what a split would change. One process, any device.

In a shadow each linear and embedding answers with random numbers that depend on its name and call alone. So what one
linear hands to the next is isolated: the trace says which linears' outputs reach which linears' inputs, and a run as
one *share* says whether the code between a normal layer and its transposed partner, given this share of the features,
makes this share of what the partner must see, and leaves everything else as it was. No product is ever computed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from axonn_tp.grid.leaves import tensors_in
from axonn_tp.layers.as_share import own
from axonn_tp.layers.linear_split import features
from axonn_tp.plan.own_faults import let_out
from axonn_tp.plan.search.alike import Likeness
from axonn_tp.plan.search.answers import Answers
from axonn_tp.plan.search.copies import embedding, fresh, is_embedding, own_weights, weightless_copy
from axonn_tp.plan.search.counting import local_counts
from axonn_tp.plan.search.dependencies import Reach
from axonn_tp.plan.search.replay import Recorder, Related, Replay, containing
from axonn_tp.plan.search.runs import Cut, Local, Mismatch, Run, check_outputs, check_same, equal
from axonn_tp.plan.search.slopes import check_slopes, slopes_of
from axonn_tp.plan.search.training import Buffers, check_buffers, training


class Shadow:
    """A copy of `model` that can be run cheaply.

    Args:
        model: the serial model, on any device including meta; it is not changed.
        reuse: of blocks that are alike, run one in a pass on shares.

    Raises:
        Exception: the model cannot be copied.
    """

    def __init__(self, model: nn.Module, reuse: bool = True) -> None:
        self.model, drawn, self.replaced = weightless_copy(model)
        self.modules = dict(self.model.named_modules())
        self.linears = {name: size for name, module in self.modules.items() if (size := features(module))}
        self.likeness: Likeness | None = None
        if reuse:
            answering = {id(m) for name, m in self.modules.items() if name in self.linears or is_embedding(m)}
            self.likeness = Likeness(self.modules, answering, drawn)
            for name in self.likeness.kinds:
                self.modules[name].forward = self._block(name, self.modules[name].forward)  # type: ignore[method-assign]
        for number, (name, module) in enumerate(self.modules.items()):
            if name in self.linears:
                module.forward = self._linear(name, number)  # type: ignore[method-assign]
            elif is_embedding(module):
                module.forward = self._embedding(name, embedding(module.embedding_dim, number))  # type: ignore[method-assign, assignment]
        self._run = Run()
        self._buffers, self._watching, self.in_training, self.drew = Buffers(self.model), False, False, False
        self._expected: Run | None = None
        self._cuts: Mapping[str, Cut] = {}
        self._seat: Answers | None = None
        self._called: set[str] | None = None
        self._player: Recorder | Replay | None = None

    def _block(self, name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **keywords: Any) -> Any:
            assert self.likeness is not None
            with self.likeness.running(name):
                return whole(*args, **keywords) if self._player is None else self._player(name, whole, (args, keywords))

        return forward

    def _linear(self, name: str, number: int) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:
            input = own(input)
            if self._seat is not None:
                return self._seat.linear(name, input)
            run, out = self._run, self.linears[name][1]
            if self._called is not None:
                self._called.add(name)
                generator = torch.Generator().manual_seed(number)
                return torch.randn(*input.shape[:-1], out, generator=generator, dtype=torch.float64)
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
            # A copy, which may be changed in place where a leaf may not.
            run.made.append((name, output))
            run.results[name].append(output.detach())
            return output.clone()

        return forward

    def _embedding(self, name: str, whole: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(ids: Tensor) -> Tensor:
            rows = whole(own(ids)).requires_grad_()
            self._run.rows.append((name, rows))
            return rows.clone()

        return forward

    def users(self, run: Run) -> dict[str, set[str]]:
        """For each parameter or embedding the linears that read what was made of it in a pass; ``""`` for its output, and where it is a layer's weight."""
        found = run.users(dict(self.model.named_parameters()))
        for name in own_weights(self.model) & found.keys():
            found[name].add("")
        return found

    def _compare(self, name: str, call: int, input: Tensor, cut: Cut | None) -> None:
        assert self._expected is not None
        calls = self._expected.inputs.get(name, [])
        if call >= len(calls):
            raise Mismatch(f"{name} is called more often")
        ends_pair = cut is not None and cut.parts is None
        check_same(input, cut.of(calls[call]) if ends_pair else calls[call], f"the input of {name}")  # type: ignore[union-attr]

    @property
    def reads(self) -> int:
        """Number of reads so far of attributes that differ between repeated blocks."""
        return self.likeness.reads if self.likeness is not None else 0

    def whole(self, name: str, arguments: tuple[tuple, dict[str, Any]]) -> Run:
        """One pass of the module `name`, of everything it holds.

        Raises:
            Exception: whatever the module raises on these arguments.
        """
        self._expected, self._cuts = None, {}
        inside = f"{name}." if name else ""
        with self._recording() as run:
            if self.likeness is not None and any(block.startswith(inside) for block in self.likeness.kinds):
                self._player = Recorder(self.likeness, run.results)
            try:
                run.outputs = self._call(name, arguments)
            finally:
                recorder, self._player = self._player, None
        run.buffers, run.slopes = self._made, slopes_of(run)
        if isinstance(recorder, Recorder) and run.slopes is None:
            run.blocks = recorder.blocks()
        return run

    def called_in(self, name: str, arguments: tuple[tuple, dict[str, Any]], seed: int | None) -> set[str]:
        """Linears that are called in one pass of the module `name`; with a seed, in training.

        Raises:
            Exception: whatever the module raises on these arguments.
        """
        self._called = called = set[str]()
        self.model.train(seed is not None)
        try:
            self._call(name, arguments, seed or 0)
        finally:
            self._called = None
            self.model.eval()
        return called

    @contextmanager
    def _replaying(
        self, run: Run, related: Related, cuts: Mapping[str, Cut], counts: Iterable[Local]
    ) -> Iterator[Replay]:
        """Inside, blocks that are alike are run once.

        Raises:
            Mismatch: in this pass a block asked for something in which blocks differ.
        """
        assert self.likeness is not None
        parts: list[tuple[str, Hashable]] = [(name, cut) for name, cut in cuts.items()]
        parts += [(local.module, (local.names, local.shares)) for local in counts]
        reads = self.likeness.reads
        self._player = replay = Replay(self.likeness, run.blocks, related, parts)
        try:
            yield replay
        finally:
            self._player = None
            if self.likeness.reads != reads:
                run.blocks.clear()
        if self.likeness.reads != reads:
            raise Mismatch("blocks differ in what they read")

    def share(self, name: str, run: Run, cuts: Mapping[str, Cut], counts: list[Local], compare_outputs: bool) -> None:
        """One pass as one share, compared with the whole `run` of the same module.

        Raises:
            Mismatch: it differs, and where first.
            Exception: whatever the module raises on a share's features.
        """
        if run.blocks:
            try:
                with self._replaying(run, _Whole(self, run), cuts, counts):
                    self._share(name, run, cuts, counts, compare_outputs)
                return
            except Exception as error:
                let_out(error)  # every block has its say before the pass is called wrong
        self._share(name, run, cuts, counts, compare_outputs)

    def _share(self, name: str, run: Run, cuts: Mapping[str, Cut], counts: list[Local], compare_outputs: bool) -> None:
        self._run, self._expected, self._cuts = Run(), run, cuts
        with local_counts(self.modules, self.linears, run, cuts, counts):
            outputs = self._call(name, run.arguments[name])
        check_buffers(self._made, run)
        for other, calls in run.inputs.items():
            if len(self._run.inputs[other]) != len(calls):
                raise Mismatch(f"{other} is called less often")
        if compare_outputs:
            check_outputs(outputs, run)
        check_slopes(self._run, run, cuts)

    def called(self, layer: str, number: int) -> None:
        """A linear was called as often as in the whole pass, and given the same, by a block that was not run."""
        assert self._expected is not None
        began = len(self._run.inputs[layer])
        self._run.inputs[layer].extend(self._expected.inputs[layer][began : began + number])

    def watch(self, embeddings: Iterable[str], norms: Iterable[str]) -> None:
        """From now on runs record what these modules answer, and passes on a share of the stream ask it of the share.

        So they do of modules whose ``axonn_boundary`` is true: these take a stream however it is split, give what they return, or the
        first of it, in the same way, and the rest as in the serial model (`axonn_tp.layers.boundary`).
        """
        if self._watching:
            return
        self._watching = True
        for name in (*embeddings, *norms):
            self.modules[name].forward = self._watched(name, self.modules[name].forward, name in set(norms))  # type: ignore[method-assign]
        for name, module in self.modules.items():
            if getattr(module, "axonn_boundary", False):
                module.forward = self._boundary(name, module.forward)  # type: ignore[method-assign]

    def _boundary(self, name: str, whole: Callable[..., Any]) -> Callable[..., Any]:
        def forward(input: Tensor, *rest: Any, **keywords: Any) -> Any:
            if self._seat is None:
                self._run.inputs[name].append(input.detach().clone())
                outputs = whole(input, *rest, **keywords)
                self._run.results[name].append((outputs if isinstance(outputs, Tensor) else outputs[0]).detach())
                return outputs
            known = self._seat.boundary(name, input)
            outputs = whole(input if known is None else known[0], *rest, **keywords)
            if known is None:
                return outputs
            return known[1] if isinstance(outputs, Tensor) else (known[1], *outputs[1:])

        return forward

    def _watched(self, name: str, whole: Callable[[Tensor], Tensor], norm: bool) -> Callable[[Tensor], Tensor]:
        def forward(input: Tensor) -> Tensor:
            input = own(input)
            if self._seat is not None:
                answer = self._seat.norm(name, input) if norm else self._seat.embedding(name, input)
                return whole(input) if answer is None else answer
            output = whole(input)
            self._run.inputs[name].append(input.detach().clone())
            self._run.results[name].append(output.detach())
            return output

        return forward

    def seated(
        self, seat: Answers, run: Run, cuts: Mapping[str, Cut], counts: list[Local], reuse: bool
    ) -> list[Tensor]:
        """The model's outputs in a pass on a share of its stream; with `reuse`, of blocks that are alike one is run.

        Raises:
            Mismatch: a layer did not get what it is to get.
            Exception: whatever the model raises on a share.
        """
        self._seat = seat
        try:
            with ExitStack() as stack:
                if reuse:
                    stack.enter_context(self._replaying(run, seat, cuts, counts))
                stack.enter_context(local_counts(self.modules, self.linears, run, cuts, counts))
                outputs = self._call("", run.arguments[""])
            check_buffers(self._made, run)
            return outputs
        finally:
            self._seat = None

    @staticmethod
    def reaches(tensor: Tensor, leaves: list[Tensor]) -> bool:
        """True if `tensor` was made of one of the leaves."""
        return bool(Reach({id(leaf): 1 for leaf in leaves})(tensor))

    def _call(self, name: str, arguments: tuple[tuple, dict[str, Any]], seed: int = 0) -> list[Tensor]:
        args, keywords = tree_map(fresh, arguments)
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), ExitStack() as stack:
            if self.likeness is not None:
                stack.enter_context(self.likeness.watching())
                stack.enter_context(self.likeness.running(containing(name, self.likeness.kinds)))
            if self.in_training:
                stack.enter_context(training(self.model))
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed devices too, whose states stay
            before = torch.get_rng_state()
            stack.callback(self._settle)
            outputs = self.modules[name](*args, **keywords)
            self.drew = not torch.equal(before, torch.get_rng_state())
        return tensors_in(outputs)

    def _settle(self) -> None:
        self._made = self._buffers.settle()

    @contextmanager
    def _recording(self) -> Iterator[Run]:
        self._run = run = Run()

        def note(name: str) -> Callable[..., None]:
            def hook(_: nn.Module, args: tuple, keywords: dict[str, Any]) -> None:
                run.arguments.setdefault(name, tree_map(fresh, (args, keywords)))

            return hook

        with ExitStack() as stack:
            for name, module in self.modules.items():
                if next(module.children(), None) is not None:
                    stack.callback(module.register_forward_pre_hook(note(name), with_kwargs=True).remove)
            yield run


class _Whole:
    """A share of the pairs, between which everything is whole, as blocks see it (`axonn_tp.plan.search.replay.Related`)."""

    def __init__(self, shadow: Shadow, run: Run) -> None:
        self._shadow, self._run = shadow, run

    def part(self, got: Tensor, whole: Tensor) -> Hashable:
        return ("whole",) if equal(got, whole) else None

    def entering(self, tensor: Tensor, part: Hashable) -> Tensor:
        return tensor

    def answer(self, whole: Tensor, part: Hashable) -> Tensor:
        leaf = whole.detach().clone().requires_grad_(whole.requires_grad)
        return leaf.clone()

    def repeated(self, first: str, name: str, calls: Mapping[str, int]) -> None:
        for inner, number in calls.items():
            layer = f"{name}.{inner}"
            if layer in self._run.inputs:
                self._shadow.called(layer, number)
