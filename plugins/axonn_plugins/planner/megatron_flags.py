"""Flags of Megatron-LM's pretrain_gpt.py that train as a plan says: on our grid, or by Megatron itself."""

from __future__ import annotations

import json
import math

from axonn_plugins.planner.answer import Question
from axonn_plugins.planner.experts import Mixture, mixture
from axonn_plugins.planner.model import Transformer
from axonn_plugins.planner.schedules import SCHEDULES
from axonn_plugins.planner.search import AnyPlan
from axonn_plugins.planner.sharing import way
from axonn_plugins.planner.split import Split

_VOCABULARY = 51200
"""Vocabulary of models that do not say how many tokens they know."""
_TO_START = (
    *("--mock-data", "--tokenizer-type", "NullTokenizer", "--lr", "1e-4", "--train-iters", "10", "--log-interval", "1"),
    *("--eval-iters", "0", "--eval-interval", "1000"),
)
"""Flags that a run needs besides, without data of one's own."""
_WAYS = {"gather": "all_gather", "ring": "p2p", "heads": "a2a"}
"""Megatron's words for ways of attention."""
_ON_A_CPU = (
    "--distributed-backend gloo --transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion "
    "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --num-workers 0"
).split()


def refused(question: Question, plan: AnyPlan, split: Split) -> str:
    """Why Megatron cannot run a plan; empty where it can."""
    model = question.model
    if not isinstance(model, Transformer):
        return "pretrain_gpt.py trains texts"
    if model.mixes:
        return "pretrain_gpt.py has attention in every layer, and this model has not"
    ours = _ours(question, plan)
    experts = mixture(model, question.setting.experts)
    states = question.setting.sparsity or question.setting.offload
    if experts is not None and question.machine.device == "cpu" and not ours:
        return "its router of experts runs with transformer-engine only, which is for GPUs"
    if experts is not None and states:
        return "beside experts --axonn-samo and --axonn-offload-optimizer are refused; DeepSpeed takes all three"
    if ours and experts is not None and (among := _spread(experts, split)) % split.gz and split.gz % among:
        return f"experts go to {among} ranks, which are neither a divisor nor a multiple of gz = {split.gz}"
    if ours and question.setting.fp8:
        return "on a grid products in 8 bits have never run on a GPU; --strategy 1d is Megatron's own with transformer-engine"
    if split.sequence > 1 and states:
        return "beside samples that ranks share --axonn-samo and --axonn-offload-optimizer are refused; DeepSpeed takes all three"
    if split.sequence > 1 and question.machine.device == "cpu" and not ours:
        return "its context parallelism runs with transformer-engine only, which is for GPUs"
    if split.sequence > 1 and model.sequence % (2 * split.sequence):
        return f"its context parallelism of {split.sequence} cuts samples of {model.sequence} into {2 * split.sequence} equal parts"
    if split.stages > 1 and question.setting.schedule != "1f1b":
        return f"it has no zero-bubble schedule; {by_torch(question)}"
    if model.kv % split.gx and split.gx % model.kv:
        return f"{model.kv} heads of keys and values are neither a multiple of gx = {split.gx} nor divide it"
    if split.stages > 1 and _ends(model.layers, split.stages) is None:
        return f"{model.layers} layers cannot be dealt out to {split.stages} stages of which only the first and last have fewer"
    return ""


def by_torch(question: Question) -> str:
    """Who runs a zero-bubble schedule."""
    return f"torch.distributed.pipelining runs it as {SCHEDULES[question.setting.schedule].torch}"


def flags(question: Question, plan: AnyPlan, split: Split) -> list[str]:
    """All of them, for a plan that is not `refused`."""
    model = question.model
    assert isinstance(model, Transformer)
    again = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    return [
        *_sizes(model),
        *_experts(model, question.setting.experts, split),
        *("--micro-batch-size", str(split.microbatch), "--global-batch-size", str(question.batch)),
        *([] if question.setting.float32 else ["--bf16" if question.machine.bf16 else "--fp16"]),
        *(["--fp8-format", "hybrid"] if question.setting.fp8 else []),
        *_parallel(question, plan, split),
        *_staged(model, split, question.setting.interleave),
        *(["--use-distributed-optimizer"] if split.gdata * split.sequence > 1 else []),
        *(again if question.setting.recompute else []),
        *_TO_START,
        *("--vocab-size", str((model.vocabulary or _VOCABULARY) - 1)),  # its tokenizer adds one
        *(_ON_A_CPU if question.machine.device == "cpu" else []),
    ]


def _words(pairs: dict[str, object]) -> list[str]:
    return [str(word) for pair in pairs.items() for word in pair]


def _sizes(model: Transformer) -> list[str]:
    found = _words(
        {
            "--num-layers": model.layers,
            "--hidden-size": model.hidden,
            "--ffn-hidden-size": model.f,
            "--num-attention-heads": model.heads,
            "--seq-length": model.sequence,
            "--max-position-embeddings": model.sequence,
        }
    )
    if model.latent:
        found += ["--multi-latent-attention"] + _words(
            {
                **({"--q-lora-rank": model.q_rank} if model.q_rank else {}),
                "--kv-lora-rank": model.kv_rank,
                "--qk-head-dim": model.q - model.rope_width,
                "--qk-pos-emb-head-dim": model.rope_width,
                "--v-head-dim": model.v,
            }
        )
    elif model.head_width:
        found += ["--kv-channels", str(model.q)]
    if model.kv < model.heads and not model.latent:
        found += ["--group-query-attention", "--num-query-groups", str(model.kv)]
    if model.gated:
        found += "--swiglu --normalization RMSNorm --disable-bias-linear --position-embedding-type rope".split()
    return [*found, *(["--untie-embeddings-and-output-weights"] if model.untied else [])]


def _experts(model: Transformer, teds: int, split: Split) -> list[str]:
    """Flags of a mixture: the model's own, or in every second layer of a base model, and which layers have it."""
    found = mixture(model, teds)
    if found is None:
        return []
    first, every = (model.dense_layers, model.sparse_every) if model.experts else (0, 2)
    groups, rest = divmod(model.layers - first, every)
    pattern = f"([0]*{first}+([0]*{every - 1}+[1])*{groups}+[0]*{rest})"
    shared = {"--moe-shared-expert-intermediate-size": model.shared_feed_forward} if model.shared_feed_forward else {}
    return _words(
        {
            "--num-experts": found.experts,
            "--moe-router-topk": found.per_token,
            "--moe-ffn-hidden-size": model.expert_feed_forward or model.f,
            **shared,
            "--moe-layer-freq": pattern,
            "--moe-token-dispatcher-type": "alltoall",
            "--expert-model-parallel-size": _spread(found, split),
        }
    )


def _spread(experts: Mixture, split: Split) -> int:
    """Ranks with different experts."""
    return math.gcd(experts.experts, split.gdata)


def _ours(question: Question, plan: AnyPlan) -> bool:
    """True if layers are split by our grid: Megatron itself runs 1D where no optimizer of ours is asked for."""
    return plan.strategy == "axonn" or bool(question.setting.sparsity) or question.setting.offload


def _parallel(question: Question, plan: AnyPlan, split: Split) -> list[str]:
    """Who splits the layers, and our systems."""
    model, cpu = question.model, question.machine.device == "cpu"
    assert isinstance(model, Transformer)
    context = ["--context-parallel-size", str(split.sequence)] if split.sequence > 1 else []
    if not _ours(question, plan):
        # Norms of its local layers, without which nothing runs on a CPU, know no split positions.
        together = ["--sequence-parallel"] if split.gx > 1 and not cpu else []
        return ["--tensor-model-parallel-size", str(split.gx), *together, *context]
    found = ["--tensor-model-parallel-impl=axonn3d"]
    found += _words({f"--axonn-{axis}": getattr(split, axis) for axis in ("gx", "gy", "gz")})
    if context:
        found += [*context, "--cp-comm-type", _WAYS[way(question, split)]]
    if model.sequence // split.sequence % split.gx:  # which would split tokens
        found += ["--axonn-layout", "replicated"]
    if question.setting.sparsity:
        found += ["--axonn-samo", json.dumps({"sparsity": question.setting.sparsity})]
    if question.setting.offload:
        found += ["--axonn-offload-optimizer"]
    return found + (["--axonn-pccl"] if question.machine.collectives == "pccl" else [])


def _staged(model: Transformer, split: Split, parts: int) -> list[str]:
    """Stages, of which the first and last may have fewer layers, and the parts that each has of the model."""
    if split.stages == 1:
        return []
    found = ["--pipeline-model-parallel-size", str(split.stages)]
    most = math.ceil(model.layers / split.stages)
    for flag, size in zip(("first", "last"), _ends(model.layers, split.stages) or (), strict=False):
        if size < most:
            found += [f"--decoder-{flag}-pipeline-num-layers", str(size)]
    return found + (["--num-virtual-stages-per-pipeline-rank", str(parts)] if parts > 1 else [])


def _ends(layers: int, stages: int) -> tuple[int, int] | None:
    """Layers of the first and last stage where the others have as many as the fullest; None where these two cannot have so few."""
    most = math.ceil(layers / stages)
    missing = most * stages - layers
    first, last = most - (missing + 1) // 2, most - missing // 2
    return (first, last) if first > 0 else None
