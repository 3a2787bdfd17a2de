"""``axonn plan``: which configuration to run on a number of GPUs, the time and memory that it takes, why it wins and what does not fit."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from tyro import conf

from axonn_plugins.cli.options import read
from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import files, machine, model, report, validate
from axonn_plugins.planner.answer import EVERY, Answer, AnyStrategy, Question, answer
from axonn_plugins.planner.step import Setting
from axonn_plugins.planner.transformer import STRATEGIES, Mode

_LARGEST = {"gpus": 2**20, "batch": 2**24, "top": 1000, "interleave": 1000, "sequence": 2**24}
_PIPELINED = ("n1", "n2", "np", "nd", "bm", "panels", "v1", "v2", "vp", "vd")
_GRID = ("gx", "gy", "gz", "gdata", "m")
_BINARY = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_DECIMAL = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


_SIZE = conf.create_mutex_group(required=True)


@dataclass(frozen=True, kw_only=True)
class Options:
    # Numbers are read as text, so that what is wrong with them is said in our words.
    """Which configuration to run on a number of GPUs, the time and memory that it takes, why it wins and what does not fit.

    Attributes:
        gpus: how many, all used; several as 512,1024 or 512..16384.
        batch: samples of a step, over all GPUs.
        tokens_per_batch: positions of a step, instead of --batch; 2M is 2·1024·1024.
        sequence: positions of a sample; else the model's.
        strategy: how layers are split.
        mode: calibrated: by published measurements; roofline: 004, corrected; paper: as published, with its defects.
        recompute: activation checkpointing of whole layers.
        interleave: parts of the model on each pipeline stage.
        samo: share that is pruned, with SAMO's state, such as 0.9.
        ted: experts=E, a mixture of E experts in every second layer, split as TED does.
        collectives: native: rings; pccl: recursive between domains.
        whole: also output layer and loss, the optimizer's step, residual sums.
        attention: fused: one kernel; plain: scores are written to memory.
        top: configurations to list.
        tokens: positions to train on, such as 2T, for the days that this takes.
        explain: why the best wins, what does not fit, what would change it.
        json: a file for the answer; - is standard output, which then has nothing else.
        plot: a file for a picture of configurations, memory and shares of time, as Figures 1 to 4 of the paper.
        validate: published measurements beside what the model says of the same; needs no other option, and takes none.
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
    strategy: Literal["1d", "2d", "summa", "axonn", "all"] = "all"
    mode: Mode = "calibrated"
    fix: Annotated[
        str | None,
        conf.arg(
            help=f"sizes that are given, such as np=64,bm=1; of {', '.join(_PIPELINED)}, or of {', '.join(_GRID)} with axonn."
        ),
    ] = None
    recompute: bool = False
    interleave: str = "1"
    samo: str | None = None
    ted: str | None = None
    collectives: Literal["native", "pccl"] = "native"
    whole: bool = False
    attention: Literal["fused", "plain"] = "fused"
    top: str = "10"
    tokens: str | None = None
    explain: bool = False
    json: str | None = None
    plot: str | None = None
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
            _writable(option, name)
    questions = _questions(parsed)
    top = _number("top", parsed.top)
    tokens = None if parsed.tokens is None else _tokens(parsed.tokens)
    answers = [answer(question, top) for question in questions]
    if not any(found.shapes for asked in answers for found in asked.found.values()):
        raise ConfigError(report.none_fits(answers[0]))
    if parsed.json != "-":
        print(_text(answers, parsed.explain, tokens))
    if parsed.json is not None:
        _write(parsed.json, [report.as_json(asked, tokens) for asked in answers])
    if parsed.plot is not None:
        from axonn_plugins.planner.plot import draw

        draw(Path(parsed.plot), answers)
    return 0


def _questions(parsed: Options) -> list[Question]:
    sequence = None if parsed.sequence is None else _number("sequence", parsed.sequence)
    trained = model.load(parsed.model, sequence=sequence)
    strategy = parsed.strategy if isinstance(trained, model.Transformer) else _unets(parsed)
    where = replace(machine.load(parsed.machine), collectives=parsed.collectives)
    batch = _batch(parsed, trained)
    mode = parsed.mode
    fixed = _fixed(parsed.fix)
    setting = Setting(
        recompute=parsed.recompute,
        interleave=_number("interleave", parsed.interleave),
        sparsity=_sparsity(parsed.samo),
        experts=_experts(parsed.ted),
        whole=parsed.whole,
        fused=parsed.attention == "fused",
    )
    strategies = _strategies(strategy, mode, fixed, setting)
    return [Question(where, trained, gpus, batch, strategies, mode, fixed, setting) for gpus in _gpus(parsed.gpus)]


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
    return "axonn" if parsed.strategy == "all" else parsed.strategy


def _strategies(name: str, mode: Mode, fixed: dict[str, int], setting: Setting) -> tuple[AnyStrategy, ...]:
    """One, or all that know the given sizes.

    The published model of 4D grids leaves compute out, so it competes with no other; and grids have no stages to interleave, nor experts.
    """
    knows = {strategy: set(fixed) <= set(_GRID if strategy == "axonn" else _PIPELINED) for strategy in EVERY}
    if not any(knows[one] for one in EVERY if name in (one, "all")):
        raise ConfigError(
            f"--fix names {', '.join(fixed)}, not all sizes of --strategy {name}; use {', '.join(_PIPELINED)} with 1d, 2d and summa, or "
            f"{', '.join(_GRID)} with axonn"
        )
    if name == "axonn" and setting.experts:
        raise ConfigError(
            f"--ted experts={setting.experts} is TED's tensor x expert x data grid, not a 4D one; leave it out, or choose 1d, 2d or summa"
        )
    if name == "axonn" and setting.interleave > 1:
        raise ConfigError(
            f"--interleave = {setting.interleave} needs pipeline stages, which 4D grids do not have; leave it out, or choose 1d, 2d or summa"
        )
    more = "--whole" if setting.whole else "" if setting.fused else "--attention plain"
    if more and (name == "axonn" or mode == "paper"):
        which = "--strategy axonn" if name == "axonn" else "--mode paper"
        raise ConfigError(
            f"{more} is modelled for 1d, 2d and summa in --mode roofline, not with {which}; leave one of the two out"
        )
    apart = bool(mode == "paper" or setting.interleave > 1 or setting.experts or more)
    return tuple(
        one for one in EVERY if name == one or (name == "all" and knows[one] and not (one == "axonn" and apart))
    )


def _sparsity(text: str | None) -> float:
    if text is None:
        return 0.0
    if not re.fullmatch(r"0?\.[0-9]{1,9}|0", text):
        raise ConfigError(f'--samo = "{text}" is not a share below 1; write how much is pruned, such as 0.9')
    return float(text)


def _experts(text: str | None) -> int:
    if text is None:
        return 0
    found = re.fullmatch(r"experts=([0-9]{1,6})", text)
    if found is None or int(found[1]) < 1:
        raise ConfigError(f'--ted = "{text}" does not say how many experts there are; write experts=16')
    return int(found[1])


def _batch(parsed: Options, trained: model.Model) -> int:
    if parsed.batch is not None:
        return _number("batch", parsed.batch)
    assert parsed.tokens_per_batch is not None and isinstance(trained, model.Transformer)
    sequence = trained.sequence
    found = re.fullmatch(r"([0-9]{1,12})([KMG]?)", parsed.tokens_per_batch)
    tokens = int(found[1]) * _BINARY[found[2]] if found else 0
    if not tokens:
        raise ConfigError(
            f'--tokens-per-batch = "{parsed.tokens_per_batch}" is not a number of positions; write a whole number, with K, M or G for '
            "powers of 1024 if you like, such as 2M"
        )
    if tokens % sequence:
        near = max(round(tokens / sequence), 1)
        raise ConfigError(
            f'--tokens-per-batch = "{parsed.tokens_per_batch}" is not a multiple of the {sequence} positions of a sample; '
            f"use {near * sequence}, which is --batch {near}"
        )
    return _number("batch", str(tokens // sequence))


def _gpus(text: str) -> list[int]:
    """``512,1024``, and ``512..4096`` for 512, 1024, 2048, 4096."""
    counts: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        count, most = _number("gpus", first), _number("gpus", last if dots else first)
        if most < count:
            raise ConfigError(
                f'--gpus = "{text}" ends before it begins; write the smaller number first, such as 512..4096'
            )
        while count <= most:
            counts.append(count)
            count *= 2
    return counts


def _fixed(text: str | None) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in [] if text is None else text.split(","):
        key, _, value = part.strip().partition("=")
        _known("fix", key, _PIPELINED + _GRID)
        if not re.fullmatch(r"[0-9]{1,9}", value) or int(value) < 1:
            raise ConfigError(f'--fix = "{text}" gives {key} no size; write a whole number from 1, such as {key}=4')
        sizes[key] = int(value)
    return sizes


def _number(option: str, text: str) -> int:
    most = _LARGEST[option]
    if not re.fullmatch(r"\s*[0-9]{1,12}\s*", text) or not 1 <= int(text) <= most:
        raise ConfigError(f'--{option} = "{text}" is not a whole number from 1 to {most:,}; write one that is')
    return int(text)


def _tokens(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)([KMBGT]?)", text)
    tokens = float(found[1]) * _DECIMAL[found[2]] if found else 0.0
    if not tokens:
        raise ConfigError(f'--tokens = "{text}" is not a number of positions; write one such as 300B or 2T')
    return tokens


def _known(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(
            f'--{option} = "{value}" is not known; use "{files.nearest(value, known)}", or another of {", ".join(known)}'
        )


def _text(answers: list[Answer], explain: bool, tokens: float | None) -> str:
    parts = [report.heading(answers[0])]
    if len(answers) > 1:
        parts.append(report.scaling(answers, tokens))
    for asked in answers if explain or len(answers) == 1 else []:
        parts.append(report.searched(asked))
        parts += [report.table(asked)] if asked.best and len(answers) == 1 else []
        parts.append(report.verdict(asked, tokens))
        parts += [report.explanation(asked)] if explain else []
    return "\n\n".join(parts)


def _write(name: str, answers: list[dict]) -> None:
    text = json.dumps(answers[0] if len(answers) == 1 else answers, indent=2, allow_nan=False)
    if name == "-":
        sys.stdout.write(text + "\n")
    else:
        Path(name).write_text(text + "\n")


def _writable(option: str, name: str) -> None:
    """Said before anything is searched."""
    path = Path(name)
    able = path if path.exists() else path.parent
    if path.is_dir() or not path.parent.is_dir() or not os.access(able, os.W_OK):
        raise ConfigError(
            f'--{option} = "{name}" cannot be written; give a file in a folder that exists and may be written to'
        )
