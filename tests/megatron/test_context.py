"""Sequences that ranks share, on grids of two to eight, against Megatron's own layers on one, which has them whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.transformer.enums import AttnMaskType

from axonn_plugins.hosts.megatron import context, process_groups
from axonn_plugins.hosts.megatron.settings import TRAVEL, Settings
from axonn_plugins.hosts.megatron.sharing import share_of_stream, whole_stream
from axonn_plugins.observe.ledger import Ledger
from axonn_tp import Grid, factorisations, layout_of
from axonn_tp.context.chunks import Chunks, Heads, Sight, sent
from axonn_tp.context.shared import Shared
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.megatron import training
from tests.megatron.test_experts import GATED, LATENT, ROUTED
from tests.megatron.test_layers import FULL, LLAMA
from tests.megatron.training import Case

TIED = {"share_embeddings_and_output_weights": True}
FEW = 2
"""Sequences of a step, each a microbatch: where nobody but those that share one reads, one rank has two."""
DROPPING = {
    **ROUTED,
    "moe_expert_capacity_factor": 0.8,
    "moe_z_loss_coeff": 1e-3,
    "moe_router_load_balancing_type": "seq_aux_loss",
}
CASES = {
    "gpt": Case(masked=True, config={"cp_comm_type": "all_gather"}),
    "llama": LLAMA.on(None, ddp={"use_distributed_optimizer": True}, masked=True),
    "windowed": LLAMA.on(None, config={**LLAMA.config, "window_size": (5, 0), "softmax_type": "off-by-one"}),
    "tokens": Case(masked=True, config={**FULL, "calculate_per_token_loss": True}, model=TIED),
    "dropping": Case(config={**DROPPING, "moe_shared_expert_intermediate_size": 32}, masked=True),
    "sinkhorn": Case(config={**ROUTED, "moe_router_load_balancing_type": "sinkhorn", "moe_aux_loss_coeff": 0}),
    "balanced": Case(config={**ROUTED, **GATED, "calculate_per_token_loss": True, **FULL}),
    "latent": Case(config={**LATENT, "q_lora_rank": 16, "qk_layernorm": True, "rope_type": "rope"}, masked=True),
    "predicting": Case(config={"mtp_num_layers": 2}, model={**TIED, "position_embedding_type": "rope"}, masked=True),
    "all": Case(
        config={**ROUTED, **GATED, **LATENT, "mtp_num_layers": 1, "normalization": "RMSNorm"},
        ddp={"use_distributed_optimizer": True},
        masked=True,
    ),
}
PLACES: list[tuple[Settings, int, tuple[int, int | None]]] = [
    (Settings(), 4, (2, None)),  # weights whole
    (Settings(1, 1, 2), 2, (1, None)),  # and of more than one sequence
    (Settings(1, 1, 4), 2, (4, None)),  # weights over all ranks, sequences over half of them
    (Settings(1, 1, 2), 4, (2, None)),  # and the other way round
    (Settings(2), 2, (2, None)),
    (Settings(1, 2, 2, layout="replicated"), 2, (2, None)),
]
SOME = {"gpt": [0], "llama": [2], "windowed": [4], "tokens": [1], "dropping": [5], "sinkhorn": [3], "all": [2]}
"""What is in every run: each place, and each feature; the others are of one feature of `all`."""


def _on(case: Case, place: tuple[Settings, int, tuple[int, int | None]], ranks: int = 4) -> Case:
    """With microbatches of one sample, as on one rank."""
    settings, shared, experts = place
    readers = ranks // settings.tensor // shared
    mixed = experts if "num_moe_experts" in case.config else (1, None)
    return case.on(settings, context=shared, experts=mixed, micro_batches=FEW // readers, batch=FEW)


@pytest.fixture(scope="module")
def stock(request: pytest.FixtureRequest) -> dict[str, Any]:
    items = [item for item in request.session.items if item.path == request.path]
    every = any(item.get_closest_marker("thorough") for item in items)
    cases = {name: replace(CASES[name], micro_batches=FEW, batch=FEW) for name in (CASES if every else SOME)}
    return run_ranks(training.train_all, 1, cases)[0]


def _compare(found: list[dict[str, Any]], stock: dict[str, Any]) -> None:
    for run in found[0]:
        wanted = stock[run.partition(" on")[0]]
        assert all(rank[run]["losses"] == found[0][run]["losses"] for rank in found), run
        for what, tolerance in (("losses", 1e-6), ("norms", 1e-5)):
            apart = max(abs(a - b) / abs(b) for a, b in zip(found[0][run][what], wanted[what], strict=True))
            assert apart < tolerance, (run, what, apart)


def test_losses_and_norms_are_those_of_one_rank(stock: dict[str, Any]) -> None:
    wanted = {f"{name} on {PLACES[at]}": _on(CASES[name], PLACES[at]) for name, places in SOME.items() for at in places}
    _compare(run_ranks(training.train_all, 4, wanted), stock)


@pytest.mark.thorough
def test_everything_everywhere_is_one_rank_s(stock: dict[str, Any]) -> None:
    wanted = {f"{name} on {place}": _on(case, place) for name, case in CASES.items() for place in PLACES}
    _compare(run_ranks(training.train_all, 4, wanted), stock)


EIGHT = [(Settings(2, 1, 2), 2, (4, None)), (Settings(1, 2, 2), 4, (2, None)), (Settings(2, 2, 1), 2, (2, None))]


@pytest.mark.thorough
@pytest.mark.parametrize("names", [["all"], list(CASES)])
def test_eight_ranks_have_all_axes(stock: dict[str, Any], names: list[str]) -> None:
    places = EIGHT if len(names) > 1 else EIGHT[:1]
    wanted = {f"{name} on {place}": _on(CASES[name], place, 8) for name in names for place in places}
    _compare(run_ranks(training.train_all, 8, wanted), stock)


@pytest.mark.parametrize("config", [{"mtp_num_layers": 1}, thorough({})], ids=["predicting", "plain"])
def test_stages_hand_on_shares(config: dict[str, Any]) -> None:
    case = Case(pipeline=2, micro_batches=2, batch=FEW, config=config, model=TIED, masked=True)
    found = run_ranks(training.train_all, 4, {"stages on": case.on(Settings(), context=2)})
    _compare(found, run_ranks(training.train_all, 2, {"stages": case})[0])


# In float64: what attention, positions and projections give, and all gradients

LAYERS = {
    "gather": {**LLAMA.config, "cp_comm_type": "all_gather"},
    "ring": {"cp_comm_type": "p2p", "qk_layernorm": True, "num_query_groups": 2},
    "heads": {"cp_comm_type": "a2a", "num_query_groups": 2},
    "latent": {**LATENT, "q_lora_rank": 16, "qk_layernorm": True, "rope_type": "rope", "cp_comm_type": "p2p"},
    "dealt": {**LATENT, "q_lora_rank": 16, "rope_type": "rope", "cp_comm_type": "a2a"},
}
TOKENS = (16, 1, 32)


def _case(config: dict[str, Any], **more: Any) -> Case:
    model = {} if "multi_latent_attention" in config else {"position_embedding_type": "rope"}
    return Case(dtype=torch.float64, config={"num_layers": 1, **config}, model=model, **more)


def _given(samples: int) -> torch.Tensor:
    return torch.randn(samples, *TOKENS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _mask(kind: str) -> torch.Tensor | None:
    """Causal, and where a kind says so of three documents."""
    if "documents" not in kind:
        return None
    number = torch.tensor([0] * 5 + [1] * 2 + [2] * 9)
    return (torch.ones(16, 16).triu(1).bool() | (number[:, None] != number))[None, None]


def _decoded(model: Any, stream: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    gpt, rotary = model.module, None
    if gpt.position_embedding_type == "rope":
        rotary = gpt.rotary_pos_emb(TOKENS[0])
    return gpt.decoder(hidden_states=stream, attention_mask=mask, rotary_pos_emb=rotary)


def _back(output: torch.Tensor, places: torch.Tensor) -> None:
    """By the place of each token."""
    weights = (places[:, None, None] * TOKENS[2] + torch.arange(TOKENS[2])).double().sin()
    (output * weights).sum().backward()


@contextmanager
def _exactly(case: Case) -> Iterator[None]:
    """Megatron makes its norms in the default type."""
    torch.set_default_dtype(torch.float64)
    try:
        with training.parallel(case):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def _serial(kind: str, config: dict[str, Any], samples: int) -> dict[str, Any]:
    training.on_cpu()
    with _exactly(_case(config)):
        model = training.build(_case(config))
        model.zero_grad_buffer()
        streams = _given(samples).requires_grad_()
        outputs = [_decoded(model, stream, _mask(kind)) for stream in streams]
        for output in outputs:
            _back(output, torch.arange(TOKENS[0]))
        grads = {name: parameter.main_grad.clone() for name, parameter in model.module.decoder.named_parameters()}
        return {"outputs": torch.stack(outputs).detach(), "grad": streams.grad, "grads": grads}


def _all_serial(wanted: set[tuple[str, int]]) -> dict[tuple[str, int], Any]:
    return {(kind, samples): _serial(kind, LAYERS[kind.split()[0]], samples) for kind, samples in sorted(wanted)}


def _apart(grid: Grid, layout: str, shared: int, kind: str, one: dict[str, Any]) -> float:
    settings = Settings(grid.gx, grid.gy, grid.gz, layout=layout)
    case = _case(LAYERS[kind.split()[0]], settings=settings, context=shared)
    with _exactly(case):
        model, mesh = training.build(case), process_groups.mesh()
        model.zero_grad_buffer()
        stream = _given(grid.batch // shared)[mesh.rank("readers")].requires_grad_()
        places = Shared(mesh, Chunks(TOKENS[0], shared)).places(torch.device("cpu"))
        mask = _mask(kind)
        mask = None if mask is None else mask.index_select(2, places)
        output = _decoded(model, share_of_stream(stream.index_select(0, places), settings, mesh), mask)
        output = whole_stream(output, settings, mesh)
        _back(output, places)
        model.finish_grad_sync()
        sample = mesh.rank("readers")
        apart = [(output - one["outputs"][sample].index_select(0, places)).abs().max()]
        apart += [(stream.grad - one["grad"][sample]).index_select(0, places).abs().max()]
        for name, parameter in model.module.decoder.named_parameters():
            wanted = layout_of(parameter).shard(one["grads"][name], mesh.grid, mesh.coordinates) / grid.batch
            apart.append((parameter.main_grad - wanted.view_as(parameter)).abs().max())
    return float(max(apart))


def _all_apart(wanted: dict[str, tuple], serial: dict[tuple[str, int], Any]) -> dict[str, float]:
    training.on_cpu()
    return {
        name: _apart(grid, layout, shared, kind, serial[kind, grid.batch // shared])
        for name, (grid, layout, shared, kind) in wanted.items()
    }


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_layers_are_one_process_s_on_every_grid(every: bool) -> None:
    """All ways of attention on all grids; in every run they take turns."""
    kinds, wanted = [*LAYERS, "ring documents"], {}
    places = [(grid, shared) for grid in factorisations(4) for shared in (2, 4) if grid.batch % shared == 0]
    for turn, (grid, shared) in enumerate(places):
        for kind in kinds if every else [kinds[turn % len(kinds)]]:
            wanted[f"{kind} over {shared} on {grid}"] = grid, "scattered", shared, kind
    for kind in kinds if every else ["latent"]:
        wanted[f"{kind} replicated"] = Grid(1, 2, 2), "replicated", 2, kind
    serial = run_ranks(_all_serial, 1, {(kind, grid.batch // shared) for grid, _, shared, kind in wanted.values()})[0]
    for rank in run_ranks(_all_apart, 4, wanted, serial):
        assert {name: apart for name, apart in rank.items() if not apart < 1e-10} == {}


def _dropped(how: str) -> list[Any]:
    training.on_cpu()
    config = {"attention_dropout": 0.5, "cp_comm_type": how}
    found = []
    for settings in (Settings(1, 2, layout="replicated"), Settings(2)):
        with training.parallel(Case(settings=settings, config=config, context=2)):
            core = (
                training.build(Case(settings=settings, config=config, context=2))
                .module.decoder.layers[0]
                .self_attention.core_attention
            )
            torch.manual_seed(1)
            query = torch.randn(8, 1, 4, 4)
            found.append(
                (core(query, query, query, None).detach().numpy(), core.eval()(query, query, query, None).numpy())
            )
    return found


def test_ranks_with_the_same_heads_drop_the_same() -> None:
    """Ranks 0 and 1 differ in y, and then in x, over which heads are split."""
    (same, different), (also_same, also_different) = run_ranks(_dropped, 4, "p2p")[:2]
    assert (same[0] == also_same[0]).all()
    assert (different[0] != also_different[0]).any()
    assert (same[0] != same[1]).any()


def _sent(cases: dict[str, dict[str, Any]]) -> dict[str, list[int]]:
    """Elements that this rank sends along the sequence in one layer's forward and backward pass."""
    training.on_cpu()
    found = {}
    for name, config in cases.items():
        case = Case(settings=Settings(), config={**config, "num_layers": 1}, context=4)
        with training.parallel(case):
            model = training.build(case)
            stream = torch.randn(4, 2, 32, requires_grad=True)
            with Ledger(process_groups.mesh().axis_names()) as ledger, model.no_sync():
                output = model.module.decoder(hidden_states=stream, attention_mask=None)
                forward = sum(one.sent for one in ledger.collectives if one.axis == "sequence")
                output.sum().backward()
                both = sum(one.sent for one in ledger.collectives if one.axis == "sequence")
            found[name] = [forward, both - forward]
    return found


def test_what_attention_sends_is_what_the_planner_counts() -> None:
    """Of two samples with eight heads of 4 features for keys, and for values, in all-to-alls of what a rank hands in."""
    chunks = Chunks(16, 4)
    ranks = run_ranks(_sent, 4, {how: {"cp_comm_type": how} for how in TRAVEL})
    for rank, found in enumerate(ranks):
        for word, how in TRAVEL.items():
            counted = [sent(chunks, rank, Sight(), how, Heads(2, 8, 8, 4, 4), backward) for backward in (False, True)]
            assert found[word] == counted, (rank, word)


def _refusals() -> dict[str, str]:
    training.on_cpu()
    said = {}

    def note(name: str, do: Any) -> None:
        try:
            do()
            said[name] = ""
        except ValueError as error:
            said[name] = str(error)

    case = Case(settings=Settings(), context=2, config={"window_size": (4, 1)})
    with training.parallel(case):
        config = training.configuration(Case(settings=Settings(), context=2))
        core = context.ContextAttention(config, 1, AttnMaskType.causal, "self")
        query = torch.randn(8, 1, 8, 4)
        note("window", lambda: training.build(case))
        for size, window in (((-1, -1), None), ((-1, 0), None), ((5, -1), 6), ((0, 0), 1)):
            wide = training.configuration(Case(settings=Settings(), context=2, config={"window_size": size}))
            assert context.ContextAttention(wide, 1, AttnMaskType.causal, "self").sight.window == window, size
        note("mask type", lambda: context.ContextAttention(config, 1, AttnMaskType.padding, "self"))
        note("way", lambda: context.ContextAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type="a2a+p2p"))
        note("packed", lambda: core(query, query, query, None, packed_seq_params=object()))
        note("shape", lambda: core(query, query, query, torch.ones(1, 1, 16, 16).triu(1).bool()))
        note("form", lambda: core(query, query, query, torch.zeros(1, 1, 8, 16).bool()))
    return said


def test_what_shared_sequences_do_not_know_is_refused() -> None:
    words = {
        "window": "window_size = (4, 1) lets a token see the 1 after it",
        "mask type": "attn_mask_type = padding of self attention",
        "way": "cp_comm_type = 'a2a+p2p' is not known; use 'p2p', 'all_gather', 'a2a'",
        "packed": "packed_seq_params is given to attention over 2 ranks",
        "shape": "attention_mask of shape (1, 1, 16, 16) is not of this rank's 8 rows of 16 tokens",
        "form": "attention_mask hides more than later tokens and other documents",
    }
    for said in run_ranks(_refusals, 2):
        for name, start in words.items():
            assert said[name].startswith(start), (name, said[name])
            assert ";" in said[name]


def test_a_mask_is_looked_at_once_and_again_where_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    monkeypatch.setattr(context, "in_order", lambda share, whole: looked.append(1) or share)
    whole: Any = SimpleNamespace(chunks=SimpleNamespace(share=6, tokens=6), places=lambda device: torch.arange(6))
    mask = torch.ones(1, 1, 6, 6).triu(1).bool()
    assert context._documents(mask, whole) is None and context._documents(mask.detach(), whole) is None
    assert len(looked) == 1
    mask[:, :, 4:, :4] = True  # a document ends
    found = context._documents(mask.detach(), whole)
    assert found is not None and found.tolist() == [[0, 0, 0, 0, 4, 4]] and len(looked) == 2
