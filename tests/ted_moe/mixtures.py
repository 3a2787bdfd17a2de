"""HF's mixtures of experts, tiny and random: in one process, and dealt out by `ted_moe.adapters` on a mesh."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.config import Ted
from axonn_plugins.hosts.deepspeed.ted.on_mesh import split_with_experts
from axonn_tp import Grid, LayerPlan, Mesh, layout_of, sync_gradients
from axonn_tp.checkpoint.dealt import DealtNames
from tests.axonn_tp.families import GROUPED, VOCABULARY, hf, in_float64
from tests.ted_moe.drawn import DRAWN
from tests.ted_moe.listed import LISTED, Listed

LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
FEW = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
SHARED = {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 1}
MIXTURES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "output_router_logits": True},
    "Qwen3Moe": {**FEW, "head_dim": 8, "norm_topk_prob": False, "decoder_sparse_step": 1},
    "DeepseekV3": {**GROUPS, **LATENT, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Qwen2Moe": {**FEW, **SHARED},
    "DeepseekV2": {**GROUPS, **LATENT, "num_experts_per_tok": 2, "num_key_value_heads": 4},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "Glm4Moe": {**GROUPS, "num_experts_per_tok": 3, "head_dim": 8},
    "GraniteMoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Ernie4_5_Moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24},
    "HunYuanMoEV1": {"num_experts": 4, "moe_topk": 2, "head_dim": 8},
    "FlexOlmo": {"num_experts": 4, "num_experts_per_tok": 2},
    # Router and experts are called by the decoder layer itself.
    "Gemma4": {
        **{"configuration": "Gemma4TextConfig", "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
        **{"moe_intermediate_size": 24, "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 0},
    },
}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "expert": ({}, {}),
    "tensor": ({"gx": 4}, {}),
    "expert and tensor": ({"gx": 2}, {}),
    "expert and tensor, two steps": ({"gx": 2}, {"fused": False}),
    "expert and tensor, all tokens sent": ({"gx": 2}, {"duplicate_token_dropping": False}),
    "expert and tensor, in slices": ({"gx": 2}, {"overlap_degree": 2}),
    "whole experts": ({"gx": 2}, {"expert_tensor_parallel": False}),
    "z": ({"gz": 2}, {"expert": 2}),
    "y and z": ({"gy": 2, "gz": 2}, {}),
    "shares of sequences": ({"gz": 4, "sequence": 4}, {}),
    "tensor and shares": ({"gx": 2, "gz": 2, "sequence": 2}, {}),
}
COVERING = ("expert and tensor", "whole experts", "y and z", "tensor and shares")
"""Layouts with every axis, for a second mixture."""


_DYNAMICS = ("A_log", "dt_bias", ".D")
"""Weights of mixers of which random ones would let states grow."""


def mixture(name: str) -> nn.Module:
    """The serial model in float64; the first two experts of each router are tied."""
    torch.manual_seed(1)
    sizes = DRAWN.get(name) or {**GROUPED, **MIXTURES.get(name, {})}
    model = Listed(name) if name in LISTED else hf(f"{name}ForCausalLM", **sizes)
    model.double()
    for each, parameter in model.named_parameters():
        if each.endswith(_DYNAMICS):
            continue
        parameter.data = 0.2 * torch.randn(parameter.shape, dtype=torch.float64) + (parameter.dim() == 1)
        if each.endswith(("gate.weight", "router.weight", "router.layer.weight")) and 1 < parameter.shape[0] <= 8:
            parameter.data[1] = parameter.data[0]
    return model


@contextmanager
def exactly() -> Iterator[None]:
    """`in_float64`, also where a router asks for float32 by ``Tensor.type``."""
    to_type = Tensor.type

    def kept(self: Tensor, *args: Any, **keywords: Any) -> Any:
        wide = self.dtype == torch.float64 and args == (torch.float32,)
        return self if wide else to_type(self, *args, **keywords)

    with in_float64(), mock.patch.object(Tensor, "type", kept):
        yield


def tokens(reader: int) -> Tensor:
    """Tokens of one of the ranks that read different data: odd numbers, others on each."""
    torch.manual_seed(5 + reader)
    return torch.randint(VOCABULARY, (1 + reader % 2, 3 + 2 * reader))


@cache
def serial(name: str, readers: int) -> tuple[float, dict[str, Tensor]]:
    """Mean of the losses of all readers, each of which routes its tokens by itself, and its gradient."""
    model, total = mixture(name), 0.0
    with exactly():
        for reader in range(readers):
            loss = model(input_ids=tokens(reader), labels=tokens(reader)).loss / readers
            loss.backward()
            total += loss.item()
    return total, {each: p.grad for each, p in model.named_parameters() if p.grad is not None}


def before_ranks(name: str, layouts: Iterable[str]) -> None:
    """Take the serial runs that four ranks of these layouts inherit."""
    for readers in {Grid.for_world(4, **LAYOUTS[layout][0]).readers for layout in layouts}:
        serial(name, readers)


def difference(name: str, sizes: dict[str, int], ted: dict[str, Any]) -> tuple[float, float]:
    """Of the loss and of the worst gradient, relative, between a mesh of all ranks and one process."""
    mesh = Mesh(Grid.for_world(dist.get_world_size(), **sizes))
    grid, model = mesh.grid, mixture(name)
    plan: Any = {"*": LayerPlan("replicated")} if grid.gx * grid.gy * grid.gz == 1 else "auto"
    ids = tokens(mesh.rank("readers"))
    with exactly():
        split_with_experts(model, mesh, Ted.model_validate(ted), plan)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    sync_gradients(model.parameters(), mesh)
    total, expected = serial(name, grid.readers)
    worst = 0.0
    names = DealtNames(model)
    for own, parameter in model.named_parameters():
        each = names.outward(own)
        if each in expected:
            layout, on = layout_of(parameter), mesh.over(layout_of(parameter).grid)
            wanted = layout.shard(expected[each], on.grid, on.coordinates)
            worst = max(worst, ((parameter.grad - wanted).norm() / expected[each].norm().clamp(min=1e-12)).item())
        else:
            assert parameter.grad is None or not parameter.grad.any()
    found = torch.stack([loss.detach() / grid.world, torch.tensor(0.0)])
    dist.all_reduce(found)
    largest = torch.tensor(worst, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    mesh.destroy()
    return abs(found[0].item() - total) / abs(total), largest.item()
