"""Experts in lists, one module each: dealt out, split, saved and loaded as one process has them, or refused with the reason."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from axonn_plugins.config import Ted
from axonn_plugins.hosts.deepspeed.ted.on_mesh import split_with_experts
from axonn_tp import Grid, Mesh, sync_gradients
from axonn_tp.checkpoint import CheckpointError, export_safetensors, import_safetensors
from axonn_tp.checkpoint.dealt import still_here
from axonn_tp.layers.loss_watch import LossWatch, OfExperts
from ted_moe.adapters import find, splittable
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.ted_moe.listed import FEATURES, LISTED, Gated, Itself, Parallel, mixed, normed, stacked
from tests.ted_moe.mixtures import COVERING, LAYOUTS, before_ranks, difference, mixture


def differences(kind: str, layouts: list[str], folder: str) -> tuple[dict[str, tuple[float, float]], list[str]]:
    found = {layout: difference(kind, *LAYOUTS[layout]) for layout in layouts}
    return found, loaded_and_given(kind, f"{folder}/{kind}.safetensors") + used_by_scripts()


def loaded_and_given(kind: str, file: str) -> list[str]:
    """Faults of `state_dict` and `load_state_dict` where experts are over two ranks and split over two."""
    model, whole = mixture(kind), {name: torch.rand_like(value) for name, value in mixture(kind).state_dict().items()}
    given = list(model.parameters())
    mesh = Mesh(Grid(gx=2, gdata=2))
    split_with_experts(model, mesh, Ted.model_validate({}))
    faults = [] if {*map(id, still_here(given))} == {*map(id, model.parameters())} else ["others' parameters are left"]
    for assign in (False, True):
        model.load_state_dict(whole, assign=assign)
        again = model.state_dict()
        faults += [name for name in whole if name not in again or not torch.equal(again[name], whole[name])]
    faults += by_file(model, mesh, whole, file)
    faults += (
        []
        if all(hasattr(p, "axonn_layout") for name, p in model.named_parameters() if ".experts." in name)
        else ["no layout after assigning"]
    )
    last = next(name for name in reversed(whole) if ".experts." in name and ".3." in name)
    other = {"blocks.0.moe.experts.9.extra": torch.ones(1), last: torch.ones(1)}
    lacking = {name: value for name, value in whole.items() if ".0." not in name.partition("experts.")[2]}
    with pytest.raises(RuntimeError) as said:
        model.load_state_dict(lacking | other)
    missing = [name for name in whole if name not in lacking]
    faults += [name for name in (*missing, *other) if name not in str(said.value)]
    mesh.destroy()
    return faults


def by_file(model: nn.Module, mesh: Mesh, whole: dict[str, Tensor], file: str) -> list[str]:
    """Faults of a file that all ranks write and read, which has every rank's experts, and of one that lacks some."""
    export_safetensors(model, mesh, file)
    written = load_file(file)
    faults = [
        f"{name} in the file" for name in whole if name not in written or not torch.equal(written[name], whole[name])
    ]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    import_safetensors(model, mesh, file)
    again = model.state_dict()
    faults += [f"{name} from the file" for name in whole if not torch.equal(again[name], whole[name])]
    odd = next(name for name in whole if ".experts." in name and ".3." in name)
    if dist.get_rank() == 0:
        save_file(written | {odd.replace(".3.", ".9."): whole[odd]}, file)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"\.9\..*, which the model has not"):
        import_safetensors(model, mesh, file)
    return faults + [f"{name} besides" for name in written.keys() - whole.keys()]


class Dimmed(Gated):
    """An expert with a number that a script changes between steps."""

    scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Every(Itself):
    """A list whose experts without tokens are called, too, and whose output has the type of theirs."""

    scale = 1.0

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        parts = []
        for number, expert in enumerate(self):
            token, place = (indices == number).nonzero(as_tuple=True)
            part = self.scale * expert(x[token])
            part = part * weights[token, place, None].to(part.dtype)
            parts.append(part.new_zeros(x.shape).index_add(0, token, part))
        return torch.stack(parts).sum(0)


class Counted(nn.Module):
    """A router that counts tokens and experts, and sends all tokens to two of these."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(FEATURES, 4), Every(Dimmed() for _ in range(4))
        self.register_buffer("load", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        scores = (self.gate(x) + x.new_tensor([9.0, 9.0, 0.0, 0.0])).softmax(-1).flatten(0, -2)
        weights, indices = scores.topk(2, -1)
        self.load += torch.bincount(indices.flatten(), minlength=4)
        return len(self.experts) * self.experts(x.flatten(0, -2), indices, weights).view_as(x)


class Around(nn.Module):
    """A layer that calls its mixture by the name of what this takes."""

    def __init__(self) -> None:
        super().__init__()
        self.moe = Counted()

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.moe(x=hidden)


def used_by_scripts() -> list[str]:
    """Faults in what a script reads and sets where experts are over two ranks, of which one has no rows, and split over two."""
    torch.manual_seed(1)
    model = Around().double()
    alone, seen = copy.deepcopy(model), []
    mesh = Mesh(Grid(gx=2, gdata=2))
    home = mesh.rank("data")
    split_with_experts(model, mesh, Ted.model_validate({}))
    faults = ["trials are counted"] if model.moe.load.any() else []
    mine = model.moe.experts[2 * home]
    mine.register_forward_hook(lambda module, given, output: seen.append(len(output)))
    model.moe.experts.scale = alone.moe.experts.scale = 0.5
    mine.scale = alone.moe.experts[0].scale = 0.25
    x = torch.randn(1, 5, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    output = model(x)
    faults += [] if torch.allclose(output, alone(x), rtol=0, atol=1e-12) else ["another output"]
    faults += [] if seen == [[10], []][home] else [f"a hook saw {seen}"]
    squares = sum(p.square().sum() for p in model.parameters())
    LossWatch(model).look(output.sum() + 0 * squares)
    with pytest.raises(OfExperts, match="the loss reads moe.experts.0.w1.weight outside of the experts' module"):
        LossWatch(model).look(output.sum() + squares)
    output.sum().backward()
    faults += [f"no gradient of {name}" for name, p in model.moe.experts.named_parameters() if p.grad is None]
    with pytest.raises(
        ValueError, match="expert . of a list is another rank's under axonn.ted, and this one has those"
    ):
        model.moe.experts[3 - 2 * home]
    with torch.autocast("cpu", torch.bfloat16):
        output, expected = model.float()(x.float()), alone.float()(x.float())
    kinds = {*model.moe.experts.axonn_dealt.types.values()}
    faults += (
        [] if torch.bfloat16 in kinds and torch.allclose(output, expected, rtol=0, atol=0.1) else ["half precision"]
    )
    mesh.destroy()
    return faults


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("a list within", ("expert and tensor", "tensor and shares")),
        thorough("a list within", COVERING),
        pytest.param("a list", tuple(LAYOUTS), marks=pytest.mark.families),
        pytest.param("parallel lists", tuple(LAYOUTS), marks=pytest.mark.families),
        pytest.param("experts with norms", tuple(LAYOUTS), marks=pytest.mark.families),
    ],
)
def test_layouts_equal_one_process(kind: str, layouts: tuple[str, ...], tmp_path: Path) -> None:
    before_ranks(kind, layouts)
    for found, faults in run_ranks(differences, 4, kind, list(layouts), str(tmp_path)):
        assert len(found) == len(layouts) and not faults
        assert not {layout: far for layout, far in found.items() if max(far) > 1e-10}


class Sent(nn.Module):
    """A mixture of frozen layers that sends all tokens to two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(FEATURES, 4).requires_grad_(False), Itself(Gated() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights, indices = (self.gate(x) + x.new_tensor([9.0, 9.0, 0.0, 0.0])).softmax(-1).topk(2, -1)
        return self.experts(x, indices, weights)


def gradients_behind_frozen_layers(frozen: list[int]) -> list[str]:
    """Faults of experts' gradients where nothing before them is trained, and one rank has no rows, or frozen experts alone."""
    torch.manual_seed(1)
    model = Sent().double()
    for number in frozen:
        model.experts[number].requires_grad_(False)
    if frozen:
        model.gate.weight.data.zero_(), model.gate.bias.data.copy_(torch.tensor([-9.0, -7.0, 1.0, 0.5]))
    alone, mesh = copy.deepcopy(model), Mesh(Grid(gdata=2))
    split_with_experts(model, mesh, Ted.model_validate({}))
    inputs = torch.randn(2, 5, FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    alone(inputs.flatten(0, 1)).square().sum().div(2).backward()
    output = model(inputs[mesh.rank("data")])
    faults = [] if output.requires_grad else ["no rank's own output wants a gradient"]
    output.square().sum().backward()
    sync_gradients(model.parameters(), mesh)
    for number, expert in enumerate(model.experts):
        of_one = dict(alone.experts[2 * mesh.rank("data") + number].named_parameters())
        for name, parameter in expert.named_parameters():
            expected = of_one[name].grad
            missing = expected is None and (parameter.grad is None or not parameter.grad.any())
            same = missing or (parameter.grad is not None and torch.allclose(parameter.grad, expected, 0, 1e-10))
            faults += [] if same else [f"another gradient of {number}.{name}"]
    mesh.destroy()
    return faults


@pytest.mark.parametrize("frozen", [[], [0, 1]], ids=["no rows", "frozen experts"])
def test_experts_behind_frozen_layers_have_the_gradients_of_all_tokens(frozen: list[int]) -> None:
    assert run_ranks(gradients_behind_frozen_layers, 2, frozen) == [[], []]


def test_each_expert_is_split_where_its_shares_add_up() -> None:
    found = {kind: next(iter(find(mixture(kind)).values())) for kind in LISTED}
    assert {kind: (one.count, one.features, one.refusal) for kind, one in found.items()} == {
        kind: (6 if kind == "a list" else 4, FEATURES, None) for kind in LISTED
    }
    cuts = splittable(found["a list within"], 2)
    assert cuts is not None and {name: cut.dim for name, cut in cuts.items()} == {
        **{"each": None, "scale": None, "mlps.*.0.weight": 1, "mlps.*.0.bias": 1},
        **{"mlps.*.2.weight": 2, "mlps.*.2.bias": None},
    }
    assert cuts["mlps.*.2.bias"].once and cuts["scale"].common and not cuts["each"].common
    assert splittable(found["experts with norms"], 2) is None


class Uneven(Parallel):
    """Lists of different lengths."""

    def __init__(self) -> None:
        super().__init__(4)
        self.extra = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))


class Scaled(nn.Module):
    """An expert with what a checkpoint would hold beside its parameters, or by its number."""

    def __init__(self, scale: float, kept: bool) -> None:
        super().__init__()
        self.inner = stacked()
        self.register_buffer("scale", torch.tensor(scale), persistent=kept)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale


class Named(nn.Module):
    """A container whose experts go by names."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.experts = 4, nn.ModuleDict({f"expert_{n}": stacked() for n in range(4)})

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return mixed(lambda number, rows: self.experts[f"expert_{number}"](rows), 4, x, indices, weights)


class Summed(Itself):
    """Not the sum of weighted experts."""

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return torch.tanh(super().forward(x, indices, weights))


class Again(Itself):
    """Each expert is computed again in backward."""

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return mixed(
            lambda number, rows: checkpoint(self[number], rows, use_reentrant=False), len(self), x, indices, weights
        )


class Masked(Itself):
    """Whose experts a script may take out later."""

    def __init__(self, experts: Any) -> None:
        super().__init__(experts)
        self.register_buffer("there", torch.ones(4, dtype=torch.bool))

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, indices, weights * self.get_buffer("there")[indices])


def tied() -> Itself:
    """Experts of which two share a layer."""
    experts = Itself(Gated() for _ in range(4))
    experts[3].w2 = experts[0].w2
    return experts


@pytest.mark.parametrize(
    ("experts", "reason"),
    [
        (Uneven, "holds lists of different lengths"),
        (tied, "has experts in the list itself that share a parameter"),
        (lambda: Itself(Scaled(2.0, True) for _ in range(4)), "with the buffer scale, which a checkpoint would hold"),
        (lambda: Itself(Scaled(float(n), False) for n in range(1, 5)), "computes something else for equal weights"),
        (lambda: Itself([*(normed() for _ in range(3)), nn.Sequential(*normed()[:1], nn.Tanh(), *normed()[1:])]), "nn.ModuleList"),
        (lambda: Again(Gated() for _ in range(4)), "computes again in backward"),
        (lambda: Masked(Gated() for _ in range(4)), "computes something else for equal weights"),
        (Named, "has modules alike in the nn.ModuleDict experts"),
        (lambda: Summed(Gated() for _ in range(4)), "does not give the weighted sum"),
    ],
)  # fmt: skip
def test_what_cannot_be_dealt_out_is_named_with_the_reason(experts: Any, reason: str) -> None:
    (found,) = find(nn.ModuleDict({"experts": experts()})).values()
    assert found.refusal is not None and reason in found.refusal


def test_equal_buffers_that_no_checkpoint_holds_are_taken() -> None:
    (found,) = find(nn.ModuleDict({"mixed": Itself(Scaled(2.0, False) for _ in range(4))})).values()
    assert (found.refusal, found.count) == (None, 4)
