"""The environment of a rank: who started it, torchrun, srun or a user; and on a GPU that it shares with others."""

from __future__ import annotations

import os
import re
import subprocess

from axonn_plugins.config import ConfigError


def as_rank() -> bool:
    """True if a launcher started this process as a rank; srun's variables become torchrun's."""
    # Set in srun's steps alone, not in the script of a job.
    if "RANK" not in os.environ and int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        os.environ.update(_of_slurm())
    return {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


def sharing(rank: int) -> dict[str, str]:
    """The variables of a rank that shares a GPU of this machine: it sees that one alone.

    NCCL, which refuses two ranks of a host on one GPU, takes each for a host of its own.
    """
    import torch

    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = seen.split(",") if seen else [str(number) for number in range(torch.cuda.device_count())]
    network = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_NET": "Socket", "NCCL_MAX_NCHANNELS": "1"}
    chosen = {name: os.environ.get(name, value) for name, value in network.items()}
    return chosen | {"NCCL_HOSTID": f"rank {rank}", "CUDA_VISIBLE_DEVICES": devices[rank % len(devices)]}


def _of_slurm() -> dict[str, str]:
    tasks = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if tasks is None:
        raise ConfigError(
            "SLURM_STEP_TASKS_PER_NODE is not set beside SLURM_STEP_NUM_TASKS; start by srun, or by torchrun"
        )
    return {
        "RANK": os.environ["SLURM_PROCID"],
        "WORLD_SIZE": os.environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": os.environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": tasks[0],
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or _first_host(),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(20000 + int(os.environ.get("SLURM_JOB_ID", "0")) % 10000),
    }


def _first_host() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    if not re.search(r"[\[,]", nodes) and nodes:
        return nodes
    try:
        asked = ["scontrol", "show", "hostnames", nodes]
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        raise ConfigError(
            f'scontrol does not tell the first of the nodes "{nodes}"; set MASTER_ADDR to its name'
        ) from None
