"""MPI's collectives by mpi4py, where that is installed and mpirun has started the ranks."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Callable

from torch import Tensor

from axonn_plugins.cluster.launch import free_port


def absent() -> str | None:
    """Why MPI is not measured; None where it is."""
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    if not {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"} & os.environ.keys():
        return "the ranks were not started by mpirun"
    return None


def adopt() -> None:
    """Where mpirun has started this process, set the variables that torchrun sets."""
    if "RANK" in os.environ or absent():
        return
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    near = world.Split_type(MPI.COMM_TYPE_SHARED)
    host, port = world.bcast((socket.gethostname(), free_port()))
    os.environ.update(
        RANK=str(world.rank),
        WORLD_SIZE=str(world.size),
        LOCAL_RANK=str(near.rank),
        LOCAL_WORLD_SIZE=str(near.size),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
    )


def leave() -> None:
    """Where mpirun has started this process, say that it is done: a rank's command ends without Python's finalisation."""
    if absent() is None:
        from mpi4py import MPI

        MPI.Finalize()


def calls() -> dict[str, Callable[[Tensor, Tensor], object]]:
    """Collectives on (all blocks, own block)."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return {
        "all_gather": lambda whole, own: world.Allgather(own.numpy(), whole.numpy()),
        "reduce_scatter": lambda whole, own: world.Reduce_scatter_block(whole.numpy(), own.numpy()),
        "all_reduce": lambda whole, own: world.Allreduce(MPI.IN_PLACE, whole.numpy()),
    }
