"""``axonn plan --check``: what an existing configuration takes in time and memory, what would be better, and why."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from typing import Any

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner.answer import Answer, Question, answer
from axonn_plugins.planner.existing import Existing
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.report import GB, configuration, excess, none_fits, plan_json
from axonn_plugins.planner.runnable import block
from axonn_plugins.planner.search import AnyPlan, GridPlan
from axonn_plugins.planner.split import split_of

_WORDS = {
    "compute": "compute",
    "memory": "waiting for memory",
    "tensor": "collectives of split layers (x, y and z)",
    "data": "sums of gradients over data-parallel ranks",
    "pipeline": "messages between pipeline stages",
    "bubble": "idle stages (the pipeline's bubble)",
}
_WORTH = 0.01
"""Share of a step below which a gain is not worth a change."""
_KEYS = {
    "gx": "gx",
    "gy": "gy",
    "gz": "gz",
    "sequence": "gz.sequence",
    "stages": "stages of the pipeline",
    "microbatch": "train_micro_batch_size_per_gpu",
    "accumulation": "gradient_accumulation_steps",
}


@dataclass(frozen=True)
class Checked:
    """The verdict on a configuration.

    Attributes:
        plan: it, with its time and memory.
        fits: whether a GPU holds it.
        better: the best that fits, where that is worth a change.
        lines: all of this in sentences.
    """

    plan: AnyPlan
    fits: bool
    better: AnyPlan | None
    lines: tuple[str, ...]

    def as_json(self, asked: Answer) -> dict[str, Any]:
        """As JSON's types."""
        machine = asked.question.machine
        return {
            **plan_json(self.plan, machine),
            "fits": self.fits,
            "better": None if self.better is None else plan_json(self.better, machine),
            "why": list(self.lines),
        }


def check(asked: Answer, existing: Existing) -> Checked:
    """Hold a configuration against the answer to the same question.

    Args:
        asked: what would be best, of the same model, machine and batch.
        existing: the configuration.

    Raises:
        ConfigError: the model cannot be split so.
    """
    question = asked.question
    unlimited = replace(question.machine, memory=math.inf)
    setting = replace(question.setting, sharing=existing.attention, in_flight=existing.in_flight)
    same = replace(question, machine=unlimited, strategies=("axonn",), fixed=existing.fixed, setting=setting)
    found = answer(same, 1)
    if not found.best:
        raise ConfigError(none_fits(found))
    plan = _with_stage(found.best[0], existing.stage, question)
    fits = plan.bytes <= question.machine.memory
    split = split_of(plan, question.batch)
    best = next((one for one in asked.best if not fits or split_of(one, question.batch) != split), None)
    gains = best is not None and (not fits or plan.seconds - best.seconds > _WORTH * plan.seconds)
    better = best if gains else None
    return Checked(plan, fits, better, tuple(_lines(question, existing, plan, fits, better, bool(asked.best))))


def _with_stage(plan: AnyPlan, stage: int, question: Question) -> AnyPlan:
    """The same with what ZeRO's stage shares out over data-parallel ranks; the model's own is stage 1.

    Experts are dealt out among these ranks already, and SAMO's index is on each.
    """
    assert isinstance(plan, GridPlan)
    holds, model, setting = dict(plan.holds), question.model, question.setting
    each = holds["gradients"] / setting.element
    index = 2 * each if setting.sparsity else 0.0
    if stage == 0:
        holds["optimizer"] = index + setting.states * each
    if stage == 2 or (stage == 3 and plan.gdata > 1):
        here = float(model.parameters)
        if isinstance(model, Transformer) and model.experts:
            here -= model.expert_parameters * (1 - 1 / math.gcd(plan.gdata, model.experts))
        holds["gradients"] *= model.parameters / plan.gdata / here
    if stage == 3 and plan.gdata > 1:  # ZeRO++'s node holds all weights besides those that all ranks share out
        holds["weights"] += holds["gradients"] / setting.kept
    return replace(plan, holds=holds, bytes=sum(holds.values()))


def _lines(
    question: Question, existing: Existing, plan: AnyPlan, fits: bool, better: AnyPlan | None, any_fits: bool
) -> list[str]:
    memory = question.machine.memory
    parts = sorted(((size, part) for part, size in plan.parts.items() if size > 0), reverse=True)
    spent = ", ".join(f"{_WORDS[part]} {size / plan.seconds:.0%}" for size, part in parts)
    held = ", ".join(f"{part} {size / GB:.1f} GB" for part, size in plan.holds.items())
    lines = [
        f"{configuration(plan)}, ZeRO stage {existing.stage}: {plan.seconds:.4g} s a step of {existing.batch} samples: {spent}.",
        f"A GPU holds {plan.bytes / GB:.1f} GB: {held}.",
    ]
    if not fits:
        lines.append(f"It does not fit: it {excess(plan, memory)}.")
    lines += [f"Note: {note}." for note in existing.notes]
    if better is None:
        lines.append(
            "Nothing that fits is faster by more than 1 %." if any_fits else "Nothing that the planner knows fits."
        )
        return lines
    change = better.seconds / plan.seconds - 1
    lines.append(
        f"Better: {configuration(better)}, {better.seconds:.4g} s ({change:+.1%}), {better.bytes / GB:.1f} GB."
    )
    lines.append(_why(plan, better))
    lines.append(f"To change: {_changes(question, existing, plan, better)}.")
    return lines


def _why(plan: AnyPlan, better: AnyPlan) -> str:
    """The terms in which a better plan takes less and more, in words."""
    saved = {part: plan.parts[part] - better.parts[part] for part in plan.parts}
    telling = 0.02 * max(map(abs, saved.values()))
    of = lambda some: ", ".join(f"{abs(size):.3g} s of {_WORDS[part]}" for part, size in some)  # noqa: E731
    ordered = sorted(saved.items(), key=lambda one: -abs(one[1]))
    less = of((part, size) for part, size in ordered if size > 0 and size >= telling)
    more = of((part, size) for part, size in ordered if size < 0 and -size >= telling)
    if not less:
        return f"It fits, and takes {more} more." if more else "It fits, and takes as long."
    return f"It saves {less}" + (f", and takes {more} more." if more else ".")


def _changes(question: Question, existing: Existing, plan: AnyPlan, better: AnyPlan) -> str:
    old, new = split_of(plan, question.batch), split_of(better, question.batch)
    if old is None or new is None:
        return f"train by {better.strategy}"
    pairs = [(key, getattr(old, key), getattr(new, key)) for key in _KEYS]
    changed = [f"{_KEYS[key]} {before} to {after}" for key, before, after in pairs if before != after]
    if existing.grid:
        shared_out = existing.stage == 1 or new.gdata == 1
        return ", ".join([*changed, *([] if changed and shared_out else ["ZeRO's stage to 1"])])
    samples = [f"{_KEYS[key]} to {after}" for key, _, after in pairs if key in ("microbatch", "accumulation")]
    return f'add "axonn": {json.dumps(block(question, new))}, with ZeRO stage 1, ' + ", ".join(samples)
