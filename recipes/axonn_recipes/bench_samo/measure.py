"""The sides, and their times: a copy, steps of compressed and of dense state, and compression within backward."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import samo
from axonn_recipes.bench.rounds import in_turns, seconds
from axonn_recipes.bench_samo.settings import DTYPES, Settings
from axonn_recipes.models.gpt import GPT

OURS, TILES = "samo", "samo, torch tiles"
DENSE, UPCAST = "dense", "dense, gradients upcast"
PLAIN, PRUNED = "dense", "samo"


@dataclass
class Side:
    """A side that is timed.

    Attributes:
        name: shown in the table.
        run: what is timed.
        bytes: that it has to move at least.
        prepare: what is not timed.
        seconds: of each turn.
        compression: seconds of each turn within `samo.Optimizer`'s hooks; only of forward and backward.
    """

    name: str
    run: Callable[[], object]
    bytes: int | None = None
    prepare: Callable[[], object] = field(default=lambda: None)
    seconds: list[float] = field(default_factory=list)
    compression: list[float] = field(default_factory=list)


def steps(settings: Settings) -> tuple[list[Side], Side]:
    """Time the sides' steps in turns; the sides, and the copy.

    Before each, the vector is copied: so no side finds its state in a cache, and the copy meets the same weather.
    """
    torch.manual_seed(settings.seed)
    model = GPT(settings.model).to(settings.device, DTYPES[settings.dtype])
    gradients = [torch.randn_like(parameter) for parameter in model.parameters()]
    sides = [*_dense(model, gradients), *_compressed(settings, model, gradients)]
    vector = torch.ones(settings.copy_bytes // 4, device=settings.device)
    into = torch.empty_like(vector)
    copying = Side("copy", lambda: into.copy_(vector), 2 * vector.nbytes)
    for side in [copying, *sides]:
        side.prepare()
        side.run()
    for _, side in in_turns(sides, settings.rounds):
        side.prepare()
        copying.seconds.append(seconds(copying.run))
        side.seconds.append(seconds(side.run))
    return sides, copying


def _compressed(settings: Settings, model: nn.Module, gradients: list[Tensor]) -> Iterable[Side]:
    masks = random_masks(model, settings)
    for name, used in ((OURS, True), (TILES, False)):
        pruned = copy.deepcopy(model)
        optimizer = samo.Optimizer(
            lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True), pruned, masks, kernels=used
        )
        parameters = list(pruned.parameters())

        def backward(parameters: list[nn.Parameter] = parameters) -> None:
            torch.autograd.backward(parameters, gradients)

        yield Side(name, optimizer.step, _compressed_bytes(optimizer), backward)


def _compressed_bytes(optimizer: samo.Optimizer) -> int:
    """Gradient, index, and averages and weights read and written; 16-bit parameters are written, besides."""
    found = 0
    for entry in optimizer.entries:
        size = entry.parameter.element_size()
        found += entry.kept * (size + 3 * 8 + (size if size == 2 else 0))
        found += 0 if entry.index is None else entry.index.nbytes
    return found


def _dense(model: nn.Module, gradients: list[Tensor]) -> Iterable[Side]:
    """Torch's fused AdamW on dense float32 state; where the parameters are of 16 bits, and the copy to them."""
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    masters = [parameter.float().requires_grad_() for parameter in parameters]
    upcast = [gradient.float() for gradient in gradients]
    for master, gradient in zip(masters, upcast, strict=True):
        master.grad = gradient
    optimizer = torch.optim.AdamW(masters, lr=1e-3, fused=True)
    low = gradients[0].element_size() == 2
    elements = sum(gradient.numel() for gradient in gradients)

    @torch.no_grad()
    def step() -> None:
        optimizer.step()
        if low:
            torch._foreach_copy_(parameters, masters)

    @torch.no_grad()
    def step_of_16_bits() -> None:
        torch._foreach_copy_(upcast, gradients)
        step()

    moved = elements * (4 + 3 * 8 + (6 if low else 0))
    yield Side(DENSE, step, moved)
    if low:
        yield Side(UPCAST, step_of_16_bits, moved + 6 * elements)


def passes(settings: Settings) -> list[Side]:
    """Time forward and backward in turns: dense, whose gradients are let go, and with compression as it happens."""
    torch.manual_seed(settings.seed)
    plain = GPT(settings.model).to(settings.device, DTYPES[settings.dtype])
    pruned = copy.deepcopy(plain)
    clock = Clock(settings)
    clock.start_before(pruned)
    optimizer = samo.Optimizer(
        lambda groups: torch.optim.AdamW(groups, lr=1e-3, fused=True), pruned, random_masks(pruned, settings)
    )
    clock.stop_after(pruned)
    ids = torch.randint(256, (settings.batch, settings.context + 1), device=settings.device)
    sides = [
        Side(name, lambda model=model: model(ids[:, :-1], ids[:, 1:]).backward(), prepare=forget)  # type: ignore[misc]
        for name, model, forget in ((PLAIN, plain, plain.zero_grad), (PRUNED, pruned, optimizer.zero_grad))
    ]
    for _, side in in_turns(sides, settings.passes + 1):
        side.prepare()
        clock.restart()
        side.seconds.append(seconds(side.run))
        side.compression.append(clock.seconds())
    for side in sides:  # the first turn warms up
        del side.seconds[0], side.compression[0]
    return sides


class Clock:
    """Seconds between two hooks on each parameter's gradient: hooks run in the order in which they were registered.

    On a GPU, of the device.
    """

    def __init__(self, settings: Settings) -> None:
        self._cuda = settings.device == "cuda"
        self._marks: list[float | torch.cuda.Event] = []

    def start_before(self, model: nn.Module) -> None:
        """Register the first hooks."""
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._mark)

    stop_after = start_before

    def _mark(self, parameter: Tensor) -> None:
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def restart(self) -> None:
        """Forget what was measured."""
        self._marks = []

    def seconds(self) -> float:
        """In all since `restart`; the device has to be at rest."""
        pairs = zip(self._marks[::2], self._marks[1::2], strict=True)
        if self._cuda:
            return sum(begin.elapsed_time(end) for begin, end in pairs) / 1e3  # type: ignore[union-attr,arg-type]
        return sum(end - begin for begin, end in pairs)  # type: ignore[operator,misc]


def random_masks(model: nn.Module, settings: Settings) -> dict[str, Tensor]:
    """For every matrix, true where it is kept."""
    generator = torch.Generator(settings.device).manual_seed(settings.seed)
    return {
        name: torch.rand(parameter.shape, device=settings.device, generator=generator) >= settings.sparsity
        for name, parameter in model.named_parameters()
        if parameter.dim() > 1
    }
