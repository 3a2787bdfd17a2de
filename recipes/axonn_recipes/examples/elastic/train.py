"""A small GPT learns the source of argparse, on whatever ranks are left: started again, it goes on from the last complete checkpoint."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist

from axonn_plugins.hosts.deepspeed import elastic
from axonn_recipes.examples.text import windows
from axonn_recipes.models.gpt import GPT, GPTConfig


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train; returns the losses of the steps that this start has taken, means over their batches."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", default=str(Path(__file__).with_name("ds_config.json")))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--keep", type=int, default=2, help="checkpoints that are kept")
    parser.add_argument("--output", type=Path, default=Path("runs/elastic"), help="folder that all nodes see")
    parser.add_argument("--double", action="store_true", help="train in float64")
    parser.add_argument("--local_rank", type=int, help="given by DeepSpeed's launcher")
    options = parser.parse_args(arguments)

    if finished(options.output / "checkpoints", options.steps):
        return []
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocabulary=128, context=32, layers=2, heads=4, hidden=64))
    if options.double:
        model.double()
    config = elastic.join(options.config, model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.load_checkpoint(options.output / "checkpoints")
    losses: list[float] = []
    batches, micro = iter(elastic.Batches(engine, windows()[0])), engine.gradient_accumulation_steps()
    while engine.global_steps < options.steps:
        total = torch.zeros((), dtype=torch.float64)
        for text in [next(batches) for _ in range(micro)]:
            loss = engine(text[:, :-1], text[:, 1:])
            engine.backward(loss)
            engine.step()
            total += loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / micro / dist.get_world_size())
        if dist.get_rank() == 0:
            note(options.output, engine, losses[-1])
        if engine.global_steps % options.save_every == 0 or engine.global_steps == options.steps:
            engine.save_checkpoint(options.output / "checkpoints", f"step{engine.global_steps:06d}")
            drop_old(options.output / "checkpoints", options.keep)
    dist.barrier()
    engine.destroy()
    dist.destroy_process_group()
    return losses


def finished(folder: Path, steps: int) -> bool:
    """True if the last step is saved: a node that comes back when the others are done has nothing to do, and no others to do it with."""
    latest = folder / "latest"
    return latest.is_file() and int(latest.read_text().removeprefix("step")) >= steps


def drop_old(folder: Path, keep: int) -> None:
    """Keep the newest complete checkpoints."""
    if dist.get_rank() == 0:
        for old in sorted(folder.glob("step??????"))[:-keep]:
            shutil.rmtree(old, ignore_errors=True)


def note(folder: Path, engine: deepspeed.DeepSpeedEngine, loss: float) -> None:
    """Append a step to losses.jsonl: its number, its loss, the process that took it, and its grid."""
    grid = engine.mesh.grid
    sizes = [grid.gx, grid.gy, grid.gz, grid.gdata]
    row = {"step": engine.global_steps, "loss": loss, "start": os.getpid(), "grid": sizes}
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "losses.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    print(*(f"{name} {value}" for name, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
