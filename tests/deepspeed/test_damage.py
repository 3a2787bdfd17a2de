"""Two flipped bytes in any file of a checkpoint are named, on every rank at once; so is whatever else is wrong with its files."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_plugins.autoload import activate
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.common import complete
from axonn_tp.checkpoint import files, sums
from tests import groups
from tests.deepspeed import samo_training, ted_training, test_checkpoint, test_ted_checkpoint, training
from tests.deepspeed.scripts import one_sentence
from tests.distributed import run_ranks
from tests.matrix import asked, names
from tests.pipeline import test_tensor_parallel
from tests.pipeline import training as pipelines

activate()
SECONDS = 15.0


def tensor(grid: str, stage: int) -> Any:
    run = test_checkpoint.case(grid, "bf16" if stage else "fp32", stage)
    engine = training.start(run)
    training.train(engine, run.batches()[:1])
    return engine


def ted(name: str) -> Any:
    case = test_ted_checkpoint.SAVED[name]
    engine = ted_training.start(case)
    ted_training.train(engine, case, slice(0, 1))
    return engine


def samo() -> Any:
    case = samo_training.Case({"sparsity": 0.8}, same=True)
    engine = samo_training.start(case)
    samo_training.train(engine, case, range(1))
    return engine


def pipeline(**changes: Any) -> Any:
    case = pipelines.Case(pipelines.tied, microbatches=2, **changes)
    engine = pipelines.start(case)
    pipelines.train(engine, case, [0])
    return engine


PATHS: dict[str, Callable[[], Any]] = {
    "tensor parallel, stage 0": partial(tensor, "gx2gz2", 0),
    "tensor parallel, stage 1": partial(tensor, "gz2gdata2", 1),
    "tensor parallel, stage 2": partial(tensor, "gx2gy2", 2),
    "ted": partial(ted, "ZeRO-1, bf16"),
    "samo": samo,
    "pipeline": pipeline,
    "pipeline, tensor parallel": partial(pipeline, tensor=test_tensor_parallel.split(gx=2)),
    "pipeline, offload": partial(pipeline, dtype="fp32", offload={}),
}


EVERY_RUN = {"ted", "samo", "pipeline, tensor parallel"}
"""A tensor-parallel engine's own files are what `otherwise` damages."""


def told(load: Callable[..., Any], *arguments: Any, **keywords: Any) -> tuple[str, float]:
    """Error that a rank was told, and the seconds until then; ranks leave together."""
    started, answer = time.monotonic(), "loaded"
    try:
        load(*arguments, **keywords)
    except ConfigError as error:
        answer = str(error)
    seconds = time.monotonic() - started
    dist.barrier()
    return answer, seconds


def with_bytes(file: Path, change: Callable[[bytes], bytes | None], look: Callable[[], Any]) -> Any:
    """Look while a file has the bytes that it is changed to; for None it is gone."""
    before = file.read_bytes() if file.exists() else None
    dist.barrier()
    if dist.get_rank() == 0:
        after = change(before or b"")
        if after is None:
            file.unlink()
        else:
            file.write_bytes(after)
    dist.barrier()
    found = look()
    if dist.get_rank() == 0:
        if before is None:
            file.unlink()
        else:
            file.write_bytes(before)
    dist.barrier()
    return found


def flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes(byte ^ 0xFF for byte in data[at : at + 2]) + data[at + 2 :]


def with_full_disk(look: Callable[[], Any]) -> Any:
    """Look while rank 0 can write no file of DeepSpeed's."""
    save = torch.save

    def write(what: Any, to: Any, *rest: Any, **keywords: Any) -> None:
        if dist.get_rank() == 0 and str(to).endswith("_states.pt"):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(what, to, *rest, **keywords)

    torch.save = write
    try:
        return look()
    finally:
        torch.save = save


def with_instead(module: Any, name: str, rank: int, made: Callable[..., Any], look: Callable[[], Any]) -> Any:
    """Look while a function of a module is another one on one rank."""
    before = getattr(module, name)
    if dist.get_rank() == rank:
        setattr(module, name, made)
    try:
        return look()
    finally:
        setattr(module, name, before)


def unread(folder: Path, names: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error", str(folder))


def begun_anew(folder: Path) -> Callable[..., list[int]]:
    """Another run begins to write a checkpoint while its files are summed up."""
    own = complete._summed

    def summed(*given: Any) -> list[int]:
        found = own(*given)
        files.begin(folder)
        return found

    return summed


def looked(path: str, folder: Path) -> dict[str, Any]:
    engine = PATHS[path]()
    engine.save_checkpoint(str(folder), "one", client_state={"note": 7})
    load = partial(told, engine.load_checkpoint, str(folder))
    answers = {
        str(file.relative_to(folder)): with_bytes(file, flipped, load)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name != "axonn_latest"  # empty
    }
    answers["full"] = with_full_disk(partial(told, engine.save_checkpoint, str(folder), "two"))
    dist.barrier()
    answers["left"] = sorted(entry.name for entry in folder.iterdir())
    answers["in the end"] = load()
    return answers


def grids(folder: str, paths: list[str]) -> dict[str, Any]:
    groups.reuse()
    pipelines.ready()
    found = {path: looked(path, Path(folder) / path) for path in paths if "pipeline" not in path}
    return found | {"otherwise": otherwise(Path(folder) / "otherwise")}


def stages(folder: str, paths: list[str]) -> dict[str, Any]:
    pipelines.ready()
    return {path: looked(path, Path(folder) / path) for path in paths if "pipeline" in path}


def otherwise(folder: Path) -> dict[str, Any]:
    engine = tensor("gx2gz2", 1)
    for tag in ("one", "two"):
        engine.save_checkpoint(str(folder), tag)
    load = partial(told, engine.load_checkpoint, str(folder))
    states = next(file for file in sorted((folder / "two").rglob("*.distcp")) if file.stat().st_size)
    gone: dict[str, Any] = {
        "missing": with_bytes(states, lambda data: None, load),
        "truncated": with_bytes(states, lambda data: data[:-1], load),
        "longer": with_bytes(states, lambda data: data + b"?", load),
        "extra": with_bytes(folder / "two" / "mp_rank_77_model_states.pt", lambda data: b"?", load),
        "a note": with_bytes(folder / "two" / "README.md", lambda data: b"ours", load),
        "another latest": with_bytes(folder / "latest", lambda data: b"one", load),
        "no latest": with_bytes(folder / "latest", lambda data: None, load),
        "no marker": with_bytes(folder / "two" / "axonn_complete", lambda data: None, load),
        "unknown tag": load(tag="three"),
        "itself": told(engine.load_checkpoint, str(folder / "two")),
        "by tag": load(tag="one"),
        "name": str(states.relative_to(folder / "two")),
    }
    gone["ranks differ"] = load(tag="one" if dist.get_rank() else "two")
    gone["a file"] = told(engine.save_checkpoint, str(folder / "latest"), "one")
    gone["no folder"] = told(engine.save_checkpoint, "", "one")
    gone["no tag"] = told(engine.save_checkpoint, str(folder), "")
    gone["no place"] = told(engine.save_checkpoint, str(folder), "latest/three")
    gone["unreadable"] = with_instead(
        sums, "cut", 1, unread, partial(told, engine.save_checkpoint, str(folder), "three")
    )
    gone["begun anew"] = with_instead(
        complete,
        "_summed",
        0,
        begun_anew(folder / "three"),
        partial(told, engine.save_checkpoint, str(folder), "three"),
    )
    gone["saves differ"] = told(engine.save_checkpoint, str(folder), "one" if dist.get_rank() else "two")
    return gone


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder, wanted = str(tmp_path_factory.mktemp("damage")), asked(request, "path")
    paths = [path for path in PATHS if (path,) in wanted]
    both = zip(*(run_ranks(part, 4, folder, paths) for part in (grids, stages)), strict=True)
    return [one | other for one, other in both]


def agreed(ranks: list[dict[str, Any]], part: str, case: str) -> str:
    """Error that all ranks were told, within seconds."""
    answers = {rank[part][case][0] for rank in ranks}
    assert len(answers) == 1, answers
    assert max(rank[part][case][1] for rank in ranks) < SECONDS
    answer = answers.pop()
    assert one_sentence(answer), answer
    return answer


@pytest.mark.parametrize("path", names(PATHS, EVERY_RUN))
def test_every_file(path: str, ranks: list[dict[str, Any]]) -> None:
    files = [name for name in ranks[0][path] if name not in ("full", "left", "in the end")]
    assert len(files) > 4
    # What is split is in no file of DeepSpeed's.
    assert "tensor" in path or "cannot be written (No space left on device); make room" in agreed(ranks, path, "full")
    assert agreed(ranks, path, "in the end") == "loaded"
    assert not [name for rank in ranks for name in rank[path]["left"] if "incomplete" in name]
    for name in files:
        answer = agreed(ranks, path, name)
        assert Path(name).name in answer, f"{name}: {answer}"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", "is damaged in {name}; restore it, or load another checkpoint: one"),
        ("truncated", "is damaged in {name}; "),
        ("longer", "is damaged in {name}; "),
        ("extra", "mp_rank_77_model_states.pt, which was not saved with it"),
        ("a note", "loaded"),
        ("another latest", "latest names 'one' and the checkpoint that was saved as the latest is two"),
        (
            "no latest",
            "so it is damaged or was changed; pass the tag that you mean: two, one",
        ),
        ("no marker", "axonn_complete"),
        ("unknown tag", "has no checkpoint 'three'; correct the folder or the tag: two, one"),
        ("itself", "is itself a checkpoint; load it by load_checkpoint("),
        ("by tag", "loaded"),
        ("ranks differ", "rank 1 would load 'one' and rank 0 'two'"),
        ("saves differ", "rank 1 saves "),
        ("no place", 'latest/three.incomplete" cannot be used: Not a directory; give another'),
        ("unreadable", 'three.incomplete" cannot be used: Input/output error'),
        ("begun anew", "for another process has begun to write it, too; give each run a folder of its own"),
        ("no folder", 'save_dir = "" names no folder; name one'),
        ("no tag", "tag = '' names no checkpoint; give a name"),
        ("a file", '/latest" cannot be used: File exists; give another'),
    ],
)
def test_otherwise(case: str, words: str, ranks: list[dict[str, Any]]) -> None:
    assert words.format(name=ranks[0]["otherwise"]["name"]) in agreed(ranks, "otherwise", case)
