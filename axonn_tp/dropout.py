"""Random numbers inside a parallel model: the same on replicas, others on every share, the same again when recomputed.

Ranks of one x-y plane have the same random state between layers. Where an activation is split among them, code draws
from a fork of that state, seeded by what the state is, by the layer and by the rank's place on the axes that split;
that is from a normal layer's output to the transposed layer's input, and inside a dropout module. If the fork was
drawn from, the state itself moves on by one number; otherwise it is left as it was, so that a model without dropout
draws what the serial model draws. Nothing else is remembered, so a checkpointed block that is run again with its random
state restored drops the same elements.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from axonn_tp.linear_split import LinearSplit
from axonn_tp.mesh import AXES, Mesh
from axonn_tp.overlap import in_backward
from axonn_tp.weight import Split


@dataclass
class _Fork:
    seed: int
    outer: list[Tensor]
    fresh: list[Tensor]


class Forks:
    """The forks of one model; at most one is in use.

    Args:
        mesh: the mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._active: _Fork | None = None

    def __deepcopy__(self, memo: dict) -> Forks:
        """A copied model has its own."""
        return Forks(self.mesh)

    def enter(self, layer: int, axes: tuple[str, ...]) -> None:
        """Draw from a fork from here on, unless one is in use.

        Args:
            layer: a number of the layer, the same on all ranks.
            axes: of x and y, those among whose ranks the activation differs.
        """
        if self._in_use() or all(self.mesh.size(axis) == 1 for axis in axes):
            return
        places = [self.mesh.coordinates[axis] for axis in AXES if axis in (*axes, "z", "data")]
        outer = self._states()
        digest = hashlib.blake2b(repr((layer, places)).encode(), digest_size=7)
        for state in outer:
            digest.update(state.numpy().tobytes())
        seed = int.from_bytes(digest.digest(), "little")
        # torch.manual_seed would also queue a seed, with a stack trace, for every kind of device that is not in use.
        torch.default_generator.manual_seed(seed)
        if self.mesh.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        self._active = _Fork(seed, outer, self._states())

    def leave(self) -> None:
        """Draw from the state that all ranks of the plane share again."""
        if self._in_use():
            assert self._active is not None
            drawn = any(not torch.equal(*pair) for pair in zip(self._states(), self._active.fresh, strict=True))
            torch.set_rng_state(self._active.outer[0])
            if self.mesh.device.type == "cuda":
                torch.cuda.set_rng_state(self._active.outer[1], self.mesh.device)
            if drawn:
                torch.rand(())
        self._active = None

    def _in_use(self) -> bool:
        # A recomputation may end in the middle of a layer; then the state that was restored tells.
        return self._active is not None and torch.initial_seed() == self._active.seed

    def _states(self) -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state(self.mesh.device)] if self.mesh.device.type == "cuda" else []
        return [torch.get_rng_state(), *cuda]


def watch_dropout(model: nn.Module, mesh: Mesh) -> None:
    """Give every dropout module of a parallel model, and the code between its split layers, the right random numbers."""
    forks = Forks(mesh)
    for number, module in enumerate(model.modules()):
        if hasattr(module, "axonn_drops") or not isinstance(module, (_DropoutNd, Split)):
            continue
        module.axonn_drops = _Drops(forks, number)  # type: ignore[assignment]
        dropout = isinstance(module, _DropoutNd)
        module.register_forward_pre_hook(_enter_dropout if dropout else _enter_layer)
        module.register_forward_hook(_leave_dropout if dropout else _leave_layer, always_call=dropout)


@dataclass
class _Drops:
    forks: Forks
    number: int
    axes: tuple[str, ...] = ()
    entered: bool = False


def _enter_dropout(module: nn.Module, inputs: tuple) -> None:
    drops = _drops(module)
    if not in_backward():
        drops.axes = drops.forks.mesh.split_over
    drops.entered = module.training and not drops.forks._in_use()
    if drops.entered:
        drops.forks.enter(drops.number, drops.axes)


def _leave_dropout(module: nn.Module, inputs: tuple, output: object) -> None:
    drops = _drops(module)
    if drops.entered:
        drops.forks.leave()


def _drops(module: nn.Module) -> _Drops:
    return module.axonn_drops  # type: ignore[return-value]


def _opens(module: nn.Module) -> LinearSplit | None:
    """How a layer splits whose features leave split for a partner, so that what draws random numbers next draws by share."""
    split = getattr(module, "split", None)
    if not isinstance(split, LinearSplit) or split.transposed or split.pad_vocabulary:
        return None
    return split if split.gives in ("split", "features") else None


def _enter_layer(module: nn.Module, inputs: tuple) -> None:
    if _opens(module) is None:
        _drops(module).forks.leave()


def _leave_layer(module: nn.Module, inputs: tuple, output: object) -> None:
    drops, split = _drops(module), _opens(module)
    if module.training and split is not None:
        drops.forks.enter(drops.number, split.split_over)
