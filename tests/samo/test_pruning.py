import copy
import itertools
import math
import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import axonn_tp
import samo
from axonn_plugins.samo.mesh import shards_of
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp.grid.layout import layout_of
from samo import selection
from samo.pruning import smallest
from tests.distributed import run_ranks
from tests.matrix import thorough

INF = math.inf


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(selection, "CHUNK", 100)


def pruned(parameters, sparsity, scope="global"):
    return smallest(selection.Magnitudes(parameters), sparsity, scope)


def naive(parameters, sparsity, scope="global", least=0):
    """The same by one stable sort of all magnitudes, of which the last `least` stay."""
    if scope == "layer":
        least = int(sparsity < 1)
        return {n: m for name, p in parameters.items() for n, m in naive({name: p}, sparsity, least=least).items()}
    flat = torch.cat([p.detach().reshape(-1).abs().double() for p in parameters.values()])
    mask = torch.ones_like(flat, dtype=torch.bool)
    mask[flat.argsort(stable=True)[: min(round(sparsity * flat.numel()), flat.numel() - least)]] = False
    parts = mask.split([p.numel() for p in parameters.values()])
    return {name: part.view(p.shape) for (name, p), part in zip(parameters.items(), parts, strict=True)}


def same(found, expected):
    assert list(found) == list(expected)
    for name, mask in expected.items():
        assert found[name].dtype == torch.bool and found[name].shape == mask.shape
        assert torch.equal(found[name], mask), name


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(37, 13)
        self.conv = nn.Conv2d(3, 5, 3)
        self.inner = nn.Sequential(nn.Linear(13, 29), nn.LayerNorm(29), nn.Linear(29, 13))
        self.inner[2].weight.requires_grad_(False)
        self.empty = nn.Parameter(torch.zeros(0, 7))
        self.count = nn.Parameter(torch.zeros(2, 2, dtype=torch.int64), requires_grad=False)
        self.head = nn.Linear(13, 37, bias=False)
        self.head.weight = self.table.weight


DEFAULT = ["empty", "conv.weight", "inner.0.weight", "inner.2.weight"]


@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_magnitude_is_the_stable_sort(dtype, scope):
    """Also for 16 bits, where many magnitudes are equal."""
    torch.manual_seed(1)
    parameters = {
        "a": torch.randn(31, 17, dtype=dtype),
        "b": torch.randn(2, 3, 5, dtype=dtype),
        "c": torch.randn(40, 9).to(dtype).t(),
    }
    for sparsity in (0, 0.1, 1 / 3, 0.5, 0.9, 0.999, 1, 1.0):
        found = pruned(parameters, sparsity, scope)
        same(found, naive(parameters, sparsity, scope))
        if scope == "global":
            assert sum(int((~mask).sum()) for mask in found.values()) == round(sparsity * (31 * 17 + 30 + 360))


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-45, INF])
def test_ties_go_by_position(value):
    parameters = {"a": torch.full((21, 11), value), "b": torch.full((3, 3), -value)}
    for sparsity in (0.01, 0.5, 0.97, 0.99):
        same(pruned(parameters, sparsity), naive(parameters, sparsity))


def test_extreme_values():
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, 65504.0, -INF, INF, 3e38, -2.0]).repeat(13).view(10, 13)
    mixed = {"a": values, "b": values.double() * 1e-30, "c": values.bfloat16()}
    for sparsity, tensors in itertools.product((0.2, 0.45, 0.7, 0.95), ({"a": values}, mixed)):
        same(pruned(tensors, sparsity), naive(tensors, sparsity))


def test_nan_and_meta_are_refused():
    weight = torch.ones(20, 20)
    weight[19, 19] = math.nan
    for prune in (lambda p: samo.magnitude(p, 0.5), lambda p: samo.n_of_m(p, 2, 4)):
        with pytest.raises(ValueError, match="'w' holds NaN"):
            prune([("w", weight)])
        with pytest.raises(ValueError, match="'w' is on the meta device"):
            prune([("w", torch.empty(2, 2, device="meta"))])


def test_what_is_pruned_by_default():
    """Frozen matrices, too; no vectors, integers, or tables and what is tied to them."""
    assert list(samo.magnitude(Model(), 0.5)) == DEFAULT
    pairs = list(Model().named_parameters())
    assert set(samo.magnitude(pairs, 0.5)) == {*DEFAULT, "table.weight"}
    model = nn.ModuleDict({"bare": nn.Embedding(3, 3), "attention": nn.MultiheadAttention(4, 2), "rnn": nn.LSTM(3, 3)})
    assert set(samo.magnitude(model, 0.5)) == {
        "attention.in_proj_weight", "attention.out_proj.weight", "rnn.weight_ih_l0", "rnn.weight_hh_l0"
    }  # fmt: skip
    assert samo.magnitude(nn.LayerNorm(3), 0.5) == {}


class Mixtures(nn.Module):
    """Routers as they come: a layer beside a list, a module of the router's class, a matrix beside stacks; and gates that are none."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 6)
        listed = {"gate": nn.Linear(6, 3), "experts": nn.ModuleList(nn.Linear(6, 6) for _ in range(3))}
        shared = nn.ModuleDict({"gate_proj": nn.Linear(6, 4), "gate": nn.Linear(6, 4)})
        self.listed = nn.ModuleDict({**listed, "shared_expert": shared, "shared_expert_gate": nn.Linear(6, 1)})
        kind = type("TopKRouter", (nn.Sequential,), {})
        self.made = nn.ModuleDict({"chooser": kind(nn.Linear(6, 4), nn.Linear(4, 3)), "experts": nn.Linear(6, 6)})
        self.stacked = nn.Module()
        self.stacked.experts, self.stacked.w_gate = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 3))
        self.feed = nn.ModuleDict({"gate_proj": nn.Linear(6, 8), "router_free": nn.Linear(6, 6)})


ROUTERS = {
    *("listed.gate.weight", "listed.shared_expert_gate.weight", "stacked.w_gate"),
    *("made.chooser.0.weight", "made.chooser.1.weight"),
}


def test_vectors_in_several_dims_stay_whole():
    """A class token, scales of channels and those of weight normalisation, of which a share would take channels away whole."""
    model = nn.ModuleDict(
        {"body": torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)), "head": nn.Linear(5, 1)}
    )
    model.token, model.scale = nn.Parameter(torch.randn(1, 1, 6)), nn.Parameter(torch.randn(5, 1, 1))
    model.places = nn.Parameter(torch.randn(1, 4, 6))
    wanted = {"body.parametrizations.weight.original1", "places"}
    pairs = list(model.named_parameters())
    assert set(samo.magnitude(model, 0.5)) == set(samo.magnitude(pairs, 0.5)) == wanted
    assert set(samo.magnitude(model, 0.5, include=["head.weight", "token"])) == {"head.weight", "token"}


def test_routers_stay_whole():
    model = Mixtures()
    matrices = {name for name, p in model.named_parameters() if p.dim() == 2}
    assert len(matrices - ROUTERS) == 10
    assert set(samo.magnitude(model, 0.5)) == set(samo.n_of_m(model, 2, 4)) == matrices - ROUTERS
    assert set(samo.magnitude(model, 0.5, include=["*"])) == matrices
    assert set(samo.magnitude(model, 0.5, include=["listed.*gate.*"])) == {
        "listed.gate.weight",
        "listed.shared_expert.gate.weight",
        "listed.shared_expert_gate.weight",
    }
    assert set(samo.magnitude(model, 0.5, exclude=["listed.gate.weight"])) == matrices - ROUTERS


@pytest.mark.parametrize(
    ("include", "exclude", "expected"),
    [
        (["*"], None, {*DEFAULT, "table.weight"}),
        (["head.weight"], None, {"table.weight"}),
        (["inner.*", "conv.weight"], ["inner.2.*"], {"conv.weight", "inner.0.weight"}),
        (None, ["inner.?.weight", "*.bias"], {"empty", "conv.weight"}),
        ([], None, set()),
    ],
)
def test_patterns(include, exclude, expected):
    assert set(samo.magnitude(Model(), 0.5, include=include, exclude=exclude)) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"include": ["inner.9.*"]}, "include pattern 'inner.9.*' matches no parameter; the nearest name is 'inner."),
        (
            {"exclude": ["convs.weight"]},
            "exclude pattern 'convs.weight' matches no parameter; the nearest name is 'conv.weight'",
        ),
        ({"include": ["*.bias"]}, "include pattern '*.bias' matches only vectors such as 'conv.bias'"),
        ({"include": "*"}, "include = '*' is not a list"),
        ({"scope": "row"}, "scope = 'row' is not a scope"),
        ({"sparsity": 1.1}, "sparsity = 1.1 is not a share"),
        ({"sparsity": math.nan}, "sparsity = nan is not a share"),
        ({"sparsity": True}, "sparsity = True is not a share"),
        ({"sparsity": "0.9"}, "sparsity = '0.9' is not a share"),
    ],
)
def test_what_magnitude_refuses(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        samo.magnitude(Model(), **{"sparsity": 0.5, **arguments})


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (3, 3), (1, 1), (4, 8), (2, 5)])
def test_n_of_m(n, m):
    """Each group of each row by itself; short groups keep at most n."""
    torch.manual_seed(2)
    layers = {
        "linear": nn.Linear(13, 4),
        "conv": nn.Conv2d(6, 3, 2),
        "wide": nn.Linear(16, 2).half(),
        "up": nn.ConvTranspose1d(7, 2, 3),
    }
    model = nn.ModuleDict(layers)
    masks = samo.n_of_m(model, n, m)
    assert list(masks) == ["linear.weight", "conv.weight", "wide.weight", "up.weight"]
    for name, mask in masks.items():
        dim = 0 if name == "up.weight" else 1
        weight = model.get_parameter(name).detach()
        assert mask.shape == weight.shape and mask.is_contiguous()
        rows, kept = (t.movedim(dim, -1).reshape(-1, t.shape[dim]) for t in (weight.abs(), mask))
        for row, of_row in zip(rows.tolist(), kept.tolist(), strict=True):
            for begin in range(0, len(row), m):
                group = row[begin : begin + m]
                order = sorted(range(len(group)), key=group.__getitem__)
                gone = set(order[: max(len(group) - n, 0)])
                assert of_row[begin : begin + m] == [at not in gone for at in range(len(group))]
    with pytest.raises(ValueError, match="n = 5, m = 4 is not a pattern"):
        samo.n_of_m(model, 5, 4)


def test_n_of_m_edges():
    equal = samo.n_of_m([("w", torch.ones(2, 4)), ("none", torch.zeros(3, 0)), ("empty", torch.zeros(0, 7))], 2, 4)
    assert equal["w"].tolist() == [[False, False, True, True]] * 2
    assert equal["none"].shape == (3, 0) and equal["empty"].shape == (0, 7)


def test_masks_in_files(tmp_path):
    model = Model()
    masks = samo.magnitude(model, 0.7, include=["*"])
    ours = tmp_path / "new" / "masks.safetensors"
    samo.write_masks(ours, masks)
    assert sum(mask.numel() for mask in masks.values()) / 8 > ours.stat().st_size - 1000
    save_file({name: mask.to(torch.uint8) for name, mask in masks.items()}, tmp_path / "bytes.safetensors")
    torch.save({name: mask.float() for name, mask in masks.items()}, tmp_path / "floats.pt")
    torch.save(masks, tmp_path / "bools")
    for file in (ours, tmp_path / "bytes.safetensors", tmp_path / "floats.pt", str(tmp_path / "bools")):
        for read in (samo.read_masks(file), samo.read_masks(file, model)):
            assert set(read) == set(masks)
            same({name: read[name] for name in masks}, masks)
    samo.write_masks(tmp_path / "none", {})
    assert samo.read_masks(tmp_path / "none", model) == {}
    by_alias = {"head.weight": masks["table.weight"]}
    samo.write_masks(ours, by_alias)
    same(samo.read_masks(ours, model), {"table.weight": masks["table.weight"]})
    samo.Optimizer(lambda groups: torch.optim.SGD(groups, lr=1), model, samo.read_masks(ours, model))


def test_what_files_are_refused(tmp_path):
    model, file = Model(), tmp_path / "masks"
    whole = torch.ones(5, 3, 3, 3)
    cases = [
        ({"convs.weight": whole}, "masks 'convs.weight', which is no parameter of the model; the nearest name is 'conv.weight'"),
        ({"conv.weight": whole[0]}, "the mask of 'conv.weight' in \".*\" has the shape \\(3, 3, 3\\), the parameter \\(5, 3, 3, 3\\)"),
        ({"conv.weight": whole * 2}, "'conv.weight' in \".*\" holds other values than 0 and 1"),
        ({"conv.weight": whole * math.nan}, "holds other values than 0 and 1"),
        ({"conv.weight": 3}, "'conv.weight' in \".*\" is a int; masks are boolean tensors"),
        ({"table.weight": torch.ones(37, 13), "head.weight": torch.zeros(37, 13)}, "differently, which are one parameter"),
        ([whole], "holds a list; masks are a dict"),
        ({"conv.weight": math.sqrt}, "cannot be read as masks"),
    ]  # fmt: skip
    for saved, message in cases:
        torch.save(saved, file)
        with pytest.raises(ValueError, match=message):
            samo.read_masks(file, model)
    for content in (b"", b"masks", b"\x10" + b"\0" * 7 + b"{garbage", b"PK\3\4 but no archive"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="cannot be read as masks"):
            samo.read_masks(file)
    with pytest.raises(ValueError, match="does not exist"):
        samo.read_masks(tmp_path / "missing")


def test_the_table():
    model = nn.Sequential(nn.Linear(10, 20), nn.Linear(20, 5))
    masks = {"0.weight": torch.arange(200).view(20, 10) >= 150, "1.weight": torch.ones(5, 20, dtype=torch.bool)}
    assert [line.split() for line in samo.sparsity_table(masks, model).splitlines()] == [
        ["parameter", "shape", "kept", "of", "sparsity"],
        ["0.weight", "20x10", "50", "200", "75.00%"],
        ["1.weight", "5x20", "100", "100", "0.00%"],
        ["pruned", "layers", "150", "300", "50.00%"],
        ["model", "175", "325", "46.15%"],
    ]
    assert samo.sparsity_table({}, nn.Module()).splitlines()[-1].split() == ["model", "0", "0", "-"]


def serial_masks(model, mesh, masks):
    """This rank's parts of the serial model's masks, padding pruned."""
    return {
        name: layout_of(p).shard(masks[name].to(torch.uint8), mesh.grid, mesh.coordinates).bool().view(p.shape)
        for name, p in model.named_parameters()
        if name in masks
    }


def on_a_mesh(cases):
    """Odd sizes, so that shards are padded; 16 bits, so that magnitudes are equal."""
    torch.manual_seed(4)
    serial = GPT(GPTConfig(vocabulary=37, context=9, layers=1, heads=2, hidden=12))
    problems = []
    for sizes, dtype in cases:
        model = copy.deepcopy(serial).to(dtype)
        mesh = axonn_tp.Mesh.create(**sizes)
        split = axonn_tp.parallelize(copy.deepcopy(model), mesh, "auto")
        shards = shards_of(mesh)
        for scope, sparsity, include in [
            ("global", 0.9, None),
            ("layer", 0.37, ["*"]),
            ("global", 0.0, ["*"]),
            ("layer", 0.999, None),
        ]:
            expected = serial_masks(split, mesh, samo.magnitude(model, sparsity, scope, include))
            found = samo.magnitude(split, sparsity, scope, include, shards=shards)
            if found.keys() != expected.keys() or not all(torch.equal(found[n], expected[n]) for n in found):
                problems.append((sizes, dtype, scope, sparsity))
        problems += _searches(model, split, shards, sizes)
        problems += _a_nan_on_one_rank(split, shards, mesh)
    return problems + _stages()


def _searches(model, split, shards, sizes):
    """The distances of a search on the mesh are the serial ones."""
    pairs = [samo.EarlyBird(model, 0.6, window=2), samo.EarlyBird(split, 0.6, window=2, shards=shards)]
    for step in range(3):
        for search, trained in zip(pairs, (model, split), strict=True):
            with torch.no_grad():
                for number, parameter in enumerate(trained.parameters()):
                    parameter.mul_(1.0 + 0.3 * ((number + step) % 3))
            search.observe()
    return (
        []
        if pairs[0].distances == pairs[1].distances
        else [("distances", sizes, pairs[0].distances, pairs[1].distances)]
    )


def _a_nan_on_one_rank(split, shards, mesh):
    with torch.no_grad():
        if mesh.coordinates == {"x": 0, "y": 0, "z": 0, "data": 0}:
            split.blocks[0].fc1.weight.view(-1)[0] = math.nan
    try:
        samo.magnitude(split, 0.5, shards=shards)
    except ValueError as error:
        return [] if "'blocks.0.fc1.weight' holds NaN" in str(error) else [error]
    return ["a NaN was not refused"]


def _stages():
    """Each rank holds parameters of its own, as in a pipeline, the last two the same."""
    generator = torch.Generator().manual_seed(5)
    weights = {f"{stage}.w": torch.randn(7, stage + 3, generator=generator).bfloat16() for stage in range(3)}
    name = f"{min(torch.distributed.get_rank(), 2)}.w"
    shards = samo.Shards(
        torch.distributed.group.WORLD, lambda name, p: samo.Shard(tuple(p.shape), 2 if name == "2.w" else 1)
    )
    found = samo.magnitude([(name, weights[name])], 0.7, shards=shards)
    return [] if torch.equal(found[name], samo.magnitude(weights.items(), 0.7)[name]) else ["stages"]


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_one_threshold_over_the_mesh(every):
    grids = [{"gx": 2, "gz": 2}, {"gy": 2}, {"gz": 4}]
    cases = [*itertools.product(grids, (torch.bfloat16, torch.float64))]
    assert run_ranks(on_a_mesh, 4, cases if every else [cases[0], cases[3]]) == [[]] * 4
