"""A key of the block whose value is null counts as not given, as the whole block does."""

from __future__ import annotations

from typing import Any

import pytest

from axonn_plugins.config import ConfigError, Pccl, Samo, Ted, TensorParallel, parse
from axonn_plugins.config.base import Block
from axonn_plugins.config.offload_optimizer import OffloadOptimizer
from axonn_plugins.config.pipeline import Pipeline

NEEDED = {"samo": {"sparsity": 0.5}}
BLOCKS: dict[str, type[Block]] = {
    "tensor_parallel": TensorParallel,
    "pccl": Pccl,
    "samo": Samo,
    "ted": Ted,
    "offload_optimizer": OffloadOptimizer,
    "pipeline": Pipeline,
}
KEYS = [(name, key) for name, block in BLOCKS.items() for key in block.model_fields]


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_of_null_is_not_there(name: str) -> None:
    assert parse({name: None}) == parse({})


@pytest.mark.parametrize("name, key", KEYS)
def test_a_key_of_null_is_not_given(name: str, key: str) -> None:
    if (name, key) == ("ted", "tile_size"):
        assert parse({name: {key: None}}).ted != parse({name: {}}).ted  # all at once, as documented
        return
    others = {other: value for other, value in NEEDED.get(name, {}).items() if other != key}
    if (name, key) == ("samo", "sparsity"):
        others = {"pruner": {"mask": "masks.pt"}}
    found: Any = getattr(parse({name: {key: None, **others}}), name)
    assert found == getattr(parse({name: others}), name)
    assert key not in found.model_fields_set


def test_inner_blocks_too() -> None:
    plan = {"plan": {"fc1": {"kind": "normal", "parts": None, "heads": None}}}
    assert parse({"tensor_parallel": plan}) == parse({"tensor_parallel": {"plan": {"fc1": "normal"}}})
    pruner = {"sparsity": 0.5, "pruner": {"mask": None, "early_bird": {"window": None}}}
    assert parse({"samo": pruner}) == parse({"samo": {"sparsity": 0.5, "pruner": {"early_bird": {}}}})
    sizes = {"gx": None, "plan": "planner"}
    assert parse({"tensor_parallel": sizes}) == parse({"tensor_parallel": {"plan": "planner"}})
    assert parse({"samo": {"pruner": {"mask": "masks.pt"}, "scope": None, "include": None}}).samo is not None


def test_unknown_keys_are_refused_all_the_same() -> None:
    for block, path in (({"teds": None}, "axonn.teds"), ({"ted": {"tensors": None}}, "axonn.ted.tensors")):
        with pytest.raises(ConfigError, match=f"{path} is not a key"):
            parse(block)
