"""The machine that this process runs on, as far as it can be known without being told."""

from __future__ import annotations

import os
from dataclasses import replace

import torch

from axonn_plugins.planner import machine

_LIKE = {
    **{"GH200": "alps", "H100": "h100", "H200": "h200", "GB200": "gb200", "B200": "b200"},
    **{"MI250": "frontier", "MI300": "mi300x", "V100": "v100"},
}
"""Machines of the planner by what is in an accelerator's name, the first that is; of others, a100."""


def this_machine(name: str | None, option: str, cpu: bool, memory: float | None = None) -> machine.Machine:
    """The machine that is named; else what `axonn bench network` measured here of such devices; else one like this accelerator.

    Of the last, a node has as many ranks as this run's, and the interfaces of the machine's own nodes; domains of several hosts stay so.

    Args:
        name: of a machine, or the path of its file.
        option: what gave the name, for errors.
        cpu: whether the run is on CPUs.
        memory: bytes of an accelerator; by default what CUDA says.

    Raises:
        ConfigError: there is no such machine, or its file is wrong.
    """
    if name is not None:
        return machine.load(name, option)
    if machine.measured_file().is_file():
        measured = machine.load(str(machine.measured_file()))
        if (measured.device == "cpu") == cpu:
            return measured
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if cpu:
        like, memory = "cpu", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / local
    else:
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
        like = next((found for word, found in _LIKE.items() if word in device), "a100")
    found = machine.load(like)
    if memory is None and not cpu and torch.cuda.is_available():
        memory = float(torch.cuda.get_device_properties().total_memory)
    hosts = found.domain // found.host if found.host else 1
    return replace(
        found,
        domain=local * hosts,
        host=local if found.host else 0,
        interfaces=found.interfaces * found.domain / (local * hosts),
        memory=memory or found.memory,
    )
