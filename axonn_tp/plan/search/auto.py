"""Find the pairs of linears that can share a split, for any model: ``parallelize(model, mesh, plan="auto")``.

A pair is a set of *normal* layers whose outputs reach, without passing another linear, one *transposed* layer and
nothing else (q, k, v → proj; gate, up → down). Pairs come from a trace of the model, not from names, and each is
accepted only if a simulation of all shares equals the whole model (`axonn_tp.plan.search.shadow`). The simulation also finds what
the code in between needs: how many matrices lie side by side in a fused layer (`parts`), how finely the features may
be cut (`heads`), and which attributes must count locally (`counts`). Where a model cannot be run here, the pairs that
its authors publish (HF transformers' ``_tp_plan``) are taken at their word. All else is self-contained.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from axonn_tp.grid.mesh import Grid
from axonn_tp.layers.linear_split import features
from axonn_tp.options import Options
from axonn_tp.plan.adapters import refuse_adapters
from axonn_tp.plan.example_inputs import Arguments, as_arguments, guesses, rows
from axonn_tp.plan.own_faults import let_out
from axonn_tp.plan.placement import free_layers, place, readers, refuse_unmade
from axonn_tp.plan.report import AT_TIMES, CHANGES, MIXED, OUTSIDE, Report, collapse, make_report
from axonn_tp.plan.rules import LayerPlan
from axonn_tp.plan.search.conditional import called_at_times
from axonn_tp.plan.search.modes import in_training
from axonn_tp.plan.search.pairs import Group, Judge, Traced, on_a_share, short
from axonn_tp.plan.search.published_pairs import published_pairs
from axonn_tp.plan.search.replay import containing
from axonn_tp.plan.search.runs import Mismatch, Run
from axonn_tp.plan.search.shadow import Shadow
from axonn_tp.plan.search.stream import Shared, split_stream
from axonn_tp.plan.search.twins import twins


def auto_plan(
    model: nn.Module,
    grid: Grid,
    example_inputs: Any = None,
    options: Options | None = None,
    reuse: bool = True,
) -> tuple[dict[str, LayerPlan], Report]:
    """A plan for `model`, and what it says about every layer. Pure: no processes, nothing changes.

    Args:
        model: the serial model, on any device including meta.
        grid: the grid that the plan is for.
        example_inputs: arguments of the model's forward, a tuple or a mapping; small ones do. They are guessed when None.
        options: of the run, for the bytes in the report.
        reuse: simulate blocks that are alike once; without it each of them, which finds the same and takes longer.

    Returns:
        The plan by layer name, and a report; `print` it.

    Raises:
        ValueError: the model has adapters that cannot be split, or lazy layers without a size.
    """
    refuse_unmade(model)
    refuse_adapters(model, grid)
    try:
        return _search(model, grid, example_inputs, options, reuse)
    finally:
        gc.collect()  # graphs that the search left behind in cycles: they would know the weights by their serial shapes


def _search(
    model: nn.Module, grid: Grid, example_inputs: Any, options: Options | None, reuse: bool
) -> tuple[dict[str, LayerPlan], Report]:
    finder = _Finder(model, grid, example_inputs, reuse, not (options and options.compile))
    plan: dict[str, LayerPlan] = {}
    for group in finder.accepted():
        for name, parts in zip(group.normal, group.parts, strict=True):
            plan[name] = LayerPlan("normal", parts, group.heads, group.counts)
        plan[group.transposed] = LayerPlan("transposed")
    _name_inputs(model, plan, finder.tensors)
    stream, told = finder.stream(plan)
    note = " ".join(filter(None, [finder.note, told]))
    plan |= stream | dict.fromkeys(sorted(finder.whole), LayerPlan("replicated"))
    return plan, make_report(model, grid, plan, finder.reasons, note, options)


def _name_inputs(model: nn.Module, plan: dict[str, LayerPlan], tensors: Mapping[str, tuple]) -> None:
    """Say which normal layers read the same tensor, where the plan's own rule would be wrong."""
    presumed = readers(model, plan)
    by_parent: dict[str, list[str]] = {}
    for name in (name for name, layer in plan.items() if layer.kind == "normal" and name in tensors):
        by_parent.setdefault(name.rpartition(".")[0], []).append(name)
    for names in by_parent.values():
        together = {name: tuple(other for other in names if tensors[other] == tensors[name]) for name in names}
        if any(set(presumed.get(name, (name,))) != set(together[name]) for name in names):
            for name in names:
                plan[name] = replace(plan[name], reads=together[name][0].rpartition(".")[2])


class _Finder:
    """The search; `reasons` says by layer what became of it."""

    def __init__(self, model: nn.Module, grid: Grid, example_inputs: Any, reuse: bool, arguments: bool) -> None:
        self.model, self.grid = model, grid
        self.reasons: dict[str, str] = {}
        self.tensors: dict[str, tuple] = {}
        self.whole, self._paired, self.note = set[str](), set[str](), ""
        alone = free_layers(model)
        self.sizes = {name: size for name, m in model.named_modules() if name in alone and (size := features(m))}
        self.free = set(self.sizes)
        self.shadow: Shadow | None = None
        try:
            self.shadow = Shadow(model, reuse)
        except Exception as error:
            let_out(error)
            self.note = f"The model could not be copied for a simulation ({short(error)})."
        self.arguments = None if example_inputs is None else as_arguments(example_inputs)
        self._trials = Judge(self.shadow, self.sizes, grid, self.reasons, arguments)
        self._verdicts: dict[Hashable, Group | str] = {}
        self._whole: Arguments | None = None
        self._uncalled = ""
        self._groups: list[Group] = []

    def accepted(self) -> list[Group]:
        """Groups that are right on this grid, without overlap."""
        found: list[Group] = []
        for traced in self._traced("") if self.shadow else []:
            self._leave_whole(traced)
            candidates = list(self._candidates(traced.run))
            self.tensors.update({name: traced.run.tensors(name) for name in traced.run.inputs})
            users = self.shadow.users(traced.run) if candidates and self.grid.gx * self.grid.gy > 1 else {}  # type: ignore[union-attr]
            traced.run.settle()
            traced.groups = [one for group in candidates if (one := self._judge(group, traced)) is not None]
            found += self._apart(traced, users)
            found += twins(self.model, traced.groups, self.free, self.reasons, partial(self._together, traced))
            self._whole = traced.run.arguments[""] if not traced.name else None
            self._uncalled = min(self.sizes.keys() - traced.run.inputs.keys(), default="")
            traced.run = Run()
        self._groups = list(found)
        taken = {name for group in found for name in (*group.normal, group.transposed)}
        for pair in published_pairs(self.model, self.free, self.sizes):
            known = taken | self.reasons.keys()
            group = Group(
                pair.normal, pair.transposed, (1,) * len(pair.normal), pair.heads, source="its model's tp_plan"
            )
            if not known & {*pair.normal, pair.transposed} and self._trials.fits(group):
                found.append(group)
        self.reasons.update({name: group.source for group in found for name in (*group.normal, group.transposed)})
        return found

    def _leave_whole(self, traced: Traced) -> None:
        """Take away what cannot be split over z, as ranks with other data need not call it."""
        if self.grid.gz > 1:
            assert self.shadow is not None
            once = {name for name, calls in traced.run.inputs.items() if calls}
            found = called_at_times(self.shadow, traced.name, traced.run.arguments[traced.name], once)
            self.whole |= found & self.free
            self.free -= found
            self.reasons.update(dict.fromkeys(found, AT_TIMES))

    def _traced(self, name: str) -> Iterator[Traced]:
        """The whole model's run, or those of the largest modules that can be run on a guess."""
        assert self.shadow is not None
        if name not in self.shadow.modules:  # another name of a module
            return
        module = self.shadow.modules[name]
        inside = [linear for linear in self.shadow.linears if linear.startswith(f"{name}." if name else "")]
        if len(inside) < 2:
            return
        given = self.arguments if not name else None
        tried: list[Arguments] = [given] if given else list(rows(module) if name else guesses(module))
        problem: Exception | None = None
        for arguments in tried:
            try:
                run = self.shadow.whole(name, arguments)
            except Exception as error:
                let_out(error)
                problem = problem or error
                continue
            yield Traced(name, run)
            return
        if not name:
            what = "the example inputs" if given else "guessed inputs"
            self.note = (
                f"The model could not be run on {what} ({short(problem)}); what it holds was looked at piece by piece. "
                "Give example_inputs to see it whole."
            )
        for child, _ in module.named_children():
            yield from self._traced(f"{name}.{child}" if name else child)

    def _candidates(self, run: Run) -> Iterator[Group]:
        """Groups that the flow allows, the largest first, each layer in one."""
        consumers = run.consumers()
        ending: dict[str, list[str]] = {}
        for name, ends in consumers.items():
            end = next(iter(ends), "")
            if len(ends) == 1 and end and end != name and {name, end} <= self.free:
                ending.setdefault(end, []).append(name)
        for end, names in list(ending.items()):
            # Forward would be right, but the gradient of a whole activation would be that of a share.
            others = {name for name, ends in consumers.items() if end in ends} - {*names}
            if others:
                mixed = f"{collapse(end)} reads what {collapse(min(others))} gives, {MIXED}"
                self.reasons.update(dict.fromkeys((*ending.pop(end), end), mixed))
        order = {name: number for number, name in enumerate(run.inputs)}
        weight = {name: math.prod(self.sizes[name]) for name in self.free}
        for end in sorted(
            ending, key=lambda end: (-weight[end] - sum(map(weight.__getitem__, ending[end])), order[end])
        ):
            yield Group(tuple(ending[end]), end)

    def _judge(self, group: Group, traced: Traced) -> Group | None:
        """The group as it can be split here; the same structure is judged once."""
        names = (*group.normal, group.transposed)
        if self._paired & set(names):
            return None
        assert self.shadow is not None
        parent = self.shadow.modules[group.parent]
        numbers = [(key, value) for key, value in vars(parent).items() if isinstance(value, int) and "idx" not in key]
        keys: list[Hashable] = [
            (tuple(map(collapse, names)), tuple(self.sizes[name] for name in names), type(parent), tuple(numbers))
        ]
        block = containing(group.transposed, traced.run.blocks)
        if block is not None and all(name.startswith(f"{block}.") for name in names):
            keys.append((traced.run.blocks[block].likeness, tuple(name[len(block) :] for name in names)))
        verdict = next((self._verdicts[key] for key in keys if key in self._verdicts), None)
        if verdict is None:
            reads = self.shadow.reads
            verdict = self._trials.decide(group, traced)
            if self.shadow.reads != reads:
                # In the trial the block asked for something in which it differs from others.
                traced.run.blocks.clear()
                del keys[1:]
            self._verdicts.update(dict.fromkeys(keys, verdict))
        if isinstance(verdict, str):
            for name in names:
                self.reasons.setdefault(name, verdict)
            return None
        group.parts, group.heads, group.counts = verdict.parts, verdict.heads, verdict.counts
        self._paired.update(names)
        return group

    def _apart(self, traced: Traced, users: Mapping[str, set[str]]) -> list[Group]:
        """The groups that are right together, and in which nothing is used that is used outside of groups, too.

        What a group uses gets a share's gradient on each rank, and what is used outside the whole one: the sum of both is neither.
        """
        while True:
            found = self._confirmed(traced)
            inside = {group.transposed for group in found}
            mixed = {end: name for name, ends in users.items() if ends - inside for end in ends & inside}
            for group in (group for group in found if group.transposed in mixed):
                why = (
                    f"{collapse(group.transposed)} reads what is made of {collapse(mixed[group.transposed])}, {OUTSIDE}"
                )
                self.reasons.update(dict.fromkeys((*group.normal, group.transposed), why))
            traced.groups = [group for group in found if group.transposed not in mixed]
            if not mixed:
                return found

    def _confirmed(self, traced: Traced) -> list[Group]:
        """The groups that, all together, leave the outputs of the traced module as they were."""
        if self._together(traced, traced.groups) is None:
            return traced.groups
        kept: list[Group] = []
        classes: dict[tuple, list[Group]] = {}
        for group in traced.groups:
            classes.setdefault(tuple(map(collapse, (*group.normal, group.transposed))), []).append(group)
        for groups in classes.values():
            problem = self._together(traced, kept + groups)
            if problem is None:
                kept += groups
                continue
            for name in (name for group in groups for name in (*group.normal, group.transposed)):
                self.reasons[name] = f"{CHANGES} ({on_a_share(problem)})"
        return kept

    def _together(self, traced: Traced, groups: list[Group]) -> Exception | None:
        """The first problem of the groups on this grid, in both layouts of activations, and in training where that may be another."""
        assert self.shadow is not None
        problem = self._together_in(traced.name, traced.run, groups)
        if problem is not None or not groups:
            return problem
        with in_training(self.shadow, traced.name, traced.run.arguments[traced.name]) as run:
            problem = None if run is None else self._together_in(traced.name, run, groups)
        return None if problem is None else Mismatch(f"in training: {on_a_share(problem)}")

    def _together_in(self, name: str, run: Run, groups: list[Group]) -> Exception | None:
        assert self.shadow is not None
        for gy in dict.fromkeys((1, self.grid.gy)) if groups else ():
            for rank in self._ranks(groups, self.grid.gx, gy):
                try:
                    self.shadow.share(name, run, rank.cuts, rank.counts, True)
                except Exception as error:
                    let_out(error)
                    return error
        return None

    def _ranks(self, groups: list[Group], gx: int, gy: int, scatter: bool = True) -> list[Shared]:
        """Groups as the ranks of one x-y plane have them, of a large plane some; none where there is one rank."""
        places = [(x, y) for x in range(gx) for y in range(gy)] if gx * gy > 1 else []
        made = []
        for x, y in places if len(places) <= 8 else [*places[:3], *places[-3:]]:
            rank = Shared(x, y, {}, [])
            for group in groups:
                scattered = scatter and group.divides(gx * gy) and self._wide_enough(group, gx * gy)
                shares = gx * gy if scattered else gx
                rank.cuts.update(group.cuts(x * gy + y if scattered else x, shares))
                rank.counts.extend(group.local(shares))
            made.append(rank)
        return made

    def stream(self, plan: Mapping[str, LayerPlan]) -> tuple[dict[str, LayerPlan], str]:
        """Find the split of the residual stream besides the pairs, and a sentence on it for the report."""
        try:
            return self._stream(plan)
        except Exception as error:
            let_out(error)
            return {}, f"The stream between pairs is whole on every rank: {collapse(on_a_share(error))}."

    def _stream(self, plan: Mapping[str, LayerPlan]) -> tuple[dict[str, LayerPlan], str]:
        grid, groups = self.grid, self._groups
        if grid.gx * grid.gy == 1 or not plan:
            return {}, ""
        if self.whole:
            raise Mismatch("layers are called for some inputs only")
        if self._whole is None or len(plan) != sum(len(group.normal) + 1 for group in groups):
            raise Mismatch("the model could not be traced as a whole")
        if self._uncalled:
            raise Mismatch(f"{self._uncalled} is not called on these inputs, and what it gives may come into it")
        assert self.shadow is not None
        if self.shadow.replaced:
            raise Mismatch("a forward was replaced by one that may go other ways than the guessed inputs show")
        widths = {self.sizes[group.transposed][1] for group in groups}
        widths |= {self.sizes[name][0] for group in groups for name in group.normal}
        over_x, over_both = (self._ranks(groups, grid.gx, grid.gy, scatter) for scatter in (False, True))
        found = split_stream(self.model, self.shadow, self._whole, grid, widths, over_x, over_both)
        with in_training(self.shadow, "", self._whole) as run:
            if run is not None and found != split_stream(
                self.model, self.shadow, self._whole, grid, widths, over_x, over_both
            ):
                raise Mismatch("in training another part of it could be split")
        made = found.plan()
        place(self.model, grid, {**plan, **made})
        self.reasons.update(dict.fromkeys(made, "simulated on shares of the stream"))
        return made, found.described(grid)

    def _wide_enough(self, group: Group, shares: int) -> bool:
        return all(self.sizes[n][1] // p % shares == 0 for n, p in zip(group.normal, group.parts, strict=True))
