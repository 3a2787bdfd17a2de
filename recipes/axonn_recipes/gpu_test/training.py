"""The serial model, and what trains beside it: losses of the first steps, and steps that are timed."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import samo
from axonn_plugins.goldfish import goldfish_labels
from axonn_plugins.observe.metrics import flops_per_token, peak_flops
from axonn_recipes.bench.numbers import spread
from axonn_recipes.bench.rounds import over_ranks, slowest
from axonn_recipes.gpu_test.scale import STEPS, Figure, Scale, Side
from axonn_recipes.models.gpt import GPT, GPTConfig

LEARNING_RATE, WEIGHT_DECAY = 1e-2, 0.1
_WARM = 2
"""Steps of a side before those that are timed."""
Make = Callable[[], nn.Module]


def gpt(config: GPTConfig) -> GPT:
    """A GPT on the CPU, the same on every rank."""
    torch.manual_seed(1)
    return GPT(config)


def windows(config: GPTConfig, count: int, step: int) -> Tensor:
    """Random tokens, (count, context + 1), the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(config.vocabulary, (count, config.context + 1), generator=generator)


@dataclass(frozen=True)
class Serial:
    """The losses and weights of the serial model.

    Attributes:
        losses: by step.
        norms: of the gradient, by step.
        model: after the last.
    """

    losses: list[float]
    norms: list[float]
    model: nn.Module


def serial(scale: Scale, make: Make, block: Mapping[str, Any] | None = None) -> Serial:
    """Train the serial model in float64 on this rank's device, pruned and with targets left out as the block says.

    Args:
        scale: the run's.
        make: makes the model.
        block: keys "samo" and "goldfish" are read.
    """
    block, model = block or {}, make().double().to(scale.place)
    masks = samo.magnitude(model, **block["samo"]) if "samo" in block else {}
    left_out = {key: value for key, value in block.get("goldfish", {}).items() if key != "labels"}
    kept = {dict(model.named_parameters())[name]: mask for name, mask in masks.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    losses, norms = [], []
    for parameter, mask in kept.items():
        parameter.data.mul_(mask)
    for step in range(STEPS):
        batch = windows(scale.compared, scale.windows, step)
        targets = goldfish_labels(batch[:, 1:], **left_out) if left_out else batch[:, 1:]
        loss = model(batch[:, :-1].to(scale.place), targets.to(scale.place))
        loss.backward()
        for parameter, mask in kept.items():
            assert parameter.grad is not None
            parameter.grad.mul_(mask)
        norms.append(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Serial(losses, norms, model)


def mean(loss: Tensor) -> float:
    """A loss's mean over all ranks."""
    return over_ranks([float(loss)], dist.ReduceOp.SUM)[0] / dist.get_world_size()


def timed(name: str, ours: bool, build: Callable[[], Callable[[], object]], scale: Scale) -> Side:
    """Build a side, time its steps, and let it go.

    Args:
        name: of the side.
        ours: whether it is ours.
        build: makes its step.
        scale: the run's.
    """
    cuda = scale.device == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    step = build()
    for _ in range(_WARM if cuda else 1):
        step()
    took = [slowest(step) for _ in range(scale.rounds)]
    memory = int(over_ranks([float(torch.cuda.max_memory_allocated())], dist.ReduceOp.MAX)[0]) if cuda else None
    del step
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
    return Side(name, ours, took, memory)


def utilisation(side: Side, scale: Scale, seen: int, sequences: int | None = None) -> Figure:
    """Model FLOPs utilisation: 6·N + 12·L·H·T flop a token (PaLM, appendix B) beside the data sheet's peak of all devices.

    Args:
        side: what was timed.
        scale: the run's.
        seen: parameters that multiply a token's activations.
        sequences: of a step over all ranks; by itself `scale.batch` of each rank.
    """
    config = scale.timed
    count = (scale.batch * scale.ranks if sequences is None else sequences) * config.context
    flops = count * flops_per_token(seen, config.layers, config.hidden, config.context)
    peak = peak_flops(torch.cuda.get_device_name(), scale.dtype) if scale.device == "cuda" else None
    rate = flops / spread(side.seconds)["median"]
    return Figure(f"MFU of {side.name}", None if peak is None else rate / (peak * scale.ranks), "%")


def multiplied(config: GPTConfig) -> int:
    """Parameters of a GPT that multiply a token's activations."""
    return 12 * config.layers * config.hidden**2 + config.vocabulary * config.hidden


def spans_hidden(spans: Sequence[tuple[str, float, float]]) -> float | None:
    """The share of communication's time during which something else ran too; None without communication.

    Args:
        spans: name, begin and end of what ran on the device; NCCL's and RCCL's kernels have "nccl" in their names.
    """
    sides: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for name, begin, end in sorted(spans, key=lambda span: span[1]):
        merged = sides["nccl" in name.lower()]
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    whole = sum(end - begin for begin, end in sides[True])
    both = sum(
        max(0.0, min(end, other_end) - max(begin, other))
        for begin, end in sides[True]
        for other, other_end in sides[False]
    )
    return both / whole if whole else None


def hidden(step: Callable[[], object]) -> float | None:
    """The share of a step's communication on this rank's GPU that computation hid; None on a CPU."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        step()
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return spans_hidden(
        [
            (event.name, event.time_range.start, event.time_range.end)
            for event in seen.events() or ()
            if event.device_type == DeviceType.CUDA
        ]
    )


def readers_part(scale: Scale, readers: int, reader: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A reader's part of the compared steps' batches, on its device."""
    for step in range(STEPS):
        mine = windows(scale.compared, scale.windows, step).chunk(readers)[reader].to(scale.place)
        yield mine[:, :-1], mine[:, 1:]
