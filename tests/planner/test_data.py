"""Machines and models as data: what is there, what is read, what is refused in one sentence."""

import json

import pytest

from axonn_plugins.config.base import ConfigError
from axonn_plugins.planner import files, here, machine, model
from axonn_plugins.planner.axonn import node_bandwidth
from axonn_plugins.planner.model import Transformer, UNet
from ted_moe.memory import TABLE_4_1

MINE = """
source = "measured"
tensor = "1 TFLOP/s"
vector = "100 GFLOP/s"
memory = "16 GiB"
memory_bandwidth = "20 GB/s"
domain = 2
fast_bandwidth = "2 GB/s"
fast_latency = "20 us"
slow_bandwidth = "800 Mbit/s"
slow_latency = "0.5 ms"
"""


def test_machines_of_the_issue():
    ours = {"perlmutter", "perlmutter-80gb", "frontier", "alps", "summit", "a100", "h200", "b200", "h100", "gb200"}
    assert ours | {"a100-80gb", "mi250x", "mi300x", "polaris", "tpu-v5p", "v100"} <= set(machine.names())
    for name in machine.names():
        loaded = machine.load(name)
        assert loaded.name == name and loaded.source
        assert loaded.vector < loaded.tensor and loaded.slow_bandwidth <= loaded.fast_bandwidth
    assert [machine.load(f"b200-nvs{size}").domain for size in (4, 8, 64)] == [4, 8, 64]
    assert machine.load("frontier").interfaces == 0.5
    assert machine.load("gb200").domain == 72
    assert machine.load("h100").fp8 == 1978.9e12 and machine.load("a100").fp8 is None


def test_models_of_the_issue():
    for billions in (5, 10, 20, 40, 60, 80, 160, 320, 640):
        loaded = model.load(f"gpt-{billions}b")
        assert loaded.parameters / 1e9 == pytest.approx(billions, rel=0.08)
    assert model.load("GPT3-175B").parameters / 1e9 == pytest.approx(175, rel=0.01)
    assert model.load("gpt3-1t").parameters / 1e12 == pytest.approx(1, rel=0.01)
    assert model.load("vit-era5").sequence == 64800
    assert [model.load(f"unet-{size}").channels for size in ("250m", "500m", "1b", "2b", "4b")] == [
        256,
        416,
        512,
        768,
        1024,
    ]
    assert isinstance(model.load("unet-1b"), UNet)


def test_the_gpt3_of_ted_and_of_the_planner_are_one():
    for name, sizes in TABLE_4_1.items():
        ours = model.load(name.lower().replace("gpt-3", "gpt3"))
        assert (ours.layers, ours.hidden, ours.vocabulary, ours.sequence) == (
            sizes.layers,
            sizes.hidden,
            sizes.vocabulary,
            sizes.context,
        )


def test_units():
    assert files.quantity("bandwidth", "here", "800 Mbit/s") == 1e8
    assert files.quantity("memory", "here", "16GiB") == 16 * 2**30
    assert files.quantity("time", "here", "0 us", zero=True) == 0
    assert files.quantity("rate", "here", "1.5e3 GFLOP/s") == 1.5e12


def test_a_machine_by_path(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(MINE)
    loaded = machine.load(str(path))
    assert (loaded.name, loaded.tensor, loaded.slow_bandwidth, loaded.slow_latency) == ("mine", 1e12, 1e8, 5e-4)
    assert machine.load(f"{path}-nvs8").domain == 8
    as_json = tmp_path / "mine.json"
    as_json.write_text(json.dumps(files.read("--machine", path)))
    assert machine.load(str(as_json)) == loaded


def test_a_model_by_path_and_by_numbers(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text('layers = 4\nhidden = 512\nheads = 8\nsequence = 256\nfeed_forward = 1024\nsource = "mine"')
    assert model.load(str(path)) == Transformer("small", 4, 512, 8, 256, 1024, source="mine")
    numbers = model.load("layers=4, hidden=512, heads=8, sequence=256, feed_forward=1024")
    assert (numbers.layers, numbers.f, numbers.sequence) == (4, 1024, 256)
    assert model.load("gpt-5b", sequence=4096).sequence == 4096


def test_hf_configurations(tmp_path):
    gpt2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    llama = {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "max_position_embeddings": 8192,
        "vocab_size": 128256,
        "hidden_act": "silu",
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(gpt2))
    loaded = model.load(str(path))
    assert (loaded.layers, loaded.hidden, loaded.sequence, loaded.f) == (12, 768, 1024, 3072)
    path.write_text(json.dumps(llama))
    loaded = model.load(str(tmp_path))
    assert loaded.f == 14336 and loaded.gated and loaded.kv == 8
    assert loaded.parameters / 1e9 == pytest.approx(8.03, rel=0.001)
    path.write_text(json.dumps({"model_type": "vlm", "text_config": llama}))
    assert model.load(str(path)).layers == 32


BAD_MACHINES = [
    ('tensor = "1 TFLOP/s"', "tensor = 1e12", "tensor = 1000000000000.0 is not a rate"),
    ('tensor = "1 TFLOP/s"', 'tensor = "1e12"', "tensor = '1e12' is not a rate"),
    ('slow_bandwidth = "800 Mbit/s"', 'slow_bandwidth = "nan GB/s"', "slow_bandwidth = 'nan GB/s'"),
    ('slow_bandwidth = "800 Mbit/s"', 'slow_bandwidth = "25 GB"', "slow_bandwidth = '25 GB' is not a bandwidth"),
    ('memory = "16 GiB"', 'memory = "0 GB"', "memory = '0 GB'"),
    ('memory = "16 GiB"', 'memory = "-16 GB"', "memory = '-16 GB'"),
    ('memory = "16 GiB"', 'memory = "1e999 GB"', "memory = '1e999 GB'"),
    ('memory = "16 GiB"', "", 'lacks the key "memory"'),
    ("domain = 2", "domain = 0", "domain = 0 is not a whole number"),
    ("domain = 2", "domain = 2.5", "domain = 2.5 is not a whole number"),
    ("domain = 2", "domain = true", "domain = True is not a whole number"),
    ("domain = 2", "domian = 2", 'unknown key "domian"; use "domain"'),
    ("domain = 2", "domain = 2\nflop_efficiency = 1.5", "flop_efficiency = 1.5 is not a number above 0 and at most 1"),
    ("domain = 2", "domain = 2\nbandwidth_efficiency = nan", "bandwidth_efficiency = nan"),
    ("domain = 2", "domain = 2\ninterfaces = 0", "interfaces = 0"),
    ("domain = 2", "domain = 2\nreduce_scatter = -1", "reduce_scatter = -1"),
    ("domain = 2", "domain = 2\nproduct_half = 0", "product_half = 0 is not a number above 0"),
    ("domain = 2", 'domain = 2\nfp8 = "fast"', "fp8 = 'fast' is not a rate"),
    ('source = "measured"', 'source = ""', "source = '' is not a text"),
    ('fast_latency = "20 us"', 'fast_latency = "20"', "fast_latency = '20' is not a time"),
    ("domain = 2", "domain = ", "is not TOML"),
    ("domain = 2", f"domain = {'9' * 5000}", "is not TOML"),
    ("domain = 2", f"domain = 2\nproduct_half = {10**400}", "is not a number above 0"),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD_MACHINES)
def test_wrong_machine_files(tmp_path, old, new, message):
    path = tmp_path / "mine.toml"
    path.write_text(MINE.replace(old, new, 1))
    with pytest.raises(ConfigError) as caught:
        machine.load(str(path))
    sentence = str(caught.value)
    assert message in sentence and str(path) in sentence and "\n" not in sentence


def test_flags_among_numbers():
    llama = model.load(
        "layers=32,hidden=4096,heads=32,kv_heads=8,feed_forward=14336,vocabulary=128256,gated=true,untied=true"
    )
    assert llama.parameters == model.load("llama3-8b").parameters


BAD_MODELS = [
    ("layers=4,hidden=512", 'lacks the key "heads"'),
    ("layers=4,hidden=512,heads=7", "heads = 7 does not divide hidden = 512"),
    ("layers=0,hidden=512,heads=8", "layers = 0 is not a whole number from 1"),
    ("layers=4,hidden=512,heads=8,kv_heads=3", "kv_heads = 3 does not divide heads = 8"),
    ("layers=4,hiden=512,heads=8", 'unknown key "hiden"; use "hidden"'),
    ("layers=4,hidden=x,heads=8", "does not give sizes"),
    (
        "layers=4,hidden=512,heads=8,experts=4,experts_per_token=1,expert_feed_forward=64,dense_layers=5",
        "dense_layers = 5 are more",
    ),
    ("layers=4,hidden=512,heads=true", "heads = True is not a whole number"),
    ("gpt-81b", 'use "gpt-80b"'),
    ("no/such/config.json", "is no file"),
]


@pytest.mark.parametrize(("name", "message"), BAD_MODELS)
def test_wrong_models(name, message):
    with pytest.raises(ConfigError) as caught:
        model.load(name)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_emulated_cluster_by_name():
    plain, named = machine.load("emulated"), machine.load("emulated-1ms-2Gbit-nvs4")
    for found, sizes in ((plain, (100e-6, 500e6 / 8, 2)), (named, (1e-3, 2e9 / 8, 4))):
        assert (found.slow_latency, found.slow_bandwidth, found.domain) == pytest.approx(sizes)
    # A node has one interface, whatever its ranks.
    assert node_bandwidth(plain) == plain.slow_bandwidth and node_bandwidth(named) == named.slow_bandwidth
    assert machine.load("emulated-0us").slow_latency == 0
    for name, words in [
        ("emulated-0Mbit", "is not a bandwidth"),
        ("emulated-1.2.3ms", "is not a time"),
        ("emulated-nvs0", "the number after -nvs"),
        ("emulated-5", 'use "emulated"'),
    ]:
        with pytest.raises(ConfigError, match=words):
            machine.load(name)


def test_this_machine_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("AXONN_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="was not measured yet; run axonn bench network"):
        machine.load("here")
    machine.measured_file().parent.mkdir()
    machine.measured_file().write_text(machine.files.ours("machines")["two-cores"].read_text())
    assert machine.load("here-nvs4").domain == 4
    assert machine.load("here").tensor == machine.load("two-cores").tensor


def test_this_machine_in_a_domain_of_several_hosts(tmp_path, monkeypatch):
    """A rack of GB200 stays one domain, of as many hosts as it has, whatever a host's ranks."""
    monkeypatch.setenv("AXONN_CACHE", str(tmp_path))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA GB200")
    rack = machine.load("gb200")
    for local, domain, interfaces in (("4", 72, 1.0), ("2", 36, 2.0)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        found = here.this_machine(None, "machine", cpu=False, memory=1e11)
        assert (found.domain, found.host, found.interfaces) == (domain, int(local), interfaces)
        assert found.slow_bandwidth == rack.slow_bandwidth
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    found = here.this_machine(None, "machine", cpu=False, memory=1e11)
    assert (found.domain, found.host, found.interfaces) == (2, 0, machine.load("h100").interfaces * 4)


@pytest.mark.parametrize(
    ("sizes", "billions"),
    [
        # As published by their makers.
        ({"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "hidden_act": "silu"}, 3.8),
        ({"model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71, "multi_query": True}, 7.0),
        (
            {
                "model_type": "chatglm",
                "hidden_size": 4096,
                "num_layers": 28,
                "ffn_hidden_size": 13696,
                "multi_query_group_num": 2,
                "padded_vocab_size": 65024,
            },
            6.2,
        ),
    ],
)
def test_families_with_shared_keys_and_gates(sizes, billions, tmp_path):
    table = {"num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32064} | sizes
    if "num_layers" in sizes:
        del table["num_hidden_layers"], table["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert model.load(str(tmp_path)).parameters / 1e9 == pytest.approx(billions, rel=0.05)
