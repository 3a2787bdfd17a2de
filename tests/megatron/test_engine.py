"""Transformer Engine's products, casts and norms, and kernels that add to main gradients, through doubles of them on CPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.transformer import transformer_block
from torch import Tensor

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.engine_layers import EngineColumnParallelLinear, LayerNormColumnParallelLinear
from axonn_plugins.hosts.megatron.settings import Settings
from tests.distributed import run_ranks
from tests.matrix import asked, thorough
from tests.megatron import engine_double as double
from tests.megatron import training
from tests.megatron.test_experts import LATENT
from tests.megatron.training import Case

WIDE = {"grad_reduce_in_fp32": True}
FUSED = {"gradient_accumulation_fusion": True}
EIGHT = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
PLAIN = Case(config={"hidden_size": 64}, micro_batches=2)
TIED = replace(PLAIN, model={"share_embeddings_and_output_weights": True})
GRIDS = {
    "x": Settings(4),
    "y": Settings(1, 4),
    "z": Settings(1, 1, 4),
    "x and y": Settings(2, 2, layout="replicated"),
    "x and z": Settings(2, 1, 2),
    "y and z": Settings(1, 2, 2),
}


def _marked(runs: Iterable[tuple[str, str]]) -> list[Any]:
    """Those that are not in every run, so."""
    return [run if run[1] in ("one rank", *SOME.get(run[0], ())) else thorough(*run) for run in runs]


def _with(case: Case, **config: Any) -> Case:
    return replace(case, config={**case.config, **config})


def _eight(case: Case) -> Case:
    # One microbatch a step: a scale is that of one, which is of other samples where ranks of z take turns.
    return replace(_with(case, **EIGHT, **FUSED), engine=True, micro_batches=1)


def _narrow(case: Case) -> Case:
    return replace(case, dtype=torch.bfloat16, ddp=WIDE)


RMS = {"normalization": "RMSNorm", "add_bias_linear": False}
LATENTS = {**LATENT, "q_lora_rank": 16, "qk_layernorm": True}
ENGINE = replace(_with(PLAIN, **FUSED), engine=True)
LAST = {"first_last_layers_bf16": True, "num_layers_at_start_in_bf16": 1, "num_layers_at_end_in_bf16": 0}
CASES = {
    "engine": ENGINE,
    "engine, RMSNorm": _with(ENGINE, **RMS),
    "engine, bf16": _narrow(ENGINE),
    "engine, latents": _with(ENGINE, **LATENTS),
    "apex, tied": _with(TIED, **FUSED),
    "apex, bf16": _narrow(_with(PLAIN, **FUSED)),
    "8 bits": _eight(PLAIN),
    "8 bits, e4m3": _with(_eight(PLAIN), fp8="e4m3"),
    "8 bits, last layer alone": _with(_eight(PLAIN), **LAST),
    "8 bits, bf16": _narrow(_eight(PLAIN)),
}
STOCK = {
    "engine": PLAIN,
    "engine, RMSNorm": _with(PLAIN, **RMS),
    "engine, bf16": _narrow(PLAIN),
    "engine, latents": _with(PLAIN, **LATENTS),
    "apex, tied": TIED,
    "apex, bf16": _narrow(PLAIN),
}
ON = {
    "engine": tuple(GRIDS),
    "8 bits": tuple(GRIDS),
    "engine, RMSNorm": ("x", "y"),
    "apex, tied": ("x and y", "x and z"),
}
"""Grids of a case; one where nothing is said."""
RUNS = [(name, grid) for name in CASES for grid in ON.get(name, ("x and y",))]
SOME = {
    "engine": ("x and z", "y and z"),
    "8 bits": ("z", "x and y"),
    "engine, RMSNorm": ("x",),
    "apex, tied": ("x and z",),
    "engine, bf16": ("x and y",),
    "engine, latents": ("x and y",),
    "apex, bf16": ("x and y",),
    "8 bits, last layer alone": ("x and y",),
    "8 bits, bf16": ("x and y",),
}
"""In every run."""
EIGHTS = tuple(name for name in CASES if name.startswith("8 bits"))


def _context(config: Any, layer: int = -1, is_init: bool = False) -> Any:
    """As Megatron's where it has Transformer Engine."""
    if is_init:
        return nullcontext()
    first = config.first_last_layers_bf16 and layer < config.num_layers_at_start_in_bf16
    recipe = double.Float8CurrentScaling(double.Format(config.fp8)) if config.fp8 and not first else None
    return double.fp8_autocast(enabled=recipe is not None, fp8_recipe=recipe)


def _train(cases: dict[str, Case], old: bool = False) -> dict[str, dict[str, Any]]:
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer_block, "get_fp8_context", _context)
        for name, case in cases.items():
            with double.installed(engine=case.engine, apex=not case.engine, old=old):
                found |= training.train_all({name: case})
                found[name]["calls"] = Counter(double.CALLS)
    return found


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    """Megatron's own layers on one rank."""
    return run_ranks(training.train_all, 1, STOCK)[0]


@pytest.fixture(scope="module")
def serial() -> dict[str, Any]:
    """Our layers on one rank, with a Transformer Engine whose product is given its workspace."""
    return run_ranks(_train, 1, {name: case.on(Settings()) for name, case in CASES.items()}, True)[0]


@pytest.fixture(scope="module")
def ours(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """By rank, by case and grid."""
    wanted = asked(request, "name", "grid")
    cases = {f"{name} on {grid}": CASES[name].on(GRIDS[grid]) for name, grid in RUNS if (name, grid) in wanted}
    return run_ranks(_train, 4, cases)


def _apart(found: dict[str, Any], wanted: dict[str, Any], told: tuple[str, ...] = ("losses", "norms")) -> float:
    pairs = [(f, w) for name in told for f, w in zip(found[name], wanted[name], strict=True)]
    return max(abs(f - w) / abs(w) for f, w in pairs)


@pytest.mark.parametrize(
    ("name", "grid"), _marked([*((name, "one rank") for name in STOCK), *(run for run in RUNS if run[0] in STOCK)])
)
def test_numbers_are_those_of_megatrons_own_layers(
    name: str, grid: str, stock: dict[str, Any], serial: dict[str, Any], ours: list[dict[str, Any]]
) -> None:
    found = serial[name] if grid == "one rank" else ours[0][f"{name} on {grid}"]
    assert _apart(found, stock[name]) < (1e-2 if name.endswith("bf16") else 1e-5)
    calls, settings = found["calls"], GRIDS.get(grid, Settings())
    kind = "added by apex" if name.startswith("apex") else "added"
    assert (calls[kind] > 0) == (settings.gz == 1)
    if CASES[name].engine:
        assert calls["TN"] == calls["NN"] == calls["NT"] > 0
        assert (calls["norm"] > 0) == (settings.gy == 1)


@pytest.mark.parametrize(("name", "grid"), _marked(run for run in RUNS if run[0] in EIGHTS))
def test_products_in_8_bits_are_those_of_one_rank(
    name: str, grid: str, stock: dict[str, Any], serial: dict[str, Any], ours: list[dict[str, Any]]
) -> None:
    """But for elements that lie between two numbers of 8 bits, and by another order of sums are rounded the other way."""
    one, found = serial[name], ours[0][f"{name} on {grid}"]
    seen = _apart(one, stock["engine"])
    print(
        f"{name} on {grid}: {_apart(found, one):.1e} of {seen:.1e}, first loss {abs(found['losses'][0] - one['losses'][0]):.1e}"
    )
    if name.endswith("bf16"):
        assert _apart(found, one, ("losses",)) < 1e-3 and found["calls"]["TN in 8 bits"] == 16
    else:
        assert seen > 2e-3 and _apart(found, one) < seen / 10
    assert all(rank[f"{name} on {grid}"]["losses"] == found["losses"] for rank in ours)


def test_layers_that_are_in_8_bits_and_gradients_that_are_wider(serial: dict[str, Any]) -> None:
    both, narrow, one = (serial[name]["calls"] for name in EIGHTS[:3])
    wide = "cast to torch.float8_e5m2"
    # Two layers of four linears, two steps.
    assert both["TN in 8 bits"] == both["NN in 8 bits"] == both["NT in 8 bits"] == both["added"] == 16
    assert both["TN"] == 0 and both[wide] == 16 and both["cast to torch.float8_e4m3fn"] == 3 * 16
    assert narrow[wide] == 0 and narrow["NT in 8 bits"] == 16
    assert one["TN in 8 bits"] == one["TN"] == 8


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    scale = torch.finfo(dtype).max / tensor.abs().max()
    return (tensor * scale).to(dtype).float() / scale


def _by_hand() -> None:
    case = _eight(PLAIN).on(Settings())
    training.on_cpu()
    with training.parallel(case), double.installed(engine=True):
        config = training.configuration(case)
        layer = EngineColumnParallelLinear(
            64, 32, config=config, init_method=torch.nn.init.normal_, bias=True, skip_bias_add=False
        )
        torch.nn.init.normal_(layer.bias)
        weight = layer.weight.detach().clone()
        layer.weight.main_grad = before = torch.randn(32, 64)
        layer.weight.grad_added_to_main_grad = False
        wanted, input, grad = before.clone(), torch.randn(8, 4, 64, requires_grad=True), torch.randn(8, 4, 32)
        with _context(config):
            output, _ = layer(input)
        output.backward(grad)
        narrow = torch.float8_e4m3fn
        scale = torch.exp2(torch.floor(torch.log2(torch.finfo(narrow).max / weight.abs().max())))
        weight = (weight * scale).to(narrow).float() / scale
        rows, wide = _cast(input.detach(), narrow), _cast(grad, torch.float8_e5m2)
        torch.testing.assert_close(output, rows @ weight.t() + layer.bias)
        torch.testing.assert_close(input.grad, wide @ weight)
        wanted += wide.flatten(0, 1).t() @ rows.flatten(0, 1)
        torch.testing.assert_close(layer.weight.main_grad, wanted)
        assert layer.weight.grad_added_to_main_grad and not layer.weight.grad.any()
        torch.testing.assert_close(layer.bias.grad, grad.sum((0, 1)))
        assert not (output - input @ layer.weight.t() - layer.bias).abs().max() < 1e-2

        with (
            double.fp8_autocast(fp8_recipe=double.DelayedScaling()),
            pytest.raises(ValueError, match="DelayedScaling.*tensorwise"),
        ):
            layer(input)
        with pytest.raises(ValueError, match="a rank has 24 of its outputs, .* multiples of 16"):
            LayerNormColumnParallelLinear(64, 24, config=config, init_method=torch.nn.init.normal_)
    assert process_groups._installed is None


def test_a_layer_in_8_bits_is_what_is_computed_by_hand() -> None:
    run_ranks(_by_hand, 1)
