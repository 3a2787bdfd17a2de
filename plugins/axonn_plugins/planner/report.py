"""An answer as text and as JSON."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from axonn_plugins.planner.answer import Answer, Question, sensitivity, too_large
from axonn_plugins.planner.axonn import model_flops
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Model, Transformer
from axonn_plugins.planner.runnable import runnable
from axonn_plugins.planner.search import AnyPlan, Plan
from axonn_plugins.planner.uncertainty import WHOLE, step_range

PARTS = {"compute": "compute", "memory": "memory", "tensor": "TP", "data": "DP", "pipeline": "PP", "bubble": "bubble"}
"""Parts of a step's time, and their headings."""
_OF_MIXERS = "assumed: scans run at attention's rate; no published training of such mixers is in the corpus that times and ranges come from"
GB = 1e9
DAY = 86400.0


def table(asked: Answer) -> str:
    """The best configurations, a line each."""
    return _table([str(rank) for rank, _ in enumerate(asked.best, 1)], asked.best)


def scaling(answers: list[Answer], tokens: float | None = None) -> str:
    """The best configuration for each number of GPUs, a line each, and the days that it takes."""
    fitting = [asked for asked in answers if asked.best]
    lines = _table([str(asked.question.gpus) for asked in fitting], [asked.best[0] for asked in fitting]).splitlines()
    if tokens is not None:
        days = ["days", *(f"{_days(asked, tokens):.4g}" for asked in fitting)]
        lines = [f"{line} {each:>7}" for line, each in zip(lines, days, strict=True)]
    lines += [f"{asked.question.gpus} GPUs: {none_fits(asked)}" for asked in answers if not asked.best]
    return "\n".join(lines)


def _table(labels: list[str], plans: list[AnyPlan]) -> str:
    configurations = [configuration(plan) for plan in plans]
    width = max([len(text) for text in configurations], default=0)
    head = f"{'':>6}  {'':<{width}} {'m':>6} {'step s':>9}" + "".join(f" {name:>7}" for name in PARTS.values())
    lines = [f"{head} {'GB':>6}"]
    for label, text, plan in zip(labels, configurations, plans, strict=True):
        columns = "".join(f" {share:>7.1%}" for share in shares(plan).values())
        lines.append(
            f"{label:>6}  {text:<{width}} {plan.microbatches:>6} {plan.seconds:>9.4g}{columns} {plan.bytes / GB:>6.1f}"
        )
    return "\n".join(lines)


def heading(asked: Answer) -> str:
    """The question in a few lines, with the sources of its numbers."""
    question, machine, model = asked.question, asked.question.machine, asked.question.model
    as_published = (
        "collectives alone, as published" if "axonn" in question.strategies else "with the published results' defects"
    )
    mode = f", {as_published}" if question.mode == "paper" else ""
    lines = [
        f"{model.name}: {model.described}, {_billions(model)}" + (f" ({model.source})" if model.source else ""),
        f"{machine.name}: {machine.memory / GB:g} GB a GPU, domains of {machine.domain} ({machine.source})",
        *([f"assumed: {machine.assumed}"] if machine.assumed else []),
        *([_OF_MIXERS] if isinstance(model, Transformer) and model.mixes else []),
        f"{question.batch} samples of {model.sample} a step{mode}",
    ]
    return "\n".join(lines)


def _active(model: Model) -> int:
    """Parameters that a position meets."""
    return model.active_parameters if isinstance(model, Transformer) else model.parameters


def _billions(model: Model) -> str:
    active = _active(model)
    of_token = "" if active == model.parameters else f", {active / 1e9:.4g} of a token"
    return f"{model.parameters / 1e9:.4g} billion parameters{of_token}"


def searched(asked: Answer) -> str:
    """Number of configurations that were tried, in a line."""
    tried = ", ".join(
        f"{strategy} {one.shapes:,}, of which {one.fitting:,} fit, in {one.candidates:,} placements"
        for strategy, one in asked.found.items()
    )
    return f"{asked.question.gpus} GPUs; configurations tried: {tried}"


def verdict(asked: Answer, tokens: float | None = None) -> str:
    """The best configuration in words, or why there is none.

    Args:
        asked: the answer.
        tokens: positions to train on, for the time that this takes.
    """
    if not asked.best:
        return none_fits(asked)
    plan, question = asked.best[0], asked.question
    parts = sorted(shares(plan).items(), key=lambda item: -item[1])
    span = step_range(question.machine, question.model, plan, question.mode, question.batch)
    lines = [
        f"best: {configuration(plan)}: {plan.seconds:.4g} s a step, {plan.bytes / GB:.1f} GB a GPU",
        "  time: " + ", ".join(f"{_words(part)} {share:.1%}" for part, share in parts if share > 0),
        "  memory: " + ", ".join(f"{part} {size / GB:.1f} GB" for part, size in plan.holds.items()),
        f"  the longest part is {_words(parts[0][0])}, then {_words(parts[1][0])}",
        f"  {span.low:.4g} to {span.high:.4g} s {span.source}"
        + ("" if question.mode == "calibrated" else _whole_error(question.model)),
    ]
    rate = flops_a_gpu(asked)
    if rate is not None:
        lines.append(f"  {rate[0] / 1e12:.4g} model Tflop/s a GPU, {rate[1]:.1%} of its peak")
    if tokens is not None:
        lines.append(f"  {tokens:.4g} positions take {_days(asked, tokens):.4g} days")
    return "\n".join(lines)


def explanation(asked: Answer) -> str:
    """Why the first beats the second, what does not fit, and what would change the answer."""
    lines = []
    memory = asked.question.machine.memory
    if len(asked.best) > 1:
        lines.append(comparison(asked.best[0], asked.best[1]))
    for plan in asked.nearest[:3]:
        lines.append(f"does not fit: {configuration(plan)}: {excess(plan, memory)}")
    for plan in too_large(asked):
        lines.append(f"would be faster, {plan.seconds:.4g} s: {configuration(plan)}: {excess(plan, memory)}")
    if asked.best:
        lines.append("what would change the answer:")
        for words, plan_then in sensitivity(asked):
            lines.append(f"  with {words}: {_change(asked.best[0], plan_then)}")
    return "\n".join(lines)


def comparison(first: AnyPlan, second: AnyPlan) -> str:
    """Why one plan is faster than another, by part."""
    gap = second.seconds - first.seconds
    share = gap / first.seconds if first.seconds else 0.0
    text = f"{configuration(first)} beats {configuration(second)} by {gap:.3g} s ({share:.2%})"
    differences = {part: second.parts[part] - first.parts[part] for part in PARTS}
    telling = {
        part: size for part, size in differences.items() if abs(size) >= 0.02 * max(map(abs, differences.values()))
    }
    less = ", ".join(f"{size:.3g} s of {_words(part)}" for part, size in telling.items() if size > 0)
    more = ", ".join(f"{-size:.3g} s of {_words(part)}" for part, size in telling.items() if size < 0)
    if not less:
        return f"{text}: they take equally long"
    return f"{text}: it saves {less}" + (f", and pays {more}" if more else "")


def excess(plan: AnyPlan, memory: float) -> str:
    """The amount by which a plan does not fit, and what fills the GPU most."""
    part = max(plan.holds, key=lambda key: plan.holds[key])
    return (
        f"needs {plan.bytes / GB:.1f} GB of {memory / GB:g}, {(plan.bytes - memory) / GB:.1f} too much; "
        f"{part} take {plan.holds[part] / GB:.1f} GB of it"
    )


def none_fits(asked: Answer) -> str:
    """Why there is no configuration."""
    question, model = asked.question, asked.question.model
    if asked.nearest and not any(one.fitting for one in asked.found.values()):
        plan = asked.nearest[0]
        options = (("--recompute", question.setting.recompute), ("--offload", question.setting.offload))
        published = question.mode == "paper" and tuple(question.strategies) == ("axonn",)  # which knows neither
        less = " or ".join(["more GPUs", *(name for name, on in options if not (on or published))])
        needs = excess(plan, question.machine.memory)
        return f"nothing fits: the smallest configuration is {configuration(plan)}, which {needs}; with {less} it needs less"
    if any(one.shapes for one in asked.found.values()):
        given = " with the sizes given" if question.fixed else ""
        return (
            f"nothing can be placed{given}: no group sizes fill domains of {question.machine.domain} GPUs; "
            f"use a multiple of {question.machine.domain} GPUs that can be split so, or -nvsN behind the machine's name"
        )
    given = " with " + ", ".join(f"{name}={size}" for name, size in question.fixed.items()) if question.fixed else ""
    if tuple(question.strategies) == ("axonn",) or not isinstance(model, Transformer):
        features, heads = model.divides
        return (
            f"{question.gpus} GPUs cannot be split{given}: gx must divide {heads} heads, gx and gy {' and '.join(map(str, features))} "
            f"features, {_samples(question)}, {_stages(question)}and the product of all be {question.gpus}; ask for another "
            "number or batch" + (", or fix other sizes" if given else "")
        )
    return (
        f"{question.gpus} GPUs cannot be split{given}: n1 must divide {model.heads} heads, {' and '.join(map(str, model.features))} features, "
        f"n1·n2 the positions of a microbatch, samples of {model.sequence} each, "
        f"np {'be at most' if question.mode == 'calibrated' else 'divide'} {model.layers} layers, and nd divide a batch of {question.batch}, "
        f"and their product with n2 be {question.gpus}; ask for another number or batch"
        + (", or fix other sizes" if given else "")
    )


def _samples(question: Question) -> str:
    """The condition on a batch that is dealt out to ranks, in words."""
    text, model = f"gz·gdata a batch of {question.batch}", question.model
    if question.mode != "calibrated" or not isinstance(model, Transformer):
        return text
    if model.mixes:
        return f"{text} (ranks share no sample of a model with mixers on a grid)"
    return f"{text} (or gz·gdata/sequence, whose ranks share samples of {model.sequence} positions)"


def _stages(question: Question) -> str:
    """The condition on the stages of grids, in words."""
    if not isinstance(question.model, Transformer):
        return ""
    if question.mode != "calibrated":
        return "stages be 1, of which --mode calibrated has more, "
    return f"stages be no more than {question.model.layers} layers, "


def shares(plan: AnyPlan) -> dict[str, float]:
    """Parts of a step's time, as shares of it."""
    return {part: seconds / plan.seconds if plan.seconds else 0.0 for part, seconds in plan.parts.items()}


def flops_a_gpu(asked: Answer) -> tuple[float, float] | None:
    """Model flop/s of a GPU with the best configuration, and as a share of the peak.

    By Narayanan's formula, without recomputation, and without the output layer where that is not modelled.

    None for the published model of 4D grids, which leaves compute out.
    """
    question, plan = asked.question, asked.best[0]
    if not plan.parts["compute"]:
        return None
    model = question.model
    whole = question.setting.whole or question.mode == "calibrated"
    layers = replace(model, vocabulary=0) if isinstance(model, Transformer) and not whole else model
    rate = model_flops(layers, question.batch, recompute=False) / plan.seconds / question.gpus
    return rate, rate / question.machine.tensor


def configuration(plan: AnyPlan) -> str:
    """A configuration in the papers' letters; nvs are the GPUs of n1, n2, np and nd in a domain."""
    sizes = " ".join(f"{name}={size}" for name, size in plan.sizes.items() if name != "m")
    placement = f" nvs {_placement(plan)}" if plan.parts and isinstance(plan, Plan) else ""
    return f"{plan.strategy} {sizes}{placement}"


def as_json(asked: Answer, tokens: float | None = None) -> dict[str, Any]:
    """The answer as JSON's types: seconds, bytes, and the paper's letters."""
    question, machine = asked.question, asked.question.machine
    best = [plan_json(plan, machine) for plan in asked.best]
    start: dict[str, Any] = dict.fromkeys(("ds_config", "megatron", "launch", "notes"))
    if asked.best:
        start = vars(runnable(question, asked.best[0]))
        span = step_range(machine, question.model, asked.best[0], question.mode, question.batch)
        best[0]["seconds_range"] = [span.low, span.high]
        rate = flops_a_gpu(asked)
        best[0]["model_flops_a_gpu"], best[0]["share_of_peak"] = rate or (None, None)
        if tokens is not None:
            best[0]["days"] = _days(asked, tokens)
    return {
        "model": question.model.name,
        "parameters": question.model.parameters,
        "active_parameters": _active(question.model),
        "machine": machine.name,
        "gpus": question.gpus,
        "batch": question.batch,
        "mode": question.mode,
        "feasible": bool(best),
        "reason": None if best else none_fits(asked),
        "best": best[0] if best else None,
        "plans": best,
        **start,
        "infeasible": [plan_json(plan, machine) for plan in asked.nearest],
        "searched": {
            strategy: {"configurations": one.shapes, "fitting": one.fitting, "placed": one.candidates}
            for strategy, one in asked.found.items()
        },
    }


def plan_json(plan: AnyPlan, machine: Machine) -> dict[str, Any]:
    """A plan as JSON's types."""
    timed = bool(plan.parts)
    letters = _letters(plan) if isinstance(plan, Plan) else {**plan.sizes, "collectives": plan.collectives}
    return {
        "strategy": plan.strategy,
        **letters,
        "seconds": plan.seconds if timed else None,
        "parts": plan.parts,
        "shares": shares(plan),
        "memory_gb": plan.bytes / GB,
        "memory_parts_gb": {part: size / GB for part, size in plan.holds.items()},
        "too_much_gb": max(plan.bytes - machine.memory, 0) / GB,
    }


def _letters(plan: Plan) -> dict[str, Any]:
    nvs = {"n1": plan.v1, "n2": plan.v2, "np": plan.vp, "nd": plan.vd}
    return {
        "nt": plan.n1 * plan.n2,
        "n1": plan.n1,
        "n2": plan.n2,
        "np": plan.np,
        "nd": plan.nd,
        "bm": plan.bm,
        "m": plan.microbatches,
        "nb": plan.panels if plan.strategy == "summa" else None,
        "nvs": nvs if plan.parts else None,
    }


def _days(asked: Answer, tokens: float) -> float:
    model = asked.question.model
    assert isinstance(model, Transformer)
    return tokens / (asked.question.batch * model.sequence) * asked.best[0].seconds / DAY


def _placement(plan: Plan) -> str:
    """GPUs of a domain by group: n1, n2, np, nd."""
    groups = (plan.v1, plan.v2, plan.vp, plan.vd) if plan.strategy != "1d" else (plan.v1, plan.vp, plan.vd)
    return "·".join(map(str, groups))


def _whole_error(model: Model) -> str:
    if not isinstance(model, Transformer):
        return ""
    low, high = WHOLE["vit" if model.name.startswith("vit") else "gpt"]
    return f"; the whole model's published error on 512 A100 is {low:.0%} to {high:.0%}"


def _words(part: str) -> str:
    return {"memory": "waiting for memory", "bubble": "the bubble"}.get(part, PARTS[part])


def _change(now: AnyPlan, then: AnyPlan | None) -> str:
    if then is None:
        return "nothing fits"
    same = configuration(now) == configuration(then)
    ratio = then.seconds / now.seconds - 1 if now.seconds else 0.0
    change = "as long" if math.isclose(ratio, 0, abs_tol=5e-4) else f"{ratio:+.1%}"
    return f"{'the same' if same else configuration(then)}, {then.seconds:.4g} s ({change})"
