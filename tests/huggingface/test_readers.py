"""HF Trainer and Accelerate under the block: every sample is read once by one reader, and all losses are one process's."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import axonn_plugins
from tests.deepspeed.scripts import one_sentence
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks
from tests.matrix import asked
from tests.matrix import names as marked

axonn_plugins.activate()
accelerate = pytest.importorskip("accelerate")
from accelerate import utils  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

GRIDS = {"gx": {"gx": 2, "plan": "auto"}, "gy": {"gy": 2}, "gz": {"gz": 2, "plan": "auto"}, "ted": None}
SAMPLES = 12
HALF = SAMPLES // 2
AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


class Sentences(Dataset):
    """Remembers which were read."""

    def __init__(self, number: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(50, (number, 6), generator=generator)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        self.read.append(int(at))
        # Lengths differ, so that an average over samples is not one over tokens.
        labels = torch.where(torch.arange(6) < 2 + at % 5, self.ids[at], -100)
        return {"input_ids": self.ids[at], "labels": labels}


class Stream(IterableDataset):
    def __init__(self, number: int) -> None:
        self.data = Sentences(number)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.data[at] for at in range(len(self.data)))


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 50, "n_positions": 8, "n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": None}
    config = transformers.GPT2Config(**sizes, eos_token_id=None, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return transformers.GPT2LMHeadModel(config)


def settings(grid: dict[str, Any] | None, stage: int = 0, **changes: Any) -> dict[str, Any]:
    block = {"ted": {"tensor": 2}} if grid is None else {"tensor_parallel": grid}
    zero = {"stage": stage, "reduce_bucket_size": 10**5, "allgather_bucket_size": 10**5}
    return dict.fromkeys(AUTO, "auto") | {"zero_optimization": zero, "axonn": block} | changes


def forget() -> None:
    """Reset what Accelerate keeps from one run to the next."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def trained(config: dict[str, Any] | None, readers: int, streamed: bool = False, **more: Any) -> dict[str, Any]:
    """By the Trainer: samples twice, 4 a step, 6 to evaluate."""
    forget()
    train, evaluated = (Stream if streamed else Sentences)(SAMPLES), Sentences(6)
    arguments = transformers.TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=4 // more.get("gradient_accumulation_steps", 1) // readers,
        per_device_eval_batch_size=2 // readers,
        **{"num_train_epochs": 2, "learning_rate": 1e-2, "max_grad_norm": 0.5, "seed": 5} | more,
        **({"max_steps": 3} if streamed else {}),
        report_to=[],
        save_strategy="no",
        eval_strategy="epoch",
        logging_steps=1,
        disable_tqdm=True,
        include_num_input_tokens_seen="all",
        use_cpu=config is None,
        deepspeed=config,
    )
    trainer = transformers.Trainer(gpt2(), arguments, train_dataset=train, eval_dataset=evaluated)
    trainer.train()
    read, history = (train.data if isinstance(train, Stream) else train).read, trainer.state.log_history
    predicted = trainer.predict(evaluated)
    return {
        "read": read,
        "losses": [entry["loss"] for entry in history if "loss" in entry],
        "norms": [float(entry["grad_norm"]) for entry in history if "loss" in entry],
        "evaluated": [entry["eval_loss"] for entry in history if "eval_loss" in entry],
        "tokens": trainer.state.num_input_tokens_seen,
        "batch": trainer.get_total_train_batch_size(arguments),
        "predicted": predicted.predictions.tolist(),
        "labels": predicted.label_ids.tolist(),
        "first": trainer.is_world_process_zero(),
    }


def looped(
    config: dict[str, Any] | None, readers: int, dispatch: bool = False, split: bool = False, steps: int = 1
) -> dict[str, Any]:
    """By a loop of a script's own on Accelerate, with two groups and a scheduler that Accelerate steps once for each reader."""
    options = accelerate.DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=split)
    plugin = None if config is None else accelerate.DeepSpeedPlugin(hf_ds_config=config, gradient_clipping=0.5)
    accelerator = accelerate.Accelerator(cpu=config is None, deepspeed_plugin=plugin, dataloader_config=options)
    model, data = gpt2(), Sentences(SAMPLES)
    vectors = [p for p in model.parameters() if p.dim() < 2]
    matrices = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 1e-3}]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.9**n, lambda n: 0.8**n])
    size = 4 if split else 4 // readers
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, DataLoader(data, size), schedule)
    found: dict[str, Any] = {"losses": [], "rates": [], "seen": []}
    for batch in loader:
        loss = model(batch["input_ids"], labels=batch["input_ids"]).loss
        accelerator.backward(loss)
        if config is None:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        for _ in range(steps):
            schedule.step()
        optimizer.zero_grad()
        found["losses"].append(accelerator.gather(loss.detach()).mean().item())
        found["rates"].append(sorted(set(schedule.get_last_lr())))
        found["seen"] += accelerator.gather_for_metrics(batch["input_ids"]).tolist()
    found["objects"] = accelerator.gather_for_metrics([accelerator.process_index], use_gather_object=True)
    found["sum"] = accelerator.reduce(torch.tensor([1.0]), "sum").item()
    # By name, as TRL has them.
    found["by name"] = [utils.gather(torch.tensor([float(accelerator.process_index)])).tolist()]
    found["by name"] += [utils.gather_object([accelerator.process_index]), utils.reduce(torch.ones(1), "sum").item()]
    if accelerator.state.process_index == accelerator.state.num_processes - 1:
        accelerator.set_trigger()
    found["triggered"] = accelerator.check_trigger(), accelerator.check_trigger()
    found["counted"] = (accelerator.num_processes, accelerator.is_main_process, accelerator.is_last_process)
    with accelerator.split_between_processes(list(range(6))) as part:
        found["part"] = part
    found["read"] = data.read
    return found


def generated(grid: dict[str, Any] | None, differ: bool) -> Any:
    """Sampled by the inner module, after one rank drew a number of its own; or what it says where the prompts differ."""
    model, rank = gpt2(), dist.get_rank()
    if grid is not None:
        raw = {"train_batch_size": 2, "axonn": {"tensor_parallel": grid}}
        model = deepspeed.initialize(model=model, config=raw)[0].module
    prompt = torch.tensor([[1, 2, 3], [4, 5, 6 + differ * rank]])
    torch.manual_seed(3)
    torch.rand(rank)
    try:
        return model.eval().generate(prompt, do_sample=True, max_new_tokens=4, pad_token_id=0).tolist()
    except axonn_plugins.config.ConfigError as error:
        return {"said": str(error)}


def assisted(grid: dict[str, Any] | None) -> Any:
    """What a reader writes on a prompt by looking words up in it; the second goes on when the first has come to its end."""
    model, prompts = gpt2(), torch.tensor([[3, 7, 3], [5, 9, 5]])
    if grid is not None:
        raw = {"train_batch_size": 2, "axonn": {"tensor_parallel": grid}}
        model = deepspeed.initialize(model=model, config=raw)[0].module
    write = partial(model.eval().generate, do_sample=False, pad_token_id=0)
    end = int(write(prompts[:1], max_new_tokens=2)[0, -1])
    own = prompts if grid is None else prompts[dist.get_rank() :][:1]
    more = {"max_new_tokens": 4, "prompt_lookup_num_tokens": 2, "eos_token_id": end}
    return [write(prompt[None], **more)[0].tolist() for prompt in own]


def refused(function: Any, config: dict[str, Any]) -> str:
    try:
        function(config, 1)
    except axonn_plugins.config.ConfigError as error:
        return str(error)
    return "no error"


def second(config: dict[str, Any], readers: int) -> None:
    """Two models of one Accelerator: the first again, then another that is not trained, then one that is."""
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.5, "gradient_accumulation_steps": 1}
    accelerator = accelerate.Accelerator(deepspeed_plugin=accelerate.DeepSpeedPlugin(hf_ds_config=config))
    models = gpt2(), gpt2(), nn.Linear(4, 4)
    for model in (models[0], models[0], *models):
        accelerator.prepare(model, *([] if model is models[1] else [torch.optim.SGD(model.parameters())]))


def meshed(config: dict[str, Any], readers: int) -> None:
    """Two readers, of which Accelerate is told that they read the same."""
    plugin, same = accelerate.DeepSpeedPlugin(hf_ds_config=config), accelerate.ParallelismConfig(tp_size=2)
    accelerate.Accelerator(deepspeed_plugin=plugin, parallelism_config=same).prepare(nn.Linear(4, 4))


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "optimizer": ("plain", {}),
    "zero 2": ("plain", {}),
    "accumulated": ("accumulated", {"gradient_accumulation_steps": 2}),
    "by length": ("by length", {"train_sampling_strategy": "group_by_length"}),
}
WAYS: tuple[dict[str, Any], ...] = ({}, {"dispatch": True}, {"split": True})
OPTIMIZER = {
    "type": "AdamW",
    "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto") | {"torch_adam": True},
}


def every_trainer(config: bool, wanted: set[str], streamed: set[str] | None = None) -> dict[str, Any]:
    """By name, what one process gives, or of what is wanted of the grids."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    found = {}
    grids = GRIDS if config else {"one": {}}
    for (name, grid), (case, (_, more)) in itertools.product(grids.items(), CASES.items()):
        if config and f"{name}: {case}" not in wanted:
            continue
        readers = 2 if name == "gz" else 1
        changes = {"optimizer": OPTIMIZER} if case == "optimizer" else {}
        raw = settings(grid, 2 if case == "zero 2" else 0, **changes) if config else None
        found[f"{name}: {case}"] = attempt(partial(trained, raw, readers, **more))
    for name, grid in grids.items():
        readers = 2 if name == "gz" else 1
        if streamed is None or name in streamed:
            raw = settings(grid) if config else None
            found[f"{name}: streamed"] = attempt(partial(trained, raw, readers, streamed=True))
        for way in WAYS if config else ({}, {"steps": 2}):
            if config and f"{name}: loop {' '.join(way)}" not in wanted:
                continue
            forget()
            raw = settings(grid) if config else None
            found[f"{name}: loop {' '.join(way)}"] = attempt(partial(looped, raw, readers, **way))
    found["generated"] = [
        attempt(generated, grid, False) for grid in ((GRIDS["gx"], GRIDS["gy"]) if config else (None,))
    ]
    found["assisted"] = attempt(assisted, GRIDS["gz"] if config else None)
    if config:
        found["prompts differ"] = attempt(generated, GRIDS["gx"], True)
        forget()
        found["second"] = refused(second, settings({"gx": 2}))
        forget()
        found["meshed"] = refused(meshed, settings({"gz": 2}))
        forget()
        found["world"] = refused(trained, settings({"gx": 3}))
        forget()
        PartialState()  # before it is known that DeepSpeed will be used
        found["late"] = refused(looped, settings({"gx": 2}))
    return found


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return run_ranks(every_trainer, 1, False, set())[0]


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    names_asked, grids = ({each for (each,) in asked(request, what)} for what in ("name", "grid"))
    return run_ranks(every_trainer, 2, True, names_asked, grids)


def of(found: dict[str, Any], name: str) -> Any:
    assert not isinstance(found[name], str), found[name]
    return found[name]


def names(kind: str) -> list[str]:
    few = ("plain", "optimizer")
    cases = [f"{grid}: {case}" for grid in GRIDS for case in CASES if grid in ("gx", "gz") or case in few]
    return {"trainer": cases, "loop": [f"{grid}: loop {' '.join(way)}" for grid in GRIDS for way in WAYS]}[kind]


# In every run each case, each way and each grid.
SOME = {"trainer": {f"{grid}: plain" for grid in GRIDS}, "loop": {f"{grid}: loop " for grid in GRIDS}}
SOME["trainer"] |= {"ted: optimizer", "gz: zero 2", "gz: accumulated", "gz: by length"}
SOME["loop"] |= {"gz: loop dispatch", "gz: loop split"}


@pytest.mark.parametrize("name", marked(names("trainer"), SOME["trainer"]))
def test_trainer(name: str, one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    grid, _, case = name.partition(": ")
    expected = of(one, f"one: {case}")
    for number, rank in enumerate(ranks):
        found = of(rank, name)
        assert found["first"] == (number == 0)
        assert (found["tokens"], found["batch"]) == (expected["tokens"], 4)
        for key in ("losses", "norms", "evaluated"):
            assert found[key] == pytest.approx(expected[key], rel=2e-6), key
        assert found["labels"] == expected["labels"]
        torch.testing.assert_close(
            torch.tensor(found["predicted"]), torch.tensor(expected["predicted"]), rtol=0, atol=1e-5
        )
    reads = [of(rank, name)["read"] for rank in ranks]
    if grid != "gz":
        assert reads[0] == reads[1] == expected["read"]
    elif case != "by length":  # where the sampler reads all to know the lengths
        assert sorted(reads[0] + reads[1]) == sorted(expected["read"]) and not {*reads[0][:HALF]} & {*reads[1][:HALF]}


@pytest.mark.parametrize("grid", marked(GRIDS, ("gx", "gz")))
def test_a_stream_of_samples(grid: str, one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """Rank 0 alone reads, a batch for each reader."""
    expected = of(one, "one: streamed")
    for number, rank in enumerate(ranks):
        found = of(rank, f"{grid}: streamed")
        assert (found["read"] == expected["read"]) if number == 0 else not found["read"]
        assert found["losses"] == pytest.approx(expected["losses"], rel=2e-6)
        assert found["evaluated"] == pytest.approx(expected["evaluated"], rel=2e-6)


@pytest.mark.parametrize("name", marked(names("loop"), SOME["loop"]))
def test_a_loop_on_accelerate(name: str, one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    grid, _, way = name.partition(": loop ")
    readers = 2 if grid == "gz" else 1
    expected = of(one, "one: loop steps" if readers == 2 and way != "split" else "one: loop ")
    for number, rank in enumerate(ranks):
        found = of(rank, name)
        for key in ("losses", "rates"):
            assert torch.tensor(found[key]) == pytest.approx(torch.tensor(expected[key]), rel=2e-6), key
        assert found["seen"] == expected["seen"]
        assert (found["objects"], found["sum"]) == (list(range(readers)), readers)
        assert found["counted"] == (readers, number == 0, number == 1)
        assert found["by name"] == [list(range(readers)), list(range(readers)), readers]
        assert found["triggered"] == (True, False)
        assert found["part"] == (list(range(6)) if readers == 1 else [[0, 1, 2], [3, 4, 5]][number])
    reads = [of(rank, name)["read"] for rank in ranks]
    if way == "dispatch":
        assert reads == [list(range(SAMPLES)), []]
    elif readers == 1:
        assert reads == [list(range(SAMPLES))] * 2
    else:
        assert sorted(reads[0] + reads[1]) == list(range(SAMPLES))


def test_the_inner_module_generates(one: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    assert len(one["assisted"][0]) < len(one["assisted"][1]), one["assisted"]
    for number, rank in enumerate(ranks):
        assert rank["assisted"] == [one["assisted"][number]]
        assert rank["generated"] == one["generated"] * 2
        said = of(rank, "prompts differ")["said"]
        assert said.startswith("the model's argument input_ids differs on rank 1 from that of rank 0")


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "world": ("gx*gy*gz = 3*1*1 = 3", "2 ranks"),
        "second": (
            "a second model, Linear",
            "knows the engine of the first alone, GPT2LMHeadModel; give each model an Accelerator",
        ),
        "meshed": ("tp_size = 2 in Accelerate's ParallelismConfig", "leave it out"),
        "late": ("Accelerate counts 1 of the 2 ranks",),
    }.items(),
)
def test_what_cannot_be_dealt_out(name: str, said: tuple[str, ...], ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert all(part in rank[name] for part in said) and one_sentence(rank[name]), rank[name]


def test_ranks_of_a_sequence_are_the_blocks() -> None:
    from axonn_plugins.hosts.transformers.accelerate_patch import _refuse_sizes

    with pytest.raises(axonn_plugins.config.ConfigError, match="sp_size = 2 in Accelerate's ParallelismConfig"):
        _refuse_sizes(SimpleNamespace(parallelism_config=SimpleNamespace(sp_size=2)))
