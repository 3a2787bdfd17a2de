"""The block's schema is current, its words are axonn_tp's, and importing us costs nothing."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import get_args

import pytest

from axonn_plugins.config import Axonn, ConfigError, compose, parse, schema, shipped_schema
from axonn_plugins.config.tensor_parallel import LayerKind
from axonn_plugins.hosts import plain
from axonn_plugins.hosts.common.tensor_parallel import layer_plans, refuse_keys_of_deepspeed
from axonn_recipes.quickstart.settings import Settings
from axonn_tp import KINDS


def test_the_shipped_schema_is_current() -> None:
    assert shipped_schema() == schema(), "run: axonn schema --write plugins/axonn_plugins/axonn.schema.json"


def test_every_key_is_documented() -> None:
    definitions = json.loads(schema())
    blocks = [definitions, *definitions["$defs"].values()]
    assert len(blocks) == 17
    for block in blocks:
        assert block["description"] and block["additionalProperties"] is False
        assert all("description" in key for key in block["properties"].values()), block["title"]


def test_kinds_are_those_of_axonn_tp() -> None:
    assert set(get_args(LayerKind)) == set(KINDS)


def test_a_plan_in_all_its_forms() -> None:
    block = parse({"tensor_parallel": {"gx": 2, "plan": {"a": "normal", "b": {"kind": "transposed"}}}}).tensor_parallel
    assert block is not None
    assert {name: plan.kind for name, plan in layer_plans(block).items()} == {"a": "normal", "b": "transposed"}
    counted = parse({"tensor_parallel": {"plan": {"a": {"kind": "normal", "counts": ["n_head"]}}}}).tensor_parallel
    assert counted is not None and layer_plans(counted)["a"].counts == ("n_head",)
    automatic = parse({"tensor_parallel": {"plan": "auto"}}).tensor_parallel
    assert automatic is not None and automatic.plan == "auto" and layer_plans(automatic) == {}
    assert parse({}) == Axonn()
    assert parse({"requires": "0.1"}).requires == "0.1"


def test_the_quickstart_configuration_is_valid() -> None:
    block = parse(Settings().ds_config()["axonn"]).tensor_parallel
    assert block is not None and (block.gx, block.gy, block.gz) == (2, 1, 2)


def test_an_error_is_a_value_error_that_can_be_caught() -> None:
    with pytest.raises(ValueError, match='use "gx"'):
        parse({"tensor_parallel": {"gxx": 2}})
    assert issubclass(ConfigError, ValueError)


@pytest.mark.parametrize("value", [True, 0, 0.5, 1])
def test_a_share_of_weights_to_let_go(value: object) -> None:
    block = parse({"tensor_parallel": {"reshard_after_forward": value}}).tensor_parallel
    assert block is not None and block.reshard_after_forward == value
    for wrong in (-0.5, 1.5, "half", [0.5]):
        with pytest.raises(ConfigError, match="reshard_after_forward = .* is not true, false or a share between 0 and"):
            parse({"tensor_parallel": {"reshard_after_forward": wrong}})


def test_importing_plugins_imports_nothing_heavy() -> None:
    code = "import axonn_plugins, sys; sys.exit(any(name in sys.modules for name in ('torch', 'deepspeed', 'pydantic', 'numpy')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("system", ["ted", "pipeline"])
def test_what_no_compiler_traces_does_not_go_with_compile(system: str) -> None:
    block = parse({"tensor_parallel": {"layout": "replicated", "compile": True}, system: {}})
    with pytest.raises(
        ConfigError,
        match=rf"axonn.tensor_parallel.compile = true does not go with axonn.{system}: .*; leave compile out",
    ):
        compose.check(block)


def test_tensor_ranks_of_ted_are_those_of_x_and_y() -> None:
    compose.check(parse({"tensor_parallel": {"gx": 2, "gy": 2}, "ted": {"tensor": 4}}))
    for sizes in ({"gx": 2, "gy": 2}, {"gx": "auto"}, {"gz": 2}):
        with pytest.raises(ConfigError, match=r"axonn.ted.tensor = 2 does not go with .*; leave tensor out"):
            compose.check(parse({"tensor_parallel": sizes, "ted": {"tensor": 2}}))


@pytest.mark.parametrize("key", [{"check_every": 10}, {"trace_steps": [1, 2]}, {"verify_plan": False}])
def test_what_deepspeed_alone_obeys_is_refused_by_other_hosts(key: dict) -> None:
    block = parse({"tensor_parallel": {"gx": 2} | key}).tensor_parallel
    assert block is not None
    with pytest.raises(
        ConfigError, match=rf"axonn: {[*key][0]} = .* is obeyed by DeepSpeed's engines alone; leave it out"
    ):
        refuse_keys_of_deepspeed(block, "axonn: ")


def test_plain_pytorch_takes_what_it_obeys() -> None:
    plain._refuse(parse({"tensor_parallel": {"gx": 2}}))
    plain._refuse(parse({"tensor_parallel": {"gz": {"sequence": 2}, "verify_plan": False}}))
    plain._refuse(parse({"ted": {"communication_aware_checkpointing": False}}))
    with pytest.raises(ConfigError, match="axonn.tensor_parallel.check_every = 5 is obeyed by DeepSpeed's engines"):
        plain._refuse(parse({"tensor_parallel": {"gx": 2, "check_every": 5}}))
    with pytest.raises(ConfigError, match=r'axonn.ted.stash = "cpu" is obeyed by .*; leave it out'):
        plain._refuse(parse({"ted": {"stash": "cpu"}}))


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        ({"pccl": {"silence": "30"}}, 'axonn.pccl.silence = "30" is not a number of at least 1 and at most 86400;'),
        (
            {"samo": {"sparsity": 0.5, "pruner": {"random": {"seed": -1}}}},
            "axonn.samo.pruner.random.seed = -1 is not an integer of at least 0 and below 2147483648;",
        ),
        (
            {"samo": {"sparsity": 0.5, "regrow": {"end_step": 9, "fraction": 0}}},
            "axonn.samo.regrow.fraction = 0 is not a number above 0 and at most 1;",
        ),
        ({"ted": {"expert": 0}}, 'axonn.ted.expert = 0 is not an integer of at least 1, or "auto";'),
        (
            {"tensor_parallel": {"gz": {"sequence": 2, "bach": 1}}},
            'axonn.tensor_parallel.gz.bach is not a key; use "batch", or another of batch, sequence',
        ),
    ],
)
def test_numbers_and_keys_that_are_allowed_are_those_of_the_key(block: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse(block)
