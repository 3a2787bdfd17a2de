"""Weight gradients of 16-bit models: summed over z as precisely as Megatron's flags have them summed over data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.distributed.param_and_grad_buffer import shard_buffer
from megatron.core.utils import unwrap_model

from axonn_plugins.hosts.megatron import process_groups
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_tp import layout_of
from axonn_tp.comm.collectives import whole_parameter
from tests.distributed import run_ranks
from tests.matrix import asked, thorough
from tests.megatron import training
from tests.megatron.training import FEW, Case

BF16, FP16 = torch.bfloat16, torch.float16
WIDE = {"grad_reduce_in_fp32": True}
SHARDED = {"use_distributed_optimizer": True}
OVERLAPPED = {**SHARDED, "overlap_grad_reduce": True, "bucket_size": 2000}
TIED = {"share_embeddings_and_output_weights": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
PRECISE = {
    "bf16": Case(dtype=BF16, ddp=WIDE),
    "fp16": Case(dtype=FP16, ddp=WIDE),
    "accumulated": Case(dtype=BF16, ddp=WIDE, micro_batches=2),
    "distributed optimizer": Case(dtype=BF16, ddp={**WIDE, **SHARDED}),
    "overlapped": Case(dtype=BF16, ddp={**WIDE, **OVERLAPPED}, micro_batches=2),
    "recomputed": Case(dtype=BF16, ddp=WIDE, config=FULL, micro_batches=2),
}
"""Where sums over data are in float32."""
OTHERS = {
    "tied": Case(dtype=BF16, ddp={**WIDE, **OVERLAPPED}, model=TIED, micro_batches=2),
    "bf16 sums": Case(dtype=BF16),
    "fp16 sums": Case(dtype=FP16, micro_batches=2),
    "fp16 averages": Case(dtype=FP16, ddp={"average_in_collective": True}),
    "overlapped bf16 sums": Case(dtype=BF16, ddp=OVERLAPPED, micro_batches=2),
    "float32 on the way": Case(
        dtype=BF16, ddp={**SHARDED, "reduce_scatter_with_fp32_accumulation": True}, micro_batches=2
    ),
}
"""Where they are in the type of the weights, or a rank sums two gradients of one weight, as it does in that type without z."""
GRIDS = {
    "z": Settings(1, 1, 4),
    "z and data, without overlap": Settings(1, 1, 2, overlap_reduce_scatter=False, overlap_all_gather=False),
    "x and z": Settings(2, 1, 2),
}
SOME = {
    "overlapped": "z",
    "recomputed": "z and data, without overlap",
    "tied": "x and z",
    "fp16 sums": "z",
    "float32 on the way": "z and data, without overlap",
}
"""Each way of summing in every run, on one grid."""


def _pairs(cases: Iterable[str], grids: Iterable[str]) -> list[Any]:
    """Of a case and a grid."""
    pairs = [(name, grid) for name in cases for grid in grids]
    return [pair if SOME.get(pair[0]) == pair[1] else thorough(*pair) for pair in pairs]


_SCALE = 256.0

Gradients = dict[str, torch.Tensor]


def _gradients(case: Case, scale: float) -> Gradients:
    """The whole gradient of one step, by parameter, in float32; the same on every rank."""
    model = training.build(case)
    if case.dtype == torch.float32:
        # The very weights of the 16-bit models.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(BF16))
    config = model.module.config
    config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, lambda loss: loss * scale
    if case.ddp.get("overlap_grad_reduce"):
        config.no_sync_func = model.no_sync
    model.zero_grad_buffer()
    training._step(case, model, 0)
    _gather_shards(model)
    found = {}
    for name, parameter in model.named_parameters():
        grad = parameter.main_grad.detach().float() / scale
        if case.settings is not None:
            layout = layout_of(parameter)
            grad = whole_parameter(grad.reshape(-1) if layout.over_z else grad, layout, process_groups.mesh())
        found[name.replace("module.", "")] = grad.clone()
    return found


def _gather_shards(model: DistributedDataParallel) -> None:
    """With a distributed optimizer every rank has summed a part of each bucket."""
    if not model.ddp_config.use_distributed_optimizer:
        return
    for group in (*model.bucket_groups, *model.expert_parallel_bucket_groups):
        for bucket in group.buckets:
            ranks = group.intra_distributed_optimizer_instance_group
            mine = shard_buffer(bucket.grad_data, ranks.size())[ranks.rank()].clone()
            dist.all_gather_into_tensor(bucket.grad_data, mine, group=ranks)


def _all(cases: dict[str, Case], scale: float = _SCALE) -> dict[str, Gradients]:
    training.on_cpu()
    found = {}
    for name, case in cases.items():
        with training.parallel(case):
            found[name] = _gradients(case, scale)
    return found if dist.get_rank() == 0 else {}


def _error(found: Gradients, wanted: Gradients) -> float:
    """Distance over all parameters, relative."""
    squares = [(found[name] - grad).double().square().sum() for name, grad in wanted.items()]
    size = [grad.double().square().sum() for grad in wanted.values()]
    return float((sum(squares) / sum(size)) ** 0.5)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, Gradients]:
    """By case: Megatron's own data parallelism as ``data``, the grids, and float32."""
    cases: dict[str, Case] = {}
    wanted = asked(request, "name", "grid")
    for name, case in {**PRECISE, **OTHERS}.items():  # after the last of them Megatron's sums stay its own in a process
        if not (grids := {grid: settings for grid, settings in GRIDS.items() if (name, grid) in wanted}):
            continue
        cases[f"{name}: data"] = case
        if name in PRECISE:
            cases[f"{name}: data, ours"] = case.on(Settings())
        cases[f"{name}: reference"] = replace(case, dtype=torch.float32, ddp={})
        cases |= {f"{name}: {grid}": case.on(settings) for grid, settings in grids.items()}
    return run_ranks(_all, 4, cases)[0]


@pytest.mark.parametrize(("name", "grid"), _pairs([*PRECISE, *OTHERS], GRIDS))
def test_sums_over_z_are_as_precise_as_over_data(name: str, grid: str, found: dict[str, Any]) -> None:
    reference, data = found[f"{name}: reference"], found[f"{name}: data"]
    ours = found[f"{name}: {grid}"]
    print(f"{name}, {grid}: {_error(ours, reference):.2e} beside {_error(data, reference):.2e}")
    assert 1e-4 < _error(data, reference) / 2 < _error(ours, reference) < 2 * _error(data, reference)


@pytest.mark.parametrize(("name", "grid"), _pairs(PRECISE, [grid for grid in GRIDS if grid != "x and z"]))
def test_what_ranks_computed_is_summed_in_float32(name: str, grid: str, found: dict[str, Any]) -> None:
    """Without x and y the ranks compute the same 16-bit gradients, so that nothing but their sum can differ."""
    assert _error(found[f"{name}: {grid}"], found[f"{name}: data, ours"]) < 1e-6


def _with_an_overflow(case: Case) -> tuple[list[float | None], list[set[float]]]:
    """Gradient norms of four steps, of which the second meets an infinite gradient of a norm, and the scales of the loss after each."""
    training.on_cpu()
    norms: list[float | None] = []
    scales = []
    with training.parallel(case):
        model = training.build(case)
        optimizer = training._optimizer(case, model)
        config = model.module.config
        config.finalize_model_grads_func, config.grad_scale_func = finalize_model_grads, optimizer.scale_loss
        for step in range(4):
            model.zero_grad_buffer()
            optimizer.zero_grad()
            training._step(case, model, step)
            if step == 1:
                unwrap_model(model).decoder.final_layernorm.weight.main_grad.fill_(torch.inf)
            norms.append(optimizer.step()[1])
            scales.append({float(one.get_loss_scale()) for one in optimizer.chained_optimizers})
    return norms, scales


def test_an_overflow_lowers_the_scale_of_all_optimizers() -> None:
    """With z there are two; each would go on with a scale of its own, and divide by another one than the loss was multiplied with."""
    case = Case(dtype=FP16, optimizer={"hysteresis": 1}, batch=FEW)
    wanted, _ = run_ranks(_with_an_overflow, 1, case)[0]
    norms, scales = run_ranks(_with_an_overflow, 2, case.on(Settings(1, 1, 2)))[0]
    assert scales == [{256}, {128}, {128}, {128}]
    assert norms[1] is None and [*norms[:1], *norms[2:]] == pytest.approx([*wanted[:1], *wanted[2:]], rel=1e-2)


def _float32_of_a_checkpoint(case: Case) -> float:
    """How far float32 weights are from those of a state dict that they were to be taken from."""
    training.on_cpu()
    with training.parallel(case):
        model = training.build(case)
        optimizer = training._optimizer(case, model)
        saved = {name: torch.rand(one.shape) for name, one in unwrap_model(model).named_parameters()}
        optimizer.reload_model_params(state_dict={"model": saved})
        apart = [0.0]
        for name, parameter in unwrap_model(model).named_parameters():
            for one in optimizer.chained_optimizers:
                if parameter in one.model_param_gbuf_map:
                    part = one._get_model_param_range_map(parameter)["param"]
                    found = one._get_main_param_and_optimizer_states(parameter)["param"]
                    apart.append(float((found - saved[name].view(-1)[part.start : part.end]).abs().max()))
        return max(apart) if len(apart) > 1 else torch.inf


def test_float32_weights_are_those_of_a_checkpoint_in_all_optimizers() -> None:
    """As --load-main-params-from-ckpt has them; Megatron gives them to the first optimizer, and the others rounded ones of the model."""
    case = Case(dtype=BF16, ddp={**WIDE, **SHARDED}, settings=Settings(1, 1, 2))
    assert run_ranks(_float32_of_a_checkpoint, 2, case) == [0, 0]


def test_fp16_overflows_over_z_where_it_does_over_data() -> None:
    """Of the loss's scale: the mean of what four ranks have is far below the largest number of fp16, the sum is not."""
    # Without biases, whose gradients are larger and not split over z.
    case = Case(dtype=FP16, config={"add_bias_linear": False}, model={"position_embedding_type": "rope"})
    reference = run_ranks(_all, 1, {"serial": replace(case, dtype=torch.float32)})[0]["serial"]
    scale = 20000 / max(float(grad.abs().max()) for grad in reference.values())
    cases = {"data": case, "z": case.on(Settings(1, 1, 4)), "z and data": case.on(Settings(1, 1, 2))}
    for name, gradients in run_ranks(_all, 4, cases, scale)[0].items():
        assert _error(gradients, reference) < 1e-2, name
