"""Models for the pipeline, one training run under DeepSpeed's PipelineEngine or ours, and the same on one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

# Imported here, so that forked ranks need not.
import deepspeed  # noqa: E402
import deepspeed.ops.op_builder.all_ops  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # noqa: E402
from deepspeed.runtime.activation_checkpointing import checkpointing  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import axonn_plugins.hosts.common.composition  # noqa: E402, F401
import samo  # noqa: E402
from axonn_tp import layout_of  # noqa: E402
from axonn_tp.comm.collectives import whole_parameter  # noqa: E402
from tests.distributed import BACKEND, made_once  # noqa: E402

STEPS, MICROBATCH, WIDTH, TOKENS, WORDS = 2, 2, 8, 5, 11
"""The weights at the end show what the second step did with the first one's moments."""
Spec = LayerSpec | Callable[[Any], Any]


class Feed(nn.Module):
    """A residual layer; its first operation may change its input in place, as stock allows."""

    def __init__(self, width: int = WIDTH, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(1.01) if self.in_place else x * 1.01
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Frozen(Feed):
    """Such a layer of which nothing is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


class Words(nn.Embedding):
    """An embedding of tokens, which as a head gives scores of words."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__(WORDS, WIDTH, sparse=sparse)


def scores(layer: nn.Embedding, x: Tensor) -> Tensor:
    return x @ layer.weight.t()


class Branch(nn.Module):
    """Hands on a tuple: what it computed, a mask, and something without gradient."""

    def __init__(self, first: bool = False, last: bool = False) -> None:
        super().__init__()
        self.first, self.last, self.feed = first, last, Feed()

    def forward(self, given: Any) -> Any:
        x, mask, scale = (given, given.sum(-1) > 0, given.detach().abs().mean()) if self.first else given
        y = self.feed(x.clone()) * mask.unsqueeze(-1) * scale
        return y.mean(-1, keepdim=True) if self.last else (y, mask, scale)


def plain(count: int = 6) -> list[Spec]:
    """`count` equal layers."""
    return [LayerSpec(Feed, in_place=True) for _ in range(count)]


def tied(count: int = 4) -> list[Spec]:
    """A language model whose embedding is its head."""
    return [
        TiedLayerSpec("words", Words),
        *[LayerSpec(Feed) for _ in range(count)],
        LayerSpec(nn.LayerNorm, WIDTH),
        TiedLayerSpec("words", Words, forward_fn=scores),
    ]


def sparse() -> list[Spec]:
    """A language model whose embedding has sparse gradients."""
    return [LayerSpec(Words, sparse=True), LayerSpec(Feed), LayerSpec(nn.Linear, WIDTH, WORDS)]


def frozen() -> list[Spec]:
    """Layers of which the first of two stages has nothing to train."""
    return [LayerSpec(Frozen), LayerSpec(Frozen), LayerSpec(Feed), LayerSpec(Feed)]


def tuples(count: int = 6) -> list[Spec]:
    """Layers that hand on tuples."""
    return [LayerSpec(Branch, i == 0, i == count - 1) for i in range(count)]


def entropy(scores: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores.flatten(0, -2), labels.flatten())


def squares(outputs: Tensor, labels: Tensor) -> Tensor:
    return (outputs - labels).square().mean()


@dataclass(frozen=True)
class Case:
    """A run."""

    layers: Callable[[], list[Spec]] = plain
    stages: int = 2
    microbatches: int = 4
    block: dict[str, Any] | None = field(default_factory=dict)
    stage: int = 0
    dtype: str = "fp64"
    clip: float = 0.0
    partition: str = "uniform"
    tokens: Callable[[int], int] = lambda microbatch: TOKENS
    steps: int = STEPS
    optimizer: str = "AdamW"
    extra: dict[str, Any] = field(default_factory=dict)
    module: dict[str, Any] = field(default_factory=dict)
    samo: dict[str, Any] | None = None
    tensor: dict[str, Any] | None = None
    offload: dict[str, Any] | None = None

    @property
    def words(self) -> bool:
        """True if the model reads tokens."""
        return getattr(self.layers()[0], "typename", None) is Words

    def batches(self, replicas: int) -> list[list[list[tuple[Tensor, Tensor]]]]:
        """Microbatches by step and data-parallel rank."""
        torch.manual_seed(7)
        kind = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[self.dtype]
        made = []
        for _ in range(self.steps):
            made.append([[self._draw(m, kind) for m in range(self.microbatches)] for _ in range(replicas)])
        return made

    def _draw(self, microbatch: int, kind: torch.dtype) -> tuple[Tensor, Tensor]:
        shape = (MICROBATCH, self.tokens(microbatch))
        if self.words:
            return torch.randint(WORDS, shape), torch.randint(WORDS, shape)
        x = torch.randn(*shape, WIDTH, dtype=torch.float64)
        return x.to(kind), torch.randn(*shape, 1 if self.layers is tuples else WIDTH, dtype=torch.float64).to(kind)

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        return entropy if self.words else squares


def config(case: Case) -> dict[str, Any]:
    """DeepSpeed's configuration of a run."""
    settings: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1} if case.optimizer != "SGD" else {"lr": 0.1}
    if case.optimizer != "SGD":
        settings["torch_adam"] = True
    made: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": MICROBATCH,
        "gradient_accumulation_steps": case.microbatches,
        "steps_per_print": 10**9,
        "gradient_clipping": case.clip,
        "optimizer": {"type": case.optimizer, "params": settings},
        "zero_optimization": {"stage": case.stage},
        "zero_allow_untested_optimizer": True,
        **case.extra,
    }
    if case.dtype in ("fp16", "bf16"):
        scale = {"initial_scale_power": 4} if case.dtype == "fp16" else {}
        made[case.dtype] = {"enabled": True, **scale, **case.extra.get(case.dtype, {})}
    if case.block is not None:
        others = {"samo": case.samo, "tensor_parallel": case.tensor, "offload_optimizer": case.offload}
        made["axonn"] = {"pipeline": case.block, **{key: value for key, value in others.items() if value is not None}}
    return made


def ready() -> None:
    """Prepare a rank."""
    # Else it is compiled, for inference alone, and longer than all else here takes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(BACKEND)
    # DeepSpeed looks for instructions that this processor need not have; torch computes in fp16 without.
    type(get_accelerator()).is_fp16_supported = lambda self: True


def seed(number: int) -> None:
    """Of weights, by the generator itself: `torch.manual_seed` writes down the stack for each kind of device that is not here.

    Some partition methods number layers by numpy's integers.
    """
    torch.default_generator.manual_seed(int(number))


def module_of(case: Case) -> PipelineModule:
    """This stage's layers; weights by a seed for each layer."""
    if case.dtype == "fp64":
        torch.set_default_dtype(torch.float64)
    module = PipelineModule(
        layers=case.layers(),
        num_stages=case.stages,
        loss_fn=case.loss,
        partition_method=case.partition,
        seed_layers=True,
        seed_fn=seed,
        base_seed=5,
        **case.module,
    )
    module.seed_layers = False
    torch.set_default_dtype(torch.float32)
    return module


def start(case: Case) -> Any:
    """The engine of a run."""
    # As a script's deepspeed.checkpointing.configure does.
    checkpointing.PARTITION_ACTIVATIONS = "activation_checkpointing" in case.extra
    module = module_of(case)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(model=module, model_parameters=trained, config=config(case))
    return engine


def parameters(engine: Any) -> dict[str, Tensor]:
    """This stage's parameters, whole, by the number of their layer."""
    mesh = getattr(engine, "mesh", None)
    found = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    if mesh is not None:
        layouts = {name: layout_of(p) for name, p in engine.module.named_parameters()}
        found = {name: whole_parameter(shard, layouts[name], mesh) for name, shard in found.items()}
    return found


def train(engine: Any, case: Case, steps: Sequence[int] | None = None) -> list[float]:
    """Losses of a run."""
    grid = engine.grid
    batches = case.batches(grid.data_parallel_size)
    losses = []
    for step in steps or range(case.steps):
        data: Iterator = iter(batches[step][grid.data_parallel_id])
        losses.append(engine.train_batch(data).item())
    return losses


def serial(case: Case, replicas: int, steps: Sequence[int] | None = None) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of the run, or of some of its steps, on one process in float64, by plain PyTorch."""
    # Random numbers of the same seed are others in float64.
    torch.set_default_dtype(torch.float64 if case.dtype == "fp64" else torch.float32)
    modules, calls, ties = nn.ModuleDict(), [], nn.ModuleDict()
    for number, spec in enumerate(case.layers()):
        seed(5 + number)
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in ties:
                ties[spec.key] = spec.build()
            calls.append((ties[spec.key], spec.forward_fn))
        else:
            assert isinstance(spec, LayerSpec)
            modules[str(number)] = spec.build()
            calls.append((modules[str(number)], None))
    model = nn.ModuleDict({**modules, "tied_modules": ties}).double()
    torch.set_default_dtype(torch.float32)
    if case.optimizer == "SGD":
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    elif case.samo is not None:
        masks = samo.magnitude(
            model, case.samo["sparsity"], case.samo.get("scope", "layer"), exclude=case.samo.get("exclude")
        )
        optimizer = samo.Optimizer(
            lambda groups: torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1),
            model,
            masks,
            max_norm=case.clip or None,
        )
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    batches = case.batches(replicas)
    for step in batches if steps is None else [batches[number] for number in steps]:
        micros = [micro for replica in step for micro in replica]
        total = 0.0
        for x, labels in micros:
            y: Any = x.double() if x.is_floating_point() else x
            y = y.clone()
            for layer, function in calls:
                y = layer(y) if function is None else function(layer, y)
            loss = case.loss(y, labels.double() if labels.is_floating_point() else labels)
            (loss / len(micros)).backward()
            for parameter in model.parameters():  # torch clips no sparse gradient
                parameter.grad = None if parameter.grad is None else parameter.grad.to_dense()
            total += loss.item() / len(micros)
        if case.clip and case.samo is None:
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def difference(ours: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    """Largest difference of two sets of parameters of one stage."""
    return max((float((ours[name].double() - reference[name]).abs().max()) for name in ours), default=0.0)


def compare(cases: dict[str, Case]) -> dict[str, tuple[float, float, int]]:
    """By case: largest difference of a loss and of a weight from the serial run, and the most activations alive."""
    ready()
    found = {}
    for name, case in cases.items():
        engine = start(case)
        losses = train(engine, case)
        replicas = engine.grid.data_parallel_size
        wanted, weights = made_once(lambda case=case, replicas=replicas: serial(case, replicas))
        far = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
        found[name] = (far, difference(parameters(engine), weights), getattr(engine, "most_alive", 0))
        engine.destroy()
        dist.barrier()
    return found
