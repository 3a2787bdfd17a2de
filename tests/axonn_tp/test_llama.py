"""HF Llama with grouped-query attention: plan="auto" on grids of 4 and 8 ranks, both layouts, everything on, equals serial in float64."""

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
from tests.axonn_tp.test_grids import EVERYTHING, Step, largest_error
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough


def llama(heads: int, kv_heads: int, tied: bool) -> nn.Module:
    """A checkpointing Llama whose heads have four features."""
    sizes = {
        **SIZES,
        "hidden_size": 4 * heads,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": 1,
    }
    eager = {"attn_implementation": "eager"}  # which gives attentions
    model = hf("LlamaForCausalLM", **sizes, **eager, tie_word_embeddings=tied).double().train()
    model.activation_checkpointing_enable()
    return model


def batch() -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], (8, 7), generator=torch.Generator().manual_seed(5))


def with_states(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of next tokens, and what pulls hidden states to a direction, as a teacher's do, and attention apart."""
    made = model(input_ids=tokens[:, :-1], output_hidden_states=True, output_attentions=True)
    loss = nn.functional.cross_entropy(made.logits.flatten(0, 1), tokens[:, 1:].flatten())
    for state in made.hidden_states:
        towards = torch.arange(state.shape[-1], dtype=state.dtype).cos().expand(state.shape)
        loss = loss - 0.1 * nn.functional.cosine_similarity(state, towards, dim=-1).sum() / len(tokens)
    return loss + sum(attention.sum(1).square().sum() / len(tokens) for attention in made.attentions)


def optimized(model: nn.Module) -> None:
    torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3).step()


def serial_step(model: nn.Module) -> Step:
    before, ids = copy.deepcopy(model), batch()
    loss = with_states(model, ids)
    loss.backward()
    gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimized(model)
    return Step(before, model, loss.detach(), gradients, norm)


def train_one_step(expected: Step, mesh: Mesh, options: Options) -> tuple[dict[str, float], set[str]]:
    """Errors of the loss, the gradients, their norm and the weights after one step; last names of the ends of pairs."""
    parallel = axonn_tp.parallelize(copy.deepcopy(expected.before), mesh, "auto", options)
    for _ in range(2):  # the first pass teaches the order of gathers
        parallel.zero_grad()
        loss = with_states(parallel, mesh.shard_batch(batch()))
        loss.backward()
    axonn_tp.sync_gradients(parallel.parameters(), mesh)
    mean = loss.detach().clone()
    dist.all_reduce(mean, group=mesh.group("batch"))
    gradients = {id(p): expected.gradients[name] for name, p in expected.after.named_parameters()}
    errors = {
        "loss": (mean / mesh.grid.batch - expected.loss).abs().item(),
        "gradients": largest_error(expected.after, parallel, mesh, lambda p: gradients.get(id(p), p.grad)),
        "norm": (axonn_tp.clip_grad_norm_(parallel.parameters(), mesh, 0.1) - expected.norm).abs().item(),
    }
    optimized(parallel)
    errors["weights"] = largest_error(expected.after, parallel, mesh, lambda p: p.data)
    split = [name for name, m in parallel.named_modules() if isinstance(m, axonn_tp.Linear) and m.split.transposed]
    return errors, {name.rpartition(".")[2] for name in split}


def on_grids(expected: Step, grids: list[Grid]) -> list[tuple[Grid, str, dict[str, float], set[str]]]:
    """Every other grid in either layout, and on three axes in both."""
    found = []
    for index, mesh in enumerate(meshes(grids)):
        grid = mesh.grid
        for layout in LAYOUTS if grid == Grid(2, 2, 2) else (LAYOUTS[index % 2],):
            found.append((grid, layout, *train_one_step(expected, mesh, replace(EVERYTHING, layout=layout))))
    return found


OF_FOUR = [Grid(4), Grid(1, 2, 2), Grid(2, 1, 1, 2)]
"""Each axis at two, and the one that does not divide the key and value heads."""


@pytest.mark.parametrize(
    "grids",
    [OF_FOUR, *map(thorough, (list(factorisations(4)), list(factorisations(8))))],
    ids=["some", "four", "eight"],
)
def test_on_grids(grids: list[Grid]) -> None:
    pytest.importorskip("transformers")
    torch.manual_seed(1)
    for rank in run_ranks(on_grids, grids[0].world, serial_step(llama(8, 2, False)), grids):
        for grid, layout, errors, pairs in rank:
            assert all(error < 1e-10 for error in errors.values()), (grid, layout, errors)
            # Where the two key and value heads do not divide, attention is not a pair, and its projections stand alone.
            assert pairs == ({"o_proj", "down_proj"} if grid.gx <= 2 else {"down_proj"}), (grid, layout)


def parts(model: nn.Module, last: bool = True) -> list[torch.Tensor]:
    """What a script finds that calls a model's parts by themselves: states, and logits of them or of their last token, with a gradient."""
    model.zero_grad()
    base, head = model.base_model, model.get_output_embeddings()  # type: ignore[operator]
    found = base(batch()[:2], output_hidden_states=True)
    packed, others = base(batch()[:2], output_hidden_states=True, return_dict=False, use_cache=False)
    with torch.no_grad():
        whole, of_whole = model(batch()[:2], output_hidden_states=True, return_dict=False, use_cache=False)
    states = found.last_hidden_state
    logits = head(states[:, -1:] if last else states)
    (logits.square().sum() + packed.square().sum()).backward()
    return [*found.hidden_states, *others, *of_whole, states, packed, whole, logits]


def scattering() -> nn.Module:
    """A model whose tokens a grid scatters over x, as no code looks across them."""
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutput

    class Stream(PreTrainedModel):
        config_class, base_model_prefix = PretrainedConfig, "stream"

        def __init__(self, config: PretrainedConfig) -> None:
            super().__init__(config)
            self.embed, self.norm = nn.Embedding(SIZES["vocab_size"], 16), nn.LayerNorm(16)
            self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
            self.post_init()

        def forward(self, ids: torch.Tensor, return_dict: bool = True, **keywords: object) -> object:
            first = self.embed(ids)
            last = first + self.down(nn.functional.gelu(self.up(self.norm(first))))
            found = BaseModelOutput(last_hidden_state=last, hidden_states=(first, last))
            return found if return_dict else found.to_tuple()

    class Headed(Stream):
        def __init__(self, config: PretrainedConfig) -> None:
            PreTrainedModel.__init__(self, config)
            self.stream, self.lm_head = Stream(config), nn.Linear(16, SIZES["vocab_size"], bias=False)
            self.post_init()

        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

        def forward(self, ids: torch.Tensor, output_hidden_states: bool = False, **keywords: object) -> object:
            last, states = self.stream(ids, return_dict=False)
            return (self.lm_head(last), states) if output_hidden_states else self.lm_head(last)

    return Headed(PretrainedConfig())


def called_alone(before: nn.Module, grids: list[Grid]) -> list[tuple[Grid, str, float]]:
    expected, found = copy.deepcopy(before), []
    for mesh in meshes(grids):
        for layout in LAYOUTS:
            # Some of the tokens that are scattered over x are no whole tokens to a head.
            last = layout == "replicated"
            model = axonn_tp.parallelize(copy.deepcopy(before), mesh, "auto", Options(layout=layout))
            values, made = parts(expected, last), parts(model, last)
            error = max(float((a - b).abs().max()) for a, b in zip(made, values, strict=True))
            axonn_tp.sync_gradients(model.parameters(), mesh)
            error = max(error, largest_error(expected, model, mesh, lambda p: p.grad))
            found.append((mesh.grid, layout, error))
    return found


def test_parts_that_are_called_by_themselves() -> None:
    """Of a model whose stream is split, which its head takes in shares."""
    pytest.importorskip("transformers")
    torch.manual_seed(1)
    for before in (hf("GPTNeoXForCausalLM", **SIZES, tie_word_embeddings=False), scattering()):
        for rank in run_ranks(called_alone, 4, before.double(), [Grid(2, 2), Grid(1, 2, 2)]):
            assert all(error < 1e-10 for *_, error in rank), rank
