"""Model state of stock DeepSpeed-MoE, counted on ranks of this machine after a step of training, beside the formula."""

from __future__ import annotations

import logging
import os
import warnings
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_plugins.cluster.launch import launch
from axonn_plugins.config import ConfigError
from ted_moe import memory
from ted_moe.memory import Degrees, State, Transformer

SMALL, SMALL_EXPERTS, SMALL_DEGREES = Transformer(4, 128, 512, 64), 4, Degrees(1, 2, 2)
"""The model, experts and degrees that are measured beside the table."""
MOST_RANKS, MOST_PARAMETERS = 8, 100_000_000
"""Limits of what is measured: ranks, and parameters on all of them."""
_HEAD = 16
"""Features of an attention head, where they divide the model's; no count depends on it."""


@dataclass(frozen=True)
class Counted:
    """Bytes that a rank holds.

    Attributes:
        shared: outside experts.
        expert: in experts.
    """

    shared: State
    expert: State


class Block(nn.Module):
    """A transformer's block, its MLP dense or DeepSpeed's MoE; (batch, tokens, hidden) → the same, and the auxiliary loss."""

    def __init__(self, hidden: int, experts: int = 0, expert_ranks: int = 1) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.heads = hidden // _HEAD if hidden % _HEAD == 0 else 1
        self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.mlp = MoE(hidden, mlp, experts, expert_ranks, use_rts=False) if experts else mlp

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # noqa: D102
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        out = self.mlp(self.ln2(x))
        return (x + out[0], out[1]) if isinstance(out, tuple) else (x + out, x.new_zeros(()))


class GPT(nn.Module):
    """The MoE that `ted_moe.memory.parameters` counts: the second of every two layers has experts; the output layer is tied.

    Args:
        model: sizes.
        experts: in these layers.
        expert_ranks: that share them.
    """

    def __init__(self, model: Transformer, experts: int, expert_ranks: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocabulary, model.hidden)
        self.positions = nn.Embedding(model.context, model.hidden)
        self.blocks = nn.ModuleList(
            Block(model.hidden, experts * (layer % 2), expert_ranks) for layer in range(model.layers)
        )
        self.norm = nn.LayerNorm(model.hidden)

    def forward(self, ids: Tensor) -> Tensor:
        """Loss of predicting `ids`, (batch, tokens)."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        auxiliary = x.new_zeros(())
        for block in self.blocks:
            x, loss = block(x)
            auxiliary = auxiliary + loss
        logits = F.linear(self.norm(x), self.tokens.weight)[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()) + 0.01 * auxiliary


def require_small(model: Transformer, experts: int, degrees: Degrees) -> None:
    """Refuse what cannot be measured here.

    Raises:
        ConfigError: there is tensor parallelism, or there are too many ranks or parameters.
    """
    if degrees.tensor > 1:
        raise ConfigError(
            f"--measure trains stock DeepSpeed-MoE, which has no tensor parallelism of its own; use --tensor 1, not {degrees.tensor}"
        )
    if degrees.gpus > MOST_RANKS:
        raise ConfigError(
            f"--measure would start {degrees.gpus} ranks on this machine, and {MOST_RANKS} are the most; use lower --expert or --data"
        )
    count = degrees.gpus * memory.parameters(model, experts, degrees).total
    if count > MOST_PARAMETERS:
        raise ConfigError(
            f"--measure would hold {count:,} parameters on {degrees.gpus} ranks, and {MOST_PARAMETERS:,} are the most; "
            "use a smaller MODEL, such as GPT:4,128,512,64"
        )


def measure(model: Transformer, experts: int, degrees: Degrees) -> list[Counted]:
    """Train stock DeepSpeed-MoE in bf16 with Adam and ZeRO-1 for a step on gloo ranks, and count on each.

    Gradients are counted at the moment of backward at which there are most, the optimizer's state after the step.

    Args:
        model: the base model.
        experts: in every second layer.
        degrees: how they are split; the tensor degree is 1.
    """
    require_small(model, experts, degrees)
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    import deepspeed  # noqa: F401 - once, before the ranks are forked

    return launch(_train, degrees.gpus, model, experts, degrees, timeout=600)


def _train(model: Transformer, experts: int, degrees: Degrees) -> Counted:
    import deepspeed
    from deepspeed.moe.utils import is_moe_param, is_moe_param_group

    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)  # DeepSpeed prints
    # The shared-memory collectives, which are not needed, would be compiled first.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, zero, _, _ = deepspeed.initialize(model=GPT(model, experts, degrees.expert), config=config)
    split: dict[bool, list[nn.Parameter]] = {False: [], True: []}
    for parameter in engine.module.parameters():
        split[is_moe_param(parameter)].append(parameter)
    gradients = _watch_gradients(split)
    ids = torch.randint(model.vocabulary, (1, min(model.context, 64)))
    engine.backward(engine(ids))
    engine.step()
    optimizer = {False: 0, True: 0}
    for group in zero.optimizer.param_groups:
        for master in group["params"]:
            held = [master, *zero.optimizer.state[master].values()]
            optimizer[is_moe_param_group(group)] += sum(value.nbytes for value in held if isinstance(value, Tensor))
    return Counted(
        *(
            State(sum(parameter.nbytes for parameter in split[is_expert]), gradients[is_expert], optimizer[is_expert])
            for is_expert in (False, True)
        )
    )


def _watch_gradients(split: dict[bool, list[nn.Parameter]]) -> dict[bool, int]:
    """Bytes of gradients by kind of parameter, filled by backward, of the moment at which there are most."""
    most = {kind: 0 for kind in split}

    def count(_: Tensor) -> None:
        held = {
            kind: sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
            for kind, parameters in split.items()
        }
        if sum(held.values()) > sum(most.values()):
            most.update(held)

    for parameter in (parameter for parameters in split.values() for parameter in parameters):
        parameter.register_post_accumulate_grad_hook(count)
    return most


def compare(model: Transformer, experts: int, degrees: Degrees) -> str:
    """Compare the bytes that `measure` counted on the rank that holds most with equation 7.4 of the parameters by part, as text.

    Args:
        model: see `measure`.
        experts: see there.
        degrees: see there.
    """
    ranks = measure(model, experts, degrees)
    most = max(ranks, key=lambda rank: rank.shared.total + rank.expert.total)
    local = memory.parameters(model, experts, degrees)
    shared = memory.state(local.shared, degrees.shared_data)
    expert = memory.state(local.expert, degrees.data)
    lines = [
        f"Measured here: stock DeepSpeed-MoE, bf16, Adam, ZeRO-1, on {degrees.gpus} ranks (expert {degrees.expert} × data {degrees.data}); "
        f"GPT of {model.layers} layers, {model.hidden} features, {experts} experts; bytes on the rank that holds most",
        f"{'':<36}{'formula':>14}{'measured':>14}{'difference':>12}",
    ]
    for part, by_formula, counted in (
        ("outside experts", shared, most.shared),
        ("experts", expert, most.expert),
    ):
        for name in ("weights", "gradients", "optimizer"):
            lines.append(_line(f"{name}, {part}", getattr(by_formula, name), getattr(counted, name)))
    lines.append(_line("model state", shared.total + expert.total, most.shared.total + most.expert.total))
    return (
        "\n".join(lines)
        + "\n(gradients at the end of backward, before ZeRO-1 keeps its share alone; the optimizer's difference is padding and Adam's counters)"
    )


def _line(label: str, formula: float, measured: float) -> str:
    return f"{label:<36}{formula:>14,.0f}{measured:>14,.0f}{measured / formula - 1 if formula else 0:>+12.3%}"
