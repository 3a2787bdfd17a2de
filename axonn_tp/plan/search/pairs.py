"""One pair of linears on trial: how its layers are to be read so that every share computes what the whole does.

The smallest module around the pair is run as each of 2, 3, 5 or 7 shares, or of the fewest that divide its widths
(`axonn_tp.plan.search.shadow`), with one, two or three matrices side by side in its fused layers and with the attributes
counted locally that could count what is split; the first reading under which all shares are right is taken, and refined
to the finest cut that works.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from axonn_tp.grid.mesh import Grid
from axonn_tp.plan.counted_attributes import counting_attributes, divisors, read_count
from axonn_tp.plan.own_faults import failing_line, let_out
from axonn_tp.plan.report import ALL_FEATURES, collapse
from axonn_tp.plan.rules import LayerPlan, linear_split
from axonn_tp.plan.search.runs import Cut, Local, Mismatch, Run
from axonn_tp.plan.search.shadow import Shadow

_PRIMES = (2, 3, 5, 7)


@dataclass
class Group:
    """Normal layers and the transposed one they end in, and how they can be split.

    Attributes:
        normal: names of the normal layers.
        transposed: name of the transposed layer.
        parts: of each normal layer.
        heads: units that are never cut; None where every feature may stand alone.
        counts: attributes of the normal layers' module.
        source: who says so, for the report.
    """

    normal: tuple[str, ...]
    transposed: str
    parts: tuple[int, ...] = ()
    heads: int | None = None
    counts: tuple[str, ...] = ()
    source: str = "traced and simulated"

    @property
    def parent(self) -> str:
        """The module that holds the normal layers."""
        return self.normal[0].rpartition(".")[0]

    def cuts(self, share: int, shares: int) -> dict[str, Cut]:
        """The group's layers as one share."""
        parts = self.parts or (1,) * len(self.normal)
        cuts = {name: Cut(share, shares, part) for name, part in zip(self.normal, parts, strict=True)}
        return {**cuts, self.transposed: Cut(share, shares, None)}

    def local(self, shares: int) -> list[Local]:
        """The group's counts in one share."""
        return [Local(self.parent, self.counts, shares)] if self.counts else []

    def divides(self, shares: int) -> bool:
        """True if this many shares cut no head."""
        return self.heads is None or self.heads % shares == 0


@dataclass
class Traced:
    """One module of the shadow that could be run on its own, and its whole run."""

    name: str
    run: Run
    groups: list[Group] = field(default_factory=list)


class Judge:
    """Decides on pairs.

    Args:
        shadow: the model's.
        sizes: (in, out) features of the layers that may be split, by name.
        grid: the grid that the pairs are for.
        reasons: where it writes, by layer, why there is no pair.
        arguments: widths of arguments may be counts (`axonn_tp.layers.as_share`).
    """

    def __init__(
        self,
        shadow: Shadow | None,
        sizes: Mapping[str, tuple[int, int]],
        grid: Grid,
        reasons: dict[str, str],
        arguments: bool,
    ) -> None:
        self.shadow, self.sizes, self.grid, self.reasons, self._arguments = shadow, sizes, grid, reasons, arguments

    def decide(self, group: Group, traced: Traced) -> Group | str:
        """Parts, counts and heads by trial on the smallest module around the group, or why there are none."""
        assert self.shadow is not None
        name = self._around(group, traced)
        run = traced.run
        if name != traced.name:
            try:
                run = self.shadow.whole(name, run.arguments[name])
            except Exception as error:
                let_out(error)
                name = traced.name  # alone it is not called as it was, as with a cache that has been filled since
        widths = {*(self.sizes[n][1] for n in group.normal), self.sizes[group.transposed][0]}
        common = math.gcd(*widths)
        if common == 1:
            return f"{' and '.join(map(str, sorted(widths)))} features do not divide by one gx above 1"
        probes = [p for p in _PRIMES if common % p == 0] or [min(d for d in divisors(common) if d > 1)]
        problem: Exception | None = None
        for shares in probes:
            for trial in self._variants(group):
                failed = self._fails(trial, name, run, shares)
                if failed is None:
                    self._fewest_counts(trial, name, run, shares)
                    return self._finest(trial, name, run, common)
                problem = problem or failed
        return f"code up to {collapse(group.transposed)} {ALL_FEATURES} ({collapse(on_a_share(problem))})"

    def _around(self, group: Group, traced: Traced) -> str:
        """The smallest module that holds the whole group and was called."""
        paths = [name.split(".") for name in (*group.normal, group.transposed)]
        common = []
        for parts in zip(*paths, strict=False):
            if len(set(parts)) > 1:
                break
            common.append(parts[0])
        while common and (".".join(common) not in traced.run.arguments):
            common.pop()
        name = ".".join(common)
        return name if len(name) > len(traced.name) else traced.name

    def _variants(self, group: Group) -> Iterator[Group]:
        """Ways to read the group's layers, the likeliest first."""
        assert self.shadow is not None
        contracted = self.sizes[group.transposed][0]
        ratios = [self.sizes[name][1] // contracted for name in group.normal]
        parts = [tuple(r if r in (2, 3) else 1 for r in ratios), (1,) * len(ratios)]
        widths = {size for name in (*group.normal, group.transposed) for size in self.sizes[name]}
        one_parent = len({name.rpartition(".")[0] for name in group.normal}) == 1
        names = counting_attributes(self.shadow.modules[group.parent], widths, self._arguments) if one_parent else [()]
        for counts in names:
            for part in dict.fromkeys(parts):
                yield Group(group.normal, group.transposed, part, None, counts)

    def _fails(self, group: Group, name: str, run: Run, shares: int, every: bool = True) -> Exception | None:
        """The error of a share of the module `name`, if there is one."""
        assert self.shadow is not None
        module = self.shadow.modules[group.parent]
        if any((read_count(module, count) or shares) % shares for count in group.counts):
            return Mismatch(f"its counts do not divide by {shares}")
        for share in range(shares) if every and shares <= 8 else sorted({0, 1, shares // 2, shares - 1}):
            try:
                self.shadow.share(name, run, group.cuts(share, shares), group.local(shares), False)
            except Exception as error:
                let_out(error)
                return error
        return None

    def _fewest_counts(self, group: Group, name: str, run: Run, shares: int) -> None:
        for count in group.counts:
            fewer = Group(
                group.normal, group.transposed, group.parts, None, tuple(c for c in group.counts if c != count)
            )
            if self._fails(fewer, name, run, shares) is None:
                group.counts = fewer.counts

    def _finest(self, group: Group, name: str, run: Run, common: int) -> Group | str:
        """The group with the largest number of shares that works, if that suits the grid."""
        widths = [self.sizes[n][1] // part for n, part in zip(group.normal, group.parts, strict=True)]
        common = math.gcd(common, *widths)
        finest = next(s for s in divisors(common) if s == 1 or self._fails(group, name, run, s, every=False) is None)
        group.heads = None if finest == min(widths) == max(widths) else finest
        return group if self.fits(group) else self.reasons[group.transposed]

    def fits(self, group: Group) -> bool:
        """True if the grid can split the group; `reasons` of its layers say why not."""
        problem = None
        if not group.divides(self.grid.gx):
            problem = f"{group.heads} heads do not divide by gx = {self.grid.gx}"
        layers = [("normal", p, n) for p, n in zip(group.parts, group.normal, strict=True)]
        for kind, parts, name in [*layers, ("transposed", 1, group.transposed)]:
            k, n = self.sizes[name]
            try:
                linear_split(LayerPlan(kind, parts, group.heads if kind == "normal" else None)).check(
                    n, k, self.grid, name
                )
            except ValueError as error:
                problem = problem or str(error).split(";")[0].partition(": ")[2]
        if problem is not None:
            for name in (*group.normal, group.transposed):
                self.reasons[name] = problem
        return problem is None


def short(error: BaseException | None) -> str:
    """An error's words, cut to fit a table."""
    return _cut(str(error) or type(error).__name__)


def on_a_share(error: BaseException | None) -> str:
    """The reason that a share of the model cannot be run: ours in its words, and the line of the model's code that torch stops at."""
    if error is None or isinstance(error, Mismatch) or (found := failing_line(error)) is None:
        return short(error)
    place, code = found
    return _cut(f"{place} is not made for a share: {code}")


def _cut(text: str) -> str:
    text = re.sub(r"\s+", " ", text).strip()
    return text if len(text) <= 120 else text[:117] + "..."
