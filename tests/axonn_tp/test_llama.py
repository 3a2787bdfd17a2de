"""HF Llama with grouped-query attention: plan="auto" on grids of 8 ranks, both layouts, everything on, equals serial in float64."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import axonn_tp
from axonn_tp import Grid, Mesh, Options, factorisations
from axonn_tp.options import LAYOUTS
from tests.axonn_tp.families import SIZES, hf
from tests.axonn_tp.test_auto import loss_of
from tests.axonn_tp.test_grids import EVERYTHING, largest_error
from tests.distributed import meshes, run_ranks


def llama(heads: int, kv_heads: int, tied: bool) -> nn.Module:
    """A checkpointing Llama whose heads have four features."""
    sizes = {
        **SIZES,
        "hidden_size": 4 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 1,
    }
    model = hf("LlamaForCausalLM", **sizes, tie_word_embeddings=tied).double().train()
    model.activation_checkpointing_enable()
    return model


def train_one_step(serial: nn.Module, mesh: Mesh, options: Options) -> tuple[dict[str, float], set[str]]:
    """Errors of the loss, the gradients, their norm and the weights after one step; last names of the ends of pairs."""
    parallel, serial = copy.deepcopy(serial), copy.deepcopy(serial)
    axonn_tp.parallelize(parallel, mesh, "auto", options)
    ids = torch.randint(SIZES["vocab_size"], (8, 7), generator=torch.Generator().manual_seed(5))
    expected = loss_of(serial, ids[:, 1:], ids[:, :-1])
    expected.backward()
    for _ in range(2):  # the first pass teaches the order of gathers
        parallel.zero_grad()
        own = mesh.shard_batch(ids)
        loss = loss_of(parallel, own[:, 1:], own[:, :-1])
        loss.backward()
    axonn_tp.sync_gradients(parallel.parameters(), mesh)
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=mesh.group("batch"))
    errors = {
        "loss": (mean / mesh.grid.batch - expected).abs().item(),
        "gradients": largest_error(serial, parallel, mesh, lambda p: p.grad),
    }
    norm = nn.utils.clip_grad_norm_(serial.parameters(), 0.1)
    errors["norm"] = (axonn_tp.clip_grad_norm_(parallel.parameters(), mesh, 0.1) - norm).abs().item()
    for model in (serial, parallel):
        torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3).step()
    errors["weights"] = largest_error(serial, parallel, mesh, lambda p: p.data)
    split = [name for name, m in parallel.named_modules() if isinstance(m, axonn_tp.Linear) and m.split.transposed]
    return errors, {name.rpartition(".")[2] for name in split}


def on_every_grid(heads: int, kv_heads: int, tied: bool) -> list[tuple[Grid, str, dict[str, float], set[str]]]:
    """Every other grid in either layout, and where no axis is data in both."""
    torch.manual_seed(1)
    serial = llama(heads, kv_heads, tied)
    found = []
    for index, mesh in enumerate(meshes(factorisations(dist.get_world_size()))):
        grid = mesh.grid
        for layout in LAYOUTS if grid == Grid(2, 2, 2) else (LAYOUTS[index % 2],):
            found.append((grid, layout, *train_one_step(serial, mesh, replace(EVERYTHING, layout=layout))))
    return found


def test_every_grid() -> None:
    pytest.importorskip("transformers")
    for rank in run_ranks(on_every_grid, 8, 8, 2, False):
        for grid, layout, errors, pairs in rank:
            assert max(errors.values()) < 1e-10, (grid, layout, errors)
            # Where the two key and value heads do not divide, attention is not a pair, and its projections stand alone.
            assert pairs == ({"o_proj", "down_proj"} if grid.gx <= 2 else {"down_proj"}), (grid, layout)
