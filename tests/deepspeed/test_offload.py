"""axonn.offload_optimizer: a stock script trains as a plain loop with the plain optimizer does, in 16 bits to the bit, and resumes so."""

from __future__ import annotations

import copy
import os
import re
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from axonn_plugins.autoload import activate  # noqa: E402
from axonn_plugins.config import ConfigError, parse  # noqa: E402
from axonn_plugins.hosts.deepspeed.states_config import check  # noqa: E402
from axonn_plugins.optim.memory import host_bytes, step_bytes  # noqa: E402
from tests.distributed import run_ranks  # noqa: E402
from tests.ted_moe.test_tiled_optimizer import Untiled  # noqa: E402

activate()
RANKS, STEPS = 2, 6
FACTORY = lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)  # noqa: E731
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLOCK = {"offload_optimizer": {"bucket_size": 2048, "coarsening": 1}}
CASES: dict[str, dict[str, Any]] = {
    "bf16": {"gradient_clipping": 0.0},
    "bf16, clipped": {"gradient_clipping": 0.05},
    "fp32": {"gradient_clipping": 0.05},
    "fp16, static": {"fp16": {"enabled": True, "loss_scale": 64.0}, "gradient_clipping": 0.05},
    # Whose state is made with it, where weights have 16 bits.
    "bf16, Adagrad": {"optimizer": {"type": "Adagrad", "params": {"lr": 1e-2}}, "gradient_clipping": 0.0},
    "fp16, overflow": {"fp16": {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}, "gradient_clipping": 0.0},
}


class Scale(nn.Module):
    """A parameter of no dimensions, of which DeepSpeed cannot view the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 40), nn.LayerNorm(40), nn.Linear(40, 5))


def batches(dtype: torch.dtype) -> list[list[Tensor]]:
    """For each step and rank some rows."""
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(3, 24, generator=generator).to(dtype) for _ in range(RANKS)] for _ in range(STEPS)]


def loss_of(model: Any, rows: Tensor) -> Tensor:
    return model(rows).float().square().mean()


def engine_of(name: str) -> Any:
    precision = name.split(",")[0]
    config = {
        "train_micro_batch_size_per_gpu": 3,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"reduce_bucket_size": 100},
        "axonn": BLOCK,
        **({precision: {"enabled": True}} if precision != "fp32" else {}),
        **CASES[name],
    }
    model = network()
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def bits(model: nn.Module) -> Any:
    return torch.cat([p.detach().double().reshape(-1) for p in model.parameters()]).numpy()


def _train(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    rank = dist.get_rank()
    # DeepSpeed looks for instructions that this processor need not have; torch computes in fp16 without.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    for name in CASES:
        dtype = DTYPES[name.split(",")[0]]
        data = batches(dtype)
        engine = engine_of(name)
        losses, skipped = [], []
        for step in range(STEPS):
            if step == STEPS // 2:
                engine.save_checkpoint(f"{folder}/{name}")
                engine = engine_of(name)
                engine.load_checkpoint(f"{folder}/{name}")
            loss = loss_of(engine, data[step][rank])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            skipped.append(bool(engine.optimizer.overflow))
        optimizer = engine.optimizer
        assert optimizer.bucket_bytes == 2048 * dtype.itemsize  # by coarsening, and not DeepSpeed's key
        away = host_bytes(optimizer.stores)
        counted = (optimizer.nbytes - away, step_bytes(optimizer.stores, optimizer.tile_size), away)
        found[name] = losses, skipped, bits(engine.module), engine.get_global_grad_norm(), counted
    return found


def _scaled() -> float:
    """A parameter of no dimensions beside others, of which stock DeepSpeed cannot broadcast the bytes; how far it is from a plain loop's."""
    model, reference = (nn.Sequential(nn.Linear(24, 40), Scale(), nn.Linear(40, 5)) for _ in range(2))
    reference.load_state_dict(model.state_dict())
    for parameter in reference.parameters():
        dist.broadcast(parameter.data.view(-1), 0)
    config = {
        "train_micro_batch_size_per_gpu": 3 * RANKS,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "axonn": BLOCK,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    optimizer = FACTORY(reference.parameters())
    for rows in batches(torch.float32)[:3]:
        engine.backward(loss_of(engine, torch.cat(rows)))
        engine.step()
        optimizer.zero_grad()
        loss_of(reference, torch.cat(rows)).backward()
        optimizer.step()
    assert model[1].weight.shape == ()
    return max(float((p - q).abs().max()) for p, q in zip(model.parameters(), reference.parameters(), strict=True))


def _all(folder: str) -> Any:
    return _train(folder), _scaled()


def _plain(name: str, skipped: list[bool]) -> Any:
    """Both ranks' passes one after the other, and the optimizer on float32 weights whose gradients are upcast whole."""
    dtype = DTYPES[name.split(",")[0]]
    case = CASES[name]
    scale = case.get("fp16", {}).get("loss_scale", 2.0**20 if "fp16" in case else 1.0)
    model = network().to(dtype)
    factory = partial(torch.optim.Adagrad, lr=1e-2) if "Adagrad" in name else FACTORY
    reference = Untiled(factory, [{"params": list(model.parameters())}], case["gradient_clipping"] or None)
    losses: list[list[float]] = [[] for _ in range(RANKS)]
    for rows, skip in zip(batches(dtype), skipped, strict=True):
        sums = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(RANKS):
            model.zero_grad()
            loss = loss_of(model, rows[rank])
            (loss * scale).backward()
            losses[rank].append(loss.item())
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total += parameter.grad / RANKS
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total
        if skip:
            scale /= 2
        else:
            reference.step(scale)
    return losses, bits(model)


def test_the_bits_of_a_plain_loop(tmp_path: Path) -> None:
    """With a checkpoint saved and loaded half way; memory as counted."""
    everywhere, scaled = zip(*run_ranks(_all, RANKS, str(tmp_path)), strict=True)
    assert max(scaled) < 1e-6
    elements = sum(p.numel() for p in network().parameters())
    for name in CASES:
        _, skipped, _, norm, (device, step, _) = everywhere[0][name]
        assert any(skipped) == (name == "fp16, overflow") and not all(skipped)
        losses, weights = _plain(name, skipped)
        for rank in range(RANKS):
            mine, same, bits_of_rank, *_ = everywhere[rank][name]
            assert same == skipped, name
            # Clipping multiplies by the same factors in another order: a rounding of the last bit.
            close = {"fp32": 1e-6, "fp16, static": 2.0**-12}.get(name, 0.0)
            assert mine == pytest.approx(losses[rank], rel=close, abs=0), name
            assert abs(bits_of_rank - weights).max() <= close, name
        steps = 4 * len(list(network().parameters()))  # counted by Adam for each
        assert device == (8 if name == "fp32" else 4) * elements + steps and step <= 16 * 2048
        assert norm is not None


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        ({"zero_optimization": {"stage": 3}}, "stage = 3 gathers"),
        ({"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, "DeepSpeed's own offload"),
        ({"optimizer": {"type": "ZeroOneAdam"}}, "optimizer.type = ZeroOneAdam"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "grad_accum_dtype = bf16"),
        ({"axonn": {"offload_optimizer": {"bucket_size": 7}}}, "bucket_size = 7 is not an integer of at least 1024"),
        ({"axonn": {"offload_optimizer": {"bucketsize": 7000}}}, 'use "bucket_size"'),
    ],
)
def test_refusals(raw: dict[str, Any], said: str) -> None:
    raw = {"axonn": {"offload_optimizer": {}}} | copy.deepcopy(raw)
    with pytest.raises(ConfigError, match=re.escape(said)):
        check(parse(raw["axonn"]), raw, None)
