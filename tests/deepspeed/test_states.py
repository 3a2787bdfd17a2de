"""States of our own under DeepSpeed: what its engine and its functions ask of them, where nothing would show a mistake."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_set_full_fp32_param, safe_set_full_grad  # noqa: E402
from torch import nn  # noqa: E402

from axonn_plugins.autoload import activate  # noqa: E402
from axonn_plugins.config import ConfigError  # noqa: E402
from axonn_plugins.optim import reducer  # noqa: E402
from tests.distributed import run_ranks  # noqa: E402

activate()
BLOCKS: dict[str, dict[str, Any]] = {
    "split": {"tensor_parallel": {"gx": 2, "plan": {"0": "normal", "2": "transposed"}}},
    "offloaded": {"offload_optimizer": {}},
    "pruned": {"samo": {"sparsity": 0.5}},
}


def engine_of(
    block: dict[str, Any] | None,
    bf16: bool = True,
    stage: int = 1,
    keys: dict[str, Any] | None = None,
    training_data: list[torch.Tensor] | None = None,
    **params: Any,
) -> Any:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, **params}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000},
        "zero_allow_untested_optimizer": True,
        **({"bf16": {"enabled": True}} if bf16 else {}),
        **({} if block is None else {"axonn": block}),
        **(keys or {}),
    }
    given = {"model_parameters": model.parameters(), "training_data": training_data}
    return deepspeed.initialize(model=model, config=config, **given)[0]


def step(engine: Any, poison: bool = False) -> None:
    torch.manual_seed(7)
    rows = torch.randn(2, 8).to(next(engine.module.parameters()).dtype)
    loss = engine(rows).float().square().mean()
    engine.backward(loss * float("nan") if poison else loss)
    engine.step()


def coalesced(block: dict[str, Any], stage: int) -> bool:
    """Passes whose sums are reduced once train as one pass of the losses' sum."""
    found, sent = [], []
    whole = dist.all_reduce, dist.reduce_scatter_tensor, reducer.start_parts
    for together in (False, True):
        engine = engine_of(block, bf16=False, stage=stage)
        for _ in range(2):
            seed = 7 + (0 if "tensor_parallel" in block else dist.get_rank())
            first, second = torch.randn(2, 2, 8, generator=torch.Generator().manual_seed(seed))
            if together:
                with engine.coalesce_grad_reduction():
                    for rows in (first, second):
                        loss = engine(rows).square().mean()
                        dist.all_reduce = dist.reduce_scatter_tensor = reducer.start_parts = lambda *_, **__: (
                            sent.append(1)
                        )
                        engine.backward(loss)
                        dist.all_reduce, dist.reduce_scatter_tensor, reducer.start_parts = whole
            else:
                engine.backward(engine(first).square().mean() + engine(second).square().mean())
            engine.step()
        found.append(weights(engine))
        engine.destroy()
    return not sent and bool((found[0] - found[1]).abs().max() < 1e-6)


def summed(block: dict[str, Any], stage: int, readers: int) -> bool:
    """With gradient_allreduce_op = sum a step is that of as many times the mean as there are readers, also without adaptive moments."""
    found = []
    for operation, factor in (("sum", 1), ("mean", readers)):
        keys = {"gradient_allreduce_op": operation, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
        engine = engine_of(block, bf16=False, stage=stage, keys=keys)
        generator = torch.Generator().manual_seed(7 + (dist.get_rank() if readers > 1 else 0))
        for _ in range(2):
            rows = torch.randn(2, 4, 8, generator=generator)
            engine.backward(engine(rows).square().mean() * factor)
            engine.step()
        found.append(weights(engine))
        engine.destroy()
    return bool((found[0] - found[1]).abs().max() < 1e-7)


def twice(block: dict[str, Any], stage: int) -> bool:
    """Two backward passes before a step, of the model training and evaluating, are as one of the losses' sum, whatever ranks sum a parameter's gradient."""
    found = []
    for apart in (True, False):
        engine = engine_of(block, bf16=False, stage=stage, keys={"optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        for _ in range(2):
            losses = [
                engine.train(on) or engine(torch.randn(2, 8, generator=generator)).abs().mean() for on in (True, False)
            ]
            for loss in losses if apart else [sum(losses)]:
                engine.backward(loss)
            engine.step()
        found.append(weights(engine))
        engine.destroy()
    return bool((found[0] - found[1]).abs().max() < 1e-6)


def without_norm(block: dict[str, Any]) -> bool:
    """A norm that nobody wants is not computed, and steps are the same."""
    found = []
    for wanted in (True, False):
        zero = {"stage": 2, "compute_grad_norm": wanted, "overlap_comm": True, "reduce_bucket_size": 1000}
        # Below 0 DeepSpeed does not clip, either.
        keys = {
            "zero_optimization": zero,
            "managed_gradient_accumulation": wanted,
            "gradient_clipping": float(wanted) - 1,
        }
        engine = engine_of(block, bf16=False, keys=keys)
        step(engine)
        found.append((weights(engine), engine.get_global_grad_norm()))
        engine.destroy()
    return torch.equal(found[0][0], found[1][0]) and found[0][1] is not None and found[1][1] is None


def clipped(block: dict[str, Any]) -> bool:
    """Clipping by torch's function between backward and step is that of the configuration's key, and is told where it would be of one rank's sums."""
    found, sgd = [], {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_accumulation_steps": 2}
    for by_hand in (False, True):
        engine, norms = engine_of(block, bf16=False, stage=0, keys=sgd | {"gradient_clipping": 0.1 * (not by_hand)}), []
        generator = torch.Generator().manual_seed(7 + (0 if "tensor_parallel" in block else dist.get_rank()))
        for passed in range(4):
            engine.backward(10 * engine(torch.randn(2, 8, generator=generator)).square().mean())
            if by_hand and passed % 2:
                norms.append(nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1).item())
            elif by_hand:
                with pytest.raises(ConfigError, match="called before the step's last engine.backward"):
                    nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
            engine.step()
            norms += [float(engine.get_global_grad_norm())] if passed % 2 and not by_hand else []
        found.append((weights(engine), torch.tensor(norms)))
        for passed in range(2 * by_hand):  # each element by itself
            engine.backward(10 * engine(torch.randn(2, 8, generator=generator)).square().mean())
            if passed:
                nn.utils.clip_grad_value_(engine.module.parameters(), 0.01)
            engine.step()
        moved = (weights(engine) - found[-1][0]).abs().max()
        assert not by_hand or abs(moved - 0.1 * 0.01) < 1e-6, moved
        engine.destroy()
    (one, wanted), (other, norms) = found
    return (
        bool((one - other).abs().max() < 1e-6) and torch.allclose(wanted, norms, rtol=1e-5) and bool(norms.min() > 0.2)
    )


def taught(block: dict[str, Any], folder: str) -> bool:
    """A curriculum gives replicas the same samples and readers others, and goes on where a checkpoint was taken."""
    metric = {"difficulty_type": "value", "clustering_type": "single_cluster", "schedule_type": "fixed_linear"}
    metric |= {"min_difficulty": 8, "max_difficulty": 64}
    metric["schedule_config"] = {"total_curriculum_step": 10, "difficulty_step": 8}
    learning = {"enabled": True, "data_cluster_path": folder, "curriculum_metrics": {"length": metric}}
    sampling = {"enabled": True, "num_epochs": 3, "num_workers": 0, "curriculum_learning": learning}
    keys = {"data_efficiency": {"enabled": True, "data_sampling": sampling}, "gradient_accumulation_steps": 2}
    rows = list(torch.randn(32, 8, generator=torch.Generator().manual_seed(1)))
    engine = engine_of(block, bf16=False, keys=keys, training_data=rows)
    seen = [batch for batch, _ in zip(engine.training_dataloader, range(3), strict=False)]
    engine.save_checkpoint(folder)
    saved = engine.training_dataloader.data_sampler.state_dict()
    engine.destroy()
    engine = engine_of(block, bf16=False, keys=keys, training_data=rows)
    engine.load_checkpoint(folder)
    found = engine.training_dataloader.data_sampler.state_dict()
    engine.destroy()
    others = [torch.empty_like(batch) for batch in seen]
    for batch, other in zip(seen, others, strict=True):
        dist.broadcast(other.copy_(batch), src=0)
    same = all(torch.equal(batch, other) for batch, other in zip(seen, others, strict=True))
    # Rank 0 alone knows where it is in the clusters.
    kept = ["batch", "consumed_samples", "curriculum_step", "current_difficulties"]
    kept += ["data_cluster_current_position"] if dist.get_rank() == 0 else []
    goes_on = all(found[key] == saved[key] for key in kept)
    return goes_on and saved["consumed_samples"] > 0 and same == ("tensor_parallel" in block or dist.get_rank() == 0)


def spelled() -> dict[str, bool]:
    """Half precision by DeepSpeed's other spellings is trained as by its usual one, and clipped by the whole norm."""
    found: dict[str, list[torch.Tensor]] = {}
    ways = [{"bf16": {"enabled": value}} for value in (True, 1, "true")] + [{"bfloat16": {"enabled": True}}]
    ways += [{"fp16": {"enabled": value, "loss_scale": 64}} for value in (True, 1)]
    type(get_accelerator()).is_fp16_supported = lambda self: True
    for way in ways:
        sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.1}
        engine = engine_of(BLOCKS["split"], bf16=False, stage=0, keys=sgd | way)
        for _ in range(2):
            step(engine)
        found.setdefault("fp16" if "fp16" in way else "bf16", []).append(weights(engine))
        engine.destroy()
    return {
        f"{half} as {number}": torch.equal(one, given[0])
        for half, given in found.items()
        for number, one in enumerate(given)
    }


def share_written(engine: Any) -> bool:
    """A rank's part of a checkpoint is what it holds: half of the states of two ranks, which nothing gathers."""
    calls: list[int] = []
    whole = dist.all_gather_into_tensor, dist.all_gather
    dist.all_gather_into_tensor = dist.all_gather = lambda *_, **__: calls.append(1)
    shards, _ = engine._portable_state().collect({})
    dist.all_gather_into_tensor, dist.all_gather = whole
    mine = sum(shard.tensor.nbytes for name, shard in shards.items() if name.startswith("optimizer."))
    total = torch.tensor(mine)
    dist.all_reduce(total)
    every = 3 * 4 * sum(parameter.numel() for parameter in engine.module.parameters())
    return not calls and abs(int(total) - every) <= 24 and 0.4 < mine / every < 0.6


def weights(engine: Any) -> torch.Tensor:
    return torch.cat([p.detach().double().reshape(-1) for p in engine.module.parameters()])


def everything(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, block in BLOCKS.items():
        engine = engine_of(block)
        step(engine)
        before = weights(engine)
        step(engine, poison=True)
        found[f"{name}: a step that is not finite"] = torch.equal(weights(engine), before) and engine.skipped_steps == 1
        step(engine)
        found[f"{name}: goes on"] = bool(weights(engine).isfinite().all()) and not torch.equal(weights(engine), before)
        # Without weight_decay in the configuration there is none, as with DeepSpeed's own Adam.
        found[f"{name}: decay"] = {group["weight_decay"] for group in engine.optimizer.param_groups} == {0.0}
        first = next(engine.module.parameters())
        zeros = first == 0
        safe_set_full_fp32_param(first, torch.ones_like(safe_get_full_fp32_param(first)))
        whole = safe_get_full_fp32_param(first)
        pruned = name == "pruned"
        found[f"{name}: pruned stays"] = bool((whole == 0).any()) == pruned and torch.equal(first == 0, zeros & pruned)
        found[f"{name}: none"] = safe_get_full_grad(first) is None
        safe_set_full_grad(first, torch.ones_like(whole))
        before = weights(engine)
        engine.step()
        found[f"{name}: a gradient that is set"] = not torch.equal(weights(engine), before)
        with pytest.raises(ConfigError, match="engine.offload_states is for DeepSpeed's ZeRO"):
            engine.offload_states()
        engine.destroy()
        if name != "split":
            found[f"{name}: share written"] = share_written(engine)
        for stage in (1, 2):
            found[f"{name}: coalesced at stage {stage}"] = coalesced(block, stage)
        if name != "split":
            found[f"{name}: summed"] = summed(block, 1, readers=2)
        found[f"{name}: without norm"] = without_norm(block)
        found[f"{name}: clipped"] = clipped(block)
        if name != "pruned":
            found[f"{name}: curriculum"] = taught(block, f"{folder}/{name}")
        found[f"{name}: gone"] = not any(hasattr(p, "axonn_held") for p in engine.module.parameters())
    found |= spelled()
    plan = {"0": "normal", "2": "transposed"}
    for gz, readers in ((2, 2), ({"batch": 1, "sequence": 2}, 1)):
        for stage in (0, 1, 2):
            block = {"tensor_parallel": {"gz": gz, "plan": plan}}
            found[f"gz = {gz}: summed at stage {stage}"] = summed(block, stage, readers)
            if readers == 2:
                found[f"two passes at stage {stage}"] = twice(block, stage)
    return found | weights_alone(folder)


def weights_alone(folder: str) -> dict[str, Any]:
    """Weights of a stock checkpoint are what is trained on."""
    stock = engine_of(None, torch_adam=True)
    with torch.no_grad():
        for parameter in stock.module.parameters():
            parameter.fill_(0.25)
    stock.save_checkpoint(folder, "one")
    engine = engine_of(BLOCKS["offloaded"], lr=1e-6)
    dist.barrier()
    with torch.no_grad():
        (Path(folder) / "one" / "axonn_complete").touch()
    engine._read(folder, "one", load_optimizer_states=False)
    step(engine)
    return {"weights alone": bool((weights(engine) - 0.25).abs().max() < 1e-3)}


def test_states(tmp_path: Path) -> None:
    for rank in run_ranks(everything, 2, str(tmp_path)):
        assert all(rank.values()), rank


def hooked() -> str:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_post_hook(lambda *_: None)
    config = {"train_micro_batch_size_per_gpu": 1, "axonn": {"offload_optimizer": {}}}
    with pytest.raises(ConfigError) as error:
        deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return str(error.value)


def test_hooks_of_an_optimizer_are_refused() -> None:
    assert "the optimizer has step hooks" in run_ranks(hooked, 1)[0]
