"""Plans, meta models, memory, and layers against their serial references."""

from __future__ import annotations

import copy
import functools
import itertools
import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import axonn_tp
from axonn_plugins.config import TensorParallel
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, LayerPlan, Mesh, Options, layout_of, place
from axonn_tp.comm.unplanned_gradients import differing_axes, sketch
from axonn_tp.compiled import layers as compiled
from tests.axonn_tp.test_grids import gpt_plan, whole
from tests.distributed import run_ranks
from tests.matrix import thorough

SMALL = GPTConfig(vocabulary=50, context=6, layers=2, heads=4, hidden=24)


def meta_equals_serial(tied: bool) -> tuple[float, float]:
    """Largest difference of the weights, and the most full-size elements a rank held at once over one layer."""
    config = GPTConfig(50, 6, 2, 4, 24, tied)
    torch.manual_seed(9)
    serial = GPT(config)
    with torch.device("meta"):
        model = GPT(config)
    mesh = Mesh.create(2, 1, 2)
    held = []
    largest_layer = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in serial.modules())

    def watch(module: nn.Module) -> None:
        original = module.reset_parameters

        def reset() -> None:
            real = {id(p): p for p in model.parameters() if not p.is_meta}
            held.append(sum(p.numel() for p in real.values() if not hasattr(p, "axonn_layout")))
            original()

        module.reset_parameters = reset

    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            watch(module)
    before = [id(p) for p in model.parameters()]
    torch.manual_seed(9)
    axonn_tp.parallelize(model, mesh, gpt_plan(config.heads))
    assert [id(p) for p in model.parameters()] == before
    pairs = zip(serial.parameters(), model.parameters(), strict=True)
    difference = max((whole(p, p.data, mesh) - expected).abs().max().item() for expected, p in pairs)
    return difference, max(held) / largest_layer


@pytest.mark.parametrize("tied", [thorough(False), True])
def test_a_meta_model_is_built_layer_by_layer(tied: bool) -> None:
    for difference, held in run_ranks(meta_equals_serial, 4, tied):
        assert difference == 0
        assert held <= 1


def memory_is_shared() -> int:
    mesh = Mesh.create(2, 2, 2)
    model = axonn_tp.parallelize(GPT(SMALL), mesh, gpt_plan(4))
    for parameter in model.parameters():
        assert (
            parameter.numel()
            == layout_of(parameter).local_numel(mesh.grid)
            == parameter.untyped_storage().nbytes() // 4
        )
    return sum(p.numel() for p in model.parameters() if p.dim() == 1 and layout_of(p).over_z)


def test_a_rank_stores_an_eighth() -> None:
    matrices = sum(p.numel() for p in GPT(SMALL).parameters() if p.dim() == 2)
    padding_of_the_head = 2 * SMALL.hidden
    assert set(run_ranks(memory_is_shared, 8)) == {(matrices + padding_of_the_head) // 8}


def losses_and_norms() -> dict[str, float]:
    """Each layer against its serial reference, on gx=2, gy=2, with padding, ignored targets and large offsets."""
    mesh = Mesh.create(2, 2, 1)
    x, y = mesh.coordinates["x"], mesh.coordinates["y"]
    found = {}
    torch.manual_seed(4)
    rows = (torch.randn(5, 12, dtype=torch.float64) * 3 + 1e4).requires_grad_()
    serial = nn.LayerNorm(12, dtype=torch.float64)
    nn.init.normal_(serial.weight)
    nn.init.normal_(serial.bias)
    ours = copy.deepcopy(serial)
    axonn_tp.LayerNorm.convert(ours, mesh)
    mine = rows.detach().chunk(2, -1)[y].clone().requires_grad_()
    outward = torch.randn(5, 12, dtype=torch.float64)
    expected, got = serial(rows), ours(mine)
    (expected * outward).sum().backward()
    (got * outward.chunk(2, -1)[y]).sum().backward()
    found["norm"] = (got - expected.chunk(2, -1)[y]).abs().max().item()
    found["norm gradient"] = (mine.grad - rows.grad.chunk(2, -1)[y]).abs().max().item()
    found["norm weight"] = (ours.weight.grad - serial.weight.grad.chunk(2)[y]).abs().max().item()
    for reduction in ("mean", "sum", "none"):
        logits = torch.randn(7, 9, dtype=torch.float64).requires_grad_()
        targets = torch.tensor([0, 8, -100, 4, 5, -100, 3])
        serial_loss = nn.CrossEntropyLoss(reduction=reduction)
        split_loss = nn.CrossEntropyLoss(reduction=reduction)
        axonn_tp.CrossEntropyLoss.convert(split_loss, mesh)
        padded = F.pad(logits.detach(), (0, 1), value=float("-inf")).chunk(2, -1)[x].clone().requires_grad_()
        weights = torch.randn(7, dtype=torch.float64)
        expected, got = serial_loss(logits, targets), split_loss(padded, targets)
        found[f"loss {reduction}"] = (got - expected).abs().max().item()
        (expected * weights).sum().backward()
        (got * weights).sum().backward()
        gradient = F.pad(logits.grad, (0, 1)).chunk(2, -1)[x]
        found[f"loss gradient {reduction}"] = (padded.grad - gradient).abs().max().item()
    table = nn.Embedding(9, 6, padding_idx=7, dtype=torch.float64)
    ids = torch.randint(9, (4, 5))
    ids[0, 0] = 7
    split_table = copy.deepcopy(table)
    axonn_tp.Embedding.convert(split_table, mesh)
    outward = torch.randn(4, 5, 6, dtype=torch.float64)
    (table(ids) * outward).sum().backward()
    looked_up = split_table(ids)
    (looked_up * outward.chunk(2, -1)[y]).sum().backward()
    found["embedding"] = (looked_up - table(ids).chunk(2, -1)[y]).abs().max().item()
    found["embedding gradient"] = (
        (whole(split_table.weight, split_table.weight.grad, mesh) - table.weight.grad).abs().max().item()
    )
    compiled_table = copy.deepcopy(table)
    compiled.Embedding.convert(compiled_table, mesh)
    for unknown, each in itertools.product((-1, 9, 10), (table, split_table, compiled_table)):
        with pytest.raises((IndexError, RuntimeError), match="index out of range|not one of the embedding's 9 rows"):
            each(torch.tensor([[0, unknown]]))
    return found


def test_layers_equal_their_serial_references() -> None:
    for found in run_ranks(losses_and_norms, 4):
        assert max(found.values()) < 1e-10, found


class Unnamed(GPT):
    """Parameters that the plan does not name: norms in the stream, a norm of query heads, a scale of the loss."""

    def __init__(self) -> None:
        super().__init__(SMALL)
        self.scale = nn.Linear(1, 1, bias=False)
        for block in self.blocks:
            block.attention.heads_norm = nn.RMSNorm(SMALL.hidden // SMALL.heads)
            block.attention.forward = functools.partial(self._attend, block.attention)

    @staticmethod
    def _attend(attention: nn.Module, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, 6)).transpose(1, 2) for t in attention.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(attention.heads_norm(q), k, v, is_causal=True)
        return attention.proj(attended.transpose(1, 2).flatten(2))

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(ids, targets) * self.scale(torch.ones(1, dtype=self.scale.weight.dtype)).square()


def unnamed_parameters(turns: int) -> list:
    from tests.axonn_tp.test_grids import train_one_step

    torch.manual_seed(8)
    ids = torch.randint(50, (4, 7))
    found = []
    for grid in list(axonn_tp.factorisations(dist.get_world_size()))[1 % turns :: turns]:
        plan = gpt_plan(SMALL.heads)
        if grid.gy == 1:
            del plan["*.ln?"]
        run = lambda model, ids: model(ids[:, :-1], ids[:, 1:])  # noqa: E731
        found.append((grid, train_one_step(Unnamed, plan, run, (ids,), Mesh(grid))))
    return found


@pytest.mark.parametrize("turns", [3, thorough(1)])
def test_gradients_of_parameters_that_no_plan_names(turns: int) -> None:
    """On each grid of four ranks, or on every third: each axis, and two together."""
    for found in run_ranks(unnamed_parameters, 4, turns):
        for grid, errors in found:
            assert max(errors.values()) < 1e-10, (grid, errors)


def test_gradients_of_shares_are_told_from_replicas() -> None:
    """Of 1,200 pairs of small ones no two are taken for the same, whatever sum of their elements is the same."""
    generator = torch.Generator().manual_seed(3)
    for elements in (2, 8, 64, 1000):
        for _ in range(300):
            first, other = torch.randn(2, elements, generator=generator, dtype=torch.float64)
            noisy = first * (1 + 1e-3 * torch.randn(elements, generator=generator, dtype=torch.float64))
            here, there, again = (sketch(gradient) for gradient in (first, other, noisy))
            assert differing_axes(torch.stack([here, there, again, there]), 2) == ("x",)
            assert differing_axes(torch.stack([here, again, there, there]), 2) == ("y",)
            assert differing_axes(torch.stack([here, again]), 2) == ()
    large = torch.randn(2**20 + 77, generator=generator)
    assert 0.5 < sketch(large).norm() / large.norm() < 1.5
    rows = torch.eye(4).mul(3)
    assert torch.equal(sketch(rows.to_sparse()), sketch(rows))  # as of F.embedding(..., sparse=True)


class Mlp(nn.Module):
    """A residual block over whole features whose pair a plan names."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(12), nn.Linear(12, 16), nn.Linear(16, 12)
        self.out = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.down(torch.tanh(self.up(self.norm(x))))).square().mean()


def named_pair(turns: int) -> list:
    from tests.axonn_tp.test_grids import train_one_step

    plan = {"up": LayerPlan("normal"), "down": LayerPlan("transposed")}
    batch = torch.randn(4, 5, 12, dtype=torch.float64)
    return [
        train_one_step(Mlp, plan, lambda model, x: model(x), (batch,), Mesh(grid))
        for grid in list(axonn_tp.factorisations(dist.get_world_size()))[1 % turns :: turns]
    ]


@pytest.mark.parametrize("turns", [3, thorough(1)])
def test_a_named_pair_in_a_model_with_whole_features(turns: int) -> None:
    torch.manual_seed(2)
    for found in run_ranks(named_pair, 4, turns):
        assert max(max(errors.values()) for errors in found) < 1e-10


@pytest.mark.parametrize(
    ("plan", "grid", "words"),
    [
        ({"blocks.*.qvk": LayerPlan("normal")}, Grid(), "matches no layer"),
        ({"blocks.0": LayerPlan("normal")}, Grid(), "blocks.0 is a Block, and normal takes a Linear"),
        ({"head": LayerPlan("heads")}, Grid(), "'heads' is not a kind"),
        ({"*.ln1": LayerPlan("norm")}, Grid(), "norm needs features split over y"),
        ({"loss": LayerPlan("loss")}, Grid(), "loss needs logits split over x"),
        (
            {"*.qkv": LayerPlan("normal", 3, 4)},
            Grid(gx=3),
            "layer blocks.0.attention.qkv: 4 heads do not divide by gx = 3",
        ),
        ({"*.fc1": LayerPlan("normal")}, Grid(gy=5), "layer blocks.0.fc1: 24 input features do not divide by gy = 5"),
        ({"tokens": LayerPlan("embedding")}, Grid(gy=5), "layer tokens: 24 features do not divide by gy = 5"),
    ],
)
def test_plans_that_cannot_be(plan: dict, grid: Grid, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        place(GPT(SMALL), grid, plan)


class _Doubled:
    def forward(self, *given: Any) -> Any:
        return super().forward(*given) * 2  # type: ignore[misc]


class _Cast(nn.LayerNorm):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input.float()).to(input)


@pytest.mark.parametrize(
    ("kind", "sizes", "named"),
    [
        (nn.Linear, (8, 8), "normal"),
        (nn.Embedding, (9, 8), "embedding"),
        (nn.LayerNorm, (8,), "norm"),
        (nn.GroupNorm, (2, 8), "group_norm"),
        (nn.Conv2d, (8, 8, 3), "self_contained"),
        (nn.CrossEntropyLoss, (), "loss"),
    ],
)
def test_a_layer_with_a_forward_of_its_own_is_refused(kind: Any, sizes: tuple[int, ...], named: str) -> None:
    other = {
        "table": nn.Embedding(9, 8),
        "head": nn.Linear(8, 8),
        "up": nn.Linear(8, 8),
    }
    plan = {"table": "embedding", "head": "head", "up": "normal", "own": named}
    for own, refused in ((type("Own", (_Doubled, kind), {}), True), (kind, False)):
        model = nn.ModuleDict({**other, "own": own(*sizes)})
        if refused:
            with pytest.raises(ValueError, match="layer own: Own has a forward of its own"):
                place(model, Grid(2), plan, Options("replicated"))
        else:
            assert any(placement.name == "own" for placement in place(model, Grid(2), plan, Options("replicated")))
    assert place(nn.ModuleDict({**other, "own": _Cast(8)}), Grid(2), {**plan, "own": "norm"})


def test_layers_without_a_size_are_refused() -> None:
    for split in (place, axonn_tp.auto_plan):
        with pytest.raises(ValueError, match="1.weight has no size yet.* call the model once"):
            split(nn.Sequential(nn.ReLU(), nn.LazyLinear(4)), Grid(gx=2))  # type: ignore[operator]


FORMS: dict[str, Any] = {
    "blocks.*.qkv": {"kind": "normal", "parts": 3, "heads": 4, "reads": "x"},
    "*.proj": "transposed",
    "*.fc1": {"kind": "normal", "counts": []},
    "*.fc2": LayerPlan("transposed"),
    "head": {"kind": "head", "heads": None},
    "tokens": {"kind": "embedding", "whole_tokens": True},
    "positions": "embedding",
    "*.ln?": "norm",
    "norm": "norm",
    "loss": "replicated",
}


def test_a_plan_has_the_forms_of_the_block() -> None:
    """Those that the block's JSON has, read by its own validator, become the same placements."""
    forms = {**FORMS, "*.fc2": "transposed"}
    block = TensorParallel.model_validate({"plan": json.loads(json.dumps(forms))})
    engine = pytest.importorskip("axonn_plugins.hosts.deepspeed.engine")
    plans = (FORMS, forms, engine.layer_plans(block))
    found = [[vars(placement) for placement in place(GPT(SMALL), Grid(2, 2), plan)] for plan in plans]
    for placements in found:
        for placement in placements:
            placement.pop("module")
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ("heads", "kind = 'heads' is not one of normal, transposed"),
        ({"kind": "normal", "part": 3}, "'part' is not a key of a layer's plan; the nearest is 'parts'"),
        ({"kind": "normal", "parts": 0}, "parts = 0 is not an integer of at least 1"),
        ({"kind": "normal", "heads": True}, "heads = True is not an integer of at least 1 or None"),
        ({"kind": "normal", "counts": "heads"}, "counts = 'heads' is not a list of names"),
        ({"kind": ["normal"]}, r"kind = \['normal'\] is not one of"),
        ({"parts": 3}, "does not say what the layer becomes"),
        (None, "None does not say what the layer becomes"),
    ],
)
def test_forms_that_are_none(layer: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words) as refused:
        place(GPT(SMALL), Grid(), {"*.qkv": layer})
    assert str(refused.value).startswith("plan '*.qkv': ") and "\n" not in str(refused.value)


class Twice(nn.Module):
    """One table under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.head = nn.Embedding(10, 8), nn.Linear(8, 10)
        self.target = self.source


@pytest.mark.parametrize("plan", [{"source": "embedding"}, {"target": "embedding"}, {"[st]*": "embedding"}])
def test_a_module_of_two_names_is_one(plan: Any) -> None:
    placements = place(Twice(), Grid(2), {**plan, "head": "head"})
    assert [(placement.name, placement.kind) for placement in placements] == [("source", "embedding"), ("head", "head")]


def test_a_shared_weight_is_left_alone_or_split_with_both() -> None:
    tied = GPT(GPTConfig(50, 6, 1, 4, 24, tied=True))
    assert "head" not in [placement.name for placement in place(tied, Grid(gx=2), {})]
    with pytest.raises(ValueError, match="head and tokens share a weight"):
        place(tied, Grid(gx=2), {"head": LayerPlan("head")})
    kinds = {p.name: p.kind for p in place(tied, Grid(gx=2), gpt_plan(4))}
    assert (kinds["tokens"], kinds["head"]) == ("embedding", "head")


def test_attention_of_torch_keeps_its_projection() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 16)
    assert [placement.name for placement in place(model, Grid(gx=2), {})] == ["linear1", "linear2"]


class Attention(nn.Module):
    """A fused q, k, v whose heads are read from the tensor's width, so that a plan without parts keeps shapes valid."""

    def __init__(self, between: str) -> None:
        super().__init__()
        self.between, self.qkv, self.proj = between, nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (-1, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        if self.between == "softmax":
            attended = attended.softmax(-1)
        if self.between == "norm":
            attended = F.rms_norm(attended, attended.shape[-1:])
        return self.proj(F.dropout(attended, 0.5, self.training))


def plans_verified() -> list:
    mesh = Mesh.create(2, 2, 1)
    found = []
    right = {"qkv": LayerPlan("normal", 3, 4), "proj": LayerPlan("transposed")}
    wrong = {"qkv": LayerPlan("normal"), "proj": LayerPlan("transposed")}
    for plan, between in ((right, "nothing"), (wrong, "nothing"), (right, "softmax"), (right, "norm")):
        torch.manual_seed(1)
        model = axonn_tp.parallelize(Attention(between), mesh, plan)
        rows = torch.randn(2, 5, 16)
        before = torch.get_rng_state()
        found.append(axonn_tp.first_difference(model, lambda model=model, rows=rows: model(rows), mesh, 1e-3))
        assert torch.equal(torch.get_rng_state(), before) and model.training and isinstance(model.proj, axonn_tp.Linear)
    torch.manual_seed(2)
    gpt = axonn_tp.parallelize(GPT(GPTConfig(50, 6, 2, 4, 24)), mesh, gpt_plan(4))
    ids = torch.randint(50, (2, 6))
    found.append(axonn_tp.first_difference(gpt, lambda: gpt(ids, ids), mesh, 1e-3))
    return found


def test_a_plan_that_computes_something_else_is_found() -> None:
    for right, *wrong, gpt in run_ranks(plans_verified, 4):
        assert right is None and gpt is None
        assert [name for name, _ in wrong] == ["proj"] * 3


def reads_and_double_backward(turns: int) -> float:
    """A weight read in forward, tied by hand, a gradient penalty, and a step whose own gradient is taken, against the serial model."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(7, 6), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = torch.tanh(self.a(x))
            penalty = (self.b.weight @ self.b.weight.t()).square().sum()
            return self.b(hidden).square().mean() + F.linear(hidden, self.a.weight.t()).square().mean() + 0.1 * penalty

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        value = model(x)
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        slopes = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        ahead = {name: p - 0.1 * s for (name, p), s in zip(model.named_parameters(), slopes, strict=True)}
        return value + slope.square().sum(-1).mean() * x.shape[0] + torch.func.functional_call(model, ahead, (x,))

    from tests.axonn_tp.test_grids import train_one_step

    worst = 0.0
    for grid in list(axonn_tp.factorisations(dist.get_world_size()))[2 % turns :: turns]:
        torch.manual_seed(3)
        batch = torch.randn(4, 7, dtype=torch.float64)
        if grid.batch == 1:
            worst = max(worst, *train_one_step(Reader, {}, loss, (batch,), Mesh(grid)).values())
        worst = max(worst, *train_one_step(Reader, {}, lambda model, x: model(x), (batch,), Mesh(grid)).values())
    return worst


@pytest.mark.parametrize("turns", [3, thorough(1)])
def test_weights_read_in_forward_and_gradients_of_gradients(turns: int) -> None:
    assert max(run_ranks(reads_and_double_backward, 4, turns)) < 1e-10


def whole_state() -> bool:
    mesh = Mesh.create(2, 1, 2)
    torch.manual_seed(6)
    serial = GPT(SMALL)
    model = axonn_tp.parallelize(copy.deepcopy(serial), mesh, gpt_plan(4))
    again = axonn_tp.parallelize(copy.deepcopy(model), mesh, {})
    full = axonn_tp.full_state_dict(model, mesh)
    pairs = zip(model.parameters(), again.parameters(), strict=True)
    assert all(torch.equal(a, b) and layout_of(a) == layout_of(b) for a, b in pairs)
    same = all(torch.equal(full[name], value) for name, value in serial.state_dict().items()) if full else True
    return same and (bool(full) == (dist.get_rank() == 0)) and isinstance(again.head, axonn_tp.Linear)


def test_the_serial_state_comes_back_whole() -> None:
    assert all(run_ranks(whole_state, 4))


class Attending(nn.Module):
    """Attention whose reshapes go by an attribute that counts heads."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = 4, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def copies_that_count() -> list[float]:
    """Errors of outputs: of a split model, of a copy while the model is there, and of a copy of that."""
    torch.manual_seed(7)
    serial = nn.Sequential(Attending(), nn.Linear(8, 3)).double()
    plan = {"0.qkv": LayerPlan("normal", parts=3, heads=4, counts=("heads",)), "0.proj": "transposed"}
    model = axonn_tp.parallelize(copy.deepcopy(serial), Mesh.create(2), plan)
    once = copy.deepcopy(model)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    return [float((each(x) - serial(x)).abs().max()) for each in (model, once, copy.deepcopy(once))]


def test_a_copy_divides_its_own_counts() -> None:
    assert all(error < 1e-10 for errors in run_ranks(copies_that_count, 2) for error in errors)


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_embeddings_that_go_by_what_a_rank_reads_are_refused(option: str) -> None:
    model = nn.Sequential(nn.Embedding(5, 4, **{option: 1.0 if option == "max_norm" else True}), nn.Linear(4, 4))
    assert place(model, Grid(1, 1, 1, 1))
    for grid in (Grid(2, 1, 1, 1), Grid(1, 1, 2, 1), Grid(1, 1, 1, 2)):
        if grid.gx == 2 and option != "sparse":
            assert place(model, grid)
            continue
        with pytest.raises(ValueError, match=f"layer 0: .*{option}.*; (leave {option} out|use sparse=False)"):
            place(model, grid)
