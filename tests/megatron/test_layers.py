"""Megatron-core's GPT on every grid of four ranks against Megatron's own layers on one: losses, norms, weights, bytes."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, layers
from megatron.core.transformer.dot_product_attention import DotProductAttention
from torch import nn

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.randomness import HeadsDropout, StreamDropout
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_plugins.hosts.megatron.sharing import column_split, row_split
from axonn_plugins.observe.ledger import Ledger
from axonn_tp import Grid, factorisations
from axonn_tp.comm import replicated
from axonn_tp.comm.collectives import Collective
from axonn_tp.layers.cross_entropy import loss_collectives
from axonn_tp.layers.embedding import embedding_collectives, embedding_layout
from axonn_tp.layers.layer_norm import norm_collectives
from axonn_tp.layers.linear_split import LinearSplit, linear_collectives
from tests.axonn_tp.counting import joined_over_z
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.megatron import training
from tests.megatron.training import Case
from tests.noisy import noisy

LLAMA = Case(
    config={
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "num_query_groups": 4,
        "add_bias_linear": False,
    },
    model={"position_embedding_type": "rope"},
    # Without biases: those of keys have no gradient but what rounding leaves, which may be zero or not.
    optimizer={"log_num_zeros_in_grad": True},
)
TIED = Case(model={"share_embeddings_and_output_weights": True})
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 2000}
DROPS = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
CASES = {
    "gpt": Case(),
    "llama": LLAMA,
    "tied": TIED,
    "gated": Case(
        micro_batches=2,
        config={"gated_linear_unit": True, "num_query_groups": 2, "qk_layernorm": True},
        model=TIED.model,
    ),
    "one group": Case(config={"num_query_groups": 1, "qk_layernorm": True}),
    "six heads": Case(config={"num_attention_heads": 6, "kv_channels": 4}),
    "full": Case(micro_batches=2, config=FULL),
    "selective": Case(config={"recompute_granularity": "selective"}),
    "sharded": Case(ddp={"use_distributed_optimizer": True}),
    "overlapped": Case(micro_batches=2, ddp={**SHARDED, "overlap_param_gather": True}, model=TIED.model),
    "packed": LLAMA.on(None, packed=(5, 1, 10)),
    "bf16": Case(dtype=torch.bfloat16, ddp={"grad_reduce_in_fp32": True, **SHARDED}),
    "sgd": Case(optimizer={"optimizer": "sgd", "lr": 1.0}, config=LLAMA.config),
    "fp16": Case(dtype=torch.float16, ddp={"grad_reduce_in_fp32": True}),
    "own loss": Case(smoothed=0.1),
}
PIPELINE = {
    "pipeline": Case(pipeline=2, micro_batches=2, model=TIED.model),
    "pipeline llama": LLAMA.on(None, pipeline=2),
    "predictions in a stage without the loss": Case(
        pipeline=2,
        config={"mtp_num_layers": 1, "pipeline_model_parallel_layout": "Ettm|L"},
        model={"position_embedding_type": "rope"},
    ),
}
# How far a loss and a gradient norm may be from one rank's, relative.
NEAR = {"fp16": (1e-3, 5e-3), "bf16": (1e-3, 3e-2)}
EVERYWHERE = [
    (grid, layout) for grid in factorisations(4) for layout in ("scattered", "replicated")[: grid.gx * grid.gy]
]
SOME = [(Grid(2, 2), "scattered"), (Grid(2, 1, 2), "scattered"), (Grid(1, 2, 1, 2), "replicated")]
ON: dict[str, list[tuple[Grid, str]]] = {
    "gpt": [(Grid(1, 4), "scattered")],
    "llama": [(Grid(2, 1, 2), "scattered")],
    "tied": [(Grid(1, 1, 4), "scattered")],
    "gated": [(Grid(2, 1, 1, 2), "scattered")],
    "one group": [],
    "six heads": [*SOME[:1], (Grid(1, 4), "scattered")],
    "full": [],
    "selective": [(Grid(1, 2, 1, 2), "scattered")],
    "sharded": [(Grid(1, 1, 1, 4), "scattered")],
    "overlapped": [(Grid(1, 1, 2, 2), "scattered")],
    "packed": [(Grid(1, 2, 2), "scattered")],
    "bf16": SOME[2:],
    "sgd": SOME[1:],
    "fp16": SOME[:1],
    "own loss": SOME[:1],
    "pipeline": [(Grid(1, 1, 2), "replicated")],
    "pipeline llama": [(Grid(2), "scattered"), (Grid(1, 2), "replicated")],
    "predictions in a stage without the loss": [(Grid(2), "scattered")],
}
"""Where a case is trained in every run, beside what `ours` has of it: each grid once."""
STAGED = [(Grid(2), "scattered"), (Grid(1, 2), "replicated"), (Grid(1, 1, 2), "replicated")]

OPTIONS = {
    "cached": ("full", Settings(2, 1, 2, cache_gathers="all")),
    "without overlap": (
        "overlapped",
        Settings(2, 1, 2, overlap_all_reduce=False, overlap_reduce_scatter=False, overlap_all_gather=False),
    ),
    "tuned": ("gpt", Settings(2, 2, tune_matmuls=True)),
}


def _settings(grid: Grid, layout: str) -> Settings:
    return Settings(grid.gx, grid.gy, grid.gz, layout=layout)


@pytest.fixture(scope="module")
def stock() -> dict[str, Any]:
    """By case, what Megatron's own layers give on one rank, or on one a stage."""
    return run_ranks(training.train_all, 1, CASES)[0] | run_ranks(training.train_all, 2, PIPELINE)[0]


def _places(name: str, every: bool) -> list[tuple[Grid, str]]:
    """Where a case is trained."""
    if not every:
        return ON[name]
    return EVERYWHERE if name == "gpt" else STAGED if name in PIPELINE else SOME


@pytest.fixture(scope="module", params=[False, thorough(True)], ids=["some", "every"])
def ours(
    request: pytest.FixtureRequest, stock: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """By rank, by case, grid and layout, what the grid gives."""
    wanted = {}
    for name, case in CASES.items():
        for grid, layout in _places(name, request.param):
            expected = stock[name]["weights"] if name == "sgd" else {}
            wanted[f"{name} on {grid} {layout}"] = case.on(_settings(grid, layout), expected=expected)
    for name, (case, settings) in OPTIONS.items():
        wanted[f"{case} on {name}"] = CASES[case].on(settings)
    wanted["one group on four"] = CASES["one group"].on(Settings(4))
    wanted["llama on engine"] = LLAMA.on(Settings(2, 2), engine=True)
    if request.param:
        wanted["gpt on engine"] = Case(settings=Settings(2, 1, 2, layout="replicated"), engine=True)
    for name, case in PIPELINE.items():
        for grid, layout in _places(name, request.param):
            wanted[f"{name} on {grid} {layout}"] = case.on(_settings(grid, layout))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))  # what matmuls took
        return run_ranks(training.train_all, 4, wanted)


def _relative(found: list[float], expected: list[float]) -> float:
    return max(abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", [*CASES, *PIPELINE])
def test_losses_and_norms_are_those_of_one_rank(name: str, stock: dict[str, Any], ours: list[dict[str, Any]]) -> None:
    losses, norms = NEAR.get(name, (1e-6, 1e-5))
    runs = [run for run in ours[0] if run.startswith(f"{name} on")]
    assert runs
    for run in runs:
        for rank in ours:
            assert rank[run]["losses"] == ours[0][run]["losses"], run
            assert rank[run]["norms"] == ours[0][run]["norms"], run
        assert _relative(ours[0][run]["losses"], stock[name]["losses"]) < losses, run
        assert _relative(ours[0][run]["norms"], stock[name]["norms"]) < norms, run


def test_zeros_in_gradients_are_counted_once(stock: dict[str, Any], ours: list[dict[str, Any]]) -> None:
    for name in ("llama", "pipeline llama"):
        assert min(stock[name]["zeros"]) > 100
        for run in ours[0]:
            if run.startswith(f"{name} on"):
                assert ours[0][run]["zeros"] == stock[name]["zeros"], run


def test_weights_are_those_of_one_rank(ours: list[dict[str, Any]]) -> None:
    for rank in ours:
        for run, result in rank.items():
            if run.startswith("sgd on"):
                assert result["weights"]
                assert max(result["weights"].values()) < 1e-5, run


def _differing(ranks: list[dict[str, str]]) -> set[str]:
    """Keys under which ranks hold different things."""
    found: dict[str, str] = {}
    return {key for rank in ranks for key, digest in rank.items() if found.setdefault(key, digest) != digest}


def test_replicas_stay_identical(ours: list[dict[str, Any]]) -> None:
    for run in ours[0]:
        assert not _differing([rank[run]["replicas"] for rank in ours]), run


def _noisy(cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """The runs where no two ranks compute a gradient to the same bits, as on an accelerator."""
    with noisy((DotProductAttention, "forward")), patch.object(replicated, "computed_apart", lambda device: True):
        return training.train_all(cases)


@pytest.mark.thorough
def test_replicas_stay_identical_where_kernels_do_not_compute_the_same_bits_twice(stock: dict[str, Any]) -> None:
    cases = {
        "gpt": CASES["gpt"].on(Settings(2, 2, layout="replicated"), steps=20),
        "sharded": CASES["sharded"].on(Settings(1, 2, 2, layout="replicated"), steps=20),
        "overlapped": CASES["overlapped"].on(Settings(1, 2), steps=20),
    }
    ranks = run_ranks(_noisy, 4, cases)
    for name in cases:
        assert not _differing([rank[name]["replicas"] for rank in ranks]), name
        for kind in ("losses", "norms"):
            assert _relative(ranks[0][name][kind][:2], stock[name][kind]) < 1e-4, (name, kind)


@pytest.mark.parametrize("steps", [5, thorough(100)])
def test_replicas_stay_identical_and_recomputation_drops_the_same(steps: int) -> None:
    drops = Case(config={**DROPS, "num_layers": 1}, ddp={"use_distributed_optimizer": True}, optimizer={"lr": 1e-3})
    recomputed = drops.on(None, config={**drops.config, **FULL})
    cases = {}
    for name, settings in (("replicated", Settings(2, 2, layout="replicated")), ("scattered", Settings(2, 2))):
        long = steps if name == "scattered" else 2
        cases |= {f"{name} kept": drops.on(settings, steps=long), f"{name} recomputed": recomputed.on(settings)}
    ranks = run_ranks(training.train_all, 4, cases)
    assert not _differing([rank["scattered kept"]["replicas"] for rank in ranks])
    assert all(rank["scattered kept"]["losses"] == ranks[0]["scattered kept"]["losses"] for rank in ranks)
    for name in ("replicated", "scattered"):
        kept, again = ranks[0][f"{name} kept"], ranks[0][f"{name} recomputed"]
        for what in ("losses", "norms"):
            assert len(again[what]) == 2 and _relative(again[what], kept[what][:2]) < 1e-6


def _masks(layout: str) -> list[Any]:
    training.on_cpu()
    found = []
    with training.parallel(Case(settings=Settings(2, 2, layout=layout))):
        for dropout in (StreamDropout(0.5), HeadsDropout(0.5)):
            found.append(dropout(torch.ones(64)).numpy())
    return found


@pytest.mark.parametrize("layout", ["scattered", "replicated"])
def test_ranks_drop_the_same_where_they_hold_the_same(layout: str) -> None:
    # Ranks 0 and 1 have y = 0, ranks 0 and 2 have x = 0.
    streams, heads = zip(*run_ranks(_masks, 4, layout), strict=True)
    assert (heads[0] == heads[2]).all() and (heads[1] == heads[3]).all() and (heads[0] != heads[1]).any()
    assert (streams[0] != streams[2]).any()
    assert (streams[0] == streams[1]).all() == (layout == "replicated")


def _counted(grids: list[tuple[Grid, str]]) -> list[tuple[str, list[Collective], list[Collective]]]:
    training.on_cpu()
    found = []
    for grid, layout in grids:
        with training.parallel(Case(settings=_settings(grid, layout))):
            model, mesh = training.build(Case(settings=_settings(grid, layout))), process_groups.mesh()
            model.zero_grad_buffer()
            for _ in range(2):  # the second pass gathers weights ahead
                tokens = torch.randint(training.VOCABULARY, (2, training.SEQUENCE + 1))
                with Ledger(mesh.axis_names()) as ledger:
                    with model.no_sync():
                        training.loss_of(model, tokens).mean().backward()
                wanted = _expected(mesh.grid, layout, 2 * training.SEQUENCE)
                found.append((f"{grid} {layout}", joined_over_z(ledger.collectives), joined_over_z(wanted)))
    return found


def _expected(grid: Grid, layout: str, tokens: int) -> list[Collective]:
    """The equations' collectives of one pass."""
    settings, mesh = _settings(grid, layout), process_groups.mesh()
    hidden, vocabulary, scattered = 32, training.VOCABULARY, layout == "scattered"
    options = settings.options()
    row = row_split(settings)
    linears = [(hidden, 3 * hidden, column_split(settings, mesh, 3 * hidden, 1, 8)), (hidden, hidden, row)]
    linears += [(hidden, 4 * hidden, column_split(settings, mesh, 4 * hidden)), (4 * hidden, hidden, row)]
    made = embedding_collectives(tokens, embedding_layout((vocabulary, hidden)), grid, scattered)
    made += 5 * norm_collectives(tokens // (grid.gx if scattered else 1), grid)
    head = column_split(settings, mesh, vocabulary)
    for k, n, split in [*linears, *linears, (hidden, vocabulary, head)]:
        if split.transposed and scattered and grid.gy > 1:
            split = LinearSplit(transposed=True, takes="features", gives=split.gives)
        made += linear_collectives(tokens, k, n, grid, split, options)
    made += loss_collectives(tokens, grid, ("x", "y") if scattered else ("x",))
    return made


@pytest.mark.parametrize(
    "grids", [[SOME[1], (Grid(2, 2), "replicated")], thorough([SOME[0], SOME[2]])], ids=["some", "others"]
)
def test_the_ledger_sees_what_the_equations_count(grids: list[tuple[Grid, str]]) -> None:
    for name, found, wanted in run_ranks(_counted, 4, grids)[0]:
        assert found == wanted, name


class _Norm(nn.LayerNorm):
    """One of a user's own, of another kind than its base."""

    def __init__(self, config: Any, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)


def _with_norm(layer: Any) -> None:
    layer.input_layernorm = _Norm


def _with_linear(layer: Any) -> None:
    """As in a spec that was made when the script was imported."""
    layer.self_attention.submodules.linear_qkv = layers.ColumnParallelLinear


def _refused(runs: list[tuple[Settings, dict[str, Any], Any]]) -> list[str]:
    """What is said of models with a configuration, of what is changed in their layers, and of logits that a script gathers."""
    training.on_cpu()
    said, made = [], training._layers
    for settings, config, change in runs:

        def changed(config: Any, change: Any = change) -> Any:
            spec = made(config)
            change(spec.submodules)
            return spec

        with pytest.MonkeyPatch.context() as patch:
            if change is not None:
                patch.setattr(training, "_layers", changed)
            try:
                with training.parallel(Case(settings=settings)):
                    training.build(Case(settings=settings, config=config))
                    gather_from_tensor_model_parallel_region(torch.zeros(1, training.VOCABULARY))
            except ValueError as error:
                said.append(str(error))
    return said


def _summed_in_parts(settings: Settings) -> list[str]:
    training.on_cpu()
    case = Case(settings=settings, config={"qk_layernorm": True})
    with training.parallel(case):
        model, mesh = training.build(case), process_groups.mesh()
        model.zero_grad_buffer()
        with model.no_sync():
            training.loss_of(model, torch.zeros(2, training.SEQUENCE + 1, dtype=torch.long)).mean().backward()
        with Ledger(mesh.axis_names()) as ledger:
            model.finish_grad_sync()
    return sorted(map(str, ledger.collectives))


def test_what_ranks_compute_in_parts_is_summed_once_a_step() -> None:
    # Of a stream of 32 features and 16 positions: five norms, four biases and the positions. Of 4 features: norms of heads.
    stream, heads = 14 * 32 + 16 * 32, 8 * 4
    found = run_ranks(_summed_in_parts, 2, Settings(2))[0]
    assert found == [str(Collective("all_reduce", "x", 2, stream + heads))]
    assert run_ranks(_summed_in_parts, 2, Settings(1, 2, layout="replicated"))[0] == []


def test_sizes_that_do_not_divide_and_layers_of_others_are_refused() -> None:
    runs = [(Settings(2), {"ffn_hidden_size": 99}, None), (Settings(1, 1, 4), {}, None)]
    runs += [
        (Settings(1, 2), {}, _with_norm),
        (Settings(2), {}, _with_linear),
        (Settings(1, 2, layout="replicated"), {}, None),
    ]
    sizes, ranks, norm, linear, words = run_ranks(_refused, 2, runs)[0]
    assert "99 output features do not divide by gx = 2" in sizes
    assert "does not divide the 2 ranks" in ranks
    assert "input_layernorm is a _Norm, in whose place axonn3d would put a LayerNorm: " in norm
    assert "decoder.layers.0.self_attention.linear_qkv is a ColumnParallelLinear of Megatron's own split" in linear
    assert words.startswith("gather_from_tensor_model_parallel_region of logits would mix up words: ")


@pytest.mark.thorough
@pytest.mark.parametrize("every", [False, True])
def test_every_grid_of_eight_ranks_that_uses_three_axes(stock: dict[str, Any], every: bool) -> None:
    grids = [Grid(2, 2, 2, 1), Grid(2, 1, 2, 2), Grid(2, 2, 1, 2)]
    cases = {
        f"{name} on {grid} {layout}": CASES[name].on(_settings(grid, layout))
        for name, layout, some in (("llama", "scattered", grids[:1]), ("overlapped", "replicated", []))
        for grid in (grids if every else some)
    }
    ranks = run_ranks(training.train_all, 8, cases)
    for run in cases:
        expected = stock[run.partition(" ")[0]]
        assert _relative(ranks[0][run]["losses"], expected["losses"]) < 1e-6, run
        assert _relative(ranks[0][run]["norms"], expected["norms"]) < 1e-5, run
        assert not _differing([rank[run]["replicas"] for rank in ranks]), run
