"""Ranks of one test search for a plan together: the first that comes to a search makes it, the others read what it found.

Every rank makes the same search, most of what starting a small model takes, and ranks on one core would make it one after the
other. They meet by the number of the search and by the model's structure: ranks of other pipeline stages search for themselves.
"""

from __future__ import annotations

import fcntl
import hashlib
import pickle
from itertools import count
from pathlib import Path
from typing import Any

from torch import nn

from axonn_tp.plan.search import auto


def share_searches(folder: str) -> None:
    """Search together with the other ranks that are given this folder; in a rank's own process."""
    search, numbers = auto._search, count()

    def once(model: nn.Module, grid: Any, example_inputs: Any, options: Any, reuse: bool) -> Any:
        if any(hasattr(parameter, "axonn_layout") for parameter in model.parameters()):
            return search(model, grid, example_inputs, options, reuse)  # split before, so that its layers communicate
        tensors = [(name, one.shape, one.dtype, one.device) for name, one in model.state_dict().items()]
        built = (tensors, model.training, str(model), str(getattr(model, "config", None)))
        key = hashlib.sha256(repr((next(numbers), built, grid, options, reuse)).encode()).hexdigest()
        with open(Path(folder, key), "ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if found := file.read():
                return pickle.loads(found)
            made = search(model, grid, example_inputs, options, reuse)
            file.write(pickle.dumps(made))
        return made

    auto._search = once
