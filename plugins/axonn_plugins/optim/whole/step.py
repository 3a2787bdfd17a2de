"""The step of all parameters whose optimizer looks at them whole."""

from __future__ import annotations

import copy
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from axonn_plugins.optim.state import MASTER, WHOLE
from axonn_plugins.optim.store import Bucket, Entry, Segment, Store
from axonn_plugins.optim.whole.exchange import Exchange, Wanted
from axonn_plugins.optim.whole.newton_schulz import Iteration, orthogonalise
from axonn_plugins.optim.whole.plan import Work, deal, panels
from axonn_plugins.optim.whole.rules import Held, Known, Rule
from axonn_plugins.optim.whole.spread import Cut, Share, Spread
from axonn_tp import Mesh, layout_of

Chunk = list["_Matrix"]


class _Matrix:
    """A parameter, and where it is.

    Attributes:
        entry: the parameter's.
        store: with its gradient.
        segment: what this rank holds the state of; None: nothing.
        spread: what all ranks hold.
        rule: how it is stepped.
        known: of its state.
        owner: place in its family of the rank that has it whole; None: each has a panel, or all of it.
    """

    def __init__(self, entry: Entry, store: Store, bucket: Bucket, segment: Segment | None, mesh: Mesh, rule: Rule):
        layout = layout_of(entry.parameter)
        share = (
            Share(entry.start - bucket.begin, (bucket.end - bucket.begin) // bucket.ranks) if bucket.sharded else None
        )
        self.entry, self.store, self.segment, self.rule = entry, store, segment, rule
        self.spread = Spread(layout, mesh.over(layout.grid).grid, share)
        self.known = Known()
        self.owner: int | None = None

    @property
    def dtype(self) -> torch.dtype:
        """In which it is updated."""
        return torch.promote_types(self.store.dtype, torch.float32)

    def work(self, iteration: Iteration, rank: int) -> Work:
        """The matrices that its orthogonalisation is made of, and their cost on a rank."""
        shape, family = self.spread.shape, len(self.spread.family(rank))
        rows, columns = (shape[0], self.spread.elements // shape[0]) if len(shape) != 3 else shape[1:]
        exact = torch.finfo(iteration.dtype).eps <= torch.finfo(self.dtype).eps
        count = self.spread.elements // (rows * columns) * iteration.heads
        divisible = exact and len(shape) == 2 and count == 1 and family == self.spread.grid.world
        size = iteration.dtype.itemsize
        return Work(rows // iteration.heads, columns, iteration.steps, size, count, divisible, family)


class WholeStep:
    """Steps matrices of which ranks hold parts.

    Args:
        stores: with their gradients and states.
        rules: by number of the parameter group; other groups are stepped elsewhere.
        options: of all parameter groups.
        mesh: how parameters lie.
        chunk_bytes: of matrices that travel in one call, as far as a rank has them whole.

    Raises:
        ValueError: a parameter is pruned.
    """

    def __init__(
        self,
        stores: list[Store],
        rules: Mapping[int, Rule],
        options: Sequence[Mapping[str, Any]],
        mesh: Mesh,
        chunk_bytes: int,
    ) -> None:
        self._mesh, self._rules = mesh, rules
        self._rank = mesh.grid.rank(**mesh.coordinates)
        self._group = mesh.group("grid") if mesh.grid.world > 1 else None
        self._matrices = list(_matrices(stores, rules, mesh))
        self._deal(options)
        self._chunks = list(self._in_chunks(chunk_bytes))
        self._exchanges: dict[tuple[_Matrix, ...], Exchange] = {}

    def _deal(self, options: Sequence[Mapping[str, Any]]) -> None:
        found, works = [], []
        for matrix in self._matrices:
            iteration = matrix.rule.iteration(options[matrix.entry.group], matrix.entry.parameter, matrix.spread.shape)
            if iteration is not None:
                found.append(matrix)
                works.append(matrix.work(iteration, self._rank))
        for matrix, owner in zip(found, deal(works).owners, strict=True):
            matrix.owner = owner

    def _in_chunks(self, most: int) -> Iterator[Chunk]:
        filling: dict[Any, Chunk] = {}
        for matrix in self._matrices:
            kind = matrix.entry.group, matrix.dtype
            chunk = filling.setdefault(kind, [])
            chunk.append(matrix)
            held = sum(other.spread.elements for other in chunk) * matrix.dtype.itemsize
            if held >= most * (1 if matrix.rule.everywhere else matrix.spread.grid.world):
                yield filling.pop(kind)
        yield from filling.values()

    def step(self, inner: torch.optim.Optimizer, factor: Tensor | None) -> None:
        """Update what has a gradient; every rank of the mesh calls it.

        Args:
            inner: with the options of the groups and, by segments' weights, the states.
            factor: by which gradients are multiplied; None: by nothing.
        """
        came, here = self._arrived()
        changed: dict[int, dict[str, Any]] = {}
        for chunk in self._chunks:
            chunk = [matrix for matrix in chunk if matrix in came]
            if chunk:
                group, rule = chunk[0].entry.group, chunk[0].rule
                held = [self._held(matrix, inner, factor) for matrix in chunk]
                held = [one if matrix in here else _copied(one) for matrix, one in zip(chunk, held, strict=True)]
                self._step(chunk, held, inner.param_groups[group])
                for matrix, one in zip(chunk, held, strict=True):
                    if matrix in here:
                        self._keep(matrix, one, inner)
                changed[group] = getattr(rule, "after", {})
        for group, options in changed.items():
            inner.param_groups[group].update({key: value for key, value in options.items() if key != "params"})

    def _arrived(self) -> tuple[set[_Matrix], set[_Matrix]]:
        """The matrices of which any rank has a gradient, and those of which one does that has the same as this rank: experts have homes."""
        places = [matrix.spread.home(self._rank) for matrix in self._matrices]
        flags = [[0.0] * homes for _, homes in places]
        for matrix, row, (home, _) in zip(self._matrices, flags, places, strict=True):
            row[home] = float(matrix.entry.arrived)
        arrived = torch.tensor([flag for row in flags for flag in row], device=self._mesh.device)
        if self._group is not None:
            dist.all_reduce(arrived, dist.ReduceOp.MAX, group=self._group)
        rows = [row.tolist() for row in arrived.split([homes for _, homes in places])]
        told = list(zip(self._matrices, rows, places, strict=True))
        came = {matrix for matrix, row, _ in told if any(row)}
        return came, {matrix for matrix, row, (home, _) in told if row[home]}

    def _step(self, chunk: Chunk, held: list[Held], options: Mapping[str, Any]) -> None:
        rule, found = chunk[0].rule, list[list[Tensor] | None]()
        sent = [rule.send(options, one) for one in held]
        for matrix, one, mine in zip(chunk, held, self._bring(chunk, sent), strict=True):
            if rule.everywhere or matrix.owner is not None:
                found.append(rule.whole(options, one, mine) if mine else None)
            else:
                found.append(self._divided(matrix, options, mine[0] if mine else None))
        if rule.everywhere:
            for matrix, one, results in zip(chunk, held, found, strict=True):
                assert results is not None
                rule.take(options, one, [self._part(matrix, whole) for whole in results])
            return
        like = [vectors[0] for vectors in sent]
        back = self._exchange(chunk).give_back([None if results is None else results[0] for results in found], like)
        for one, part in zip(held, back, strict=True):
            rule.take(options, one, [part])

    def _bring(self, chunk: Chunk, sent: list[list[Tensor]]) -> list[list[Tensor]]:
        """Fetch this rank's cut of each matrix, of all that is sent of it; nothing where it wants none."""
        kinds: dict[torch.dtype, list[tuple[int, int]]] = {}
        for number, vectors in enumerate(sent):
            for place, vector in enumerate(vectors):
                kinds.setdefault(vector.dtype, []).append((number, place))
        mine: list[dict[int, Tensor]] = [{} for _ in chunk]
        for members in kinds.values():
            exchange = self._exchange([chunk[number] for number, _ in members])
            cuts = exchange.bring([sent[number][place] for number, place in members])
            for (number, place), cut in zip(members, cuts, strict=True):
                if cut is not None:
                    mine[number][place] = cut
        return [[cuts[place] for place in sorted(cuts)] for cuts in mine]

    def _divided(self, matrix: _Matrix, options: Mapping[str, Any], panel: Tensor | None) -> list[Tensor] | None:
        rows, columns = matrix.spread.shape
        iteration = matrix.rule.iteration(options, matrix.entry.parameter, (rows, columns))
        assert iteration is not None
        found = orthogonalise(panel, (rows, columns), iteration, self._group, self._mesh.device)
        return None if found is None else [found]

    def _exchange(self, chunk: Chunk) -> Exchange:
        key = tuple(chunk)
        if key not in self._exchanges:
            wanted = [self._wanted(matrix) for matrix in chunk]
            self._exchanges[key] = Exchange([matrix.spread for matrix in chunk], wanted, self._rank, self._group)
        return self._exchanges[key]

    def _wanted(self, matrix: _Matrix) -> Wanted:
        shape, family = matrix.spread.shape, len(matrix.spread.family(self._rank))
        whole: Cut = tuple(slice(0, size) for size in shape)
        if matrix.rule.everywhere:
            return dict.fromkeys(range(family), whole)
        if matrix.owner is not None:
            return {matrix.owner: whole}
        return panels((shape[0], shape[1]), family)

    def _part(self, matrix: _Matrix, whole: Tensor) -> Tensor:
        begin, end = matrix.spread.span(self._rank)
        part = whole.new_zeros(end - begin)
        for region in matrix.spread.regions(self._rank):
            region.view(part).copy_(whole[region.cut])
        return part

    # What this rank holds

    def _held(self, matrix: _Matrix, inner: torch.optim.Optimizer, factor: Tensor | None) -> Held:
        entry, store, segment = matrix.entry, matrix.store, matrix.segment
        device, shape = entry.parameter.device, matrix.spread.shape
        if segment is None:
            nothing = torch.zeros(0, dtype=matrix.dtype, device=device)
            state = {key: nothing.to(dtype) for key, dtype in matrix.known.along.items()}
            return Held(entry.parameter, shape, nothing, nothing, matrix.known, state)
        weights = segment.weights.to(device) if store.master is not None else _of(entry, segment)
        gradient = store.gradient[segment.gradient : segment.gradient + segment.length].to(matrix.dtype)
        gradient = gradient if entry.arrived else torch.zeros_like(gradient)
        gradient = gradient if factor is None else gradient * factor.to(gradient)
        kept = inner.state.get(segment.weights, {})
        state = {key: kept[key].to(device) for key in matrix.known.along}
        return Held(entry.parameter, shape, weights, gradient, matrix.known, state)

    def _keep(self, matrix: _Matrix, held: Held, inner: torch.optim.Optimizer) -> None:
        entry, store, segment = matrix.entry, matrix.store, matrix.segment
        if segment is None:
            return
        if store.master is not None:
            segment.weights.copy_(held.weights)
            entry.write(held.weights.to(store.dtype), segment.begin)
        kept = inner.state[segment.weights]
        for key, value in held.state.items():
            if store.host:
                kept[key] = store.state_of(key, segment, value.dtype).copy_(value)
            else:
                kept[key] = value
        beside = {key: value for key, value in held.known.values.items() if isinstance(value, Tensor) and value.dim()}
        kept.update({key: value for key, value in held.known.values.items() if key not in beside})
        if beside:
            kept[WHOLE] = beside

    def take_up(self, read: Mapping[Entry, Mapping[str, Any]]) -> None:
        """Know what of a state that was read there is, on ranks that hold nothing of it too."""
        for matrix in self._matrices:
            vectors = {key: isinstance(value, Tensor) and value.dim() == 1 for key, value in read[matrix.entry].items()}
            along = {key: read[matrix.entry][key].dtype for key, vector in vectors.items() if vector and key != MASTER}
            values = {key: read[matrix.entry][key] for key, vector in vectors.items() if not vector}
            device = matrix.entry.parameter.device
            beside = {key: value.to(device, copy=True) for key, value in values.pop(WHOLE, {}).items()}
            matrix.known = Known(along, values | beside)

    def forget(self, entries: Container[Entry]) -> None:
        """Know nothing of these parameters' states any more, which are thrown away; every rank calls it."""
        for matrix in self._matrices:
            if matrix.entry in entries:
                matrix.known = Known()

    def go_on_from(self, other: WholeStep) -> None:
        """Know what the step of the same parameters knew before they were laid out anew."""
        known = {matrix.entry: matrix.known for matrix in other._matrices}
        for matrix in self._matrices:
            matrix.known = known[matrix.entry]


def _copied(held: Held) -> Held:
    """A copy to be stepped in vain, where ranks with another home's gradient need this one at their calls."""
    state = {key: value.clone() for key, value in held.state.items()}
    return replace(held, weights=held.weights.clone(), known=copy.deepcopy(held.known), state=state)


def _of(entry: Entry, segment: Segment) -> Tensor:
    return entry.flat[segment.begin : segment.begin + segment.length]


def _matrices(stores: list[Store], rules: Mapping[int, Rule], mesh: Mesh) -> Iterator[_Matrix]:
    for store in stores:
        segments = {segment.entry: segment for segment in store.segments}
        for bucket in store.buckets:
            for entry in bucket.entries:
                if entry.group in rules:
                    if entry.index is not None:
                        raise ValueError(
                            f"{entry.name!r} is pruned, and its optimizer moves a kept weight by what pruned ones' gradients are; use an "
                            "element-wise optimizer, or do not prune it"
                        )
                    yield _Matrix(entry, store, bucket, segments.get(entry), mesh, rules[entry.group])
