"""Runs of a Megatron-LM pretrain script as it is, on ranks of this CPU; losses and gradient norms as its TensorBoard has them.

    python tests/megatron/harness.py SCRIPT CASES.json

`CASES.json` maps a case's name to ``[ranks, [flag, ...]]``. Megatron is imported once, and each rank is forked from that.
Prints a line of JSON a case: its name, and either losses and norms of each iteration or the error.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU = (
    "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion "
    "--num-workers 0"
).split()
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 "
    "--global-batch-size 8 --lr 1e-3 --lr-decay-style constant --train-iters 20 --log-interval 1 --eval-iters 0 --eval-interval 1000 "
    "--attention-dropout 0 --hidden-dropout 0 --use-cpu-initialization --seed 1234 --make-vocab-size-divisible-by 32"
).split()
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 255".split()
VARIANTS = {
    "plain": "",
    "recompute full": "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    "recompute selective": "--recompute-granularity selective",
    "distributed optimizer": "--use-distributed-optimizer",
    "overlapped": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "large microbatch": "--micro-batch-size 2",
    "untied": "--untie-embeddings-and-output-weights",
    "gqa": "--group-query-attention --num-query-groups 4",
    "swiglu": "--swiglu",
    "rmsnorm": "--normalization RMSNorm",
    "llama": "--normalization RMSNorm --swiglu --position-embedding-type rope --group-query-attention --num-query-groups 4 "
    "--untie-embeddings-and-output-weights --disable-bias-linear --use-distributed-optimizer",
}
"""What is turned on in turn; all but the 8 microbatches a step of every variant, which accumulate on fewer than 8 ranks."""


CHECKOUT = os.environ.get("MEGATRON_LM_PATH", "")
SECONDS = float(os.environ.get("HARNESS_SECONDS", 300))
"""For a case; more on a machine that does much else."""


def missing() -> str:
    """Why the scripts of a checkout cannot run here; empty where they can."""
    if not CHECKOUT:
        return (
            "MEGATRON_LM_PATH names no checkout of Megatron-LM, whose pretrain_gpt.py is not in megatron-core's wheel"
        )
    tokenizer = Path(CHECKOUT, "megatron", "training", "tokenizer", "bert_tokenization.py")
    if tokenizer.is_file() and find_spec("six") is None and not Path(CHECKOUT, "six.py").is_file():
        return "six is not installed, which Megatron-LM imports; pip install six"
    return ""


def path(*more: str) -> str:
    """PYTHONPATH of a new process that imports what this one does, and besides from folders."""
    return os.pathsep.join([str(ROOT), *more, *filter(None, [os.environ.get("PYTHONPATH")])])


def run(script: Path, cases: dict[str, tuple[int, list[str]]], timeout: float = 600) -> dict[str, dict]:
    """Run cases in one new process.

    Args:
        script: such as Megatron-LM's pretrain_gpt.py.
        cases: ranks and flags by name.
        timeout: seconds for all of them.

    Returns:
        By case: ``{"losses": [...], "norms": [...]}`` or ``{"error": text}``.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "cases.json")
        file.write_text(json.dumps(cases))
        environment = {**os.environ, "PYTHONPATH": path(), "AXONN_MEGATRON_CPU": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, __file__, str(script), str(file)],
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout,
        )
    found = {name: result for name, result in map(json.loads, done.stdout.splitlines())}
    return {name: found.get(name, {"error": f"exit code {done.returncode}"}) for name in cases}


def difference(wanted: dict, found: dict) -> float:
    """Largest relative difference of losses and norms; infinite where a run failed or ended early."""
    if "error" in found or len(found["losses"]) != len(wanted["losses"]):
        return float("inf")
    return max(
        abs(a - b) / abs(a) for what in ("losses", "norms") for a, b in zip(wanted[what], found[what], strict=True)
    )


def _main(script: str, file: str) -> None:
    import torch

    from axonn_plugins.autoload import activate
    from axonn_plugins.cluster.launch import RankFailed, launch

    activate()
    out = os.dup(1)
    os.dup2(2, 1)  # what imports say is no result
    sys.path.insert(0, str(Path(script).parent))
    # What the script imports, and Megatron when it trains, is then there in the ranks.
    runpy.run_path(script, run_name="imported")
    import torch.utils.tensorboard  # noqa: F401

    torch.set_num_threads(1)
    for name, (ranks, flags) in json.loads(Path(file).read_text()).items():
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            log = Path(os.environ.get("HARNESS_LOG", folder), f"{name}.log".replace(" ", "_").replace("/", "_"))
            try:
                launch(_rank, ranks, script, [*flags, "--tensorboard-dir", folder], log, timeout=SECONDS)
                result = read(folder)
            except (RankFailed, TimeoutError) as error:
                result = {"error": f"{error}\n{log.read_text()[-1500:] if log.exists() else ''}"}
        result["seconds"] = time.monotonic() - began
        os.write(out, (json.dumps([name, result]) + "\n").encode())


def _rank(script: str, flags: list[str], log: Path) -> None:
    with log.open("a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.argv = [script, *flags]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as ended:
        if ended.code:
            raise RuntimeError(f"exit code {ended.code}") from None


def read(folder: str) -> dict[str, list[float]]:
    """Losses and norms of each iteration from a TensorBoard folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(folder, size_guidance={"scalars": 0}).Reload()
    return {
        what: [event.value for event in events.Scalars(tag)]
        for what, tag in (("losses", "lm loss"), ("norms", "grad-norm"))
    }


if __name__ == "__main__":
    _main(*sys.argv[1:])
