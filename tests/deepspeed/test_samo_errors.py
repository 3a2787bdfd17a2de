"""A mistake beside ``axonn.samo`` ends in one sentence, on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed  # noqa: F401  ranks are forked from here
import pytest

import axonn_plugins
import axonn_plugins.hosts.deepspeed.engine
from axonn_plugins.config import ConfigError, parse
from tests.deepspeed.scripts import fork_script, one_sentence, sentences

axonn_plugins.activate()
SAMO = {"sparsity": 0.9}
# Name: the block, what the sentence must contain.
BLOCKS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "no sparsity": ({}, ("axonn.samo.sparsity", "missing", "mask file")),
    "all": ({"sparsity": 1.0}, ("axonn.samo.sparsity", "keeps nothing", "0.9")),
    "more than all": ({"sparsity": 1.5}, ("axonn.samo.sparsity", "1.5", "0 to 1")),
    "string": ({"sparsity": "0.9"}, ("axonn.samo.sparsity", '"0.9"', "0 to 1")),
    "pruner": (SAMO | {"pruner": "magnitud"}, ("axonn.samo.pruner", "magnitud", "early_bird", "mask")),
    "grasp": (SAMO | {"pruner": "grasp"}, ("axonn.samo.pruner", "twice", "samo.grasp", '{"mask": "FILE"}')),
    "grasp with settings": (SAMO | {"pruner": {"grasp": {"batches": 2}}}, ("axonn.samo.pruner", "samo.write_masks")),
    "mask number": (SAMO | {"pruner": {"mask": 3}}, ("axonn.samo.pruner.mask", "3", "string")),
    "two pruners": (SAMO | {"pruner": {"mask": "a", "early_bird": {}}}, ("axonn.samo.pruner", "early_bird")),
    "search key": (SAMO | {"pruner": {"early_bird": {"steps": 3}}}, ("early_bird.steps", "interval")),
    "window": (SAMO | {"pruner": {"early_bird": {"window": 0}}}, ("early_bird.window", "0", "at least 1")),
    "epsilon": (SAMO | {"pruner": {"early_bird": {"epsilon": 0}}}, ("early_bird.epsilon", "0", "above 0")),
    "patterns": (SAMO | {"include": "fc"}, ("axonn.samo.include", '"fc"', "list")),
    "mask and patterns": ({"pruner": {"mask": "a"}, "exclude": ["b"]}, ("axonn.samo.exclude", "mask file", "remove")),
    "start": (SAMO | {"start_step": -1}, ("axonn.samo.start_step", "-1", "at least 0")),
    "shard": (SAMO | {"shard": 1}, ("axonn.samo.shard", "1", "true or false")),
    "scope": (SAMO | {"scope": "all"}, ("axonn.samo.scope", '"all"', "global")),
    "pattern": ({"pruner": {"n_of_m": [5, 4]}}, ("axonn.samo.pruner.n_of_m", "[5, 4]", "[2, 4]")),
    "pattern of three": ({"pruner": {"n_of_m": [1, 2, 4]}}, ("axonn.samo.pruner.n_of_m", "[1, 2, 4]")),
    "pattern and sparsity": (SAMO | {"pruner": {"n_of_m": [2, 4]}}, ("axonn.samo.sparsity", "n_of_m", "remove")),
    "seed": (SAMO | {"pruner": {"random": {"seed": -1}}}, ("axonn.samo.pruner.random.seed", "-1")),
    "batches": (SAMO | {"pruner": {"snip": {"batches": 0}}}, ("axonn.samo.pruner.snip.batches", "0")),
    "schedule of first gradients": (
        SAMO | {"pruner": "snip", "schedule": {"end_step": 8}},
        ("axonn.samo.schedule", '"random"', "remove"),
    ),
    "regrowth without an end": (SAMO | {"regrow": {}}, ("axonn.samo.regrow.end_step", "missing")),
    "regrowth of more than all": (
        SAMO | {"regrow": {"end_step": 9, "fraction": 2}},
        ("axonn.samo.regrow.fraction", "2"),
    ),
    "regrowth that is over": (SAMO | {"start_step": 9, "regrow": {"end_step": 9}}, ("regrow.end_step = 9", "later")),
    "regrowth and schedule": (
        SAMO | {"regrow": {"end_step": 9}, "schedule": {"end_step": 9}},
        ("axonn.samo.regrow", "axonn.samo.schedule", "remove"),
    ),
    "zeros and sparsity": (SAMO | {"pruner": "nonzero"}, ("axonn.samo.sparsity", "nonzero", "remove")),
    "structure": (SAMO | {"structure": "row"}, ("axonn.samo.structure", '"row"', "channel")),
    "structure of a draw": (
        SAMO | {"structure": "channel", "pruner": "random"},
        ("axonn.samo.structure", '"magnitude"'),
    ),
    "structure and scope": (
        SAMO | {"structure": "channel", "scope": "global"},
        ("axonn.samo.scope", "structure", "remove"),
    ),
    "heads": (SAMO | {"structure": {"heads": 0, "rows": [], "columns": []}}, ("axonn.samo.structure.heads", "0")),
    "schedule without an end": (SAMO | {"schedule": {}}, ("axonn.samo.schedule.end_step", "missing")),
    "schedule that is over": (
        SAMO | {"start_step": 9, "schedule": {"end_step": 9}},
        ("schedule.end_step = 9", "later"),
    ),
    "schedule downwards": (SAMO | {"schedule": {"end_step": 9, "initial": 0.95}}, ("initial = 0.95", "smaller")),
    "schedule's shape": (SAMO | {"schedule": {"end_step": 9, "shape": "square"}}, ("schedule.shape", "cubic")),
    "schedule's key": (SAMO | {"schedule": {"end_step": 9, "begin": 1}}, ("schedule.begin", "end_step")),
    "key": (SAMO | {"shards": True}, ("axonn.samo.shards", '"shard"')),
}
# Name: the rest of the configuration, what the sentence must contain.
REST: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "stage 3": ({"zero_optimization": {"stage": 3}}, ("stage = 3", "stage 0, 1 or 2")),
    "offload": ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, ("offload_optimizer", "use cpu")),
    "offload parameters": ({"zero_optimization": {"offload_param": {"device": "cpu"}}}, ("offload_param", "remove")),
    "both halves": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, ("fp16.enabled", "bf16.enabled")),
    "autocast": ({"torch_autocast": {"enabled": True, "dtype": "float16"}}, ("torch_autocast", "bfloat16")),
    "accumulation": ({"data_types": {"grad_accum_dtype": "bf16"}}, ("grad_accum_dtype",)),
    "reduction": ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, ("communication_data_type", "bf16")),
    "1-bit": ({"optimizer": {"type": "OneBitAdam"}}, ("optimizer.type = OneBitAdam", "AdamW")),
    "lamb": ({"optimizer": {"type": "Lamb"}}, ("optimizer.type = Lamb", "AdamW")),
    "lion": ({"optimizer": {"type": "Lion"}}, ("optimizer.type = Lion", "AdamW")),
    "bias": ({"optimizer": {"type": "Adam", "params": {"bias_correction": 0}}}, ("bias_correction", "remove")),
    "sparse": ({"sparse_gradients": True}, ("sparse_gradients", "remove")),
    "autotp": ({"tensor_parallel": {"autotp_size": 2}}, ("autotp_size", "axonn.tensor_parallel")),
    "experts": ({"expert_parallel": {"enabled": True}}, ("expert_parallel", "axonn.ted")),
    "sequence": ({"sequence_parallel_size": 2}, ("sequence_parallel_size", "axonn.tensor_parallel.gz")),
    "hybrid": ({"hybrid_engine": {"enabled": True}}, ("hybrid_engine", "remove")),
    "compression": ({"compression_training": {"sparse_pruning": {}}}, ("compression_training", "remove")),
    "universal": ({"checkpoint": {"load_universal": True}}, ("load_universal", "remove")),
    "deepcompile": ({"compile": {"deepcompile": True}}, ("deepcompile", "remove")),
    "background": ({"checkpoint": {"writer": {"type": "fast"}}}, ("checkpoint.writer", "remove")),
    "datastates": ({"datastates_ckpt": {}}, ("datastates_ckpt", "remove")),
}


def test_sentences() -> None:
    from axonn_plugins.hosts.deepspeed.states_config import check

    found = set()
    for name, (block, said) in BLOCKS.items():
        with pytest.raises(ConfigError) as caught:
            parse({"samo": block})
        found.add(str(caught.value))
        assert one_sentence(str(caught.value)) and all(part in str(caught.value) for part in said), (name, caught.value)
    for name, (raw, said) in REST.items():
        with pytest.raises(ConfigError) as caught:
            check(parse({"samo": SAMO}), raw, None)
        found.add(str(caught.value))
        assert one_sentence(str(caught.value)) and all(part in str(caught.value) for part in said), (name, caught.value)
    assert len(found) == len(BLOCKS) + len(REST)
    check(parse({"samo": SAMO}), {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, None)
    single = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "float32"},
        "communication_data_type": "fp32",
    }
    check(parse({"samo": SAMO}), single | {"nebula": {"enabled": False}}, None)
    lamb = {"type": "Lamb", "params": {"bias_correction": False}}
    check(parse({"offload_optimizer": {}}), {"optimizer": lamb}, None)
    parse({"samo": SAMO | {"pruner": "early_bird", "include": ["*"], "start_step": 3}, "pccl": {}})


SCRIPT = """
import torch, deepspeed
from torch import nn
torch.manual_seed(3)
net, samo, more, keywords = nn.Sequential(nn.Linear(16, 12), nn.Linear(12, 9)), {'sparsity': 0.9}, {}, {}
CHANGE
config = {'train_micro_batch_size_per_gpu': 2, 'optimizer': {'type': 'Adam'}, 'axonn': {'samo': samo}} | more
keywords = {'model_parameters': net.parameters()} | keywords
engine = deepspeed.initialize(model=net, config={k: v for k, v in config.items() if v}, **keywords)[0]
assert type(engine).__name__ == 'AxonnEngine'
for _ in range(2):
    loss = engine(torch.randn(2, 16)).square().mean()
    engine.backward(loss)
    engine.step()
"""
# Name: the line that makes the mistake, on 2 ranks, and what the sentence must contain.
SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stage 3": ("more = {'zero_optimization': {'stage': 3}}", ("stage = 3", "stage 0, 1 or 2")),
    "pipeline": (
        "from deepspeed.pipe import PipelineModule; deepspeed.init_distributed('gloo'); "
        "net = PipelineModule([nn.Linear(4, 4)] * 2, num_stages=2); deepspeed.comm.barrier()",
        ("PipelineModule", 'add "pipeline": {} to axonn'),
    ),
    "mpu": ("keywords['mpu'] = type('Mpu', (), {'get_data_parallel_world_size': lambda s: 2})()", ("mpu",)),
    "no optimizer": ("more = {'optimizer': None}", ("no optimizer",)),
    "no file": ("samo['pruner'] = {'mask': 'none.pt'}", ("none.pt", "does not exist")),
    "no match": ("samo['include'] = ['2.weight']", ("2.weight", "no parameter")),
    "all frozen": ("[p.requires_grad_(p.dim() < 2) for p in net.parameters()]", ("no parameter to prune", "trained")),
    "nothing left": ("samo['exclude'] = ['*']", ("no parameter to prune",)),
    "not element-wise": (
        "class Lamb(torch.optim.SGD): pass\nkeywords['optimizer'] = Lamb(net.parameters(), lr=0.1)",
        ("Lamb moves a kept weight by", "AdamW"),
    ),
    "masks of another sparsity": (
        "torch.save({'0.weight': torch.ones(12, 16)}, 'ones.pt'); samo['pruner'] = {'mask': 'ones.pt'}",
        ("sparsity = 0.9", "0.00%"),
    ),
    "": ("", ()),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str, tmp_path: Path) -> None:
    line, said = SCRIPTS[name]
    codes, errors, seconds = fork_script(tmp_path, SCRIPT.replace("CHANGE", line), ranks=2)
    assert seconds < 240
    if not said:
        assert codes == [0, 0], errors
        assert "SAMO: pruned after step 0" in errors[0] and "SAMO" not in errors[1]
        return
    for code, error in zip(codes, errors, strict=True):
        assert code == 1 and "Traceback" not in error, (codes, error)
        (sentence,) = sentences(error)
        assert one_sentence(sentence) and all(part in sentence for part in said), sentence
