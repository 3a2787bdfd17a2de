"""Metrics of a run: metrics.jsonl, TensorBoard events, loss.png and the line printed each step."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from axonn_plugins.observe.events import Events
from axonn_plugins.observe.figures import Picture
from axonn_plugins.observe.trackers import trackers

GIB = 2**30

# Dense bf16/fp16 matrix peaks in FLOP/s, from the vendors' data sheets; the longer name wins ("H100 PCIe" over "H100").
_PEAK_BF16 = {
    "A100": 312e12,
    "H100": 989.4e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "GH200": 989.4e12,
    "H200": 989.4e12,
    "H200 NVL": 835e12,
    "B200": 2250e12,
    # One graphics compute die, which is what a rank sees: half of the card's 383 TFLOP/s.
    "MI250X": 191.5e12,
}


class MetricsLogger:
    """Writes one run's metrics; rank 0 alone creates it.

    `metrics.jsonl` holds one JSON object a step, `{"step": …, name: value, …}`, and is the source of `loss.png`; a
    number that is not finite is written as null, because JSON has no NaN. TensorBoard events go to `tensorboard/`, and the same numbers
    to Weights & Biases or MLflow where ``AXONN_TRACK`` names them.

    Args:
        run_dir: The run's folder; created where missing.
        resume_step: The last step of the checkpoint that the run goes on from. What was logged after it is dropped.
            None starts anew: whatever the folder's metrics.jsonl held is dropped.
    """

    def __init__(self, run_dir: Path, resume_step: int | None = None) -> None:
        self.run_dir = Path(run_dir)
        self.path = self.run_dir / "metrics.jsonl"
        self.run_dir.mkdir(parents=True, exist_ok=True)
        last_kept = -1 if resume_step is None else resume_step
        _keep_until(self.path, last_kept)
        self._file = self.path.open("a", encoding="utf-8")
        # purge_step hides what an earlier attempt wrote for the steps that are run again.
        self._sinks = [
            Events(self.run_dir / "tensorboard", purge_step=last_kept + 1),
            *trackers(self.run_dir, resume_step is not None),
        ]

    def log(self, step: int, **values: Any) -> None:
        """Write a step's values: numbers, 0-dim tensors, strings or None. `loss` and `val_loss` are what is plotted."""
        record = {"step": step} | {name: _plain(value) for name, value in values.items()}
        # One write and a flush: a kill tears the last line at most.
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        numbers = {name: value for name, value in record.items() if isinstance(value, (int, float)) and name != "step"}
        for sink in self._sinks:
            sink.add(step, numbers)

    def finish(self) -> None:
        """Close the files and draw `loss.png` from every step that metrics.jsonl holds, if any has a loss."""
        self._file.close()
        for sink in self._sinks:
            sink.close()
        _plot_loss(read_metrics(self.path), self.run_dir / "loss.png")


def format_step(
    step: int,
    steps: int,
    loss: float,
    grad_norm: float | None,
    lr: float,
    tokens_per_s: float,
    memory_bytes: int,
    mfu: float | None,
) -> str:
    """One step as a line whose columns stay in place; `mfu` is a fraction of 1, None where no peak is known."""
    width = len(str(steps))
    norm = "-" if grad_norm is None else f"{grad_norm:.4g}"
    utilisation = "-" if mfu is None else f"{mfu:.1%}"
    return (
        f"step {step:>{width}}/{steps}  loss {loss:8.4f}  grad norm {norm:>9}  lr {lr:.2e}  "
        f"{tokens_per_s:>11,.0f} tok/s  memory {memory_bytes / GIB:7.2f} GiB  MFU {utilisation:>6}"
    )


def format_split(seconds: Mapping[str, float]) -> str:
    """Shares of a step's time by phase, for the end of its line; empty where nothing was timed (000, Figure 4.8)."""
    whole = sum(seconds.values())
    return "  ".join(f"{phase} {part / whole:.0%}" for phase, part in seconds.items()) if whole > 0 else ""


def flops_per_token(n_matmul_params: int, layers: int, hidden: int, context: int) -> float:
    """Model FLOPs of one token's forward and backward pass: 6·N + 12·L·H·T (PaLM, appendix B).

    Attention is counted in full, as the paper does, though a causal mask needs half of it; recomputation is not
    counted. Narayanan et al. 2021 arrive at the same without recomputation.

    Args:
        n_matmul_params: N, the parameters that multiply activations: the output head counts, an embedding look-up
            does not.
        layers: L, transformer blocks.
        hidden: H, the width of the attention: heads times the size of a head.
        context: T, the tokens of a sequence.
    """
    return 6.0 * n_matmul_params + 12.0 * layers * hidden * context


def peak_flops(device_name: str, dtype: str) -> float | None:
    """The vendor's dense peak in FLOP/s of one device, or None where the table does not know it (any CPU).

    Args:
        device_name: What `torch.cuda.get_device_name()` answers.
        dtype: "bf16" or "fp16", in torch's long names too; other types are not in the table.
    """
    if dtype.removeprefix("torch.") not in ("bf16", "bfloat16", "fp16", "float16", "half"):
        return None
    words = set(re.split(r"[^A-Za-z0-9]+", device_name))
    known = [name for name in _PEAK_BF16 if words.issuperset(name.split())]
    return _PEAK_BF16[max(known, key=len)] if known else None


def process_memory_bytes() -> int:
    """The most memory this process held: of its CUDA device where it uses one, else of the host (peak RSS)."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; what does not parse was torn by a kill and is left out, and so is what is of no step."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict) and is_number(record.get("step")):
            records.append(record)
    return records


def is_number(value: Any) -> bool:
    """True of a finite number that a float can hold."""
    return isinstance(value, (int, float)) and abs(value) <= sys.float_info.max


def _keep_until(path: Path, last_step: int) -> None:
    if not path.exists():
        return
    kept = [record for record in read_metrics(path) if record["step"] <= last_step]
    new = path.with_name(path.name + ".new")
    with new.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _plot_loss(records: list[dict[str, Any]], path: Path) -> None:
    training, validation = (
        [(record["step"], record[name]) for record in records if record.get(name) is not None]
        for name in ("loss", "val_loss")
    )
    if not training and not validation:
        return

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        if training:
            axes.plot(*zip(*training, strict=True), linewidth=1.2, label="training")
        if validation:
            axes.plot(*zip(*validation, strict=True), "o", markersize=4, label="validation")
        axes.set_xlabel("step (optimizer updates)")
        axes.set_ylabel("loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()

    Picture(draw, dpi=150).save(path)
