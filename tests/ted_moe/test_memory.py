"""The memory model: the dissertation's equations, counts of real modules, DeepSpeed's state on ranks, the command."""

import os

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from torch import nn

import ted_moe
from axonn_plugins import cli
from axonn_plugins.samo.models import MODELS
from axonn_plugins.ted import memory_measure as measuring
from axonn_plugins.ted import memory_report as report
from ted_moe import fitting, memory
from ted_moe.memory import TABLE_4_1, Degrees, Parameters, Transformer
from tests.distributed import run_ranks

SMALL = Transformer(4, 32, 50, 16)


def test_equations_of_the_dissertation():
    base, experts, tensor, data = 6e9, 8, 2, 4
    degrees = Degrees(tensor, experts, data)
    whole = memory.paper_parameters(base, experts)
    assert (whole.expert, whole.shared) == (experts / 3 * base, 2 / 3 * base)
    assert degrees.gpus == tensor * degrees.shared_data == 64
    # 7.5 is 7.4 with 7.2, 7.3 and 7.1 substituted, 7.6 its limit; 7.7 relates the two data degrees.
    local = Parameters(whole.shared / tensor, whole.expert / tensor / experts)
    bound = memory.paper_bytes(base, experts, degrees.gpus, tensor)
    assert memory.state_bytes(local, degrees) == pytest.approx(bound, rel=1e-12)
    assert bound == pytest.approx(4 * base * (1 / 2 + 10 / 64), rel=1e-12)
    assert degrees.data == degrees.shared_data / experts
    assert memory.paper_largest_base(bound, tensor, experts, degrees.gpus) == pytest.approx(base)
    assert memory.paper_largest_base(16e9, tensor) == tensor / 4 * 16e9
    for node in (4, 6, 8):  # "4×, 6× and 8× larger base models on Perlmutter, Summit and an NVIDIA-DGX-A100"
        assert memory.paper_largest_base(16e9, node) / memory.paper_largest_base(16e9) == pytest.approx(node)


def test_state_and_step():
    degrees = Degrees(2, 4, 3)
    local = Parameters(shared=1200, expert=600)
    assert memory.state(600, 3) == memory.State(1200, 1200, 2400)
    assert memory.state_bytes(local, degrees) == (4 + 12 / 12) * 1200 + (4 + 12 / 3) * 600
    assert memory.step_bytes(local, degrees) == 4 * 200  # experts' share is the longest
    assert memory.step_bytes(local, degrees, tile=50) == 4 * 50
    assert memory.step_bytes(local, degrees, tile=5000) == 4 * 200
    assert memory.stock_step_bytes(local, degrees) == 6 * 200
    assert memory.stock_step_bytes(Parameters(0, 10**9), Degrees(1, 4, 2)) == 3 * memory.STOCK_GROUP
    # The spike's cap of 1 GB is that of DeepSpeed's groups; the published one of a group is around 4.5 GB.
    assert 6 * memory.STOCK_GROUP == pytest.approx(2**30, abs=6)
    degrees = Degrees(1, 32, 1)
    spike = memory.step_bytes(memory.parameters(TABLE_4_1["GPT-3-2.7B"], 32, degrees), degrees)
    assert spike == pytest.approx(3.36e9, rel=0.01)


def count(model: nn.Module) -> Parameters:
    """Parameters of a module, in experts and outside."""
    from deepspeed.moe.utils import is_moe_param

    numbers = {False: 0, True: 0}
    for parameter in model.parameters():
        numbers[is_moe_param(parameter)] += parameter.numel()
    return Parameters(numbers[False], numbers[True])


@pytest.mark.parametrize(
    ("model", "experts", "ranks"),
    [(SMALL, 4, 1), (SMALL, 4, 4), (SMALL, 6, 2), (Transformer(5, 24, 31, 8), 3, 3), (TABLE_4_1["GPT-3-2.7B"], 8, 4)],
)
def test_counts_are_those_of_deepspeed(model, experts, ranks):
    """Of deepspeed.moe.layer.MoE on the meta device, for one rank."""
    with torch.device("meta"):
        built = measuring.GPT(model, experts, ranks)
    assert count(built) == memory.parameters(model, experts, Degrees(expert=ranks))
    whole = memory.parameters(model, experts)
    assert whole.expert == ranks * count(built).expert and whole.shared == count(built).shared
    # A gate has one row an expert; otherwise an MoE with one expert is the base model.
    gate = memory.expert_layers(model) * model.hidden
    assert memory.parameters(model, 1).total == memory.base_parameters(model) + gate


def test_base_models_are_those_of_table_4_1():
    with torch.device("meta"):
        for name, model in TABLE_4_1.items():
            counted = sum(parameter.numel() for parameter in MODELS[name]().parameters())
            assert memory.base_parameters(model) == counted
            # Two thirds in MLPs: within what embeddings take.
            whole = memory.paper_parameters(counted, 64)
            assert memory.parameters(model, 64).expert == pytest.approx(whole.expert, rel=0.09)


def test_tensor_ranks_hold_megatrons_shares():
    """Split parts sum up to the whole; the others are on each rank."""
    experts, tensor = 4, 4
    whole, local = (memory.parameters(SMALL, experts, Degrees(degree)) for degree in (1, tensor))
    layers, sparse, hidden = SMALL.layers, 2, SMALL.hidden
    pad = (52 - SMALL.vocabulary) * hidden
    replicated = (SMALL.context + 4 * layers + 2 + sparse * experts + layers + sparse) * hidden
    assert tensor * (local.shared - replicated) == whole.shared - replicated + pad
    replicated = sparse * experts * hidden
    assert tensor * (local.expert - replicated) == whole.expert - replicated


def test_activations():
    hidden, tokens = SMALL.hidden, 64
    assert memory.checkpoint_bytes(SMALL, tokens) == 4 * tokens * hidden * 2
    stash = lambda *args, **options: memory.stash_bytes(SMALL, 4, tokens, *args, **options) / (2 * hidden)  # noqa: E731
    # Two of four layers have experts. No tensor parallelism: two all-to-alls in each of these.
    assert stash(Degrees(1, 4)) == 2 * 2 * tokens
    assert stash(Degrees(1, 1, 4)) == 0
    # Six all-reduces of 4·2 − 2, and in the two: all-reduce and two all-to-alls of all tokens.
    assert stash(Degrees(2, 4), dropping=False, fused=False) == 6 * tokens + 2 * 3 * tokens
    # With dropping, all-to-alls of half and two all-gathers; fused, a reduce-scatter.
    assert stash(Degrees(2, 4), fused=False) == 6 * tokens + 2 * (tokens + tokens + 2 * tokens)
    assert stash(Degrees(2, 4)) == 6 * tokens + 2 * (tokens + tokens / 2 + 2 * tokens)
    # A capacity of 17 is padded to 18 where its duplicates are dropped; capacities have a floor of 4.
    assert stash(Degrees(1, 4), capacity_factor=17 / 16) == 2 * 2 * 4 * 17
    assert stash(Degrees(2, 1, 4), capacity_factor=17 / 16, dropping=False) == 6 * tokens + 2 * 4 * 17
    assert stash(Degrees(2, 1, 4), capacity_factor=17 / 16) == 6 * tokens + 2 * (4 * 9 + 2 * 4 * 18)
    assert memory.stash_bytes(SMALL, 4, 4, Degrees(1, 4)) / (2 * hidden) == 2 * 2 * 16


def stashed(features: int, experts: int, tokens: int) -> dict[tuple[bool, bool], int]:
    """Bytes that `ted_moe.Stashing` keeps of a layer, by dropping and fused."""
    groups, found = ted_moe.Groups(ted_moe.Topology(4, tensor=2, expert=2)), {}
    for dropping in (False, True):
        for fused in (False, True):
            mlp = nn.Sequential(nn.Linear(features, 8), nn.GELU(), nn.Linear(8, features))
            switches = {"duplicate_token_dropping": dropping, "fused": fused}
            layer = ted_moe.MoE(features, mlp, experts, 2, use_rts=False, groups=groups, **switches).bfloat16()
            function = ted_moe.Stashing(layer)
            function(torch.randn(tokens, features, dtype=torch.bfloat16))
            found[dropping, fused] = function.nbytes
    return found


def test_the_stash_is_as_large_as_the_formula_says():
    features, experts, tokens = 6, 4, 68  # a capacity of 17
    model = Transformer(2, features)
    for found in run_ranks(stashed, 4, features, experts, tokens):
        for (dropping, fused), nbytes in found.items():
            expected = memory.stash_bytes(model, experts, tokens, Degrees(2, 2), dropping=dropping, fused=fused)
            # Not there: the all-reduces outside the layer's experts. Besides: the capacity that ranks agree on, the layer's
            # number twice, and ten numbers of each of two tensor groups.
            asked = 8 * (3 + 2 * 10)
            assert nbytes == expected - 3 * tokens * features * 2 + asked


def test_largest():
    rows = report.search([32, 64, 128, 256, 512], [4, 8, 16, 32, 64, 128], 16e9, 6)
    ratios = [row.ted.parameters / row.stock.parameters for row in rows]
    assert ratios == pytest.approx([1.57, 1.46, 1.40, 1.30, 2.56], abs=0.01)
    for row in rows:
        for fit in (row.stock, row.ted, row.stock_part, row.ted_part):
            assert fit.bytes <= 16e9 and fit.degrees.gpus == row.gpus and fit.degrees.expert == fit.experts
        assert row.stock.degrees.tensor == 1 and row.ted.degrees.tensor <= 6
    # "beyond 128 GPUs, our proposed framework can train MoEs with hundreds of billion of parameters"
    assert all(row.ted.parameters > 1e11 for row in rows[3:])
    # Twice 54 experts: a degree of three divides the GPUs, and not the features.
    assert fitting.largest({"one": Transformer(2, 32)}, [4], 12, 1e12, 3).degrees == Degrees(1, 4, 3)
    assert fitting.largest({"one": Transformer(2, 33)}, [4], 12, 1e12, 3).degrees.tensor == 1
    assert fitting.largest(TABLE_4_1, [4], 4, 1e9) is None
    assert fitting.largest(TABLE_4_1, [8], 4, 1e15) is None


def test_the_published_range():
    """With what 2.6 GB kept free leaves, the ends of Figure 7.9's range are those of the nominal sizes of Table 4.1."""
    first, *_, last = report.search([32, 512], [4, 8, 16, 32, 64, 128], 13.4e9, 6)
    nominal = {"GPT-3-XL": 1.3e9, "GPT-3-2.7B": 2.7e9, "GPT-3-6.7B": 6.7e9}
    ratios = []
    for row in (first, last):
        stock, ted = (memory.paper_parameters(nominal[fit.base], fit.experts) for fit in (row.stock_part, row.ted_part))
        ratios.append(ted.total / stock.total)
    assert ratios == pytest.approx([1.0995, 4.888], abs=1e-3)  # "1.09-4.8×"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: Degrees(tensor=0), "tensor = 0 is not a number of ranks"),
        (lambda: memory.parameters(SMALL, 6, Degrees(expert=4)), "experts = 6 do not divide among expert = 4 ranks"),
        (lambda: memory.parameters(SMALL, 0), "experts = 0 is not a number of experts"),
        (lambda: memory.parameters(SMALL, 4, Degrees(tensor=3)), "tensor = 3 does not divide the 32 features"),
    ],
)
def test_what_does_not_divide_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        change()


@pytest.mark.parametrize("degrees", [Degrees(1, 2, 2)])
def test_deepspeeds_state_on_ranks_is_the_formulas(degrees):
    """Weights and gradients to the byte; the optimizer's state but for padding and counters."""
    experts = 4
    ranks = measuring.measure(SMALL, experts, degrees)
    assert len(ranks) == 4
    local = memory.parameters(SMALL, experts, degrees)
    for found in ranks:
        for counted, number, data in (
            (found.shared, local.shared, degrees.shared_data),
            (found.expert, local.expert, degrees.data),
        ):
            expected = memory.state(number, data)
            assert (counted.weights, counted.gradients) == (expected.weights, expected.gradients)
            assert 0 <= counted.optimizer - expected.optimizer <= 12 * 2 + 4


def test_the_table(capsys, tmp_path):
    picture = tmp_path / "new" / "figure.png"
    assert cli.main(["ted", "memory", "--picture", str(picture)]) == 0
    out = capsys.readouterr().out
    rows = [line.split() for line in out.splitlines() if line.startswith("  512")]
    assert rows[0][-1] == rows[1][-1] == "2.56" and rows[0][1] == "109.2B"
    assert "published: TED's are 1.09 to 4.8 times as large" in out and "G_tensor·M/4" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    arguments = ["--gpus", "8, 1..4", "--memory", "1GiB", "--experts", "4", "--tensor", "max", "--reserve", "0.5GB"]
    assert cli.main(["ted", "memory", *arguments]) == 0
    out = capsys.readouterr().out
    assert out.count("nothing fits") == 4 * 2 * 2 and "TED, tensor 8" in out
    assert "GPUs of 1.07374 GB, 0.5 GB kept free" in out


def test_one_configuration(capsys):
    arguments = ["--experts", "16", "--tensor", "2", "--expert", "4", "--data", "8", "--memory", "40GB"]
    assert cli.main(["ted", "memory", "gpt3 6.7b", *arguments]) == 0
    out = capsys.readouterr().out
    assert "64 GPUs: tensor 2 × data 32 outside experts; tensor 2 × expert 4 × data 8 for experts" in out
    assert "DeepSpeed-MoE: tensor 1, data 64; expert 4 × data 16" in out
    rows = {line[:56].strip(): line[56:].split() for line in out.splitlines() if len(line) > 56}
    model, degrees = TABLE_4_1["GPT-3-6.7B"], Degrees(2, 4, 8)
    local = memory.parameters(model, 16, degrees)
    assert rows["parameters"][0] == f"{local.total:,}"
    assert rows["model state"][:2] == [f"{memory.state_bytes(local, degrees) / 1e9:.2f}", "GB"]
    assert rows["optimizer's step: TED's tiles; stock's longest group"][:2] == ["7.20", "MB"]
    assert rows["of 40.00 GB"][2:3] == ["free"] and rows["of 40.00 GB"][-1] == "much"
    assert cli.main(["ted", "memory", "GPT:2,8,9"]) == 0
    assert "16 GPUs: tensor 1 × data 16" in capsys.readouterr().out


def test_the_measured_beside_the_formula(capsys, monkeypatch):
    counted = measuring.Counted(memory.State(100, 100, 300), memory.State(1, 2, 3))
    monkeypatch.setattr(measuring, "measure", lambda *arguments: [counted, counted])
    for arguments, ranks in (([], 4), (["GPT:2,16,30,8", "--experts", "2"], 2)):
        assert cli.main(["ted", "memory", "--measure", *arguments]) == 0
        out = capsys.readouterr().out
        assert f"stock DeepSpeed-MoE, bf16, Adam, ZeRO-1, on {ranks} ranks" in out
        assert [line.split()[-2] for line in out.splitlines() if line.startswith("model state ")][-1] == "506"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], '--gpus = "0" is not a list of numbers; use whole numbers from 1 to 999,999,999'),
        (["--gpus", "32,,64"], "is not a list of numbers"),
        (["--gpus", "64..32"], "is not a list of numbers"),
        (["--gpus", "1000000000"], "is not a list of numbers"),
        (["--experts"], "--experts is not given what it needs"),
        (["--experts", "-4"], '--experts = "-4" is not a list'),
        (["--experts", "4..x"], "is not a list of numbers"),
        (["--memory", "nan"], '--memory = "nan" is not a size of memory; use a positive number and a unit'),
        (["--memory", "nanGB"], "is not a size of memory"),
        (["--memory", "0GB"], "is not a size of memory"),
        (["--memory", "infGB"], "is not a size of memory"),
        (["--memory", "16"], "is not a size of memory"),
        (["--reserve", "16GB"], "--memory = 16GB leaves nothing beside --reserve = 16GB"),
        (
            ["--tensor", "0"],
            '--tensor = "0" is not a number of them; use a whole number from 1 to 999,999,999 or "max"',
        ),
        (["--tensor", "2.5"], "is not a number of them"),
        (["--picture", "figure.xyz"], '--picture = "figure.xyz" cannot be written'),
        ([""], 'MODEL = "" is not known'),
        (["--gpus", ""], '--gpus = "" is not a list of numbers'),
        (["--memory", ""], '--memory = "" is not a size of memory'),
        (["--expert", "4"], "--expert = 4 belongs to one MODEL"),
        (["--speed"], "unrecognized arguments: --speed; axonn ted memory --help"),
        (["GPT-3-7.6B"], 'MODEL = "GPT-3-7.6B" is not known; use "GPT-3-6.7B", another of'),
        (["VGG-19"], 'MODEL = "VGG-19" is not known'),
        (["GPT:2,64"], 'MODEL = "GPT:2,64" does not give the sizes of a GPT'),
        (["GPT:2,0,64"], "does not give the sizes of a GPT"),
        (["GPT:1,64,64"], "has no second layer to hold experts"),
        (["GPT:2,64,64", "--experts", "4..8"], '--experts = "4..8" is not a number of them'),
        (["GPT:2,64,64", "--experts", "6", "--expert", "4"], "--experts = 6 do not divide among expert = 4 ranks"),
        (["GPT:2,64,64", "--tensor", "3"], "--tensor = 3 does not divide the 64 features"),
        (["GPT:2,64,64", "--tensor", "max"], '--tensor = "max" is not a number of them'),
        (["GPT:2,64,64", "--data", "0"], '--data = "0" is not a number of them'),
        (["GPT:2,64,64", "--tokens", "many"], '--tokens = "many" is not a number of them'),
        (["GPT:2,64,64", "--gpus", "8"], "--gpus = 8 is for the table, which is printed without MODEL"),
        (["GPT:2,64,64", "--tensor", "2", "--measure"], "has no tensor parallelism of its own; use --tensor 1, not 2"),
        (["GPT:2,64,64", "--measure"], "--measure would start 16 ranks on this machine, and 8 are the most"),
        (["GPT-3-XL", "--experts", "4", "--measure"], "parameters on 4 ranks, and 100,000,000 are the most"),
    ],
)
def test_mistakes_are_one_sentence(capsys, arguments, message):
    assert cli.main(["ted", "memory", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_command_alone(capsys):
    assert cli.main(["ted"]) == 2 and cli.main(["ted", "--help"]) == 0
    assert "usage: axonn ted memory [MODEL]" in capsys.readouterr().out
    assert cli.main(["ted", "speed"]) == 2
    assert '"speed" is nothing that axonn ted does' in capsys.readouterr().err
