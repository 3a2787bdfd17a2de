"""``axonn plan``: which configuration to run on a number of GPUs, the time and memory that it takes, why it wins and what does not fit."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro import conf

from axonn_plugins.cli.options import read
from axonn_plugins.config.base import ConfigError
from axonn_plugins.observe.clock import elapsed
from axonn_plugins.observe.files import put
from axonn_plugins.planner import existing, files, machine, model, report, validate, values
from axonn_plugins.planner.answer import EVERY, Answer, AnyStrategy, Question, answer
from axonn_plugins.planner.check import Checked, check
from axonn_plugins.planner.rates import latest_attention
from axonn_plugins.planner.runnable import runnable
from axonn_plugins.planner.schedules import SCHEDULES, Schedule
from axonn_plugins.planner.setting import Setting
from axonn_plugins.planner.transformer import STRATEGIES, Mode

_SIZE = conf.create_mutex_group(required=False)


@dataclass(frozen=True, kw_only=True)
class Options:
    # Numbers are read as text, so that what is wrong with them is said in our words.
    """Which configuration to run on a number of GPUs, the time and memory that it takes, why it wins and what does not fit.

    Attributes:
        gpus: how many, all used; several as 512,1024 or 512..16384.
        batch: samples of a step, over all GPUs.
        tokens_per_batch: positions of a step, instead of --batch; 2M is 2·1024·1024.
        sequence: positions of a sample, such as 8192 or 128K; else the model's.
        strategy: how layers are split; by default as this suite does, and in the paper mode all.
        mode: calibrated: by published measurements; roofline: 004, corrected; paper: as published, with its defects.
        recompute: activation checkpointing of whole layers.
        interleave: parts of the model on each pipeline stage.
        schedule: of the pipeline: 1f1b; zb-h1 and zb-v: zero-bubble.
        samo: share that is pruned, with SAMO's state, such as 0.9.
        ted: experts=E, a mixture of E experts in every second layer, split as TED does.
        collectives: native: rings; pccl: recursive between domains.
        whole: also output layer and loss, the optimizer's step, residual sums.
        offload: float32 weights and the optimizer's state are in host memory.
        precision: of products; fp8 in the calibrated mode.
        attention: fused: one kernel; latest: at the rate of FlashAttention-2 on A100, 3 on H100; plain: scores are written to memory.
        top: configurations to list.
        tokens: positions to train on, such as 2T, for the days that this takes.
        explain: why the best wins, what does not fit, what would change it.
        json: a file for the answer; - is standard output, which then has nothing else.
        plot: a file for a picture of configurations, memory and shares of time, as Figures 1 to 4 of the paper.
        check: a ds_config.json, of which is said what it takes and what would be better.
        validate: published measurements beside what the model says of the same; needs no other option, and takes --mode, --plot and --fit FILE alone.
    """

    model: Annotated[
        str,
        conf.arg(
            help="a name, the path of a TOML or JSON file or of HF's config.json, or layers=24,hidden=2048,heads=16; "
            f"names: {', '.join(model.names())}"
        ),
    ]
    machine: Annotated[
        str,
        conf.arg(
            help="a name or the path of a TOML or JSON file, with -nvsN for domains of N GPUs; here is what axonn bench network measured, "
            f"emulated-1ms-500Mbit an emulated cluster; names: {', '.join(machine.names())}"
        ),
    ]
    gpus: str
    batch: Annotated[str | None, _SIZE] = None
    tokens_per_batch: Annotated[str | None, _SIZE] = None
    sequence: str | None = None
    strategy: Literal["1d", "2d", "summa", "axonn", "all"] | None = None
    mode: Mode = "calibrated"
    fix: Annotated[
        str | None,
        conf.arg(
            help=f"sizes that are given, such as np=64,bm=1; of {', '.join(values.PIPELINED)}, or of {', '.join(values.GRID)} with axonn."
        ),
    ] = None
    recompute: bool = False
    interleave: str = "1"
    schedule: Schedule = "1f1b"
    samo: str | None = None
    ted: str | None = None
    collectives: Literal["native", "pccl"] = "native"
    whole: bool = False
    offload: bool = False
    precision: Literal["bf16", "fp8"] = "bf16"
    attention: Literal["fused", "latest", "plain"] = "fused"
    top: str = "10"
    tokens: str | None = None
    explain: bool = False
    json: str | None = None
    plot: str | None = None
    check: str | None = None
    validate: bool = False


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if "--validate" in arguments:
        return validate.main(arguments)
    parsed = read(Options, arguments, "axonn plan")
    if parsed.plot == "-":
        raise ConfigError(
            '--plot = "-" is no file: a picture is not written to the terminal; use a name such as plan.png'
        )
    for option, name in (("json", parsed.json), ("plot", parsed.plot)):
        if name not in (None, "-"):
            files.writable(option, name)
    questions, found = _questions(parsed)
    top = values.number("top", parsed.top)
    tokens = None if parsed.tokens is None else values.tokens(parsed.tokens)
    with elapsed("searching"):
        answers = [answer(question, top) for question in questions]
        checked = None if found is None else check(answers[0], found)
    if checked is None and not any(one.shapes for asked in answers for one in asked.found.values()):
        raise ConfigError(report.none_fits(answers[0]))
    if parsed.json != "-":
        with elapsed("explaining"):
            text = _text(answers, parsed.explain, tokens, checked)
        print(text)
    if parsed.json is not None:
        _write(parsed.json, [report.as_json(asked, tokens) for asked in answers], checked, answers[0])
    if parsed.plot is not None:
        from axonn_plugins.planner.plot import draw

        draw(Path(parsed.plot), answers)
    return 0


def _questions(parsed: Options) -> tuple[list[Question], existing.Existing | None]:
    """The questions, one for each number of GPUs, and the configuration that is to be checked."""
    sequence = None if parsed.sequence is None else values.positions(parsed.sequence)
    trained = model.load(parsed.model, sequence=sequence)
    strategy = parsed.strategy if isinstance(trained, model.Transformer) else _unets(parsed)
    where = replace(machine.load(parsed.machine), collectives=parsed.collectives)
    mode, fixed, every = parsed.mode, values.fixed(parsed.fix), values.gpus(parsed.gpus)
    if parsed.attention == "latest":
        if mode != "calibrated":
            raise ConfigError(f'--attention = "latest" is not of --mode {mode}; leave one of the two out')
        where = latest_attention(where)
    setting = Setting(
        recompute=parsed.recompute,
        interleave=values.number("interleave", parsed.interleave),
        sparsity=values.sparsity(parsed.samo),
        experts=values.experts(parsed.ted),
        whole=parsed.whole,
        fused=parsed.attention != "plain",
        offload=parsed.offload,
        fp8=parsed.precision == "fp8",
        schedule=parsed.schedule,
    )
    if setting.fp8 and mode != "calibrated":
        raise ConfigError(f'--precision = "fp8" is not of --mode {mode}; leave one of the two out')
    if setting.fp8 and where.fp8 is None:
        raise ConfigError(
            f'--precision = "fp8", but {where.name} has no products in 8 bits, or its file no fp8; use bf16'
        )
    batch, found = _batch(parsed, trained), None
    if parsed.check is not None:
        found = _existing(parsed.check, every, batch, fixed, setting)
        batch, setting, fixed = found.batch, found.setting, {}
        _strategies("axonn", mode, fixed, setting)  # as which it is modelled
        strategy = strategy or "axonn"
    if batch is None:
        raise ConfigError("one of these arguments is required: --batch or --tokens-per-batch")
    strategies = _known(_strategies(strategy, mode, fixed, setting), trained)
    return [Question(where, trained, gpus, batch, strategies, mode, fixed, setting) for gpus in every], found


def _batch(parsed: Options, trained: model.Model) -> int | None:
    if parsed.batch is not None:
        return values.number("batch", parsed.batch)
    if parsed.tokens_per_batch is None:
        return None
    assert isinstance(trained, model.Transformer)
    return values.samples(parsed.tokens_per_batch, trained.sequence)


def _existing(
    name: str, gpus: list[int], batch: int | None, fixed: dict[str, int], setting: Setting
) -> existing.Existing:
    if len(gpus) > 1:
        raise ConfigError(
            f"--check is of one number of GPUs, and --gpus gives {len(gpus)}; give the one that it runs on"
        )
    if set(fixed) - {"stages"}:
        raise ConfigError(f"--fix names {', '.join(fixed)}, but --check takes sizes from {name}; leave --fix out")
    return existing.read(name, gpus[0], batch, fixed.get("stages"), setting)


def _unets(parsed: Options) -> str:
    """The strategy that splits U-Nets; what counts positions of a text has no meaning for them."""
    for option, value in (
        ("sequence", parsed.sequence),
        ("tokens-per-batch", parsed.tokens_per_batch),
        ("tokens", parsed.tokens),
    ):
        if value is not None:
            raise ConfigError(
                f'--{option} = "{value}" is of texts, but --model = "{parsed.model}" is a U-Net, whose samples are images; leave it out, '
                "and give --batch"
            )
    if parsed.strategy in STRATEGIES:
        raise ConfigError(
            f'--strategy = "{parsed.strategy}" splits layers of transformers, but --model = "{parsed.model}" is a U-Net; use axonn'
        )
    return "axonn"


def _executed(mode: Mode, fixed: dict[str, int], setting: Setting) -> str:
    """The strategy where none is named: 4D grids, else 1D, where these know what is asked; all in the paper mode."""
    if mode == "paper":
        return "all"
    of_grids = not (_other_schedule(setting) or setting.experts or setting.whole) and setting.fused
    if of_grids and set(fixed) <= set(values.GRID):
        return "axonn"
    return "1d" if set(fixed) <= set(values.OF_1D) else "all"


def _strategies(given: str | None, mode: Mode, fixed: dict[str, int], setting: Setting) -> tuple[AnyStrategy, ...]:
    """One, or all that know the given sizes.

    The published model of 4D grids leaves compute out, so it competes with no other; nor are interleaved stages of grids modelled, or TED's experts.
    """
    name = given or _executed(mode, fixed, setting)
    knows = {
        strategy: set(fixed) <= set(values.GRID if strategy == "axonn" else values.PIPELINED) for strategy in EVERY
    }
    if not any(knows[one] for one in EVERY if name in (one, "all")):
        raise ConfigError(
            f"--fix names {', '.join(fixed)}, not all sizes of --strategy {name}; use {', '.join(values.PIPELINED)} with 1d, 2d and summa, or "
            f"{', '.join(values.GRID)} with axonn"
        )
    if name == "axonn" and setting.experts:
        raise ConfigError(
            f"--ted experts={setting.experts} is TED's tensor x expert x data grid, not a 4D one; leave it out, or choose 1d, 2d or summa"
        )
    if SCHEDULES[setting.schedule].parts and setting.interleave > 1:
        raise ConfigError(
            f"--interleave = {setting.interleave}, but --schedule {setting.schedule} has {SCHEDULES[setting.schedule].parts} parts on each "
            "stage; leave --interleave out"
        )
    if name == "axonn" and _other_schedule(setting):
        raise ConfigError(
            f"{_other_schedule(setting)}, but stages of 4D grids run 1F1B in one part each; leave it out, or choose 1d, 2d or summa"
        )
    beyond = {"--recompute": setting.recompute, "--samo": setting.sparsity, "--offload": setting.offload}
    unread = next((option for option, on in beyond.items() if on), None)
    if name == "axonn" and mode == "paper" and unread:
        raise ConfigError(
            f"{unread} is not of the published model of 4D grids, which counts each collective once and 16 bytes a parameter; leave it or "
            "--mode paper out"
        )
    more = "--whole" if setting.whole else "" if setting.fused else "--attention plain"
    if more and (name == "axonn" or mode == "paper"):
        which = "--strategy axonn" if name == "axonn" else "--mode paper"
        raise ConfigError(
            f"{more} is modelled for 1d, 2d and summa in the calibrated and roofline modes, not with {which}; leave one of the two out"
        )
    apart = bool(mode == "paper" or _other_schedule(setting) or setting.experts or more)
    found = tuple(
        one for one in EVERY if name == one or (name == "all" and knows[one] and not (one == "axonn" and apart))
    )
    if not found:
        why = f"--ted experts={setting.experts}" if setting.experts else _other_schedule(setting) or more
        if not why:
            raise ConfigError(
                f"--fix names {', '.join(fixed)}, sizes of --strategy axonn, which --mode {mode} compares with no other; give --strategy axonn, too"
            )
        raise ConfigError(
            f"--fix names {', '.join(fixed)}, sizes of --strategy axonn, with which {why} is not modelled; use {', '.join(values.PIPELINED)}, or "
            "leave one of the two out"
        )
    return found


def _known(strategies: tuple[AnyStrategy, ...], trained: model.Model) -> tuple[AnyStrategy, ...]:
    """Strategies that know the model: mixers' states go from one position to the next, which 2D and SUMMA split."""
    if not (isinstance(trained, model.Transformer) and trained.mixes):
        return strategies
    found = tuple(one for one in strategies if one in ("1d", "axonn"))
    if not found:
        raise ConfigError(
            f"--strategy = {', '.join(strategies)} splits positions, along which the mixers of {trained.name} pass their states on; use 1d or axonn"
        )
    return found


def _other_schedule(setting: Setting) -> str:
    """The option by which stages do not run 1F1B in one part each; empty if they do."""
    if setting.schedule != "1f1b":
        return f"--schedule = {setting.schedule}"
    return f"--interleave = {setting.interleave}" if setting.interleave > 1 else ""


def _text(answers: list[Answer], explain: bool, tokens: float | None, checked: Checked | None) -> str:
    parts = [report.heading(answers[0])]
    if checked is not None:
        return "\n\n".join([*parts, "\n".join(checked.lines)])
    if len(answers) > 1:
        parts.append(report.scaling(answers, tokens))
    for asked in answers if explain or len(answers) == 1 else []:
        parts.append(report.searched(asked))
        parts += [report.table(asked)] if asked.best and len(answers) == 1 else []
        parts.append(report.verdict(asked, tokens))
        parts += [report.explanation(asked)] if explain else []
    if len(answers) == 1 and answers[0].best:
        parts.append(runnable(answers[0].question, answers[0].best[0]).text)
    return "\n\n".join(parts)


def _write(name: str, answers: list[dict], checked: Checked | None, asked: Answer) -> None:
    if checked is not None:
        answers = [{**answers[0], "checked": checked.as_json(asked)}]
    text = json.dumps(answers[0] if len(answers) == 1 else answers, indent=2, allow_nan=False)
    if name == "-":
        sys.stdout.write(text + "\n")
    else:
        put(Path(name), text + "\n")
