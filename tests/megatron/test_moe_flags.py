"""Every flag of Megatron's mixtures of experts is obeyed as on one rank, or refused: nothing is dropped without a word."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.transformer import TransformerConfig

from axonn_plugins.config.base import ConfigError
from axonn_plugins.hosts.megatron import grouped
from axonn_plugins.hosts.megatron.features import FEATURES
from axonn_plugins.hosts.megatron.refusals import check_config, refused
from axonn_plugins.hosts.megatron.settings import Settings
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.megatron import harness, training
from tests.megatron.test_experts import CASES as EXPERTS
from tests.megatron.test_experts import GATED, ROUTED
from tests.megatron.training import Case

FREE = {"moe_aux_loss_coeff": 0, "moe_router_load_balancing_type": "none"}
CASES = {
    "scaled": {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5, "moe_router_dtype": "fp64"}
    | {"moe_per_layer_logging": True, "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"]}
    | {"moe_aux_loss_coeff": [1e-2, 2e-2]},
    "global": {"moe_router_load_balancing_type": "global_aux_loss", "moe_enable_routing_replay": True}
    | {
        "moe_router_bias_update_rate": 0.1,
        "moe_router_enable_expert_bias": True,
        "moe_router_score_function": "sigmoid",
    },
    "position": {
        **FREE,
        "moe_expert_capacity_factor": 0.7,
        "moe_token_drop_policy": "position",
        "moe_layer_recompute": True,
    },
    "jittered": {**FREE, "moe_input_jitter_eps": 0.3},
    "grouped": {**GATED, "moe_grouped_gemm": True, "moe_layer_freq": [1, 0]},
    "grouped biases": {
        "moe_grouped_gemm": True,
        "add_bias_linear": True,
        "moe_router_topk": 1,
        "moe_router_pre_softmax": True,
    }
    | {"moe_apply_probs_on_input": True},
}
FEW = 2
"""Sequences of a step, each a microbatch."""
PLACES = [(Settings(2, 1, 2), (2, None), 1), (Settings(1, 2), (1, None), 1)]
# Ranks that read other samples draw other noise, and count other tokens at a time, in Megatron, too.
ALONE = {"jittered": [(Settings(2, 2), (1, None), 1)], "global": [(Settings(2), (1, 1), 2)]}
"""Grids, ranks of experts, and how many share a sequence."""
OVERLAPPED = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "bucket_size": 300,
}

_NONE = "without the flex dispatcher, which is refused, Megatron reads it nowhere"
NOTHING = {
    "moe_flex_dispatcher_backend": _NONE,
    "moe_deepep_num_sms": _NONE,
    "moe_hybridep_num_sms": _NONE,
    "moe_upcycling_granularity": "without --moe-use-upcycling, which is refused, Megatron reads it nowhere",
    "moe_pad_experts_for_cuda_graph_inference": "it is read in inference alone, which is refused",
    "moe_router_fusion": "the router is Megatron's own, which asks Transformer Engine for the kernel",
    "moe_router_topk_limited_devices": "Megatron makes moe_router_group_topk of it, and has no flag for it",
    "moe_extended_tp": "Megatron reads it nowhere",
    "moe_token_dropping": "Megatron reads it nowhere, and has no flag for it",
}
"""Why a flag changes nothing that is replaced."""
HOSTS = ("moe_router_padding_for_quantization", "moe_router_padding_for_fp8")
"""What Megatron refuses itself without fp8, which is refused."""
ELSEWHERE = ("balanced", "biased", "dropping")
"""Cases of `test_experts` whose numbers are compared there."""


def _refused() -> set[str]:
    return {feature.name for feature in FEATURES}


def _fields() -> list[str]:
    return [field.name for field in dataclasses.fields(TransformerConfig) if field.name.startswith("moe_")]


def _obeyed() -> dict[str, dict[str, Any]]:
    """By field, the configuration of a case that has another value than Megatron's, and whose numbers are compared."""
    usual = {field.name: field.default for field in dataclasses.fields(TransformerConfig)}
    cases = [*({**ROUTED, **config} for config in CASES.values()), *(EXPERTS[case].config for case in ELSEWHERE)]
    return {name: config for config in cases for name, value in config.items() if value != usual[name]}


@pytest.mark.parametrize("name", _fields())
def test_every_field_is_obeyed_or_refused(name: str) -> None:
    kinds = [name in kind for kind in (_obeyed(), NOTHING, HOSTS)]
    assert sum(kinds) <= 1, "two answers"
    # Of a dispatcher some are obeyed.
    assert any(kinds) or name in _refused(), f"nobody has looked at {name}"


@pytest.mark.parametrize("feature", [one for one in FEATURES if one.name.startswith("moe_")], ids=lambda one: one.name)
def test_refusals_say_what_to_do(feature: Any) -> None:
    value = "flex" if feature.name == "moe_token_dispatcher_type" else 8 if feature.name == "moe_latent_size" else True
    assert refused(feature, value)
    if feature.name in _fields():
        config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
        setattr(config, feature.name, value)
        with pytest.raises(ConfigError, match=f"{feature.name} = .* does not go with axonn3d: .*; (leave it out|use )"):
            check_config(config)


def _case(name: str, micro_batches: int, **more: Any) -> Case:
    ddp = OVERLAPPED if name == "grouped" else {}
    return Case(config={**ROUTED, **CASES[name]}, ddp=ddp, micro_batches=micro_batches, batch=FEW, **more)


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_what_is_obeyed_is_one_rank_s(every: bool) -> None:
    """Each case in one place, in turn, or in every one."""
    # One rank has no grouped kernel of Megatron's, and its experts with biases end in an error of autograd.
    plain = {name: _case(name, FEW) for name in CASES}
    plain = {name: replace(case, config={**case.config, "moe_grouped_gemm": False}) for name, case in plain.items()}
    plain["grouped biases"] = plain["grouped biases"].on(Settings())
    wanted = {}
    for number, name in enumerate(CASES):
        places = ALONE.get(name) or (PLACES if every else [PLACES[number % 2]])
        for settings, experts, context in places:
            readers = 4 // settings.tensor // context
            run = _case(name, FEW // readers, settings=settings, experts=experts, context=context)
            wanted[f"{name} on {settings}"] = run
    one, ranks = run_ranks(training.train_all, 1, plain)[0], run_ranks(training.train_all, 4, wanted)
    for run, found in ranks[0].items():
        expected = one[run.partition(" on ")[0]]
        for what, tolerance in (("losses", 1e-6), ("norms", 1e-5)):
            apart = max(abs(a - b) / abs(b) for a, b in zip(found[what], expected[what], strict=True))
            assert apart < tolerance, (run, what, apart)


def test_products_of_experts_are_grouped() -> None:
    """Once for all experts of a rank in each of the two mixtures of a pass, where one after another there are four products."""
    assert run_ranks(_counted, 1) == [[4, 0]]


def test_products_whose_rows_the_kernel_refuses_are_done_one_after_another() -> None:
    """It refuses rows that are no multiple of 16 bytes on CPUs, too."""
    rows = torch.ones(4, 12)
    assert grouped.has_kernel(rows, torch.ones(10, 12), torch.ones(12, 20))
    assert not grouped.has_kernel(rows, torch.ones(10, 12), torch.ones(12, 10))
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        grouped.F.grouped_mm(torch.ones(4, 10), torch.ones(2, 12, 10).mT, offs=torch.tensor([2, 4], dtype=torch.int32))


def _counted() -> list[int]:
    training.on_cpu()
    return [_products(Case(settings=Settings(), config={**ROUTED, "moe_grouped_gemm": flag})) for flag in (True, False)]


def _products(case: Case) -> int:
    """Count the grouped products of a pass."""
    original, calls = grouped.F.grouped_mm, []

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return original(*given, **named)

    with pytest.MonkeyPatch.context() as patch, training.parallel(case):
        patch.setattr(grouped.F, "grouped_mm", counted)
        model = training.build(case)
        with model.no_sync():
            training.loss_of(model, torch.zeros(2, training.SEQUENCE + 1, dtype=torch.long)).mean().backward()
    return len(calls)


@pytest.mark.skipif(bool(harness.missing()), reason=harness.missing())
def test_every_flag_of_the_parser_has_an_answer() -> None:
    code = (
        "import argparse; from axonn_plugins.autoload import activate; activate(); from megatron.training import arguments as a; "
        "p = a.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)); "
        "print('FLAGS', *[x.dest for x in p._actions if x.dest.startswith('moe_')])"
    )
    environment = {**os.environ, "PYTHONPATH": harness.path(harness.CHECKOUT), "AXONN_MEGATRON_CPU": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    flags = next(line for line in done.stdout.splitlines() if line.startswith("FLAGS")).split()[1:]
    assert len(flags) > 30
    known = {*_obeyed(), *NOTHING, *HOSTS, *_refused()}
    assert set(flags) <= known


@pytest.mark.parametrize("name", HOSTS)
def test_what_megatron_refuses_itself(name: str) -> None:
    sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1, "num_moe_experts": 4}
    with pytest.raises(ValueError, match="fp8"):
        TransformerConfig(**sizes, **{name: True})
