"""Mixtures of experts, latent attention and multi-token prediction on grids of four ranks against Megatron's own layers on one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.moe import moe_layer

from axonn_plugins.config import Ted
from axonn_plugins.hosts.megatron import expert_groups, moe, process_groups, recompute
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_plugins.hosts.megatron.sharing import share_of_stream, whole_stream
from axonn_plugins.observe.ledger import Ledger
from axonn_tp import Grid, factorisations
from axonn_tp.comm.collectives import Collective
from ted_moe.adapters import Choices
from tests.distributed import run_ranks
from tests.matrix import chosen, names, thorough
from tests.megatron import training
from tests.megatron.training import Case

ROUTED = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_aux_loss_coeff": 1e-2, "add_bias_linear": False}
GATED = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "moe_ffn_hidden_size": 48}
LATENT = {
    "kv_lora_rank": 12,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "multi_latent_attention": True,
}
CASES = {
    "balanced": Case(
        config={**ROUTED, **GATED, "moe_z_loss_coeff": 1e-3, "moe_router_load_balancing_type": "seq_aux_loss"}
        | {"moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True, "moe_layer_freq": [0, 1]}
    ),
    "biased": Case(
        config={**ROUTED, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0, "moe_router_num_groups": 2}
        | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_router_group_topk": 1},
        ddp={"use_distributed_optimizer": True},
    ),
    "dropping": Case(
        config={**ROUTED, "moe_expert_capacity_factor": 0.8, "moe_pad_expert_input_to_capacity": True}
        | {"moe_token_dispatcher_type": "alltoall", "recompute_granularity": "selective", "recompute_modules": ["moe"]}
    ),
    "sinkhorn": Case(config={**ROUTED, "moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0}),
    "latent": Case(config={**LATENT, "q_lora_rank": 16, "qk_layernorm": True, "rope_type": "rope"}),
    "latent plain": Case(config=LATENT, model={"share_embeddings_and_output_weights": True}),
    "predicting": Case(config={"mtp_num_layers": 2}, model={"share_embeddings_and_output_weights": True}),
    "all": Case(
        config={**ROUTED, **GATED, **LATENT, "mtp_num_layers": 1, "normalization": "RMSNorm"},
        ddp={"use_distributed_optimizer": True},
    ),
}
PLACES: list[tuple[Settings, tuple[int, int | None]]] = [
    (Settings(2), (2, None)),
    (Settings(2, 2), (4, 1)),
    (Settings(2, 1, 2), (2, None)),
    (Settings(1, 2, 2, layout="replicated"), (2, None)),
    (Settings(1, 1, 2), (4, None)),  # weights lie in blocks of two of an expert block's four
    (Settings(1, 1, 4), (2, None)),  # and the other way round
    (Settings(4), (1, 1)),  # whole experts on every rank, which share the tokens
]
SOME = {"balanced": [5], "all": [3, 4], "biased": [6], "dropping": [0], "sinkhorn": [2]}
MORE = {"balanced": [2], "all": [0, 1], "biased": [4], "dropping": [1], "sinkhorn": [1]}
"""In every run each place, and each case but those with a part of `all`; cases that are not named are on the second. And what a
thorough one has more."""


def _few(settings: Settings, ranks: int = 4) -> dict[str, int]:
    """Microbatches of one sample, as on one rank: balance is one of a microbatch; and a sample or two for each reader."""
    readers = ranks // settings.tensor
    batch = max(2, readers)
    return {"micro_batches": batch // readers, "batch": batch}


def _places(name: str, every: bool) -> list[tuple[Settings, tuple[int, int | None]]]:
    """Where a case is trained."""
    return [PLACES[at] for at in SOME.get(name, [1]) + (MORE.get(name, []) if every else [])]


@pytest.fixture(scope="module")
def stock(request: pytest.FixtureRequest) -> dict[str, Any]:
    """By case and samples of a step."""
    items = [item for item in request.session.items if item.path == request.path]
    every, cases = any(item.get_closest_marker("thorough") for item in items), {}
    for name, case in CASES.items():
        for few in {_few(settings)["batch"] for settings, _ in _places(name, every)} | ({4} if every else set()):
            cases[f"{name} of {few}"] = replace(case, micro_batches=few, batch=few)
    return run_ranks(training.train_all, 1, cases)[0]


@pytest.fixture(scope="module", params=[False, thorough(True)], ids=["some", "every"])
def ours(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    wanted = {}
    for name, case in chosen(request, CASES).items():
        for settings, experts in _places(name, request.param):
            mixed = experts if "num_moe_experts" in case.config else (1, None)
            few = _few(settings)
            wanted[f"{name} of {few['batch']} on {settings}, {mixed}"] = case.on(settings, experts=mixed, **few)
    return run_ranks(training.train_all, 4, wanted)


def _sent_to_replicas(cases: list[Case]) -> list[dict[tuple[str, str], str]]:
    """What a rank holds at each place of a model drawn with a seed for each data-parallel rank, once it is sent (--data-parallel-random-init)."""
    training.on_cpu()
    seed, found = torch.manual_seed, []
    for case in cases:
        with training.parallel(case), pytest.MonkeyPatch.context() as patch:
            more = parallel_state.get_data_parallel_rank()
            patch.setattr(torch, "manual_seed", lambda number, more=more: seed(number + more))
            model_parallel_cuda_manual_seed(123 + 10 * more, force_reset_rng=True)
            model = training.build(case)
            model.broadcast_params()
            experts = process_groups.mesh().experts
            place = [experts.rank("expert"), experts.rank("tensor") if experts.topology.expert_tensor > 1 else 0]
            held = (key.split(" ", 2)[1:] + [checksum] for key, checksum in training._replicas(model).items())
            found.append({(n, f"{place if 'local_experts' in n else at}"): checksum for n, at, checksum in held})
    return found


@pytest.mark.parametrize("drawn_on_the_device", [True, False])
def test_replicas_begin_alike_and_shares_apart(drawn_on_the_device: bool) -> None:
    """Also where experts take larger blocks of ranks than weights split over z do, or smaller ones, which no group of Megatron's is for."""
    case = Case(config={**ROUTED, **GATED, "use_cpu_initialization": not drawn_on_the_device})
    cases = [case.on(Settings(1, 1, gz), experts=(experts, None)) for gz, experts in ((2, 4), (4, 2))]
    if drawn_on_the_device:
        cases += [case.on(Settings(2, 1, 2), experts=(2, None)), case.on(Settings(2, 2), experts=(4, 1))]
    for ranks in zip(*run_ranks(_sent_to_replicas, 4, cases), strict=True):
        held = {item for rank in ranks for item in rank.items()}
        assert len(held) == len(dict(held)), sorted(held)
        drawn = [(name, checksum) for (name, _), checksum in held if "norm" not in name]
        assert len(drawn) == len(set(drawn)), sorted(held)


def _apart(found: list[float], expected: list[float]) -> float:
    return max(abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", names(CASES, CASES.keys() - {"latent plain", "predicting"}))
def test_losses_and_norms_are_those_of_one_rank(name: str, stock: dict[str, Any], ours: list[dict[str, Any]]) -> None:
    runs = [run for run in ours[0] if run.startswith(f"{name} of")]
    assert runs
    for run in runs:
        expected = stock[run.partition(" on ")[0]]
        assert all(rank[run]["losses"] == ours[0][run]["losses"] for rank in ours), run
        assert _apart(ours[0][run]["losses"], expected["losses"]) < 1e-6, run
        assert _apart(ours[0][run]["norms"], expected["norms"]) < 1e-5, run


@pytest.mark.thorough
def test_eight_ranks_have_all_axes_and_experts_over_four(stock: dict[str, Any]) -> None:
    """Tensor ranks, z and data, where experts lie in blocks of all ranks, twice those of weights over z."""
    settings, names = Settings(2, 1, 2), ("balanced", "biased")
    wanted = {f"{name} of 4": CASES[name].on(settings, experts=(4, None), **_few(settings, 8)) for name in names}
    for name, found in run_ranks(training.train_all, 8, wanted)[0].items():
        assert _apart(found["losses"], stock[name]["losses"]) < 1e-6, name
        assert _apart(found["norms"], stock[name]["norms"]) < 1e-5, name


LAYERS = {
    "softmax": {**GATED, "moe_shared_expert_intermediate_size": 32, "moe_shared_expert_gate": True},
    "dropping": {"moe_expert_capacity_factor": 0.6, "moe_token_drop_policy": "position", "moe_z_loss_coeff": 1e-3},
    "inputs": {"moe_router_topk": 1, "moe_apply_probs_on_input": True, "moe_router_pre_softmax": True},
}
TOKENS = (8, 2, 32)
SWITCHED = [Grid(2, 1, 2), Grid(1, 2, 1, 2), Grid(2, 2)]


def _given(batch: int) -> torch.Tensor:
    """Random tokens of a batch's members, some of them twice, and some whose experts are all alike."""
    tokens = torch.randn(batch, *TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    tokens[:, 1], tokens[:, 2] = tokens[:, 0], 0
    return tokens


@contextmanager
def _layer(case: Case) -> Iterator[tuple[Any, Any]]:
    """A model, and its first mixture, whose router is as exact as its weights."""
    softmax = torch.softmax
    with pytest.MonkeyPatch.context() as patch, training.parallel(case):
        patch.setattr(torch, "softmax", lambda values, dim, dtype=None: softmax(values, dim=dim))
        model = training.build(case)
        model.zero_grad_buffer()
        yield model, next(one for one in model.modules() if isinstance(one, moe_layer.MoELayer))


def _back(output: torch.Tensor) -> None:
    (output * torch.arange(output.numel()).view_as(output).sin()).sum().backward()


def _serial(config: dict[str, Any], batch: int) -> dict[str, Any]:
    training.on_cpu()
    with _layer(Case(dtype=torch.float64, config={**ROUTED, **config})) as (_, layer):
        tokens = _given(batch).requires_grad_()
        outputs = [layer(member)[0] for member in tokens]
        for output in outputs:
            _back(output)
        grads = {name: parameter.main_grad / batch for name, parameter in layer.named_parameters()}
        return {"outputs": torch.stack(outputs).detach(), "grad": tokens.grad, "grads": grads}


def _worst(
    grid: Grid, experts: tuple[int, int | None], config: dict[str, Any], choices: Choices, one: dict[str, Any]
) -> float:
    """Largest difference of this rank's tokens, their gradients and those of its parameters from one process'."""
    settings = Settings(grid.gx, grid.gy, grid.gz)
    case = Case(settings=settings, dtype=torch.float64, config={**ROUTED, **config}, experts=experts)
    moe.choose(choices)
    with _layer(case) as (model, layer):
        mesh = process_groups.mesh()
        tokens = _given(grid.batch)[mesh.rank("batch")].requires_grad_()
        output = whole_stream(layer(share_of_stream(tokens, settings, mesh))[0], settings, mesh)
        _back(output)
        model.finish_grad_sync()
        found = {"outputs": output, "grad": tokens.grad}
        apart = [(found[name] - one[name][mesh.rank("batch")]).abs().max() for name in found]
        apart += [(p.main_grad - _part(one["grads"], name, p)).abs().max() for name, p in layer.named_parameters()]
    moe.choose(Choices())
    return float(max(apart))


def _part(whole: dict[str, torch.Tensor], name: str, parameter: torch.nn.Parameter) -> torch.Tensor:
    """This rank's part of what one process has."""
    mesh = process_groups.mesh()
    groups, layout = mesh.experts, getattr(parameter, "axonn_layout", None)
    if layout is not None:
        return layout.shard(whole[name], mesh.grid, mesh.coordinates).view_as(parameter)
    number = int(name.split(".")[2])
    local = ROUTED["num_moe_experts"] // groups.size("expert")
    full = whole[name.replace(f".{number}.", f".{number + groups.rank('expert') * local}.", 1)]
    if groups.topology.expert_tensor == 1:
        return full
    dim, parts = (1, 1) if "fc2" in name else (0, full.shape[0] // parameter.shape[0] // groups.size("tensor"))
    parts = 2 if dim == 0 and full.shape[0] == 2 * 48 else parts
    return torch.cat(
        [part.chunk(groups.size("tensor"), dim)[groups.rank("tensor")] for part in full.chunk(parts, dim)], dim
    )


def _all_worst(wanted: dict[str, tuple], serial: dict[tuple[str, int], Any]) -> dict[str, float]:
    training.on_cpu()
    return {
        name: _worst(grid, experts, LAYERS[kind], choices, serial[kind, grid.batch])
        for name, (kind, grid, experts, choices) in wanted.items()
    }


def _all_serial(wanted: set[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    return {(kind, batch): _serial(LAYERS[kind], batch) for kind, batch in sorted(wanted)}


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_a_mixture_is_one_process_s_on_every_grid(every: bool) -> None:
    """Ties and dropped tokens included, in float64; in every run kinds take turns, and each switch is on one of `SWITCHED`."""
    wanted: dict[str, tuple] = {}
    for turn, grid in enumerate(factorisations(4)):
        for kind in LAYERS if every else [[*LAYERS][turn % len(LAYERS)]]:
            wanted[f"{kind} on {grid}"] = kind, grid, (grid.batch, None), Choices()
    for turn, grid in enumerate(factorisations(4) if every else SWITCHED):
        switched = {
            "unfused": ("softmax", grid, (1, None), Choices(fused=False)),
            "undropped": ("dropping", grid, (grid.batch, None), Choices(False, False)),
            "whole, in slices": ("softmax", grid, (4, 1), Choices(overlap_degree=2)),
            "in slices": ("dropping", grid, (grid.batch, None), Choices(overlap_degree=3)),
        }
        for switch in switched if every else [[*switched][turn]]:
            wanted[f"{switch} on {grid}"] = switched[switch]
    serial = run_ranks(_all_serial, 1, {(kind, grid.batch) for kind, grid, *_ in wanted.values()})[0]
    for rank in run_ranks(_all_worst, 4, wanted, serial):
        assert {name: apart for name, apart in rank.items() if not apart < 1e-10} == {}


def _communicated(cases: dict[str, tuple[Ted, bool]]) -> dict[str, list[Collective]]:
    """Collectives of a mixture's forward and backward pass, but for what ranks tell each other before."""
    training.on_cpu()
    settings, found = Settings(2, 1, 2), {}
    for name, (block, recomputes) in cases.items():
        again = {"recompute_granularity": "selective", "recompute_modules": ["moe"]} if recomputes else {}
        recompute.install(block)
        # As many tokens for every expert, of which each rank has two: rows are as many as chapter 7 counts.
        config = {**ROUTED, **again, "moe_expert_capacity_factor": 1.0, "moe_aux_loss_coeff": 0}
        with _layer(Case(settings=settings, config=config, experts=(2, None))) as (model, layer):
            layer.router.register_forward_hook(_evenly)
            tokens = torch.randn(*TOKENS)
            mine = share_of_stream(tokens, settings, process_groups.mesh()).detach().requires_grad_()
            with Ledger(process_groups.mesh().experts.axis_names()) as ledger, model.no_sync():
                layer(mine)[0].sum().backward()
        found[name] = [one for one in ledger.collectives if one.elements > 100]
        recompute.uninstall()
    return found


def _evenly(router: Any, given: object, chosen: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    number = torch.arange(len(chosen[0]))[:, None]
    evenly = torch.zeros_like(chosen[1]).scatter(1, torch.cat([number % 4, (number + 1) % 4], 1), True)
    return chosen[0] + 0.5 * evenly, evenly


def _count(found: list[Collective], op: str) -> list[int]:
    return sorted(one.elements for one in found if one.op == op and one.axis != "block")


def test_bytes_are_those_of_chapter_7() -> None:
    """Of 16 tokens with two experts each, 32 rows of 32 features: all of them, or with tokens dropped one half on each of two tensor ranks."""
    plain = {"duplicate_token_dropping": False, "communication_aware_checkpointing": False}
    apart = {"fused": False, "communication_aware_checkpointing": False}
    cases = {
        "plain": (Ted(**plain), False),
        "dropped": (Ted(**apart), False),
        "fused": (Ted(communication_aware_checkpointing=False), False),
        "again": (Ted(communication_aware_checkpointing=False), True),
        "kept": (Ted(), True),
    }
    rows, tokens = 32 * 32, 16 * 32
    for found in run_ranks(_communicated, 4, cases):
        enter_and_leave = 2 * [tokens // 2]
        assert _count(found["plain"], "all_to_all") == 4 * [rows]
        assert _count(found["plain"], "all_reduce") == 2 * [rows]
        assert _count(found["plain"], "all_gather") == enter_and_leave
        assert _count(found["dropped"], "all_to_all") == 4 * [rows // 2]
        assert _count(found["dropped"], "all_reduce") == 2 * [rows]
        assert _count(found["dropped"], "all_gather") == enter_and_leave + 4 * [rows // 2]
        assert _count(found["fused"], "all_reduce") == []
        assert _count(found["fused"], "reduce_scatter") == 2 * [rows]
        assert _count(found["again"], "all_to_all") == 6 * [rows // 2]
        # What the first forward communicated is not communicated again.
        assert [str(one) for one in found["kept"]] == [str(one) for one in found["fused"]]


@pytest.mark.parametrize(
    ("grid", "experts", "blocks", "between"),
    [
        (Grid(2, 1, 2), (2, None), (2, 4, 4), None),
        (Grid(1, 1, 2, 2), (4, None), (1, 2, 4), [[0, 2], [1, 3]]),
        (Grid(1, 1, 4), (2, None), (1, 4, 2), [[0, 2], [1, 3]]),
        (Grid(2, 2, 1, 2), (2, 1), (4, 4, 2), [[0, 2], [1, 3], [4, 6], [5, 7]]),
        (Grid(2, 1, 2, 2), (4, None), (2, 4, 8), [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ],
)
def test_blocks(grid: Grid, experts: tuple[int, int | None], blocks: tuple[int, ...], between: Any) -> None:
    found = expert_groups.blocks_of(grid, expert_groups.topology_of(grid, *experts))
    assert (found.tensor, found.split, found.experts) == blocks
    assert found.lists_between(grid.world) == (between or [[rank] for rank in range(grid.world)])


@pytest.mark.parametrize(
    ("grid", "experts", "words"),
    [
        (Grid(2, 1, 2), (4, None), "does not divide the 2 ranks that read different tokens .* choose a divisor of 2"),
        (Grid(2, 1, 2), (3, 1), "does not divide the 4 ranks of a stage, each with whole experts"),
        (Grid(4, 1, 2), (2, 2), "--expert-tensor-parallel-size 2 is neither 1 nor gx.gy"),
        (Grid(1, 1, 2, 3), (3, None), "blocks of 3 ranks, of which gx.gy.gz = 2 is neither a divisor nor a multiple"),
    ],
)
def test_sizes_of_experts_that_do_not_fit_are_refused(grid: Grid, experts: tuple[int, int | None], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        expert_groups.topology_of(grid, *experts)
