"""An answer to run: the DeepSpeed configuration, Megatron's flags and the line of torchrun that train as a plan says."""

from __future__ import annotations

import json
import math
import shlex
from dataclasses import dataclass
from typing import Any

from axonn_plugins.planner import megatron_flags as megatron
from axonn_plugins.planner.answer import Question
from axonn_plugins.planner.experts import Mixture, mixture
from axonn_plugins.planner.machine import Machine
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.search import AnyPlan
from axonn_plugins.planner.sharing import way
from axonn_plugins.planner.space import divisors
from axonn_plugins.planner.split import Split, split_of

LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Runnable:
    """The configuration, flags and command that start a plan.

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
    """The configuration, flags and command that start a plan of a question's answer, on the question's machine."""
    launch = _launch(question.machine, question.gpus)
    split = split_of(plan, question.batch)
    if split is None:
        why = f"nothing here runs {plan.strategy}; --strategy axonn and 1d say what does"
        return Runnable(None, None, launch, (why,))
    why_not = megatron.refused(question, plan, split)
    flags = None if why_not else shlex.join(megatron.flags(question, plan, split))
    no_deepspeed = _not_under_deepspeed(question, plan, split)
    notes = [] if no_deepspeed else _to_do(question, split)
    if flags or not no_deepspeed:
        notes.append("the optimizer, its learning rate and the data are yours; those written here let it start")
    if why_not:
        notes.append(f"no flags of Megatron's: {why_not}")
    if no_deepspeed:
        notes.append(f"no DeepSpeed configuration: {no_deepspeed}")
    config = None if no_deepspeed else _ds_config(question, split)
    return Runnable(config, flags, launch, tuple(notes))


def ranks_a_host(machine: Machine, gpus: int) -> int:
    """The most ranks that a host takes if all take as many."""
    return max(size for size in divisors(gpus) if size <= (machine.host or machine.domain))


def _launch(machine: Machine, gpus: int) -> str:
    each = ranks_a_host(machine, gpus)
    where = "--rdzv-backend c10d --rdzv-endpoint $MASTER_ADDR:29500" if gpus > each else "--standalone"
    cpu = "env AXONN_MEGATRON_CPU=1 DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 " if machine.device == "cpu" else ""
    return f"{cpu}torchrun --nnodes {gpus // each} --nproc-per-node {each} {where}"


# DeepSpeed


def _not_under_deepspeed(question: Question, plan: AnyPlan, split: Split) -> str:
    if plan.strategy == "2d" and split.sequence > 1:
        return "ranks that share samples and repeat the weights are Megatron's; on a grid, ranks of z share samples and split the weights"
    if question.setting.fp8:
        return "it trains in 8 bits with Transformer Engine's layers alone, which are Megatron's"
    if split.stages > 1 and question.setting.schedule != "1f1b":
        return f"its pipelines do backward whole; {megatron.by_torch(question)}"
    if question.setting.interleave > 1 and split.stages > 1:
        return "its pipelines do not interleave parts of the model"
    return ""


def _ds_config(question: Question, split: Split) -> dict[str, Any]:
    return {
        "train_batch_size": question.batch,
        "train_micro_batch_size_per_gpu": split.microbatch,
        "gradient_accumulation_steps": split.accumulation,
        "gradient_clipping": 1.0,
        **_precision(question),
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
        "axonn": block(question, split),
    }


def _precision(question: Question) -> dict[str, Any]:
    half = "bf16" if question.machine.bf16 else "fp16"
    return {} if question.setting.float32 else {half: {"enabled": True}}


def block(question: Question, split: Split) -> dict[str, Any]:
    """The ``"axonn"`` block: a grid, and what else trains as the question says."""
    setting = question.setting
    gz = {"batch": split.gz // split.sequence, "sequence": split.sequence} if split.sequence > 1 else split.gz
    grid: dict[str, Any] = {"gx": split.gx, "gy": split.gy, "gz": gz, "plan": "auto"}
    if split.gz > 1 and not setting.recompute and setting.keep_gathered < 1:
        grid["reshard_after_forward"] = 1 - setting.keep_gathered if setting.keep_gathered else True
    if setting.recompute and (setting.cache_gathers or setting.keep_gathered):
        grid["cache_gathers"] = setting.cache_gathers or "all"
    if split.sequence > 1:
        grid["attention"] = way(question, split)
    found: dict[str, Any] = {"tensor_parallel": grid}
    if split.stages > 1:
        again = {"activation_checkpointing": 1} if setting.recompute else {}
        found["pipeline"] = {"schedule": "1f1b", **again}
    if _mixture(question) is not None:
        found["ted"] = {}
    if setting.sparsity:
        found["samo"] = {"sparsity": setting.sparsity}
    if setting.offload:
        found["offload_optimizer"] = {}
    if question.machine.collectives == "pccl" and question.machine.device == "cpu":
        found["pccl"] = {}
    return found


def _to_do(question: Question, split: Split) -> list[str]:
    """Changes that a plan needs in the script, which DeepSpeed's configuration does not make."""
    setting, notes = question.setting, []
    if split.stages > 1:
        notes.append(f"DeepSpeed: make the model a PipelineModule(..., num_stages={split.stages})")
    elif setting.recompute:
        notes.append(
            "DeepSpeed: turn recomputation on in the script, in HF models by model.gradient_checkpointing_enable()"
        )
    experts = _mixture(question)
    if experts is not None:
        dealt = math.gcd(experts.experts, split.gdata)
        notes.append(
            f"DeepSpeed: give the model's MoE layers num_experts={experts.experts}, ep_size={dealt}, k={experts.per_token}"
        )
    if question.machine.collectives == "pccl" and question.machine.device != "cpu":
        notes.append(
            'PCCL of CUDA tensors is a backend of torch.distributed: init_process_group("pccl") before deepspeed.initialize'
        )
    return notes


def _mixture(question: Question) -> Mixture | None:
    """The model's own experts, or TED's."""
    model = question.model
    return mixture(model, question.setting.experts) if isinstance(model, Transformer) else None
