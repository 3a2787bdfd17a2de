"""HF models drawn at random, dense and with experts, by AdamW or Muon, under DeepSpeed or `compose`: what one process trains, in float64."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import torch._dynamo  # noqa: E402
import torch.distributed as dist  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from torch import Tensor, nn  # noqa: E402

pytest.importorskip("transformers")

from axonn_plugins.autoload import activate  # noqa: E402
from axonn_plugins.hosts.plain import compose  # noqa: E402
from axonn_tp import factorisations, layout_of  # noqa: E402
from axonn_tp.checkpoint.dealt import DealtNames  # noqa: E402
from tests import groups  # noqa: E402
from tests.axonn_tp.families import GROUPED, VOCABULARY, hf  # noqa: E402
from tests.deepspeed.test_whole_matrices import MUON, by_torch, muon_by_hand  # noqa: E402
from tests.distributed import run_ranks  # noqa: E402
from tests.ted_moe.mixtures import MIXTURES, exactly  # noqa: E402

activate()
SEEDS, STEPS, CLIP = range(12), 3, 0.5
HEADS = [(6, 3), (9, 3), (5, 5), (6, 2), (4, 4), (3, 1)]
"""Of queries, and of keys and values."""
DENSE = ("Llama", "Qwen3", "Gemma2", "Mistral")
MIXED = ("Mixtral", "Qwen3Moe", "Olmoe", "GraniteMoe", "FlexOlmo", "Qwen2Moe")


@dataclass
class Drawn:
    """A run.

    Attributes:
        family: of HF.
        sizes: of its configuration.
        block: under DeepSpeed or `compose`.
        ranks: that it takes.
        stage: of ZeRO.
        muon: it trains by DeepSpeed's Muon, else by AdamW.
        engine: under DeepSpeed.
        packed: rows hold several sequences, told by positions.
    """

    family: str
    ranks: int
    sizes: dict[str, Any] = field(default_factory=dict)
    block: dict[str, Any] = field(default_factory=dict)
    stage: int = 0
    muon: bool = False
    engine: bool = True
    packed: bool = False

    def model(self) -> nn.Module:
        """The serial model."""
        torch.manual_seed(1)
        model = hf(f"{self.family}ForCausalLM", **self.sizes).double()
        # With a cache HF's models do not see where packed sequences begin.
        model.config.use_cache = not self.packed
        for parameter in model.parameters():
            parameter.data = 0.2 * torch.randn(parameter.shape, dtype=torch.float64) + (parameter.dim() == 1)
        return model

    def inputs(self, step: int, reader: int) -> dict[str, Tensor]:
        """What a reader gives the model: odd numbers of tokens, others in each step."""
        generator = torch.Generator().manual_seed(100 * step + reader)
        length = 11 + step
        ids = torch.randint(VOCABULARY, (1 if self.packed else 2, length), generator=generator)
        found = {"input_ids": ids, "labels": ids}
        if self.packed:
            first = 3 + (step + reader) % 4
            found["position_ids"] = torch.cat([torch.arange(first), torch.arange(length - first)])[None]
        return found


def draw(seed: int) -> Drawn:
    """The run of a seed."""
    dice = random.Random(1000 + seed)
    mixed = dice.random() < 0.6
    case = Drawn(dice.choice(MIXED if mixed else DENSE), dice.choice((4, 8)))
    heads, groups_of = dice.choice(HEADS)
    case.sizes = {**GROUPED, **(MIXTURES[case.family] if mixed else {}), "head_dim": 8, "hidden_size": 8 * heads}
    case.sizes |= {"num_attention_heads": heads, "num_key_value_heads": groups_of}
    case.sizes |= {"tie_word_embeddings": dice.random() < 0.5}
    grid = dice.choice(list(factorisations(case.ranks)))
    shared = dice.choice([n for n in (1, 2, 4, 8) if grid.gz % n == 0])
    gz: Any = grid.gz if shared == 1 else {"batch": grid.gz // shared, "sequence": shared}
    if grid.gx * grid.gy * grid.gz > 1:
        case.block["tensor_parallel"] = {"gx": grid.gx, "gy": grid.gy, "gz": gz, "plan": "auto"}
    case.packed, case.engine = dice.random() < 0.4, dice.random() < 0.75
    case.muon = case.engine and dice.random() < 0.6
    if mixed or not case.block:
        case.block["ted"] = {} if mixed else {"communication_aware_checkpointing": False}
    case.stage = dice.choice((0, 1, 2))
    return case


def by_hand(case: Drawn, model: nn.Module) -> Callable[[], None]:
    if case.muon:
        return muon_by_hand(model, CLIP)
    return by_torch(model, lambda given: torch.optim.AdamW(given, lr=1e-2, weight_decay=0.1), CLIP)


def serial(case: Drawn, readers: int) -> tuple[list[float], nn.Module]:
    model = case.model()
    step, losses = by_hand(case, model), []
    for number in range(STEPS):
        model.zero_grad()
        total = 0.0
        for reader in range(readers):
            loss = model(**case.inputs(number, reader)).loss / readers
            loss.backward()
            total += loss.item()
        losses.append(total)
        step()
    return losses, model


def begun(case: Drawn) -> tuple[Any, Callable[[Tensor], None]]:
    """What has a mesh and a model, and what a step does with a loss."""
    model = case.model()
    if not case.engine:
        make = lambda given: torch.optim.AdamW(given, lr=1e-2, weight_decay=0.1)  # noqa: E731
        run = compose(model, make, case.block, stage=case.stage, max_norm=CLIP)

        def step(loss: Tensor) -> None:
            run.backward(loss)
            run.step()

        return run, step
    adam = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1, "torch_adam": True}}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": CLIP,
        "optimizer": MUON if case.muon else adam,
        "zero_optimization": {"stage": case.stage},
        "axonn": case.block,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

    def stepped(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    return engine, stepped


def compared(case: Drawn) -> float | str:
    """The largest difference of losses and of this rank's weights from one process's, or why it is refused."""
    with exactly():
        try:
            run, step = begun(case)
        except ValueError as error:
            return str(error)
        mesh, model = run.mesh, run.module if case.engine else run.model
        reader, readers = mesh.rank("readers"), mesh.size("readers")
        wanted, whole = serial(case, readers)
        far = 0.0
        for number in range(STEPS):
            try:
                loss = (run if case.engine else model)(**case.inputs(number, reader)).loss
            except ValueError as error:
                return str(error)
            step(loss)
            total = loss.detach().clone() / mesh.size("grid")
            dist.all_reduce(total, group=mesh.group("grid"))
            far = max(far, abs(total.item() - wanted[number]) / wanted[number])
        names, expected = DealtNames(model), dict(whole.named_parameters(remove_duplicate=False))
        for name, parameter in model.named_parameters():
            layout, on = layout_of(parameter), mesh.over(layout_of(parameter).grid)
            share = layout.shard(expected[names.outward(name)].detach(), on.grid, on.coordinates)
            far = max(far, (parameter.detach() - share).abs().max().item())
        if case.engine:
            run.destroy()
    return far


def all_of(seeds: list[int]) -> dict[int, float | str]:
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch._dynamo.config.disable = True  # what compiles rounds otherwise, in serial as on the grid
    type(get_accelerator()).is_fp16_supported = lambda self: True
    groups.reuse()
    return {seed: compared(draw(seed)) for seed in seeds}


@pytest.mark.thorough
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", [4, 8])
def test_losses_and_weights_are_one_process_s(ranks: int) -> None:
    seeds = [seed for seed in SEEDS if draw(seed).ranks == ranks]
    assert seeds
    for found in run_ranks(all_of, ranks, seeds):
        wrong = {seed: far for seed, far in found.items() if not (isinstance(far, float) and far < 1e-10)}
        assert wrong == {}
