"""Mixtures of flags as users would draw them, in Megatron-LM's own pretrain_gpt.py: those of a grid train as one stock rank does, and go on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.matrix import names
from tests.megatron.harness import CHECKOUT
from tests.megatron.test_pretrain import differences, flags, goes_on, needs_script, stock

SMALL = "--global-batch-size 4 --kv-channels 8 --disable-bias-linear --untie-embeddings-and-output-weights".split()
LATENT = (
    "--multi-latent-attention --q-lora-rank 20 --kv-lora-rank 24 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
    "--position-embedding-type rope"
)
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 40"
BIASED = "--moe-router-load-balancing-type none --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
NODES = "--moe-router-num-groups 4 --moe-router-group-topk 2"

CASES: dict[str, tuple[tuple[int, ...], str, str]] = {
    "experts biased, by nodes, odd heads": (
        (2, 1, 2, 1),
        f"{EXPERTS} {BIASED} {NODES} --moe-router-topk-scaling-factor 2.5 --moe-shared-expert-intermediate-size 60 "
        "--num-attention-heads 6 --hidden-size 60 --ffn-hidden-size 100 --group-query-attention --num-query-groups 2 --swiglu "
        "--normalization RMSNorm --position-embedding-type rope --rotary-percent 0.5 --qk-layernorm --use-distributed-optimizer",
        "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm",
    ),
    "latents stretched, shared, predicted": (
        (1, 2, 1, 2),
        f"{LATENT} --rope-type yarn --rotary-scaling-factor 4 --mtp-num-layers 1 --num-attention-heads 6 --hidden-size 60 "
        "--ffn-hidden-size 100 --swiglu --qk-layernorm --recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--context-parallel-size 2",
    ),
    "experts dropped, windows, heads dealt out": (
        (1, 1, 4, 1),
        "--num-experts 8 --moe-router-topk 1 --moe-router-pre-softmax --moe-ffn-hidden-size 60 --moe-router-load-balancing-type aux_loss "
        "--moe-aux-loss-coeff 2e-2 --moe-z-loss-coeff 1e-3 --moe-expert-capacity-factor 0.8 --window-size 5,0 --window-attn-skip-freq 2 "
        "--position-embedding-type none --squared-relu --ffn-hidden-size 100 --calculate-per-token-loss "
        "--recompute-granularity selective --recompute-modules moe core_attn",
        "--expert-model-parallel-size 2 --context-parallel-size 2 --cp-comm-type a2a",
    ),
}
"""A grid, flags of both, and flags of the grid's run."""


@needs_script
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", names(CASES, []))
def test_drawn_flags_train_as_on_one_rank(name: str) -> None:
    grid, words, ours = CASES[name]
    both = [*SMALL, *words.split()]
    cases = {"stock": stock("plain", *both), name: flags(grid, "plain", *both, *ours.split())}
    assert differences(cases) == {}


RESUMED: dict[str, tuple[str, dict[tuple[int, ...], str]]] = {
    "experts": (
        CASES["experts biased, by nodes, odd heads"][1],
        {
            (2, 1, 2, 1): "--expert-model-parallel-size 2 --moe-grouped-gemm",
            (1, 1, 2, 2): "--expert-model-parallel-size 4 --context-parallel-size 2",
        },
    ),
    "latents": (
        CASES["latents stretched, shared, predicted"][1],
        {(1, 2, 1, 2): "--context-parallel-size 2", (2, 1, 2, 1): ""},
    ),
    "thirds": (
        "--num-attention-heads 6 --hidden-size 60 --ffn-hidden-size 90 --add-qkv-bias --squared-relu --qk-layernorm --window-size 5,0 "
        "--position-embedding-type rope --use-rope-scaling --attention-output-gate --apply-residual-connection-post-layernorm "
        "--make-vocab-size-divisible-by 96",
        {(1, 1, 2, 2): "--use-distributed-optimizer", (3, 1, 1, 1): "--axonn-layout replicated"},
    ),
}
"""Flags of all runs; then the grid where it begins, that where it goes on, and how."""


@needs_script
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", names(RESUMED, []))
def test_drawn_flags_go_on(tmp_path: Path, name: str) -> None:
    words, more = RESUMED[name]
    script = Path(CHECKOUT, "pretrain_gpt.py")
    goes_on(tmp_path, script, "plain", [*SMALL, *words.split()], [tuple(more)], more=more)
