"""The nodes of a job: on each an agent of torchrun, which starts ranks, and a head on which agents find each other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from axonn_plugins.cluster import Cluster, address, environment
from axonn_plugins.cluster.launch import die_with
from axonn_plugins.cluster.processes import end, inside

_PORT = 29400
_HEAD = "import signal, torch.distributed as dist; store = dist.TCPStore('0.0.0.0', {port}, is_master=True, wait_for_workers=False); signal.pause()"
_CONF = "is_host=0,join_timeout=600,last_call_timeout=3,read_timeout=60"


class Agents:
    """Agents of one job, one a node; the cluster's last node is the head.

    Args:
        cluster: up.
        ranks_per_node: that each agent starts.
        words: the training script and its arguments, as behind ``python -m``.
        folder: for logs.
    """

    def __init__(self, cluster: Cluster, ranks_per_node: int, words: Sequence[str], folder: Path) -> None:
        self.cluster, self.nodes = cluster, cluster.nodes - 1
        self.starts, self.submissions = 0, 1
        self._ranks, self._words, self._folder = ranks_per_node, list(words), folder
        self.running: dict[int, subprocess.Popen] = {}
        self._port = _PORT
        self.head = self._start(self.nodes, [sys.executable, "-c", _HEAD.format(port=self._port)], "head")
        time.sleep(2)
        for node in range(self.nodes):
            self.start(node)

    def start(self, node: int) -> None:
        """Start the agent of a node, unless one runs there."""
        if node in self.running and self.running[node].poll() is None:
            return
        endpoint = f"{address(self.nodes)}:{self._port}"
        torchrun = f"-m torch.distributed.run --nnodes 1:{self.nodes} --nproc-per-node {self._ranks} --max-restarts 10000 --rdzv-backend c10d"
        words = [
            *torchrun.split(),
            "--rdzv-endpoint",
            endpoint,
            "--rdzv-id",
            f"soak{self.submissions}",
            "--rdzv-conf",
            _CONF,
        ]
        words += ["--local-addr", address(node), "-m", *self._words]
        self.running[node] = self._start(node, [sys.executable, *words], f"node{node}")
        self.starts += 1

    def closed(self, node: int) -> bool:
        """True if an agent found that another had closed their meeting for good, as one does that fails itself."""
        return b"RendezvousClosedError" in (self._folder / f"node{node}.log").read_bytes()[-2000:]

    def submit_again(self) -> None:
        """Start the agents anew that there are, with another meeting: those of the last one can meet no more."""
        self.submissions += 1
        for node in list(self.running):
            self.lose(node)
            self.start(node)

    def _start(self, node: int, words: list[str], log: str) -> subprocess.Popen:
        variables = {
            **os.environ,
            **environment(self.cluster.switch),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "DS_ACCELERATOR": "cpu",
            "DEEPSPEED_TIMEOUT": "1",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            "AXONN_PCCL_TUNE": "0",  # a minute at every start, in which most faults would fall
        }
        own = os.getpid()

        def enter() -> None:
            self.cluster.switch.enter(node)
            die_with(own)

        with (self._folder / f"{log}.log").open("ab") as file:
            return subprocess.Popen(
                words, stdout=file, stderr=file, env=variables, start_new_session=True, preexec_fn=enter
            )

    def processes(self, node: int) -> list[int]:
        """The agent of a node, if it lives, and all that descend from it."""
        agent = self.running.get(node)
        if agent is None or agent.poll() is not None:
            return []
        session = os.getsid(agent.pid)
        found = [agent.pid]
        for pid in inside(self.cluster.switch):
            with suppress(OSError):
                if pid != agent.pid and (os.getsid(pid) == session or parent(pid) in found):
                    found.append(pid)
        return found

    def ranks(self, node: int) -> list[int]:
        """The ranks of a node."""
        agent = self.running.get(node)
        return [pid for pid in self.processes(node) if agent is not None and parent(pid) == agent.pid]

    def send(self, pids: Sequence[int], number: signal.Signals) -> None:
        """A signal to processes, of which some may be gone."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def lose(self, node: int) -> None:
        """Kill all of a node at once."""
        self.send(self.processes(node), signal.SIGKILL)
        if node in self.running:
            self.running.pop(node).wait()

    def end(self) -> None:
        """End all, also what agents that were killed have left."""
        self.send(inside(self.cluster.switch), signal.SIGCONT)
        for node in list(self.running):
            self.lose(node)
        self.head.kill()
        self.head.wait()
        end(inside(self.cluster.switch))


def parent(pid: int) -> int:
    """The parent of a process; 0 where it is gone."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
