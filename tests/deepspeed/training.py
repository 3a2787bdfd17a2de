"""One training run twice: in a plain PyTorch loop on one process, and under the engine on a grid."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

# Imported here, so that forked ranks need not.
import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import axonn_plugins.hosts.common.composition  # noqa: E402, F401

# For inference alone, and compiled for a minute in each new folder.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
ACCUMULATION = 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
Grid = tuple[int, int, int]


def wide(tensor: Tensor) -> Tensor:
    """At least float32."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def all_trained(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices and vectors, with other learning rates and weight decays."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "lr": 2e-2, "weight_decay": 0.2},
        {"params": vectors, "lr": 5e-3, "weight_decay": 0.0},
    ]


@dataclass
class Case:
    """A run: model (its forward returns the loss), global microbatches, and how DeepSpeed is told to train."""

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]
    grid: Grid = (1, 1, 1)
    plan: dict[str, Any] | str = field(default_factory=dict)
    stage: int = 0
    dtype: str = "fp32"
    groups: Callable[[nn.Module], list[dict[str, Any]]] = all_trained
    # config: optimizer in the configuration; client: an instance; callable: a function of the parameters.
    optimizer: str = "config"
    lambdas: list[Callable[[int], float]] | None = None
    clip: float = 0.3
    extra: dict[str, Any] = field(default_factory=dict)
    after: Callable[[Any, nn.Module], Any] | None = None
    scale: float = 1.0
    steps: int = 3  # the last loss shows what the second step did with the first one's moments

    def model(self) -> nn.Module:
        torch.manual_seed(11)
        return self.build().to(torch.float64 if self.dtype == "fp64" else torch.float32)

    def batches(self) -> list[list[tuple[Tensor, ...]]]:
        torch.manual_seed(5)
        drawn = [[self.batch() for _ in range(ACCUMULATION)] for _ in range(self.steps)]
        return [[tuple(self.cast(t) for t in micro) for micro in step] for step in drawn]

    def cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(DTYPES[self.dtype]) if tensor.is_floating_point() else tensor

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def serial(case: Case) -> dict[str, Any]:
    """Losses, gradient norms and the trained weights of the plain loop; half precision has float32 masters."""
    model = case.model().to(DTYPES[case.dtype])
    optimizer = case.make_optimizer(case.groups(model))
    scheduler = None if case.lambdas is None else torch.optim.lr_scheduler.LambdaLR(optimizer, case.lambdas)
    pairs = []
    for group in optimizer.param_groups:
        live, group["params"] = group["params"], [nn.Parameter(wide(p.detach()).clone()) for p in group["params"]]
        pairs += list(zip(live, group["params"], strict=True))
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in case.batches():
        losses = []
        for micro in step:
            loss = model(*micro)
            (loss * case.scale / ACCUMULATION).backward()
            losses.append(loss.item())
        for live, master in pairs:
            master.grad = None if live.grad is None else live.grad.to(master.dtype) / case.scale
            live.grad = None
        norm = nn.utils.clip_grad_norm_([master for _, master in pairs], case.clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        with torch.no_grad():
            for live, master in pairs:
                live.copy_(master)
        found["losses"].append(sum(losses) / ACCUMULATION)
        found["norms"].append(norm.item())
    found["after"] = None if case.after is None else case.after(model, model)
    return found


def config_of(case: Case) -> dict[str, Any]:
    gx, gy, gz = case.grid
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": case.clip,
        # The default bucket of 5e8 elements is allocated in full.
        "zero_optimization": {"stage": case.stage, "reduce_bucket_size": 10**5, "allgather_bucket_size": 10**5},
        "axonn": {"tensor_parallel": {"gx": gx, "gy": gy, "gz": gz, "plan": case.plan}},
    }
    if case.optimizer == "config":
        params = {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}
        config["optimizer"] = {"type": "AdamW", "params": params}
    else:
        config["zero_allow_untested_optimizer"] = True
    if case.dtype == "bf16":
        config["bf16"] = {"enabled": True}
    if case.dtype == "fp16":
        config["fp16"] = {"enabled": True, "loss_scale": case.scale}
    return config | case.extra


def start(case: Case, model: nn.Module | None = None) -> Any:
    """The engine for a case, in a rank."""
    import axonn_plugins
    from axonn_plugins.hosts.deepspeed import engine as ours

    # Each group of gloo keeps threads that poll: a hundred meshes would fill the machine.
    if not hasattr(ours.Mesh, "cache_info"):
        ours.Mesh = functools.cache(ours.Mesh)  # type: ignore[assignment,misc]
    gc.collect()  # an engine that is deleted later would take the mesh it shares along
    type(get_accelerator()).is_fp16_supported = lambda self: True
    axonn_plugins.activate()
    model = case.model() if model is None else model
    keywords: dict[str, Any] = {"model_parameters": case.groups(model)}
    if case.groups is all_trained:
        keywords["model_parameters"] = case.groups(model)[0]["params"]
    if case.optimizer == "client":
        keywords["optimizer"] = case.make_optimizer(case.groups(model))
        if case.lambdas is not None:
            scheduler = torch.optim.lr_scheduler.LambdaLR(keywords["optimizer"], case.lambdas)
            keywords["lr_scheduler"] = scheduler
    elif case.optimizer == "callable":
        keywords["optimizer"] = case.make_optimizer
    return deepspeed.initialize(model=model, config=config_of(case), **keywords)[0]


def average(value: Tensor, engine: Any) -> float:
    """A loss, averaged over the ranks that read different data."""
    total = value.detach().double().clone()
    dist.all_reduce(total, group=engine.mesh.group("batch"))
    return total.item() / engine.mesh.size("batch")


def train(engine: Any, steps: list[list[tuple[Tensor, ...]]]) -> dict[str, Any]:
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in steps:
        losses = []
        for micro in step:
            loss = engine(*(engine.mesh.shard_batch(t) for t in micro))
            engine.backward(loss)
            engine.step()
            losses.append(average(loss, engine))
        found["losses"].append(sum(losses) / len(losses))
        found["norms"].append(float(engine.get_global_grad_norm()))
    return found


def parallel(case: Case) -> dict[str, Any]:
    engine = start(case)
    found = train(engine, case.batches())
    found["after"] = None if case.after is None else case.after(engine, engine.module)
    engine.destroy()
    return found


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; return its result, or the exception as text, so that later cases still run."""
    try:
        return function(*arguments)
    except Exception as error:
        import traceback

        return f"{type(error).__name__}: {error}\n{traceback.format_exc()}"


def run_cases(cases: dict[str, Case]) -> dict[str, Any]:
    return {name: attempt(parallel, case) for name, case in cases.items()}


def difference(a: list[float], b: list[float]) -> float:
    """Largest relative difference of two lists of the same length."""
    assert len(a) == len(b)
    return max(abs(p - q) / max(abs(q), 1e-12) for p, q in zip(a, b, strict=True))
