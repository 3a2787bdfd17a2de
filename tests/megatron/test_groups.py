"""The mesh's process groups in Megatron: its own where it has them, with its timeouts and the options of communicators."""

from __future__ import annotations

import re
from contextlib import redirect_stderr
from datetime import timedelta
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron.core import parallel_state

from axonn_plugins.hosts.megatron import agreement, cpu, process_groups
from axonn_plugins.hosts.megatron.groups import Communicators
from axonn_plugins.hosts.megatron.settings import Settings
from axonn_tp.grid.mesh import AXES, SEVERAL, Mesh
from tests.distributed import run_ranks
from tests.matrix import asked, thorough

NAMES = (*AXES, *SEVERAL)


def _timeouts() -> set[timedelta]:
    mesh = process_groups.mesh()
    return {mesh.group(name)._get_backend(torch.device("cpu")).options._timeout for name in NAMES}


def _all(config: str, numbers: list[int]) -> dict[int, dict[str, Any]]:
    cpu.enable_core()
    found = {}
    for number in numbers:
        found[number] = _made(*GRIDS[number], config)
        parallel_state.destroy_model_parallel()
    return found


def _made(settings: Settings, stages: int, config: str) -> dict[str, Any]:
    made: list[tuple[str, dict]] = []

    def get_nccl_options(name: str, options: dict) -> None:
        made.append((name, options.get(name, {})))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "get_nccl_options", get_nccl_options)
        process_groups.install(settings)
        parallel_state.initialize_model_parallel(
            settings.tensor,
            stages,
            distributed_timeout_minutes=7,
            nccl_communicator_config_path=config,
            high_priority_stream_groups=["tp"],
            create_gloo_process_groups=False,
        )
    mesh = process_groups.mesh()
    found = {name: dist.get_process_group_ranks(mesh.group(name)) for name in NAMES}
    reference = Mesh(mesh.grid, "cpu", stages)
    wanted = {name: dist.get_process_group_ranks(reference.group(name)) for name in NAMES}
    shared = {
        "model": mesh.group("model") is parallel_state.get_tensor_model_parallel_group(),
        "batch": mesh.group("batch") is parallel_state.get_data_parallel_group(),
        "data": mesh.group("data") is parallel_state.get_expert_data_parallel_group(),
    }
    first = _timeouts()
    parallel_state.update_pg_timeout(timedelta(seconds=90))
    told = {"ranks": found == wanted or (found, wanted), "shared": shared, "timeouts": (first, _timeouts())}
    return {**told, "options": made}


GRIDS = [(Settings(2, 2, 2), 1), (Settings(2, 1, 2), 2), (Settings(1, 2, 1), 2), (Settings(1, 1, 4), 1)]
NUMBERS = [0, 1, thorough(2), thorough(3)]


@pytest.fixture(scope="module")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[int, dict[str, Any]]]:
    """Groups that every rank has of each grid."""
    config = tmp_path_factory.mktemp("nccl") / "nccl.yaml"
    config.write_text("tp: {max_ctas: 8}\ndp: {net_name: IB}\n")
    return run_ranks(_all, 8, str(config), sorted({0, *(n for (n,) in asked(request, "number") if n)}), backend="gloo")


@pytest.mark.parametrize("number", NUMBERS)
def test_groups_are_megatrons_own(number: int, made: list[dict[int, dict[str, Any]]]) -> None:
    for rank in (found[number] for found in made):
        assert rank["ranks"] is True
        assert all(rank["shared"].values())


@pytest.mark.parametrize("number", NUMBERS)
def test_timeouts_are_megatrons(number: int, made: list[dict[int, dict[str, Any]]]) -> None:
    for rank in (found[number] for found in made):
        assert rank["timeouts"] == ({timedelta(minutes=7)}, {timedelta(seconds=90)})


def test_x_and_y_have_the_options_of_the_tensor_group(made: list[dict[int, dict[str, Any]]]) -> None:
    asked = made[0][0]["options"]
    # Of 2x2x2 ranks, four groups of x and four of y, then two of x and z.
    assert asked[-10:-2] == [("tp", {"max_ctas": 8, "is_high_priority_stream": True})] * 8
    assert asked[-2:] == [("", {})] * 2


def _started_apart() -> list[str]:
    """What a rank says where the flags of ranks differ."""
    cpu.enable_core()
    told = []
    for apart in (
        {"axonn_gx": dist.get_rank() + 1},
        {"axonn_components": {"samo": f'{{"sparsity": 0.{dist.get_rank() + 1}}}'}},
    ):
        grid = {"tensor_model_parallel_impl": "axonn3d", "axonn_gx": None, "axonn_layout": None}
        agreement.install(SimpleNamespace(**{**grid, **apart}))
        with redirect_stderr(StringIO()) as said, pytest.raises(SystemExit):
            parallel_state.initialize_model_parallel(1, 1)
        told.append(said.getvalue())
    assert not parallel_state.is_initialized(), "before any group is made"
    agreement.uninstall()
    return told


def test_ranks_with_other_flags_are_told_before_groups_are_made() -> None:
    for sizes, systems in run_ranks(_started_apart, 2):
        assert re.search("error: --axonn-gx is 1 on rank 0 and 2 on rank 1; start all ranks with the same", sizes), (
            sizes
        )
        assert re.search(
            r'error: --axonn-samo is {"sparsity": 0.1} on rank 0 and {"sparsity": 0.2} on rank 1', systems
        ), systems


def test_sharp_is_refused() -> None:
    with pytest.raises(ValueError, match="use_sharp = True cannot be combined with axonn3d"):
        Communicators.of({"use_sharp": True, "distributed_timeout_minutes": 1})


def test_an_empty_file_of_options_is_none(tmp_path: Path) -> None:
    (tmp_path / "nccl.yaml").touch()
    found = Communicators.of(
        {"nccl_communicator_config_path": str(tmp_path / "nccl.yaml"), "distributed_timeout_minutes": 3}
    )
    assert found == Communicators(timedelta(minutes=3), {})
