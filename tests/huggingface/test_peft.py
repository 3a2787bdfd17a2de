"""LoRA by PEFT over split layers: losses, and adapters that one process loads; quantized base layers are refused."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import axonn_plugins
from axonn_plugins.hosts.common.elementwise import check_by_parameter, looks_at_whole_matrices
from axonn_plugins.hosts.common.experts import experts_of
from axonn_tp import Grid, Mesh, auto_plan, parallelize
from axonn_tp.plan.placement import place
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks, same_on_all
from tests.matrix import thorough

axonn_plugins.activate()
peft = pytest.importorskip("peft")
from tests.axonn_tp.families import GROUPED, hf  # noqa: E402
from tests.huggingface.trainer_runs import Case, gpt2, history, llama, trainer  # noqa: E402

MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (llama, {"target_modules": "all-linear", "modules_to_save": ["lm_head"], "use_rslora": True}),
    "gpt2": (gpt2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}


def adapted(name: str) -> nn.Module:
    build, settings = MODELS[name]
    model = build()
    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=3, lora_alpha=6, init_lora_weights=False, task_type="CAUSAL_LM", **settings)
    )


def tuned(name: str, grid: dict[str, Any] | None, readers: int, stage: int) -> dict[str, Any]:
    """Train, load the adapter into a model that is whole, and go on from a checkpoint."""
    arguments = {"num_train_epochs": 1, "save_strategy": "steps", "save_steps": 1}
    config = {"zero_optimization": {"stage": stage}}
    case = Case(model=partial(adapted, name), batch=8, samples=14, arguments=arguments, config=config)
    block = None if grid is None else {"tensor_parallel": grid}
    used = trainer(case, block, readers, same_on_all(tempfile.mkdtemp()))
    used.train()
    folder = used.args.output_dir
    used.save_model(f"{folder}/saved")
    used.accelerator.wait_for_everyone()
    whole, ids = peft.PeftModel.from_pretrained(MODELS[name][0](), f"{folder}/saved"), torch.arange(12).view(2, 6)
    with torch.no_grad():
        logits, own = whole.eval()(ids).logits, used.model.eval()(ids).logits
    again = trainer(case, block, readers, same_on_all(tempfile.mkdtemp()))
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
    found = {"history": history(used), "resumed": history(again), "logits": logits.tolist(), "own": own.tolist()}
    return found | merged(used.model, ids)


def merged(model: Any, ids: Tensor) -> dict[str, Any]:
    """Logits with an adapter in the weights, out of them again, and merged for good; what an adapter that comes late is told."""
    found: dict[str, Any] = {}
    with torch.no_grad():
        model.merge_adapter()
        found["merged"] = model(ids).logits.tolist()
        model.unmerge_adapter()
        found["unmerged"] = model(ids).logits.tolist()
        try:
            model.add_adapter("late", model.peft_config["default"])
        except axonn_plugins.config.ConfigError as error:
            found["late"] = str(error)
        found["for good"] = model.merge_and_unload()(ids).logits.tolist()
    return found


def prompted(kind: Any, **settings: Any) -> nn.Module:
    torch.manual_seed(1)
    return peft.get_peft_model(llama(), kind(task_type="CAUSAL_LM", num_virtual_tokens=3, **settings))


def of_two() -> nn.Module:
    """Adapters of different layers, of which only the first is trained; with biases."""
    torch.manual_seed(1)
    first, second = (
        peft.LoraConfig(r=3, target_modules=names, lora_bias=True, init_lora_weights=False, task_type="CAUSAL_LM")
        for names in (["q_proj", "v_proj"], ["k_proj", "gate_proj"])
    )
    model = peft.get_peft_model(llama(), first)
    model.add_adapter("second", second)
    return model


def adaptive() -> nn.Module:
    """Its loss has a term that no row makes; q alone is adapted."""
    torch.manual_seed(1)
    steps = {"total_step": 8, "tinit": 1, "tfinal": 2, "deltaT": 1}
    config = peft.AdaLoraConfig(target_modules=["q_proj"], init_r=4, target_r=2, task_type="CAUSAL_LM", **steps)
    return peft.get_peft_model(llama(), config)


OTHERS: dict[str, Any] = {
    "AdaLoRA": adaptive,
    "prefix": partial(prompted, peft.PrefixTuningConfig),
    "p-tuning": partial(prompted, peft.PromptEncoderConfig, encoder_hidden_size=16),  # rank 0 alone saves what it gives
    "two": of_two,
}


def trained(name: str, grid: dict[str, Any] | None, readers: int) -> dict[str, Any]:
    """Losses, the numbers of parameters, and logits with each adapter, also as one process reads it."""
    block = None if grid is None else {"tensor_parallel": grid}
    case = Case(model=OTHERS[name], batch=8, samples=14, arguments={"num_train_epochs": 1})
    used = trainer(case, block, readers, same_on_all(tempfile.mkdtemp()))
    used.train()
    ids, logits = torch.arange(12).view(2, 6), []
    used.save_model()
    used.accelerator.wait_for_everyone()
    for adapter in used.model.peft_config:
        folder = used.args.output_dir + ("" if adapter == "default" else f"/{adapter}")
        whole = peft.PeftModel.from_pretrained(llama(), folder).eval()
        used.model.set_adapter(adapter)
        with torch.no_grad():
            logits += [whole(ids).logits.tolist(), used.model.eval()(ids).logits.tolist()]
    return {"history": history(used), "counts": used.model.get_nb_trainable_parameters(), "logits": logits}


def by_model() -> list[Any]:
    """An adapter that the model itself adds, and rank 0 alone saves, as the Trainer has it do: logits here, and as one process reads it."""
    model, ids, folder = llama(1), torch.arange(12).view(2, 6), same_on_all(tempfile.mkdtemp())
    torch.manual_seed(1)
    settings: dict[str, Any] = {"modules_to_save": ["lm_head"], "init_lora_weights": False}
    model.add_adapter(peft.LoraConfig(r=3, target_modules=["q_proj"], **settings))  # type: ignore[operator]
    parallelize(model, Mesh(Grid.for_world(dist.get_world_size(), gx=2)), "auto")
    if dist.get_world_size() > 1:
        with pytest.raises(
            axonn_plugins.config.ConfigError, match=r"resize_token_embeddings\(67\) of a model that is split"
        ):
            model.resize_token_embeddings(67)  # type: ignore[operator]
    state = model.state_dict()
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)  # type: ignore[operator]
    dist.barrier()
    whole: Any = llama(1)
    whole.load_adapter(folder)
    with torch.no_grad():
        return [each.eval()(ids).logits.tolist() for each in (model, whole)]


def swapped() -> list[Any]:
    """Logits with an adapter of smaller rank hot-swapped into a split model, and as one process reads it; what one of larger rank is told."""
    from peft.utils import hotswap

    def adapter(rank: int, seed: int) -> Any:
        torch.manual_seed(seed)
        settings: dict[str, Any] = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
        return peft.get_peft_model(
            llama(1), peft.LoraConfig(r=rank, lora_alpha=rank, task_type="CAUSAL_LM", **settings)
        )

    model, ids, folder = adapter(3, 1), torch.arange(12).view(2, 6), same_on_all(tempfile.mkdtemp())
    if dist.get_rank() == 0:
        for rank in (2, 4):
            adapter(rank, 2).save_pretrained(f"{folder}/{rank}")
    dist.barrier()
    parallelize(model, Mesh(Grid.for_world(dist.get_world_size(), gx=2)), "auto")
    told = []
    for change in (
        partial(hotswap.hotswap_adapter, model, f"{folder}/4", "default", torch_device="cpu"),
        partial(hotswap.prepare_model_for_compiled_hotswap, model, target_rank=4),
    ):
        try:
            change()
        except axonn_plugins.config.ConfigError as error:
            told.append(str(error))
    hotswap.hotswap_adapter(model, f"{folder}/2", "default", torch_device="cpu")
    whole = peft.PeftModel.from_pretrained(llama(1), f"{folder}/2")
    with torch.no_grad():
        return [told, *(each.eval()(ids).logits.tolist() for each in (model, whole))]


class Packed(nn.Linear):
    """A layer as bitsandbytes has them."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight = nn.Parameter(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x


def of_weights() -> nn.Module:
    config = peft.LoraConfig(r=3, target_modules=[], target_parameters=["down_proj.weight"])
    return peft.get_peft_model(llama(), config)


def with_magnitudes() -> nn.Module:
    return peft.get_peft_model(llama(), peft.LoraConfig(r=3, target_modules=["q_proj"], use_dora=True))


def test_adapters_of_all_experts_at_once_are_refused() -> None:
    """They ended in an error about sizes."""
    model = hf("MixtralForCausalLM", **GROUPED, num_local_experts=4)
    config = peft.LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
    )
    with pytest.raises(ValueError, match=r"adapts \w+ of all experts at once") as told:
        experts_of(peft.get_peft_model(model, config))
    assert one_sentence(str(told.value))


@pytest.mark.parametrize("plan", [{}, "auto"])
@pytest.mark.parametrize(
    ("build", "words"),
    [(of_weights, "names weight of the linear layer"), (with_magnitudes, "norms over the whole weight")],
)
def test_adapters_of_whole_weights_are_refused_without_a_host(build: Any, words: str, plan: Any) -> None:
    """By what every host asks: the plan, found or given."""
    with pytest.raises(ValueError, match=words) as told:
        auto_plan(build(), Grid(gx=2)) if plan == "auto" else place(build(), Grid(gx=2), plan)
    assert one_sentence(str(told.value))


def test_an_optimizer_of_pairs_of_matrices_is_refused() -> None:
    """It finds pairs by names in its groups, which a trial on a small tensor does not show; its first step ended in an error of shapes."""
    from peft.optimizers import create_lorafa_optimizer

    optimizer = create_lorafa_optimizer(adapted("llama"), r=3, lora_alpha=6, lr=1e-3)
    assert looks_at_whole_matrices(optimizer)
    with pytest.raises(axonn_plugins.config.ConfigError, match="steps one matrix of a pair by the other") as told:
        check_by_parameter(optimizer, pruned=False)
    assert one_sentence(str(told.value))


def refused(build: Callable[[], nn.Module], grid: dict[str, Any] | None = None) -> str:
    try:
        deepspeed.initialize(
            model=build(),
            config={"train_batch_size": 4, "axonn": {"tensor_parallel": grid or {"gx": 2}}},
        )
    except axonn_plugins.config.ConfigError as error:
        return str(error)
    return "no error"


BOTH = {"gx": 2, "gz": 2, "plan": "auto"}
IN_X, IN_Z = ("llama", "p-tuning", "two"), ("gpt2", "AdaLoRA", "prefix")


def grid_of(name: str, ranks: int) -> tuple[dict[str, Any] | None, int]:
    """Of four ranks all, of two the one or the other axis; and how many read different data."""
    if ranks == 1:
        return None, 1
    alone = ({"gx": 2, "plan": "auto"}, 1) if name in IN_X else ({"gz": 2, "plan": "auto"}, 2)
    return alone if ranks == 2 else (BOTH, 2)


def every(ranks: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        name: attempt(partial(tuned, name, *grid_of(name, ranks), int(name == "llama"))) for name in MODELS
    }
    found |= {name: attempt(partial(trained, name, *grid_of(name, ranks))) for name in OTHERS}
    told = {"refused": lambda: nn.Sequential(nn.Linear(8, 8), Packed()), "weights": of_weights}
    if ranks == 1:
        return found
    found |= {name: refused(build) for name, build in told.items()}
    found["prompts"] = refused(OTHERS["prefix"], {"gz": {"sequence": ranks}, "plan": "auto"})
    return found | {"by model": attempt(by_model), "swapped": attempt(swapped)}


@pytest.mark.parametrize("ranks", [2, thorough(4)])
def test_adapters_are_those_of_one_process(ranks: int) -> None:
    assert {*IN_X, *IN_Z} == {*MODELS, *OTHERS}
    wanted = run_ranks(every, 1, 1)[0]
    for found in run_ranks(every, ranks, ranks):
        assert "keeps its weight quantized" in found["refused"] and one_sentence(found["refused"])
        assert "names weight of the linear layer" in found["weights"] and one_sentence(found["weights"])
        assert "PrefixTuningConfig (adapter 'default') puts a prompt of its own" in found["prompts"]
        assert one_sentence(found["prompts"])
        torch.testing.assert_close(*map(torch.tensor, found["by model"]), rtol=0, atol=1e-5)
        (larger, padded), *logits = found["swapped"]
        assert "swap in an adapter of no larger rank" in larger and one_sentence(larger)
        assert "whose shards it would pad" in padded and one_sentence(padded)
        torch.testing.assert_close(*map(torch.tensor, logits), rtol=0, atol=1e-5)
        for name in OTHERS:
            tried, expected = found[name], wanted[name]
            assert not isinstance(tried, str) and not isinstance(expected, str), (tried, expected)
            assert tried["counts"] == expected["counts"] and len(tried["history"]) == len(expected["history"])
            for entry, other in zip(tried["history"], expected["history"], strict=True):
                assert entry == pytest.approx(other, rel=1e-5), name
            torch.testing.assert_close(
                torch.tensor(tried["logits"]), torch.tensor(expected["logits"]), rtol=0, atol=1e-5
            )
        for name in MODELS:
            tried, expected = found[name], wanted[name]
            assert not isinstance(tried, str) and not isinstance(expected, str), (tried, expected)
            for key in ("history", "resumed"):
                assert len(tried[key]) == len(expected[key])
                for entry, other in zip(tried[key], expected[key], strict=True):
                    assert entry == pytest.approx(other, rel=1e-5), (name, key)
            logits = torch.tensor(tried["logits"])
            for key in ("own", "merged", "unmerged", "for good"):
                torch.testing.assert_close(logits, torch.tensor(tried[key]), rtol=0, atol=1e-5)
            assert "'late' is added to a model that is split" in tried["late"] and one_sentence(tried["late"])
            # Adam's first steps make of a gradient's rounding a tenth of a step where it is near zero.
            torch.testing.assert_close(logits, torch.tensor(expected["logits"]), rtol=0, atol=2e-5)
