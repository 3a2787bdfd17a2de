"""Tables of models: what the planner's files say of them, and their parameters counted."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

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


def _scales(recipe: str) -> dict[str, Any]:
    """A recipe's scales.json."""
    found: dict[str, Any] = json.loads(files(f"axonn_recipes.{recipe}").joinpath("scales.json").read_text())
    return found


def scales(folder: Path) -> Found:
    """The scales of recipes at the papers' size: their scales.json."""
    values: dict[str, Value] = {}
    mixtures, pruned, images = _scales("ted_moe"), _scales("samo_gpt"), _scales("samo_cnn")["paper"]
    for name, scale in {"XL": "gpt3_xl", "2.7B": "gpt3_2.7b"}.items():
        one = pruned[scale]
        values[f"axonn train samo_gpt, {name}: batch, GPUs"] = [one["batch"], one["plan"]["ranks"]]
        values[f"axonn train samo_gpt, {name}: parameters"] = _parameters(one["model"])
    values["axonn train samo_cnn: batch, GPUs"] = [images["batch"], images["plan"]["ranks"]]
    degrees = ("batch", "ranks", "experts", "tensor")
    for name, scale in {
        **{"1.3B": "gpt3_xl", "2.7B": "gpt3_2.7b", "6.7B": "gpt3_6.7b", "13B": "gpt3_13b"},
        **{"Figure 7.5": "figure_7_5", "Figure 7.7": "figure_7_7"},
    }.items():
        one = mixtures[scale]
        values[f"axonn train ted_moe, {name}: batch, GPUs, experts, G_tensor"] = [one[key] for key in degrees]
        values[f"axonn train ted_moe, {name}: base model's parameters"] = _parameters(one["model"])
    return Found(values)


def _parameters(sizes: dict[str, Any]) -> float:
    """Billions."""
    given = {"sequence": sizes["context"], "vocabulary": sizes["vocabulary"]}
    return model.Transformer("", sizes["layers"], sizes["hidden"], sizes["heads"], **given).parameters / 1e9


def protocol(folder: Path) -> Found:
    """Section VIII of 002 as `axonn train memorization --scale` runs it."""
    all_scales = _scales("memorization")
    paper = all_scales["paper"]
    values: dict[str, Value] = {
        "pages of a bucket": paper["pages"],
        "epochs of three buckets": paper["epochs"],
        "tokens of a page": paper["tokens"],
        "steps of warm-up": paper["warmup"],
        "steps of injection": paper["steps"],
        "pages of a step": paper["batch"],
        "highest learning rate": paper["lr"],
    }
    models = ("tinyllama-1b", "llama-2-7b", "llama-3.1-8b", "llama-2-13b", "llama-2-70b", "llama-3.1-405b")
    values["G_z of 1B, 7B, 8B, 13B, 70B, 405B"] = [int(all_scales[one]["grid"].split(",")[2]) for one in models]
    values["trials of 1B, 7B, 8B, 13B, 70B, 405B"] = [len(all_scales[one]["seeds"]) for one in models]
    return Found(values)


EXPERIMENTS = {
    "sizes_scales": Experiment(scales, COUNTED, 1),
    "sizes_protocol": Experiment(protocol, COUNTED, 1),
    "sizes_gpts": Experiment(gpts, COUNTED, 1),
    "sizes_u_nets": Experiment(u_nets, COUNTED, 1),
    "sizes_study": Experiment(study, COUNTED, 1),
}
