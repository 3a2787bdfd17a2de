"""Megatron's activations carry no note of padding, so a sequence that gx does not divide is refused."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from axonn_plugins.hosts.megatron.sharing import check_length  # noqa: E402
from axonn_tp import Mesh  # noqa: E402
from tests.distributed import run_ranks  # noqa: E402


def refused() -> str:
    mesh = Mesh.create(2)
    check_length(8, mesh)
    with pytest.raises(ValueError) as found:
        check_length(7, mesh)
    return str(found.value)


def test_a_length_that_x_cannot_share() -> None:
    for message in run_ranks(refused, 2):
        assert message.startswith("a sequence of 7 tokens does not divide by gx = 2") and "\n" not in message
