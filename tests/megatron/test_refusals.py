"""A model's config and its layers' arguments, obeyed or refused, on megatron.core alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig

from axonn_plugins.config.base import ConfigError
from axonn_plugins.hosts.megatron import engine, mamba, process_groups, spec
from axonn_plugins.hosts.megatron.embedding import VocabParallelEmbedding
from axonn_plugins.hosts.megatron.layers import ColumnParallelLinear, RowParallelLinear
from axonn_plugins.hosts.megatron.refusals import check_config, check_model
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_plugins.hosts.megatron.whole_layers import WholeLinear
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.megatron import engine_double, training
from tests.megatron.training import Case

WRONG: dict[str, tuple[Any, str]] = {
    "cross_entropy_loss_fusion": (True, "leave it out"),
    "sequence_parallel": (True, "--axonn-layout scattered"),
    "layernorm_zero_centered_gamma": (True, "norms here multiply by the weight itself"),
    "memory_efficient_layer_norm": (True, "norms here sum their moments"),
    "symmetric_ar_type": ("two_shot", "leave it out"),
    "moe_token_dispatcher_type": ("flex", "use allgather or alltoall"),
    "delay_wgrad_compute": (True, "--axonn-overlap"),
    "cuda_graph_impl": ("local", "collectives of a step are not captured"),
    "batch_invariant_mode": (True, "norms here sum their moments"),
    "softmax_type": ("learnable", "use vanilla"),
}


def _config(**changes: Any) -> TransformerConfig:
    config = TransformerConfig(num_layers=2, hidden_size=32, num_attention_heads=8, tensor_model_parallel_size=2)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("name", WRONG)
def test_a_config_is_held_against_the_table(name: str) -> None:
    value, said = WRONG[name]
    with pytest.raises(ConfigError, match=f"{name} = .* does not go with axonn3d: .*{said}"):
        check_config(_config(**{name: value}))


@pytest.mark.parametrize("recipe", ["delayed", "mxfp8", "blockwise", "custom"])
def test_8_bits_are_of_one_recipe(recipe: str) -> None:
    with pytest.raises(ConfigError, match=f"fp8_recipe = '{recipe}' does not go with axonn3d: .*; use tensorwise"):
        check_config(_config(fp8="hybrid", fp8_recipe=recipe))


def test_8_bits_need_transformer_engine() -> None:
    config = _config(fp8="hybrid", fp8_recipe="tensorwise")
    if engine.load() is None:
        with pytest.raises(ConfigError, match="fp8 = 'hybrid' needs transformer-engine, 2.2 or later"):
            check_config(config)
    with engine_double.installed(engine=True):
        check_config(config)


def test_a_plain_config_passes() -> None:
    check_config(_config(deterministic_mode=True, fp32_residual_connection=True, softmax_type="off-by-one"))


def _graph(tensor: torch.Tensor) -> set[str]:
    """Names of the nodes that made a tensor."""
    seen, names = [tensor.grad_fn], set()
    while seen:
        node = seen.pop()
        if node is not None:
            names.add(type(node).__name__)
            seen += [one for one, _ in node.next_functions]
    return names


def _said(make: Any) -> str:
    try:
        make()
    except ValueError as error:
        return str(error)
    return ""


def _sent() -> tuple[int, list[bool]]:
    """How many calls gave this rank the first one's tensors, and which of them it has."""
    original, calls = mamba.dist.broadcast, []

    def counted(*given: Any, **named: Any) -> Any:
        calls.append(given)
        return original(*given, **named)

    rank, types = process_groups.mesh().rank("x"), (torch.bfloat16, torch.float32, torch.float64, torch.bfloat16)
    tensors = [torch.full((3, n + 1), n + 10.0 * rank, dtype=one) for n, one in enumerate(types)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mamba.dist, "broadcast", counted)
        mamba.send_first(tensors, process_groups.mesh().group("model"))
        mamba.send_first([], process_groups.mesh().group("model"))
    return len(calls), [bool((one == n).all()) for n, one in enumerate(tensors)]


def _on_two_ranks() -> dict[str, Any]:
    training.on_cpu()
    settings = Settings(2)
    found: dict[str, Any] = {}
    with training.parallel(Case(settings=settings)):
        config = training.configuration(Case(settings=settings))
        wanted = {"config": config, "init_method": torch.nn.init.zeros_, "bias": False}
        found["model"] = _said(
            lambda: training.build(Case(settings=settings, config={"cross_entropy_loss_fusion": True}))
        )
        for name, value in (("disable_grad_reduce", True), ("output_dtype", torch.float32)):
            found[name] = _said(lambda n=name, v=value: ColumnParallelLinear(8, 16, **wanted, **{n: v}))  # type: ignore[misc]
        model, ids = training.build(Case(settings=settings)), torch.zeros(1, training.SEQUENCE, dtype=torch.long)
        stream = torch.zeros(training.SEQUENCE, 1, 32)
        found["decoder_input"] = _said(lambda: model(ids, ids, None, stream))
        row = {**wanted, "input_is_parallel": True, "skip_bias_add": True}
        found["row"] = _said(lambda: RowParallelLinear(8, 16, **row, scaled=True))
        whole = {**wanted, "gather_output": False, "skip_bias_add": True, "input_is_parallel": True, "tp_group": None}
        for name, value in (("output_dtype", torch.float32), ("is_expert", True), ("bias", True), ("tp_group", None)):
            found[f"whole {name}"] = _said(lambda n=name, v=value: WholeLinear(8, 16, **{**whole, n: v}))  # type: ignore[misc]
        found["sent"] = _sent()
        found["plain"] = _said(
            lambda: ColumnParallelLinear(8, 16, **wanted, disable_grad_reduce=False, tp_group=object(), name="q")
        )
        for deterministic in (False, True):
            config.deterministic_mode = deterministic
            table = VocabParallelEmbedding(16, 8, init_method=torch.nn.init.normal_, config=config)
            found[f"deterministic {deterministic}"] = _graph(table(torch.randint(16, (2, 4))))
    return found


def test_what_layers_are_made_with_is_obeyed_or_refused() -> None:
    found, second = run_ranks(_on_two_ranks, 2)
    assert "output_dtype = torch.float32" in found["whole output_dtype"] and found["whole tp_group"] == ""
    assert "is_expert = True" in found["whole is_expert"] and "bias = True" in found["whole bias"]
    assert second["sent"] == (1, [True] * 4)
    assert found["model"].startswith("cross_entropy_loss_fusion = True does not go with axonn3d")
    assert (
        found["disable_grad_reduce"]
        == "disable_grad_reduce = True: axonn3d's layers have nothing of the kind; leave it out"
    )
    assert "output_dtype = torch.float32" in found["output_dtype"] and "scaled = True" in found["row"]
    assert found["plain"] == "" and found["decoder_input"].startswith("decoder_input is given")
    assert "EmbeddingBackward0" in found["deterministic False"] and "IndexBackward0" not in found["deterministic False"]
    assert "IndexBackward0" in found["deterministic True"] and "EmbeddingBackward0" not in found["deterministic True"]


OBEYED = {
    "deterministic": Case(config={"deterministic_mode": True}),
    "residual after norm": Case(config={"apply_residual_connection_post_layernorm": True}),
    "bias of qkv alone": Case(config={"add_bias_linear": False, "add_qkv_bias": True}),
    "norm of heads by length": Case(config={"qk_l2_norm": True}),
    "clamped gate": Case(
        config={
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 0.5,
        }
    ),
    "averaged on the way": Case(ddp={"average_in_collective": True, "use_distributed_optimizer": True}),
}


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_what_is_obeyed_trains_as_one_rank(every: bool) -> None:
    """Each case on one of two grids in turn, or on both."""
    grids = {"scattered": Settings(2, 1, 2), "replicated": Settings(1, 2, 2, layout="replicated")}
    stock = run_ranks(training.train_all, 1, OBEYED)[0]
    cases = {
        f"{name}: {grid}": case.on(on)
        for turn, (name, case) in enumerate(OBEYED.items())
        for number, (grid, on) in enumerate(grids.items())
        if every or turn % 2 == number
    }
    for name, found in run_ranks(training.train_all, 4, cases)[0].items():
        wanted = stock[name.partition(":")[0]]
        both = zip(found["losses"] + found["norms"], wanted["losses"] + wanted["norms"], strict=True)
        assert max(abs(f - w) / w for f, w in both) < 1e-5, name


def test_a_stream_in_float32_goes_into_layers_of_bf16() -> None:
    """On a grid with y, whose norms are ours: torch's own refuse the mixture."""
    plain = Case(dtype=torch.bfloat16, ddp={"grad_reduce_in_fp32": True})
    wide = plain.on(Settings(1, 2), config={"fp32_residual_connection": True})
    stock = run_ranks(training.train_all, 1, {"plain": plain})[0]["plain"]["losses"]
    found = run_ranks(training.train_all, 2, {"wide": wide})[0]["wide"]["losses"]
    assert max(abs(f - w) / w for f, w in zip(found, stock, strict=True)) < 1e-3


class HybridModel:
    """Called as that of later versions, which only a script's imports named before."""


class OwnHybrid(HybridModel):
    """A model derived from it."""


def test_models_whose_layers_are_not_replaced_are_refused_when_they_are_made() -> None:
    with pytest.raises(
        ConfigError, match=r"axonn3d does not split HybridModel of later versions \(OwnHybrid\): its layers are not"
    ):
        check_model(OwnHybrid)
    check_model(GPTModel)
    made = object.__new__(OwnHybrid)
    with pytest.raises(ConfigError, match="HybridModel"):
        spec._of_models_that_are_split(lambda self: None)(made)
