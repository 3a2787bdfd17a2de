"""``python -m tests.device FILE [CASE ...]``: the cases, on the device that `tests.device.build.compiled` made FILE of.

``python -m tests.device gpu [CASE ...]``: see `tests.device.real`.
``python -m tests.device FILE --mutations [WORD ...]``: see `tests.device.mutations`.
``python -m tests.device FILE --megatron SCRIPT CASES.json``: see `tests.device.megatron`.
"""

import ctypes
import importlib.util
import sys
from pathlib import Path


def preload(file: str) -> None:
    """Load the device beside a torch that is not imported: whether there is one, it asks once, and backward's engine too."""
    found = importlib.util.find_spec("torch")
    assert "torch" not in sys.modules and found is not None and found.origin is not None
    for name in ("torch_global_deps", "c10", "torch_cpu", "torch", "torch_python"):
        ctypes.CDLL(str(Path(found.origin).parent / f"lib/lib{name}.so"), ctypes.RTLD_GLOBAL)
    ctypes.CDLL(file, ctypes.RTLD_GLOBAL)


if __name__ == "__main__":
    file, words = Path(sys.argv[1]).absolute(), sys.argv[2:]
    if sys.argv[1] == "gpu":
        from tests.device import cases

        sys.exit(1 if cases.main(None, words) else 0)
    preload(str(file))
    if words[:1] == ["--mutations"]:
        import torch.testing  # noqa: F401  once for all

        from tests.device import mutations

        sys.exit(mutations.main(file, words[1:]))
    if words[:1] == ["--megatron"]:
        from tests.device import megatron

        sys.exit(megatron.main(file, *words[1:]))
    from tests.device.cases import main

    sys.exit(1 if main(file, words) else 0)
