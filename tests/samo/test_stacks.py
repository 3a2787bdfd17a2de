"""Experts' matrices in one parameter: each is pruned by itself, on any grid."""

import copy

import torch
import torch.distributed as dist
from torch import nn

import samo
from axonn_plugins.samo.mesh import shards_of
from axonn_tp import Grid, Mesh
from axonn_tp.grid.layout import Layout
from tests.distributed import run_ranks
from tests.samo.test_block_mesh import least


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        scale = torch.tensor([0.01, 1.0, 7.0, 0.5])[:, None, None]
        self.gate_up_proj = nn.Parameter(torch.randn(4, 6, 10) * scale)
        self.down_proj = nn.Parameter((torch.randn(4, 3, 6) * scale).round(decimals=2))
        self.conv = nn.Conv1d(4, 6, 3)


def expected(model, sparsity):
    found = {}
    for name in ("gate_up_proj", "down_proj"):
        each = least(
            {str(number): one.abs() for number, one in enumerate(model.get_parameter(name).detach())}, sparsity
        )
        found[name] = torch.stack(list(each.values()))
    return found | least({"conv.weight": model.conv.weight.detach().abs()}, sparsity)


def same(found, wanted, where=""):
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], mask) for name, mask in wanted.items()), where


def test_each_expert_keeps_its_share():
    model = Experts()
    same(samo.magnitude(model, 0.8), expected(model, 0.8))
    whole = samo.magnitude(model, 0.8, stacks=())["gate_up_proj"]
    assert not whole[0].any() and whole[2].double().mean() > 0.4
    search = samo.EarlyBird(model, 0.8, window=1)
    assert not search.observe() and search.observe()
    same(search.masks, expected(model, 0.8))
    gradients = {name: torch.randn(p.shape) for name, p in model.named_parameters() if p.dim() == 3}
    parameters = {name: model.get_parameter(name) for name in gradients}
    masks = samo.magnitude(model, 0.8)
    grown = samo.regrow(parameters, gradients, masks, 0.4, stacks={model.gate_up_proj, model.down_proj})
    for name in ("gate_up_proj", "down_proj"):
        assert torch.equal(grown[name].sum((1, 2)), masks[name].sum((1, 2))) and not torch.equal(
            grown[name], masks[name]
        )


def test_what_stays_is_not_dropped_for_infinite_gradients():
    """As those of pruned weights may be in fp16, where those of kept ones are finite."""
    weight, mask = torch.arange(1.0, 9.0), torch.arange(8) < 4
    gradients = {"w": torch.tensor([0.0] * 4 + [torch.inf] * 4)}
    grown = samo.regrow({"w": weight * mask}, gradients, {"w": mask}, 0.5)["w"]
    assert grown.tolist() == [False, False, True, True, False, False, True, True]


def on_grids(grids):
    serial = Experts()
    wanted = {name: expected(serial, share) for name, share in (("most", 0.8), ("half", 0.5))}
    layouts = {
        "gate_up_proj": lambda grid: Layout((4, 6, 10), ((1, "x"),), parts=1, over_z=True, parts_dim=1),
        "down_proj": lambda grid: Layout((4, 3, 6), ((0, "y"), (2, "x")), over_z=True),
    }
    for grid in grids:
        mesh = Mesh(grid)
        model = copy.deepcopy(serial)
        for name, make in layouts.items():
            layout = make(grid)
            part = nn.Parameter(layout.shard(model.get_parameter(name).detach(), grid, mesh.coordinates))
            part.axonn_layout = layout
            setattr(model, name, part)
        for name, share in (("most", 0.8), ("half", 0.5)):
            found = samo.magnitude(model, share, shards=shards_of(mesh))
            for key, mask in wanted[name].items():
                if key in layouts:
                    mask = layouts[key](grid).shard(mask.to(torch.uint8), grid, mesh.coordinates).bool()
                assert torch.equal(found[key], mask), (key, grid)
    dist.barrier()


def test_on_grids_of_four():
    run_ranks(on_grids, 4, [Grid(1, 1, 1, 4), Grid(2, 2, 1, 1), Grid(1, 1, 4, 1), Grid(2, 1, 2, 1), Grid(1, 2, 2, 1)])
