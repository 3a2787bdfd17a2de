"""The engine without torch, under sanitizers: whole collectives, and bad frames while work is under way."""

from __future__ import annotations

import hashlib
import hmac
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from axonn_plugins.pccl.build import compiler
from tests.matrix import thorough

ENGINE = Path(__file__).parents[2] / "plugins" / "axonn_plugins" / "pccl" / "csrc"
NATIVE = Path(__file__).parent / "native"


def _run(*command: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    return done.stdout


@pytest.fixture(scope="module", params=[thorough("thread"), thorough("address,undefined")])
def programs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs in one, compiled with a sanitizer, in a folder of its name."""
    folder = tmp_path_factory.mktemp(request.param.split(",")[0])
    lines = "-g0" if folder.name.startswith("thread") else "-g1"  # a fifth of the compiler's time
    flags = ["-std=c++20", "-O0", lines, f"-fsanitize={request.param}", "-fno-sanitize-recover=all", f"-I{ENGINE}"]
    torchs = {"shim", "device", "router", "schedule", "module"}
    alone = ENGINE / "engine.cpp"  # its constants have the names of others'
    together = folder / "together.cpp"  # the standard library's headers are read once
    others = [file for file in sorted(ENGINE.glob("*.cpp")) if file != alone and file.stem not in torchs]
    together.write_text("".join(f'#include "{file}"\n' for file in [*others, NATIVE / "programs.cpp"]))

    def build(source: Path) -> Path:
        made = folder / f"{source.stem}.o"
        _run(compiler(), *flags, "-c", source, "-o", made)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = pool.map(build, [alone, together])
        _run(compiler(), *flags, *objects, "-lpthread", "-o", folder / "programs")
    return folder / "programs"


@pytest.fixture
def rounds(programs: Path) -> int:
    """The thread sanitizer is slow."""
    return 8 if programs.parent.name.startswith("thread") else 100


def test_collectives_among_engines_make_the_right_values(programs: Path, rounds: int) -> None:
    assert f"{rounds} rounds" in _run(programs, "collectives", rounds, 1)


def test_messages_that_go_straight_arrive_whole(programs: Path, rounds: int) -> None:
    assert f"{rounds} rounds" in _run(programs, "exchanges", rounds, 1)


def test_places_on_the_board_are_free_again_after_failures(programs: Path) -> None:
    assert "given back" in _run(programs, "places")


def test_a_message_is_not_taken_from_memory_that_its_sender_uses_otherwise(programs: Path) -> None:
    assert "given up 3 times" in _run(programs, "torn")


def test_messages_that_are_half_here_when_their_group_ends_are_let_go(programs: Path) -> None:
    assert "12 halves" in _run(programs, "halves")


def test_a_rank_lost_among_many_is_named_to_all_after_few_questions(programs: Path) -> None:
    told = _run(programs, "inquiry", 48, 3)
    for of in ("an all-to-all", "a ring"):
        # 15 times in the call's time, 8 who are likely and 8 others of those that it waits for.
        assert int(told.split(f" questions of {of}")[0].split()[-1]) <= 15 * 16, told
    assert "47 of 47 named it" in told


def test_no_frame_crashes_the_engine(programs: Path) -> None:
    frames = 5_000 if programs.parent.name.startswith("thread") else 50_000
    told = _run(programs, "fuzz", frames, 1)
    done, given_up = int(told.split(" calls done")[0].split()[-1]), int(told.split(" given up")[0].split()[-1])
    assert min(done, given_up) > frames // 100, told


def test_digests_are_those_of_the_standard(programs: Path) -> None:
    lines = _run(programs, "secrets", 200).splitlines()
    text, wanted = b"", []
    for length in range(201):
        wanted += [
            f"{hashlib.sha256(text).hexdigest()} same",
            f"{hmac.digest(text, text + b'part', 'sha256').hex()} other",
        ]
        text += bytes([length * 37 % 256])
    assert lines == wanted


def test_what_two_processes_have_in_common_is_the_nearest_that_started_both(programs: Path) -> None:
    sleeps = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    children = [
        subprocess.Popen([sys.executable, "-c", sleeps], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    grandchildren = [int(child.stdout.readline()) for child in children if child.stdout]
    try:

        def common(*pair: int) -> int:
            return int(_run(programs, "secrets", *pair))

        assert common(*grandchildren) == common(children[0].pid, grandchildren[1]) == os.getpid()
        assert common(grandchildren[0], children[0].pid) == common(children[0].pid, grandchildren[0]) == children[0].pid
        assert common(grandchildren[0], grandchildren[0]) == grandchildren[0]
        assert common(1, grandchildren[0]) == 0  # that is everybody's
    finally:
        for number, child in zip(grandchildren, children, strict=True):
            os.kill(number, 9)
            child.kill()
            child.communicate()
