"""A checkpoint is complete or absent whenever a save is killed, and refused when any byte of it has changed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import axonn_tp
import samo
from axonn_plugins.cluster.launch import RankFailed
from axonn_tp import Mesh
from axonn_tp.checkpoint import CheckpointError, files, latest, load, save
from axonn_tp.checkpoint.optimizer import optimizer_state, optimizer_targets, whole_pieces
from axonn_tp.checkpoint.ranks import Ranks
from axonn_tp.checkpoint.state import model_state
from axonn_tp.checkpoint.training import Reading
from tests.distributed import run_ranks
from tests.matrix import thorough


def small(value: float) -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def held(folder: Path) -> float:
    """Which model the checkpoint holds; all its weights are the same."""
    model = small(0.0)
    load(folder, model, None)
    values = {value for parameter in model.parameters() for value in parameter.flatten().tolist()}
    assert len(values) == 1
    return values.pop()


def killed_at(call: int, write: Callable[[], Any]) -> bool:
    """True if a forked process that runs `write` was killed just before its `call`-th change of the file system."""
    child = os.fork()
    if child == 0:
        left = call

        def count(function: Callable[..., Any]) -> Callable[..., Any]:
            def counted(*arguments: Any, **keywords: Any) -> Any:
                nonlocal left
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*arguments, **keywords)

            return counted

        for name in ("fsync", "rename", "mkdir", "unlink", "rmdir"):
            setattr(os, name, count(getattr(os, name)))
        Path.open = count(Path.open)  # type: ignore[method-assign]
        write()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert os.WIFEXITED(status) or os.WTERMSIG(status) == signal.SIGKILL
    return os.WIFSIGNALED(status)


def test_killed_at_every_step_of_a_save(tmp_path: Path) -> None:
    folder, call, seen = tmp_path / "one", 1, []
    save(folder, small(1.0), None)
    while killed_at(call, lambda: save(folder, small(2.0), None)):
        seen.append(held(folder))
        assert latest(tmp_path) == folder
        if call % 3:  # else the next one finds what this one left
            save(folder, small(1.0), None)
            assert held(folder) == 1.0 and os.listdir(tmp_path) == ["one"]
        elif seen[-1] == 2.0:
            save(folder, small(1.0), None)
        call += 1
    assert held(folder) == 2.0 and os.listdir(tmp_path) == ["one"]
    assert len(seen) > 15 and {1.0, 2.0} == set(seen) and seen == sorted(seen)


def die_while_saving(folder: str, seconds: float, asynchronous: bool) -> None:
    mesh = Mesh.create(2, 1, 1)
    model = axonn_tp.parallelize(small(2.0), mesh)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 1:
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        signal.setitimer(signal.ITIMER_REAL, seconds)
    while True:
        save(folder, model, mesh, asynchronous=asynchronous)


@pytest.mark.parametrize(("asynchronous", "times"), [(False, 2), (True, 2), thorough(False, 8), thorough(True, 8)])
def test_a_rank_is_killed_at_any_time(asynchronous: bool, times: int, tmp_path: Path) -> None:
    folder = tmp_path / "one"
    save(folder, small(1.0), None)
    random.seed(3)
    for _ in range(times):
        with pytest.raises(RankFailed):
            run_ranks(die_while_saving, 2, str(folder), random.uniform(0.01, 0.3), asynchronous)
        assert held(folder) in (1.0, 2.0)


def test_every_flipped_byte_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    save(folder, small(1.0), None, extra=torch.arange(3))
    expected = {
        ".metadata": [".metadata"],
        "state.pt": ["state.pt"],
        "random_0.pickle": ["random_0.pickle"],
        "manifest.json": ["manifest.json"],
        "complete": ["complete"],
        "__0_0.distcp": ["__0_0.distcp", "model."],
    }
    assert sorted(os.listdir(folder)) == sorted(expected)
    random.seed(2)
    tensors = set()
    for name, words in expected.items():
        file = folder / name
        data = file.read_bytes()
        for at in {0, len(data) - 1, *(random.randrange(len(data)) for _ in range(40))}:
            file.write_bytes(data[:at] + bytes([data[at] ^ (1 << at % 8)]) + data[at + 1 :])
            with pytest.raises(CheckpointError, match="damaged") as caught:
                load(folder, small(0.0), None)
            assert all(word in str(caught.value) for word in words)
            tensors.add(str(caught.value).split("holds")[-1].split(" at ")[0].strip())
        for damaged in (data[:-1], data[: len(data) // 2]):
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match="damaged"):
                load(folder, small(0.0), None)
        file.unlink()
        with pytest.raises(CheckpointError, match="not complete" if name == "complete" else "damaged"):
            load(folder, small(0.0), None)
        file.write_bytes(data)
    assert {f"model.{name}" for name, _ in small(0.0).named_parameters()} <= tensors
    assert held(folder) == 1.0


def test_absent_and_incomplete(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "none", small(0.0), None)
    save(tmp_path / "one", small(1.0), None)
    shutil.move(tmp_path / "one", tmp_path / "two.incomplete")
    with pytest.raises(CheckpointError, match="does not exist"):
        load(tmp_path / "two", small(0.0), None)
    assert latest(tmp_path) is None
    for name in ("b", "a"):
        save(tmp_path / name, small(1.0), None)
        time.sleep(0.01)
    assert latest(tmp_path) == tmp_path / "a"


def test_old_checkpoints_go_when_the_new_one_is_complete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes").mkdir()
    for step in range(1, 6):
        saving = save(tmp_path / f"step_{step}", small(float(step)), None, asynchronous=step > 3, keep_last=2)
        if saving is not None:
            saving.wait()
    assert sorted(os.listdir(tmp_path)) == ["notes", "step_4", "step_5"]
    assert held(tmp_path / "step_4") == 4.0

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path / "step_6", small(6.0), None, keep_last=1)
    monkeypatch.undo()
    assert (held(tmp_path / "step_4"), held(tmp_path / "step_5")) == (4.0, 5.0)
    # An earlier one that is written anew is the newest.
    save(tmp_path / "step_4", small(7.0), None, keep_last=1)
    assert held(tmp_path / "step_4") == 7.0 and not (tmp_path / "step_5").exists()
    for wrong in (0, True, "2"):
        with pytest.raises(ValueError, match="keep_last = .* is not an integer of at least 1"):
            save(tmp_path / "step_8", small(8.0), None, keep_last=wrong)


def test_what_others_put_into_a_folder_stays(tmp_path: Path) -> None:
    """Also where the folder is of other things alone, which went without a word; what is no folder gives its name."""
    folder = tmp_path / "runs"
    (folder / "step_1").mkdir(parents=True)
    (folder / "notes.txt").write_text("mine")
    for value in (1.0, 2.0):
        save(folder, small(value), None)
        assert held(folder) == value and (folder / "notes.txt").read_text() == "mine" and (folder / "step_1").is_dir()
    assert os.listdir(tmp_path) == ["runs"]
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "file").write_text("another format's")
    for name in ("link", "file"):
        for value in (3.0, 4.0):
            save(tmp_path / name, small(value), None)
            assert held(tmp_path / name) == value
    assert held(folder) == 2.0 and sorted(os.listdir(tmp_path)) == ["file", "link", "runs"]
    assert (folder / "notes.txt").read_text() == "mine" and (folder / "step_1").is_dir()


def test_a_link_to_a_checkpoint_is_not_counted(tmp_path: Path) -> None:
    """As "last" that a script keeps: the marker of the one it led to was deleted through it."""
    for step in range(1, 5):
        save(tmp_path / f"step_{step}", small(float(step)), None, keep_last=3)
        (tmp_path / "last").unlink(missing_ok=True)
        (tmp_path / "last").symlink_to(f"step_{step}")
    assert sorted(os.listdir(tmp_path)) == ["last", "step_2", "step_3", "step_4"]
    save(tmp_path / "step_5", small(5.0), None, keep_last=2)
    assert [held(tmp_path / name) for name in ("step_4", "step_5", "last")] == [4.0, 5.0, 4.0]
    assert not (tmp_path / "step_3").exists()


def test_folders_that_are_no_checkpoints_are_not_deleted(tmp_path: Path) -> None:
    """One that has a file of the marker's name."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "complete").touch()
    for step in (1, 2):
        save(tmp_path / f"step_{step}", small(float(step)), None, keep_last=1)
    assert sorted(os.listdir(tmp_path)) == ["data", "step_2"] and latest(tmp_path) == tmp_path / "step_2"


UNTOLD = """
import os, sys, torch
from axonn_tp.checkpoint import save
def full(*arguments):
    raise OSError(28, "No space left on device")
os.fsync = full
save(sys.argv[1], torch.nn.Linear(2, 2), None, asynchronous=True)
"""


def test_a_save_that_failed_is_told_at_the_end(tmp_path: Path) -> None:
    found = subprocess.run([sys.executable, "-c", UNTOLD, str(tmp_path / "one")], capture_output=True, text=True)
    assert "axonn: a save in the background has failed: " in found.stderr and "No space left" in found.stderr
    assert found.stderr.count("Traceback") == 0 and not (tmp_path / "one").exists()


@pytest.mark.thorough
def test_killed_while_old_ones_are_deleted(tmp_path: Path) -> None:
    """Whatever is left, the newest that is complete is whole."""
    before, folder, call = tmp_path / "before", tmp_path / "now", 1
    before.mkdir()
    for step in (1, 2):
        save(before / f"step_{step}", small(float(step)), None)
    while True:
        shutil.copytree(before, folder)  # with the times of all files
        if not killed_at(call, lambda: save(folder / "step_3", small(3.0), None, keep_last=1)):
            break
        newest = latest(folder)
        assert newest is not None and held(newest) == (3.0 if newest.name == "step_3" else 2.0)
        shutil.rmtree(folder)
        call += 1
    assert os.listdir(folder) == ["step_3"]


def test_a_failed_save_is_told_and_the_old_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    folder = tmp_path / "one"
    save(folder, small(1.0), None)
    for asynchronous in (False, True):
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left"):
            saving = save(folder, small(2.0), None, asynchronous=asynchronous)
            assert saving is not None
            saving.wait()
        monkeypatch.undo()
        assert held(folder) == 1.0 and os.listdir(tmp_path) == ["one"]  # the half one would keep the disk full


def test_a_relative_folder_is_where_the_save_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other").mkdir()
    saving = save("one", small(1.0), None, asynchronous=True)
    monkeypatch.chdir(tmp_path / "other")
    assert saving is not None
    saving.wait()
    assert held(tmp_path / "one") == 1.0 and os.listdir(tmp_path / "other") == []


def test_files_that_another_rank_wrote_elsewhere_are_missed(tmp_path: Path) -> None:
    """As on a disk of its node: the checkpoint before was given up for one without them."""
    save(tmp_path / "one", small(1.0), None)
    mark = files.begin(tmp_path / "one")
    with pytest.raises(CheckpointError, match="the file __1_0.distcp of another rank is not there"):
        files.commit(tmp_path / "one", {"__1_0.distcp": [(3, 5, "model.0.weight at (0, 0)")]}, mark)
    assert held(tmp_path / "one") == 1.0


@pytest.mark.parametrize("times", [0, 2])
def test_pieces_that_are_missing_or_twice_are_refused(times: int, tmp_path: Path) -> None:
    model = small(1.0)
    save(tmp_path / "one", model, None)
    reading = Reading(tmp_path / "one", Ranks(None))
    stored: Any = reading._metadata.state_dict_metadata["model.0.weight"]
    stored.chunks = stored.chunks * times
    with pytest.raises(CheckpointError, match=r"have not each element of model.0.weight once, of shape \(5, 3\)"):
        reading.read(model_state(model)[0])


def test_two_that_write_one_folder_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As two runs, or every rank of DistributedDataParallel by itself: the one before gave its place to files of both."""
    save(tmp_path / "one", small(1.0), None)
    commit = files.commit

    def behind_another(*given: Any) -> None:
        monkeypatch.setattr(files, "commit", commit)
        files.begin(tmp_path / "one")
        commit(*given)

    monkeypatch.setattr(files, "commit", behind_another)
    with pytest.raises(CheckpointError, match="another process has begun to write it, too; give each run a folder"):
        save(tmp_path / "one", small(2.0), None)
    assert held(tmp_path / "one") == 1.0
    save(tmp_path / "one", small(3.0), None)
    assert held(tmp_path / "one") == 3.0 and "writer" not in os.listdir(tmp_path / "one")


def test_adafactor_is_refused(tmp_path: Path) -> None:
    model = small(1.0)
    optimizer = torch.optim.Adafactor(model.parameters())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    with pytest.raises(CheckpointError, match="row_var of parameter 0.weight in Adafactor"):
        save(tmp_path / "one", model, None, optimizer)
    assert os.listdir(tmp_path) == []


class Around(torch.optim.Optimizer):
    """Steps by an optimizer that it holds, as Lookahead does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.AdamW(self.param_groups)


def test_an_optimizer_that_holds_another_is_refused(tmp_path: Path) -> None:
    """Its own state lacks the other one's, and that of `samo.Optimizer` is empty: both went without a word."""
    model = small(1.0)
    save(tmp_path / "one", model, None)
    for optimizer in (Around(model.parameters()), samo.Optimizer(torch.optim.AdamW, model)):
        said = rf"{type(optimizer).__name__} keeps states in another optimizer \(inner: AdamW\)"
        for use in (save, load):
            with pytest.raises(CheckpointError, match=said):
                use(tmp_path / "one", model, None, optimizer)


class Normed(nn.Linear):
    """Keeps a number that it makes of its weights when they are loaded."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.norm = self.weight.detach().norm()
        self.register_load_state_dict_post_hook(lambda module, keys: setattr(module, "norm", module.weight.norm()))


def test_hooks_of_load_state_dict_are_called(tmp_path: Path) -> None:
    saved, other = Normed(), nn.Sequential(Normed())
    save(tmp_path / "one", nn.Sequential(saved), None)
    load(tmp_path / "one", other, None)
    assert torch.equal(other[0].norm, saved.norm)


def test_a_load_that_is_not_strict(tmp_path: Path) -> None:
    """As torch's: weights that are here or there alone stay out, and shapes have to fit all the same."""
    save(tmp_path / "one", small(1.0), None)
    more, fewer = nn.Sequential(*small(2.0), nn.Linear(2, 2)), nn.Sequential(small(2.0)[0])
    last = more[2].weight.detach().clone()
    for model in (more, fewer):
        with pytest.raises(CheckpointError, match="load it into the model that was saved"):
            load(tmp_path / "one", model, None)
        load(tmp_path / "one", model, None, strict=False)
        assert model[0].weight.eq(1).all()
    assert more[1].weight.eq(1).all() and torch.equal(more[2].weight, last)
    with pytest.raises(CheckpointError, match="0.weight has shape"):
        load(tmp_path / "one", nn.Sequential(nn.Linear(4, 5)), None, strict=False)


def test_channels_last(tmp_path: Path) -> None:
    saved, other = (nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last) for _ in range(2))
    save(tmp_path / "one", saved, None)
    load(tmp_path / "one", other, None)
    assert torch.equal(saved.weight, other.weight) and other.weight.is_contiguous(memory_format=torch.channels_last)


def test_numbers_of_a_state_go_to_the_device_of_their_parameter(tmp_path: Path) -> None:
    """As the moments of a parameter without dims; steps stay on the CPU, as torch has them."""
    saved, other = (torch.nn.ParameterList([nn.Parameter(torch.tensor(2.0))]) for _ in range(2))
    for kind, numbers in ((torch.optim.AdamW, ("exp_avg", "exp_avg_sq")), (torch.optim.ASGD, ("eta", "mu", "ax"))):
        optimizer = kind(saved.parameters())
        saved[0].grad = torch.tensor(3.0)
        optimizer.step()
        pieces = whole_pieces(saved, optimizer)
        shards, notes = optimizer_state(optimizer, pieces)
        there = kind(other.to("meta").parameters())
        _, hand_over = optimizer_targets(there, whole_pieces(other, there), {"optimizer": notes, "tensors": {}})
        hand_over()
        state = there.state[other[0]]
        assert not shards and {key: state[key].device.type for key in numbers} == dict.fromkeys(numbers, "meta")
        assert state["step"].device.type == "cpu" and state["step"] == 1


def test_the_state_of_another_schedule_is_refused(tmp_path: Path) -> None:
    """One began anew without a word: torch takes any state, and looks for none of its numbers."""
    model = small(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    exponential = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    save(tmp_path / "one", model, None, optimizer, exponential)
    other = torch.optim.lr_scheduler.LinearLR(torch.optim.SGD(model.parameters(), lr=1.0))
    with pytest.raises(
        CheckpointError, match="holds the state of the schedule ExponentialLR, and .* here is LinearLR; use the same"
    ):
        load(tmp_path / "one", model, None, None, other)
    load(tmp_path / "one", model, None, None, torch.optim.lr_scheduler.ExponentialLR(other.optimizer, 0.1))
