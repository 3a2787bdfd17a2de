"""Tables of models: what the planner's files say of them, and their parameters counted."""

from __future__ import annotations

from pathlib import Path

from axonn_plugins.planner import model
from axonn_recipes.papers.data import Value
from axonn_recipes.papers.found import COUNTED, Experiment, Found

GPTS = ("5b", "10b", "20b", "40b", "60b", "80b", "160b", "320b", "640b")
U_NETS = ("250m", "500m", "1b", "2b", "4b")
STUDY = {"XL": "gpt3-xl", "2.7B": "gpt3-2.7b", "6.7B": "gpt3-6.7b", "13B": "gpt3-13b"}


def gpts(folder: Path) -> Found:
    """000's Table 5.1, 002's Table II, 003's Table I: layers, hidden size and heads, and billions of parameters."""
    values: dict[str, Value] = {}
    for name in GPTS:
        found = model.load(f"gpt-{name}")
        assert isinstance(found, model.Transformer)
        values[f"GPT-{name.upper()}: layers, hidden, heads"] = [found.layers, found.hidden, found.heads]
        values[f"GPT-{name.upper()}: parameters"] = found.parameters / 1e9
    return Found(values)


def u_nets(folder: Path) -> Found:
    """003's Table II: channels, and millions of parameters."""
    values: dict[str, Value] = {}
    for name in U_NETS:
        found = model.load(f"unet-{name}")
        assert not isinstance(found, model.Transformer)
        values[f"U-Net {name.upper()}: channels"] = found.channels
        values[f"U-Net {name.upper()}: parameters"] = found.parameters / 1e6
    return Found(values)


def study(folder: Path) -> Found:
    """000's Table 4.1: billions of parameters of the GPTs; the CNNs' are counted with Figure 4.5."""
    return Found({f"GPT-3 {name}: parameters": model.load(file).parameters / 1e9 for name, file in STUDY.items()})


EXPERIMENTS = {
    "sizes_gpts": Experiment(gpts, COUNTED, 1),
    "sizes_u_nets": Experiment(u_nets, COUNTED, 1),
    "sizes_study": Experiment(study, COUNTED, 1),
}
