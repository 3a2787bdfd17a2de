"""Models on shared sequences beside one process: losses, outputs and weights after a step, on grids of 4 and 8 ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, Mesh, Options, factorisations, full_state_dict, parallelize, sync_gradients
from tests.distributed import meshes, run_ranks, same_on_all
from tests.matrix import thorough

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
    """The serial step is rank 0's alone."""
    grid, alone = mesh.grid, None
    weights: dict[str, Tensor] = {}
    if torch.distributed.get_rank() == 0:
        alone, weights = step(seeded(make), partial(loss, mesh=None), None)
    expected = same_on_all(alone)
    model = parallelize(seeded(make), mesh, plan, options)
    got, found = step(model, partial(loss, mesh=mesh), mesh)
    if grid.readers > 1:
        torch.distributed.all_reduce(got, group=mesh.group("readers"))
    torch.testing.assert_close(got / grid.readers, expected, rtol=1e-10, atol=1e-10, msg=f"{grid} {make}")
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


def way(mesh: Mesh, number: int) -> str:
    """By heads where the four of a rank of x and y, or as few as it has, divide."""
    ways = ("gather", "ring", "heads") if 4 // mesh.size("model") % mesh.size("sequence") == 0 else ("gather", "ring")
    return ways[number % len(ways)]


class Checkpointing(nn.Module):
    """Computes its attention again in backward: as a module without children, or as a function of its own."""

    class Core(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def __init__(self, as_module: bool, reentrant: bool) -> None:
        super().__init__()
        self.table, self.qkv, self.head = nn.Embedding(64, 8), nn.Linear(8, 24), nn.Linear(8, 64)
        self.core = self.Core()
        self.as_module, self.again = as_module, partial(checkpoint, use_reentrant=reentrant)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        attention = self.core if self.as_module else self.core.forward
        seen = self.again(attention, q, k, v)
        return F.cross_entropy(self.head(x + seen.transpose(1, 2).flatten(2)).flatten(0, 1), targets.flatten())


def two_lengths(model: nn.Module, mesh: Mesh | None) -> Tensor:
    """Two batches of other lengths before one backward pass, which computes parts of both again."""
    pairs = [part(ids(tokens=tokens), mesh) for tokens in (TOKENS + 1, 9)]
    return sum(model(both[:, :-1], both[:, 1:]) for both in pairs) / 2


class Parts(nn.Module):
    """Has a part that computes its attention again, and that scripts call by itself, or again as a whole."""

    def __init__(self, again: Callable[..., Any]) -> None:
        super().__init__()
        self.part, self.head = Attending(again), nn.Linear(8, 64)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.part(ids)).flatten(0, 1), targets.flatten())


class Attending(nn.Module):
    def __init__(self, again: Callable[..., Any]) -> None:
        super().__init__()
        self.table, self.inner, self.again = nn.Embedding(64, 8), nn.Sequential(nn.Linear(8, 24), Attended()), again

    def forward(self, ids: Tensor) -> Tensor:
        return self.again(self.inner, self.table(ids))


class Attended(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (2, 4)).transpose(1, 2) for one in x.chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


def whole_behind(model: nn.Module, mesh: Mesh | None) -> Tensor:
    """A call on shares, and parts on whole sequences that are as long as a share, of which all is computed again."""
    batch, short = part(ids(tokens=TOKENS + 1), mesh), part(ids(tokens=(TOKENS + 3) // 4 * 2), mesh)
    loss = model(batch[:, :-1], batch[:, 1:])
    around = model.again(model.part.inner, model.part.table(short))  # type: ignore[operator, union-attr]
    return loss + model.part(short).square().sum() / BATCH + around.sin().sum() / BATCH  # type: ignore[operator]


def parts_again(again: Callable[..., Any], mesh: Mesh) -> None:
    def made() -> nn.Module:
        model: Any = Parts(again)
        model.again = again
        return model

    compare(made, whole_behind, mesh, None, Options())


def computed_again(mesh: Mesh) -> None:
    for reentrant in (False, True):
        parts_again(partial(checkpoint, use_reentrant=reentrant), mesh)
    for how, (as_module, reentrant) in enumerate([(True, True), (False, True), (False, False), (True, False)]):
        options = Options(attention=("gather", "ring", "heads", "auto")[how])
        compare(partial(Checkpointing, as_module, reentrant), two_lengths, mesh, None, options)
    compare(partial(Recomputed, GPTConfig(64, TOKENS, 2, 4, 16)), two_lengths, mesh, None, Options())


def gpts(world: int) -> None:
    # Of 8 ranks those that 4 do not have.
    chosen = [grid for grid in grids(world) if world == 4 or grid.sequence > 2 or grid.gx * grid.gy * grid.gdata == 4]
    for number, mesh in enumerate(meshes(chosen)):
        options = Options("replicated" if number % 3 == 2 else "scattered", attention=way(mesh, number))
        compare(small_gpt, inside, mesh, "auto" if mesh.size("model") > 1 else None, options)
        if mesh.grid.sequence == world:
            compare(small_gpt, outside, mesh, None, options)
            compare(partial(Recomputed, GPTConfig(64, TOKENS, 2, 4, 16)), inside, mesh, None, options)


@pytest.mark.parametrize("world", [4, thorough(8)])
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
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, **more}
    config = getattr(transformers, f"{kind}Config" if kind != "Gemma3" else "Gemma3TextConfig")(**sizes)
    names = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}
    model = getattr(transformers, names.get(kind, f"{kind}ForCausalLM"))(config)
    if "num_local_experts" in more:
        model.set_experts_implementation("eager")
    return model


MODELS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"num_hidden_layers": 1},
    "GPT2": {"n_layer": 1},
    "Mixtral": {
        "num_hidden_layers": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": None,
        "output_router_logits": True,
    },
    "Mistral": {"num_hidden_layers": 1, "sliding_window": 4},
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
    loss = model(**given, num_items_in_batch=count, use_cache=False).loss
    if how != "left":
        return loss
    del given["labels"]
    for kept in (2, torch.tensor([5, 3])):
        loss = loss + model(**given, logits_to_keep=kept, use_cache=False).logits.square().mean()
    return loss


def two_batches(model: nn.Module, mesh: Mesh | None, how: str) -> Tensor:
    """Two differently packed batches before one backward pass, which recomputes both."""
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model.train()
    return (of_hf(model, mesh, "packed") + of_hf(model, mesh, how)) / 2


def published(grid: Grid, kinds: tuple[str, ...], every: bool) -> None:
    """Each kind of model with one of its batches, in turn, or with every."""
    torch.Tensor.float = torch.Tensor.double  # type: ignore[assignment, method-assign]
    torch.set_default_dtype(torch.float64)
    mesh = Mesh(grid)
    split = mesh.size("model") > 1
    if grid.world == 2:
        longer_than_rotary(mesh)
        encoder = partial(hf, "Bert", num_hidden_layers=1, attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0)
        compare(encoder, partial(of_hf, how="packed"), mesh, None, Options())  # whose attention goes by no positions
    if not split:
        compare(partial(hf, "Llama"), partial(two_batches, how="left"), mesh, None, Options())
    for place, kind in enumerate(kinds):
        ways = ("plain", "packed", "left", "right") if kind == "Gemma3" else ("left", "packed")
        ways = ways[: 1 if kind == "GptOss" or split else None]  # whose stock masks do not look at positions
        for how in ways if every else ways[place % 2 :: 2] or ways:
            compare(
                partial(hf, kind, **MODELS[kind]), partial(of_hf, how=how), mesh, "auto" if split else None, Options()
            )


KINDS = tuple(MODELS)
SHARED, SPLIT = Grid(gz=4, sequence=4), Grid(gx=2, gz=2, sequence=2)


@pytest.mark.parametrize(
    ("grid", "kinds", "every"),
    [
        (Grid(gz=2, sequence=2), KINDS, False),
        (SPLIT, ("GPT2",), True),
        thorough(SHARED, KINDS, True),
        thorough(SPLIT, ("Llama", "GPT2", "Gemma3"), True),
    ],
    ids=["shared", "split", "every shared", "every split"],
)
def test_models_of_hf(grid: Grid, kinds: tuple[str, ...], every: bool) -> None:
    run_ranks(published, grid.world, grid, kinds, every)


class Mixer(nn.Module):
    """Looks across tokens in a way that nobody sees."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.table, self.head = how, nn.Embedding(64, 8), nn.Linear(8, 64)
        self.mixed = nn.Conv1d(8, 8, 3, padding=2) if how == "conv" else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        if self.how == "conv":
            x = self.mixed(x.transpose(1, 2))[..., : ids.shape[1]].transpose(1, 2)
        elif self.how == "cumsum":
            x = self.mixed(x.cumsum(1))
        elif self.how == "mask":
            seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=seen)
        return self.head(x)


REFUSED = {
    "conv": "the output of mixed \\(Conv1d\\) differs",
    "cumsum": "the output of mixed \\(Identity\\) differs",
    "mask": "is given a mask of shape \\(2, 2\\)|is given a mask of shape",
}


def refused_later(mesh: Mesh) -> None:
    """OPT counts places in the mask, which goes wrong once padding is in front; and what was refused is refused again."""
    sizes = {
        "hidden_size": 32,
        "ffn_dim": 48,
        "word_embed_proj_dim": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    from transformers import OPTConfig, OPTForCausalLM

    config = OPTConfig(vocab_size=64, max_position_embeddings=300, dropout=0.0, attention_dropout=0.0, **sizes)
    torch.manual_seed(3)
    model = parallelize(OPTForCausalLM(config), mesh)
    batch, mask = ids(tokens=200), torch.ones(BATCH, 200, dtype=torch.int64)
    mask[1, -3:] = 0
    assert model(batch, attention_mask=mask, labels=batch).loss.isfinite()
    mask[0, :30] = 0
    for _ in range(2):
        with pytest.raises(ValueError, match="the output of model.decoder.embed_positions .* differs"):
            model(batch, attention_mask=mask, labels=batch)
    places = torch.arange(200).expand(BATCH, -1)
    assert model(batch, attention_mask=mask, position_ids=places, labels=batch).loss.isfinite()


class Losing(Mixer):
    """Gives a loss alone, which hardly tells the places of one share from another's while nothing is learned."""

    def __init__(self) -> None:
        super().__init__("places")
        self.places = nn.Parameter(0.01 * torch.randn(64, 8))

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.mixed(self.table(ids) + self.places[: ids.shape[1]]))
        return F.cross_entropy(0.01 * logits.flatten(0, 1), ids.flatten())


def packed_beside_a_cache(mesh: Mesh) -> None:
    """HF's models do not look at positions beside a cache, which they make unless they are told."""
    model, places = parallelize(hf("Llama"), mesh), torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]]).expand(BATCH, -1)
    with pytest.raises(ValueError, match="position_ids pack several sequences in one, and config.use_cache is true"):
        model(ids(tokens=8), position_ids=places)
    assert model(ids(tokens=8), position_ids=places, use_cache=False).logits.isfinite().all()
    model.config.use_cache = False
    assert model(ids(tokens=8), position_ids=places).logits.isfinite().all()


class Own(Mixer):
    """A model with a loss of its own, which a model that is not trained yet hardly changes by looking at other tokens."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], beside: bool = False) -> None:
        super().__init__("places")
        self.loss, self.beside = loss, beside

    def forward(self, ids: Tensor) -> Any:
        logits = 0.01 * self.head(self.mixed(self.table(ids)))
        return (self.loss(logits, ids), logits) if self.beside else self.loss(logits, ids)


def shifted(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def moved_up(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), F.pad(ids[:, 1:], (0, 1), value=-100))


def by_hand(logits: Tensor, ids: Tensor) -> Tensor:
    return -logits.log_softmax(-1).gather(-1, ids[..., None]).mean()


def placed(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def by_place(logits: Tensor, ids: Tensor) -> Tensor:
    """All samples' first tokens, then their second ones: right as long as shares are not padded."""
    return F.cross_entropy(logits.transpose(0, 1).flatten(0, 1), ids.t().flatten())


def in_half(logits: Tensor, ids: Tensor, reduction: str = "mean") -> Tensor:
    """Of 16 bits, which have no number as large as the sum over tokens."""
    return F.cross_entropy((1e4 * logits.flatten(0, 1)).half(), ids.flatten(), reduction=reduction)


def own_losses(mesh: Mesh) -> None:
    """Losses that look beyond a share, or not beyond it; and one of what a model gives beside its loss."""
    for loss, why in (
        (shifted, "shifts the targets"),
        (moved_up, "shifts the targets"),
        (by_hand, "of each rank's own tokens"),
    ):
        with pytest.raises(ValueError, match=f"Own cannot share sequences over 2 ranks of z: it .*{why}"):
            parallelize(seeded(partial(Own, loss)), mesh)(ids())
    model, wanted = parallelize(seeded(partial(Own, by_place)), mesh), seeded(partial(Own, by_place))(ids(tokens=12))
    torch.testing.assert_close(model(ids(tokens=12)), wanted, rtol=1e-10, atol=1e-10)
    with pytest.raises(
        ValueError,
        match="Own cannot share sequences over 2 ranks of z: it .*lie token by token.* a multiple of 4 tokens",
    ):
        model(ids())
    half = parallelize(seeded(partial(Own, in_half)), mesh)(ids(tokens=200))
    rows = seeded(partial(Own, partial(in_half, reduction="none")))(ids(tokens=200))
    torch.testing.assert_close(half, rows.double().mean().half())
    assert rows.double().sum() > torch.finfo(torch.float16).max
    compare(Penalised, with_penalty, mesh, None, Options())
    value, logits = parallelize(seeded(partial(Own, placed, True)), mesh)(ids())
    with pytest.raises(ValueError, match="a loss is computed of what the model gives beside its own loss"):
        (value + logits.square().mean()).backward()


class Penalised(Mixer):
    """Gives logits, and a penalty beside them, as mixtures do."""

    def __init__(self) -> None:
        super().__init__("places")

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.mixed(self.table(ids))), self.head.weight.square().mean()


def with_penalty(model: nn.Module, mesh: Mesh | None) -> Tensor:
    batch = part(ids(), mesh)
    logits, penalty = model(batch)
    return placed(logits, batch) + penalty


class Both(Mixer):
    """Gives logits, or a loss of its own where it is given targets."""

    def __init__(self) -> None:
        super().__init__("places")

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        logits = self.head(self.mixed(self.table(ids)))
        return logits if targets is None else by_hand(logits, targets)


class Counting(Mixer):
    """Counts its calls in a buffer, in place and anew, and in an attribute."""

    def __init__(self) -> None:
        super().__init__("places")
        self.calls = 0
        self.register_buffer("in_place", torch.zeros(()))
        self.register_buffer("anew", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        self.in_place += 1
        self.anew = self.anew + 1
        return self.head(self.mixed(self.table(ids)))


def counts(mesh: Mesh) -> None:
    """The passes that look at the first batch are none of the run's."""
    model: Any = parallelize(seeded(Counting), mesh)
    assert model(ids()).shape[1] == TOKENS and model.training
    assert (model.calls, model.in_place.item(), model.anew.item()) == (1, 1, 1)


class Recalling(Mixer):
    """Attends to its tokens, and to a memory."""

    def __init__(self) -> None:
        super().__init__("places")

    def forward(self, ids: Tensor, memory: Tensor) -> Tensor:
        x = self.table(ids)
        x = x + F.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.head(x + F.scaled_dot_product_attention(x, memory, memory))


class Placed(Mixer):
    """Counts the places of its tokens where it is not given them, in training once more."""

    def __init__(self) -> None:
        super().__init__("places")
        self.places = nn.Embedding(64, 8)

    def forward(self, ids: Tensor, places: Tensor | None = None) -> Tensor:
        where = torch.arange(ids.shape[1]) if places is None else places
        more = torch.arange(ids.shape[1])[:, None] if self.training else 0
        return self.head(self.mixed(self.table(ids) + self.places(where) + more))


def in_turns(mesh: Mesh) -> None:
    """Calls that ask for the places of tokens, and others that do not."""
    model, alone = parallelize(seeded(Placed), mesh), seeded(Placed)
    places = torch.arange(TOKENS).expand(BATCH, -1)
    for training in (True, False, True):
        for given in ((ids(),), (ids(), places), (ids(),)):
            found, wanted = (one.train(training)(*given) for one in (model, alone))
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def another_call(mesh: Mesh) -> None:
    """Arguments that a later batch has first; and a memory that is as long as a share of a later batch."""
    model = parallelize(seeded(Both), mesh)
    assert model(ids()).shape[1] == TOKENS
    for _ in range(2):
        with pytest.raises(ValueError, match="Both cannot share sequences over 2 ranks of z: it"):
            model(ids(), ids())
    model, memory = parallelize(seeded(Recalling), mesh), torch.randn(BATCH, 6, 8, dtype=torch.float64)
    for tokens in (TOKENS, 20):
        wanted = seeded(Recalling)(ids(tokens=tokens), memory)
        torch.testing.assert_close(model(ids(tokens=tokens), memory), wanted, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="attends to 6 keys that are not its tokens"):
        model(ids(tokens=12), memory)


class Alike(nn.Module):
    """Attention of two heads that see the same."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(4, 24), nn.Linear(8, 4)
        self.seen: Any = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        self.seen = F.scaled_dot_product_attention(q, 0 * k, 0 * v + 1, dropout_p=0.5)
        return self.proj(self.seen.transpose(1, 2).flatten(2))


def heads_dropped() -> tuple[int, list[float]]:
    """This rank's place on x, and the part of each query's probabilities that its head has kept."""
    mesh = Mesh(Grid(gx=2, gz=2, sequence=2))
    plan = {"qkv": {"kind": "normal", "parts": 3, "heads": 2}, "proj": "transposed"}
    model = parallelize(seeded(Alike), mesh, plan, Options("replicated", verify_plan=False))
    torch.manual_seed(mesh.rank("sequence"))
    model(torch.randn(1, 16, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    return mesh.rank("x"), model.seen.detach()[0, 0, :, 0].tolist()


def test_heads_of_other_ranks_drop_others() -> None:
    found = run_ranks(heads_dropped, 4)
    assert len({tuple(kept) for _, kept in found}) == 4
    assert all(0 < sum(kept) / len(kept) < 2 for _, kept in found)


def longer_than_rotary(mesh: Mesh) -> None:
    """Rotary positions that go by how long sequences are, of which a rank has the last places, or has them not."""
    short, long = [1.0] * 4, [1.5, 2.0, 2.5, 3.0]
    for rope in (
        {"rope_type": "dynamic", "factor": 2.0},
        {
            "rope_type": "longrope",
            "factor": 2.0,
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": 12,
        },
    ):
        make = partial(
            hf, "Llama", num_hidden_layers=1, max_position_embeddings=8, rope_parameters={"rope_theta": 1e4, **rope}
        )
        compare(make, partial(of_hf, how="plain"), mesh, None, Options())


def routed_without_labels(mesh: Mesh) -> None:
    """A loss of routers alone is none that makes a model's logits anything but those of all tokens."""
    model = parallelize(hf("Mixtral", **MODELS["Mixtral"]), mesh)
    assert model(ids(), use_cache=False).logits.shape[1] == TOKENS


class Around(nn.Module):
    """Calls a model's forward, and beside it parts of the model, as PEFT does that generates by the model inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = hf("Llama", num_hidden_layers=1).eval()

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.inner(input_ids, use_cache=False).logits

    def beside(self) -> list[Tensor]:
        """Also of as many tokens as a rank's share in the forward before."""
        shares = ids(tokens=(TOKENS + 1) // 2)
        write = partial(self.inner.generate, shares, max_new_tokens=2, do_sample=False, pad_token_id=0)
        made = torch.cat([write(), write(cache_implementation="static")])
        mask = torch.ones_like(shares).index_fill(1, torch.tensor([0, 1]), 0)
        return [made, self.inner.model(shares, attention_mask=mask).last_hidden_state.detach()]


def called_beside_its_forward(mesh: Mesh) -> None:
    """Parts of a model that are called by themselves are given whole sequences, before and after its forward."""
    wanted = seeded(Around).beside()
    model = parallelize(seeded(Around), mesh)
    for _ in range(2):
        torch.testing.assert_close(model.beside(), wanted)
        assert model(ids()).shape[1] == TOKENS


class Turned(nn.Module):
    """Its queries and keys are float32 under autocast, as rotary positions make them, and its values are not."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.qkv, self.head = nn.Embedding(64, 16), nn.Linear(16, 48), nn.Linear(16, 64)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        q, k, v = (one.unflatten(-1, (2, 8)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        turned = torch.linspace(0.5, 1.5, 8)
        seen = F.scaled_dot_product_attention(q * turned, k * turned, v, is_causal=True)
        return self.head(x + seen.transpose(1, 2).flatten(2))


def under_autocast(mesh: Mesh) -> None:
    for how in ("gather", "ring", "heads"):
        torch.manual_seed(3)
        alone = Turned()
        model = parallelize(copy.deepcopy(alone), mesh, options=Options(attention=how))
        made = []
        for one in (alone, model):
            with torch.autocast("cpu", torch.bfloat16):
                made.append(one(ids()))
            made[-1].float().square().mean().backward()
        assert made[0].dtype == made[1].dtype == torch.bfloat16
        torch.testing.assert_close(made[1], made[0], rtol=0.02, atol=0.02)
        sync_gradients(model.parameters(), mesh)
        wanted = alone.qkv.bias.grad
        assert wanted is not None
        torch.testing.assert_close(model.qkv.bias.grad, wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))


def refusals() -> None:
    mesh = Mesh(Grid(gz=2, sequence=2))
    computed_again(mesh)
    under_autocast(mesh)
    called_beside_its_forward(mesh)
    own_losses(mesh)
    another_call(mesh)
    in_turns(mesh)
    counts(mesh)
    routed_without_labels(mesh)
    refused_later(mesh)
    packed_beside_a_cache(mesh)
    with pytest.raises(
        ValueError, match="Losing cannot share sequences over 2 ranks of z: it .*the output of mixed .Identity. differs"
    ):
        parallelize(seeded(Losing), mesh)(ids())
    for how, why in REFUSED.items():
        model = parallelize(seeded(partial(Mixer, how)), mesh)
        with pytest.raises(ValueError, match=f"Mixer cannot share sequences over 2 ranks of z: it .*({why})"):
            model(ids())
    model = parallelize(seeded(small_gpt), mesh)
    with pytest.raises(ValueError, match="argument ids is not the same on the 2 ranks that share sequences"):
        model(ids() + mesh.rank("sequence"))
    with pytest.raises(ValueError, match="sequence = 3 does not divide gz = 4"):
        Grid(gz=4, sequence=3)


def test_what_looks_across_tokens_unseen_is_refused() -> None:
    run_ranks(refusals, 2)


def kept(sequence: int) -> int:
    """Bytes that a forward pass keeps for backward, on one of `sequence` ranks."""
    mesh = Mesh(Grid(gz=sequence, sequence=sequence)) if sequence > 1 else None
    model = GPT(GPTConfig(64, 256, 2, 4, 16))
    if mesh is not None:
        parallelize(model, mesh, options=Options(verify_plan=False))
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights and tensor.requires_grad:
            found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    batch = ids(tokens=256)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        loss = model(batch, batch)
        total = sum(found.values())
    assert loss.isfinite()
    return total


def test_activations_fall_with_the_ranks_that_share() -> None:
    assert max(run_ranks(kept, 4, 4)) < 0.3 * kept(1)


def doubled(model: nn.Module) -> nn.Module:
    """Gives a model a forward of its own, which calls its class's."""
    model.forward = MethodType(lambda self, *given: 2 * GPT.forward(self, *given), model)  # type: ignore[method-assign]
    return model


@torch.no_grad()
def copied() -> list[float]:
    """Errors of a copy's outputs behind a change of the first model's weights."""
    mesh, errors = Mesh(Grid(gz=2, sequence=2)), []
    for own in (lambda model: model, doubled):
        serial, model = own(seeded(small_gpt)), own(seeded(small_gpt))
        again = copy.deepcopy(parallelize(model, mesh, {}))
        for parameter in model.parameters():
            parameter.mul_(0.5)
        errors.append(float((again(ids()) - serial(ids())).abs().max()))
    return errors


def test_a_copy_computes_with_its_own_weights() -> None:
    assert all(error < 1e-10 for errors in run_ranks(copied, 2) for error in errors)
