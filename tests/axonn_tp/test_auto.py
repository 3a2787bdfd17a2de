"""plan="auto": pairs found in models of others train as the serial model does, in float64, on every grid of 4 ranks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import axonn_tp
from axonn_tp import Grid, LayerPlan, Mesh, auto_plan, factorisations
from axonn_tp.layers.linear_split import features
from axonn_tp.plan.counted_attributes import count_locally, counting_attributes
from axonn_tp.plan.example_inputs import guesses
from tests.axonn_tp.families import FAMILIES, GROUPED, NO_TOKENS, VOCABULARY, hf, litgpt
from tests.axonn_tp.test_grids import largest_error
from tests.distributed import meshes, run_ranks
from tests.matrix import thorough

TOLERANCE = 1e-10


@dataclass
class Returned:
    """What torch takes for a leaf."""

    given: torch.Tensor
    inner: torch.Tensor


class Mixing(nn.Module):
    """Code between up and down that keeps all shapes valid on a share and computes something else there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.down, self.gate = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> Any:
        h = self.up(x)
        if self.kind in ("dataclass", "namespace", "distribution"):
            inner = F.silu(h)
            wrap = {
                "dataclass": Returned,
                "namespace": lambda x, h: SimpleNamespace(x=x, h=h),
                "distribution": lambda x, h: (x, torch.distributions.Normal(h, 1.0)),
            }[self.kind]
            return wrap(self.down(inner), inner)
        between = {
            "softmax": lambda: h.softmax(-1),
            "mean": lambda: h - h.mean(-1, keepdim=True),
            "flip": lambda: h.flip(-1),
            "shared": lambda: F.pad(h, (0, 12 - h.shape[-1])) if h.shape[-1] < 12 else h,
            "width": lambda: h / h.shape[-1],
            # Right forward, but backward each share would give the gate the gradient of its features only.
            "gate": lambda: h * self.gate(x),
            "good": lambda: F.silu(h),
            "in place": lambda: h.mul_(2).tanh_(),
        }
        x = self.down(between[self.kind]())
        if self.kind == "gate":
            x = x * self.gate(x)
        return x + h.sum() if self.kind == "shared" else x


def loss_of(model: nn.Module, labels: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """Of a model that was given what `batch_for` says."""
    names = input_names(model)
    output = model(**dict(zip(names, inputs, strict=True))) if names else model(*inputs)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def input_names(model: nn.Module) -> list[str]:
    """The keyword arguments of HF's model."""
    main = getattr(model, "main_input_name", "")
    return [main, "decoder_input_ids"] if main and model.config.is_encoder_decoder else [main] if main else []


def batch_for(model: nn.Module) -> tuple[Callable, tuple[torch.Tensor, ...]]:
    """A loss of the model and of a batch of four, and that batch: labels, then inputs."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (4, 9), generator=generator)
    names = input_names(model)
    if "pixel_values" in names:
        return loss_of, (ids[:, 0], torch.randn(4, 3, 16, 16, generator=generator, dtype=torch.float64))
    if "input_features" in names:
        heard = torch.randn(4, model.config.num_mel_bins, 32, generator=generator, dtype=torch.float64)
        return loss_of, (ids[:, 1:], heard, ids[:, :-1])
    return loss_of, (ids[:, 1:], *(ids[:, :-1] for _ in names or "x"))


Expected = list[tuple[torch.Tensor, dict[str, torch.Tensor | None]]]
"""Of each step of SGD, the loss and the gradients by name."""
RATE, STEPS = 0.3, 2


def serial_steps(model: nn.Module) -> Expected:
    """Of a copy of the model: once for all grids."""
    model, found = copy.deepcopy(model), []
    loss_of, batch = batch_for(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, *batch)
        loss.backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        found.append((loss.detach(), gradients))
        optimizer.step()
    return found


def few_steps(serial: nn.Module, expected: Expected, parallel: nn.Module, mesh: Mesh) -> dict[str, float]:
    """Largest errors of losses and gradients over the steps of SGD."""
    loss_of, batch = batch_for(serial)
    optimizer = torch.optim.SGD(parallel.parameters(), lr=RATE)
    errors = {"loss": 0.0, "gradients": 0.0}
    for wanted, gradients in expected:
        optimizer.zero_grad()
        loss = loss_of(parallel, *(mesh.shard_batch(tensor) for tensor in batch))
        loss.backward()
        axonn_tp.sync_gradients(parallel.parameters(), mesh)
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh.group("batch"))
        errors["loss"] = max(errors["loss"], (mean / mesh.grid.batch - wanted).abs().item())
        of = {id(p): gradients[name] for name, p in serial.named_parameters()}
        error = largest_error(serial, parallel, mesh, lambda p, of=of: of.get(id(p), p.grad))
        errors["gradients"] = max(errors["gradients"], error)
        optimizer.step()
    return errors


def serial_models(names: list[str]) -> dict[str, tuple[nn.Module, Expected]]:
    torch.manual_seed(1)
    models = {name: FAMILIES[name][0]().double() for name in names}
    return {name: (model, serial_steps(model)) for name, model in models.items()}


def train_on_grids(serial: dict[str, tuple[nn.Module, Expected]], turns: int) -> dict[str, Any]:
    """Each model on each grid; in turn, where there are turns, so that each model has a part of them."""
    found: dict[str, Any] = {}
    for place, mesh in enumerate(meshes(factorisations(dist.get_world_size()))):
        for number, (name, (model, expected)) in enumerate(serial.items()):
            if (place + number) % turns:
                continue
            parallel = axonn_tp.parallelize(copy.deepcopy(model), mesh, "auto")
            ends = [m for m in parallel.modules() if isinstance(m, axonn_tp.Linear) and m.split.transposed]
            errors = few_steps(model, expected, parallel, mesh)
            found[f"{name} {mesh.grid}"] = {**errors, "pairs": len(ends)}
    return found


# A model of tokens, one of images and one that reads widths from its input are in every run.
EVERY_RUN = ["llama", "vit", "nanogpt"]
PAIRS_EVERY_RUN = {
    *EVERY_RUN,
    "gemma3",
    "phi3",
    "mixtral",
    "bert",
    "convnext",
    "mamba",
    "whisper",
    "t5",
    "gpt2",
    "litgpt grouped",
    "timm",
    "ours",
}


@pytest.mark.parametrize(
    ("names", "turns"),
    [(EVERY_RUN, 4), thorough(EVERY_RUN, 1), pytest.param(["gpt2", "litgpt"], 1, marks=pytest.mark.families)],
    ids=str,
)
def test_losses_and_gradients_equal_serial(names: list[str], turns: int) -> None:
    pytest.importorskip("transformers")
    if "litgpt" in names:
        pytest.importorskip("litgpt")
    for rank in run_ranks(train_on_grids, 4, serial_models(names), turns):
        for case, errors in rank.items():
            assert errors["loss"] < TOLERANCE and errors["gradients"] < TOLERANCE, (case, errors)
            assert errors["pairs"] >= 2, case


def from_meta(family: str, weight: str) -> dict[str, Any]:
    """A model built on the meta device against a serial one with its weights."""
    mesh = Mesh.create(2, 1, 2)
    build, _ = FAMILIES[family]
    with torch.device("meta"):
        model = build().double()
    torch.manual_seed(dist.get_rank())
    axonn_tp.parallelize(model, mesh, "auto")
    everyone: list[Any] = [axonn_tp.full_state_dict(model, mesh)]
    dist.broadcast_object_list(everyone, src=0)
    serial = build().double()
    serial.load_state_dict(everyone[0])
    loss_of, batch = batch_for(serial)
    difference = axonn_tp.first_difference(model, lambda: loss_of(model, *batch), mesh, 1e-9)
    std = everyone[0][weight].std().item()
    return {**few_steps(serial, serial_steps(serial), model, mesh), "std": std, "difference": difference}


@pytest.mark.parametrize(
    ("family", "weight"),
    [thorough("llama", "model.layers.0.mlp.down_proj.weight"), ("gpt2", "transformer.h.0.attn.c_attn.weight")],
)
def test_an_hf_model_from_the_meta_device(family: str, weight: str) -> None:
    pytest.importorskip("transformers")
    for found in run_ranks(from_meta, 4, family, weight):
        assert found["loss"] < TOLERANCE and found["gradients"] < TOLERANCE, found
        assert found["difference"] is None
        assert found["std"] == pytest.approx(0.02, rel=0.1)


@pytest.mark.parametrize(
    "family",
    [name if name in PAIRS_EVERY_RUN else pytest.param(name, marks=pytest.mark.families) for name in FAMILIES],
)
def test_pairs_of_known_families(family: str) -> None:
    build, expected = FAMILIES[family]
    model = build()
    for grid in (Grid(2, 1, 1, 1), Grid(2, 2, 1, 1), Grid(1, 1, 4, 1)):
        plan, report = auto_plan(model, grid)
        names = [name for name, m in model.named_modules() if features(m) and name.endswith(tuple(expected))]
        names = [name for name in names if name.endswith(tuple(f".{end}" for end in expected)) or name in expected]
        pairs = {name: layer for name, layer in plan.items() if layer.kind in ("normal", "transposed")}
        assert set(pairs) == set(names), report
        for name, layer in pairs.items():
            assert layer.heads == next(h for end, h in expected.items() if name.endswith(end)), (name, report)


def outputs_of_families(names: list[str]) -> dict[str, float]:
    """Largest difference of each family's outputs from the serial model's, in float64."""
    found = {}
    for mesh in meshes((Grid(2, 2, 1, 1), Grid(4, 1, 1, 1))):
        grid = mesh.grid
        for family in names:
            build, _ = FAMILIES[family]
            torch.manual_seed(2)
            model = build().double().eval()
            args, keywords = next(guesses(model))
            args = tuple(a.double() if a.is_floating_point() else a for a in args)
            keywords = {k: v.double() if v.is_floating_point() else v for k, v in keywords.items()}
            with torch.no_grad():
                expected = model(*args, **keywords)
                got = axonn_tp.parallelize(model, mesh, "auto")(*args, **keywords)
            first = [out if isinstance(out, torch.Tensor) else out.logits for out in (expected, got)]
            found[f"{family} {grid}"] = (first[0] - first[1]).abs().max().item()
    return found


@pytest.mark.parametrize(
    "names",
    [EVERY_RUN, pytest.param([name for name in FAMILIES if name not in EVERY_RUN], marks=pytest.mark.families)],
    ids=["every run", "others"],
)
def test_outputs_of_known_families_equal_serial(names: list[str]) -> None:
    pytest.importorskip("transformers")
    if "litgpt" in names:
        pytest.importorskip("litgpt")
    for found in run_ranks(outputs_of_families, 4, names):
        assert max(found.values()) < 1e-9, found


def test_only_what_a_share_computes_right_is_split() -> None:
    returned = ("dataclass", "namespace", "distribution")
    for kind in ("softmax", "mean", "flip", "shared", "width", "gate", "good", "in place", *returned):
        plan, report = auto_plan(Mixing(kind), Grid(2, 1, 1, 1))
        assert bool(plan) == (kind in ("good", "in place")), (kind, report)


class Held(torch.autograd.Function):
    """Its gradient is at most of norm 1, of each row or of each number."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, by_row: bool) -> torch.Tensor:
        ctx.by_row = by_row
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad / (grad.norm(dim=-1, keepdim=True) if ctx.by_row else grad.abs()).clamp(min=1e-3), None


class Holding(nn.Module):
    """Two pairs on a stream, with a function whose backward is its own in the first pair, or in the stream."""

    def __init__(self, where: str, by_row: bool) -> None:
        super().__init__()
        self.where, self.by_row, self.table = where, by_row, nn.Embedding(9, 8)
        self.up, self.down, self.more, self.less = (nn.Linear(*sizes) for sizes in ((8, 12), (12, 8)) * 2)
        self.last = nn.Linear(8, 9)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        stream = self.table(ids)
        inner = self.up(stream).tanh()
        stream = stream + self.down(Held.apply(inner, self.by_row) if self.where == "pair" else inner)
        stream = Held.apply(stream, self.by_row) if self.where == "stream" else stream
        return self.last(stream + self.less(self.more(stream).tanh()))


def test_a_backward_of_a_models_own() -> None:
    found = {
        (where, by_row): auto_plan(Holding(where, by_row), Grid(2, 2, 1, 1))
        for where, by_row in (("pair", True), ("pair", False), ("stream", True), ("none", True))
    }
    split = {case: (*(name in plan for name in ("up", "more", "table")),) for case, (plan, _) in found.items()}
    assert split == {
        ("pair", True): (False, True, False),
        ("pair", False): (True, True, True),
        ("stream", True): (True, True, False),
        ("none", True): (True, True, True),
    }
    assert "the gradient of up has other values" in str(found["pair", True][1])
    assert "Held has a backward of its own" in str(found["stream", True][1])


class Everywhere(nn.Module):
    """What is used within a pair, where each share gives its part of the gradient, is used outside, which gives the whole of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.act, self.scale = kind, nn.PReLU(), nn.Parameter(torch.tensor(2.0))
        self.table, self.up, self.down, self.last = (
            nn.Embedding(9, 8),
            nn.Linear(8, 12),
            nn.Linear(12, 8),
            nn.Linear(8, 8),
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.table(ids)
        inner = self.act(self.up(rows))
        if self.kind == "rows":
            inner = inner * rows.mean(-1, keepdim=True)
        if self.kind == "weight":
            inner = inner * self.last.weight.mean()
        rows = rows + self.down(inner)
        rows = rows * self.scale
        made = self.last(self.act(rows) if self.kind == "activation" else rows)
        return made * self.scale if self.kind == "stream" else made


class Averaged(nn.Module):
    """Weights of what is called go into those of a teacher, which is not."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = (
            nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh()) for _ in range(2)
        )
        self.teacher.load_state_dict(self.student.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.student(x)


def test_a_module_that_is_not_called_lies_as_the_one_of_its_structure() -> None:
    """Shards over x and z of a pair and of two layers by themselves are of one size, and were averaged with each other."""
    plan, report = auto_plan(Averaged(), Grid(gx=2, gz=2))
    kinds = {name: layer.kind for name, layer in plan.items()}
    assert kinds["student.0"] == kinds["teacher.0"] == "normal"
    assert kinds["student.2"] == kinds["teacher.2"] == "transposed"
    assert "as student, of the same structure" in str(report)


def test_what_is_used_outside_of_a_pair_is_not_used_in_it() -> None:
    found = {}
    for kind, named in (("activation", "act.weight"), ("rows", "table"), ("weight", "last.weight"), ("within", None)):
        found[kind], report = auto_plan(Everywhere(kind), Grid(2, 1, 1, 1))
        assert named is None or f"down reads what is made of {named}, which is used outside of the pair, too" in str(
            report
        )
    assert {kind: sorted(plan) for kind, plan in found.items() if plan} == {"within": ["down", "last", "table", "up"]}
    found = {kind: auto_plan(Everywhere(kind), Grid(1, 2, 1, 1))[0] for kind in ("stream", "within")}
    assert {kind: sorted(plan) for kind, plan in found.items()} == {
        "stream": ["down", "up"],
        "within": ["down", "last", "table", "up"],
    }


class Widths(nn.Module):
    """Takes widths from its input, for what its layers give or for numbers."""

    def __init__(self, by_width: bool = False) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.by_width = 4, 32, by_width
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)
        self.last: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, width = x.shape
        q, k, v = (t.view(rows, tokens, self.n_head, -1).transpose(1, 2) for t in self.c_attn(x).split(self.n_embd, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        self.last = x
        return self.c_proj(y.reshape(rows, tokens, width) / (width if self.by_width else 1))


def test_widths_that_are_read_of_the_input() -> None:
    plan, _ = auto_plan(Widths(), Grid(2, 1, 1, 1))
    assert plan["c_attn"] == LayerPlan("normal", 3, 4, ("n_head", "n_embd", "x.shape[-1]"))
    plan, report = auto_plan(Widths(by_width=True), Grid(2, 1, 1, 1))
    assert not plan
    assert "needs all features" in str(report)
    plan, _ = auto_plan(Widths(), Grid(2, 1, 1, 1), options=axonn_tp.Options(compile=True, layout="replicated"))
    assert not plan

    model = Widths()
    seen: list[Any] = []
    count_locally(model, ("x.shape[-1]",), lambda: 2, 32)
    model.c_attn.forward = lambda x: seen.append((x.shape[-1], x.size(1), x.size(), x.dim())) or x.repeat(1, 1, 3)  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(RuntimeError):
        model(x=torch.randn(2, 3, 32))
    assert seen == [(16, 3, torch.Size([2, 3, 16]), 3)]
    assert model.last is not None and model.last.shape == (2, 3, 32)  # behind the forward it is what was given
    with pytest.raises(ValueError, match="counts name 'y.shape.*Widths has no argument 'y'"):
        axonn_tp.place(model, Grid(2, 1, 1, 1), {"c_attn": LayerPlan("normal", 3, counts=("y.shape[-1]",))})


def test_odd_widths_are_split_or_the_axis_is_named() -> None:
    def layers(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))

    for width, gx, why in (
        (37, 2, "37 output features do not divide by gx = 2"),
        (1, 2, "1 features do not divide by one gx above 1"),
        (121, 11, "traced and simulated"),
    ):
        plan, report = auto_plan(layers(width), Grid(gx, 1, 1, 1))
        assert bool(plan) == (width % gx == 0) and all(why in row.why for row in report.rows), report


def test_one_kv_head_or_too_few_stay_whole() -> None:
    few = {**GROUPED, "num_key_value_heads": 1}
    plan, report = auto_plan(hf("LlamaForCausalLM", **few), Grid(2, 1, 1, 1))
    assert not any("self_attn" in name for name in plan) and any("mlp" in name for name in plan)
    assert "needs all features" in str(report)
    plan, report = auto_plan(FAMILIES["llama"][0](), Grid(4, 1, 1, 1))
    assert not any("self_attn" in name for name in plan)
    assert "2 heads do not divide by gx = 4" in str(report)


def test_counts_are_local_while_the_module_runs_only() -> None:
    model = litgpt()
    plan, _ = auto_plan(model, Grid(2, 1, 1, 1))
    name = "transformer.h.0.attn.qkv"
    assert plan[name] == LayerPlan("normal", 3, 4, ("config.n_head", "config.n_query_groups"))
    attention = model.transformer.h[0].attn
    seen: list[tuple[int, bool]] = []
    count_locally(attention, plan[name].counts, lambda: 2)
    attention.qkv.register_forward_pre_hook(
        lambda *_: seen.append((attention.config.n_head, attention.config is model.config))
    )
    with pytest.raises(RuntimeError):
        model(torch.zeros(1, 4, dtype=torch.long))
    assert seen == [(2, False)]
    assert attention.config is model.config and model.config.n_head == 4
    wrong = {name: LayerPlan("normal", 3, 4, ("config.n_layer_",))}
    with pytest.raises(ValueError, match="counts name 'config.n_layer_'.*missing"):
        axonn_tp.place(model, Grid(2, 1, 1, 1), wrong)


class Guarded:
    """A configuration as HF's are where layers have numbers of their own."""

    def __init__(self) -> None:
        vars(self).update(head_dim=8, num_heads=4)

    def __getattribute__(self, name: str) -> Any:
        if name == "head_dim":
            raise RuntimeError("may be another in each layer")
        return super().__getattribute__(name)


def test_a_configuration_that_is_not_to_be_read_has_no_counts() -> None:
    attention = nn.Module()
    attention.config = Guarded()  # type: ignore[assignment]
    assert ("config.num_heads",) in counting_attributes(attention, {32})
    assert not any("config.head_dim" in names for names in counting_attributes(attention, {8, 32}))


def test_the_search_changes_nothing() -> None:
    model = FAMILIES["llama"][0]().train()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    auto_plan(model, Grid(2, 2, 1, 1))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training and model.config.use_cache and model.config.num_attention_heads == 4


NOTED: dict[str, torch.Tensor] = {}


def _note(module: nn.Module, given: Any, made: torch.Tensor) -> None:
    NOTED["last"] = made


def test_hooks_of_a_script_note_nothing_of_the_search() -> None:
    model, listed, kept = Mixing("good"), list[torch.Tensor](), dict[str, int]()
    model.up.register_forward_hook(lambda module, given, made: listed.append(made))
    model.up.register_forward_pre_hook(lambda module, given, kept=kept: kept.update(calls=kept.get("calls", 0) + 1))
    model.down.register_forward_hook(_note)
    plan, _ = auto_plan(model, Grid(2, 1, 2, 1))
    assert plan and not listed and not kept and not NOTED
    model(torch.randn(2, 8))
    assert len(listed) == 1 and kept == {"calls": 1} and len(NOTED) == 1
    model.up.register_forward_hook(lambda module, given, made: made * sum(made.shape[-1] for _ in listed))
    assert not auto_plan(model, Grid(2, 1, 1, 1))[0] and len(listed) == 1


def test_the_report_counts_what_placements_send() -> None:
    model, grid = FAMILIES["ours"][0](), Grid(2, 2, 2, 1)
    plan, report = auto_plan(model, grid)
    sent = sum(c.sent for placement in axonn_tp.place(model, grid, plan) for c in placement.collectives(8, grid))
    assert report.bytes_sent(8) == 4 * sent
    row = next(row for row in report.rows if row.pattern == "blocks.*.attention.qkv")
    assert (row.number, row.kind, row.detail) == (2, "normal", "parts=3 heads=4")
    assert row.pattern in str(report)


class Odd(nn.Module):
    """Inputs that nobody can guess."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 2.0
        self.inner = Mixing("good")

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.inner(x * gate)


class Losing(nn.Module):
    """Gives its loss, as many scripts for DeepSpeed have it."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.inner, self.head = nn.Embedding(16, 8), Mixing("good"), nn.Linear(8, 16)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.inner(self.tokens(ids)))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_targets_are_guessed() -> None:
    plan, report = auto_plan(Losing(), Grid(2, 1, 1, 1))
    assert set(plan) == {"inner.down", "head"} and "example_inputs" not in report.note


def test_inputs_given_or_guessed() -> None:
    plan, report = auto_plan(Odd(), Grid(2, 1, 1, 1))
    assert set(plan) == {"inner.up", "inner.down"}
    assert "Give example_inputs" in report.note
    for inputs in ((torch.randn(2, 8), torch.ones(8)), {"x": torch.randn(2, 8), "gate": torch.ones(8)}):
        plan, report = auto_plan(Odd(), Grid(2, 1, 1, 1), inputs)
        assert set(plan) == {"inner.up", "inner.down"} and "example_inputs" not in report.note


def test_a_published_plan_is_taken_where_nothing_can_be_run() -> None:
    model = FAMILIES["llama"][0]()
    del model.model.layers[0].mlp.act_fn
    model.model.layers[0].mlp.act_fn = None
    plan, report = auto_plan(model, Grid(2, 1, 1, 1))
    assert plan["model.layers.0.self_attn.q_proj"].heads == 2
    assert "its model's tp_plan" in str(report)


def test_a_published_plan_splits_what_meets_together_or_not_at_all() -> None:
    model = FAMILIES["llama"][0]()
    for layer in model.model.layers:
        del layer.mlp.act_fn
        layer.mlp.act_fn, layer.self_attn.q_proj = None, nn.Sequential(layer.self_attn.q_proj)
    plan, _ = auto_plan(model, Grid(2, 1, 1, 1))
    assert {name for name in plan if "self_attn" in name} == set()
    assert plan["model.layers.0.mlp.up_proj"].kind == "normal"


@pytest.mark.parametrize("bound", [True, False])
def test_a_forward_that_calls_the_one_it_replaces(bound: bool) -> None:
    model = FAMILIES["llama"][0]()
    expected, _ = auto_plan(model, Grid(2, 2, 1, 1))
    original, numbers = model.forward, {"heads": 1}

    def forward(self: nn.Module, *given: Any, twice: bool = False, **named: Any) -> Any:
        assert twice or numbers
        return original(*given, **named)

    model.forward = forward.__get__(model) if bound else functools.partial(forward, model)
    plan, report = auto_plan(model, Grid(2, 2, 1, 1))
    pairs = {name: layer for name, layer in expected.items() if layer.kind in ("normal", "transposed")}
    assert plan == pairs and len(pairs) == 14
    assert "traced and simulated" in str(report) and "a forward was replaced" in report.note
    assert original.__self__ is model and model.forward is not original


def unguessable_plan() -> str:
    with pytest.raises(ValueError) as error:
        axonn_tp.parallelize(Mixing("good"), Mesh.create(1), "automatic")  # type: ignore[arg-type]
    return str(error.value)


def meta_without_initialisation() -> str:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("frequencies", torch.ones(4), persistent=False)

        def reset_parameters(self) -> None:
            """Forgets the buffer."""

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), Rotary())
    with pytest.raises(ValueError) as error:
        axonn_tp.parallelize(model, Mesh.create(1))
    return str(error.value)


def test_errors_say_what_to_do() -> None:
    assert run_ranks(unguessable_plan, 1)[0].endswith('give what layers become by name pattern, or "auto"')
    assert (
        "nothing initialises its frequencies; add a reset_parameters()" in run_ranks(meta_without_initialisation, 1)[0]
    )


def meta_gpt2_style() -> tuple[float, float]:
    """Standard deviations of an inner and of a residual layer: HF scales the latter through its parent."""
    transformers = pytest.importorskip("transformers")
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_embd=64, n_head=4, n_layer=8, vocab_size=50, **NO_TOKENS)
        )
    axonn_tp.parallelize(model, Mesh.create(1))
    block = model.transformer.h[0].mlp
    return block.c_fc.weight.std().item(), block.c_proj.weight.std().item()


def test_a_parent_initialises_its_children_on_the_meta_device() -> None:
    pytest.importorskip("transformers")
    inner, residual = run_ranks(meta_gpt2_style, 1)[0]
    assert inner == pytest.approx(0.02, rel=0.05) and residual == pytest.approx(0.02 / 4, rel=0.05)
