"""One model as a plain loop on one process, and under several keys of the block at once: whole or as a pipeline, dense or with experts."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

# Imported here, so that forked ranks need not.
import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.moe.layer import MoE  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import samo  # noqa: E402
from axonn_plugins.goldfish import goldfish_labels  # noqa: E402
from tests import groups  # noqa: E402
from tests.distributed import BACKEND  # noqa: E402

STEPS, ACCUMULATION, WORDS, WIDTH, HEADS, TOKENS, EXPERTS = 3, 2, 24, 16, 4, 6, 4
SAMPLES = 8
"""Of a microbatch, on all ranks together."""


class Attention(nn.Module):
    """Causal, before a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(-2))


class Feed(nn.Module):
    """An MLP, before a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Mixture(nn.Module):
    """Experts, before a residual."""

    def __init__(self, ep_size: int = 1) -> None:
        super().__init__()
        gates = {"use_rts": False, "top2_2nd_expert_sampling": False, "capacity_factor": 4.0, "min_capacity": 1}
        self.norm, self.moe = nn.LayerNorm(WIDTH), MoE(WIDTH, Expert(), EXPERTS, ep_size, k=2, **gates)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))[0]


class Words(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH)


def scores(layer: nn.Embedding, x: Tensor) -> Tensor:
    return x @ layer.weight.t()


def entropy(found: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(found.flatten(0, -2), labels.flatten())


class Whole(nn.Module):
    """The layers in their order, and the loss."""

    def __init__(self, specs: list[Any]) -> None:
        super().__init__()
        self.layers, self.tied = nn.ModuleDict(), nn.ModuleDict()
        self.calls: list[tuple[str, Any]] = []
        for number, spec in enumerate(specs):
            if isinstance(spec, TiedLayerSpec):
                if spec.key not in self.tied:
                    self.tied[spec.key] = spec.build()
                self.calls.append((f"tied.{spec.key}", spec.forward_fn))
            else:
                self.layers[str(number)] = spec.build()
                self.calls.append((f"layers.{number}", None))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x: Any = ids
        for name, function in self.calls:
            layer = self.get_submodule(name)
            x = layer(x) if function is None else function(layer, x)
        return entropy(x, labels)


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        block: its keys but pccl.
        stage: of ZeRO.
        experts: ranks that share the experts of a layer out; None: the model is dense.
        stages: of a pipeline; 0: none.
        tied: whether the head is the embedding.
    """

    block: dict[str, Any]
    stage: int = 0
    experts: int | None = None
    stages: int = 0
    tied: bool = False
    clip: float = 0.4
    dtype: str = "fp64"
    extra: dict[str, Any] = field(default_factory=dict)
    steps: int = STEPS

    def specs(self, ep_size: int) -> list[Any]:
        """The layers; one of experts in a model that has some."""
        body = [LayerSpec(Attention), LayerSpec(Feed), LayerSpec(Attention)]
        body.append(LayerSpec(Feed) if self.experts is None else LayerSpec(Mixture, ep_size))
        head = [LayerSpec(nn.LayerNorm, WIDTH)]
        if self.tied:
            words: Any = TiedLayerSpec("words", Words)
            return [words, *body, *head, TiedLayerSpec("words", Words, forward_fn=scores)]
        return [LayerSpec(Words), *body, *head, LayerSpec(nn.Linear, WIDTH, WORDS, bias=False)]

    def serial(self) -> Whole:
        """All of the model; its weights are drawn by their names."""
        deepspeed.utils.groups.mpu = None
        model = Whole(self.specs(1)).double()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                generator = torch.Generator().manual_seed(sum(map(ord, name)) * 7919 % 2**31)
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.3 * drawn + (parameter.dim() == 1))
        return model

    def batches(self, readers: int) -> Tensor:
        """By step, accumulation and reader."""
        generator = torch.Generator().manual_seed(3)
        shape = (self.steps, ACCUMULATION, readers, SAMPLES // readers, TOKENS + 1)
        return torch.randint(WORDS, shape, generator=generator)


def serial_run(case: Case, readers: int) -> tuple[list[float], list[float]]:
    """Losses and norms of a plain loop over the readers' parts, pruned by masks where the block prunes; on rank 0 alone."""
    if dist.get_rank():
        return [], []
    kept = {key: case.block.get(key) for key in ("samo", "gradient_noise", "goldfish")}
    same = (kept, bool(case.stages), case.experts is None, case.tied, case.clip, case.steps, readers)
    if repr(same) not in _runs:
        _runs[repr(same)] = _serial_run(case, readers)
    return _runs[repr(same)]


_runs: dict[str, tuple[list[float], list[float]]] = {}  # by all of a case that they depend on


def _serial_run(case: Case, readers: int) -> tuple[list[float], list[float]]:
    model = case.serial()
    pruned, goldfish = case.block.get("samo"), case.block.get("goldfish")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    masks: dict[str, Tensor] = {}
    losses, norms = [], []
    for number, step in enumerate(case.batches(readers)):
        if pruned is not None and number == pruned.get("start_step", 0):
            masks = samo.magnitude(model, pruned["sparsity"], pruned.get("scope", "layer"))
        parameters = dict(model.named_parameters())
        with torch.no_grad():
            for name, mask in masks.items():
                parameters[name].mul_(mask)
        total = 0.0
        for parts in step:
            labels = [goldfish_labels(ids[:, 1:], **goldfish) if goldfish else ids[:, 1:] for ids in parts]
            kept = torch.tensor([targets.ne(-100).sum() for targets in labels]).double()
            for ids, targets, share in zip(parts, labels, kept / kept.sum() / ACCUMULATION, strict=True):
                loss = model(ids[:, :-1], targets) * share
                loss.backward()
                total += loss.item()
        if "gradient_noise" in case.block:
            _add_noise(case, parameters, number)
        for name, mask in masks.items():
            parameters[name].grad.mul_(mask)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), case.clip or torch.inf).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, norms


def _add_noise(case: Case, parameters: dict[str, nn.Parameter], steps: int) -> None:
    from tests.compose.noise import GradientNoise, NoiseBlock

    noise = GradientNoise(NoiseBlock.model_validate(case.block["gradient_noise"]), None)  # type: ignore[arg-type]
    for name, parameter in parameters.items():
        # A pipeline's names have no prefix, and others for ties.
        known = name.replace("tied.", "tied_modules.") if case.stages else name
        known = known.removeprefix("layers.") if case.stages else known
        assert parameter.grad is not None
        parameter.grad.add_(noise.draw(known, tuple(parameter.shape), steps))


def ready(staged: bool) -> None:
    """Prepare a rank.

    Args:
        staged: whether all cases are pipelines, which have the ranks of one group in two, each with an order of its own.
    """
    import axonn_plugins

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not staged:
        groups.reuse()
    type(get_accelerator()).is_fp16_supported = lambda self: True
    axonn_plugins.activate()
    deepspeed.init_distributed(BACKEND)


def config(case: Case, readers: int) -> dict[str, Any]:
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // readers,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": case.clip,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}},
        "zero_optimization": {"stage": case.stage, "reduce_bucket_size": 10**5, "allgather_bucket_size": 10**5},
        "axonn": case.block | ({"pipeline": case.block.get("pipeline", {})} if case.stages else {}),
    }
    if "train_batch_size" in case.extra:
        del made["train_micro_batch_size_per_gpu"]
    return made | case.extra


def readers_of(case: Case, engine: Any = None) -> int:
    """Ranks that read different data, which only the engine knows where sizes are "auto"."""
    if engine is not None and hasattr(engine, "mesh"):
        return engine.mesh.grid.readers
    return dist.get_world_size() // plane_of(case) // sequence_of(case) // max(case.stages, 1)


def plane_of(case: Case) -> int:
    """Ranks that split layers."""
    tensor = {axis: size for axis, size in case.block.get("tensor_parallel", {}).items() if size != "auto"}
    return tensor.get("gx", 1) * tensor.get("gy", 1) * case.block.get("ted", {}).get("tensor", 1)


def sequence_of(case: Case) -> int:
    """Ranks that share sequences."""
    gz = case.block.get("tensor_parallel", {}).get("gz", 1)
    return gz["sequence"] if isinstance(gz, dict) else 1


def built(case: Case) -> Any:
    """The model; each rank has its own experts, of the serial model's."""
    whole, ep_size = case.serial().state_dict(), case.experts or 1
    if case.stages:
        model: Any = PipelineModule(
            case.specs(ep_size), num_stages=case.stages, loss_fn=entropy, partition_method="uniform"
        )
    else:
        model = Whole(case.specs(ep_size))
    model = model.double()
    share = dist.get_rank() % (dist.get_world_size() // max(case.stages, 1)) // plane_of(case) % ep_size
    state = {}
    for name in model.state_dict():
        serial = name.replace("tied_modules.", "tied.") if case.stages else name
        if case.stages and not serial.startswith("tied."):
            serial = f"layers.{serial}"
        before, experts, after = serial.partition(".deepspeed_experts.")
        number, _, rest = after.partition(".")
        first = share * EXPERTS // ep_size
        state[name] = whole[f"{before}{experts}{int(number) + first}.{rest}" if experts else serial]
    model.load_state_dict(state)
    return model


def start(case: Case) -> Any:
    """The engine."""
    gc.collect()
    model = built(case)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config(case, readers_of(case)))[0]


def adamw(groups: Any) -> torch.optim.Optimizer:
    """As in a case's configuration."""
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)


def train_plain(run: Any, case: Case, steps: range | None = None) -> tuple[list[float], list[float]]:
    """Losses and norms of a loop of one's own over what `compose` gave."""
    batches, losses, norms = case.batches(run.mesh.grid.batch), [], []
    for step in steps or range(case.steps):
        total = torch.zeros((), dtype=torch.float64)
        for number, micro in enumerate(batches[step]):
            ids = micro[run.mesh.rank("batch")]
            with torch.enable_grad():
                loss = run.model(ids[:, :-1], ids[:, 1:]) / ACCUMULATION
            if number < ACCUMULATION - 1:
                with run.no_sync():
                    run.backward(loss)
            else:
                run.backward(loss)
            total += loss.detach()
        run.step()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
        assert run.total_norm is not None
        norms.append(run.total_norm.item())
    return losses, norms


def train(engine: Any, case: Case, steps: range | None = None) -> tuple[list[float], list[float]]:
    """Losses and norms."""
    readers = readers_of(case, engine)
    mesh = getattr(engine, "mesh", None)
    reader = (
        mesh.rank("readers")
        if mesh is not None
        else engine.grid.get_data_parallel_id()
        if case.stages
        else dist.get_rank()
    )
    batches, losses, norms = case.batches(readers), [], []
    for number in steps or range(case.steps):
        micros = batches[number][:, reader]
        if case.stages:
            data: Iterator[Any] = iter([(ids[:, :-1], ids[:, 1:]) for ids in micros])
            losses.append(engine.train_batch(data).item())
        else:
            total = torch.zeros((), dtype=torch.float64)
            for ids in micros:
                loss = engine(ids[:, :-1], ids[:, 1:])
                engine.backward(loss)
                engine.step()
                total += loss.detach() / len(micros)
            dist.all_reduce(total)
            losses.append(total.item() / dist.get_world_size())
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
    return losses, norms


def obeyed(engine: Any, case: Case) -> None:
    """Assert what no loss shows: that each key is at work."""
    block, kinds = case.block, {type(module).__name__ for module in engine.module.modules()}
    if "offload_optimizer" in block:
        optimizer = engine.optimizer
        assert optimizer.host
    if "ted" in block:
        assert "TedMoE" in kinds or "MoE" not in kinds
    if "pccl" in block:
        assert "pccl" in str(dist.group.WORLD._get_backend(torch.device(engine.device)).name())  # type: ignore[union-attr]
    if "pipeline" in block or case.stages:
        assert engine.num_stages == case.stages and hasattr(engine, "most_alive")
    if "tensor_parallel" in block:
        assert engine.mesh.grid.gx * engine.mesh.grid.gy * engine.mesh.grid.gz > 1 or "auto" in str(block)
        assert any(getattr(p, "axonn_layout", None) is not None for p in engine.module.parameters())
    if "goldfish" in block:
        assert (engine._label_mask if case.stages else engine.label_mask).block.k == block["goldfish"]["k"]
    if "samo" in block:
        assert engine._pruning.pruned or block["samo"].get("start_step")


def run(case: Case) -> tuple[list[float], list[float], list[float], list[float]]:
    """Losses and norms of the engine, and those of the serial run."""
    engine = start(case)
    obeyed(engine, case)
    found, readers = train(engine, case), readers_of(case, engine)
    engine.destroy()
    dist.barrier()
    return *found, *serial_run(case, readers)


def run_all(cases: dict[str, Case], attempt: Callable[..., Any]) -> dict[str, Any]:
    ready(all(case.stages for case in cases.values()))
    return {name: attempt(run, case) for name, case in cases.items()}
