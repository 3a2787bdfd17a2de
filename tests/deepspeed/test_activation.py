"""Stock scripts see the block without a new line, and without the block DeepSpeed is itself, byte for byte."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.deepspeed.scripts import NO_KERNEL, environment, last_line, run_script, sentences, starter
from tests.deepspeed.training import Case, attempt, serial, start, train
from tests.distributed import run_ranks
from tests.matrix import thorough

OURS = "axonn_plugins.hosts.deepspeed.engine.AxonnEngine"
STOCK = "deepspeed.runtime.engine.DeepSpeedEngine"
WAYS = {
    "dict": "config=config",
    "path": "config='ds_config.json'",
    "base64": "config=base64.urlsafe_b64encode(json.dumps(config).encode()).decode()",
    "config_params": "config_params=config",
    "args": "args=argparse.Namespace(deepspeed_config='ds_config.json')",
}
CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 0, "reduce_bucket_size": 100000, "allgather_bucket_size": 100000},
}
BLOCK = {"axonn": {"tensor_parallel": {}}}
WITHOUT_US = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
HEAD = f"""
from deepspeed import initialize
import argparse, base64, json, sys
import deepspeed, torch
{NO_KERNEL}
config = {CONFIG | BLOCK!r}
json.dump(config, open('ds_config.json', 'w'))
def start(**how):
    model = torch.nn.Linear(4, 3)
    return initialize(model=model, model_parameters=model.parameters(), **how)[0]
def name(engine):
    return type(engine).__module__ + '.' + type(engine).__qualname__
"""


Start = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def started() -> Iterator[Start]:
    with starter() as run:
        yield run


@pytest.fixture(scope="module")
def started_without_us() -> Iterator[Start]:
    with starter(**WITHOUT_US) as run:
        yield run


def test_stock_script(tmp_path: Path) -> None:
    """All ways in one process, each followed by a run without the block, beside folders of the user's own."""
    _beside(tmp_path, HARMLESS)
    text = HEAD + "stock = {key: value for key, value in config.items() if key != 'axonn'}\nfound = {}\n"
    for way, how in WAYS.items():
        text += f"found[{way!r}] = name(start({how})), name(start(config=stock))\n"
    text += "print(json.dumps(found))"
    found = json.loads(last_line(run_script(tmp_path, text)[0]))
    assert found == {way: [OURS, STOCK] for way in WAYS}


@pytest.mark.thorough
@pytest.mark.parametrize("before", [False, True])
def test_by_hand(before: bool, started_without_us: Start, tmp_path: Path) -> None:
    """After DeepSpeed is imported; before it, which every other start does, in an interpreter of its own."""
    text = "import axonn_plugins; axonn_plugins.activate(); axonn_plugins.activate()" + HEAD
    run = fresh if before else started_without_us
    assert last_line(run(tmp_path, text + "print(name(start(config=config)))", **WITHOUT_US)) == OURS


TRAINING = (
    f"import deepspeed\n{NO_KERNEL}"
    + """
import json, os, torch, torch._dynamo
import deepspeed.compile.backend, deepspeed.module_inject.auto_ep_layer, deepspeed.runtime.zero.muon.muon_optimizer
rank = os.fork() and 1  # ranks share the imports, also those that an engine makes
os.environ['RANK'] = os.environ['LOCAL_RANK'] = str(rank)
os.environ['WORLD_SIZE'] = '2'
from torch.utils._python_dispatch import TorchDispatchMode
class Seen(TorchDispatchMode):
    calls = []
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function._schema.name
        if 'c10d' in name:
            tensors = [a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
            self.calls.append([name, [[list(t.shape), str(t.dtype)] for t in tensors]])
        return function(*args, **(kwargs or {}))
found = {'losses': [], 'weights': [], 'engines': []}
deepspeed.init_distributed(dist_backend='gloo')
with Seen():
    for stage in (0, 1, 2):
        config = CONFIG
        config['zero_optimization']['stage'] = stage
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 2))
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
        found['engines'].append(type(engine).__module__)
        torch.manual_seed(torch.distributed.get_rank())
        for _ in range(2):
            loss = engine(torch.randn(2, 6)).square().mean()
            engine.backward(loss)
            engine.step()
            found['losses'].append(loss.item().hex())
        found['weights'].append([p.detach().view(torch.int32).tolist() for p in model.parameters()])
found['calls'] = Seen.calls
json.dump(found, open(f'found.{rank}', 'w'))
if rank == 1:
    assert os.wait()[1] == 0
"""
)


def stock_run(run: Start, folder: Path, config: dict[str, Any], first: str = "", **changes: str) -> list[Any]:
    folder.mkdir()
    result = run(folder, first + TRAINING.replace("CONFIG", repr(config)), **changes)
    assert result.returncode == 0, result.stderr
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(2)]


def fresh(folder: Path, text: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return run_script(folder, text, **changes)[0]


BY_TORCH = "import torch; torch._import_device_backends()\n"
"""In an interpreter that was started without us: what `import torch` does in any other."""


@pytest.mark.parametrize("interpreter", ["forked", thorough("fresh")])
def test_without_us_nothing_changes(
    interpreter: str, started: Start, started_without_us: Start, tmp_path: Path
) -> None:
    """Losses, weights and collectives of all stages, to the last bit."""
    expected = stock_run(started_without_us, tmp_path / "never", CONFIG, **WITHOUT_US)
    assert len(expected[0]["calls"]) > 20 and set(expected[0]["engines"]) == {"deepspeed.runtime.engine"}
    assert stock_run(started, tmp_path / "no-block", CONFIG) == expected
    run, first = (fresh, "") if interpreter == "fresh" else (started_without_us, BY_TORCH)
    if first:  # which, with nothing to turn us off, has the block obeyed
        obeyed = run(tmp_path, first + HEAD + "print(name(start(config=config)))", **WITHOUT_US)
        assert last_line(obeyed) == OURS
    assert stock_run(run, tmp_path / "off", CONFIG | BLOCK, first, AXONN_PLUGINS="0") == expected


def _case(**changes: Any) -> Case:
    def build() -> torch.nn.Module:
        from tests.deepspeed.test_engine import mlp

        return mlp()

    return Case(build, lambda: (torch.randn(8, 16), torch.randn(8, 8)), **changes)


def _block_then_stock(stage: int) -> dict[str, Any]:
    import deepspeed
    from deepspeed.utils import groups

    case = _case(grid=(2, 1, 1), stage=stage)
    ours = start(case)
    found = {"ours": train(ours, case.batches())}
    from tests.deepspeed.training import config_of

    config = {key: value for key, value in config_of(case).items() if key != "axonn"}
    model = case.model()
    stock = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    found["classes"] = [type(ours).__name__, type(stock).__name__]
    found["mpu"] = groups.mpu
    found["ranks"] = [ours.dp_world_size, stock.dp_world_size]
    rank, losses = torch.distributed.get_rank(), []
    for step in case.batches():
        total = 0.0
        for micro in step:
            loss = stock(*(t.chunk(2)[rank] for t in micro))
            stock.backward(loss)
            stock.step()
            value = loss.detach().clone()
            torch.distributed.all_reduce(value)
            total += value.item() / 4
        losses.append(total)
    found["stock"] = {"losses": losses}
    again = start(case)
    found["again"] = train(again, case.batches())
    return found


def _all_stages() -> dict[int, Any]:
    return {stage: attempt(_block_then_stock, stage) for stage in (0, 1, 2)}


def test_an_engine_with_the_block_then_one_without() -> None:
    expected = serial(_case())
    for rank in run_ranks(_all_stages, 2):
        for found in rank.values():
            assert not isinstance(found, str), found
            assert found["classes"] == ["AxonnEngine", "DeepSpeedEngine"]
            assert found["mpu"] is None and found["ranks"] == [1, 2]
            for run in ("ours", "stock", "again"):
                assert found[run]["losses"] == pytest.approx(expected["losses"], rel=1e-6)
                if run != "stock":  # which knows no norm at stage 0
                    assert found[run]["norms"] == pytest.approx(expected["norms"], rel=1e-6)


ARMING = """
import os, sys, time, torch
sys.pycache_prefix, sys.dont_write_bytecode = sys.argv[1], False
for _ in range(6):
    if os.fork() == 0:
        import axonn_plugins.autoload as autoload
        began = time.process_time()
        autoload.activate()
        print(time.process_time() - began, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_arming_is_cheap(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ARMING, str(tmp_path)]
    variables = environment(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    run = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    seconds = [float(line) for line in run.stdout.splitlines()][1:]  # the first one compiled the modules
    print(f"arm: median {1e3 * statistics.median(seconds):.2f} ms")
    assert len(seconds) == 5 and statistics.median(seconds) < 0.02


TWO_RANKS = """
import os
rank = int(os.fork() == 0)  # ranks share the imports; rank 0, which waits until the other knows, is the one that ends last
os.environ['RANK'] = os.environ['LOCAL_RANK'] = str(rank)
try:
    start(config=config)
finally:
    if rank == 0:
        open('code of rank 1', 'w').write(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""
THEIRS = "raise SystemExit('theirs ran')"
# Folders and modules that users have beside their scripts; what a plain start of the block must not mind.
HARMLESS = {
    "plugins/__init__.py": THEIRS,
    "recipes/__init__.py": THEIRS,
    "samo/__init__.py": THEIRS,
    "samo_data/__init__.py": THEIRS,
    "ted_moe/data.txt": "",
    "axonn_tp/data.txt": "",
}


def _beside(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


@pytest.mark.parametrize(
    ("name", "block", "form"),
    [
        ("axonn_tp", {"tensor_parallel": {}}, "{}.py"),
        ("ted_moe", {"ted": {}}, "{}/__init__.py"),
        ("samo", {"samo": {"sparsity": 0.5}}, "{}.py"),
    ],
)
def test_a_module_that_hides_ours_is_refused_where_it_is_needed(
    name: str, block: Any, form: str, started: Start, tmp_path: Path
) -> None:
    _beside(tmp_path, {form.format(name): "value = 1"})
    text = HEAD + f"config['axonn'] = {block!r}" + TWO_RANKS
    run = started(tmp_path, text, WORLD_SIZE="2")
    assert run.returncode == 1 and (tmp_path / "code of rank 1").read_text() == "1"
    everyone = sentences(run.stderr)
    assert len(everyone) == 2
    for said in everyone:
        assert said.startswith(f"axonn.{next(iter(block))} needs axonn-plugins' own package `{name}`")
        assert str(tmp_path / form.format(name)) in said and "Traceback" not in run.stderr


def test_an_activation_that_fails_ends_the_script(tmp_path: Path) -> None:
    _beside(tmp_path, {"axonn_plugins.py": "raise RuntimeError('theirs ran')"})
    text = "import torch; print('trains dense')"
    (run,) = run_script(tmp_path, text)
    assert run.returncode != 0 and "theirs ran" in run.stderr and "axonn" in run.stderr and not run.stdout
