"""A mistake ends in one sentence that names the key, its value and what to do, on every rank, within seconds."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import axonn_plugins
import axonn_plugins.hosts.deepspeed.engine
from axonn_plugins.config import ConfigError, parse
from axonn_plugins.hosts.deepspeed.checkpoint.checked import why_unwritten
from axonn_plugins.hosts.deepspeed.data_efficiency import refuse_dropped_tokens
from axonn_plugins.hosts.deepspeed.plan_check import one_sentence as plan_sentence
from axonn_plugins.hosts.deepspeed.spellings import as_understood
from axonn_plugins.hosts.deepspeed.unit import GridUnit
from axonn_tp import Grid
from axonn_tp.grid.mesh import AXES
from axonn_tp.layers.activation import ActivationSplit, _noted
from tests.deepspeed.scripts import NO_KERNEL, fork_script, one_sentence, run_script, sentences
from tests.deepspeed.training import deepspeed  # ranks are forked from here

axonn_plugins.activate()
RAW: dict[str, Any] = {"train_micro_batch_size_per_gpu": 2}


def tp(**keys: Any) -> dict[str, Any]:
    return {"tensor_parallel": keys}


# Name: the block, what the sentence must contain.
BLOCKS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "unknown key": (tp(gxx=2), ("axonn.tensor_parallel.gxx", '"gx"')),
    "unknown sub-block": ({"tensor_paralel": {}}, ("axonn.tensor_paralel", '"tensor_parallel"')),
    "unknown key of a layer": (tp(plan={"a": {"kind": "normal", "head": 2}}), ("plan.a.head", '"heads"')),
    "string": (tp(gx="2"), ("axonn.tensor_parallel.gx", '"2"', "integer")),
    "auto size": (tp(gy="automatic"), ("axonn.tensor_parallel.gy", '"automatic"', "integer", '"auto"')),
    "tokens": (tp(tokens_per_sample=0), ("axonn.tensor_parallel.tokens_per_sample", "0", "at least 1")),
    "bool": (tp(gz=True), ("axonn.tensor_parallel.gz", "true", "integer")),
    "float": (tp(gx=2.0), ("axonn.tensor_parallel.gx", "2.0", "integer")),
    "zero": (tp(gx=0.0), ("axonn.tensor_parallel.gx", "0.0", "at least 1")),
    "nought": (tp(gx=0), ("axonn.tensor_parallel.gx = 0", "at least 1", '"auto"')),
    "nought along y": (tp(gy=0), ("axonn.tensor_parallel.gy = 0", "at least 1", '"auto"')),
    "nought along z": (tp(gz=0), ("axonn.tensor_parallel.gz = 0", "at least 1", '"auto"')),
    "negative": (tp(gz=-2), ("axonn.tensor_parallel.gz", "-2", "at least 1")),
    "list for a size": (tp(gx=[2]), ("axonn.tensor_parallel.gx", "[2]", "integer")),
    "list for the block": ([tp()], ("axonn = ", "object")),
    "null for the block": (None, ("axonn = null", "object")),
    "string for the block": ("tensor_parallel", ('axonn = "tensor_parallel"', "object")),
    "list for a sub-block": ({"tensor_parallel": [2]}, ("axonn.tensor_parallel = [2]", "object")),
    "number for a sub-block": ({"tensor_parallel": 4}, ("axonn.tensor_parallel = 4", "object")),
    "impl": (tp(impl="axon3d"), ("axonn.tensor_parallel.impl", '"axon3d"', '"axonn3d"')),
    "broadcast_inputs": (tp(broadcast_inputs="yes"), ("broadcast_inputs", '"yes"', "true or false")),
    "broadcast_inputs number": (tp(broadcast_inputs=1), ("broadcast_inputs", "1", "true or false")),
    "plan list": (tp(plan=["fc"]), ("axonn.tensor_parallel.plan", "fc", "object")),
    "plan word": (tp(plan="automatic"), ("axonn.tensor_parallel.plan", '"automatic"', '"auto"')),
    "wrong kind": (tp(plan={"fc": "normla"}), ("plan.fc", '"normla"', '"normal"')),
    "layer list": (tp(plan={"fc": ["normal"]}), ("plan.fc", '["normal"]', "object")),
    "layer without kind": (tp(plan={"fc": {"heads": 2}}), ("plan.fc.kind", "missing")),
    "heads": (tp(plan={"fc": {"kind": "normal", "heads": 0}}), ("plan.fc.heads", "0", "at least 1")),
    "parts": (tp(plan={"fc": {"kind": "normal", "parts": "3"}}), ("plan.fc.parts", '"3"', "integer")),
    "requires newer": ({"requires": "99.1"}, ("axonn.requires", "99.1", "pip install")),
    "requires nonsense": ({"requires": "new"}, ("axonn.requires", '"new"', "version")),
    "requires number": ({"requires": 0.1}, ("axonn.requires", "0.1", "string")),
    "compile": (tp(compile=True), ("axonn.tensor_parallel.layout", '"scattered"', '"replicated"', "leave compile out")),
    "compiled tuning": (
        tp(compile=True, layout="replicated", tune_matmuls=True),
        ("axonn.tensor_parallel.tune_matmuls = true", "use false"),
    ),
    "compiled sequences": (
        tp(compile=True, layout="replicated", gz={"batch": 1, "sequence": 2}),
        ("gz.sequence = 2", "compile", "use 1"),
    ),
    "samo": ({"samo": {}}, ("axonn.samo.sparsity", "missing")),
    "ted key": ({"ted": {"tiles": 2}, "tensor_parallel": {}}, ("axonn.ted.tiles", "tile_size")),
    "pccl algorithm": ({"pccl": {"algorithm": "rings"}}, ("axonn.pccl.algorithm", "rings", "ring", "recursive")),
    "pccl key": ({"pccl": {"interface": ["lo"]}}, ("axonn.pccl.interface", "interfaces")),
    "pccl interfaces": ({"pccl": {"interfaces": []}}, ("axonn.pccl.interfaces", "[]", "eth0")),
    "pccl ranks": ({"pccl": {"ranks_per_node": 0}}, ("axonn.pccl.ranks_per_node", "0", "auto")),
    "pccl tune": ({"pccl": {"tune": "never"}}, ("axonn.pccl.tune", "never", "true or false")),
    "pccl silence": ({"pccl": {"silence": 0}}, ("axonn.pccl.silence", "0", "1")),
    "pccl memory": ({"pccl": {"read_memory": "yes"}}, ("axonn.pccl.read_memory", "yes", "true or false")),
    "pccl file": ({"pccl": {"tuning_file": 3}}, ("axonn.pccl.tuning_file", "3", "string")),
    "pipeline key": ({"pipeline": {"limit": 4}}, ("axonn.pipeline.limit", "pipeline_limit")),
    "pipeline schedule": ({"pipeline": {"schedule": "1F1B"}}, ("axonn.pipeline.schedule", '"1F1B"', '"1f1b"')),
    "pipeline limit": (
        {"pipeline": {"pipeline_limit": 0}},
        ("axonn.pipeline.pipeline_limit", "0", "at least 1", "auto"),
    ),
    "pipeline checkpointing": (
        {"pipeline": {"activation_checkpointing": True}},
        ("axonn.pipeline.activation_checkpointing", "true", "layers", "false"),
    ),
    "pipeline deterministic": ({"pipeline": {"deterministic": 1}}, ("axonn.pipeline.deterministic", "true or false")),
}
ON_FOUR = {"gx2gy3": (tp(gx=2, gy=3), ("gx*gy*gz = 2*3*1 = 6", "4 ranks")), "gx3": (tp(gx=3), ("3", "4 ranks"))}
# Name: what the rest of the configuration is, on a grid of gx=2, gz=2, and what the sentence must contain.
REST: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "stage 3": ({"zero_optimization": {"stage": 3}}, ("zero_optimization.stage = 3", "gz")),
    "offload param": ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, ("offload_param",)),
    "quantized": ({"zero_optimization": {"zero_quantized_gradients": True}}, ("zero_quantized",)),
    "both halves": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ("fp16.enabled", "bf16.enabled")),
    "autotp": ({"tensor_parallel": {"autotp_size": 2}}, ("autotp_size", "remove")),
    "sequence parallel": ({"sequence_parallel_size": 2}, ("sequence_parallel_size", "remove")),
    "onebit": ({"optimizer": {"type": "OneBitAdam"}}, ("optimizer.type = OneBitAdam communicates", "AdamW")),
    "universal": ({"checkpoint": {"load_universal": True}}, ("load_universal", "remove")),
    "node local": (
        {"checkpoint": {"use_node_local_storage": True}},
        ("checkpoint.use_node_local_storage = true", "remove it"),
    ),
    "deepcompile": ({"compile": {"deepcompile": True}}, ("deepcompile", "remove")),
    "elasticity": ({"elasticity": {"enabled": True}}, ("elasticity", "remove")),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, ("torch_autocast.dtype", "bfloat16")),
    "sums in 16 bits": ({"communication_data_type": "bf16"}, ("communication_data_type = bf16", "remove it")),
    "hybrid": ({"hybrid_engine": {"enabled": True}}, ("hybrid_engine", "remove")),
    "no batch": ({"train_micro_batch_size_per_gpu": None}, ("train_batch_size", "missing")),
    "batch 7": (
        {"train_micro_batch_size_per_gpu": None, "train_batch_size": 7},
        ("train_batch_size = 7", "multiple of 2"),
    ),
    "three": ({"train_batch_size": 6, "gradient_accumulation_steps": 1}, ("train_batch_size = 6", "leave one")),
    "batch string": ({"train_batch_size": "8"}, ("train_batch_size = '8'", "integer")),
    "micro float": ({"train_micro_batch_size_per_gpu": 2.5}, ("train_micro_batch_size_per_gpu = 2.5", "integer")),
    "steps zero": ({"gradient_accumulation_steps": 0}, ("gradient_accumulation_steps = 0", "at least 1")),
}


def _sentence(block: Any, raw: dict[str, Any]) -> str:
    from axonn_plugins.hosts.deepspeed.tensor.config import check, grid_for

    with pytest.raises(ConfigError) as caught:
        parsed = parse(block).tensor_parallel
        assert parsed is not None
        check({"axonn": block} | RAW | raw, grid_for(parsed, 4))
    return str(caught.value)


PURE = {name: (block, {}, said) for name, (block, said) in (BLOCKS | ON_FOUR).items()}
PURE |= {name: (tp(gx=2, gz=2), raw, said) for name, (raw, said) in REST.items()}


@pytest.mark.parametrize("name", PURE)
def test_sentence(name: str) -> None:
    block, raw, said = PURE[name]
    sentence = _sentence(block, raw)
    assert one_sentence(sentence), sentence
    for part in said:
        assert part in sentence


def test_sentences_differ() -> None:
    found = [_sentence(block, raw) for block, raw, _ in PURE.values()]
    assert len(set(found)) == len(found) >= 26


def test_good_blocks_pass() -> None:
    from axonn_plugins.hosts.deepspeed.tensor.config import check

    for block in ({}, tp(), tp(plan="auto"), tp(gx=1, gy=1, gz=1, plan={"a": "replicated"}), {"requires": "0.1"}):
        parse(block)
    check(RAW | {"zero_optimization": {"stage": 2}}, Grid(2, 2, 2, 2))


@pytest.mark.parametrize("key", ["axon", "Axonn", "axonn_tp", "axonn3d", "samo", "ted", "pccl", "goldfish"])
def test_a_misplaced_key_is_not_passed_over(key: str) -> None:
    for beside in ({}, {"axonn": tp()}):
        with pytest.raises(ConfigError) as caught:
            deepspeed.DeepSpeedConfig(RAW | beside | {key: {"tensor_parallel": {"gx": 1}}})
        assert one_sentence(f"{caught.value}") and f'"{key}"' in str(caught.value) and '"axonn"' in str(caught.value)


def test_keys_of_others_are_passed_over() -> None:
    deepspeed.DeepSpeedConfig(RAW | {"axonn": None, "annotations": {}, "aio": {}, "offload_optimizer": {}, "mine": 1})


def test_an_engines_own_unit_reads_the_configuration() -> None:
    """As `deepspeed.checkpointing.configure(engine.mpu, deepspeed_config=...)` does, when the engine is there."""
    before, deepspeed.DeepSpeedEngine = deepspeed.DeepSpeedEngine, None
    raw = RAW | {"axonn": tp(gz=2), "activation_checkpointing": {"partition_activations": True}}
    try:
        found = deepspeed.DeepSpeedConfig(raw, mpu=GridUnit(SimpleNamespace(size=lambda axes: 3)))  # type: ignore[arg-type]
        assert deepspeed.DeepSpeedEngine is None
    finally:
        deepspeed.DeepSpeedEngine = before
    assert found.activation_checkpointing_config.partition_activations and not hasattr(found, "axonn")


def test_tokens_are_left_out_of_whole_sequences_alone() -> None:
    """With random_ltd, whose layers would count those of a share; its kernel is there on GPUs only."""
    parsed = SimpleNamespace(data_efficiency_config={"data_routing": {"random_ltd": {"enabled": True}}})
    for grid, layout in ((Grid(2), "replicated"), (Grid(1, 2, 2), "scattered")):
        refuse_dropped_tokens(parsed, grid, layout)
    for grid, remedy in ((Grid(2), "replicated"), (Grid(gz=2, sequence=2), "gz.sequence")):
        with pytest.raises(ConfigError, match=f"random_ltd leaves tokens of whole sequences out, .*{remedy}") as caught:
            refuse_dropped_tokens(parsed, grid, "scattered")
        assert one_sentence(str(caught.value))


def test_a_file_that_cannot_be_written_has_its_own_remedy() -> None:
    full = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")
    for error, remedy in (
        (OSError(28, "No space left on device"), "make room for it"),
        (full, "make room for it"),
        (AttributeError("Can't pickle local object 'f.<locals>.g'"), "leave out of client_state"),
        (TypeError("cannot pickle 'generator' object"), "leave out of client_state"),
        (
            RuntimeError("Serialization of parametrized modules is only supported through state_dict()"),
            "save without client_state",
        ),
        (KeyError("exp_avg"), "(KeyError: 'exp_avg'); save without client_state"),
    ):
        said = why_unwritten("a/mp_rank_00_model_states.pt", error)
        assert remedy in said and one_sentence(said), said


def test_what_fails_on_shares_is_the_plans_fault_but_for_memory() -> None:
    share = _noted(torch.ones(2, 3), ActivationSplit(("x",), dict.fromkeys(AXES, 0)))
    with pytest.raises(ConfigError, match="on shares"), plan_sentence():
        share + torch.ones(2, 6)
    with pytest.raises(RuntimeError, match="can't allocate memory"), plan_sentence():
        share.new_empty(2**50)


SCRIPT = """
import os, torch, deepspeed
from torch import nn
rank = int(os.environ['RANK'])
class Net(nn.Module):
    def __init__(self, inner=12):
        super().__init__()
        self.fc1, self.fc2, self.norm = nn.Linear(16, inner), nn.Linear(inner, 9), nn.LayerNorm(9)
    def forward(self, x):
        return self.norm(self.fc2(torch.tanh(self.fc1(x)))).square().mean()
net, tp, more, keywords = Net(), {'gx': 2}, {}, {}
CHANGE
config = {'train_micro_batch_size_per_gpu': 2, 'optimizer': {'type': 'AdamW', 'params': {'torch_adam': True}},
          'axonn': {'tensor_parallel': tp}} | more
keywords = {'model_parameters': net.parameters()} | keywords
engine = deepspeed.initialize(model=net, config=config, **keywords)[0]
for _ in range(2):
    loss = engine(torch.randn(2, 16)) AFTER
    engine.backward(loss)
    engine.step()
"""
# Name: the line that makes the mistake, on 2 ranks, and what the sentence must contain.
SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "typo": ("tp = {'gxx': 2}", ("gxx", '"gx"')),
    "world": ("tp = {'gx': 3}", ("gx*gy*gz", "2 ranks")),
    "one rank late": (
        "tp = {'gx': 3}; deepspeed.init_distributed('gloo')\n"
        "if rank: import time; time.sleep(1); torch.distributed.distributed_c10d._get_default_store().add('late', 1)",
        ("gx*gy*gz", "2 ranks"),
    ),
    "features": ("tp['plan'] = {'fc2': 'normal'}", ("layer fc2", "9 output features", "gx = 2")),
    "heads": ("tp['plan'] = {'fc1': {'kind': 'normal', 'heads': 3}}", ("layer fc1", "3 heads", "gx = 2")),
    "unequal heads": ("tp['plan'] = {'fc1': {'kind': 'normal', 'heads': 8}}", ("layer fc1", "12", "8 equal heads")),
    "parts": ("tp['plan'] = {'fc1': {'kind': 'normal', 'parts': 5}}", ("layer fc1", "12", "5 equal parts")),
    "no match": ("tp['plan'] = {'*.fc3': 'normal'}", ("*.fc3", "Net", "fc")),
    "wrong class": ("tp['plan'] = {'norm': 'normal'}", ("layer norm", "LayerNorm", "Linear")),
    "half a pair": (
        "tp['plan'] = {'fc1': 'normal'}",
        (
            "plan: on shares train.py:",
            "self.fc2(torch.tanh(self.fc1(x)))",
            "has its features split over x, as between the layers of a pair, and is to be whole",
            "correct the plan",
        ),
    ),
    "norm alone": ("tp['plan'] = {'norm': 'norm'}", ("norm", "embedding")),
    "mpu": ("keywords['mpu'] = type('Mpu', (), {'get_data_parallel_world_size': lambda s: 2})()", ("mpu",)),
    "mesh_param": (
        "keywords['mesh_param'] = (2, 1)",
        ("mesh_param", "(2, 1)", "axonn.tensor_parallel", "leave it out"),
    ),
    "mesh_param beside states of ours": (
        "keywords['mesh_param'] = (1, 2); more = {'axonn': {'offload_optimizer': {}}}",
        ("(1, 2)", "2 ranks share sequences", "axonn.offload_optimizer", "axonn.tensor_parallel.gz"),
    ),
    "zero.Init": (
        "deepspeed.init_distributed('gloo')\nwith deepspeed.zero.Init(): net = Net()",
        ("parameter fc1.weight", "deepspeed.zero.Init", "ZeRO-3"),
    ),
    "pipeline": (
        "from deepspeed.pipe import PipelineModule; deepspeed.init_distributed('gloo'); "
        "net = PipelineModule([nn.Linear(4, 4)] * 2, num_stages=2); deepspeed.comm.barrier()",
        ("PipelineModule", 'add "pipeline": {} to axonn'),
    ),
    "stage 3": ("more = {'zero_optimization': {'stage': 3}}", ("stage = 3", "gz")),
    "old offload": (
        "more = {'zero_optimization': {'stage': 1, 'cpu_offload': True}}",
        ("zero_optimization.cpu_offload", "offload_optimizer"),
    ),
    "old stage": ("more = {'zero_optimization': True}", ("zero_optimization = true", '{"stage": 1}')),
    "prodigy": (
        "class Prodigy(torch.optim.SGD): pass\nkeywords['optimizer'] = Prodigy(net.parameters(), lr=0.1)",
        ("Prodigy takes the step's length", "AdamW"),
    ),
    "other block": (
        "tp['broadcast_inputs'] = rank == 0",
        ("axonn.tensor_parallel.broadcast_inputs is true on rank 0 and false on rank 1", "same configuration"),
    ),
    "other grid": ("tp = {'gx': 2} if rank else {'gz': 2}", ("gz is 2 on rank 0 and not there on rank 1",)),
    "other model": ("net = Net(12 + rank)", ("the model's parameter fc1.weight is 12x16", "and 13x16", "rank 1")),
    "plan fails on one rank": (
        "tp['plan'] = {'fc1': 'normal'}\nnet = Net(12 + rank)",
        ("rank 1", "layer fc1", "13 output features"),
    ),
    "other arguments": (
        "forward = Net.forward\nNet.forward = lambda self, x, extra=None: forward(self, x)",
        ("the model's argument extra differs on rank 1 from that of rank 0",),
    ),
    "other labels": ("", ("labels",)),
    "other batch": (
        "torch.randn = lambda *shape, own=torch.randn: own(*shape) + rank",
        ("the model's argument x differs on rank 1 from that of rank 0", "broadcast_inputs = true"),
    ),
    "compiled dropout": (
        "net.drop = nn.Dropout(0.1); tp |= {'layout': 'replicated', 'compile': True}",
        ("drop.p = 0.1 does not go with compile = True on gx = 2", "leave compile out"),
    ),
    "nothing of ours to gather": (
        "more = {'axonn': {'overlap_param_gather': True}, 'zero_optimization': {'stage': 1}}",
        ("axonn.overlap_param_gather", "ZeRO-1", "DeepSpeed's, at stage 1", "leave it out"),
    ),
    "nothing to gather": (
        "more = {'axonn': {'tensor_parallel': tp, 'overlap_param_gather': True}, 'zero_optimization': {'stage': 2}}",
        ("axonn.overlap_param_gather", "ZeRO-1", "the block's, at stage 2", "leave it out"),
    ),
    "weights that a script module reads": (
        "net.script = torch.jit.trace(nn.Linear(3, 3), torch.ones(3))\n"
        "more = {'axonn': {'offload_optimizer': {}, 'overlap_param_gather': True}, 'zero_optimization': {'stage': 1}}",
        ("axonn.overlap_param_gather", "torch.jit.ScriptModule", "leave it out"),
    ),
    "checks": ("tp['check_every'] = 0", ("axonn.tensor_parallel.check_every = 0", "at least 1")),
}
AFTER = {
    "other labels": "* (1 + 3 * rank)",
    "other arguments": "if rank else engine(torch.randn(2, 16), extra=torch.randn(3))",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str, tmp_path: Path) -> None:
    line, said = SCRIPTS[name]
    text = SCRIPT.replace("CHANGE", line).replace("AFTER", AFTER.get(name, ""))
    codes, errors, seconds = fork_script(tmp_path, text, ranks=2)
    for code, error in zip(codes, errors, strict=True):
        assert code == 1, (codes, error)
        assert "Traceback" not in error
        (sentence,) = sentences(error)
        assert one_sentence(sentence), sentence
    assert any(all(part in sentences(error)[0] for part in said) for error in errors), errors
    assert seconds < 240


def test_a_rank_without_the_block_is_not_waited_for(tmp_path: Path) -> None:
    line = (
        "import axonn_plugins.hosts.deepspeed.roll as roll; roll.PATIENCE = 1.0\nmore = {'axonn': None} if rank else {}"
    )
    text = SCRIPT.replace("CHANGE", line).replace("AFTER", "")
    codes, errors, seconds = fork_script(tmp_path, text, ranks=2, limit=60)
    assert codes[0] == 1 and seconds < 60
    assert sentences(errors[0]) == [
        "the configuration on rank 1 has no axonn block, and that of rank 0 has one; start all ranks with the same configuration"
    ]


FOUR = SCRIPT.replace("CHANGE", f"tp['gz'] = 2\n{NO_KERNEL}").replace("AFTER", "")


@pytest.mark.thorough  # `test_script` says the same in ranks that are forked
@pytest.mark.parametrize("ranks", [1, 2])
def test_fresh_interpreters(ranks: int, tmp_path: Path) -> None:
    """As a user starts them: through the installed entry point."""
    for run in run_script(tmp_path, FOUR, ranks=ranks):
        assert run.returncode == 1
        assert "Traceback" not in run.stderr
        assert "gx*gy*gz = 2*1*2 = 4" in sentences(run.stderr)[0]


def test_an_odd_number_of_ranks(tmp_path: Path) -> None:
    codes, errors, _ = fork_script(tmp_path, FOUR, ranks=3)
    assert codes == [1] * 3 and not any("Traceback" in error for error in errors)
    assert all("gx*gy*gz = 2*1*2 = 4" in sentences(error)[0] for error in errors)


def test_a_good_script_runs(tmp_path: Path) -> None:
    """The scripts above fail for their mistake alone."""
    codes, errors, _ = fork_script(tmp_path, SCRIPT.replace("CHANGE", "").replace("AFTER", ""), ranks=2)
    assert codes == [0, 0], errors
    assert torch.distributed.is_initialized() is False


def test_other_spellings_are_understood() -> None:
    raw = {"bfloat16": {"enabled": "True"}, "fp16": {"enabled": 0, "loss_scale": 1}, "zero_optimization": {"stage": 1}}
    raw |= {"torch_autocast": {"enabled": 1.0, "dtype": "torch.float16"}, "data_types": {"grad_accum_dtype": "float"}}
    given = copy.deepcopy(raw)
    made = as_understood(raw)
    assert raw == given and "bfloat16" not in made
    assert made["bf16"]["enabled"] is True and made["fp16"] == {"enabled": False, "loss_scale": 1}
    assert made["torch_autocast"] == {"enabled": True, "dtype": "float16"} and made["fp16"]["enabled"] is False
    assert made["data_types"]["grad_accum_dtype"] == "float32" and made["zero_optimization"] is raw["zero_optimization"]
    assert as_understood({"bf16": {"enabled": "auto"}})["bf16"]["enabled"] == "auto"
    with pytest.raises(ConfigError, match="torch_autocast.dtype = float16"):
        deepspeed.DeepSpeedConfig(
            RAW | {"torch_autocast": {"enabled": 1, "dtype": "torch.float16"}, "axonn": {"offload_optimizer": {}}}
        )
