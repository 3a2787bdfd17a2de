"""Optimizers that look at whole matrices, on every grid of eight ranks; and what their travels cost, against the formulas."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from axonn_plugins.optim.flat import FlatOptimizer
from axonn_plugins.optim.whole import plan
from axonn_plugins.optim.whole.exchange import Exchange
from axonn_plugins.optim.whole.newton_schulz import Iteration
from axonn_plugins.optim.whole.plan import Work, deal, flops, panels, sum_bytes
from axonn_plugins.optim.whole.rules import AsItIs, Muon
from axonn_plugins.optim.whole.spread import Share, Spread
from axonn_tp import Grid, Mesh, layout_of, parallelize, sum_ranks
from axonn_tp.comm.optimizer_kinds import depends_on_other_parameters, depends_on_others
from axonn_tp.grid.layout import Layout
from axonn_tp.grid.mesh import factorisations
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough

RANKS, STEPS, FORGOTTEN = 8, 4, 2  # before which step states are thrown away
SOME = [Grid(2, 2, 2), Grid(1, 2, 2, 2), Grid(2, 1, 1, 4)]
"""Of the grids of eight ranks: each axis in two."""


class Net(nn.Module):
    """A tall matrix and a wide one that are split, and one of odd sizes; 24 * 40 and the like do not divide by all of z."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(24, 40, bias=False), nn.Linear(40, 8, bias=False)
        self.head = nn.Linear(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.down(torch.tanh(self.up(x))))).square().mean()


class Orthogonal(torch.optim.Optimizer):
    """A script's own Muon, which iterates in the weights' type, and keeps a vector a matrix beside; of vectors it is SGD."""

    def __init__(self, params: Any, lr: float = 0.02) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9, "nesterov": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.dim() == 1:
                    parameter.sub_(group["lr"] * parameter.grad)
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {
                        "momentum_buffer": torch.zeros_like(parameter),
                        "rows": parameter.new_zeros(len(parameter)),
                    }
                state["rows"] += parameter.grad.square().sum(1)
                buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - group["momentum"])
                found = iterated(parameter.grad.lerp(buffer, group["momentum"]))
                parameter.sub_(group["lr"] * found)


def iterated(matrix: Tensor) -> Tensor:
    """Newton–Schulz, as Jordan et al. write it."""
    x = matrix.t() if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.t() if matrix.shape[0] > matrix.shape[1] else x


class ByRule(Orthogonal):
    """The same, of which the suite knows what is whole."""

    def rule_of(self, options: Any) -> Muon:
        return InFull()


class InFull(Muon):
    def iteration(self, options: Any, parameter: nn.Parameter, shape: tuple[int, ...]) -> Iteration:
        return Iteration((3.4445, -4.7750, 2.0315), 5, 1e-7, torch.float64, added=True)

    def send(self, options: Any, held: Any) -> list[Tensor]:
        buffer = held.state_of("momentum_buffer", held.gradient.dtype).lerp_(held.gradient, 1 - options["momentum"])
        return [held.gradient.lerp(buffer, options["momentum"])]

    def whole(self, options: Any, held: Any, sent: list[Tensor]) -> list[Tensor]:
        return [iterated(sent[0])]

    def take(self, options: Any, held: Any, parts: list[Tensor]) -> None:
        held.weights.sub_(options["lr"] * parts[0])


Factory = Callable[[Any], torch.optim.Optimizer]
muon = partial(torch.optim.Muon, lr=0.02)
OWN: dict[str, tuple[Factory, float]] = {
    "as it is": (Orthogonal, 1.0),
    "by owners": (ByRule, math.inf),
    "by panels": (ByRule, 0.0),
}
"""How a script's own optimizer is stepped, and how many operations a byte is worth then."""


def model() -> Net:
    torch.manual_seed(1)
    return Net().double()


def batch(step: int) -> Tensor:
    return torch.randn(16, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def serial(factory: Factory, steps: int) -> dict[str, Tensor]:
    net = model()
    optimizer = factory([{"params": list(net.parameters())}])
    for step in range(steps):
        if step == FORGOTTEN:
            optimizer.state.clear()
        net(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


def apart(mesh: Mesh, stage: int, factory: Factory, wanted: dict[str, Tensor], steps: int) -> tuple[float, bool]:
    """The largest difference from the serial weights; and whether each step sent what the formulas say."""
    net = model()
    parallelize(net, mesh, {"up": "normal", "down": "transposed"})
    optimizer = FlatOptimizer(
        factory, net, group=partial(sum_ranks, mesh=mesh), stage=stage, mesh=mesh, norm=None, bucket_bytes=2**20
    )
    sent, exact = Counted(), True
    for step in range(steps):
        if step == FORGOTTEN:
            optimizer.state.clear()
        net(mesh.shard_batch(batch(step))).backward()
        optimizer.reducer.finish()
        with sent:
            assert optimizer._whole is not None
            optimizer.step()
        exact &= sent.take() == expected(optimizer, mesh, first=step in (0, FORGOTTEN))
    optimizer.release()
    differences = [
        (parameter.detach() - layout_of(parameter).shard(wanted[name], mesh.grid, mesh.coordinates)).abs().max().item()
        for name, parameter in net.named_parameters()
    ]
    return max(differences), exact


class Counted:
    """Bytes that this rank gives to others by all-to-all, and those of matrices that are summed."""

    def __init__(self) -> None:
        self._bytes = [0, 0]

    def take(self) -> list[int]:
        found, self._bytes = self._bytes, [0, 0]
        return found

    def __enter__(self) -> None:
        swap, add = self._real = dist.all_to_all_single, dist.all_reduce

        def all_to_all_single(into: Tensor, flat: Tensor, out: list[int], to: list[int], group: Any) -> Any:
            others = sum(to) - to[dist.get_rank(group)]
            self._bytes[0] += others * flat.element_size()
            return swap(into, flat, out, to, group=group)

        def all_reduce(tensor: Tensor, *rest: Any, **keywords: Any) -> Any:
            self._bytes[1] += tensor.nbytes if tensor.dim() == 2 else 0
            return add(tensor, *rest, **keywords)

        dist.all_to_all_single, dist.all_reduce = all_to_all_single, all_reduce  # type: ignore[assignment]

    def __exit__(self, *_: Any) -> None:
        dist.all_to_all_single, dist.all_reduce = self._real


def expected(optimizer: FlatOptimizer, mesh: Mesh, first: bool) -> list[int]:
    """From the places of elements alone: what a rank has that another wants, and back."""
    assert optimizer._whole is not None
    rank, total, summed = mesh.grid.rank(**mesh.coordinates), 0, 0
    for matrix in optimizer._whole._matrices:
        spread, shape = matrix.spread, matrix.spread.shape
        whole = tuple(slice(0, size) for size in shape)
        if isinstance(matrix.rule, AsItIs):
            # Weights, gradient and, after the first step, momentum; to all ranks that share no replica's parts.
            wanted, vectors, back = dict.fromkeys(range(RANKS), whole), 2 if first else 3, 0
        elif matrix.owner is not None:
            wanted, vectors, back = {matrix.owner: whole}, 1, 1
        else:
            wanted, vectors, back = panels((shape[0], shape[1]), RANKS), 1, 1
            summed += 5 * min(shape) ** 2 * 8
        size = 2 if type(matrix.rule) is Muon else 8
        one = Exchange([spread], [wanted], rank, None)
        total += size * (vectors * one.sent(False) + back * one.sent(True))
    return [total, summed]


def everything(grids: list[Grid]) -> dict[str, tuple[float, bool]]:
    found = {}
    of_torch, own = serial(muon, STEPS), serial(Orthogonal, 3)
    for number, mesh in enumerate(meshes(grids)):
        found[f"torch's Muon {mesh.grid}"] = apart(mesh, number % 3, muon, of_torch, STEPS)
        name, (factory, plan.FLOPS_PER_BYTE) = list(OWN.items())[number % 3]
        found[f"{name} {mesh.grid}"] = apart(mesh, number % 2, factory, own, 3)
    return found


@pytest.mark.parametrize(
    "grids", [SOME, thorough([grid for grid in factorisations(RANKS) if grid not in SOME])], ids=["some", "rest"]
)
def test_every_grid_of_eight(grids: list[Grid]) -> None:
    """Weights after four steps are the serial optimizer's, by whichever way; and each rank sends the bytes that were counted."""
    for rank in run_ranks(everything, RANKS, grids):
        assert {name: one for name, one in rank.items() if one[0] > 1e-9 or not one[1]} == {}


class Wide(Net):
    """With a pair that is pruned, in some of its shards more than in others."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.back = nn.Linear(24, 40, bias=False), nn.Linear(40, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.down(torch.tanh(self.up(x)))) + self.back(torch.tanh(self.gate(x)))
        return self.head(wide).square().mean()

    def groups(self) -> list[dict[str, Any]]:
        named = list(self.named_parameters())
        return [
            {"params": [pair for pair in named if (pair[0].split(".")[0] in PRUNED) != whole], "whole": whole}
            for whole in (False, True)
        ]


PRUNED = ("gate", "back")


class Mixed(Orthogonal):
    """A script's own that is Muon for some groups, and for others SGD."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)

    def rule_of(self, options: Any) -> Muon | None:
        return InFull() if options["whole"] else None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        for group in groups:
            for p in group["params"] if not group["whole"] else ():
                if p.grad is not None:
                    p.sub_(group["lr"] * p.grad)
        self.param_groups = [group for group in groups if group["whole"]]
        super().step()
        self.param_groups = groups


def wide() -> tuple[Wide, dict[str, Tensor]]:
    torch.manual_seed(2)
    net, masks = Wide().double(), {}
    for name, parameter in net.named_parameters():
        if name.split(".")[0] in PRUNED:
            dense = torch.zeros_like(parameter)
            dense[: len(dense) // 2, : dense.shape[1] // 2] = 0.9
            masks[name] = torch.rand_like(parameter) >= dense
    return net, masks


def pruned_beside(grids: list[Grid]) -> dict[str, float]:
    net, masks = wide()
    groups = [{**group, "params": [p for _, p in group["params"]]} for group in net.groups()]
    optimizer, parameters = Mixed(groups), dict(net.named_parameters())
    for step in range(3):
        for name, mask in masks.items():
            parameters[name].data.mul_(mask)
        net(batch(step)).backward()
        for name, mask in masks.items():
            parameters[name].grad.mul_(mask)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    found = {}
    for mesh in meshes(grids):
        for stage, room in product((0, 1, 2), (2**20, 8 * 300)):
            apart_, _ = wide()
            parallelize(apart_, mesh, {"up": "normal", "down": "transposed", "gate": "normal", "back": "transposed"})
            lie = {name: layout_of(p) for name, p in apart_.named_parameters()}
            mine = {name: lie[name].shard(mask, mesh.grid, mesh.coordinates) for name, mask in masks.items()}
            ours = samo.Optimizer(
                Mixed,
                apart_.groups(),
                mine,
                group=partial(sum_ranks, mesh=mesh),
                stage=stage,
                mesh=mesh,
                bucket_bytes=room,
            )
            for step in range(3):
                apart_(mesh.shard_batch(batch(step))).backward()
                ours.step()
            ours.release()
            found[f"{mesh.grid} stage {stage} {room}"] = max(
                (p.detach() - lie[name].shard(parameters[name].detach(), mesh.grid, mesh.coordinates))
                .abs()
                .max()
                .item()
                for name, p in apart_.named_parameters()
            )
    return found


def test_pruned_beside_whole() -> None:
    """Shards of what is pruned beside are of other sizes on other ranks of x, y and z, which move no matrix to another place."""
    for rank in run_ranks(pruned_beside, RANKS // 2, [Grid(2, 1, 2), Grid(2, 1, 1, 2)]):
        assert {name: one for name, one in rank.items() if not one <= 1e-10} == {}


SPREADS = {
    "split over all": Spread(Layout((24, 40), ((0, "x"), (1, "y")), over_z=True), Grid(2, 2, 2, 1)),
    "z does not divide": Spread(Layout((5, 7), over_z=True), Grid(1, 1, 4, 2)),
    "transposed, fused": Spread(Layout((12, 8), ((0, "x"),), parts=3, transposed=True), Grid(2, 2, 1, 2)),
    "shared": Spread(Layout((6, 10), ((1, "x"),), over_z=True), Grid(2, 1, 2, 2), Share(3, 11)),
    "padded rows": Spread(Layout((11, 6), ((0, "x"),)), Grid(4, 1, 1, 2)),
}


@pytest.mark.parametrize("name", SPREADS)
def test_totals(name: str) -> None:
    """To an owner go the elements that it has not; from it to all ranks what they hold, its own left out."""
    spread = SPREADS[name]
    whole, world = tuple(slice(0, size) for size in spread.shape), spread.grid.world
    held = [sum(math.prod(region.sizes) for region in spread.regions(rank)) for rank in range(world)]
    copies = world // len(spread.sources(0))
    assert sum(held) == copies * spread.elements
    for owner in range(world):
        ranks = [Exchange([spread], [{owner: whole}], rank, None) for rank in range(world)]
        assert sum(one.sent(False) for one in ranks) == spread.elements - held[owner]
        assert [one.sent(True) for one in ranks] == [
            sum(held) - held[owner] if rank == owner else 0 for rank in range(world)
        ]


def swapped(exchanges: list[Exchange], parts: list[Tensor]) -> Iterator[Tensor | None]:
    """`bring` on all ranks in one process."""
    for target, exchange in enumerate(exchanges):
        cut = exchange.cut(0, target)
        made = None if cut is None else parts[0].new_zeros([part.stop - part.start for part in cut])
        for source, other in enumerate(exchanges):
            for _, region in other._message(source, target, False):
                assert made is not None and cut is not None
                place = tuple(
                    slice(a - c.start, a - c.start + n)
                    for a, c, n in zip(region.offsets, cut, region.sizes, strict=True)
                )
                made[place] = region.view(parts[source])
        yield made


@pytest.mark.parametrize("name", SPREADS)
def test_panels_come_together(name: str) -> None:
    spread = SPREADS[name]
    world, serial_one = spread.grid.world, torch.randn(spread.shape)
    locals_ = [
        spread.layout.shard(serial_one, spread.grid, spread.grid.coordinates(rank)).reshape(-1) for rank in range(world)
    ]
    parts = [local[slice(*spread.span(rank))] for rank, local in enumerate(locals_)]
    wanted = panels((spread.shape[0], spread.shape[1]), world)
    found = swapped([Exchange([spread], [wanted], rank, None) for rank in range(world)], parts)
    for place, panel in enumerate(found):
        assert (panel is None) == (place not in wanted)
        assert panel is None or torch.equal(panel, serial_one[wanted[place]])


def test_who_does_what() -> None:
    """Many matrices are dealt out evenly; one that is large beside all others is divided, where rounding allows and sums cost less."""
    alike = [Work(1024, 4096, 5, 4, family=8)] * 16
    dealt = deal(alike)
    assert sorted(owner for owner in dealt.owners if owner is not None) == sorted(2 * list(range(8)))
    assert set(dealt.flops) == {2.0 * flops(alike[0])}
    large = Work(1024, 2**17, 5, 4, divisible=True, family=8)
    assert deal([large, *alike[:8]]).owners[0] is None
    assert flops(large, 8) < flops(large) / 6 and sum_bytes(large, 8) == 5 * 2 * 7 / 8 * 1024**2 * 4
    assert deal([Work(1024, 2**17, 5, 2, family=8), *alike[:8]]).owners[0] is not None
    assert deal([Work(64, 96, 5, 8, divisible=True, family=8)]).owners == (0,)


class Signs(torch.optim.Optimizer):
    """A script's own that works element by element."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.direction(p), alpha=group["lr"])

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        return p.grad.sign()


class Bounded(Signs):
    """Adam whose step is bounded by how a tensor's gradients compare with what they were, as StableAdamW has it."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        square = self.state[p].setdefault("square", p.grad.square())
        square.lerp_(p.grad.square(), 0.01)
        most = (p.grad.square() / square).mean().sqrt().clamp(min=1)
        return p.grad / square.sqrt() / most


class Projected(Signs):
    """Whose step is of low rank, as GaLore's and APOLLO's; vectors are an error to it, and it is made with a seed for each parameter."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, lr)
        self.state.update({p: {"seed": number} for number, p in enumerate(self.param_groups[0]["params"])})

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        first = torch.linalg.svd(p.grad, full_matrices=False)[0][:, self.state[p]["seed"] :][:, :1]
        return first @ (first.T @ p.grad)


def _note(calls: list[Any], *given: Any) -> None:
    calls.append(given)


def test_an_optimizer_is_tried_where_its_name_says_nothing() -> None:
    for kind, depends in ((Bounded, True), (torch.optim.Adafactor, True), (Signs, False), (torch.optim.AdamW, False)):
        parameters = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(5))]
        optimizer, calls = kind(parameters, lr=0.02), list[Any]()
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0)  # puts a function in the place of `step`
        optimizer.register_step_post_hook(partial(_note, calls))
        assert depends_on_others(optimizer) is depends, kind
        assert not calls and not optimizer.state and optimizer.param_groups[0]["params"] == parameters
        assert all(bool((parameter == 1).all()) for parameter in parameters)


class Counting(Signs):
    """Whose rate falls by the number of its calls."""

    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls += 1
        super().step()

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return super().direction(p) / self.calls


class Remembering(Signs):
    """Which has its momentum in a dictionary of its own."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, lr)
        self.sums: dict[torch.Tensor, torch.Tensor] = {}

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return self.sums.setdefault(p, torch.zeros_like(p)).add_(super().direction(p))


class Together(Signs):
    """Which takes the norm of all gradients into each step, as some LAMBs clip."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        assert p.grad is not None
        squares = [q.grad.square().sum() for group in self.param_groups for q in group["params"]]
        return p.grad / torch.stack(squares).sum().sqrt()


class Noisy(Signs):
    """Which adds to each step what it draws."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return super().direction(p) + torch.randn_like(p)


class Around(Signs):
    """Which leaves the step to another optimizer."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, lr)
        self.inner = torch.optim.SGD([p for group in self.param_groups for p in group["params"]], lr)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize("kind", [Counting, Remembering, Together, Noisy, Around])
def test_an_optimizer_that_cannot_step_parameters_one_after_another_is_refused(kind: Any) -> None:
    FlatOptimizer(Signs, model()).release()
    said = "steps by an optimizer that it holds (SGD)" if kind is Around else "cannot step parameters one after another"
    with pytest.raises(ValueError, match=re.escape(f"{kind.__name__} {said}")):
        FlatOptimizer(kind, model())


def test_an_optimizer_is_tried_beside_another_parameter() -> None:
    for kind, depends in ((Together, True), (Signs, False), (Noisy, False), (Counting, False), (Projected, False)):
        given = [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(2, 5))]
        optimizer = kind(given, lr=0.02)
        held, seed = dict(optimizer.state), torch.get_rng_state()
        assert depends_on_other_parameters(optimizer) is depends, kind
        assert optimizer.state == held and all(bool((one == 1).all()) for one in given)
        assert torch.equal(torch.get_rng_state(), seed)


def test_a_step_that_vectors_are_an_error_to_is_one_of_whole_matrices() -> None:
    assert depends_on_others(Projected([nn.Parameter(torch.ones(3, 4))]))


class Switching(Signs):
    """Which evaluates other weights, as schedule-free optimizers do."""

    def train(self) -> None:
        """Nothing here."""

    eval = train


def test_an_optimizer_that_evaluates_other_weights_is_refused() -> None:
    with pytest.raises(
        ValueError, match=re.escape("Switching puts other weights into parameters to evaluate, by its train()")
    ):
        FlatOptimizer(Switching, model())


def test_a_trial_makes_no_step_of_another_optimizer() -> None:
    weights = nn.Parameter(torch.ones(3, 4))
    weights.grad = torch.ones(3, 4)
    around = Around([weights])
    assert not depends_on_others(around) and bool((weights == 1).all())
    around.inner = Bounded([weights])  # type: ignore[assignment]
    assert depends_on_others(around) and bool((weights == 1).all())


class BySides(Signs):
    """Which makes the step of a tall matrix longer."""

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        return super().direction(p) * (max(1, p.shape[0] / p.shape[1]) ** 0.5 if p.dim() > 1 else 1)


def test_a_step_by_the_sides_of_a_matrix_is_one_of_whole_matrices() -> None:
    assert not depends_on_others(Counting([nn.Parameter(torch.ones(3, 4))]))  # whose shards are stepped in one call
    assert depends_on_others(BySides([nn.Parameter(torch.ones(3, 4))]))
