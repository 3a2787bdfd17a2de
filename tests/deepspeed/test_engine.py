"""The engine trains what a plain loop on one process trains: every ZeRO stage, precision and kind of optimizer."""

from __future__ import annotations

import itertools
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.activation_checkpointing import checkpointing
from packaging.version import Version
from torch import Tensor, nn

from axonn_recipes.models.gpt import GPT, GPTConfig
from tests.deepspeed.training import Case, difference, run_cases, serial, two_groups, wide
from tests.distributed import run_ranks
from tests.matrix import chosen, names

GRIDS = {"gx2gz2": (2, 1, 2), "gy2gz2": (1, 2, 2), "gx2gdata2": (2, 1, 1), "gz2gdata2": (1, 1, 2), "gx2gy2": (2, 2, 1)}
TOLERANCE = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 5e-4, "fp64": 1e-10}
GPT_PLAN = {
    "tokens": "embedding",
    "positions": "embedding",
    "*.ln?": "norm",
    "norm": "norm",
    "*.qkv": {"kind": "normal", "parts": 3, "heads": 4},
    "*.proj": "transposed",
    "*.fc1": "normal",
    "*.fc2": "transposed",
    "head": "head",
    "loss": "loss",
}
PAIRS = {"*.fc1": "normal", "*.fc2": "transposed"}


def gpt() -> nn.Module:
    return GPT(GPTConfig(vocabulary=51, context=6, layers=1, heads=4, hidden=32, tied=True))


class Checkpointed(GPT):
    """Blocks are DeepSpeed's checkpoints, whose inputs it partitions, or keeps in contiguous buffers of a pass."""

    contiguous = False

    def __init__(self) -> None:
        super().__init__(GPTConfig(vocabulary=51, context=6, layers=2, heads=4, hidden=32))

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.tokens(ids)
        ranks = dist.is_initialized()  # a configuration of the whole process, which the run in one process leaves alone
        checkpointing.PARTITION_ACTIVATIONS, checkpointing.num_layers = ranks, len(self.blocks)
        checkpointing.CONTIGUOUS_CHECKPOINTING = ranks and self.contiguous
        for block in self.blocks:
            x = checkpointing.checkpoint(block, x) if ranks else block(x)
        logits = self.head(self.norm(x + self.positions(torch.arange(ids.shape[1]))))
        return logits if targets is None else self.mean_loss(logits, targets)


class Contiguous(Checkpointed):
    """Between its blocks is a layer that gives a view."""

    contiguous = True

    def __init__(self) -> None:
        super().__init__()
        self.blocks.insert(1, nn.Linear(32, 32, bias=False))


def ids() -> tuple[Tensor, ...]:
    drawn = torch.randint(51, (8, 7))
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


class Regression(nn.Module):
    """Wraps a body of (rows, features) → (rows, outputs) with a squared error."""

    def __init__(self, *body: nn.Module) -> None:
        super().__init__()
        self.body = nn.Sequential(*body)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(wide(self.body(x)), wide(y))


def rows(inputs: int = 16, outputs: int = 8) -> Any:
    return lambda: (torch.randn(8, inputs), torch.randn(8, outputs))


def mlp(bias: bool = True, inner: int = 12) -> nn.Module:
    return Regression(nn.Linear(16, inner, bias=bias), nn.Tanh(), nn.LayerNorm(inner), nn.Linear(inner, 8, bias=bias))


def frozen() -> nn.Module:
    model = Regression(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 8))
    for parameter in (*model.body[2].parameters(), model.body[0].bias):
        parameter.requires_grad_(False)
    return model


def weight_normed() -> nn.Module:
    return Regression(
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(16, 12)), nn.Tanh(), nn.Linear(12, 8, bias=False)
    )


def odd() -> nn.Module:
    return Regression(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 3))


class Tied(nn.Module):
    """An embedding whose weight is also the last layer's, no plan."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.middle = nn.Embedding(51, 12), nn.Linear(12, 12)
        self.out = nn.Linear(12, 51, bias=False)
        self.out.weight = self.tokens.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.out(torch.tanh(self.middle(self.tokens(x)))).flatten(0, 1).float(), y.flatten())


class Encoder(nn.Module):
    """torch's own attention: its projections are read, never called."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, norm_first=False)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        x = self.encoder(x)
        x = self.out(x + self.attention(x, x, x, need_weights=False)[0])
        return x if y is None else F.mse_loss(x, y)


def sequences() -> tuple[Tensor, ...]:
    return torch.randn(8, 5, 16), torch.randn(8, 5, 8)


def evaluate(engine: Any, module: nn.Module) -> list[float]:
    """Outputs without gradients, for which torch may take its fused path."""
    torch.manual_seed(9)
    x = torch.randn(4, 5, 16)
    module.eval()
    with torch.no_grad():
        return engine(x).flatten().tolist()


LAMBDAS = [lambda step: 1.0 / (1 + step), lambda step: 0.5**step]
# Every grid in float32; in half precision three for each stage, so that each grid comes up.
MATRIX = {
    f"fp32-zero{stage}-{name}": Case(gpt, ids, grid, GPT_PLAN, stage)
    for stage in (0, 1, 2)
    for name, grid in GRIDS.items()
}
for turn, (dtype, stage) in enumerate(itertools.product(("bf16", "fp16"), (0, 1, 2))):
    of_turn = ("gx2gz2", "gy2gz2", "gz2gdata2") if turn % 2 else ("gx2gz2", "gx2gdata2", "gx2gy2")
    for name in of_turn:
        scale = 64.0 if dtype == "fp16" else 1.0
        MATRIX[f"{dtype}-zero{stage}-{name}"] = Case(gpt, ids, GRIDS[name], GPT_PLAN, stage, dtype, scale=scale)
OTHERS: dict[str, Case] = {}
for stage in (0, 1, 2):
    for where in ("gz2gdata2", "gx2gz2"):
        base = {"grid": GRIDS[where], "stage": stage, "groups": two_groups}
        OTHERS[f"client-{stage}-{where}"] = Case(mlp, rows(), optimizer="client", lambdas=LAMBDAS, **base)
    OTHERS[f"two-groups-{stage}"] = Case(mlp, rows(), GRIDS["gx2gz2"], stage=stage, groups=two_groups)
    OTHERS[f"callable-{stage}"] = Case(mlp, rows(), GRIDS["gy2gz2"], stage=stage, optimizer="callable")
    OTHERS[f"frozen-{stage}"] = Case(frozen, rows(), GRIDS["gx2gz2"], stage=stage, clip=0.1)
    OTHERS[f"frozen-client-{stage}"] = Case(frozen, rows(), GRIDS["gx2gz2"], stage=stage, optimizer="client", clip=0.1)
    if stage == 1:
        continue
    OTHERS[f"no-bias-{stage}"] = Case(lambda: mlp(bias=False), rows(), GRIDS["gx2gy2"], stage=stage)
    OTHERS[f"weight-norm-{stage}"] = Case(weight_normed, rows(), GRIDS["gx2gz2"], stage=stage)
    OTHERS[f"tied-{stage}"] = Case(Tied, ids, GRIDS["gy2gz2"], stage=stage)
    OTHERS[f"encoder-{stage}"] = Case(Encoder, sequences, GRIDS["gx2gz2"], stage=stage, after=evaluate)
    OTHERS[f"odd-gx2gy2-{stage}"] = Case(odd, rows(7, 3), GRIDS["gx2gy2"], stage=stage)
    OTHERS[f"odd-gy2gz2-{stage}"] = Case(odd, rows(7, 3), GRIDS["gy2gz2"], stage=stage)
    OTHERS[f"bf16-client-{stage}"] = Case(
        mlp, rows(), GRIDS["gx2gz2"], stage=stage, dtype="bf16", groups=two_groups, optimizer="client", lambdas=LAMBDAS
    )
SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
for stage, where in ((0, "gx2gz2"), (1, "gy2gz2"), (2, "gz2gdata2")):
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    OTHERS[f"sums in fp32-{stage}"] = Case(gpt, ids, GRIDS[where], GPT_PLAN, stage, "bf16", extra=SUMS)
    OTHERS[f"in host memory-{stage}"] = Case(gpt, ids, GRIDS[where], GPT_PLAN, extra={"zero_optimization": zero})
for where, grid in GRIDS.items():
    OTHERS[f"fp64-{where}"] = Case(gpt, ids, grid, GPT_PLAN, dtype="fp64")
OTHERS["fp64-partitioned"] = Case(Checkpointed, ids, GRIDS["gx2gy2"], GPT_PLAN, dtype="fp64")
OTHERS["fp64-contiguous"] = Case(Contiguous, ids, GRIDS["gx2gdata2"], PAIRS, dtype="fp64")
OTHERS["fp64-odd"] = Case(odd, rows(7, 3), GRIDS["gx2gy2"], dtype="fp64")
OTHERS["fp64-auto"] = Case(gpt, ids, GRIDS["gx2gy2"], "auto", dtype="fp64")
OTHERS["encoder-auto"] = Case(Encoder, sequences, GRIDS["gx2gz2"], "auto", after=evaluate)
CASES = MATRIX | OTHERS
EVERY_RUN = {
    "fp32-zero1-gx2gy2",
    "fp32-zero2-gx2gdata2",
    "bf16-zero1-gy2gz2",
    "fp16-zero2-gx2gz2",
    "two-groups-1",
    "callable-2",
    "frozen-client-1",
    "no-bias-0",
    "weight-norm-2",
    "tied-0",
    "bf16-client-0",
    "sums in fp32-0",
    "in host memory-2",
    "fp64-gz2gdata2",
    "fp64-partitioned",
    "fp64-contiguous",
    "fp64-odd",
    "fp64-auto",
    "encoder-auto",
}
"""Each grid, stage, precision, model and kind of optimizer at least once."""
assert EVERY_RUN <= CASES.keys()
_NO_STREAM = Version(deepspeed.__version__) < Version("0.19") and get_accelerator().Stream is None


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(_run, 4, chosen(request, CASES))


def _run(cases: dict[str, Case]) -> dict[str, Any]:
    found = {}
    for name, case in cases.items():
        found |= run_cases({name: case})
        checkpointing.configure(None)
    return found


@pytest.mark.parametrize("name", names(CASES, EVERY_RUN))
def test_equals_a_plain_loop(name: str, ranks: list[dict[str, Any]]) -> None:
    case = CASES[name]
    if name in ("fp64-partitioned", "fp64-contiguous") and _NO_STREAM:
        pytest.skip("before 0.19 DeepSpeed's own checkpoints take a stream of the accelerator, and a CPU has none")
    expected = serial(case)
    assert min(expected["norms"]) > case.clip, "clipping must bite"
    for found in ranks:
        got = found[name]
        assert not isinstance(got, str), got
        assert difference(got["losses"], expected["losses"]) < TOLERANCE[case.dtype]
        assert difference(got["norms"], expected["norms"]) < 4 * TOLERANCE[case.dtype]
        if case.after is not None:
            torch.testing.assert_close(torch.tensor(got["after"]), torch.tensor(expected["after"]), rtol=0, atol=5e-6)
