"""A script with tensor parallelism of its own, which gives DeepSpeed an mpu, and the same model in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe.layer import MoE
from torch import Tensor, nn

import ted_moe
from tests import groups

HIDDEN, INNER, EXPERTS, TENSOR, STEPS, SAMPLES = 6, 8, 4, 2, 3, 8


class Unit:
    """Megatron's order of ranks: the tensor ones are neighbours."""

    def __init__(self, tensor: int = TENSOR) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        across = [dist.new_group(list(range(first, first + tensor))) for first in range(0, world, tensor)]
        along = [dist.new_group(list(range(first, world, tensor))) for first in range(tensor)]
        self.tensor, self.data = across[rank // tensor], along[rank % tensor]

    def get_model_parallel_rank(self) -> int:
        return self.tensor.rank()

    def get_model_parallel_world_size(self) -> int:
        return self.tensor.size()

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_data_parallel_rank(self) -> int:
        return self.data.rank()

    def get_data_parallel_world_size(self) -> int:
        return self.data.size()

    def get_data_parallel_group(self) -> Any:
        return self.data


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad, group=deepspeed.utils.groups.mpu.get_model_parallel_group())
        return grad


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=deepspeed.utils.groups.mpu.get_model_parallel_group())
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Column(nn.Linear):
    """Megatron's column-parallel layer."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_Copy.apply(x), self.weight, self.bias)


class Row(nn.Linear):
    """Megatron's row-parallel layer."""

    def forward(self, x: Tensor) -> Tensor:
        return _Sum.apply(F.linear(x, self.weight)) + self.bias


class Expert(nn.Module):
    """Whole, or this tensor rank's parts; `sums`: parts that are summed, as Megatron's are."""

    def __init__(self, tensor: int = 1, marked: bool = False, sums: bool = True) -> None:
        super().__init__()
        column, row = (Column, Row) if tensor > 1 and sums else (nn.Linear, nn.Linear)
        self.fc1, self.fc2 = column(HIDDEN, INNER // tensor), row(INNER // tensor, HIDDEN)
        for parameter in (self.fc1.weight, self.fc1.bias, self.fc2.weight):
            if marked:
                parameter.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


@dataclass(frozen=True)
class Script:
    """Options of a script.

    Attributes:
        ted: the block; None: stock DeepSpeed.
        parts: experts are split over the tensor ranks.
        said: the layers' enable_expert_tensor_parallelism.
        apart: tensor ranks have different experts.
    """

    ted: dict[str, Any] | None
    ep_size: int = 1
    parts: bool = True
    marked: bool = True
    said: bool = True
    apart: bool = False
    residual: bool = False
    k: int = 2
    sums: bool = True
    config: dict[str, Any] = field(default_factory=dict)

    def model(self, kind: Any = MoE, ep_size: int = 1, tensor: int = 1) -> Model:
        def layer() -> nn.Module:
            gates = {"use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 1, "capacity_factor": 0.8}
            expert = Expert(tensor, self.marked and tensor > 1, self.sums)
            said = {"enable_expert_tensor_parallelism": self.said, "use_residual": self.residual}
            return kind(HIDDEN, expert, EXPERTS, ep_size, k=self.k, **gates, **said)

        return Model(layer(), layer())

    def serial(self) -> Model:
        """All experts, whole and each other ones; TED's layers on one rank, whose float32 gates round alike."""
        model = self.model(ted_moe.MoE).double()
        generator = torch.Generator().manual_seed(5)
        for parameter in model.parameters():
            parameter.data = 0.4 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return model

    def share(self, name: str, whole: dict[str, Tensor]) -> Tensor:
        """This rank's, of the serial model's tensors."""
        place = dist.get_rank() // (1 if self.apart else TENSOR) % self.ep_size
        before, experts, after = name.partition(".deepspeed_experts.")
        number, _, rest = after.partition(".")
        full = f"{before}{experts}{int(number) + place * (EXPERTS // self.ep_size)}.{rest}" if experts else name
        value, part = whole[full], dist.get_rank() % TENSOR
        if not self.parts or not (experts or ".mlp." in name) or name.endswith("fc2.bias"):
            return value
        return value.chunk(TENSOR, 1 if name.endswith("fc2.weight") else 0)[part]


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x, loss = self.enter(x), x.new_zeros(())
        for layer in self.layers:
            out, l_aux, _ = layer(x)
            x, loss = x + out, loss + 0.01 * l_aux
        return (self.leave(x) - target).square().mean() + loss


def batches(data: int) -> Tensor:
    """By step, data rank, and inputs or targets."""
    generator = torch.Generator().manual_seed(7)
    drawn = torch.randn(STEPS, SAMPLES, 2, 5, HIDDEN, generator=generator, dtype=torch.float64)
    return drawn.view(STEPS, data, SAMPLES // data, 2, 5, HIDDEN).transpose(2, 3)


def start(script: Script, unit: Any, dtype: torch.dtype = torch.float32) -> Any:
    import axonn_plugins

    groups.reuse()
    axonn_plugins.activate()
    whole = script.serial().state_dict()
    model = script.model(MoE, script.ep_size, TENSOR if script.parts else 1).to(dtype)
    model.load_state_dict({name: script.share(name, whole) for name in model.state_dict()})
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES * TENSOR // dist.get_world_size(),
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    } | script.config
    if script.ted is not None:
        config["axonn"] = {"ted": script.ted}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=unit)[0]


def gradients(script: Script, unit: Any) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """The first batch's loss, and each gradient of this rank, in float64, beside that of one process."""
    serial = script.serial()
    losses = [serial(*part) for part in batches(unit.get_data_parallel_world_size())[0]]
    torch.stack(losses).mean().backward()
    engine = start(script, unit, torch.float64)
    loss = engine.module(*batches(unit.get_data_parallel_world_size())[0][unit.get_data_parallel_rank()])
    loss.backward()
    whole = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in serial.named_parameters()}
    found, expected = {}, {}
    for name, parameter in engine.module.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        stock = deepspeed.utils.groups
        expert = not getattr(parameter, "allreduce", True)
        group = (
            stock._get_expert_data_parallel_group(parameter.group_name) if expert else unit.get_data_parallel_group()
        )
        dist.all_reduce(grad, group=group)
        found[name] = grad / unit.get_data_parallel_world_size()
        expected[name] = script.share(name, whole)
    difference = abs(loss.item() - losses[unit.get_data_parallel_rank()].item())
    engine.destroy()
    return difference, found, expected


def train(engine: Any, steps: slice = slice(None)) -> list[float]:
    unit, losses = engine.mpu, []
    for parts in batches(unit.get_data_parallel_world_size())[steps]:
        inputs, targets = parts[unit.get_data_parallel_rank()].float()
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        mean = loss.detach().double()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
    return losses


def serial_losses(script: Script, data: int) -> list[float]:
    model = script.serial()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for parts in batches(data):
        optimizer.zero_grad()
        loss = torch.stack([model(*part) for part in parts]).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
