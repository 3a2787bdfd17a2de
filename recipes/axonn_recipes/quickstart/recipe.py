"""``axonn train quickstart``: a byte-level GPT in 3D PMM under DeepSpeed, on four ranks of one machine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

import axonn_plugins
from axonn_plugins import processors
from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError, parse
from axonn_plugins.hosts.deepspeed.engine import layer_plans
from axonn_plugins.hosts.deepspeed.tensor.config import check, grid_for
from axonn_recipes.bench.numbers import worst
from axonn_recipes.data import Corpus, load
from axonn_recipes.options import at_least_one
from axonn_recipes.quickstart import report
from axonn_recipes.quickstart.loop import Outcome, train
from axonn_recipes.quickstart.settings import Options, Settings, asked, find_run, resolve, store, stored_settings
from axonn_recipes.quickstart.sides import Parallel, Serial
from axonn_tp import Grid

# Largest difference of two loss curves that is rounding and not a mistake.
TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 2e-2}


def main(arguments: Sequence[str]) -> int:
    """Train as the command line says; returns the exit code.

    Raises:
        ConfigError: a mistake of the user's.
    """
    options = asked(arguments)
    run = find_run(options.runs, options.name, options.resume)
    stored = stored_settings(run) if options.resume else None
    if stored:
        options = asked(arguments, stored[0])
    settings = resolve(options, stored[0] if stored else None)
    at_least_one(options, "save_every", "keep_last")
    if options.compare and settings.serial:
        raise ConfigError("--check trains serially and in parallel; leave it or --serial out")
    if options.trace_steps is not None:
        if settings.serial:
            raise ConfigError("--trace-steps is for runs on ranks; leave it or --serial out")
        parse({"tensor_parallel": {"trace_steps": [*options.trace_steps]}})
    grid = _grid(settings)
    counted = _plan(settings, grid)
    print(report.text(settings, counted, "one process" if settings.serial else _where(settings)), flush=True)
    if options.dry_run:
        print("\n" + report.resolved(settings))
        return 0
    corpus = load(settings.data, settings.context)
    if stored and stored[1] != corpus.digest:
        raise ConfigError(f"{run} was trained on another text than {corpus.source} holds now; give the same --data")
    print(
        f"\n{corpus.files} files of {corpus.source}: {len(corpus.training):,} bytes to learn from, {len(corpus.validation):,} held out\n",
        flush=True,
    )
    if options.compare:
        return _check(settings, corpus, run, options, counted.matmul)
    store(settings, corpus.digest, run)
    outcome = _train(settings, corpus, run, options, counted.matmul)
    return _farewell(outcome, run)


def _grid(settings: Settings) -> Grid:
    if settings.serial:
        return Grid()
    grid = grid_for(report.block_of(settings), settings.ranks)
    check(settings.ds_config(), grid)
    return grid


def _plan(settings: Settings, grid: Grid) -> report.Plan:
    try:
        return report.plan(settings, grid, layer_plans(report.block_of(settings)))
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _where(settings: Settings) -> str:
    stage = settings.ds_config()["zero_optimization"]["stage"]
    device = f"{settings.ranks} ranks on {'CUDA with NCCL' if _on_cuda(settings) else 'CPU with gloo'}"
    return f"{device}, ZeRO-{stage}"


def _on_cuda(settings: Settings) -> bool:
    if get_accelerator().device_name() != "cuda":
        return False
    if torch.cuda.device_count() < settings.ranks:
        raise ConfigError(
            f"--ranks {settings.ranks} is more than the {torch.cuda.device_count()} GPUs here; lower it and gx, gy, gz, "
            "or set DS_ACCELERATOR=cpu"
        )
    return True


def _train(settings: Settings, corpus: Corpus, run: Path, options: Options, matmul: int) -> Outcome:
    how = (options.keep_last, options.resume, options.save_every, matmul)
    if settings.serial:
        return launch(_serial, 1, settings, corpus, run, *how)[0]
    return launch(_rank, settings.ranks, settings, corpus, run, options.trace_steps, *how)[0]


def _serial(settings: Settings, corpus: Corpus, run: Path, keep: int, *how: Any) -> Outcome:
    processors.share_among(1)
    return train(Serial(settings, corpus, run, keep), settings, run, *how)


def _rank(
    settings: Settings, corpus: Corpus, run: Path, trace: tuple[int, int] | None, keep: int, *how: Any
) -> Outcome:
    import deepspeed

    axonn_plugins.activate()
    # On CPU DeepSpeed compiles a kernel for inference when it starts; training needs neither it nor a compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # It also calls collectives by names that newer torch wants changed.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    processors.share_among(settings.ranks)
    return train(Parallel(settings, corpus, run, keep, trace), settings, run, *how)


def _farewell(outcome: Outcome, run: Path) -> int:
    if outcome.stopped_by is not None:
        print(
            f"\nstopped after step {outcome.step}, everything is saved in {run}; go on with\n  axonn train quickstart --resume --name {run.name}"
        )
        return 128 + outcome.stopped_by
    print(f"\nvalidation loss {outcome.validation:.4f} nats a byte")
    for what in ("metrics.jsonl", "tensorboard/", "loss.png", "checkpoints/"):
        print(f"  {run / what}")
    return 0


def _check(settings: Settings, corpus: Corpus, run: Path, options: Options, matmul: int) -> int:
    """Train both ways and compare the losses step by step."""
    curves = {}
    for side, serial in (("serial", True), ("parallel", False)):
        print(f"{side}:", flush=True)
        one = replace(settings, serial=serial)
        folder = run / side
        store(one, corpus.digest, folder)
        outcome = _train(one, corpus, folder, options, matmul)
        if outcome.stopped_by is not None:
            return 128 + outcome.stopped_by
        curves[side] = outcome.losses
    differences = [abs(loss - curves["parallel"][step]) for step, loss in curves["serial"].items()]
    step, early = worst(differences), differences[worst(differences[:10])]
    allowed = TOLERANCES[settings.precision]
    good = differences[step] <= allowed
    print(
        f"\nlargest difference of the losses: {differences[step]:.3g} nats at step {step + 1} of {settings.steps} "
        f"(first 10 steps: {early:.3g}); {'within' if good else 'BEYOND'} the {allowed:g} that {settings.precision} rounding explains"
    )
    return 0 if good else 1
