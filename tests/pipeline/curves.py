"""``python -m tests.pipeline.curves``: losses of a long run, serial, under stock PipelineEngine and by every schedule of ours."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from axonn_plugins.autoload import activate
from axonn_plugins.pipeline.schedule import POLICIES
from tests.distributed import run_ranks
from tests.pipeline.training import Case, ready, serial, start, tied, train


def curves(steps: int, stages: int) -> dict[str, list[float]]:
    """Losses by who trained, in float32, of a tied language model."""
    ready()
    case = Case(tied, dtype="fp32", stages=stages, microbatches=5, steps=steps)
    found: dict[str, list[float]] = {}
    blocks: dict[str, dict[str, Any] | None] = {"stock": None, **{name: {"schedule": name} for name in POLICIES}}
    for name, block in blocks.items():
        engine = start(replace(case, block=block))
        found[name] = train(engine, replace(case, block=block))
        replicas = engine.grid.data_parallel_size
        engine.destroy()
    found["serial"] = serial(case, replicas)[0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2)
    options = parser.parse_args()
    found = run_ranks(curves, options.ranks, options.steps, options.stages)[0]
    reference = found.pop("serial")
    print(f"serial: first {reference[0]:.6f}, last {reference[-1]:.6f}")
    for name, losses in found.items():
        far = max(abs(a - b) for a, b in zip(losses, reference, strict=True))
        same = sum(a == b for a, b in zip(losses, found["stock"], strict=True))
        print(f"{name}: at most {far:.2e} from serial; {same} of {len(losses)} losses are stock's to the last bit")


if __name__ == "__main__":
    activate()
    main()
