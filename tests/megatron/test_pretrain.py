"""Megatron-LM's own pretrain_gpt.py, as it is, on grids of CPU ranks; it is in no package, so its checkout must be named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.megatron.harness import CHECKOUT, CPU, MOCK, MODEL, VARIANTS, difference, missing, run

TOLERANCE = 1e-5
needs_script = pytest.mark.skipif(bool(missing()), reason=missing())
GRIDS = [(1, 1, 1, 4), (4, 1, 1, 1), (1, 4, 1, 1), (1, 1, 4, 1), (2, 2, 1, 1), (2, 1, 2, 1), (1, 2, 2, 1)]
GRIDS += [(2, 1, 1, 2), (1, 2, 1, 2), (1, 1, 2, 2)]
EIGHT = [(2, 2, 2, 1), (2, 1, 2, 2), (2, 2, 1, 2)]


def flags(
    grid: tuple[int, ...], variant: str, *more: str, stages: int = 1, data: list[str] = MOCK
) -> tuple[int, list[str]]:
    gx, gy, gz, gdata = grid
    ours = f"--tensor-model-parallel-impl axonn3d --axonn-gx {gx} --axonn-gy {gy} --axonn-gz {gz}".split()
    if stages > 1:
        ours += ["--pipeline-model-parallel-size", str(stages)]
    return gx * gy * gz * gdata * stages, [*CPU, *MODEL, *data, *VARIANTS[variant].split(), *ours, *more]


def stock(variant: str, *more: str, data: list[str] = MOCK) -> tuple[int, list[str]]:
    return 1, [*CPU, *MODEL, *data, *VARIANTS[variant].split(), *more]


def differences(
    cases: dict[str, tuple[int, list[str]]], timeout: float = 1800, script: Path | None = None
) -> dict[str, float | str]:
    """Differences of all cases from the first, where they are too large; ``pytest -s`` shows all."""
    found = run(script or Path(CHECKOUT, "pretrain_gpt.py"), cases, timeout)
    wanted = found.pop(next(iter(cases)))
    assert "error" not in wanted, wanted["error"]
    apart = {name: result.get("error") or difference(wanted, result) for name, result in found.items()}
    print(*(f"{name}: {value}" for name, value in apart.items()), sep="\n")
    return {name: value for name, value in apart.items() if not (isinstance(value, float) and value < TOLERANCE)}


@needs_script
def test_every_grid_of_four_and_three_of_eight() -> None:
    assert differences({"stock": stock("plain"), **{str(grid): flags(grid, "plain") for grid in GRIDS + EIGHT}}) == {}


DRAWN = (
    "--hidden-dropout 0.1 --num-experts 4 --moe-input-jitter-eps 0.1 --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity "
    "--moe-token-dispatcher-type alltoall --disable-bias-linear --train-iters 3"
).split()


@needs_script
def test_ranks_with_the_same_values_draw_the_same() -> None:
    """The generator of a GPU, whose part the CPU's has here, is not the one from which the loader of the first of them draws a seed."""
    split = flags((2, 1, 1, 1), "plain", *DRAWN, "--axonn-layout", "replicated")
    assert differences({"stock": stock("plain", *DRAWN), "replicated": split}) == {}


@needs_script
@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "plain"])
def test_variants(variant: str) -> None:
    grids = [(2, 1, 2, 1), (2, 2, 1, 1)]
    assert differences({"stock": stock(variant), **{str(grid): flags(grid, variant) for grid in grids}}) == {}


MIXED = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 96 --moe-layer-freq ([0]+[1]) --moe-shared-expert-intermediate-size 64 "
    "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 --moe-router-score-function sigmoid "
    "--moe-router-enable-expert-bias --moe-router-num-groups 2 --moe-router-group-topk 1 --disable-bias-linear --swiglu --normalization RMSNorm "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --multi-latent-attention --q-lora-rank 32 --kv-lora-rank 24 "
    "--qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 --qk-layernorm --mtp-num-layers 1 --use-distributed-optimizer"
).split()
EXPERTS = {(2, 1, 2, 1): "2", (1, 1, 2, 2): "4", (1, 2, 1, 2): "2", (2, 1, 2, 2): "2"}
"""Ranks with different experts, by grid."""


@needs_script
def test_experts_latents_and_predictions() -> None:
    cases = {"stock": stock("plain", *MIXED)}
    for grid, experts in EXPERTS.items():
        # Which Megatron's own cannot do on a CPU.
        more = ["--expert-model-parallel-size", experts, "--moe-token-dispatcher-type", "alltoall"]
        cases[f"{grid}, experts over {experts}"] = flags(grid, "plain", *MIXED, *more)
    whole = ["--expert-model-parallel-size", "4", "--expert-tensor-parallel-size", "1"]
    cases["whole experts"] = flags((2, 2, 1, 1), "plain", *MIXED, *whole)
    assert differences(cases) == {}


CONTEXT = [
    ((1, 1, 1, 2), 2, []),
    ((1, 1, 2, 1), 2, ["--cp-comm-type", "all_gather"]),
    ((2, 1, 1, 2), 2, []),
    ((1, 2, 1, 2), 2, ["--axonn-layout", "replicated"]),
    ((1, 1, 4, 1), 4, []),
    ((1, 1, 2, 2), 2, ["--cp-comm-type", "all_gather"]),
    ((2, 2, 2, 1), 2, []),
    ((1, 1, 2, 4), 4, []),
]
"""Grids, how many ranks share a sequence, and how."""


@needs_script
@pytest.mark.parametrize("variant", ["plain", "llama"])
def test_shared_sequences(variant: str) -> None:
    cases = {"stock": stock(variant)}
    for grid, shared, more in CONTEXT:
        cases[f"{grid} over {shared}"] = flags(grid, variant, "--context-parallel-size", str(shared), *more)
    assert differences(cases) == {}


@needs_script
def test_experts_latents_and_predictions_of_shared_sequences() -> None:
    cases = {"stock": stock("plain", *MIXED)}
    for (grid, experts), shared in zip(EXPERTS.items(), (2, 4, 2, 4), strict=True):
        more = ["--expert-model-parallel-size", experts, "--context-parallel-size", str(shared)]
        cases[f"{grid}, experts over {experts}, over {shared}"] = flags(grid, "plain", *MIXED, *more)
    assert differences(cases) == {}


@needs_script
def test_shared_sequences_in_stages_and_from_checkpoints(tmp_path: Path) -> None:
    """Goldfish's masks leave more targets out on one rank than on another; documents end where they end on one rank."""
    masked = ["--axonn-goldfish-k", "2", "--axonn-goldfish-h", "5", "--reset-attention-mask", "--eod-mask-loss"]
    for name, begin in (
        ("whole", stock("plain")),
        ("shared", flags((1, 1, 2, 1), "plain", "--context-parallel-size", "2")),
    ):
        load = [*saved(tmp_path / name, begin), *masked]
        cases = {"stock": stock("plain", *load)}
        for grid, shared, stages in (((1, 1, 1, 2), 2, 2), ((2, 1, 2, 1), 2, 1), ((1, 1, 2, 1), 2, 2)):
            more = [*load, "--context-parallel-size", str(shared)]
            cases[f"{grid} over {shared} on {stages} stages"] = flags(grid, "plain", *more, stages=stages)
        assert differences(cases) == {}, name


def with_doubles(folder: Path, script: str, *doubles: str) -> Path:
    """A script that runs one of Megatron's, which finds doubles of packages, and the systems of `with_systems`."""
    lines = ["import runpy, sys", *(f"from tests.megatron import {double}" for double in doubles)]
    lines += [*(f"{double}.install()" for double in doubles), "import tests.megatron.with_systems"]
    lines += [
        f"sys.path.insert(0, {CHECKOUT!r})",
        f"runpy.run_path({str(Path(CHECKOUT, script))!r}, run_name=__name__)",
    ]
    file = folder / script
    file.write_text("\n".join(lines))
    return file


HYBRID = (
    "--num-layers 4 --is-hybrid-model --hybrid-override-pattern M*-M --mamba-state-dim 8 --mamba-head-dim 8 --mamba-num-groups 2 "
    "--spec tests.megatron.mamba_double hybrid_spec"
).split()


@needs_script
@pytest.mark.timeout(1800)
def test_hybrids_of_mamba(tmp_path: Path) -> None:
    cases = {"stock": stock("plain", *HYBRID), "sharded": flags((2, 1, 2, 1), "distributed optimizer", *HYBRID)}
    cases |= {
        str(grid): flags(grid, "plain", *HYBRID) for grid in ((2, 2, 1, 1), (1, 2, 2, 1), (1, 1, 2, 2), (4, 1, 1, 1))
    }
    cases["shared"] = flags((2, 1, 1, 2), "plain", *HYBRID, "--context-parallel-size", "2")
    script = with_doubles(tmp_path, "pretrain_mamba.py", "mamba_double")
    assert differences(cases, script=script) == {}
    goes_on(tmp_path, script, "plain", HYBRID, [((2, 1, 2, 1), (1, 2, 1, 2)), ((1, 1, 1, 1), (2, 2, 1, 1))])


@needs_script
@pytest.mark.timeout(1800)
def test_muon(tmp_path: Path) -> None:
    muon = ["--optimizer", "muon", "--muon-fp32-matmul-prec", "high", "--muon-tp-mode", "duplicated"]
    cases = {"stock": stock("plain", *muon)}
    cases |= {
        str(grid): flags(grid, "plain", *muon) for grid in ((2, 2, 1, 1), (1, 2, 2, 1), (1, 1, 4, 1), (2, 1, 1, 2))
    }
    script = with_doubles(tmp_path, "pretrain_gpt.py", "muon_double")
    assert differences(cases, script=script) == {}
    goes_on(tmp_path, script, "plain", muon, [((2, 1, 2, 1), (1, 2, 1, 2))])


def goes_on(
    folder: Path,
    script: Path,
    variant: str,
    words: list[str],
    routes: list[tuple[Any, Any]],
    tolerance: float = TOLERANCE,
    ours: dict[Any, list[str]] | None = None,
) -> None:
    """Hold runs that go on from the tenth iteration, on another grid and in stock Megatron, against one that was not interrupted.

    Args:
        ours: more flags of the runs on a grid.
    """
    cases = {"stock": stock(variant, *words)}
    more = ours or {}
    for first, then in routes:
        load = ["--load", str(folder / str(first)), "--ckpt-format", "torch_dist"]
        save = ["--save", load[1], "--save-interval", "10", "--exit-interval", "10"]
        cases[f"{first} begins"] = flags(first, variant, *words, *more.get(first, []), *load, *save)
        cases[f"{first} to {then}"] = flags(then, variant, *words, *more.get(then, []), *load)
        cases[f"{first} to stock"] = stock(variant, *words, *load)
    found = run(script, cases, 1800)
    for name, result in found.items():
        assert "error" not in result, (name, result["error"])
        if name != "stock" and not name.endswith("begins"):
            assert result["losses"] == pytest.approx(found["stock"]["losses"][10:], rel=tolerance), name


@needs_script
def test_prepared_text(tmp_path: Path) -> None:
    from axonn_recipes.data import load
    from axonn_recipes.megatron_gpt.settings import VOCABULARY
    from axonn_recipes.megatron_gpt.text import prepare

    prepare(load(str(Path(__file__).parent), 64), tmp_path / "text", VOCABULARY)
    data = f"--tokenizer-type NullTokenizer --vocab-size {VOCABULARY - 1} --train-data-path {tmp_path}/text_training "
    data += f"--valid-data-path {tmp_path}/text_validation --data-cache-path {tmp_path}/cache"
    cases = {"stock": stock("plain", data=data.split())}
    for grid in [(2, 1, 2, 1), (1, 2, 1, 2), (2, 2, 2, 1)]:
        cases[str(grid)] = flags(grid, "plain", data=data.split())
    assert differences(cases) == {}


def saved(folder: Path, begin: tuple[int, list[str]]) -> list[str]:
    """Flags that load what one step of a run left."""
    ranks, words = begin
    save = ["--save", str(folder), "--save-interval", "1", "--ckpt-format", "torch_dist", "--train-iters", "1"]
    begun = run(Path(CHECKOUT, "pretrain_gpt.py"), {"begin": (ranks, [*words, *save])})["begin"]
    assert "error" not in begun, begun["error"]
    return ["--load", str(folder), "--ckpt-format", "torch_dist", "--finetune", "--no-load-optim", "--no-load-rng"]


@needs_script
@pytest.mark.parametrize("first", [(1, 1, 1, 1), (2, 1, 2, 1)])
def test_pipeline_goes_on_from_weights_without_one(tmp_path: Path, first: tuple[int, ...]) -> None:
    """Stages draw their first weights from seeds of their own, also in stock Megatron, so all start from one checkpoint."""
    load = saved(tmp_path, stock("plain") if first == (1, 1, 1, 1) else flags(first, "plain"))
    cases = {"stock": stock("plain", *load)}
    for grid in ((2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (2, 1, 2, 1)):
        cases[f"{grid} on each of two stages"] = flags(grid, "plain", *load, stages=2)
    assert differences(cases) == {}


@needs_script
@pytest.mark.parametrize("variant", ["plain", "overlapped", "llama"])
def test_interleaved_stages(tmp_path: Path, variant: str) -> None:
    layers = ["--num-layers", "4"]
    load = [*layers, *saved(tmp_path, stock(variant, *layers))]
    cases = {"stock": stock(variant, *load)}
    for grid in ((2, 1, 1, 1), (1, 1, 2, 1), (1, 2, 1, 1)):
        more = [*load, "--num-layers-per-virtual-pipeline-stage", "1"]
        cases[f"{grid} on each of two stages, twice"] = flags(grid, variant, *more, stages=2)
    assert differences(cases) == {}


@needs_script
def test_goldfish_on_every_grid_and_in_stages(tmp_path: Path) -> None:
    """Each sample's targets are left out before anything splits them, so losses and norms are one process's."""
    load = saved(tmp_path, stock("plain"))
    load += ["--train-iters", "5"]
    masked = [*load, "--axonn-goldfish-k", "2", "--axonn-goldfish-h", "5"]
    cases = {"one process": stock("plain", *masked), "all targets": stock("plain", *load)}
    for grid in [(2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2), *GRIDS]:
        cases[str(grid)] = flags(grid, "plain", *masked)
    for grid in [(1, 1, 1, 1), (2, 1, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1), (1, 1, 1, 2)]:
        cases[f"{grid} on each of two stages"] = flags(grid, "plain", *masked, stages=2)
    assert list(differences(cases)) == ["all targets"]
