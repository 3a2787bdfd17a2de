"""Models on shared sequences beside one process: losses, outputs and weights after a step, on grids of 4 and 8 ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, Mesh, Options, factorisations, full_state_dict, parallelize, sync_gradients
from tests.distributed import meshes, run_ranks

TOKENS, BATCH = 13, 8


def grids(world: int) -> Iterator[Grid]:
    for grid in factorisations(world):
        for sequence in range(2, grid.gz + 1):
            if grid.gz % sequence == 0 and grid.gy < 3:
                yield Grid(grid.gx, grid.gy, grid.gz, grid.gdata, sequence)


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make().double()


def ids(vocabulary: int = 64, tokens: int = TOKENS) -> Tensor:
    return torch.randint(vocabulary, (BATCH, tokens), generator=torch.Generator().manual_seed(tokens))


def small_gpt() -> nn.Module:
    return GPT(GPTConfig(64, TOKENS, 2, 4, 16))


class Recomputed(GPT):
    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.mean_loss(self.head(self.norm(x)), targets)


def step(model: nn.Module, loss: Callable[[nn.Module], Tensor], mesh: Mesh | None) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the weights that a step of SGD makes."""
    value = loss(model)
    value.backward()
    if mesh is not None:
        sync_gradients(model.parameters(), mesh)
    torch.optim.SGD(model.parameters(), lr=0.5).step()
    return value.detach(), model.state_dict() if mesh is None else full_state_dict(model, mesh)


def compare(
    make: Callable[[], nn.Module], loss: Callable[..., Tensor], mesh: Mesh, plan: Any, options: Options
) -> None:
    grid = mesh.grid
    expected, weights = step(seeded(make), partial(loss, mesh=None), None)
    model = parallelize(seeded(make), mesh, plan, options)
    got, found = step(model, partial(loss, mesh=mesh), mesh)
    if grid.readers > 1:
        torch.distributed.all_reduce(got, group=mesh.group("readers"))
    torch.testing.assert_close(got / grid.readers, expected, rtol=1e-10, atol=1e-10, msg=f"{grid} {make}")
    if torch.distributed.get_rank() == 0:
        for name, weight in weights.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-9, atol=1e-10, msg=f"{grid} {make} {name}")


def part(tensor: Tensor, mesh: Mesh | None) -> Tensor:
    return tensor if mesh is None else mesh.shard_batch(tensor)


def inside(model: nn.Module, mesh: Mesh | None) -> Tensor:
    batch = ids(tokens=TOKENS + 1)
    return model(part(batch[:, :-1], mesh), part(batch[:, 1:], mesh))


def outside(model: nn.Module, mesh: Mesh | None) -> Tensor:
    batch = part(ids(tokens=TOKENS + 1), mesh)
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def gpts(world: int) -> None:
    for number, mesh in enumerate(meshes(grids(world))):
        options = Options("replicated" if number % 3 == 2 else "scattered", attention=("gather", "ring")[number % 2])
        compare(small_gpt, inside, mesh, "auto" if mesh.size("model") > 1 else None, options)
        if mesh.grid.gz == world:
            compare(small_gpt, outside, mesh, None, options)
            compare(partial(Recomputed, GPTConfig(64, TOKENS, 2, 4, 16)), inside, mesh, None, options)


@pytest.mark.parametrize("world", [4, 8])
def test_gpt(world: int) -> None:
    run_ranks(gpts, world, world)


def hf(kind: str, **more: Any) -> nn.Module:
    import transformers

    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "intermediate_size": 48,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        **more,
    }
    if kind == "GPT2":
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "attn_pdrop": 0.0}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0}
    config = getattr(transformers, f"{kind}Config" if kind != "Gemma3" else "Gemma3TextConfig")(**sizes)
    names = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}
    return getattr(transformers, names.get(kind, f"{kind}ForCausalLM"))(config)


MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "GPT2": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "Mistral": {"sliding_window": 4},
    "Gemma3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "GptOss": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"], "num_local_experts": 4},
}


def of_hf(model: nn.Module, mesh: Mesh | None, how: str) -> Tensor:
    batch, more = ids(), {}
    if how == "packed":
        more["position_ids"] = torch.tensor([*range(4), *range(7), *range(TOKENS - 11)]).repeat(BATCH, 1)
    elif how != "plain":
        mask = torch.ones(BATCH, TOKENS, dtype=torch.int64)
        mask[::2, slice(3) if how == "left" else slice(-3, None)] = 0
        more["attention_mask"] = mask
    labels = batch.masked_fill(more.get("attention_mask", torch.ones(1)) == 0, -100)
    given = {name: part(value, mesh) for name, value in {"input_ids": batch, "labels": labels, **more}.items()}
    count = part(labels, None)[:, 1:].ne(-100).sum() / (1 if mesh is None else mesh.grid.readers)
    return model(**given, num_items_in_batch=count).loss


def published(world: int) -> None:
    torch.Tensor.float = torch.Tensor.double  # type: ignore[assignment, method-assign]
    torch.set_default_dtype(torch.float64)
    plain, split = Grid(gz=world, sequence=world), Grid(gx=2, gz=world // 2, sequence=2)
    for mesh in meshes([plain, split, Grid(gz=world, sequence=2)]):
        for kind, more in MODELS.items():
            ways = ("plain", "packed", "left", "right") if kind in ("Llama", "Gemma3") else ("plain", "left")
            for how in ways if mesh.grid == plain else ways[:1]:
                plan = "auto" if mesh.size("model") > 1 and kind in ("Llama", "GPT2", "Gemma3") else None
                compare(partial(hf, kind, **more), partial(of_hf, how=how), mesh, plan, Options())


def test_models_of_hf() -> None:
    run_ranks(published, 4, 4)
