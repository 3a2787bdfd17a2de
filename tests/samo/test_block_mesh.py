"""The block's pruners on every grid of four ranks, step by step against a slow loop of one process."""

import copy
import functools
import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

import axonn_tp
import samo
from axonn_plugins.config.samo import Samo
from axonn_plugins.hosts.plain import compose
from axonn_plugins.samo.pruning import Pruning
from tests.distributed import run_ranks, same_on_all
from tests.matrix import thorough
from tests.samo.reference import Masked

ADAMW = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
GRIDS = [(1, 1, 1), (4, 1, 1), (1, 4, 1), (1, 1, 4), (2, 2, 1), (2, 1, 2), (1, 2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2)]
PLAN = {"up": {"kind": "normal"}, "down": {"kind": "transposed"}}
STEPS = 7


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.alone = nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 5)

    def forward(self, rows):
        return self.alone(self.down(self.up(rows).tanh()))


def matrices(model):
    return {name: p.detach() for name, p in model.named_parameters() if p.dim() == 2}


def least(scores, sparsity):
    """Masks without the smallest of each parameter, by one stable sort."""
    masks = {}
    for name, score in scores.items():
        mask = torch.ones(score.numel(), dtype=torch.bool)
        count = min(round(sparsity * score.numel()), score.numel() - 1)
        mask[score.reshape(-1).argsort(stable=True)[:count]] = False
        masks[name] = mask.view(score.shape)
    return masks


def magnitudes(model):
    return {name: weight.abs() for name, weight in matrices(model).items()}


def cubic(model, step, masks):
    done = {1: 0, 3: 2, 5: 4, 6: 5}.get(step)
    return None if done is None else least(magnitudes(model), 0.8 - 0.6 * (1 - done / 5) ** 3)


def two_of_three(model, step, _):
    """The eight inputs of `up` and `alone` are on two or four ranks each, in groups of three and one of two."""
    if step != 2:
        return None
    masks = magnitudes(model)
    for name, weight in masks.items():
        rows = []
        for row in weight.tolist():
            kept = []
            for begin in range(0, len(row), 3):
                group = row[begin : begin + 3]
                gone = sorted(range(len(group)), key=group.__getitem__)[: max(len(group) - 2, 0)]
                kept += [at not in gone for at in range(len(group))]
            rows.append(kept)
        masks[name] = torch.tensor(rows)
    return masks


def drawn(model, step, masks):
    return samo.random(model, 0.6, seed=4) if step == 0 else None


def sensitive(model, step, masks):
    """Two batches after the first step, of which the weights do not move."""
    if step != 3:
        return None
    model = copy.deepcopy(model)
    for batch in batches()[1:3]:
        model(batch).square().mean().backward()
    return least({name: (p * p.grad).abs().detach() for name, p in model.named_parameters() if p.dim() == 2}, 0.7)


def rigl(model, step, masks, sparsity=0.7):
    """Of n kept 0.5·(1 + cos(π t/8))·n/2 give way after t = 2, 4 and 6 steps, by the gradients of the next one."""
    if step == 0:
        return least(magnitudes(model), sparsity)
    if step not in (3, 5, 7):
        return None
    dense = copy.deepcopy(model)
    dense(batches()[step - 1]).square().mean().backward()
    found = {}
    for name, weight in matrices(model).items():
        kept, flat = masks[name].reshape(-1).tolist(), weight.abs().reshape(-1).tolist()
        order = sorted((at for at in range(len(flat)) if kept[at]), key=flat.__getitem__)
        count = round(0.25 * (1 + math.cos(math.pi * (step - 1) / 8)) * len(order))
        stay = set(order[count:])
        slope = dense.get_parameter(name).grad.abs().reshape(-1).tolist()
        free = sorted((at for at in range(len(flat)) if at not in stay), key=slope.__getitem__)
        grown = set(free[len(free) - count :])
        assert sparsity > 0.7 or (count and (step > 3 or grown - set(order)))
        found[name] = torch.tensor([at in stay or at in grown for at in range(len(flat))]).view(weight.shape)
    return found


def norms_of(rows):
    return [math.fsum(value * value for value in row) for row in rows]


def least_channels(model, step, _):
    if step != 1:
        return None
    found = {}
    for name, weight in matrices(model).items():
        norms = norms_of(weight.tolist())
        gone = sorted(range(len(norms)), key=norms.__getitem__)[: round(0.4 * len(norms))]
        found[name] = torch.tensor([at not in gone for at in range(len(norms))])[:, None].expand(weight.shape).clone()
    return found


def least_heads(model, step, _):
    """Four heads of three features, outputs of `up` and inputs of `down`."""
    if step != 1:
        return None
    up, down = model.up.weight.detach(), model.down.weight.detach()
    both = norms_of(torch.cat([up, down.t()], 1).tolist())
    heads = [sum(both[3 * head : 3 * head + 3]) for head in range(4)]
    gone = sorted(range(4), key=heads.__getitem__)[:2]
    kept = torch.tensor([at // 3 not in gone for at in range(12)])
    return {"up.weight": kept[:, None].expand(12, 8).clone(), "down.weight": kept[None].expand(8, 12).clone()}


def matrices_nonzero(model):
    return {name: weight != 0 for name, weight in matrices(model).items()}


# Name: the block, a function of the model and the steps that were taken, which gives masks when it is time to prune, and the steps that
# move no weight.
CASES = {
    "schedule": (
        {"sparsity": 0.8, "start_step": 1, "schedule": {"end_step": 6, "interval": 2, "initial": 0.2}},
        cubic,
        (),
    ),
    "2:3": ({"pruner": {"n_of_m": [2, 3]}, "start_step": 2}, two_of_three, ()),
    "rigl": ({"sparsity": 0.7, "regrow": {"interval": 2, "end_step": 8, "fraction": 0.5}}, rigl, (2, 4, 6)),
    # Some ranks have nothing of a matrix, and get some.
    "rigl of few": (
        {"sparsity": 0.97, "regrow": {"interval": 2, "end_step": 8, "fraction": 0.5}},
        functools.partial(rigl, sparsity=0.97),
        (2, 4, 6),
    ),
    "nonzero": ({"pruner": "nonzero"}, lambda model, step, _: matrices_nonzero(model) if step == 0 else None, ()),
    "channels": ({"sparsity": 0.4, "structure": "channel", "start_step": 1}, least_channels, ()),
    "heads": (
        {
            "sparsity": 0.5,
            "structure": {"heads": 4, "rows": ["up.weight"], "columns": ["down.weight"]},
            "start_step": 1,
        },
        least_heads,
        (),
    ),
    "random": ({"sparsity": 0.6, "pruner": {"random": {"seed": 4}}}, drawn, ()),
    "snip": ({"sparsity": 0.7, "pruner": {"snip": {"batches": 2}}, "start_step": 1}, sensitive, (1, 2)),
}


def batches():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(8, 8, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def serial(model, masks_of, held):
    """Weights after each step of masked dense training, pruned as one process would."""
    reference, seen = Masked(ADAMW, model, {}, max_norm=0.05), []
    for step, batch in enumerate(batches()):
        if step == 0:
            take(reference, masks_of(model, 0, reference.masks))
        if step not in held:
            model(batch).square().mean().backward()
            reference.step()
        take(reference, masks_of(model, step + 1, reference.masks))
        seen.append(copy.deepcopy(model.state_dict()))
    return seen


@torch.no_grad()
def take(reference, masks):
    for name, mask in (masks or {}).items():
        # What is regrown begins without state.
        for value in reference.optimizer.state.get(reference.parameters[name], {}).values():
            if value.shape == mask.shape:
                value.mul_(mask & reference.masks[name])
        reference.masks[name] = mask
        reference.parameters[name].mul_(mask)


def made(name):
    """The model; in one case as torch.nn.utils.prune leaves it."""
    torch.manual_seed(3)
    model = Model().double()
    if name == "nonzero":
        for module in (model.up, model.down):
            prune.l1_unstructured(module, "weight", 0.5)
    return model


@functools.cache
def expected_of(name):
    """Weights after each step of one process, which ranks inherit."""
    _, masks_of, held = CASES[name]
    whole = made(name)
    samo.absorb(whole)
    return serial(whole, masks_of, held)


def on_grids(name, shard, grids):
    block, expected = CASES[name][0], expected_of(name)
    file = Path(same_on_all(tempfile.mkdtemp())) / "new" / "kept.json"
    for gx, gy, gz in grids:
        split = {"gx": gx, "gy": gy, "gz": gz, "plan": PLAN}
        settings = {**block, "shard": shard, "report": str(file)}
        run = compose(made(name), ADAMW, {"tensor_parallel": split, "samo": settings}, max_norm=0.05)
        for step, batch in enumerate(batches()):
            run.backward(run.model(run.mesh.shard_batch(batch)).square().mean())
            run.step()
            full = axonn_tp.full_state_dict(run.model, run.mesh)
            for key in full:
                where = f"{key} after {step + 1} on {(gx, gy, gz)}"
                torch.testing.assert_close(full[key], expected[step][key], rtol=0, atol=1e-10, msg=where)
                assert torch.equal(full[key] == 0, expected[step][key] == 0), where
        dist.barrier()
        for key, row in json.loads(file.read_text())["parameters"].items():
            there = int(expected[-1][key].count_nonzero())  # what has just grown again is zero
            assert (row["elements"], row["kept"]) == (
                expected[-1][key].numel(),
                max(there, row["kept"] * name.startswith("rigl")),
            )
    dist.barrier()


def in_turn(names, grids):
    """Each case on one grid in every run, in turn, and on all."""
    pairs = [(name, [grid]) for name, grid in zip(names, grids, strict=False)]
    return [*pairs, *(thorough(name, GRIDS) for name in names)]


@pytest.mark.parametrize(("name", "grids"), in_turn(CASES, GRIDS), ids=str)
def test_equals_one_process_on_every_grid_of_four(name, grids):
    expected_of(name)
    run_ranks(on_grids, 4, name, False, grids)


@pytest.mark.parametrize(("name", "grids"), in_turn(["schedule", "snip", "rigl"], GRIDS[-3:]), ids=str)
def test_equals_one_process_where_states_are_shared_out(name, grids):
    expected_of(name)
    run_ranks(on_grids, 4, name, True, grids)


def overflowing():
    """After which steps masks are others, where the gradients of the first regrowth's step are infinite."""
    run = compose(made("rigl"), ADAMW, {"samo": CASES["rigl"][0]}, loss_scale=1.0)
    pruning, changed = run._composition.pruning, []
    before = pruning.masks(run.optimizer)
    for step, batch in enumerate(batches(), 1):
        run.backward(run.model(batch).square().mean() * (torch.inf if step == 3 else 1.0))
        run.step()
        now = pruning.masks(run.optimizer)
        changed += [step] if any(not torch.equal(now[name], before[name]) for name in now) else []
        before = now
    return changed


def test_a_regrowth_waits_for_finite_gradients():
    assert run_ranks(overflowing, 1) == [[4, 5, 7]]


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.experts, self.gate = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 4)


def kept_whole():
    """Names of what is pruned where the block names nothing, something that is whole anyway, and the router; and beside a frozen layer."""
    found = []
    for patterns in ({}, {"exclude": ["gate.*", "words.weight"]}, {"include": ["gate.weight"]}):
        run = compose(Mixed(), ADAMW, {"samo": {"sparsity": 0.5, **patterns}})
        found.append(run._composition.pruning.names)
    model = Mixed()
    model.lone = nn.Linear(8, 8).requires_grad_(False)
    found.append(set(Pruning(Samo(sparsity=0.5), model, set(model.parameters()), run.mesh).first()))
    return found


def test_tables_routers_and_what_is_frozen_stay_whole():
    assert run_ranks(kept_whole, 1) == [[{"experts.weight"}, {"experts.weight"}, {"gate.weight"}, {"experts.weight"}]]
