"""Scripts as users of the HF Trainer write them, run in one process and under the block."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.distributed import same_on_all

WORDS, PAD = 61, 60
AUTO = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")


class Sentences(Dataset):
    """Of different lengths; remembers which were read."""

    def __init__(self, number: int, seed: int = 3) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, 9, (number,), generator=generator).tolist()
        self.ids = [torch.randint(PAD, (length,), generator=generator) for length in lengths]
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: int) -> dict[str, Tensor]:
        self.read.append(int(at))
        return {"input_ids": self.ids[at], "labels": self.ids[at]}


def padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """To one length for all batches: the mean of what is padded does not depend on who is in a batch."""

    def pad(values: list[Tensor], value: int) -> Tensor:
        return torch.stack([nn.functional.pad(v, (0, 9 - len(v)), value=value) for v in values])

    ids = [sample["input_ids"] for sample in samples]
    mask = pad([torch.ones_like(one) for one in ids], 0)
    return {"input_ids": pad(ids, PAD), "attention_mask": mask, "labels": pad(ids, -100)}


def packed(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Two sentences in a row of the batch, told apart by their positions."""
    rows = []
    for sample in samples:
        ids = sample["input_ids"].tolist()
        ids = (ids + ids[::-1] + ids)[:9]
        places = [*range(4), *range(5)]
        labels = [-100 if place == 0 else word for place, word in zip(places, ids, strict=True)]
        rows.append({"input_ids": ids, "position_ids": places, "labels": labels})
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


def gpt2(kind: type[nn.Module] = transformers.GPT2LMHeadModel) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=16, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    return kind(config)


def llama(layers: int = 2) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads))


@dataclass
class Case:
    """A script: its model, data and arguments; and what the DeepSpeed configuration holds besides the block."""

    model: Callable[[], nn.Module] = gpt2
    collate: Callable[..., Any] = padded
    arguments: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 4
    samples: int = 30
    optimizers: Callable[[nn.Module], tuple[Any, Any]] = lambda model: (None, None)


def settings(case: Case, block: dict[str, Any]) -> dict[str, Any]:
    zero = {"stage": 0, "reduce_bucket_size": "auto"}
    return dict.fromkeys(AUTO, "auto") | {"zero_optimization": zero} | case.config | {"axonn": block}


def quiet(grid: dict[str, Any] | None) -> dict[str, Any]:
    """Arguments of a Trainer that says what each step was and keeps nothing, on a grid or in one process."""
    return {
        "save_strategy": "no",
        "logging_steps": 1,
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": grid is None,
        "deepspeed": None if grid is None else settings(Case(), {"tensor_parallel": grid}),
    }


def preferred(folder: str, batch: int, grid: dict[str, Any] | None, readers: int) -> dict[str, Any]:
    """Arguments of a trainer of TRL's, for one epoch in float32."""
    each = batch // readers
    return quiet(grid) | {
        "output_dir": folder,
        "per_device_train_batch_size": each,
        "per_device_eval_batch_size": each,
        "eval_strategy": "epoch",
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "bf16": False,
        "gradient_checkpointing": False,
    }


def tokenizer(unknown: str = "0", **more: str) -> Any:
    """Numbers below `WORDS` as words, with spaces between."""
    words = Tokenizer(models.WordLevel({str(number): number for number in range(WORDS)}, unk_token=unknown))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "60", "eos_token": "59", "unk_token": unknown} | more
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **tokens)


def forget() -> None:
    """Reset what Accelerate keeps from one run to the next."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def right(given: Any) -> dict[str, float]:
    """The share of words that were guessed, and their number."""
    guessed, labels = numpy.asarray(given.predictions)[:, :-1], numpy.asarray(given.label_ids)[:, 1:]
    counted = labels != -100
    return {"right": float((guessed == labels)[counted].mean()), "words": float(counted.sum())}


def guesses(logits: Any, labels: Any) -> Tensor:
    return logits.argmax(-1)


def trainer(case: Case, block: dict[str, Any] | None, readers: int, folder: str, **more: Any) -> transformers.Trainer:
    forget()
    steps = case.arguments.get("gradient_accumulation_steps", 1)
    given = {
        "output_dir": folder,
        "per_device_train_batch_size": case.batch // steps // readers,
        "per_device_eval_batch_size": 4 // readers,
        "learning_rate": 1e-2,
        "seed": 5,
        "report_to": [],
        "save_strategy": "no",
        "eval_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "use_cpu": block is None,
        "deepspeed": None if block is None else settings(case, block),
    }
    model = case.model()
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(**given | case.arguments | more),
        train_dataset=Sentences(case.samples),
        eval_dataset=Sentences(10, 4),
        data_collator=case.collate,
        compute_metrics=right,
        preprocess_logits_for_metrics=guesses,
        optimizers=case.optimizers(model),
    )


TIMES = ("runtime", "per_second", "preparation_time")


def reported(metrics: dict[str, Any]) -> dict[str, float]:
    """Metrics without times."""
    return {key: float(value) for key, value in metrics.items() if not any(time in key for time in TIMES)}


def history(used: transformers.Trainer) -> list[dict[str, float]]:
    """The log, without times."""
    return [reported(entry) for entry in used.state.log_history]


class Scarce(transformers.GPT2LMHeadModel):
    """Has memory for a few rows."""

    rows = 4

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor, **keywords: Any) -> Any:
        if len(input_ids) > self.rows and self.training:
            raise RuntimeError("CUDA out of memory.")
        return super().forward(input_ids, attention_mask=attention_mask, labels=labels, **keywords)


def trained(
    case: Case, block: dict[str, Any] | None, readers: int, resume: str | None = None, **more: Any
) -> dict[str, Any]:
    """Train, predict, save, and read what was saved."""
    folder = same_on_all(tempfile.mkdtemp())
    used = trainer(case, block, readers, folder, **more)
    result = used.train(resume_from_checkpoint=resume)
    predicted = used.predict(used.eval_dataset)
    used.save_model(f"{folder}/saved")
    used.accelerator.wait_for_everyone()
    whole = transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/saved")
    with torch.no_grad():
        logits = whole.eval()(torch.arange(12).view(2, 6)).logits
    return {
        "history": history(used),
        "steps": (used.state.global_step, used.state.epoch, used.state.max_steps),
        "best": used.state.best_metric,
        "loss": result.training_loss,
        "read": used.train_dataset.read,
        "predicted": predicted.predictions.tolist(),
        "metrics": reported(predicted.metrics),
        "logits": logits.tolist(),
        "saved": sorted(load_file(f"{folder}/saved/model.safetensors")),
        "checkpoints": sorted(path.name for path in Path(folder).glob("checkpoint-*")),
        "folder": folder,
    }
