"""Mixtures of flags in Megatron-LM's own pretrain_gpt.py as users might draw them: a grid trains as one stock rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import names
from tests.megatron.harness import CHECKOUT
from tests.megatron.test_pretrain import differences, flags, goes_on, needs_script, stock

FEW = ["--global-batch-size", "4"]
ODD = "--num-attention-heads 6 --hidden-size 60 --disable-bias-linear --untie-embeddings-and-output-weights"
LATENT = (
    "--multi-latent-attention --q-lora-rank 20 --kv-lora-rank 24 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
    "--position-embedding-type rope"
)
YARN = f"{LATENT} --rope-type yarn --rotary-scaling-factor 4"
CLAMPED = "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0"
BIASED = "--moe-router-load-balancing-type none --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
EXPERTS = f"--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 40 {BIASED}"
AGAIN = "--recompute-granularity full --recompute-num-layers 1 --recompute-method"

CASES: dict[str, tuple[tuple[int, ...], str, str]] = {
    "experts biased, of nodes": (
        (2, 1, 2, 1),
        f"{ODD} {EXPERTS} --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-topk-scaling-factor 2.5 "
        "--moe-shared-expert-intermediate-size 60 --ffn-hidden-size 100 --kv-channels 8 --group-query-attention "
        "--num-query-groups 2 --swiglu --normalization RMSNorm --position-embedding-type rope --rotary-percent 0.5 "
        "--qk-layernorm --use-distributed-optimizer",
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm",
    ),
    "latents stretched, predicting, shared": (
        (1, 2, 1, 2),
        f"{ODD} {YARN} --mtp-num-layers 1 --ffn-hidden-size 100 --kv-channels 8 --swiglu --qk-layernorm {AGAIN} block",
        "--context-parallel-size 2",
    ),
    "experts dropping, windows, heads dealt out, a mean over tokens": (
        (1, 1, 4, 1),
        "--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 60 "
        "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 2e-2 --moe-z-loss-coeff 1e-3 "
        "--moe-expert-capacity-factor 0.8 --window-size 5,0 --window-attn-skip-freq 2 --position-embedding-type none "
        "--squared-relu --ffn-hidden-size 100 --calculate-per-token-loss --disable-bias-linear "
        "--untie-embeddings-and-output-weights --kv-channels 8 --recompute-granularity selective --recompute-modules "
        "moe core_attn",
        "--expert-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type a2a",
    ),
    "experts clamped, grouped, sequences shared": (
        (1, 1, 4, 1),
        f"--hidden-size 32 --kv-channels 4 --ffn-hidden-size 100 {CLAMPED} --position-embedding-type none --window-size "
        "5,0 --untie-embeddings-and-output-weights --window-attn-skip-freq 2 --disable-bias-linear "
        "--apply-residual-connection-post-layernorm --embedding-init-method-std 0.1 --num-experts 8 --moe-router-topk 1 "
        "--moe-ffn-hidden-size 60 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 2e-2 "
        f"--moe-router-pre-softmax --moe-shared-expert-intermediate-size 40 {AGAIN} uniform --seq-length 48 "
        "--max-position-embeddings 48 --lr-decay-style cosine --lr-warmup-iters 3 --min-lr 1e-5 --weight-decay 0.1",
        "--moe-grouped-gemm --context-parallel-size 2 --cp-comm-type a2a",
    ),
    "latents, Sinkhorn, whole experts": (
        (2, 1, 1, 2),
        f"--num-attention-heads 12 --hidden-size 48 --kv-channels 4 --ffn-hidden-size 100 --swiglu {YARN} --mscale 1.0 "
        "--mscale-all-dim 1.0 --untie-embeddings-and-output-weights --disable-bias-linear "
        "--apply-residual-connection-post-layernorm --init-method-std 0.006 --num-experts 8 --moe-router-topk 1 "
        f"--moe-ffn-hidden-size 80 --moe-router-load-balancing-type sinkhorn --moe-z-loss-coeff 1e-3 {AGAIN} uniform "
        "--seq-length 48 --max-position-embeddings 48",
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-grouped-gemm",
    ),
    "a gate, few groups, overlapped, on eight": (
        (2, 2, 2, 1),
        "--hidden-size 32 --kv-channels 4 --group-query-attention --num-query-groups 2 --ffn-hidden-size 80 --swiglu "
        "--position-embedding-type rope --rotary-seq-len-interpolation-factor 2 --softmax-type off-by-one "
        "--disable-bias-linear --num-experts 6 --moe-router-topk 1 --moe-ffn-hidden-size 80 "
        "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 2e-2 --moe-router-score-function sigmoid "
        "--moe-shared-expert-intermediate-size 40 --moe-shared-expert-gate --moe-router-dtype fp32 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --calculate-per-token-loss",
        "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall",
    ),
}
"""A grid, flags of both, and flags of the grid's run."""


@needs_script
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", names(CASES, []))
def test_drawn_flags_train_as_on_one_rank(name: str) -> None:
    grid, words, ours = CASES[name]
    both = [*FEW, *words.split()]
    cases = {"stock": stock("plain", *both), name: flags(grid, "plain", *both, *ours.split())}
    assert differences(cases) == {}


THEN: dict[str, tuple[tuple[int, ...], str]] = {
    "experts biased, of nodes": (
        (1, 1, 2, 2),
        "--expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall",
    ),
    "latents stretched, predicting, shared": ((2, 1, 2, 1), ""),
    "experts dropping, windows, heads dealt out, a mean over tokens": (
        (2, 1, 1, 2),
        "--expert-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type p2p",
    ),
    "experts clamped, grouped, sequences shared": ((2, 2, 1, 1), "--expert-tensor-parallel-size 1"),
    "latents, Sinkhorn, whole experts": (
        (1, 2, 2, 1),
        "--expert-model-parallel-size 4 --expert-tensor-parallel-size 1",
    ),
    "a gate, few groups, overlapped, on eight": (
        (1, 1, 2, 2),
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --context-parallel-size 2",
    ),
}
"""The grid that goes on from a case's checkpoint, and its flags."""
SHARED = {"--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"}
"""With which stock Megatron, without Transformer Engine and Apex, does not go on from a checkpoint of its own."""


@needs_script
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", names(THEN, []))
def test_drawn_flags_go_on_elsewhere(tmp_path: Path, name: str) -> None:
    first, words, ours = CASES[name]
    then, theirs = THEN[name]
    more = {first: ours.split(), then: theirs.split()}
    both = [*FEW, *(word for word in words.split() if word not in SHARED)]
    goes_on(tmp_path, Path(CHECKOUT, "pretrain_gpt.py"), "plain", both, [(first, then)], ours=more)
