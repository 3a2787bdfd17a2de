"""state_dict of a split model gives the serial model's tensors or refuses; load_state_dict takes them."""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from axonn_tp import Grid, Mesh, layout_of, parallelize
from axonn_tp.comm import meeting
from axonn_tp.layers.exports import as_shards
from tests.axonn_tp.families import GROUPED, hf
from tests.deepspeed.scripts import one_sentence
from tests.distributed import run_ranks
from tests.matrix import thorough

GRIDS = {4: Grid(2, 2), 8: Grid(2, 2, 2)}
# 51 words are padded on every axis.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("GPT2LMHeadModel", {"vocab_size": 51, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "untied": ("LlamaForCausalLM", {**GROUPED, "vocab_size": 51, "tie_word_embeddings": False}),
}


def build(name: str) -> Any:
    kind, sizes = MODELS[name]
    torch.manual_seed(3)
    return hf(kind, **sizes).double()


def different(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    return [name for name in {**found, **wanted} if name not in found or not torch.equal(found[name], wanted[name])]


def refusal(function: Callable[[], Any]) -> str:
    try:
        function()
    except (ValueError, RuntimeError, TypeError) as error:
        return str(error)
    return "went through"


def exported(name: str, mesh: Mesh, folder: Path) -> dict[str, Any]:
    serial, model = build(name), build(name)
    parallelize(model, mesh, "auto")
    wanted, found = serial.state_dict(), model.state_dict()
    last = list(found)[-1]
    report: dict[str, Any] = {
        "shards": sum(tuple(p.shape) != layout_of(p).serial_shape for p in model.parameters()),
        "different": different(found, wanted),
        "shared": [n for n in found if found[n].data_ptr() == found[last].data_ptr()],
        "in serial": [n for n in wanted if wanted[n].data_ptr() == wanted[last].data_ptr()],
    }
    part, whole_part = next((n, m) for n, m in serial.named_modules() if n.endswith("layers.1") or n.endswith("h.1"))
    report["part"] = different(model.get_submodule(part).state_dict(), whole_part.state_dict())
    model.save_pretrained(folder / name, is_main_process=dist.get_rank() == 0)
    dist.barrier()
    again, ids = type(serial).from_pretrained(folder / name, dtype=torch.float64), torch.arange(12)[None]
    report["logits"] = (again(ids).logits - serial(ids).logits).abs().max().item()
    with torch.no_grad():
        for parameter in serial.parameters():
            parameter.add_(torch.randn_like(parameter))
    averaged = copy.deepcopy(model)
    for target, assign in ((model, False), (averaged, True)):
        target.load_state_dict(serial.state_dict(), assign=assign)
        report[f"loaded, assign={assign}"] = different(target.state_dict(), serial.state_dict())
    return report


def refused(mesh: Mesh) -> dict[str, Any]:
    model = build("tied")
    parallelize(model, mesh, "auto")
    with as_shards():
        shards = model.state_dict()
    answers: dict[str, Any] = {
        "shards": refusal(lambda: model.load_state_dict(shards)),
        "keep_vars": refusal(lambda: model.state_dict(keep_vars=True)),
        "pickle": refusal(lambda: torch.save(model, io.BytesIO())),
    }
    # What a script changes of what it was given is a copy: of no use to the model, unless it is loaded.
    name, ids = "transformer.h.0.mlp.c_fc.weight", torch.arange(12)[None]
    for next_call in (lambda: model(ids), model.state_dict):
        model.state_dict()[name].lerp_(torch.ones(()).double(), 0.5)
        answers.setdefault("changed", []).append(refusal(next_call))
    given = model.state_dict()
    given[name].mul_(1)
    model.load_state_dict(given)
    answers["loaded"] = refusal(lambda: model(ids))
    model.state_dict()
    model(ids)
    given[name].mul_(2)
    answers["later"] = refusal(lambda: model(ids))
    started = time.monotonic()
    meeting.SECONDS = 3.0
    if dist.get_rank() == 0:
        answers["alone"] = refusal(model.state_dict)
    answers["seconds"] = time.monotonic() - started
    dist.barrier()
    meeting.SECONDS = 30.0
    answers["after"] = different(model.state_dict(), build("tied").state_dict())
    return answers


def everything(folder: str) -> dict[str, Any]:
    mesh = Mesh(GRIDS[dist.get_world_size()])
    return {name: exported(name, mesh, Path(folder)) for name in MODELS} | {"refused": refused(mesh)}


@pytest.fixture(scope="module", params=[4, thorough(8)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(everything, request.param, str(tmp_path_factory.mktemp("exports")))


@pytest.mark.parametrize("name", MODELS)
def test_whole(name: str, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank[name]
        assert found["shards"] > 10
        assert found["different"] == [] and found["part"] == []
        assert found["shared"] == found["in serial"] and len(found["shared"]) == (2 if name == "tied" else 1)
        assert found["logits"] < 1e-10
        assert found["loaded, assign=False"] == found["loaded, assign=True"] == []


def test_refused(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(rank["refused"] for rank in ranks):
        assert "size mismatch for transformer.wte.weight" in found["shards"] and "whole tensors" in found["shards"]
        assert one_sentence(found["keep_vars"]) and "transformer.wte.weight" in found["keep_vars"]
        assert one_sentence(found["pickle"]) and "state_dict()" in found["pickle"]
        assert all(one_sentence(text) and "h.0.mlp.c_fc.weight was changed" in text for text in found["changed"])
        assert found["loaded"] == found["later"] == "went through"
        # Called on one rank, as under `if rank == 0`, it neither hangs nor keeps the ranks from a later call.
        if rank == 0:
            assert one_sentence(found["alone"]) and "on every rank" in found["alone"]
            assert 2.5 < found["seconds"] < 20
        assert found["after"] == []
