"""Our flags in Megatron's parser: with a stub of megatron.training, and with the real one where MEGATRON_LM_PATH says where it is."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch

from axonn_plugins.hosts.megatron import arguments, connections, features, known, rules
from axonn_plugins.hosts.megatron.settings import Settings
from tests.megatron import engine_double, harness
from tests.megatron.conftest import MODEL

ROOT = Path(__file__).resolve().parents[2]
ON = ["--tensor-model-parallel-impl", "axonn3d"]
ENGINE = ["--transformer-impl", "transformer_engine"]
EIGHT = [*ENGINE, "--fp8-format", "hybrid", "--fp8-recipe", "tensorwise"]
# Of a world of 8: the flags, and what the sentence must say.
WRONG = {
    "unknown-impl": (["--tensor-model-parallel-impl", "axon"], "axon is not known; use megatron or axonn3d"),
    "flag-without-impl": (["--axonn-gx", "2"], "--axonn-gx is given without .* axonn3d"),
    "layout-without-impl": (["--axonn-tune-matmuls"], "--axonn-tune-matmuls is given without"),
    "gx-zero": ([*ON, "--axonn-gx", "0"], "--axonn-gx 0 is neither an integer of at least 1 nor auto"),
    "gy-word": ([*ON, "--axonn-gy", "two"], "--axonn-gy two is neither"),
    "layout": ([*ON, "--axonn-layout", "scatterd"], "--axonn-layout scatterd is not known; use scattered"),
    "overlap": ([*ON, "--axonn-overlap", "allreduce"], "--axonn-overlap allreduce: allreduce is not one of these"),
    "overlap-none-and": ([*ON, "--axonn-overlap", "none", "all-reduce"], "none is not one of these"),
    "overlap-empty": ([*ON, "--axonn-overlap"], "--axonn-overlap has no value; use none, all"),
    "cache": ([*ON, "--axonn-gather-cache", "2GB2"], "--axonn-gather-cache 2GB2 is neither a number of layers"),
    "world": ([*ON, "--axonn-gx", "3"], "--axonn-gx 3, --axonn-gy 1, --axonn-gz 1 take 3 ranks, of which the 8"),
    "world-stages": (
        [*ON, "--axonn-gx", "8", "--pipeline-model-parallel-size", "2"],
        "--pipeline-model-parallel-size 2 take 16 ranks",
    ),
    "tensor-size": (
        [*ON, "--axonn-gx", "2", "--axonn-gy", "2", "--tensor-model-parallel-size", "2"],
        r"--tensor-model-parallel-size 2 is not gx\*gy = 2\*2 = 4",
    ),
    "tensor-size-one": (
        [*ON, "--axonn-gx=2", "--tensor-model-parallel-size=1"],
        "--tensor-model-parallel-size 1 is not",
    ),
    "heads": (
        [*ON, "--axonn-gx", "8", "--num-attention-heads", "4"],
        "--num-attention-heads 4 does not divide by --axonn-gx 8",
    ),
    "groups": (
        [
            *(*ON, "--axonn-gx", "4", "--hidden-size", "96", "--num-attention-heads", "12"),
            *("--group-query-attention", "--num-query-groups", "6"),
        ],
        "--num-query-groups 6 is neither a multiple of --axonn-gx 4 nor divides it",
    ),
    "ffn": (
        [*ON, "--axonn-gx", "4", "--ffn-hidden-size", "130"],
        "--ffn-hidden-size 130 does not divide by --axonn-gx 4",
    ),
    "hidden": (
        [*ON, "--axonn-gy", "4", "--hidden-size", "66", "--num-attention-heads", "3"],
        "--hidden-size 66 does not divide by --axonn-gy 4",
    ),
    "sequence": ([*ON, "--axonn-gx", "4", "--seq-length", "30"], "--seq-length 30 does not divide by --axonn-gx 4"),
    "batch": (
        [*ON, "--axonn-gz", "8", "--global-batch-size", "8"],
        "--global-batch-size 8 does not divide by .* use a multiple of 16",
    ),
    "context": (
        [*ON, "--axonn-gx", "2", "--context-parallel-size", "3"],
        "--context-parallel-size 3 does not divide the 4 ranks of a stage that differ in their tokens, 8 by gx.gy = 2 .*; choose a divisor",
    ),
    "context-length": (
        [*ON, "--axonn-gx", "4", "--context-parallel-size", "2", "--seq-length", "36"],
        "--seq-length by --context-parallel-size 2, 18 does not divide by --axonn-gx 4",
    ),
    "context-batch": (
        [*ON, "--context-parallel-size", "2", "--global-batch-size", "12"],
        "--global-batch-size 12 .* the 4 data-parallel ranks, of which each is --context-parallel-size 2 ranks; use a multiple of 8",
    ),
    "context-heads": (
        [*ON, "--axonn-gx", "4", "--num-attention-heads", "4", "--context-parallel-size", "2", "--cp-comm-type", "a2a"],
        "--cp-comm-type a2a deals out the 1 attention heads that the grid leaves a rank, of 4, .*; use p2p or all_gather",
    ),
    "context-layers": (
        [*ON, "--context-parallel-size", "2", "--cp-comm-type", "p2p", "all_gather"],
        "--cp-comm-type p2p all_gather does not go with --context-parallel-size 2 .*; use p2p, all_gather or a2a, once",
    ),
    "context-packed": (
        [*ON, "--context-parallel-size", "2", "--sft"],
        "--sft does not go with --context-parallel-size 2 .* leave --context-parallel-size at 1",
    ),
    "context-logits": (
        [*ON, "--context-parallel-size", "2", "--log-max-attention-logit"],
        "--log-max-attention-logit does not go with --context-parallel-size 2 .* leave it out",
    ),
    "random states": ([*ON, "--inference-rng-tracker"], "--inference-rng-tracker does not go with .* leave it out"),
    "context-auto": (
        [*ON, "--context-parallel-size", "2", "--axonn-gx", "auto"],
        "--context-parallel-size 2 does not go with the size auto",
    ),
    "expert-size": (
        [*ON, "--axonn-gx", "2", "--axonn-gz", "2", "--num-experts", "8", "--expert-model-parallel-size", "8"],
        "--expert-model-parallel-size 8 does not divide the 4 ranks that read different tokens .*; choose a divisor of 4",
    ),
    "instances": (
        [*ON, "--axonn-gz", "8", "--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2"],
        "--num-distributed-optimizer-instances 2 does not divide the 1 data-parallel replicas .*; choose a divisor of 1",
    ),
    "expert-width": (
        [*ON, "--axonn-gx", "2", "--num-experts", "8", "--moe-ffn-hidden-size", "33"],
        "--moe-ffn-hidden-size 33 does not divide by gx.gy = 2, .* or give --expert-tensor-parallel-size 1",
    ),
    "recomputed-act": (
        [*ON, "--num-experts", "8", "--moe-grouped-gemm", "--recompute-modules", "moe_act"],
        "--recompute-modules moe_act does not go with .* use moe in its place",
    ),
    "flex": (
        [*ON, "--num-experts", "8", "--moe-token-dispatcher-type", "flex"],
        "--moe-token-dispatcher-type flex does not go with .* use allgather or alltoall",
    ),
    "expert-norm": (
        # Megatron warns of experts without a width.
        [*ON, "--axonn-gz", "2", "--num-experts", "8", "--moe-ffn-hidden-size", "32", "--log-params-norm"]
        + ["--expert-model-parallel-size", "4"],
        "--log-params-norm does not go with --expert-model-parallel-size 4 beside --axonn-gz 2",
    ),
    "expert-auto": ([*ON, "--axonn-gx", "auto", "--num-experts", "8"], "--num-experts does not go with the size auto"),
    "sequence-parallel": (
        [*ON, "--axonn-gx", "2", "--sequence-parallel"],
        "--sequence-parallel does not go with .* --axonn-layout scattered",
    ),
    "fp8": (
        [*ON, "--fp8-format", "hybrid"],
        "--transformer-impl local does not go with --fp8-format hybrid beside .* use transformer_engine",
    ),
    "fp8-delayed": (
        [*ON, *ENGINE, "--fp8-format", "hybrid"],
        "--fp8-recipe delayed does not go with --fp8-format hybrid beside .* use tensorwise",
    ),
    "fp8-blocks": ([*ON, *EIGHT[:-1], "mxfp8"], "--fp8-recipe mxfp8 does not go with .* use tensorwise"),
    "fp8-experts": ([*ON, *EIGHT, "--num-experts", "8"], "--num-experts 8 does not go with --fp8-format hybrid"),
    "fp8-tuned": ([*ON, *EIGHT, "--axonn-tune-matmuls"], "--axonn-tune-matmuls does not go with --fp8-format hybrid"),
    "fsdp": ([*ON, "--use-megatron-fsdp"], "--use-megatron-fsdp does not .* --axonn-gz"),
    "fsdp2": ([*ON, "--use-torch-fsdp2"], "--use-torch-fsdp2 does not"),
    "comm-overlap": ([*ON, "--tp-comm-overlap"], "--tp-comm-overlap does not .* --axonn-overlap"),
    "graphs": ([*ON, "--cuda-graph-impl", "local"], "--cuda-graph-impl local does not"),
    "spec": ([*ON, "--spec", "somebodys.layers", "spec"], r"--spec somebodys.layers spec does not go with"),
    "saved": ([*ON, "--distribute-saved-activations"], "--distribute-saved-activations does not"),
    "latent": (
        [*ON, "--axonn-gy", "2", "--multi-latent-attention", "--kv-lora-rank", "33"],
        "--kv-lora-rank 33 does not divide by --axonn-gy 2",
    ),
    "lion": ([*ON, "--optimizer", "lion"], "--optimizer lion does not .* use adam, sgd or muon"),
    "sgd shared": (
        [*ON, "--optimizer", "sgd", "--use-distributed-optimizer"],
        "--use-distributed-optimizer does not go with --optimizer sgd: .*; leave it out, or add --axonn-offload-optimizer",
    ),
    "layer-wise muon": ([*ON, "--optimizer", "dist_muon"], "--optimizer dist_muon does not .* use adam, sgd or muon"),
    "muon of experts": (
        [*ON, "--optimizer", "muon", "--num-experts", "8"],
        "--num-experts 8 does not go with --optimizer muon beside .* leave it out, or use adam",
    ),
    "muon dealt out": (
        [*ON, "--optimizer", "muon", "--use-distributed-optimizer"],
        "--use-distributed-optimizer does not go with --optimizer muon beside .* leave it out",
    ),
    "muon by shares": (
        [*ON, "--axonn-gy", "2", "--optimizer", "muon", "--muon-tp-mode", "blockwise"],
        "--muon-tp-mode blockwise does not go with .*: it orthogonalises each rank's share by itself.* use duplicated",
    ),
    "muon in parts": (
        [*ON, "--optimizer", "muon", "--muon-tp-mode", "distributed"],
        "--muon-tp-mode distributed does not go with --optimizer muon beside .* use duplicated, or leave it out",
    ),
    "format": ([*ON, "--ckpt-format", "torch_dcp"], "--ckpt-format torch_dcp does not .* use torch or torch_dist"),
    "rl": ([*ON, "--perform-rl-step"], "--perform-rl-step does not"),
    "inference": (
        [*ON, "--transformer-impl", "inference_optimized"],
        "--transformer-impl inference_optimized does not",
    ),
    "engine": (
        [*ON, "--transformer-impl", "transformer_engine"],
        "needs transformer-engine, which is not installed; .* use local",
    ),
    "rows": (
        [
            *ON,
            "--axonn-gz",
            "8",
            "--hidden-size",
            "60",
            "--num-attention-heads",
            "10",
            "--save",
            "x",
            "--save-interval",
            "9",
        ],
        "--axonn-gz 8 does not divide the 60 rows .* or --ckpt-format torch",
    ),
    "rows of words": (
        [*ON, "--axonn-gx", "2", "--axonn-gz", "4", "--padded-vocab-size", "260", "--pretrained-checkpoint", "x"],
        "--axonn-gz 4 does not divide the 130 rows .--padded-vocab-size, .* or --ckpt-format torch",
    ),
    "local states": (
        [*ON, "--use-distributed-optimizer", "--non-persistent-ckpt-type", "local"],
        "--non-persistent-ckpt-type local does not go with --use-distributed-optimizer .*; use global, or leave",
    ),
    "yaml": ([*ON, "--yaml-cfg", "model.yaml"], "--yaml-cfg does not go with"),
    "no-value": ([*ON, "--axonn-gx"], "--axonn-gx has no value; give one"),
    "no-impl": (["--tensor-model-parallel-impl"], "--tensor-model-parallel-impl has no value"),
    "typo": ([*ON, "--axonn-gw", "2"], "--axonn-gw is not known; use --axonn-g"),
    "typo-without-impl": (["--axonn-layuot=replicated"], "--axonn-layuot is not known; use --axonn-layout"),
    "two-values": ([*ON, "--axonn-gx", "2", "4"], "--axonn-gx is followed by 4, a value too many; leave that out"),
    "two-values-equals": ([*ON, "--axonn-gx=2", "4"], "--axonn-gx is followed by 4, a value too many"),
    "two-impls": ([*ON, "axonn3d"], "--tensor-model-parallel-impl is followed by axonn3d, a value too many"),
    "switch-value": ([*ON, "--axonn-tune-matmuls", "yes"], "--axonn-tune-matmuls is followed by yes"),
    "switch-equals": ([*ON, "--axonn-tune-matmuls=yes"], "--axonn-tune-matmuls takes no value; leave =yes out"),
    "rampup from too few": (
        [*ON, "--axonn-gz", "4", "--rampup-batch-size", "4", "4", "100", "--decrease-batch-size-if-needed"],
        "--rampup-batch-size 4 is less than .* use a multiple of 16",
    ),
    "rampup": (
        [*ON, "--axonn-gz", "4", "--rampup-batch-size", "4", "4", "100"],
        "--rampup-batch-size 4 does not divide by .* use a multiple of 16",
    ),
    "megatron-refuses": (
        [*ON, "--overlap-param-gather"],
        "Megatron refuses these arguments: --overlap-param-gather only",
    ),
    "width": (
        [
            *(*ON, "--axonn-gx", "8", "--kv-channels", "5", "--group-query-attention", "--num-query-groups", "2"),
            *("--ffn-hidden-size", "256"),
        ],
        "the width of queries, keys and values, 60 does not divide by --axonn-gx 8",
    ),
    "gated-groups": (
        [*(*ON, "--axonn-gx", "4", "--group-query-attention", "--num-query-groups", "2"), "--attention-output-gate"],
        "--attention-output-gate needs --num-query-groups 2 to be a multiple of --axonn-gx 4",
    ),
    "gated-rows": (
        [
            *(*ON, "--axonn-gz", "8", "--group-query-attention", "--num-query-groups", "2", "--kv-channels", "1"),
            *("--attention-output-gate", "--save", "x", "--save-interval", "9"),
        ],
        "--axonn-gz 8 does not divide the 20 rows .the width of queries, keys and values by gx",
    ),
    "expert-tensor": (
        [*ON, "--axonn-gx", "4", "--expert-tensor-parallel-size", "2"],
        r"--expert-tensor-parallel-size 2 is neither 1 nor gx\*gy = 4\*1 = 4",
    ),
    "norm-1p": ([*ON, "--apply-layernorm-1p"], "--apply-layernorm-1p does not go with"),
    "fused-loss": (
        [*ON, "--cross-entropy-loss-fusion"],
        "--cross-entropy-loss-fusion does not go with .* leave it out",
    ),
    "sharp": ([*ON, "--use-sharp"], "--use-sharp does not go with"),
    "batch-invariant": ([*ON, "--batch-invariant-mode"], "--batch-invariant-mode does not go with"),
    "precisions": ([*ON, "--te-precision-config-file", "x.yaml"], "--te-precision-config-file x.yaml does not go with"),
    "gradients-saved": ([*ON, "--save-wgrads-interval", "5"], "--save-wgrads-interval 5 does not go with"),
    "xavier": (
        [*ON, "--init-method-xavier-uniform"],
        "--init-method-xavier-uniform does not go with .* add --use-cpu-initialization",
    ),
    "tuned-by-time": (
        [*ON, "--deterministic-mode", "--axonn-tune-matmuls"],
        "--axonn-tune-matmuls does not go with --deterministic-mode",
    ),
    "early-gather": (
        [*ON, "--overlap-param-gather-with-optimizer-step"],
        "--overlap-param-gather-with-optimizer-step does not .* use --overlap-param-gather",
    ),
    "auto": ([*ON, "--axonn-gx", "auto", "--axonn-gy", "3"], "no grid of 8 ranks with --axonn-gy 3"),
    "tied-norm": (
        [*ON, "--axonn-gz", "2", "--pipeline-model-parallel-size", "2", "--log-params-norm"],
        "--log-params-norm does not go with .* --untie-embeddings-and-output-weights",
    ),
    "norm-of-predictions": (
        [*ON, "--axonn-gz", "2", "--pipeline-model-parallel-size", "2", "--log-params-norm", "--mtp-num-layers", "1"]
        + ["--untie-embeddings-and-output-weights", "--position-embedding-type", "rope"],
        "--log-params-norm does not go with .* a copy of the embeddings for --mtp-num-layers 1, .* leave it out",
    ),
    "no-samples": (
        [*ON, "--axonn-gz", "auto", "--micro-batch-size", "-1"],
        "--micro-batch-size -1 is less than 1; give",
    ),
    "auto-heads": (
        [*ON, "--axonn-gx", "auto", "--num-attention-heads", "7"],
        "--num-attention-heads 7 does not divide --hidden-size 64; .* or give --kv-channels",
    ),
    "no-stages": (
        [*ON, "--pipeline-model-parallel-size", "0"],
        "--pipeline-model-parallel-size 0 is less than 1; give a positive number",
    ),
    "negative": ([*ON, "--axonn-gx", "-1"], "--axonn-gx -1 is neither an integer of at least 1"),
    "no-heads": ([*ON, "--num-attention-heads", "0"], "--num-attention-heads 0 is less than 1; give"),
    "virtual-zero": (
        [*ON, "--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "0"],
        "Megatron refuses these arguments: integer .*by zero: .* line ",
    ),
    "no-hidden": ([*ON, "--hidden-size", "0"], "--hidden-size 0 is less than 1; give"),
    "no-groups": ([*ON, "--group-query-attention", "--num-query-groups", "0"], "--num-query-groups 0 is less than 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_combination_is_one_sentence(host, capsys, name):
    flags, said = WRONG[name]
    if name == "engine" and importlib.util.find_spec("transformer_engine"):
        pytest.skip("transformer-engine is installed")
    with pytest.raises(SystemExit) as stopped:
        host.run(*flags)
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and told.count("\n") == 1
    assert re.match("pretrain_gpt.py: error: .*" + said, told), told
    assert ";" in told, "what to do"
    assert not host.installed


def test_the_flags_become_settings(host):
    args = host.run(*ON, "--axonn-gx", "2", "--axonn-gy", "2", "--axonn-gz=2")
    assert host.installed == [Settings(2, 2, 2)]
    assert (args.tensor_model_parallel_size, args.data_parallel_size) == (4, 2)
    assert not args.gradient_accumulation_fusion and args.no_persist_layer_norm
    words = ["--axonn-layout", "replicated", "--axonn-gather-cache", "2GiB", "--axonn-tune-matmuls"]
    host.run(*ON, *words, "--axonn-overlap", "all-gather", "all-reduce", "--tensor-model-parallel-size", "1")
    assert host.installed[1] == Settings(1, 1, 1, "replicated", True, False, True, "2GiB", True)
    host.run(*ON, "--axonn-overlap", "none")
    # Two rows for each of the layer's width.
    odd = ["--ffn-hidden-size", "66", "--padded-vocab-size", "256", "--save", "x", "--save-interval", "9"]
    host.run(*ON, "--axonn-gz", "4", "--quick-geglu", *odd)
    assert host.installed[2] == Settings(1, 1, 1, "scattered", False, False, False)
    assert host.installed[1].options().cache_gathers == "2GiB"


def test_a_distributed_optimizer_is_saved_for_any_ranks(host):
    def for_any(*flags):
        return host.run(*ON, "--axonn-gz", "2", *flags).dist_ckpt_optim_fully_reshardable

    shared, torch, dist = "--use-distributed-optimizer", ("--ckpt-format", "torch"), ("--ckpt-format", "torch_dist")
    assert for_any(shared) and not for_any() and not for_any(shared, *torch)
    assert for_any(shared, *torch, "--ckpt-convert-format", "torch_dist")
    assert not for_any(shared, *dist, "--ckpt-convert-format", "torch")


def test_weight_gradients_are_added_by_a_kernel_where_there_is_one(host):
    def fused(*flags):
        return host.run(*ON, *flags).gradient_accumulation_fusion

    with engine_double.installed(apex=True):
        assert fused("--axonn-gx", "2", "--axonn-gy", "2")
        assert not fused("--no-gradient-accumulation-fusion")
        assert not fused("--axonn-gz", "2"), "a sum over z comes between"
        assert not fused("--axonn-tune-matmuls")
    with engine_double.installed(engine=True):
        assert fused(*ENGINE) and not fused()
        assert not fused(*ENGINE, "--num-experts", "8")


UNEVEN = {
    "hidden": (["--axonn-gy", "8"], "--hidden-size 64 by --axonn-gy 8 leaves a rank 8, no multiple of 16"),
    "ffn": (["--axonn-gx", "2", "--ffn-hidden-size", "48"], "--ffn-hidden-size 48 by --axonn-gx 2 leaves a rank 24"),
    "heads": (
        ["--axonn-gx", "8", "--ffn-hidden-size", "256"],
        "the width of all heads 64 by --axonn-gx 8 leaves a rank 8",
    ),
    "tokens": (["--seq-length", "20"], "--seq-length times --micro-batch-size 40 by --context-parallel-size 1 leaves"),
}


@pytest.mark.parametrize("name", UNEVEN)
def test_products_in_8_bits_are_of_even_sizes(host, capsys, name):
    flags, said = UNEVEN[name]
    with engine_double.installed(engine=True):
        host.run(*ON, *EIGHT, "--axonn-gx", "2", "--axonn-gy", "2")
        assert len(host.installed) == 1
        with pytest.raises(SystemExit):
            host.run(*ON, *EIGHT, *flags)
    told = capsys.readouterr().err
    assert re.match("pretrain_gpt.py: error: .*" + said, told) and told.count("\n") == 1, told


DROPPED = {
    "heads": (
        ["--axonn-gx", "2", "--num-attention-heads", "2"],
        r"gx\*gy = 4 does not divide 2 heads .* ranks along y",
    ),
    "replicated": (
        ["--axonn-layout", "replicated"],
        "with --axonn-layout replicated ranks along y have the same heads",
    ),
}


@pytest.mark.parametrize("name", DROPPED)
def test_ranks_with_the_same_heads_drop_the_same(host, capsys, name):
    flags, said = DROPPED[name]
    with engine_double.installed(engine=True):
        host.run(*ON, *ENGINE, "--axonn-gx", "2", "--axonn-gy", "2")
        host.run(*ON, *ENGINE, "--axonn-gy", "2", *flags, "--attention-dropout", "0")
        host.run(*ON, "--axonn-gy", "2", *flags)
        assert len(host.installed) == 3
        with pytest.raises(SystemExit):
            host.run(*ON, *ENGINE, "--axonn-gy", "2", *flags)
    told = capsys.readouterr().err
    words = "pretrain_gpt.py: error: --attention-dropout 0.1 does not go with Transformer Engine's .*: "
    assert re.match(words + said + ".*; give --attention-dropout 0, or", told) and told.count("\n") == 1, told


def test_without_the_flag_nothing_is_different(host, monkeypatch):
    args = host.run("--tensor-model-parallel-size", "2")
    assert not host.installed and args.gradient_accumulation_fusion
    assert not [name for name in vars(args) if "axonn" in name or name.endswith("_impl") and "tensor" in name]
    assert vars(host.run("--tensor-model-parallel-size", "2", "--tensor-model-parallel-impl", "megatron")) == vars(args)


def test_help_has_a_group_of_its_own(host):
    parser = host.add_megatron_arguments(ArgumentParser())
    (group,) = (one for one in parser._action_groups if one.title == "axonn")
    text = parser.format_help()
    for action in group._group_actions:
        assert action.option_strings[0] in text and action.help


def test_flags_are_added_once(host):
    before = host.validate_args
    arguments.add_flags(host)
    assert host.validate_args is before


def test_sizes_by_auto(host, capsys):
    args = host.run(*ON, "--axonn-gx", "auto", "--axonn-gy", "auto", "--axonn-gz", "auto", "--vocab-size", "1000")
    (settings,) = host.installed
    told = capsys.readouterr().out
    assert (
        f"--axonn-gx {settings.gx} --axonn-gy {settings.gy} --axonn-gz {settings.gz}" in told and "planner, on " in told
    )
    assert args.tensor_model_parallel_size == settings.tensor
    host.run(*ON, "--axonn-gx", "2", "--axonn-gz", "auto")
    assert host.installed[1].gx == 2 and host.installed[1].gy == 1


def test_what_nobody_has_looked_at_is_named_once(host, monkeypatch, recwarn):
    newer = host.add_megatron_arguments

    def add_megatron_arguments(parser):
        group = parser.add_argument_group("newer")
        group.add_argument("--twist", type=int, default=1)
        group.add_argument("--bend", nargs="*", default=[])
        group.add_argument("--rotate", default="2", type=float)
        group.add_argument("--no-turn", action="store_false", dest="turn")
        return newer(parser)

    monkeypatch.setattr(host, "add_megatron_arguments", add_megatron_arguments)

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["/there/pretrain_gpt.py", *MODEL, *flags])
        recwarn.clear()
        host.validate_args(host.parse_args(), {})
        return [str(one.message) for one in recwarn if "axonn" in str(one.message)]

    assert run(*ON, "--twist", "1") == run("--twist", "5", "--no-turn") == []
    (said,) = run(*ON, "--bend", "a", "b", "--twist=5", "--no-turn", "--rotate", "3")
    assert said.startswith(
        "axonn: --twist 5, --bend ['a', 'b'], --rotate 3.0, --no-turn: not known when axonn3d was tested"
    )
    monkeypatch.setenv("RANK", "1")
    assert run(*ON, "--twist", "5") == []


def test_what_a_script_adds_is_not_warned_of(host, monkeypatch, recwarn):
    monkeypatch.setattr(sys, "argv", ["/there/pretrain_gpt.py", *MODEL, *ON, "--my-own", "3"])
    parser = host.add_megatron_arguments(ArgumentParser(allow_abbrev=False))
    parser.add_argument("--my-own", type=int, default=1)
    assert parser.parse_args().axonn_unknown == []


def test_the_variable_that_megatron_asks_for(host, capsys, monkeypatch):
    monkeypatch.delenv(connections.VARIABLE, raising=False)
    host.run(*ON, "--axonn-gz", "2")
    host.run(*ON, "--axonn-gx", "2", "--distributed-backend", "gloo")
    assert connections.VARIABLE not in os.environ
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(SystemExit):
        host.run(*ON, "--axonn-gx", "2")
    assert "CUDA_DEVICE_MAX_CONNECTIONS is not set, which Megatron needs at 1 where gx*gy is" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert host.run(*ON, "--axonn-gx", "2").tensor_model_parallel_size == 2
    assert os.environ[connections.VARIABLE] == "1"
    monkeypatch.delenv(connections.VARIABLE)
    host.run(*ON, "--axonn-gx", "auto")
    assert os.environ[connections.VARIABLE] == "1"
    monkeypatch.setenv(connections.VARIABLE, "8")
    with pytest.raises(SystemExit):
        host.run(*ON, "--axonn-gy", "2")
    assert "Megatron refuses these arguments: set CUDA_DEVICE_MAX_CONNECTIONS to 1" in capsys.readouterr().err
    assert os.environ[connections.VARIABLE] == "8"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("T5Model", "T5: attention to the encoder"),
        ("BertModel", "BERT: heads of words"),
        ("hybrid_builder", "HybridModel of later versions: its layers are not"),
    ],
)
def test_a_script_of_another_model_is_refused(host, capsys, monkeypatch, name, words):
    monkeypatch.setattr(sys.modules["__main__"], name, object, raising=False)
    with pytest.raises(SystemExit):
        host.run(*ON)
    said = capsys.readouterr().err
    assert f"does not split {words}" in said
    assert said.rstrip().endswith("use pretrain_gpt.py or pretrain_mamba.py, or leave the flag out")
    host.run()


def _has(monkeypatch, *packages):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in packages or found(name))


def test_what_goes_with_mamba_mixers(host, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "mamba_builder", object, raising=False)
    if importlib.util.find_spec("mamba_ssm") is None:
        with pytest.raises(SystemExit):
            host.run(*ON)
        assert "Mamba mixers are computed by mamba-ssm, which is not installed" in capsys.readouterr().err
    _has(monkeypatch, "mamba_ssm", "transformer_engine")
    for words, said in (
        (EIGHT, "--fp8-format hybrid does not go with Mamba mixers beside"),
        (["--recompute-granularity", "full"], "--recompute-granularity full does not go with Mamba mixers beside"),
        (["--axonn-gx", "auto"], "sizes auto do not go with Mamba mixers"),
    ):
        with pytest.raises(SystemExit):
            host.run(*ON, *words)
        assert said in capsys.readouterr().err
    assert host.run(*ON, "--axonn-gx", "2", "--spec", "somebodys.layers", "spec").axonn_gx == 2
    assert host.run(*ON, "--axonn-gz", "2", "--axonn-offload-optimizer").axonn_stage == 0
    shared = ("--optimizer", "sgd", "--use-distributed-optimizer")
    assert host.run(*ON, "--axonn-gz", "2", "--axonn-offload-optimizer", *shared).axonn_stage == 1


def test_muon_is_that_of_a_package(host, capsys, monkeypatch):
    if importlib.util.find_spec("emerging_optimizers") is None:
        with pytest.raises(SystemExit):
            host.run(*ON, "--optimizer", "muon")
        assert "that of emerging-optimizers, which is not installed" in capsys.readouterr().err
    _has(monkeypatch, "emerging_optimizers")
    muon = [*ON, "--axonn-gx", "2", "--optimizer", "muon", "--num-experts", "0"]
    assert host.run(*muon).muon_tp_mode == "blockwise"
    assert host.run(*muon, "--muon-tp-mode", "duplicated", "--save", "there").axonn_gx == 2
    assert host.run(*ON, "--axonn-gz", "2", *muon[-4:], "--muon-tp-mode", "blockwise").axonn_gz == 2


def test_versions_of_megatron_core(host, capsys, monkeypatch):
    from megatron import core
    from megatron.core import parallel_state

    packed = [*ON, "--axonn-gx", "2", "--sft"]
    monkeypatch.setattr(core, "__version__", "0.16.1")
    with pytest.raises(SystemExit):
        host.run(*packed)
    assert "--sft does not go with gx*gy = 2 in megatron-core 0.16, whose scripts send" in capsys.readouterr().err
    assert host.run(*ON, "--axonn-gz", "2", "--sft").axonn_gz == 2
    monkeypatch.setattr(core, "__version__", "0.17.0")
    assert host.run(*packed).axonn_gx == 2
    monkeypatch.setattr(core, "__version__", "0.21.0")
    with pytest.warns(UserWarning, match="megatron-core 0.21.0 is newer than what was tested"):
        host.run(*ON)
    monkeypatch.setattr(parallel_state, "initialize_model_parallel", lambda tensor_model_parallel_size=1: None)
    with pytest.raises(SystemExit):
        host.run(*ON)
    assert "needs expert_model_parallel_size, which megatron-core 0.21.0 has not; install" in capsys.readouterr().err


def test_a_parser_that_is_unknown_is_left_alone():
    with pytest.warns(UserWarning, match="has no parser that we know"):
        arguments.add_flags(type(sys)("megatron.training.arguments"))


def test_features_are_named_once():
    names = [feature.name for feature in features.FEATURES]
    assert len(set(names)) == len(names)
    assert rules.IMPL.startswith(arguments._IMPL)


def test_every_argument_of_the_stub_is_known(host):
    parser = host.add_megatron_arguments(ArgumentParser())
    ours = {"help", "tensor_model_parallel_impl", *(a.dest for a in parser._actions if a.dest.startswith("axonn_"))}
    assert {action.dest for action in parser._actions} - ours <= known.KNOWN


def test_the_import_of_megatrons_parser_arms_it(tmp_path):
    """A new Python in which `megatron.training` is the stub: what a user's script does, by the installed entry point."""
    place = tmp_path / "megatron" / "training"
    place.mkdir(parents=True)
    (place / "__init__.py").touch()
    (place / "arguments.py").write_text(Path(__file__).with_name("stub.py").read_text())
    script = tmp_path / "pretrain_gpt.py"
    script.write_text(
        "import axonn_plugins\naxonn_plugins.activate()\nfrom megatron.training.arguments import parse_args, validate_args\n"
        "import sys\nassert 'axonn_plugins.hosts.megatron.rules' not in sys.modules\nflags = sys.argv[1:]\n"
        f"for sys.argv[1:] in (flags, [*flags, *{[*ON, '--axonn-gx', '3']!r}]):\n"
        "    validate_args(parse_args(), {})\n    print('went on', flush=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": harness.path(str(tmp_path)), "WORLD_SIZE": "8"}
    done = subprocess.run([sys.executable, str(script), *MODEL], env=environment, capture_output=True, text=True)
    # Lines before it are megatron.core's warnings about what is not installed.
    assert (done.returncode, done.stdout) == (2, "went on\n") and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("pretrain_gpt.py: error: --axonn-gx 3,")


REAL = """
import argparse, contextlib, io, json, os, sys
import axonn_plugins
axonn_plugins.activate()
import torch
# What validation asks of a device.
torch.cuda.get_device_properties = lambda *_: type("Device", (), {"major": 10})
import megatron.training.arguments as arguments
from axonn_plugins.hosts.megatron import known, patch
installed = []
patch.install = installed.append
told = []
for flags in json.load(open(sys.argv[1])):
    sys.argv = ["pretrain_gpt.py", *flags]
    err, out, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stderr(err), contextlib.redirect_stdout(out):
        try:
            args = arguments.validate_args(arguments.parse_args(), {})
            ours = sorted(name for name in vars(args) if "axonn" in name)
            said = [args.tensor_model_parallel_size, args.data_parallel_size, ours, len(installed)]
        except SystemExit as stopped:
            code, said = stopped.code, err.getvalue()
    told.append([code, said])
parser = arguments.add_megatron_arguments(argparse.ArgumentParser())
unknown = [action.dest for action in parser._actions if action.dest not in known.KNOWN and "axonn" not in str(action.help).lower()]
print("told:" + json.dumps([told, unknown]))
"""


@pytest.mark.skipif(bool(harness.missing()), reason=harness.missing())
def test_the_real_parser(tmp_path):
    model = [*MODEL, "--max-position-embeddings", "512", "--lr", "1e-3", "--mock-data"]
    cases = [[*model, *flags] for flags, _ in WRONG.values()]
    cases += [model, [*model, *ON, "--axonn-gx", "2", "--axonn-gy", "2", "--no-gradient-accumulation-fusion"]]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    environment = {**os.environ, "PYTHONPATH": harness.path(harness.CHECKOUT), "WORLD_SIZE": "8"}
    done = subprocess.run(
        [sys.executable, "-c", REAL, str(tmp_path / "cases.json")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    told, unknown = json.loads(done.stdout.partition("told:")[2])
    assert [name for name in unknown if name != "help" and not name.startswith("axonn_")] == []
    for name, (code, said) in zip(WRONG, told, strict=False):
        assert code == 2, (name, said)
        # Megatron's own parser knows no lion.
        assert name == "lion" or re.match("pretrain_gpt.py: error: .*" + WRONG[name][1] + ".*\n$", said), (name, said)
    assert told[-2] == [0, [1, 8, [], 0]]
    code, (tensor, data, ours, installs) = told[-1]
    assert (code, tensor, data, installs) == (0, 4, 2, 1) and "axonn_gx" in ours
