"""Weights that stay in their files until a rank reads its shards; what code that uses one before finds."""

from __future__ import annotations

import copy
import io
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import axonn_tp
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, Mesh, layout_of
from axonn_tp.checkpoint import CheckpointError, lazy_tensors, save
from axonn_tp.checkpoint.lazily import SafeFile
from axonn_tp.grid.lazy import LazyTensor, recording
from axonn_tp.grid.regions import regions
from tests.axonn_tp.test_grids import gpt_plan
from tests.distributed import meshes, run_ranks

CONFIG = GPTConfig(vocabulary=50, context=6, layers=2, heads=4, hidden=24)
GRIDS = {
    2: [Grid(2), Grid(1, 2), Grid(1, 1, 2), Grid(gdata=2)],
    4: [Grid(2, 2), Grid(2, 1, 2), Grid(1, 2, 2), Grid(1, 1, 4)],
}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes of each read."""
    sizes: list[int] = []
    original = SafeFile.read

    def read(self: SafeFile, name: str, cut: Any) -> Tensor:
        tensor = original(self, name, cut)
        sizes.append(tensor.nbytes)
        return tensor

    with mock.patch.object(SafeFile, "read", read):
        yield sizes


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    tensors = {"a": torch.randn(4, 6), "b": torch.randn(4, 6), "one": torch.tensor(2.5), "whole": torch.arange(6)}
    save_file(tensors | {"half": torch.randn(3).bfloat16()}, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_nothing_is_read_before_it_is_used(file: Path) -> None:
    with counted() as sizes:
        lazy = lazy_tensors(file)
        parameter = nn.Parameter(lazy["a"])
        assert isinstance(parameter, nn.Parameter) and parameter.device.type == "cpu" and parameter.requires_grad
        narrow = lazy["a"].to(torch.float64)[...].detach()
        assert (narrow.dtype, narrow.shape) == (torch.float64, (4, 6)) and lazy["half"].dtype == torch.bfloat16
        copied = copy.deepcopy(nn.ParameterDict({"a": parameter}))["a"]
        assert torch.empty_like(parameter, device="meta").is_meta and parameter.unread == copied.unread > 0
        with recording():
            joined = torch.cat([torch.stack([lazy["a"], lazy["b"]]).flatten(0, 1).t().contiguous(), lazy["a"].t()], -1)
            q, k = joined.bfloat16().chunk(2)
        assert not sizes
    expected = torch.cat([torch.cat([lazy["a"] + 0, lazy["b"] + 0]).t(), (lazy["a"] + 0).t()], -1).bfloat16()
    assert torch.equal(q, expected[:3]) and torch.equal(k + 0, expected[3:])
    assert (
        type(copied + 0) is Tensor and torch.equal(copied, parameter) and torch.equal(narrow, (parameter + 0).double())
    )
    assert lazy["one"].item() == 2.5 and lazy["whole"].tolist() == [0, 1, 2, 3, 4, 5]


def test_of_joined_tensors_a_rectangle_is_read(file: Path) -> None:
    """As the experts of a mixture are, which HF's files have apart."""
    lazy = lazy_tensors(file)
    with recording():
        joined = torch.cat([torch.stack([lazy["a"], lazy["b"]], 1), torch.stack([lazy["b"], lazy["a"]], dim=1)], dim=-1)
    whole = joined.source.read()
    for cut in ((slice(1, 3), slice(1, 2), slice(4, 9)), (slice(0, 4), slice(0, 2), slice(7, 8))):
        with counted() as sizes:
            found = joined.source.read(cut)
        assert torch.equal(found, whole[cut]) and sum(sizes) == found.nbytes


def test_what_is_changed_stays_changed(file: Path) -> None:
    parameter, other = (nn.Parameter(one) for one in (lazy_tensors(file)["a"], lazy_tensors(file)["b"]))
    optimizer = torch.optim.SGD([parameter, other], lr=1.0)
    with torch.no_grad():
        parameter[1].zero_()
        nn.init.ones_(other)
    assert parameter.unread == 0 and parameter[1].tolist() == [0] * 6 and torch.equal(other, torch.ones(4, 6))
    other.data = torch.zeros(2, 6)
    assert type(other) is nn.Parameter and other.shape == (2, 6)
    layer = nn.Linear(6, 4)
    layer.weight = nn.Parameter(lazy_tensors(file)["a"], requires_grad=False)
    layer.to(torch.bfloat16)
    assert isinstance(layer.weight, LazyTensor) and layer.weight.unread and layer.weight.dtype == torch.bfloat16
    stored = io.BytesIO()
    torch.save(layer.state_dict(), stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored)["weight"], lazy_tensors(file)["a"].bfloat16() + 0)
    assert not layer.weight.requires_grad and optimizer.param_groups[0]["params"][1] is other
    layer.weight.turn_into(torch.ones(4, 6, dtype=torch.bfloat16))
    layer.requires_grad_(True)(torch.ones(2, 6).bfloat16()).sum().backward()
    assert layer.weight.grad is not None


def test_a_copy_keeps_its_values_when_the_tensor_changes(file: Path) -> None:
    first = lazy_tensors(file)["half"]
    with recording():
        turned = lazy_tensors(file)["a"].t()
    expected, whole = first.clone(), turned.source.read().clone()
    copied, cast, of_turned = copy.deepcopy(first), first.float(), turned.double()
    turned.source.read((slice(0, 2), slice(0, 2)))
    with torch.no_grad():
        first.zero_()
        turned.zero_()
    assert torch.equal(copied, expected) and torch.equal(cast, expected.float())
    assert torch.equal(of_turned, whole.double()) and not turned.any()


def test_a_gpus_writer_reads_no_further_than_it_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU torch asks for several pieces before it writes the first."""
    from torch.distributed.checkpoint import filesystem

    class Ahead(filesystem._SerialCpuLoader):
        def __init__(self, resolve: Any, **keywords: Any) -> None:
            super().__init__(resolve)

        def values(self) -> Iterator[tuple[Tensor, object]]:
            yield from list(super().values())

    model = serial()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    lazy = lazy_tensors(tmp_path / "model.safetensors")
    with torch.device("meta"):
        unread = GPT(CONFIG)
    unread.load_state_dict(lazy, assign=True)
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", Ahead)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    save(tmp_path / "saved", unread, None)
    monkeypatch.undo()
    for name, tensor in lazy_tensors(tmp_path / "saved").items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def serial() -> GPT:
    torch.manual_seed(3)
    return GPT(CONFIG)


def read_shards(folder: Path, grids: list[Grid]) -> list[tuple[bool, int, int]]:
    """By grid: whether weights are the serial model's, bytes that were read, and those of this rank's shards without padding."""
    found = []
    expected = {name: parameter.detach() for name, parameter in serial().named_parameters()}
    for mesh in meshes(grids):
        with torch.device("meta"):
            model = GPT(CONFIG)
        model.load_state_dict(lazy_tensors(folder), assign=True)
        held = {name: id(parameter) for name, parameter in model.named_parameters()}
        with counted() as sizes:
            axonn_tp.parallelize(model, mesh, gpt_plan(CONFIG.heads))
        equal, own = True, 0
        for name, parameter in model.named_parameters():
            layout = layout_of(parameter)
            shard = layout.shard(expected[name], mesh.grid, mesh.coordinates)
            equal &= type(parameter) is nn.Parameter and held[name] == id(parameter) and torch.equal(parameter, shard)
            own += 4 * sum(math.prod(r.sizes) for r in regions(layout, mesh.grid, mesh.coordinates))
        found.append((equal, sum(sizes), own))
    return found


@pytest.mark.parametrize("ranks", GRIDS)
def test_a_rank_reads_its_shards_and_nothing_else(ranks: int, tmp_path: Path) -> None:
    state, weight_map = serial().state_dict(), dict[str, str]()
    for number, names in enumerate((sorted(state)[::2], sorted(state)[1::2])):
        save_file({name: state[name] for name in names}, tmp_path / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(names, f"model-{number}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    total = sum(tensor.nbytes for tensor in state.values())
    for of_rank in run_ranks(read_shards, ranks, tmp_path, GRIDS[ranks]):
        for grid, (equal, read, own) in zip(GRIDS[ranks], of_rank, strict=True):
            assert equal and read == own, grid
            # Only biases and norms are whole along x, y or z.
            assert grid.gdata > 1 or own < 1.2 * total / ranks, grid


def partly_used(folder: Path) -> tuple[bool, bool]:
    """Rank 1 looks at one weight and changes another; rank 0 changes a third."""
    mesh, rank = Mesh.create(2), dist.get_rank()
    with torch.device("meta"):
        model = GPT(CONFIG)
    model.load_state_dict(lazy_tensors(folder), assign=True)
    expected = serial()
    with torch.no_grad():
        if rank == 1:
            model.tokens.weight.norm()
            model.norm.weight.zero_()
        else:
            model.blocks[0].fc1.weight.mul_(2)
        expected.blocks[0].fc1.weight.mul_(2)
    axonn_tp.parallelize(model, mesh, gpt_plan(CONFIG.heads))
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    same = all(torch.equal(p, layout_of(p).shard(e.detach(), mesh.grid, mesh.coordinates)) for p, e in pairs)
    return same, any(isinstance(p, LazyTensor) for p in model.parameters())


def test_what_ranks_have_used_is_rank_0s(tmp_path: Path) -> None:
    save_file(serial().state_dict(), tmp_path / "model.safetensors")
    assert run_ranks(partly_used, 2, tmp_path) == [(True, False)] * 2


class Scaled(nn.Module):
    """A weight that the file has, a bias that it has not, and a buffer of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(4))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("steps", torch.arange(3.0), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        nn.init.normal_(self.bias)
        if self.steps.is_meta:
            return
        self.steps.copy_(torch.arange(3.0))


def missing(folder: Path) -> list[Any]:
    torch.manual_seed(5)
    expected = Scaled()
    with torch.device("meta"):
        model = Scaled()
    model.load_state_dict(lazy_tensors(folder), assign=True, strict=False)
    torch.manual_seed(5)
    axonn_tp.parallelize(model, Mesh.create(2), {})
    weight, seen = model.weight.detach(), model.seen
    return [torch.equal(weight, torch.eye(4)), torch.equal(seen, torch.ones(3)), type(seen) is Tensor] + [
        torch.equal(model.bias, expected.bias),
        torch.equal(model.steps, torch.arange(3.0)),
    ]


def test_only_what_the_file_lacks_is_drawn(tmp_path: Path) -> None:
    save_file({"weight": torch.eye(4), "seen": torch.ones(3)}, tmp_path / "model.safetensors")
    assert run_ranks(missing, 2, tmp_path) == [[True] * 5] * 2


def test_a_checkpoint_is_read_in_pieces(tmp_path: Path) -> None:
    model = serial()
    save(tmp_path / "saved", model, None)
    lazy = lazy_tensors(tmp_path / "saved")
    assert lazy.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert lazy[name].unread and torch.equal(lazy[name], tensor)
    cut = (slice(3, 20), slice(5, 11))
    assert torch.equal(lazy["blocks.0.fc1.weight"].source.read(cut), model.blocks[0].fc1.weight[cut])


def test_an_earlier_saves_index_does_not_lead_to_its_files(tmp_path: Path) -> None:
    """Which transformers leaves, and does not look at, where all is saved in one file."""
    save_file({"a": torch.zeros(2)}, tmp_path / "model-1.safetensors")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    for file in ("model-1.safetensors", "model-2.safetensors"):
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
        assert lazy_tensors(tmp_path)["a"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "has no safetensors file"),
        ({"model.safetensors": "no tensors"}, "cannot be read as safetensors"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "b.safetensors"}}'}, "is missing; restore it"),
        ({"model.safetensors.index.json": "[]"}, "is not an index of safetensors files"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(files: dict[str, str], said: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match=said):
        lazy_tensors(tmp_path)
