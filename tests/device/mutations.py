"""Every wait, event and record of a stream taken away in turn: does a case on the tests' device notice?

``python -m tests.device FILE --mutations [WORD ...]`` runs the mutations whose file or text has one of the words, by default all (ten
minutes of one core), and prints which were caught, by what, and which survived.
"""

from __future__ import annotations

import importlib.machinery
import multiprocessing
import os
import signal
import subprocess
import sys
import sysconfig
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_SLOTS, _REDUCER = "plugins/axonn_plugins/optim/tiles.py", "plugins/axonn_plugins/optim/reducer.py"
_GATHERING = "plugins/axonn_plugins/optim/gathering.py"
_OVERLAP, _ATTENTION = "axonn_tp/comm/overlap.py", "axonn_tp/context/attention.py"
_TRAVEL = "axonn_tp/context/travel.py"
_DEVICE, _BUCKETED = (
    "plugins/axonn_plugins/pccl/csrc/device.cpp",
    "plugins/axonn_plugins/pipeline/bucketed_optimizer.py",
)
_SCHEDULE = "plugins/axonn_plugins/pccl/csrc/schedule.cpp"
_WIRES = "plugins/axonn_plugins/pipeline/wires.py"
_LINKS, _COLLECTIVES = "plugins/axonn_plugins/pipeline/links.py", "axonn_tp/comm/collectives.py"
_EARLY = ".early()"
"""What a `Pending` gives in the mutated package without waiting."""
_WAIT = '    def wait(self) -> Tensor:\n        """The result."""'
_EARLY_TOO = "    def early(self) -> Tensor:\n        return self.tensor if self._arrange is None else self._arrange(self.tensor)\n\n"
_HOSTS = "plugins/axonn_plugins/hosts"
_LONGEST = 600
"""Seconds of a mutation, behind which it hangs; a case takes less than ten on an idle core."""


@dataclass(frozen=True)
class Mutation:
    """One wait that goes.

    Attributes:
        file: where.
        old: its text, which stands there `place` times before.
        new: what stands there instead.
        cases: that may notice.
    """

    file: str
    old: str
    new: str
    cases: tuple[str, ...]
    place: int = 0


def _pending(file: str, old: str, *cases: str, place: int = 0) -> Mutation:
    return Mutation(file, old, old.replace(".wait()", _EARLY), cases, place)


ASKED = [
    (
        f"{_HOSTS}/lightning/norms.py",
        'dist.all_reduce(norms, dist.ReduceOp.MAX, group=mesh.group("grid"))',
        ("asked_by_lightning",),
    ),
    (
        f"{_HOSTS}/lightning/deepspeed.py",
        "dist.all_reduce(found, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)",
        ("asked_by_lightning",),
    ),
    (
        f"{_HOSTS}/lightning/strategy.py",
        "dist.all_reduce(found, dist.ReduceOp.MIN if all else dist.ReduceOp.MAX)",
        ("asked_by_lightning",),
    ),
    (
        f"{_HOSTS}/lightning/gradients.py",
        'dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.mesh.group("grid"))',
        ("asked_by_lightning",),
    ),
    (
        f"{_HOSTS}/lightning/gradients.py",
        'dist.all_reduce(found, dist.ReduceOp.MAX, group=mesh.group("grid"))',
        ("asked_by_lightning",),
    ),
    (
        f"{_HOSTS}/lightning/replicas.py",
        'dist.all_gather(cards, card, group=self.mesh.group("model"))',
        ("asked_by_lightning",),
    ),
    (
        f"{_HOSTS}/lightning/replicas.py",
        'dist.all_reduce(found, group=_made[0].group("batch"))',
        ("asked_by_lightning",),
    ),
    (f"{_HOSTS}/lightning/states.py", "dist.gather(own, shards, dst=0)", ("asked_by_lightning",)),
    (
        f"{_HOSTS}/transformers/padded_targets.py",
        "dist.all_reduce(found, dist.ReduceOp.MAX)",
        ("asked_by_transformers",),
    ),
    (f"{_HOSTS}/transformers/unfilled.py", "dist.broadcast(seed, 0)", ("asked_by_transformers",)),
    (f"{_HOSTS}/transformers/readers.py", "dist.broadcast(seed, 0)", ("asked_by_transformers",)),
    (
        f"{_HOSTS}/transformers/balance.py",
        "dist.all_gather(lengths, torch.tensor([len(own)], device=rows.device))",
        ("asked_by_transformers",),
    ),
    (f"{_HOSTS}/transformers/balance.py", "dist.all_gather(found, padded)", ("asked_by_transformers",)),
    (
        f"{_HOSTS}/transformers/balance.py",
        "dist.all_reduce(found, dist.ReduceOp.MAX)",
        ("asked_by_transformers",),
    ),
    (f"{_HOSTS}/transformers/kinds.py", "dist.all_reduce(summed)", ("asked_by_transformers",)),
    (f"{_HOSTS}/transformers/neftune.py", "dist.all_gather(found, sizes)", ("asked_by_transformers",)),
    (
        f"{_HOSTS}/transformers/accelerate_patch.py",
        "dist.all_reduce(flag, dist.ReduceOp.MAX)",
        ("asked_by_transformers",),
    ),
    (
        f"{_HOSTS}/megatron/moe.py",
        'dist.broadcast(parameter.data, mesh.experts.ranks("expert_data")[0], _group("expert_data"))',
        ("asked_by_megatron",),
    ),
    (
        f"{_HOSTS}/megatron/checkpoint_optimizer.py",
        "dist.all_reduce(step, dist.ReduceOp.MAX, group)",
        ("asked_by_megatron",),
    ),
    (
        f"{_HOSTS}/common/replicas.py",
        "dist.broadcast(first, src=dist.get_global_rank(group, 0), group=group)",
        ("asked_by_systems",),
    ),
    (f"{_HOSTS}/common/composition.py", "dist.all_reduce(total)", ("composed",)),
    (f"{_HOSTS}/common/divisor.py", "dist.all_reduce(summed, group=readers)", ("weights_of_losses",)),
    (
        f"{_HOSTS}/deepspeed/whole_parameters.py",
        'dist.all_reduce(changed, group=self.parameters[0].axonn_whole.mesh.group("grid"))',
        ("deepspeed_flat",),
    ),
    (
        f"{_HOSTS}/deepspeed/replica_watch.py",
        "dist.all_gather(parts, cards, group=self.mesh.group(group))",
        ("deepspeed_flat",),
    ),
    (
        f"{_HOSTS}/deepspeed/pipeline/losses.py",
        "dist.broadcast(numbers, src=source, group=self.grid.get_pipe_parallel_group())",
        ("deepspeed_stages",),
    ),
    (f"{_HOSTS}/deepspeed/pipeline/batch.py", "dist.all_reduce(found, op=dist.ReduceOp.MAX)", ("deepspeed_stages",)),
    (f"{_HOSTS}/deepspeed/pipeline/engine.py", "dist.all_reduce(total)", ("deepspeed_stages",)),
    (
        f"{_HOSTS}/deepspeed/pipeline/ties.py",
        "dist.all_reduce(_gradient_of(weight, optimizer), group=group)",
        ("deepspeed_stages",),
    ),
    ("samo/optimizer.py", "dist.all_reduce(gradient, group=entry.process_group)", ("asked_by_systems",)),
    (
        "plugins/axonn_plugins/samo/gradients.py",
        "dist.all_reduce(self._sums.setdefault(entry.name, room), group=bucket.process_group)",
        ("asked_by_systems",),
    ),
    ("axonn_tp/checkpoint/whole.py", "dist.gather(wholes[0].contiguous(), shards, dst=0)", ("asked_by_systems",)),
    ("ted_moe/agreement.py", 'dist.broadcast(seed, group=groups.group("tensor"), group_src=0)', ("asked_by_systems",)),
    ("ted_moe/moe.py", "dist.broadcast(whole, group=groups.group(axis), group_src=0)", ("experts",)),
    (
        "axonn_tp/comm/replicated.py",
        'dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.group("grid"))',
        ("grids",),
    ),
    ("ted_moe/adapters/lists.py", 'dist.all_gather(wholes, whole, group=self.mesh.group("z"))', ("lists",)),
    (
        "axonn_tp/grid/distribute.py",
        'dist.all_reduce(extremes, dist.ReduceOp.MAX, group=mesh.group("grid"))',
        ("grids",),
    ),
    ("plugins/axonn_plugins/optim/access.py", "dist.all_reduce(kept, group=bucket.process_group)", ("states",)),
    (
        "plugins/axonn_plugins/optim/move.py",
        "dist.all_to_all_single(received, flat, [sum(size) for size in sizes], to, group=bucket.process_group)",
        ("pruned",),
    ),
    (
        "plugins/axonn_plugins/optim/whole/step.py",
        "dist.all_reduce(arrived, dist.ReduceOp.MAX, group=self._group)",
        ("composed",),
    ),
    (
        "plugins/axonn_plugins/pccl/device_tuner.py",
        "dist.all_reduce(told, dist.ReduceOp.MIN, group)",
        ("deepspeed_pccl_auto",),
    ),
]
"""Questions that hosts and systems ask of all ranks, which wait within the call."""

MUTATIONS = [
    # Tiles that visit the device
    Mutation(_SLOTS, "self.stream.wait_stream(torch.cuda.current_stream(device))", "pass", ("states", "buckets")),
    Mutation(
        _SLOTS, "torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)", "pass", ("states", "buckets")
    ),
    Mutation(_SLOTS, "torch.cuda.synchronize(device)", "pass", ("states", "buckets")),
    Mutation(_SLOTS, "                slot.leave()", "                break", ("states",)),
    Mutation(_SLOTS, "        wait()\n", "        pass\n", ("buckets",)),
    Mutation("plugins/axonn_plugins/optim/segments.py", "    slots.leave()", "    pass", ("states", "pruned")),
    Mutation(_BUCKETED, "        slots.leave()", "        pass", ("buckets",)),
    Mutation(_BUCKETED, "            chunk.wait()", "            pass", ("buckets",)),
    Mutation(_BUCKETED, "known[store], chunk.wait)", "known[store])", ("buckets",)),
    *(Mutation(_BUCKETED, "        self._settle()", "        pass", ("buckets",), place) for place in range(3)),
    Mutation(_BUCKETED, "        settle(store.device for store in self._stores)", "        pass", ("buckets",)),
    *(
        Mutation(
            "plugins/axonn_plugins/optim/state.py",
            "    settle(store.device for store in stores if store.host)",
            "    pass",
            ("states", "pruned"),
            place,
        )
        for place in range(2)
    ),
    Mutation(
        "plugins/axonn_plugins/optim/access.py", "settle([store.device] if store.host else [])", "pass", ("states",)
    ),
    # Gradients that are summed
    Mutation(_GATHERING, "        self.handle.wait()\n", "", ("states",)),
    Mutation("plugins/axonn_plugins/optim/gradients.py", "        handle.wait()\n", "", ("states",)),
    Mutation(_REDUCER, "            self.handle.wait()", "            pass", ("states", "pruned")),
    Mutation(_REDUCER, "        self._wait()\n        return said", "        return said", ("states", "pruned")),
    Mutation(
        _REDUCER,
        "            self._wait()\n        bucket.local",
        "            pass\n        bucket.local",
        ("states",),
    ),
    Mutation(
        "plugins/axonn_plugins/pipeline/reduction.py", "            self.work.wait()", "            pass", ("buckets",)
    ),
    Mutation(
        "axonn_tp/comm/collectives.py", "        done = wait(self.tensor)", "        done = self.tensor", ("grids",)
    ),
    Mutation("axonn_tp/comm/collectives.py", "return _ops.wait_tensor(tensor)", "return tensor", ("grids",)),
    *(
        _pending("axonn_tp/comm/collectives.py", f"return start_{name}.wait()", "grids", "experts")
        for name in (
            "all_reduce(tensor, mesh, axis, op)",
            "all_gather(tensor, mesh, axis, dim, parts, whole)",
            "reduce_scatter(tensor, mesh, axis, dim, parts)",
        )
    ),
    Mutation(_OVERLAP, "            gather.bundle.wait()", "            pass", ("grids",)),
    _pending("axonn_tp/comm/gradients.py", "flat = under_way.wait()", "grids"),
    _pending("axonn_tp/comm/reducer.py", "bucket.pending.wait()", "grids"),
    Mutation("axonn_tp/comm/replicated.py", "        work.wait()", "        pass", ("replicas",)),
    _pending(_OVERLAP, 'start_sum_of_shares(grad, mesh, "z").wait()', "grids"),
    _pending("axonn_tp/comm/bundle.py", "self._pending.wait()", "grids"),
    _pending("axonn_tp/layers/entry.py", "now.gather.wait()", "grids"),
    _pending("axonn_tp/layers/entry.py", "now.reduction.wait()", "grids"),
    _pending("axonn_tp/layers/entry.py", "(now.reduction or self._start(now.total)).wait()", "grids"),
    _pending("axonn_tp/layers/entry.py", "entry.gather(share).wait()", "grids"),
    _pending("axonn_tp/layers/product.py", "route.parts).wait()", "grids"),
    _pending("axonn_tp/layers/product.py", "output_shape[dim]).wait()", "grids"),
    _pending(_TRAVEL, "pending.wait()", "sequences"),
    _pending(_TRAVEL, "self._out).wait()", "sequences"),
    _pending(_TRAVEL, "one_each).wait()", "sequences"),
    _pending(_ATTENTION, "coming.wait()", "sequences"),
    *(_pending(_ATTENTION, "summing.wait()", "sequences", place=place) for place in range(2)),
    # Experts
    _pending("ted_moe/agreement.py", "self._pending.wait()", "experts"),
    Mutation("ted_moe/dispatch.py", "return wait(tensor)", "return tensor", ("experts",)),
    # What waits within a call, and what asks
    *(
        Mutation(file, old, old[:-1].rstrip() + ", async_op=True)", cases)
        for file, old, cases in (
            ("samo/selection.py", "dist.all_reduce(counts, group=shards.group)", ("composed",)),
            ("axonn_tp/grid/distribute.py", 'dist.broadcast(whole, group=mesh.group("grid"), group_src=0)', ("grids",)),
            (
                _GATHERING,
                "dist.all_gather_into_tensor(whole, share.contiguous(), group=bucket.process_group)",
                ("states",),
            ),
            ("axonn_tp/comm/reducer.py", "dist.broadcast(order, src=0)", ("grids",)),
            ("plugins/axonn_plugins/hosts/plain.py", "dist.broadcast(tensor, src=0)", ("composed",)),
            (
                "plugins/axonn_plugins/optim/whole/newton_schulz.py",
                "dist.all_reduce(found, group=group)",
                ("composed",),
            ),
            (
                "plugins/axonn_plugins/optim/whole/exchange.py",
                "received, flat, list(map(_elements, origin)), list(map(_elements, to)), group=self._group\n            )",
                ("composed",),
            ),
            (
                "samo/patterns.py",
                "dist.all_reduce(whole, dist.ReduceOp.MAX, group=shards.group)",
                ("composed",),
            ),
            (
                "plugins/axonn_plugins/pccl/device_tuner.py",
                "dist.all_reduce(seconds, dist.ReduceOp.MAX, group)",
                ("deepspeed_pccl_auto",),
            ),
            (
                "plugins/axonn_plugins/hosts/deepspeed/pipeline/losses.py",
                "dist.all_reduce(averages, group=self.grid.get_data_parallel_group())",
                ("deepspeed_stages",),
            ),
            (
                "plugins/axonn_plugins/hosts/deepspeed/whole_parameters.py",
                'dist.broadcast(held, src=self.modifier, group=whole.mesh.group("grid"))',
                ("deepspeed_flat",),
            ),
            (
                "ted_moe/agreement.py",
                'dist.all_reduce(told, dist.ReduceOp.MAX, group=groups.group("block"))',
                ("experts",),
            ),
        )
    ),
    *(Mutation(file, old, old[:-1] + ", async_op=True)", cases) for file, old, cases in ASKED),
    _pending(
        f"{_HOSTS}/megatron/parameters.py",
        "start_all_reduce_(torch.cat([grad.reshape(-1) for grad in members]), mesh, name).wait()",
        "asked_by_megatron",
    ),
    Mutation(f"{_HOSTS}/deepspeed/pipeline/losses.py", "expected[1].wait()", "pass", ("deepspeed_stages",)),
    Mutation("axonn_tp/layers/tuning.py", "    events[1].record()", "    pass", ("grids",)),
    Mutation(_WIRES, "return self.work.is_completed()", "return True", ("stages_3",)),
    Mutation(_WIRES, "if not self.work.wait(self.timeout):", "if False:", ("stages_3",)),
    Mutation("axonn_tp/layers/tuning.py", "    events[1].synchronize()", "    pass", ("grids",)),
    # PCCL
    Mutation(_SCHEDULE, "for (const auto& work : works) work->wait();", "", ("pccl",)),
    Mutation(_SCHEDULE, "  work->wait();\n", "", ("pccl",)),
    Mutation(_DEVICE, "backend->allreduce(one, {})->wait();", "backend->allreduce(one, {});", ("pccl",)),
    Mutation(_DEVICE, "return !done_ || done_->query();", "return true;", ("pccl",)),
    Mutation(_DEVICE, "    ready.block(side);\n", "", ("pccl",)),
    Mutation(_DEVICE, "    ready.record(streams.getStream(device));\n", "", ("pccl",)),
    Mutation(_DEVICE, "tensor.record_stream(side);", "(void)tensor;", ("pccl",)),
    Mutation(_DEVICE, "{&outputs, &inputs}", "{&outputs}", ("pccl",)),
    Mutation(_DEVICE, "{&outputs, &inputs}", "{&inputs}", ("pccl",)),
    Mutation(_DEVICE, "      guard.reset_stream(*side);\n", "", ("pccl",)),
    Mutation(_DEVICE, "      done_->record(*stream);\n", "", ("pccl",)),
    Mutation(_DEVICE, "      devices.push_back(stream->device());\n", "", ("pccl",)),
    Mutation(
        _DEVICE,
        "  bool wait(std::chrono::milliseconds) override {\n    future_->waitAndThrow();",
        "  bool wait(std::chrono::milliseconds) override {",
        ("pccl",),
    ),
    Mutation(
        "plugins/axonn_plugins/optim/reducer.py", "self._under_way.pop(0).wait()", "self._under_way.pop(0)", ("states",)
    ),
    # Pipelines
    Mutation(_LINKS, "        pending.wait()\n        self.posted", "        self.posted", ("stages_3",)),
    Mutation(_LINKS, "self.channel + 1).wait()", "self.channel + 1)", ("stages_3",)),
    Mutation(_LINKS, "(lambda pending: pending.wait())", "(lambda pending: None)", ("stages_3",)),
    # Losses
    Mutation(
        "plugins/axonn_plugins/hosts/common/goldfish.py",
        "        self._work.wait()\n        if self._watch is not None and",
        "        if self._watch is not None and",
        ("weights_of_losses",),
    ),
]


class Mutated(importlib.machinery.SourceFileLoader):
    """Loads modules as they are, but for the mutated one, and for `Pending`, which gets an `early`."""

    now: Mutation

    def get_code(self, fullname: str) -> Any:
        """See `importlib`."""
        path = self.get_filename(fullname)
        file = str(Path(path).relative_to(ROOT)) if Path(path).is_relative_to(ROOT) else ""
        if file not in (self.now.file, _COLLECTIVES):
            return super().get_code(fullname)
        text = Path(path).read_text()
        text = mutated(text, self.now) if file == self.now.file else text
        return compile(text.replace(_WAIT, _EARLY_TOO + _WAIT), path, "exec")


def mutated(text: str, mutation: Mutation) -> str:
    """A file's text without the wait."""
    parts = text.split(mutation.old)
    assert len(parts) > mutation.place + 1, f"{mutation.file} has no {mutation.old!r} number {mutation.place}"
    before, after = parts[: mutation.place + 1], parts[mutation.place + 1 :]
    return mutation.old.join(before) + mutation.new + mutation.old.join(after)


def tried(mutation: Mutation, device: Path, said: Any) -> None:
    """In a process of its own: tell by what a mutation was caught; nothing where it survived."""
    os.setsid()
    Mutated.now = mutation
    machinery = importlib.machinery
    compiled_ones = machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES
    sys.path_hooks.insert(0, machinery.FileFinder.path_hook(compiled_ones, (Mutated, machinery.SOURCE_SUFFIXES)))
    sys.path_importer_cache.clear()
    from tests.device import cases

    with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):
        for name in mutation.cases:
            error = cases.main(device, [name])
            if error:
                said.put(error[name])
                return
    said.put("")


def _told(mutation: Mutation, device: Path) -> str:
    fork = multiprocessing.get_context("fork")
    said = fork.SimpleQueue()
    process = fork.Process(target=tried, args=(mutation, device, said))
    process.start()
    process.join(_LONGEST * len(mutation.cases))
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
        return "it hung"
    assert not said.empty(), f"the process of {mutation} ended with {process.exitcode}"
    return said.get()


def untouched(device: Path, chosen: list[Mutation]) -> None:
    """Complaints of the cases about the code as it is: none."""
    cases = tuple(dict.fromkeys(name for each in chosen for name in each.cases))
    found = _told(Mutation(_SLOTS, "wait()", "wait()", cases), device)
    assert not found, found


def main(device: Path, words: list[str]) -> int:
    """Try mutations one after the other."""
    chosen = [each for each in MUTATIONS if not words or any(word in each.file + each.old for word in words)]
    survived = 0
    if any(each.file.endswith(".cpp") for each in chosen):
        os.environ["AXONN_CACHE"] = str(_compiled(None, device.parent))
    untouched(device, chosen)
    for each in chosen:
        if each.file.endswith(".cpp"):
            _compiled(each, device.parent)
        found = _told(each, device)
        survived += not found
        words_ = found.strip().splitlines()[-1][:160] if found else ""
        print(
            f"{'caught' if found else 'SURVIVED':9}{each.file}: {each.old.strip()!r} ({each.place}): {words_}",
            flush=True,
        )
    print(f"{len(chosen) - survived} of {len(chosen)} caught")
    return 0


def _compiled(mutation: Mutation | None, folder: Path) -> Path:
    """The cache in which PCCL finds itself mutated; all but the mutated file is compiled once."""
    from torch.utils import cpp_extension

    from axonn_plugins.pccl import build

    objects, cache = folder / "objects", folder / "cache"
    os.environ["AXONN_CACHE"] = str(cache)
    includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"], str(build._SOURCES)]
    flags = [*build._FLAGS, "-O0", *(f"-isystem{path}" for path in includes)]
    objects.mkdir(exist_ok=True)
    linked = []
    for source in sorted(build._SOURCES.glob("*.cpp")):
        text, made = source.read_text(), objects / f"{source.stem}.o"
        if mutation is not None and source.name == Path(mutation.file).name:
            text, made = mutated(text, mutation), objects / "mutated.o"
        if made.name == "mutated.o" or not made.exists():
            written = objects / f"{made.stem}.cpp"
            written.write_text(text)
            subprocess.run([build.compiler(), *flags, "-c", str(written), "-o", str(made)], check=True)
        linked.append(str(made))
    built = build.place()
    built.parent.mkdir(parents=True, exist_ok=True)
    built.unlink(missing_ok=True)
    libraries = [f"-L{path}" for path in cpp_extension.library_paths()]
    names = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lpthread"]
    subprocess.run([build.compiler(), "-shared", *linked, *libraries, *names, "-o", str(built)], check=True)
    return cache
