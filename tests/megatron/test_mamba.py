"""Hybrids of Mamba, attention, MLPs and mixtures on grids of four ranks against Megatron's own layers on one, by a double of mamba_ssm."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
pytest.importorskip("einops", reason="einops is not installed, which Megatron's mixers need")

from megatron.core.transformer.spec_utils import ModuleSpec

from axonn_plugins.hosts.megatron import context, mamba, process_groups
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_plugins.hosts.megatron.sharing import share_of_stream, whole_stream
from axonn_tp import factorisations, layout_of
from tests.axonn_tp.families import in_float64
from tests.distributed import run_ranks
from tests.matrix import chosen, names, thorough
from tests.megatron import mamba_double, training
from tests.megatron.training import Case

HYBRID = Case(
    pattern="M*-M",
    config={"num_layers": 4, "mamba_state_dim": 8, "mamba_head_dim": 8, "mamba_num_groups": 2, "is_hybrid_model": True},
)
LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
MIXED = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "add_bias_linear": False}


def like(pattern: str = HYBRID.pattern, model: dict[str, Any] | None = None, **config: Any) -> Case:
    return replace(
        HYBRID, pattern=pattern, model=model or {}, config={**HYBRID.config, "num_layers": len(pattern), **config}
    )


CASES = {
    "hybrid": HYBRID,
    "other forms": HYBRID,
    "rotary": like(model={"position_embedding_type": "rope", "share_embeddings_and_output_weights": True}, **LLAMA),
    "mamba": like("MM", use_mamba_mem_eff_path=False),
    "mixture": like("ME*", **MIXED),
}
PIPELINE = {"stages": replace(HYBRID, pipeline=2, micro_batches=2)}
ALL = CASES | PIPELINE
GRIDS = [Settings(2, 2), Settings(2, 1, 2), Settings(1, 2, 2, layout="replicated")]


@pytest.fixture(scope="module")
def stock(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ranks, cases in ((1, CASES), (2, PIPELINE)):
        if wanted := chosen(request, cases):
            found |= run_ranks(training.train_all, ranks, wanted)[0]
    return found


@pytest.fixture(scope="module")
def ours(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    wanted = {f"{name} on {grid}": case.on(grid) for name, case in CASES.items() for grid in GRIDS}
    wanted = {run: case for run, case in wanted.items() if run != f"hybrid on {GRIDS[0]}"}  # in `other forms`
    wanted[f"other forms on {GRIDS[0]}"] = HYBRID.on(GRIDS[0])
    for grid in (Settings(4), Settings(1, 4), Settings(1, 1, 4)):
        wanted[f"other forms on {grid}"] = HYBRID.on(grid)
    wanted["other forms on engine"] = HYBRID.on(Settings(2, 2), engine=True)
    wanted["mixture on engine"] = CASES["mixture"].on(Settings(2, 1, 2), engine=True, experts=(2, None))
    wanted["other forms on sharded"] = HYBRID.on(Settings(2, 1, 2), ddp={"use_distributed_optimizer": True})
    for shared, grid in ((2, Settings(2, 1, 2)), (2, Settings(1, 2)), (4, Settings())):
        wanted[f"rotary on {shared} ranks of a sequence, {grid}"] = CASES["rotary"].on(grid, context=shared)
    for grid in (Settings(2), Settings(1, 2, layout="replicated")):
        wanted[f"stages on {grid}"] = PIPELINE["stages"].on(grid)
    names_asked = chosen(request, ALL)
    return run_ranks(
        training.train_all, 4, {run: case for run, case in wanted.items() if run.partition(" on ")[0] in names_asked}
    )


def _apart(found: list[float], expected: list[float]) -> float:
    return max(abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", names(ALL, ["hybrid"]))
def test_losses_and_norms_are_those_of_one_rank(name: str, stock: dict[str, Any], ours: list[dict[str, Any]]) -> None:
    runs = [run for run in ours[0] if run.startswith(f"{name} on")]
    assert len(runs) >= 2
    for run in runs:
        assert all(rank[run]["losses"] == ours[0][run]["losses"] for rank in ours), run
        for what in ("losses", "norms"):
            assert _apart(ours[0][run][what], stock[name][what]) < 1e-5, run


def test_replicas_stay_identical(ours: list[dict[str, Any]]) -> None:
    for run in ours[0]:
        held: dict[str, str] = {}
        for rank in ours:
            for key, digest in rank[run]["replicas"].items():
                assert "local_experts" in key or held.setdefault(key, digest) == digest, (run, key)


TOKENS = (8, 2, 32)


@contextmanager
def _stack(case: Case) -> Iterator[tuple[Any, Any]]:
    training.on_cpu()
    with training.parallel(case), in_float64():
        model = training.build(case)
        model.zero_grad_buffer()
        yield model, model.module.decoder


def _given(samples: int) -> torch.Tensor:
    return torch.randn(samples, *TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _weights() -> torch.Tensor:
    return torch.arange(8 * 2 * 32).view(TOKENS).sin()


def _mask() -> torch.Tensor:
    return torch.ones(TOKENS[0], TOKENS[0], dtype=torch.bool).triu(1)[None, None]


def _all_serial(case: Case) -> dict[int, dict[str, Any]]:
    mamba_double.install()
    return {samples: _serial(case, samples) for samples in (1, 2, 4)}


def _serial(case: Case, samples: int) -> dict[str, Any]:
    with _stack(case) as (_, stack):
        tokens = _given(samples).requires_grad_()
        outputs = [stack(sample, _mask()) for sample in tokens]
        for output in outputs:
            (output * _weights()).sum().backward()
        grads = {name: parameter.main_grad / samples for name, parameter in stack.named_parameters()}
        return {"outputs": torch.stack(outputs).detach(), "grad": tokens.grad, "grads": grads}


def _worst(case: Case, one: dict[int, dict[str, Any]]) -> float:
    """Largest difference of this rank's tokens, their gradients and those of its parameters from one process'."""
    with _stack(case) as (model, stack):
        settings, mesh = process_groups.settings(), process_groups.mesh()
        wanted, reader = one[mesh.size("readers")], mesh.rank("readers")
        shared = context.ranks()
        here = context.shared(TOKENS[0] // shared).places("cpu") if shared > 1 else torch.arange(TOKENS[0])
        tokens = _given(mesh.size("readers"))[reader][here].requires_grad_()
        output = whole_stream(stack(share_of_stream(tokens, settings, mesh), _mask()[:, :, here]), settings, mesh)
        (output * _weights()[here]).sum().mul(shared).backward()
        model.finish_grad_sync()
        apart = [(output - wanted["outputs"][reader][here]).abs().max()]
        apart.append((tokens.grad / shared - wanted["grad"][reader][here]).abs().max())
        for name, parameter in stack.named_parameters():
            part = layout_of(parameter).shard(wanted["grads"][name], mesh.grid, mesh.coordinates)
            apart.append((parameter.main_grad.view_as(part) - part).abs().max())
        return float(max(apart))


def _all_worst(cases: dict[str, Case], one: dict[int, dict[str, Any]]) -> dict[str, float]:
    mamba_double.install()
    return {name: _worst(case, one) for name, case in cases.items()}


LAYERS = {"hybrid": replace(HYBRID, dtype=torch.float64), "gated": replace(like("M-M*", **LLAMA), dtype=torch.float64)}


@pytest.mark.parametrize(("name", "every"), [("hybrid", False), *(thorough(name, True) for name in LAYERS)])
def test_every_grid_of_four_computes_what_one_rank_does(name: str, every: bool) -> None:
    """In every run grids of two axes, each scattered, one of them replicated, and two on which ranks share sequences."""
    cases = {
        f"{grid} {layout}": LAYERS[name].on(Settings(grid.gx, grid.gy, grid.gz, layout=layout))
        for grid in factorisations(4)
        for layout in ("scattered", "replicated")[: grid.gx * grid.gy]
        if every or max(grid.gx, grid.gy, grid.gz, grid.gdata) < 4 and (layout == "scattered" or grid.gy * grid.gz == 4)
    }
    places = (((1, 2, 2), 2), ((1, 1, 1), 4), ((1, 1, 2), 2), ((2, 1, 1), 2), ((1, 1, 4), 2))
    for grid, shared in places if every else places[:2]:
        cases[f"{grid}, {shared} share sequences"] = LAYERS[name].on(Settings(*grid), context=shared)
    assert len(cases) == (22 if every else 9)
    one = run_ranks(_all_serial, 1, LAYERS[name])[0]
    for rank in run_ranks(_all_worst, 4, cases, one):
        for case, apart in rank.items():
            assert apart < 1e-10, case


def _refused() -> list[str]:
    mamba_double.install()
    said = []
    for kind in (torch.nn.Linear, ModuleSpec(torch.nn.Linear)):
        try:
            mamba.on_grid(kind, None)
        except ValueError as error:
            said.append(str(error))
    return said


def test_layers_of_a_spec_that_nobody_knows_are_refused() -> None:
    said = run_ranks(_refused, 1)[0]
    assert len(said) == 2 and all(each.startswith("Linear is no layer of which axonn3d knows") for each in said)
