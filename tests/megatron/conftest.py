"""A stub of Megatron's parser with our flags."""

import importlib.util
import sys
from pathlib import Path

import pytest

from axonn_plugins.hosts.megatron import arguments, connections, patch

MODEL = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "8", "--seq-length", "32"),
    *("--micro-batch-size", "2", "--global-batch-size", "16", "--transformer-impl", "local"),
]


@pytest.fixture
def host(monkeypatch):
    """A stub of megatron.training.arguments with our flags; what would be installed is in `installed` and `components`."""
    spec = importlib.util.spec_from_file_location("stub", Path(__file__).with_name("stub.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.installed, module.components = [], []
    monkeypatch.setattr(patch, "install", module.installed.append)
    monkeypatch.setattr(patch, "install_components", module.components.append)
    monkeypatch.setattr(patch, "compare_ranks", lambda args: None)
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv(connections.VARIABLE, "1")
    arguments.add_flags(module)

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["/there/pretrain_gpt.py", *MODEL, *flags])
        args = module.parse_args()
        return module.validate_args(args, {})

    module.run = run
    return module
