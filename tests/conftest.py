"""Settings of every test.

A test's time limit goes by progress: whenever it has passed, the test goes on if its processes have worked meanwhile, up to `AT_MOST` times.
A busy machine makes tests slow, but not idle, as ranks are that wait for each other for ever.

Processes are scheduled as batches: gloo's threads turn on messages that nobody has asked for yet, and would take the processor
from the rank that is about to ask (a quarter of the suite's processor time).

Each test worker keeps to its share of the cores: ranks wait for each other a thousand times a second, and do so on one core
without waking another (a fifth of the processor time).

Garbage is collected seldom: what a rank leaves behind lives no longer than its test (a tenth of the processor time). What all tests
import is set apart from it: a search for a plan collects garbage, which took longer than the search.

pccl is not tuned by itself; faults of our own in the search for a plan come out.

What all tests import is in huge pages, also where a file of tests imports more: a rank is forked, and ends, in a third of the processor time.

Ranks' temporary files, and DeepSpeed's kernels, are in a folder of this run, which is deleted at its end. torch guards a compilation by a
file that stays when the process is killed, and whoever comes next then waits for ever: in a folder shared with other runs one killed test
would hang every run after it.
"""

import gc
import os
import shutil
import signal
import tempfile
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from pytest_timeout import timeout_sigalrm

from tests.huge_pages import use_huge_pages

LONGEST = (
    "compose/test_pairs.py",
    "recipes/test_quickstart.py",
    "megatron/test_recipe.py",
    "megatron/test_layers.py",
    "compose/test_experts_on_mesh.py",
    "pccl/test_native.py",
    "deepspeed/test_activation.py",
    "axonn_tp/test_auto.py",
    "axonn_tp/test_grids.py",
    "deepspeed/test_checkpoint.py",
    "deepspeed/test_ted.py",
    "ted_moe/test_moe.py",
    "deepspeed/test_engine.py",
    "huggingface/test_trainer.py",
    "megatron/test_checkpoint.py",
    "fuzz/test_fuzz.py",
    "lightning/test_examples.py",
)
"""Files that begin first, so that none of them is what one worker still does when the other has nothing left."""
AT_MOST = 6
WORKING = 0.1
"""Processors that a test keeps busy; gloo's threads look for messages now and then, also where none will come."""


def pytest_configure(config):
    if hasattr(os, "SCHED_BATCH"):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    gc.set_threshold(50_000, 20, 20)
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        _keep_to_own_cores(int(worker["workerid"].removeprefix("gw")), worker["workercount"])
    else:  # its workers share this folder
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
        os.environ["TMPDIR"] = tempfile.tempdir = folder = tempfile.mkdtemp(prefix="axonn-tests-")
        os.environ["TORCH_EXTENSIONS_DIR"] = f"{folder}/extensions"
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["AXONN_PCCL_TUNE"] = "0"
    os.environ["AXONN_DEBUG"] = "1"


def _keep_to_own_cores(number, workers):
    """Cores are dealt out to the workers, each with all ranks that it starts; of more workers than cores some share one."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, cores[number % len(cores) :: workers])


def pytest_collection_modifyitems(items):
    places = {Path(__file__).parent / file: place for place, file in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


def pytest_collection_finish():
    gc.collect()
    gc.freeze()
    use_huge_pages()


def pytest_runtest_teardown(item, nextitem):
    if nextitem is not None and nextitem.path != item.path:
        use_huge_pages()


def pytest_timeout_set_timer(item, settings):
    """In the place of pytest-timeout's own timer, a limit of wall time."""
    if settings.method != "signal":
        return None
    passed, used = 0, sum(os.times()[:4])  # of this process and all that have ended

    def alarm(number, frame):
        nonlocal passed, used
        __tracebackhide__ = True
        before, used, passed = used, _processor_time(), passed + 1
        if passed == AT_MOST or used - before < WORKING * settings.timeout:
            timeout_sigalrm(item, settings)

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, settings.timeout, settings.timeout)
    return True


def pytest_timeout_cancel_timer(item):
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    return True


def _processor_time():
    """Seconds of this process and all that descend from it."""
    children, ticks = defaultdict(list), {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = file.read_text().rpartition(")")[2].split()
            children[int(fields[1])].append(int(file.parent.name))
            ticks[int(file.parent.name)] = sum(map(int, fields[11:15]))
    total, left = 0, [os.getpid()]
    while left:
        process = left.pop()
        total += ticks.get(process, 0)
        left += children[process]
    return total / os.sysconf("SC_CLK_TCK")
