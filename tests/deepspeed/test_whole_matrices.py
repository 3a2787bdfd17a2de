"""Optimizers that look at whole matrices, by DeepSpeed's own keys: the weights are those of the serial optimizer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from axonn_plugins.autoload import activate  # noqa: E402
from axonn_plugins.hosts.deepspeed.optim.lamb import Lamb  # noqa: E402
from axonn_recipes.models.gpt import GPT, GPTConfig  # noqa: E402
from axonn_tp import layout_of  # noqa: E402
from axonn_tp.checkpoint.dealt import DealtNames  # noqa: E402
from tests import groups  # noqa: E402
from tests.axonn_tp.families import in_float64  # noqa: E402
from tests.compose import training  # noqa: E402
from tests.distributed import run_ranks  # noqa: E402
from tests.matrix import thorough  # noqa: E402
from tests.ted_moe.mixtures import mixture, tokens  # noqa: E402

activate()
STEPS, MIDDLE = 5, 2
"""Of a run, and those before its checkpoint."""
PLAN = {"up": "normal", "down": "transposed"}
MUON = {"type": "Muon", "params": {"lr": 0.02, "adam_lr": 0.01, "weight_decay": 0.1}}


class Net(nn.Module):
    """An embedding, a wide and a tall matrix, and one that is split nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(11, 12), nn.Linear(12, 20), nn.Linear(20, 12, bias=False)
        self.head = nn.Linear(12, 7)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(torch.tanh(self.up(x)))).square().mean()


class Bounded(torch.optim.Optimizer):
    """A script's own, whose name says nothing: each step is as large as a tensor's gradients are together."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad / p.grad.square().mean().sqrt(), alpha=-group["lr"])


def serial_model(dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(3)
    return Net().to(dtype)


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield torch.randint(11, (8, 3), generator=generator)


def muon_by_hand(model: nn.Module, clip: float) -> Callable[[], None]:
    """DeepSpeed's own functions on whole tensors, and torch's AdamW."""
    from deepspeed.runtime.zero.muon.original_muon import muon_update

    whole = {
        name: p for name, p in model.named_parameters() if p.dim() > 1 and "embed" not in name and "lm_head" not in name
    }
    rest = [p for name, p in model.named_parameters() if name not in whole]
    adam = torch.optim.AdamW(rest, lr=0.01, betas=(0.9, 0.95), eps=1e-10, weight_decay=0.1)
    buffers = {name: torch.zeros_like(p) for name, p in whole.items()}

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        adam.step()
        with torch.no_grad():
            for name, p in whole.items():
                if p.grad is None:  # an expert without tokens
                    continue
                update = muon_update(p.grad, buffers[name], beta=0.95)
                p.mul_(1 - 0.02 * 0.1).add_(update, alpha=-0.02)

    return step


def by_torch(model: nn.Module, make: Callable[[Any], torch.optim.Optimizer], clip: float) -> Callable[[], None]:
    optimizer = make([p for p in model.parameters() if p.requires_grad])

    def step() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()

    return step


def serial(model: nn.Module, step: Callable[[], None]) -> dict[str, Tensor]:
    for ids in batches():
        model(ids).backward()
        step()
        model.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def matrices_alone(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(parameter.dim() == 2 and "embed" not in name)


def engine_of(block: dict[str, Any], stage: int, clip: float, optimizer: Any, model: nn.Module, **extra: Any) -> Any:
    config = {
        "train_batch_size": 8,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 300, "allgather_bucket_size": 300},
        "axonn": block,
        **({"optimizer": optimizer} if isinstance(optimizer, dict) else {}),
        **extra,
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    client = None if isinstance(optimizer, dict) else optimizer(trained)
    return deepspeed.initialize(model=model, optimizer=client, model_parameters=trained, config=config)[0]


def train(engine: Any, which: slice = slice(None)) -> None:
    for ids in list(batches())[which]:
        engine.backward(engine(engine.mesh.shard_batch(ids)))
        engine.step()


def apart(engine: Any, wanted: dict[str, Tensor]) -> float:
    """The largest difference of this rank's weights from the serial ones."""
    mesh = engine.mesh
    return max(
        (parameter.detach() - layout_of(parameter).shard(wanted[name], mesh.grid, mesh.coordinates)).abs().max().item()
        for name, parameter in engine.module.named_parameters()
    )


GRIDS = [{"gx": 2, "gy": 2, "gz": 1}, {"gx": 1, "gy": 1, "gz": 2}, {"gx": 2, "gy": 1, "gz": 2}]
"""On four ranks: x and y; z and data; x and z."""


def block_of(sizes: dict[str, int]) -> dict[str, Any]:
    return {"tensor_parallel": {**sizes, "plan": PLAN}}


def others(folder: str, every: bool) -> Iterator[tuple[str, float]]:
    """Other optimizers, each from its middle on at another stage and on another grid."""
    lamb: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
    makers: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
        "Lamb": ({"type": "Lamb", "params": lamb}, lambda given: Lamb(given, **lamb)),
        "Adafactor": (
            {"type": "Adafactor", "params": {"lr": 0.02}},
            lambda given: torch.optim.Adafactor(given, lr=0.02),
        ),
        "a client's Adafactor": ((client := lambda given: torch.optim.Adafactor(given, lr=0.02)), client),
    }
    for number, (name, (optimizer, make)) in enumerate(makers.items()):
        if name == "a client's Adafactor" and not every:
            continue
        wanted = serial(model := serial_model(), by_torch(model, make, 0.5))
        engine = engine_of(block_of(GRIDS[number]), number, 0.5, optimizer, serial_model())
        train(engine, slice(MIDDLE))
        engine.save_checkpoint(folder, name)
        engine.destroy()
        engine = engine_of(block_of(GRIDS[number - 1]), 2 - number, 0.5, optimizer, serial_model())
        engine.load_checkpoint(folder, name)
        train(engine, slice(MIDDLE, None))
        yield name, apart(engine, wanted)
        engine.destroy()
    wanted = serial(model := serial_model(), by_torch(model, Bounded, 0.5))
    engine = engine_of(block_of(GRIDS[2]), 0, 0.5, Bounded, serial_model())
    train(engine)
    yield "a client's whose name says nothing", apart(engine, wanted)
    engine.destroy()
    matrices_alone(model := serial_model())
    make = lambda given: torch.optim.Muon(given, lr=0.02, adjust_lr_fn="match_rms_adamw")  # noqa: E731
    wanted = serial(model, by_torch(model, make, 0.5))
    for sizes in GRIDS[0 if every else 2 :]:
        matrices_alone(model := serial_model())
        engine = engine_of(block_of(sizes), 0, 0.5, make, model)
        train(engine)
        yield f"a client's Muon {sizes}", apart(engine, wanted)
        engine.destroy()


def resumed(folder: str, wanted: dict[str, Tensor], every: bool) -> Iterator[tuple[str, float]]:
    """Begun on one grid and stage, ended on another; a bf16 run, and one from host memory."""
    engine = engine_of(block_of(GRIDS[0]), 1, 0.5, MUON, serial_model())
    train(engine, slice(MIDDLE))
    engine.save_checkpoint(folder, "half")
    engine.destroy()
    for stage in (0, 2) if every else (0,):
        engine = engine_of(block_of(GRIDS[2 - stage]), stage, 0.5, MUON, serial_model())
        engine.load_checkpoint(folder, "half")
        train(engine, slice(MIDDLE, None))
        yield f"resumed at stage {stage}", apart(engine, wanted)
        engine.destroy()
    block = block_of(GRIDS[1]) | {"offload_optimizer": {}}
    engine = engine_of(block, 1, 0.5, MUON, serial_model())
    train(engine)
    yield "offloaded", apart(engine, wanted)
    engine.destroy()
    engine = engine_of(block_of(GRIDS[2]), 1, 0.5, MUON, serial_model(torch.bfloat16), bf16={"enabled": True})
    train(engine)
    # Half the digits: no training is 0.1 away.
    yield "bf16", apart(engine, wanted) / 1e7
    engine.destroy()


def everything(folder: str, every: bool) -> dict[str, float]:
    """Without `every` each optimizer, each grid, each stage and each place of its states at least once."""
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch._dynamo.config.disable = True  # what compiles rounds otherwise, in serial as on the grid
    groups.reuse()
    found = {}
    wanted = serial(model := serial_model(), muon_by_hand(model, 0.5))
    for stage, sizes in list(enumerate(GRIDS))[0 if every else 2 :]:
        engine = engine_of(block_of(sizes), stage, 0.5, MUON, serial_model())
        train(engine)
        found[f"Muon {sizes} stage {stage}"] = apart(engine, wanted)
        engine.destroy()
    found["experts in a list"] = listed()
    return found | dict(others(folder, every)) | dict(resumed(folder, wanted, every))


def listed() -> float:
    """Experts in a list, of which not all get tokens in each step, beside one process."""
    wanted, model = mixture("a list"), mixture("a list")
    step = muon_by_hand(wanted, 0.5)
    engine = engine_of({"ted": {"expert": 2}}, 1, 0.5, MUON, model, train_batch_size=4)
    group = engine.data_parallel_group
    reader, readers = dist.get_rank(group), dist.get_world_size(group)
    lacking = 0
    with in_float64():
        for number in range(4):
            some = [tokens((each + number) % 2)[:, :3] for each in range(readers)]
            engine.backward(engine(input_ids=some[reader], labels=some[reader]).loss)
            engine.step()
            wanted.zero_grad()
            for ids in some:
                (wanted(input_ids=ids, labels=ids).loss / readers).backward()
            lacking += sum(p.grad is None for p in wanted.parameters())
            step()
    assert lacking
    names, far = DealtNames(engine.module), 0.0
    for name, parameter in engine.module.named_parameters():
        layout, on = layout_of(parameter), engine.mesh.over(layout_of(parameter).grid)
        whole = wanted.get_parameter(names.outward(name)).detach()
        far = max(far, (parameter.detach() - layout.shard(whole, on.grid, on.coordinates)).abs().max().item())
    engine.destroy()
    return far


@pytest.mark.parametrize("every", [False, thorough(True)])
def test_weights_are_the_serial_optimizers(every: bool, tmp_path: Path) -> None:
    for rank in run_ranks(everything, 4, str(tmp_path), every):
        assert {name: apart for name, apart in rank.items() if not apart <= 1e-9} == {}


@torch._dynamo.config.patch(disable=True)
def test_biases_of_keys_differ_from_themselves_by_as_much_as_from_a_grids() -> None:
    """A softmax does not see what is added to all its arguments, so the keys' part of a fused qkv bias has the gradient that rounding leaves. Adam
    divides it by Muon's eps of 1e-10: one process differs from itself there by 1e-9 where the samples of a batch change places, as grids do.
    """
    found = []
    for flipped in (False, True):
        torch.manual_seed(3)
        model = GPT(GPTConfig(51, 16, 2, 8, 24)).double()
        for p in model.parameters():
            p.data = 0.2 * torch.randn(p.shape, dtype=torch.float64) + (p.dim() == 1)
        step = muon_by_hand(model, 0.5)
        for number in range(10):
            ids = torch.randint(50, (4, 7), generator=torch.Generator().manual_seed(number))
            ids = ids.flip(0) if flipped else ids
            model(ids[:, :-1], ids[:, 1:]).backward()
            step()
            model.zero_grad()
        found.append({name: parameter.detach() for name, parameter in model.named_parameters()})
    apart = {name: (one - found[1][name]).abs() for name, one in found[0].items()}
    keys = [apart[name].chunk(3)[1].max() for name in apart if name.endswith("qkv.bias")]
    assert 1e-10 < max(keys) < 1e-8
    for name, far in apart.items():
        rest = torch.cat([far.chunk(3)[0], far.chunk(3)[2]]) if name.endswith("qkv.bias") else far
        assert rest.max() < 1e-12, name


def composed(cases: dict[str, training.Case]) -> dict[str, float]:
    """Losses of a pipeline, or of experts, on a grid beside those of one process, by Muon."""
    training.ready(all(case.stages for case in cases.values()))
    torch._dynamo.config.disable = True
    found = {}
    for name, case in cases.items():
        engine = training.start(case)
        losses, _ = training.train(engine, case)
        readers = training.readers_of(case, engine)
        engine.destroy()
        model = case.serial()
        step, wanted = muon_by_hand(model, case.clip), []
        for micros in case.batches(readers):
            model.zero_grad()
            parts = [model(ids[:, :-1], ids[:, 1:]) / (len(micros) * readers) for micro in micros for ids in micro]
            sum(parts[1:], parts[0]).backward()
            wanted.append(sum(part.item() for part in parts))
            step()
        found[name] = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    return found


GRID = {"tensor_parallel": {"gx": 2, "plan": "auto"}}
STAGED = {"pipeline": training.Case(GRID, stage=1, stages=2, extra={"optimizer": MUON})}
ALONE = {"experts": training.Case({"ted": {"tensor": 2}}, stage=1, experts=2, extra={"optimizer": MUON})}
MIXED = {"experts on the mesh": training.Case({"ted": {}, **GRID}, stage=0, experts=2, extra={"optimizer": MUON})}


@pytest.mark.parametrize("cases", [thorough(STAGED), thorough(ALONE), MIXED], ids=["staged", "experts", "mixed"])
def test_beside_stages_and_experts(cases: dict[str, training.Case]) -> None:
    for rank in run_ranks(composed, 4, cases):
        assert {name: apart for name, apart in rank.items() if not apart <= 1e-9} == {}
