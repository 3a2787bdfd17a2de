"""A run saved on one grid goes on, bit by bit, on any other, with any plan, and in one process."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import axonn_tp
from axonn_recipes.models.gpt import GPT, GPTConfig
from axonn_tp import Grid, Mesh, layout_of
from axonn_tp.checkpoint import (
    CheckpointError,
    convert_checkpoint,
    export_safetensors,
    full_state_dict,
    import_safetensors,
    load,
    save,
)
from axonn_tp.checkpoint.dealt import Dealt
from axonn_tp.checkpoint.whole import assemble
from axonn_tp.layers.exports import as_shards
from tests.axonn_tp.test_grids import gpt_plan
from tests.deepspeed.scripts import one_sentence
from tests.distributed import made_once, run_ranks
from tests.matrix import thorough

CONFIG = GPTConfig(vocabulary=50, context=6, layers=1, heads=8, hidden=48, tied=True)
SAVED = {4: Grid(2, 1, 2), 8: Grid(2, 1, 2, 2)}
TARGETS = {
    4: {"the same": SAVED[4], "y": Grid(1, 2, 1, 2), "x": Grid(4), "data": Grid(1, 1, 1, 4)},
    8: {"the same": SAVED[8], "y": Grid(1, 2, 4, 1), "x": Grid(8, 1, 1, 1), "data": Grid(1, 1, 1, 8)},
}
"""By ranks: where a run is saved, and where it goes on."""
AFTER = range(2, 4)
"""Steps behind the checkpoint; the second one's loss shows the moments."""
Run = tuple[nn.Module, torch.optim.Optimizer, Any, Mesh | None]


class WithBuffers(GPT):
    """Besides: buffers, a frozen and an empty parameter, one without dims, and a linear that no plan names."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.register_buffer("table", torch.randn(7, 3))
        self.register_buffer("count", torch.tensor(0))
        self.frozen = nn.Parameter(torch.randn(5), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.adapter = nn.Linear(config.vocabulary, 13)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        self.count += 1
        return super().forward(ids, targets) * self.scale + self.adapter.weight.sum() * 0.01


def start(mesh: Mesh | None, seed: int = 0, plan: bool = True, groups: int = 2) -> Run:
    torch.manual_seed(seed)
    model: nn.Module = WithBuffers(CONFIG).double()
    if mesh is not None:
        axonn_tp.parallelize(model, mesh, gpt_plan(CONFIG.heads) if plan else None)
    matrices = [p for n, p in model.named_parameters() if n.endswith("weight")]
    vectors = [p for n, p in model.named_parameters() if not n.endswith("weight")]
    made: Any = [{"params": matrices}, {"params": vectors, "lr": 3e-3}] if groups == 2 else matrices + vectors
    optimizer = torch.optim.AdamW(made, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return model, optimizer, scheduler, mesh


def train(run: Run, steps: range) -> list[float]:
    model, optimizer, scheduler, mesh = run
    losses = []
    for step in steps:
        batch = torch.randint(CONFIG.vocabulary, (8, 7), generator=torch.Generator().manual_seed(step))
        ids = batch if mesh is None else mesh.shard_batch(batch)
        loss = model(ids[:, :-1], ids[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        if mesh is not None:
            axonn_tp.sync_gradients(model.parameters(), mesh)
            dist.all_reduce(loss.data, group=mesh.group("batch"))
        optimizer.step()
        scheduler.step()
        losses.append(loss.item() / (1 if mesh is None else mesh.grid.batch))
    return losses


def contents(run: Run) -> dict[str, Any]:
    """Serial weights, buffers and optimizer states, on every rank."""
    model, optimizer, scheduler, mesh = run
    with as_shards():
        held = {name: (value, value.detach()) for name, value in model.state_dict(keep_vars=True).items()}
    names = {id(p): name for name, p in model.named_parameters()}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            held[f"{names[id(parameter)]} {key}"] = (parameter if value.dim() else value, value)
    rates = {names[id(p)]: group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return whole(held, mesh) | {"rates": rates, "step": scheduler.last_epoch}


def whole(held: dict[str, tuple[torch.Tensor, torch.Tensor]], mesh: Mesh | None) -> dict[str, Any]:
    """Serial tensors from pairs of what carries the layout and what is held."""
    local = {name: value.clone() for name, (_, value) in held.items()}
    if mesh is None:
        return local
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, local)
    split = {name: layout_of(like) for name, (like, _) in held.items() if layout_of(like).axes}
    return local | {name: assemble([rank[name] for rank in ranks], layout, mesh)[0] for name, layout in split.items()}


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    assert a.keys() == b.keys()
    return [n for n in a if not (torch.equal(a[n], b[n]) if isinstance(a[n], torch.Tensor) else a[n] == b[n])]


def resumed(folder: str, mesh: Mesh | None, expected: dict[str, Any], **how: Any) -> dict[str, Any]:
    run = start(mesh, seed=5, **how)
    model, optimizer, scheduler, _ = run
    extra = load(folder, model, mesh, optimizer, scheduler)
    return {"differences": differences(contents(run), expected), "extra": extra, "losses": train(run, AFTER)}


def everything(folder: str) -> dict[str, Any]:
    """All that needs many ranks, in one start; what is done in one process rank 0 does for all."""
    ranks = dist.get_world_size()
    mesh = Mesh(SAVED[ranks])
    run = start(mesh)
    model, optimizer, scheduler, _ = run
    train(run, range(2))
    expected = contents(run)
    saving = save(f"{folder}/grid", model, mesh, optimizer, scheduler, {"position": 17}, asynchronous=True)
    found: dict[str, Any] = {"uninterrupted": train(run, AFTER)}
    assert saving is not None
    saving.wait()
    assert saving.done and differences(contents(run), expected)
    for name, grid in TARGETS[ranks].items():
        found[name] = resumed(f"{folder}/grid", mesh if name == "the same" else Mesh(grid), expected)
    found["serial"] = made_once(lambda: resumed(f"{folder}/grid", None, expected))
    found["no plan, one group"] = attempt(resumed, f"{folder}/grid", mesh, expected, plan=False, groups=1)
    found["no plan"] = resumed(f"{folder}/grid", mesh, expected, plan=False)
    found["from serial"] = resumed(f"{folder}/serial", mesh, made_once(lambda: saved_by_one(f"{folder}/serial")))
    found |= exported(folder, mesh, expected)
    found |= {f"refused {name}": attempt(load, f"{folder}/grid", *wrong) for name, wrong in misfits(mesh).items()}
    if dist.get_rank() == 0:
        flip(next(file for file in sorted(Path(folder, "grid").glob("*.distcp")) if file.stat().st_size > 5000), 4000)
    dist.barrier()
    return found | {"refused damage": attempt(load, f"{folder}/grid", model, mesh)}


def saved_by_one(folder: str) -> dict[str, Any]:
    """What a run in one process has saved."""
    run = start(None)
    train(run, range(2))
    save(folder, run[0], None, run[1], run[2], {"position": 17})
    return contents(run)


def exported(folder: str, mesh: Mesh, expected: dict[str, Any]) -> dict[str, Any]:
    run, other = start(mesh, seed=5), start(Mesh(Grid(1, 2, dist.get_world_size() // 2)), seed=6)
    load(f"{folder}/grid", run[0], mesh)
    export_safetensors(run[0], mesh, f"{folder}/model.safetensors")
    export_safetensors(run[0], mesh, f"{folder}/half.safetensors", torch.bfloat16)
    import_safetensors(other[0], other[3], f"{folder}/model.safetensors")
    serial = start(None, seed=7)[0]
    serial.load_state_dict(load_file(f"{folder}/model.safetensors"))
    full = full_state_dict(run[0], mesh)
    half = load_file(f"{folder}/half.safetensors")
    full_names = set(half)
    return {
        "exported": [n for n, value in serial.state_dict().items() if not torch.equal(value, expected[n])],
        "imported": [n for n, value in contents(other).items() if n in full_names and not torch.equal(value, expected[n])],
        "full": [n for n, value in full.items() if not torch.equal(value, expected[n])],
        "half": [n for n, value in half.items() if not torch.equal(value, expected[n].bfloat16() if expected[n].is_floating_point() else expected[n])],
        "refused export": attempt(export_safetensors, run[0], mesh, folder),
        "refused import": attempt(import_safetensors, nn.Linear(2, 2), mesh, f"{folder}/model.safetensors"),
    }  # fmt: skip


def misfits(mesh: Mesh) -> dict[str, tuple]:
    model, optimizer, scheduler, _ = start(mesh)
    wider, more, fewer = (start(None)[0] for _ in range(3))
    wider.positions = nn.Embedding(9, 48).double()
    more.another = nn.Linear(2, 2)
    del fewer.adapter
    names = [p for name, p in model.named_parameters() if "ln1" not in name]
    return {
        "positions.weight": (wider, mesh),
        "another.weight": (more, mesh),
        "adapter.weight": (fewer, mesh),
        "float32": (copy.deepcopy(wider).float(), mesh),
        "SGD": (model, mesh, torch.optim.SGD(model.parameters())),
        "ln1": (model, mesh, torch.optim.AdamW(names)),
        "not the model's": (model, mesh, torch.optim.AdamW(nn.Linear(2, 2).parameters())),
    }


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def attempt(function: Any, *arguments: Any, **keywords: Any) -> Any:
    try:
        return function(*arguments, **keywords)
    except CheckpointError as error:
        return str(error)


@pytest.fixture(scope="module", params=[4, thorough(8)])
def grids(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("grids")
    return folder, run_ranks(everything, request.param, str(folder))


@pytest.mark.parametrize("target", [*TARGETS[4], "serial", "no plan", "from serial"])
def test_resumes(target: str, grids: tuple[Path, list[dict[str, Any]]]) -> None:
    for rank in grids[1]:
        found = rank[target]
        assert found["differences"] == [] and found["extra"] == {"position": 17}
        assert found["losses"] == pytest.approx(rank["uninterrupted"], abs=1e-10, rel=0)
        if target == "the same":
            assert found["losses"] == rank["uninterrupted"]


@pytest.mark.parametrize("what", ["exported", "imported", "full", "half"])
def test_safetensors(what: str, grids: tuple[Path, list[dict[str, Any]]]) -> None:
    assert all(rank[what] == [] for rank in grids[1])


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("refused positions.weight", ["positions.weight", "(6, 48)", "(9, 48)"]),
        ("refused another.weight", ["another.weight"]),
        ("refused adapter.weight", ["adapter.weight"]),
        ("refused float32", ["float64", "float32"]),
        ("refused SGD", ["AdamW", "SGD"]),
        ("refused ln1", ["ln1"]),
        ("refused not the model's", ["(2, 2)"]),
        ("refused damage", [".distcp", "which holds"]),
        ("refused import", ["weight", "model.safetensors"]),
        ("refused export", ["cannot be written: Is a directory"]),
        ("no plan, one group", ["options", "group"]),
    ],
)
def test_refused_on_all_ranks(case: str, words: list[str], grids: tuple[Path, list[dict[str, Any]]]) -> None:
    messages = {rank[case] for rank in grids[1]}
    assert len(messages) == 1
    message = messages.pop()
    assert isinstance(message, str) and one_sentence(message) and all(word in message for word in words), message


def test_each_rectangle_is_written_once(grids: tuple[Path, list[dict[str, Any]]]) -> None:
    """Replicas share the work; nothing is written twice."""
    files = json.loads((grids[0] / "grid" / "manifest.json").read_text())["files"]
    pieces = {name: [what for *_, what in found] for name, found in files.items() if name.endswith(".distcp")}
    written = [what for found in pieces.values() for what in found]
    assert len(pieces) == len(grids[1]) and len(set(written)) == len(written)
    assert max(map(len, pieces.values())) <= 3 * min(map(len, pieces.values()))


def test_convert_needs_no_ranks(grids: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, _ = grids
    convert_checkpoint(folder / "serial", folder / "converted.safetensors")
    model = start(None)[0]
    train(start(None), range(1))
    model.load_state_dict(load_file(folder / "converted.safetensors"))
    again = start(None, seed=8)[0]
    load(folder / "serial", again, None)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True))


def test_shared_weight_under_one_name(tmp_path: Path) -> None:
    serial = start(None)[0]
    tensors = {name: value.clone() for name, value in serial.state_dict().items() if name != "tokens.weight"}
    save_file(tensors, tmp_path / "m.safetensors")
    other = start(None, seed=3)[0]
    import_safetensors(other, None, tmp_path / "m.safetensors")
    assert torch.equal(other.tokens.weight, serial.tokens.weight) and other.head.weight is other.tokens.weight


def test_two_weights_for_a_shared_one_are_refused(tmp_path: Path) -> None:
    """Either would be lost."""
    untied = GPT(GPTConfig(50, 6, 2, 8, 48, False))
    export_safetensors(untied, None, tmp_path / "m.safetensors")
    tied = GPT(GPTConfig(50, 6, 2, 8, 48, True))
    before = {name: value.clone() for name, value in tied.state_dict().items()}
    with pytest.raises(CheckpointError, match="tokens.weight and head.weight differ in .*m.safetensors"):
        import_safetensors(tied, None, tmp_path / "m.safetensors")
    assert all(torch.equal(value, before[name]) for name, value in tied.state_dict().items())
    with torch.no_grad():
        untied.head.weight.copy_(untied.tokens.weight)
    export_safetensors(untied, None, tmp_path / "m.safetensors")
    import_safetensors(tied, None, tmp_path / "m.safetensors")
    assert torch.equal(tied.tokens.weight, untied.tokens.weight)


def test_tied_is_not_untied(tmp_path: Path) -> None:
    models = [GPT(GPTConfig(50, 6, 2, 8, 48, tied)) for tied in (True, False)]
    for saved, other in (models, models[::-1]):
        save(tmp_path / "tied", saved, None)
        with pytest.raises(CheckpointError, match="head.weight"):
            load(tmp_path / "tied", other, None)


def draw() -> list[float]:
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]  # noqa: NPY002


def draws(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    mesh, model = Mesh(Grid(2, 1, 2, 1)), nn.Linear(2, 2)
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(100 + dist.get_rank())
    save(f"{folder}/random", model, mesh)
    found["saved"] = draw()
    for name, grid in {"same": mesh.grid, "same batch": Grid(2, 1, 1, 2), "other": Grid(1, 1, 4, 1)}.items():
        load(f"{folder}/random", model, Mesh(grid))
        found[name] = draw()
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(100 + dist.get_rank() // 2)
    save(f"{folder}/alike", model, mesh)
    found["alike"] = draw()
    load(f"{folder}/alike", model, mesh)
    found["alike again"] = draw()
    found["statistics"] = statistics(folder, mesh)
    found["beside"] = beside(folder, mesh)
    return found


class Keeping(nn.Linear):
    """Keeps an extra state, a tensor or not, and states that its state dict has copies of, as metrics have."""

    def __init__(self, extra: Any) -> None:
        super().__init__(3, 2)
        self.extra, self.seen, self.list = extra, torch.randn(4), [torch.randn(2)]

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination |= {f"{prefix}seen": self.seen.clone(), f"{prefix}list": [one.clone() for one in self.list]}

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in ("seen", "list"):
            setattr(self, name, state_dict.pop(f"{prefix}{name}", getattr(self, name)))
        super()._load_from_state_dict(state_dict, prefix, *rest)


class Copying(nn.Linear):
    """Has copies in its state dict: one that follows from its weight, and one that it does not take back."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.drawn = torch.randn(3)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination |= {f"{prefix}doubled": self.weight.detach() * 2, f"{prefix}drawn": self.drawn.clone()}


def beside(folder: str, mesh: Mesh) -> dict[str, Any]:
    """What is no parameter or buffer, in a checkpoint and in files of weights; and what only rank 0 cannot save."""
    saved, other = (nn.Sequential(Keeping(torch.randn(3)), Keeping({"seen": draw()})) for _ in range(2))
    axonn_tp.parallelize(saved, mesh)
    save(f"{folder}/beside", saved, mesh)
    load(f"{folder}/beside", other, None)
    export_safetensors(saved, mesh, f"{folder}/beside.safetensors")
    dist.barrier()
    full, held = full_state_dict(saved, mesh), other.state_dict()
    odd = (thing for thing in "ab") if dist.get_rank() == 0 else None
    dealt = nn.Sequential(Dealt([nn.Linear(2, 2)]))
    save(f"{folder}/copying", Copying(), mesh)
    return {
        "read": [name for name in full if not same(full[name], held[name])],
        "names": set(full) == set(held),
        "file": set(load_file(f"{folder}/beside.safetensors")),
        "copying": attempt(load, f"{folder}/copying", Copying(), mesh),
        "at once": attempt(save, f"{folder}/odd", saved, mesh, extra=odd),
        "later": attempt(save, f"{folder}/odd", saved, mesh, extra=odd, asynchronous=True),
        "dealt": attempt(save, f"{folder}/odd", dealt, mesh, extra=odd),
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, list):
        return all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else bool(one == other)


def statistics(folder: str, mesh: Mesh) -> set[float]:
    """Averages of BatchNorm, of which each rank has its own where it reads other samples, as a checkpoint has them."""
    made = [nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(4))) for _ in range(2)]
    with torch.no_grad():
        for buffer in made[0].buffers():
            buffer.fill_(dist.get_rank())
    save(f"{folder}/statistics", made[0], mesh)
    load(f"{folder}/statistics", made[1], mesh)
    return {value for buffer in made[1].buffers() for value in buffer.flatten().tolist()}


def check_beside(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["read"] == [] and ranks[0]["names"]
    assert ranks[0]["file"] == {f"{number}.{name}" for number in range(2) for name in ("weight", "bias", "seen")}
    for case, words in {
        "copying": "drawn in state_dict() of Copying is neither a parameter nor a buffer",
        "at once": "cannot pickle 'generator' object\"); leave out of extra what cannot be pickled",
        "later": "cannot pickle 'generator' object\"); leave out of extra what cannot be pickled",
        "dealt": "cannot pickle 'generator' object\"); leave out of extra what cannot be pickled",
    }.items():
        answers = {rank[case] for rank in ranks}
        assert len(answers) == 1 and words in answers.pop(), (case, answers)


def test_random_numbers_go_on(tmp_path: Path) -> None:
    ranks = run_ranks(draws, 4, str(tmp_path))
    saved = [rank["saved"] for rank in ranks]
    assert [rank["same"] for rank in ranks] == saved
    assert [rank["same batch"] for rank in ranks] == [saved[0], saved[0], saved[2], saved[2]]
    assert [rank["other"] for rank in ranks] == [saved[0]] * 4
    assert [rank["alike again"] for rank in ranks] == [rank["alike"] for rank in ranks]
    assert [rank["statistics"] for rank in ranks] == [{0.0}] * 4  # the first rank's, as stock
    check_beside([rank["beside"] for rank in ranks])
    written = {name: sorted(file.name for file in (tmp_path / name).glob("random_*")) for name in ("random", "alike")}
    assert written["random"] == [f"random_{rank}.pickle" for rank in range(4)]
    assert written["alike"] == ["random_0.pickle", "random_2.pickle"]
