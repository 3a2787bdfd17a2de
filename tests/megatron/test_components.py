"""Flags of systems of one's own and of PCCL in a stub of Megatron's parser, and names of a model's parameters."""

import json
import re
import sys
from argparse import ArgumentParser
from types import ModuleType, SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from axonn_plugins.config import Goldfish, Samo, Ted
from axonn_plugins.config.offload_optimizer import OffloadOptimizer
from axonn_plugins.hosts.megatron import components, cpu
from tests.compose.noise import NoiseBlock

NOISE = ["--axonn-gradient-noise", '{"std": 0.3}']
ON = ["--tensor-model-parallel-impl", "axonn3d"]
SAMO = ["--axonn-samo", '{"sparsity": 0.9}']
OFFLOAD = ["--axonn-offload-optimizer"]
WRONG = {
    "json": (["--axonn-gradient-noise", "std: 1"], "--axonn-gradient-noise std: 1 is not JSON .* write it as"),
    "unknown": (["--axonn-gradient-noise", '{"std": 1.0, "dcay": 1.0}'], 'dcay is not a key; use "decay"'),
    "missing": (["--axonn-gradient-noise"], "axonn.gradient_noise.std is missing; add it"),
    "number": (["--axonn-gradient-noise", "3"], "axonn.gradient_noise = 3 is not an object; write it in braces"),
    "null": (["--axonn-gradient-noise", "null"], "--axonn-gradient-noise null is not an object; write"),
    "range": (['--axonn-gradient-noise={"std": -1}'], "axonn.gradient_noise.std = -1 is not"),
    "empty": (["--axonn-gradient-noise="], "--axonn-gradient-noise has no value; give one"),
    "near": (["--axonn-gradient-nois"], "use --axonn-gradient-noise, .*; a system of your own must be imported before"),
    "two": ([*NOISE, "{}"], "--axonn-gradient-noise is followed by {}, a value too many"),
    "on-a-grid": ([*ON, "--axonn-gradient-noise", "{}"], "axonn.gradient_noise.std is missing"),
    "yaml": ([*NOISE, "--yaml-cfg", "x.yaml"], "--yaml-cfg does not go with --axonn-gradient-noise, which it would"),
    "fsdp": (
        [*NOISE, "--use-megatron-fsdp"],
        "--use-megatron-fsdp does not go with --axonn-gradient-noise: its gradients",
    ),
    "experts": ([*NOISE, "--num-experts", "4"], "--num-experts 4 does not go with --axonn-gradient-noise: .* TED"),
    "order": ([*NOISE, "--use-tp-pp-dp-mapping"], "--use-tp-pp-dp-mapping does not go with --axonn-gradient-noise"),
    "samo": (["--axonn-samo"], "axonn.samo.sparsity is missing; add it"),
    "sparsity": ([*ON, "--axonn-samo", '{"sparsity": 2}'], "axonn.samo.sparsity = 2 is not a share of the weights"),
    "buffers": (
        [*SAMO, "--overlap-param-gather"],
        "--overlap-param-gather does not go with --axonn-samo: gradients are",
    ),
    "sequence": (
        [*SAMO, "--sequence-parallel"],
        "--sequence-parallel does not .* or split tokens by --tensor-model-par",
    ),
    "context": ([*SAMO, "--context-parallel-size", "2"], "--context-parallel-size 2 does not .* leave it at 1"),
    "format": (
        [*SAMO, "--ckpt-format", "torch"],
        "--ckpt-format torch does not go with --axonn-samo: .* use torch_dist",
    ),
    "clipped": ([*SAMO, "--qk-clip"], "--qk-clip does not go with --axonn-samo: it rescales weights .*; leave it out"),
    "masks-later": (
        ["--axonn-samo", '{"sparsity": 0.9, "start_step": 4}', "--ckpt-assume-constant-structure"],
        "--ckpt-assume-constant-structure does not go with --axonn-samo whose masks come .*; leave it out",
    ),
    "pruned-experts": ([*SAMO, "--num-experts", "4"], "--num-experts 4 does not go with --axonn-samo: .* TED"),
    "ted-experts": (["--axonn-ted", '{"dropless": true}'], "--axonn-ted has the key dropless, .* of --num-experts"),
    "ted-tiles": (["--axonn-ted", '{"tile_size": 4}'], "--axonn-ted has the key tile_size, .* --axonn-offload-optim"),
    "ted-rows": (["--axonn-ted", '{"fused": false}'], "has the key fused, .*--num-experts is not given; give that, or"),
    "ted-off": (
        ["--axonn-ted", '{"communication_aware_checkpointing": false}'],
        "communication_aware_checkpointing is false, .* leave the flag out",
    ),
    "ted-stock": (["--axonn-ted"], "Megatron's own layers .* add --tensor-model-parallel-impl axonn3d"),
    "ted-eight": (
        [
            *ON,
            "--axonn-ted",
            "--transformer-impl",
            "transformer_engine",
            "--fp8-format",
            "hybrid",
            "--fp8-recipe",
            "tensorwise",
        ],
        "--axonn-ted does not go with --fp8-format hybrid: .* leave one of the two out",
    ),
    "ted-once": ([*ON, "--axonn-ted"], "nothing with collectives is recomputed, .* add --recompute-granularity full"),
    "offload": (
        [*OFFLOAD, "--optimizer", "lamb"],
        "--optimizer lamb does not go with --axonn-offload-opt.* use adam or",
    ),
    "coarsening": (
        ["--axonn-offload-optimizer", '{"coarsening": 2}'],
        "--axonn-offload-optimizer has the key coarsening, which does not go with Megatron: gradients are .* leave it out",
    ),
    "goldfish-k": (["--axonn-goldfish-k", "two"], "--axonn-goldfish-k two is not an integer; give a number"),
    "goldfish-least": (["--axonn-goldfish-k", "1"], "axonn.goldfish.k = 1 is not an integer of at least 2"),
    "goldfish-empty": (["--axonn-goldfish-k"], "--axonn-goldfish-k has no value; give one"),
    "goldfish-h-alone": (["--axonn-goldfish-h", "4"], "axonn.goldfish.k is missing; add it"),
    "goldfish-twice": (
        ["--axonn-goldfish", '{"k": 2}', "--axonn-goldfish-h", "4"],
        "--axonn-goldfish-h is given beside --axonn-goldfish, which has the key h; give one",
    ),
    "goldfish-labels": (
        ["--axonn-goldfish", '{"k": 2, "labels": "targets"}'],
        "--axonn-goldfish has the key labels, which does not go with Megatron",
    ),
    "pccl-options": (
        ["--axonn-pccl", "--nccl-communicator-config-path", "x.yaml"],
        "--nccl-communicator-config-path x.yaml does not go with --axonn-pccl: it is for NCCL's own .* leave it out",
    ),
    "pccl-streams": (
        ["--axonn-pccl", "--high-priority-stream-groups", "tp"],
        "--high-priority-stream-groups .* does not go with --axonn-pccl: it is for NCCL's own .* leave it out",
    ),
    "pccl-buffers": (["--axonn-pccl", "--use-nccl-ub"], "--use-nccl-ub does not go with --axonn-pccl: it is for NCCL"),
    "pccl-nobody": (
        ["--axonn-pccl", "--fake-process-group"],
        "--fake-process-group does not go with --axonn-pccl: ran",
    ),
    "pipeline": (["--axonn-pipeline", "{}"], "--axonn-pipeline does not .* use --pipeline-model-parallel-size"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_one_sentence(host, capsys, name):
    flags, said = WRONG[name]
    with pytest.raises(SystemExit) as stopped:
        host.run(*flags)
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and told.count("\n") == 1
    assert re.match("pretrain_gpt.py: error: .*" + said, told), told
    assert not host.installed and not host.components


def test_flags_become_blocks(host, monkeypatch):
    args = host.run(*NOISE)
    assert host.components == [{"gradient_noise": NoiseBlock(std=0.3)}] and not host.installed
    assert args.axonn_components == {"gradient_noise": NOISE[1]}
    assert [name for name in vars(args) if "axonn" in name] == ["axonn_components"]
    host.run(*ON, "--axonn-gx", "2", *NOISE)
    host.run(*ON, "--axonn-ted", "--num-experts", "4", "--moe-layer-recompute")
    del host.installed[1:], host.components[2:]
    assert len(host.installed) == 1 and host.components[1] == host.components[0]
    monkeypatch.setattr(cpu, "enabled", lambda: True)
    host.run("--axonn-pccl", "--axonn-gradient-noise", json.dumps({"std": 1.0, "decay": 0.0}))
    host.run("--axonn-pccl", '{"algorithm": "ring"}')
    assert host.components[2]["pccl"].algorithm == "auto" and host.components[2]["gradient_noise"].decay == 0
    assert list(host.components[3]) == ["pccl"] and host.components[3]["pccl"].algorithm == "ring"


def test_what_stands_under_a_key_is_its_block(host):
    args = host.run(
        *SAMO, "--use-distributed-optimizer", *NOISE, "--ckpt-assume-constant-structure", "--num-experts", "0"
    )
    assert args.axonn_stage == 1 and not args.use_distributed_optimizer and not args.gradient_accumulation_fusion
    assert host.components[0] == {"samo": Samo(sparsity=0.9), "gradient_noise": NoiseBlock(std=0.3)}
    args = host.run(*ON, "--axonn-gz", "2", *OFFLOAD)
    assert args.axonn_stage == 0 and host.components[1] == {"offload_optimizer": OffloadOptimizer()}
    host.run(*ON, "--recompute-granularity", "full", "--axonn-ted", '{"stash": "cpu"}')
    assert host.components[2] == {"ted": Ted(stash="cpu")}
    host.run("--axonn-goldfish-k", "3", "--axonn-goldfish-h", "5", *ON)
    host.run("--axonn-goldfish", '{"k": 3, "strategy": "static"}')
    assert host.components[3:] == [{"goldfish": Goldfish(k=3, h=5)}, {"goldfish": Goldfish(k=3, strategy="static")}]
    args = host.run(*NOISE, "--use-distributed-optimizer")
    assert args.use_distributed_optimizer and not hasattr(args, "axonn_stage")


def test_without_a_flag_nothing_is_different(host):
    args = host.run()
    assert not host.components and not [name for name in vars(args) if "axonn" in name]


def test_help_says_what_a_system_does(host):
    text = " ".join(host.add_megatron_arguments(ArgumentParser()).format_help().split())
    assert (
        "--axonn-gradient-noise [JSON] Adds the same noise to a gradient on any grid; what stands under the key" in text
    )
    assert "--axonn-pccl [JSON] collectives by PCCL" in text


def test_a_key_whose_flag_is_there_is_refused(host, capsys, monkeypatch):
    registered = {**components.REGISTERED, "gx": components.REGISTERED["gradient_noise"]}
    monkeypatch.setattr(components, "REGISTERED", registered)
    with pytest.raises(SystemExit):
        host.run()
    assert "--axonn-gx is another flag, so that a system cannot have the key gx; rename" in capsys.readouterr().err


def test_names_are_those_of_one_stage():
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from axonn_plugins.hosts.megatron.host import _serial_names

    model, head = nn.Module(), nn.Linear(2, 2, bias=False)
    model.decoder, model.output_layer = nn.Module(), head
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model.decoder.layers = nn.ModuleList(layers)
    for number, layer in enumerate(layers):
        layer.layer_number = number + 3
    assert list(_serial_names(model).values()) == [
        *("decoder.layers.2.weight", "decoder.layers.2.bias", "decoder.layers.3.weight", "decoder.layers.3.bias"),
        "output_layer.weight",
    ]
    model.share_embeddings_and_output_weights = True
    assert _serial_names(model)[head.weight] == "embedding.word_embeddings.weight"


def test_megatron_asks_for_signals_and_times_by_the_device_that_pccl_is_for(monkeypatch):
    """It knows the device of NCCL's and gloo's groups by their names, and no other's."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from megatron.core.utils import StragglerDetector

    from axonn_plugins.config import Pccl
    from axonn_plugins.hosts.megatron import collectives

    handler = ModuleType("megatron.training.dist_signal_handler")
    handler.get_device = theirs = Mock(side_effect=RuntimeError)
    monkeypatch.setitem(sys.modules, handler.__name__, handler)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(StragglerDetector, "configure", lambda self: setattr(self, "dev", torch.device("cpu")))
    detector, told = StragglerDetector(), []
    try:
        for _ in range(2):  # the last block counts
            collectives.install(Pccl())
        for on_cpu in (True, False):
            monkeypatch.setattr(cpu, "enabled", lambda on_cpu=on_cpu: on_cpu)
            detector.configure()
            told += [handler.get_device(), handler.get_device(1), detector.dev]
    finally:
        collectives.uninstall()
    here = torch.device("cpu")
    assert told == [here, here, here, torch.device("cuda"), torch.device("cuda", 1), 3]
    assert handler.get_device is theirs


class _Host:
    """As much of a host as a system asks for."""

    def __init__(self, chunks, optimizer, args, steps=None):
        self.steps = args.iteration if steps is None else steps

    def gradients(self):
        return []


def test_a_run_goes_on_with_the_steps_that_were_taken(monkeypatch):
    """Of iterations --iterations-to-skip leaves some out, and a schedule that counted them would pass over its last step."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    from axonn_plugins.hosts.megatron import host, moments

    def run(state, iteration, finetune=False, form=None):
        training, optimizer = ModuleType("checkpointing"), SimpleNamespace(step=lambda: True)
        training.generate_state_dict = lambda args: {"iteration": iteration}
        training._load_base_checkpoint = lambda: (state, "", False, None)
        args = SimpleNamespace(iteration=0 if finetune else iteration, finetune=finetune, ckpt_convert_format=form)
        found = moments.Moments({"gradient_noise": NoiseBlock(std=0.3)})
        found._wrap_checkpointing(training)
        training._load_base_checkpoint()
        if form is not None:
            return training.generate_state_dict(args)
        assert training.generate_state_dict(args) == {"iteration": iteration}, "to be read into"
        found.attach([], optimizer, args)
        optimizer.step()
        return found.systems["gradient_noise"].host.steps, training.generate_state_dict(args)

    monkeypatch.setattr(host, "MegatronHost", _Host)
    steps, state = run({}, 0)
    assert steps == 1 and state["axonn_steps"] == 1
    steps, state = run(state, 4)  # three iterations were left out
    assert steps == 2 and state["axonn_steps"] == 2
    assert run(state, 5, finetune=True)[0] == 1
    assert run({"iteration": 5}, 5)[0] == 6, "of a checkpoint that does not tell"
    assert run(state, 5, form="torch") == {**state, "iteration": 5}, "converted before there are systems"
