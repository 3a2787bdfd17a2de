from functools import partial

import pytest
import torch
from torch import nn

import samo
from axonn_plugins import cli
from axonn_plugins.samo import memory_cli
from axonn_plugins.samo.models import MODELS, gpt, maker
from samo import memory
from samo.memory import ADAM, MOMENTUM, PLAIN, Layer
from samo.pruning import smallest
from samo.selection import Magnitudes
from samo.targets import targets


def test_the_paper_s_equations():
    phi = 1_000_000
    assert memory.dense_bytes(phi) == 20 * phi
    for p in (0, 0.25, 0.5, 0.8, 0.9, 1):
        assert memory.paper_bytes(phi, p) == pytest.approx(24 * (1 - p) * phi + 2 * phi)
        assert memory.dense_bytes(phi) - memory.paper_bytes(phi, p) == pytest.approx(memory.paper_saving(phi, p))
        assert memory.our_bytes(phi, p) == pytest.approx(2 * phi + 16 * (1 - p) * phi)
        assert memory.our_bytes(phi, p, itemsize=4) == pytest.approx(4 * phi + 14 * (1 - p) * phi)
    # "a minimum sparsity of 0.25 to break even", "66-78% of memory" between 80 and 90 %; ours saves 82 % at 90.
    assert memory.paper_saving(phi, 0.25) == 0
    assert [memory.paper_saving(phi, p) / (20 * phi) for p in (0.8, 0.9)] == pytest.approx([0.66, 0.78])
    assert 1 - memory.our_bytes(phi, 0.9) / (20 * phi) == pytest.approx(0.82)
    assert memory.dense_bytes(phi, MOMENTUM) == 16 * phi and memory.dense_bytes(phi, itemsize=4) == 16 * phi
    assert memory.paper_bytes(phi, 1, itemsize=4) == 4 * phi
    assert memory.our_bytes(phi, 0.5, PLAIN) == 2 * phi + 8 * phi / 2
    assert memory.our_bytes(phi, 0.5, ADAM, ranks=4) == 2 * phi + (4 + 12 / 4) * phi / 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(301, 64)
        self.wide = nn.Linear(64, 2100)
        self.small = nn.Linear(7, 5)
        self.empty = nn.Parameter(torch.zeros(0, 3))


FACTORIES = {
    ADAM: partial(torch.optim.AdamW, lr=1e-3),
    MOMENTUM: partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
    PLAIN: partial(torch.optim.SGD, lr=1e-3),
}


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("state", [ADAM, MOMENTUM, PLAIN])
def test_formula_and_tensors_agree(sparsity, dtype, state):
    """To the byte, but for Adam's counters."""
    model, tile = Model().to(dtype), 5000
    masks = smallest(Magnitudes(targets(model)), sparsity, "layer")
    optimizer = samo.Optimizer(FACTORIES[state], model, masks, tile_size=tile)
    for parameter in model.parameters():
        parameter.sum().backward()
    optimizer.step()
    found, layers = memory.measured(optimizer), memory.layers_of(model, sparsity)
    assert layers == memory.layers_of(model, sparsity, masks=masks)
    expected = memory.predicted(layers, state, dtype.itemsize, tile=tile)
    counters = sum(4 for values in optimizer.inner.state.values() if "step" in values)
    assert found.state == expected.state + counters
    for part in ("weights", "gradients", "masters", "indices", "buffers"):
        assert getattr(found, part) == getattr(expected, part), part
    assert found.total == optimizer.nbytes == expected.total + counters


def test_layers_and_indices():
    assert memory.index_bytes(Layer(10, 10)) == memory.index_bytes(Layer(0, 0)) == 0
    assert memory.index_bytes(Layer(2**16, 1)) == 4
    assert memory.index_bytes(Layer(2**16, 2**15)) == 2**16 + 16
    assert memory.index_bytes(Layer(2**16 + 1, 2**15)) == 2**16 + 24
    assert memory.index_bytes(Layer(2**31, 1)) == 2 + 8 * (2**15 + 1)
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 5))
    assert memory.layers_of(model, 0.9) == [Layer(40, 40), Layer(20, 2), Layer(5, 5)]
    assert memory.layers_of(model, 0.9, include=["0.*"]) == [Layer(40, 4), Layer(20, 20), Layer(5, 5)]


def test_models_of_table_4_1():
    """The counts of Table 4.1, those of the two convolutional networks as torchvision publishes them."""
    sizes = {}
    with torch.device("meta"):
        for name, make in MODELS.items():
            sizes[name] = sum(parameter.numel() for parameter in make().parameters())
    assert sizes["VGG-19"] == 143_667_240 and sizes["WideResnet-101"] == 126_886_696
    for name, billions in (("XL", 1.3), ("2.7B", 2.7), ("6.7B", 6.7), ("13B", 13)):
        assert sizes[f"GPT-3-{name}"] / 1e9 == pytest.approx(billions, rel=0.025)
    assert maker("gpt3 xl") is MODELS["GPT-3-XL"] and maker("vgg19") is MODELS["VGG-19"]


def test_the_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_cli, "small_gpt", partial(gpt, 1, 32, 64, 16))
    picture = tmp_path / "new" / "figure.png"
    assert cli.main(["samo", "memory", "GPT:2,64,100,32", "--include", "*", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    phi = 100 * 64 + 32 * 64 + 2 * (12 * 64 * 64 + 13 * 64) + 2 * 64
    assert f"{phi:,} parameters" in out and "bf16, adamw" in out
    rows = {line.split("  ")[0]: line.split()[-3] for line in out.splitlines() if line.endswith("%")}
    assert rows["dense, as the paper counts it: 20φ"] == f"{20 * phi:,}"
    by_layer, measured = (int(rows[key].replace(",", "")) for key in ("ours, by layer", "ours, measured after a step"))
    assert 0 <= measured - by_layer < 500
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main(["samo", "memory", "GPT-3-13B", "--shard", "8"]) == 0
    out = capsys.readouterr().out
    assert "ours, formula, over 8 ranks" in out and "not measured" in out
    assert cli.main(["samo", "memory", "GPT-3-XL", "--sparsity", "0", "--dtype", "fp32", "--optimizer", "sgd"]) == 0
    out = capsys.readouterr().out
    assert "12φ" in out and "autocast" not in out and "largest model" in out


def test_a_configuration_of_transformers(capsys, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=50, n_positions=8).save_pretrained(tmp_path)
    phi = 50 * 32 + 8 * 32 + 12 * 32 * 32 + 13 * 32 + 2 * 32
    for path in (tmp_path, tmp_path / "config.json"):
        assert cli.main(["samo", "memory", str(path)]) == 0
        out = capsys.readouterr().out
        assert f"{phi:,} parameters, of which {12 * 32 * 32:,} can be pruned" in out and "measured after a step" in out
    for text in (
        "{}",
        "no JSON",
        '{"model_type": "gpt2", "n_layer": "x"}',
        '{"model_type": "gpt2", "n_embd": 7, "n_head": 2}',
    ):
        (tmp_path / "config.json").write_text(text)
        assert cli.main(["samo", "memory", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert "is not a configuration that transformers can use: " in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["VGG-91"], 'MODEL = "VGG-91" is not known; use "VGG-19", another of'),
        (["GPT:2,64"], 'MODEL = "GPT:2,64" does not give the sizes of a GPT'),
        (["GPT:2,0,64"], "does not give the sizes of a GPT"),
        (["GPT:99999999999,64,64"], "of at most 10,000 layers"),
        (["none/config.json"], 'there is no file "none/config.json"'),
        (["VGG-19", "--sparsity", "2"], "--sparsity = 2.0 is not a share"),
        (["VGG-19", "--sparsity", "nan"], "--sparsity = nan is not a share"),
        (["VGG-19", "--dtype", "int8"], '--dtype = "int8" is not known; use "fp32", or another of bf16, fp16, fp32'),
        (["VGG-19", "--optimizer", "lion"], '--optimizer = "lion" is not known'),
        (["VGG-19", "--shard", "0"], "--shard = 0 is not a number of ranks"),
        (["VGG-19", "--include", "fc"], "include pattern 'fc' matches no parameter"),
        (["GPT:1,8,9", "--picture", "figure.xyz"], '--picture = "figure.xyz" cannot be written'),
    ],
)
def test_mistakes_are_one_sentence(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(memory_cli, "small_gpt", partial(gpt, 1, 8, 9, 4))
    assert cli.main(["samo", "memory", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_command_alone(capsys):
    assert cli.main(["samo"]) == 2 and cli.main(["samo", "--help"]) == 0
    assert "usage: axonn samo memory MODEL" in capsys.readouterr().out
    assert cli.main(["samo", "speed"]) == 2
    assert '"speed" is nothing that axonn samo does' in capsys.readouterr().err
