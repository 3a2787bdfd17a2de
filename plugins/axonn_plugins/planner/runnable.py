"""An answer to run: the DeepSpeed configuration, Megatron's flags and the line of torchrun that train as a plan says."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from typing import Any

from axonn_plugins.planner.answer import Question
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.search import AnyPlan, GridPlan
from axonn_plugins.planner.space import divisors

_LEARNING_RATE = 1e-4
_VOCABULARY = 51200
"""Of models that do not say how many tokens they know."""
_ON_A_CPU = (
    "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --num-workers 0"
).split()


@dataclass(frozen=True)
class Split:
    """How a plan deals out ranks and samples.

    Attributes:
        stages: of a pipeline.
        microbatch: samples of a rank at a time.
        accumulation: microbatches of a step.
    """

    gx: int
    gy: int
    gz: int
    gdata: int
    stages: int
    microbatch: int
    accumulation: int


@dataclass(frozen=True)
class Runnable:
    """What starts a plan.

    Attributes:
        ds_config: DeepSpeed's configuration with our block; None where DeepSpeed cannot run it.
        megatron: flags of Megatron-LM's pretrain_gpt.py, as for a shell; None where Megatron cannot run it.
        launch: torchrun on each node, to which the script is added.
        notes: what else is to be done, and why there is no configuration, or are no flags.
    """

    ds_config: dict[str, Any] | None
    megatron: str | None
    launch: str
    notes: tuple[str, ...]

    @property
    def text(self) -> str:
        """All of it, as it is typed."""
        parts = []
        if self.ds_config is not None:
            line = f"{self.launch} train.py --deepspeed --deepspeed_config ds_config.json"
            parts.append(f"to run it with DeepSpeed, ds_config.json:\n{json.dumps(self.ds_config, indent=2)}\n{line}")
        if self.megatron is not None:
            parts.append(f"to run it with Megatron-LM:\n{self.launch} pretrain_gpt.py {self.megatron}")
        return "\n\n".join([*parts, *(["\n".join(f"note: {note}" for note in self.notes)] if self.notes else [])])


def runnable(question: Question, plan: AnyPlan) -> Runnable:
    """What starts a plan of a question's answer, on the question's machine."""
    launch = _launch(question.machine, question.gpus)
    split = split_of(plan, question.batch)
    if split is None:
        why = f"nothing here runs {plan.strategy}; --strategy axonn and 1d say what does"
        return Runnable(None, None, launch, (why,))
    why_not = _not_under_megatron(question, plan, split)
    flags = None if why_not else shlex.join(_flags(question, plan, split))
    notes = [*_to_do(question, split), *([f"no flags of Megatron's: {why_not}"] if why_not else [])]
    no_deepspeed = _not_under_deepspeed(question, split)
    if no_deepspeed:
        notes.append(f"no DeepSpeed configuration: {no_deepspeed}")
    config = None if no_deepspeed else _ds_config(question, split)
    return Runnable(config, flags, launch, tuple(notes))


def split_of(plan: AnyPlan, batch: int) -> Split | None:
    """How a plan deals out ranks and samples; 1D is a grid of x and data alone. None for what nobody runs, 2D and SUMMA."""
    if isinstance(plan, GridPlan):
        samples = batch // (plan.gz * plan.gdata * plan.microbatches)
        return Split(plan.gx, plan.gy, plan.gz, plan.gdata, 1, samples, plan.microbatches)
    return Split(plan.n1, 1, 1, plan.nd, plan.np, plan.bm, plan.microbatches) if plan.strategy == "1d" else None


def ranks_a_host(machine: Machine, gpus: int) -> int:
    """The most ranks that a host takes if all take as many."""
    return max(size for size in divisors(gpus) if size <= (machine.host or machine.domain))


def _launch(machine: Machine, gpus: int) -> str:
    each = ranks_a_host(machine, gpus)
    where = "--rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500" if gpus > each else "--standalone"
    cpu = "env AXONN_MEGATRON_CPU=1 DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 " if machine.device == "cpu" else ""
    return f"{cpu}torchrun --nnodes {gpus // each} --nproc-per-node {each} {where}"


# DeepSpeed


def _not_under_deepspeed(question: Question, split: Split) -> str:
    if question.setting.interleave > 1 and split.stages > 1:
        return "its pipelines do not interleave parts of the model"
    return ""


def _ds_config(question: Question, split: Split) -> dict[str, Any]:
    return {
        "train_batch_size": question.batch,
        "train_micro_batch_size_per_gpu": split.microbatch,
        "gradient_accumulation_steps": split.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": _LEARNING_RATE, "torch_adam": True}},
        "axonn": block(question, split),
    }


def block(question: Question, split: Split) -> dict[str, Any]:
    """The ``"axonn"`` block: a grid, and what else trains as the question says."""
    setting = question.setting
    grid: dict[str, Any] = {"gx": split.gx, "gy": split.gy, "gz": split.gz, "plan": "auto"}
    if split.gz > 1 and not setting.recompute:
        grid["reshard_after_forward"] = True
    if setting.recompute and setting.keep_gathered:
        grid["cache_gathers"] = "all"
    found: dict[str, Any] = {"tensor_parallel": grid}
    if split.stages > 1:
        again = {"activation_checkpointing": 1} if setting.recompute else {}
        found["pipeline"] = {"schedule": "1f1b", **again}
    if setting.experts:
        found["ted"] = {}
    if setting.sparsity:
        found["samo"] = {"sparsity": setting.sparsity}
    if question.machine.collectives == "pccl" and question.machine.device == "cpu":
        found["pccl"] = {}
    return found


def _to_do(question: Question, split: Split) -> list[str]:
    """What no configuration says."""
    setting, notes = question.setting, []
    if split.stages > 1:
        notes.append(f"DeepSpeed: make the model a PipelineModule(..., num_stages={split.stages})")
    elif setting.recompute:
        notes.append(
            "DeepSpeed: turn recomputation on in the script, in HF models by model.gradient_checkpointing_enable()"
        )
    if setting.experts:
        dealt = math.gcd(setting.experts, split.gdata)
        notes.append(f"DeepSpeed: give its MoE layers num_experts={setting.experts}, ep_size={dealt}, k=1")
    if question.machine.collectives == "pccl" and question.machine.device != "cpu":
        notes.append(
            'PCCL of CUDA tensors is a backend of torch.distributed: init_process_group("pccl") before deepspeed.initialize'
        )
    notes.append("the optimizer, its learning rate and the data are yours; those written here let it start")
    return notes


# Megatron


def _not_under_megatron(question: Question, plan: AnyPlan, split: Split) -> str:
    if not isinstance(question.model, Transformer):
        return "pretrain_gpt.py trains texts"
    if question.setting.experts:
        return "its MoE layers own the dispatch of tokens; TED is for DeepSpeed"
    groups = question.model.kv
    if groups % split.gx and split.gx % groups:
        return f"its {groups} query groups are neither a multiple of gx = {split.gx} nor divide it"
    if split.stages > 1 and _uneven(question.model.layers, split.stages) is None:
        return f"{question.model.layers} layers cannot be dealt out to {split.stages} stages"
    return ""


def _flags(question: Question, plan: AnyPlan, split: Split) -> list[str]:
    model = question.model
    assert isinstance(model, Transformer)
    setting = question.setting
    sizes: dict[str, object] = {
        "--num-layers": model.layers,
        "--hidden-size": model.hidden,
        "--ffn-hidden-size": model.f,
        "--num-attention-heads": model.heads,
        **({"--kv-channels": model.q} if model.head_width else {}),
        "--seq-length": model.sequence,
        "--max-position-embeddings": model.sequence,
        "--micro-batch-size": split.microbatch,
        "--global-batch-size": question.batch,
        "--pipeline-model-parallel-size": split.stages,
    }
    grouped = ["--group-query-attention", "--num-query-groups", str(model.kv)] if model.kv < model.heads else []
    return [
        *(str(word) for pair in sizes.items() for word in pair),
        *grouped,
        *(["--untie-embeddings-and-output-weights"] if model.untied else []),
        "--bf16",
        *_parallel(question, plan, split),
        *(_interleaved(model, split, setting.interleave) if split.stages > 1 else []),
        *("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split() if setting.recompute else []),
        *(["--use-distributed-optimizer"] if split.gdata > 1 else []),
        *_to_start(model),
        *(_ON_A_CPU if question.machine.device == "cpu" else []),
    ]  # fmt: skip


def _parallel(question: Question, plan: AnyPlan, split: Split) -> list[str]:
    """Who splits the layers, and the systems: Megatron itself runs 1D where no optimizer of ours is asked for."""
    systems = []
    if question.setting.sparsity:
        systems += ["--axonn-samo", json.dumps({"sparsity": question.setting.sparsity})]
    if plan.strategy == "1d" and not systems:
        # Norms of its local layers, without which nothing runs on a CPU, know no split positions.
        together = ["--sequence-parallel"] if split.gx > 1 and question.machine.device != "cpu" else []
        return ["--tensor-model-parallel-size", str(split.gx), *together]
    if question.machine.collectives == "pccl" and question.machine.device == "cpu":
        systems += ["--axonn-pccl"]
    sizes = [word for axis in ("gx", "gy", "gz") for word in (f"--axonn-{axis}", str(getattr(split, axis)))]
    model = question.model
    # Tokens lie split over x only where it divides them.
    layout = ["--axonn-layout", "replicated"] if isinstance(model, Transformer) and model.sequence % split.gx else []
    return ["--tensor-model-parallel-impl=axonn3d", *sizes, *layout, *systems]


def _interleaved(model: Transformer, split: Split, parts: int) -> list[str]:
    """Layers of stages that are not alike, or of each part of a stage."""
    first, last = _uneven(model.layers, split.stages) or (0, 0)
    per = math.ceil(model.layers / split.stages)
    uneven = [
        word
        for flag, size in (("first", first), ("last", last))
        if size < per
        for word in (f"--decoder-{flag}-pipeline-num-layers", str(size))
    ]
    inner = ["--num-layers-per-virtual-pipeline-stage", str(per // parts)] if parts > 1 else []
    return uneven + inner


def _uneven(layers: int, stages: int) -> tuple[int, int] | None:
    """Layers of the first and last stage where the others have as many as the fullest; None where these two cannot have so few."""
    per = math.ceil(layers / stages)
    missing = per * stages - layers
    first, last = per - (missing + 1) // 2, per - missing // 2
    return (first, last) if first > 0 else None


def _to_start(model: Transformer) -> list[str]:
    """What a run needs besides, without data of one's own."""
    tokens = model.vocabulary or _VOCABULARY
    return [
        *("--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", str(tokens - 1)),
        *("--lr", f"{_LEARNING_RATE:g}", "--train-iters", "10", "--log-interval", "1"),
        *("--eval-iters", "0", "--eval-interval", "1000"),
    ]
