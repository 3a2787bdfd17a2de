"""Exports of a split model by DeepSpeed, transformers and accelerate are the serial model's, on every rank, or a refusal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate  # noqa: F401  which ranks inherit
import deepspeed
import pytest
import torch
import torch.distributed as dist

# By name and before any engine, as scripts do.
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_get_local_fp32_param,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)
from deepspeed.utils.tensor_fragment import safe_update_full_grad_vectorized
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.gpt2 import modeling_gpt2  # noqa: F401  which ranks inherit

from axonn_tp import layout_of
from axonn_tp.checkpoint import convert_checkpoint
from axonn_tp.comm import meeting
from tests import groups
from tests.axonn_tp.families import hf
from tests.deepspeed import ted_training, test_ted_checkpoint
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import Case, start
from tests.distributed import run_ranks
from tests.matrix import asked, thorough
from tests.pipeline import training as pipelines

WORDS = 51
STAGES = {0: (2, 2, 1), 2: (1, 2, 2)}
"""Of ZeRO, and the grid of each."""


class Scored(nn.Module):
    """An HF model whose forward returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.hf: Any = hf("GPT2LMHeadModel", vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=1, n_head=4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.hf(ids, labels=ids).loss


def ids() -> tuple[Tensor, ...]:
    return (torch.randint(WORDS, (4, 8)),)


def close(found: dict[str, Any], wanted: dict[str, Any], bound: float = 1e-5) -> list[str]:
    """Names of what is not the same, or not of the same shape."""
    return [
        name
        for name, value in wanted.items()
        if name not in found
        or found[name].shape != value.shape
        or (found[name].double().cpu() - value.double()).abs().max() > bound
    ]


def refusal(function: Callable[..., Any], *arguments: Any, **keywords: Any) -> str:
    try:
        function(*arguments, **keywords)
    except (ValueError, TypeError, AssertionError) as error:
        return str(error)
    return "went through"


def one_step(stage: int, folder: Path) -> dict[str, Any]:
    # A key's bias has no gradient but rounding, which Adam would blow up.
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
    optimizer = {"type": "AdamW", "params": {**options, "torch_adam": True}}
    extra = {"gradient_accumulation_steps": 1, "optimizer": optimizer}
    case = Case(Scored, ids, STAGES[stage], "auto", stage, "fp32", clip=0.0, extra=extra)
    serial, engine = case.model(), start(case)
    trained = torch.optim.AdamW(serial.parameters(), **options)
    named = dict(engine.module.named_parameters())
    (batch,) = case.batches()[0][0]
    serial(batch).backward()
    engine.backward(engine(engine.mesh.shard_batch(batch)))
    gradients = {name: p.grad.detach().clone() for name, p in serial.named_parameters() if p.grad is not None}
    found: dict[str, Any] = {
        "split": sum(tuple(p.shape) != layout_of(p).serial_shape for p in named.values()),
        "gradients": close({name: safe_get_full_grad(p) for name, p in named.items()}, gradients),
    }
    # Change them both ways, and back.
    safe_update_full_grad_vectorized(list(named.values()), lambda gradient, parameter: gradient * 2)
    doubled = {name: safe_get_full_grad(p) for name, p in named.items()}
    found["doubled"] = close(doubled, {name: 2 * value for name, value in gradients.items()})
    for name, parameter in named.items():
        safe_set_full_grad(parameter, doubled[name] / 2)
    trained.step()
    engine.step()
    weights = dict(serial.named_parameters())
    found["weights"] = close(engine.module.state_dict(), serial.state_dict())
    if stage:
        found["masters"] = close({n: safe_get_full_fp32_param(p) for n, p in named.items()}, weights)
        for key in ("exp_avg", "exp_avg_sq"):
            states = {name: trained.state[p][key] for name, p in weights.items()}
            held = {name: safe_get_full_optimizer_state(p, key) for name, p in named.items()}
            found[key] = close(held, states)
        new = {name: torch.randn(value.shape) for name, value in weights.items()}
        for name, parameter in named.items():
            safe_set_full_fp32_param(parameter, new[name])
            safe_set_full_optimizer_state(parameter, 2 * new[name], "exp_avg")
        found["set"] = close({n: safe_get_full_fp32_param(p) for n, p in named.items()}, new)
        doubled = {name: safe_get_full_optimizer_state(p, "exp_avg") for name, p in named.items()}
        found["set states"] = close(doubled, {name: 2 * value for name, value in new.items()})
        for name, parameter in named.items():
            safe_set_full_fp32_param(parameter, weights[name].detach())
    return found | exports(engine, serial, batch, folder) | refusals(engine, folder)


def exports(engine: Any, serial: Any, batch: Tensor, folder: Path) -> dict[str, Any]:
    wanted, first = serial.state_dict(), dist.get_rank() == 0
    found: dict[str, Any] = {"module_state_dict": close(engine.module_state_dict(), wanted)}
    engine.save_16bit_model(str(folder), "16bit.bin")
    found["save_16bit_model"] = close(torch.load(folder / "16bit.bin"), wanted)
    found |= with_accelerate(engine, wanted, folder)
    engine.module.hf.save_pretrained(folder / "hf", is_main_process=first)
    dist.barrier()
    logits = serial.eval().hf(batch).logits
    for place in ("hf", "accelerate"):
        again = type(serial.hf).from_pretrained(folder / place)
        found[f"logits of {place}"] = (again(batch).logits - logits).abs().max().item()
    named = dict(engine.module.named_parameters())
    with deepspeed.zero.GatheredParameters(engine.module.parameters()):
        found["gathered"] = close(named, {name: wanted[name] for name in named})
    with deepspeed.zero.GatheredParameters(list(named.values()), modifier_rank=3):
        for parameter in named.values():
            parameter.data.fill_(float(dist.get_rank()))
    found["modified"] = close(engine.module.state_dict(), {n: torch.full_like(v, 3.0) for n, v in wanted.items()})
    engine.save_checkpoint(str(folder / "saved"), "one")
    if first:
        convert_checkpoint(folder / "saved" / "one" / "axonn", folder / "converted.safetensors")
        converted = load_file(folder / "converted.safetensors")
        found["converted"] = close(converted, {name: torch.full_like(v, 3.0) for name, v in wanted.items()})
    engine.module.load_state_dict(wanted)
    found["loaded"] = close(engine.module.state_dict(), wanted)
    return found


def with_accelerate(engine: Any, wanted: dict[str, Tensor], folder: Path) -> dict[str, Any]:
    """Exports by `Accelerator.get_state_dict` under DeepSpeed, and files that it saves for HF's Trainer."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType

    class Host(Accelerator):
        distributed_type = DistributedType.DEEPSPEED
        deepspeed_config = engine.config

        def __init__(self) -> None:
            pass

        def unwrap_model(self, model: Any, *rest: Any, **keywords: Any) -> Any:
            return model.module

    state = Host().get_state_dict(engine)
    inner = {name.removeprefix("hf."): value for name, value in state.items()}
    engine.module.hf.save_pretrained(folder / "accelerate", state_dict=inner, is_main_process=dist.get_rank() == 0)
    return {"get_state_dict": close(state, wanted)}


def refusals(engine: Any, folder: Path) -> dict[str, Any]:
    name, split = next((n, p) for n, p in engine.module.named_parameters() if hasattr(p, "axonn_whole"))

    def changed() -> None:
        with deepspeed.zero.GatheredParameters([split]):
            if dist.get_rank() == 1:
                split.data.add_(1.0)

    answers = {
        "local": refusal(safe_get_local_fp32_param, split),
        "shape": refusal(safe_set_full_fp32_param, split, torch.ones(3)),
        "pickle": refusal(torch.save, {name: split}, io.BytesIO()),
        "changed": refusal(changed),
        "custom": refusal(custom, engine),
        "file": refusal(engine.save_16bit_model, str(folder / "16bit.bin")),
    }
    meeting.SECONDS = 2.0
    if dist.get_rank() == 0:
        answers["alone"] = refusal(safe_get_full_grad, split)
    dist.barrier()
    meeting.SECONDS = 30.0
    return {"refused": answers}


def custom(engine: Any) -> None:
    engine._read("anywhere", "any", custom_load_fn=lambda src, dst: None)


def experts() -> dict[str, Any]:
    engine = ted_training.start(test_ted_checkpoint.SAVED["ZeRO-0"])
    given = engine.module.parameters
    return {
        "state_dict": refusal(engine.module.state_dict),
        "load_state_dict": refusal(engine.module.load_state_dict, {}, strict=False),
        "save_16bit_model": refusal(engine.save_16bit_model, "anywhere"),
        "gathered": len({tuple(p.shape) for p in given()}),
    }


def everything(folder: str, stages: list[int]) -> dict[str, Any]:
    groups.reuse()
    pipelines.ready()
    found: dict[str, Any] = {}
    for stage in stages:
        place = Path(folder) / str(stage)
        place.mkdir(exist_ok=True)
        found[str(stage)] = one_step(stage, place)
    return found | {"experts": experts()}


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    stages = sorted(stage for (stage,) in asked(request, "stage") if stage is not None)
    return run_ranks(everything, 4, str(tmp_path_factory.mktemp("exports")), stages)


@pytest.mark.parametrize("stage", [thorough(0), 2])
def test_whole(stage: int, ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = dict(rank[str(stage)])
        assert found.pop("split") > 10
        found.pop("refused")
        for name in ("logits of hf", "logits of accelerate"):
            assert found.pop(name) < 1e-5
        assert len(found) >= 9 and all(different == [] for different in found.values()), json.dumps(found)


@pytest.mark.parametrize("stage", [thorough(0), 2])
def test_refused(stage: int, ranks: list[dict[str, Any]]) -> None:
    words = {
        "local": "ZeRO-3",
        "shape": "give it the whole",
        "pickle": "pickle",
        "changed": "modifier_rank",
        "custom": "custom_load_fn",
        "file": "16bit.bin",
    }
    for number, rank in enumerate(ranks):
        answers = rank[str(stage)]["refused"]
        for case, word in (words | ({"alone": "on every rank"} if number == 0 else {})).items():
            assert word in answers[case] and one_sentence(answers[case]), f"{case}: {answers[case]}"


def test_experts_are_refused(ranks: list[dict[str, Any]]) -> None:
    for case in ("state_dict", "load_state_dict", "save_16bit_model"):
        answers = {rank["experts"][case] for rank in ranks}
        assert len(answers) == 1
        answer = answers.pop()
        assert "experts" in answer and "save_checkpoint" in answer and one_sentence(answer), answer
