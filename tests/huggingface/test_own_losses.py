"""Losses that a script computes itself, sums and means, and what ranks agree a model's to be: as in one process."""

from __future__ import annotations

import contextlib
import io
import tempfile
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import axonn_plugins
from tests.deepspeed.training import attempt
from tests.distributed import run_ranks, same_on_all
from tests.matrix import thorough

axonn_plugins.activate()
pytest.importorskip("accelerate")
import transformers  # noqa: E402

from tests.huggingface.test_means import SIZES, classes, classifier, labelled_at_times, t5  # noqa: E402
from tests.huggingface.trainer_runs import PAD, WORDS, Case, gpt2, history, padded, trainer  # noqa: E402

ENTROPY = nn.functional.cross_entropy


def targets(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()


def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    return ENTROPY(*targets(outputs["logits"], labels), reduction="sum") / 30


def divided(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    return ENTROPY(*targets(outputs["logits"], labels), reduction="sum") / num_items_in_batch.item()


def mean(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    return ENTROPY(*targets(outputs["logits"], labels), label_smoothing=0.1)


def of_two(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Tensor:
    """Two means, over other targets each; one of them leaves out what it has marked itself."""
    marked = ENTROPY(outputs["logits"].flatten(0, 1), labels.flatten() % 50 - 1, ignore_index=-1)
    return mean(outputs, labels) + marked


class Own(transformers.Trainer):
    """As a script writes it for one process."""

    def own(self, outputs: Any, labels: Tensor, items: Any) -> Tensor:
        return summed(outputs, labels)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = self.own(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class OwnDivided(Own):
    def own(self, outputs: Any, labels: Tensor, items: Any) -> Tensor:
        return ENTROPY(*targets(outputs["logits"], labels), reduction="sum") / items


class OwnMultiplied(OwnDivided):
    """As scripts do that were written for several processes."""

    def own(self, outputs: Any, labels: Tensor, items: Any) -> Tensor:
        return super().own(outputs, labels, items) * self.accelerator.num_processes


class OwnMean(Own):
    def own(self, outputs: Any, labels: Tensor, items: Any) -> Tensor:
        return mean(outputs, labels)


class OwnOfFirst(Own):
    """Asks who is first, as scripts do that print, and how many processes there are, which changes nothing."""

    def own(self, outputs: Any, labels: Tensor, items: Any) -> Tensor:
        assert self.is_world_process_zero() in (True, False) and self.accelerator.num_processes
        return summed(outputs, labels)


class OwnOfRanks(OwnDivided):
    """Multiplies by the number of processes that its arguments tell."""

    def own(self, outputs: Any, labels: Tensor, items: Any) -> Tensor:
        return super().own(outputs, labels, items) * self.args.world_size


class OwnOfRows(Own):
    """A row counts as much as any other."""

    def own(self, outputs: Any, labels: Tensor, items: Any) -> Tensor:
        each = ENTROPY(outputs["logits"][:, :-1].transpose(1, 2), labels[:, 1:], reduction="none")
        return (each.sum(1) / labels[:, 1:].ne(-100).sum(1)).mean()


class OwnOfTwo(Own):
    def own(self, outputs: Any, labels: Tensor, items: Any) -> Tensor:
        return of_two(outputs, labels)


class OwnOfPairs(Own):
    def own(self, outputs: Any, labels: Tensor, items: Any) -> Tensor:
        first = outputs["logits"][:, 0]
        return ENTROPY(first @ first.T / 10, torch.arange(len(first)))


class Weighted(transformers.Trainer):
    """Classes count by weights, and so does the mean."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0, 9.0]))(outputs.logits, labels)
        return (loss, outputs) if return_outputs else loss


class OwnOfModel(transformers.Trainer):
    """The model's own loss, as if there were no steps to add up."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class OwnStep(transformers.Trainer):
    """A step as scripts have them that do more in it: the first epoch's loss is that of `compute_loss`, the second's the model's own."""

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        model.train()
        inputs = self._prepare_inputs(inputs)
        first = self.state.global_step * 2 < self.state.max_steps
        loss = self.compute_loss(model, inputs) if first else model(**inputs).loss
        self.accelerator.backward(loss, **{"scale_wrt_gas": False} if self.is_deepspeed_enabled else {})
        return loss.detach()


class OwnTrain(Own):
    """A `train` that does not call the Trainer's, whose step it uses."""

    def own(self, outputs: Any, labels: Tensor, items: Any) -> Tensor:
        return mean(outputs, labels)

    train = transformers.Trainer.train.__wrapped__


class Penalized(transformers.Trainer):
    """The Trainer's loss and a number that no row adds to."""

    def compute_loss(self, *given: Any, **keywords: Any) -> Any:
        found = super().compute_loss(*given, **keywords)
        return (found[0] + 0.5, found[1]) if isinstance(found, tuple) else found + 0.5


class Plain(nn.Module):
    """A model that takes no number of items, and means over its own tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(WORDS, 32), nn.Linear(32, WORDS)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> dict[str, Tensor]:
        hidden = self.words(input_ids)
        logits = self.out(hidden + self.down(self.up(hidden).tanh()))
        return {"loss": ENTROPY(*targets(logits, labels)), "logits": logits}


class Summing(Plain):
    def forward(self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None) -> dict[str, Tensor]:
        found = super().forward(input_ids, attention_mask, labels)
        return found | {"loss": summed(found, labels)}


class Coincident(nn.Module):
    """On rank 0 alone something is divided by a number that happens to be that of the items."""

    def __init__(self) -> None:
        super().__init__()
        self.model = t5()

    def forward(self, num_items_in_batch: Any = None, **keywords: Any) -> Any:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() == 0 and num_items_in_batch is not None:
            torch.ones(()) / num_items_in_batch.clone().add(0)
        return self.model(**keywords)


whole = True


def then_padded(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A first batch in which all labels count, and others in which some do not."""
    global whole
    batch = padded(samples)
    if whole:
        batch["labels"] = batch["input_ids"].clamp(max=PAD - 1)
    whole = False
    return batch


def batch_encoding(samples: list[dict[str, Tensor]]) -> Any:
    """A batch as the collators of transformers return it, which is no dict."""
    return transformers.BatchEncoding(padded(samples))


def mixture() -> nn.Module:
    """Its loss holds one of the balance between experts, which is no mean over tokens."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    experts = {"num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads, **experts))


class Switch(transformers.SwitchTransformersForConditionalGeneration):
    """Its loss holds two of its routers, means over rows and over each row's tokens: it has them where it is asked to."""

    def forward(self, **keywords: Any) -> Any:
        return super().forward(output_router_logits=True, **keywords)


def switch() -> nn.Module:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4}
    sparse = {"num_decoder_layers": 2, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4}
    losses = {"router_z_loss_coef": 0.1, "router_aux_loss_coef": 0.5}
    off = {"router_jitter_noise": 0.0, "dropout_rate": 0.0, "decoder_start_token_id": PAD, "pad_token_id": PAD}
    return Switch(transformers.SwitchTransformersConfig(**sizes, **sparse, **losses, **off))


def nllb() -> nn.Module:
    """A mean over labels, beside a loss of the balance between experts over the tokens of all readers."""
    torch.manual_seed(0)
    places = ("encoder", "decoder")
    sizes: dict[str, Any] = {"vocab_size": WORDS, "d_model": 32, "num_experts": 4, "expert_capacity": 99}
    sizes |= {f"{place}_{name}": 2 for place in places for name in ("layers", "attention_heads", "sparse_step")}
    sizes |= {f"{place}_ffn_dim": 24 for place in places} | {f"{place}_layerdrop": 0.0 for place in places}
    off = dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "moe_token_dropout"), 0.0)
    losses = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "decoder_start_token_id": 2}
    return transformers.NllbMoeForConditionalGeneration(transformers.NllbMoeConfig(**sizes, **off, **losses))


def longest(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Padded to the longest of those that are read together."""
    length = max(len(sample["input_ids"]) for sample in samples)
    return {key: value[:, :length] for key, value in padded(samples).items()}


def reader_of_answers() -> nn.Module:
    torch.manual_seed(0)
    off: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertForQuestionAnswering(transformers.BertConfig(**SIZES, **off, num_attention_heads=4))


def answers(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Where answers begin and end, of which some are cut off: the model leaves these out of its two means."""
    batch = padded(samples)
    del batch["labels"]
    first, last = batch["input_ids"][:, 0] % 14, batch["input_ids"][:, 1] % 10
    return batch | {"start_positions": first, "end_positions": last}


def detector() -> nn.Module:
    """Its loss is divided by the number of boxes, which it averages over processes itself; boxes go to queries without scipy here."""
    from transformers.loss import loss_for_object_detection as theirs

    def assign(costs: Any) -> tuple[list[int], list[int]]:
        costs, rows = torch.as_tensor(costs).clone(), []
        for column in range(costs.shape[1]):
            rows.append(int(costs[:, column].argmin()))
            costs[rows[-1]] = float("inf")
        return rows, [*range(len(rows))]

    module: Any = theirs
    module.linear_sum_assignment, module.requires_backends = assign, lambda *given: None
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 56,
    }
    seen = {"image_size": [16, 16], "patch_size": 8, "num_detection_tokens": 6, "num_labels": 3}
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.YolosForObjectDetection(transformers.YolosConfig(**sizes, **seen, **off))


def boxes(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    """Images, each with none to three boxes."""
    images, found = [], []
    for sample in samples:
        drawn = torch.Generator().manual_seed(int(sample["input_ids"].sum()))
        number = int(sample["input_ids"][0]) % 4
        images.append(torch.randn(3, 16, 16, generator=drawn))
        kinds = torch.randint(3, (number,), generator=drawn)
        found.append({"class_labels": kinds, "boxes": torch.rand(number, 4, generator=drawn) * 0.4 + 0.2})
    return {"pixel_values": torch.stack(images), "labels": found}


EPOCH: dict[str, Any] = {"num_train_epochs": 1, "eval_strategy": "epoch", "prediction_loss_only": True}
ALL = {"remove_unused_columns": False}
UNFILTERED = {"logging_nan_inf_filter": False}
NO_AUTO: dict[str, Any] = {"zero_optimization": {"stage": 0}}  # sizes that the Trainer takes from a model's config
ROUNDS = EPOCH | {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
FUNCTIONS = {"sum": summed, "sum divided": divided, "mean": mean, "two": of_two}
OWN = {"own sum": Own, "own sum divided": OwnDivided, "own multiplied": OwnMultiplied, "own mean": OwnMean}
SGD = EPOCH | {"optim": "sgd", "learning_rate": 0.1}
BY_COST = {
    "train_sampling_strategy": "batch_rebalance",
    "num_train_epochs": 2,
    "save_strategy": "steps",
    "save_steps": 3,
}
OWN_SGD = {"first": OwnOfFirst, "ranks": OwnOfRanks, "two": OwnOfTwo}
CASES: dict[str, tuple[Case, Any, Any]] = {
    **{name: (Case(gpt2, arguments=ROUNDS, batch=8), None, function) for name, function in FUNCTIONS.items()},
    **{name: (Case(gpt2, arguments=EPOCH), kind, None) for name, kind in OWN.items()},
    **{f"own of {name}": (Case(gpt2, arguments=SGD), kind, None) for name, kind in OWN_SGD.items()},
    "own of rows": (Case(gpt2, then_padded, SGD), OwnOfRows, None),
    "rows of lengths": (Case(gpt2, arguments=SGD | BY_COST, batch=8), OwnOfRows, None),
    "own step": (Case(classifier, classes, SGD | {"num_train_epochs": 2}), OwnStep, None),
    "own train": (Case(gpt2, arguments=SGD), OwnTrain, None),
    "penalized": (Case(gpt2, arguments=ROUNDS, batch=8), Penalized, None),
    "plain": (Case(Plain, arguments=EPOCH, config=NO_AUTO), None, None),
    "summing": (Case(Summing, arguments=EPOCH, config=NO_AUTO), None, None),
    "coincidence": (Case(Coincident, arguments=EPOCH | ALL, config=NO_AUTO), None, None),
    "collator": (Case(gpt2, batch_encoding, EPOCH), None, None),
    "classifier": (Case(classifier, classes, ROUNDS, batch=8), None, None),
    "answers": (Case(reader_of_answers, answers, ROUNDS | ALL, batch=8), None, None),
    "boxes": (Case(detector, boxes, SGD | ALL, config=NO_AUTO), None, None),
    "weighted": (Case(classifier, classes, ROUNDS, batch=8), Weighted, None),
    "balanced": (Case(mixture, longest, ROUNDS | {"include_num_input_tokens_seen": "all"}, batch=8), None, None),
    "balanced by rows": (Case(mixture, arguments=EPOCH), OwnOfModel, None),
    "switch": (Case(switch, arguments=EPOCH | ALL, config=NO_AUTO), None, None),
    "nllb": (Case(nllb, arguments=EPOCH, config=NO_AUTO), None, None),
    "switch at times": (Case(switch, labelled_at_times, EPOCH | ALL | UNFILTERED, NO_AUTO), None, None),
}


def run(name: str, grid: dict[str, Any] | None, readers: int) -> list[dict[str, float]]:
    case, kind, function = CASES[name]
    case = replace(case, samples=14)  # the last batch is smaller, as it is of 30
    block = None if grid is None else {"tensor_parallel": grid | {"plan": "auto"}}
    used = trainer(case, block, readers, same_on_all(tempfile.mkdtemp()))
    if kind is not None:
        used.__class__ = kind
    used.compute_loss_func = function
    global whole
    whole = True
    if block and readers > 1 and name == "plain":
        used.evaluate()  # before there is a training call
        used.state.log_history.clear()
    used.train()
    if "save_steps" in case.arguments:  # and once more from the middle of the second epoch
        resumed = trainer(case, block, readers, used.args.output_dir)
        resumed.__class__ = kind or type(resumed)
        resumed.train(resume_from_checkpoint=f"{used.args.output_dir}/checkpoint-3")
        return history(used) + history(resumed)[:-1]
    return history(used)


GRIDS: list[tuple[dict[str, Any] | None, int]] = [({"gz": 2}, 2), ({"gx": 2}, 1)]


def every(grids: dict[str, list[tuple[dict[str, Any] | None, int]]]) -> dict[str, list[Any]]:
    return {
        name: [attempt(partial(run, name, grid, readers)) for grid, readers in of_name]
        for name, of_name in grids.items()
    }


LIKE_OTHERS = {"sum", "own sum divided", "own mean", "classifier", "balanced by rows", "sum divided", "own of first"}
LIKE_OTHERS |= {"collator", "summing", "nllb", "own multiplied", "own of two", "answers", "switch"}
ONE_OF_A_KIND = [name for name in CASES if name not in LIKE_OTHERS]


@pytest.mark.parametrize(
    ("names", "with_one_reader"),
    [(ONE_OF_A_KIND, {"boxes", "weighted", "own of ranks"}), thorough([*CASES], {*CASES})],
    ids=["some", "all"],
)
def test_as_in_one_process(names: list[str], with_one_reader: set[str]) -> None:
    wanted = run_ranks(every, 1, {name: [(None, 1)] for name in names})[0]
    for rank in run_ranks(every, 2, {name: GRIDS[: 1 + (name in with_one_reader)] for name in names}):
        for name, grids in rank.items():
            assert len(grids) == 1 + (name in with_one_reader)
            for found in grids:
                assert not isinstance(found, str) and not isinstance(wanted[name][0], str), (name, found, wanted[name])
                assert len(found) == len(wanted[name][0])
                for entry, other in zip(found, wanted[name][0], strict=True):
                    assert entry == pytest.approx(other, rel=1e-5, abs=1e-6), name


def missing(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    batch = padded(samples)
    return {key: batch[key] for key in batch if key != "labels" or torch.distributed.get_rank() == 0} | {
        "decoder_input_ids": batch["input_ids"].clamp(max=PAD - 1)
    }


class Unlabelled(Plain):
    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, labels: Any = None, **more: Any
    ) -> dict[str, Tensor]:
        return {"loss": super().forward(input_ids, attention_mask, input_ids)["loss"]}


def refused() -> Any:
    case = Case(Unlabelled, missing, {"max_steps": 1}, NO_AUTO)
    used = trainer(case, {"tensor_parallel": {"gz": 2}}, 2, tempfile.mkdtemp())
    used.model_accepts_loss_kwargs = False
    return attempt(used.train)


def two_optimizers() -> Any:
    case = Case(
        gpt2, config={"optimizer": {"type": "AdamW"}}, optimizers=lambda m: (torch.optim.SGD(m.parameters()), None)
    )
    return attempt(trainer(case, {"tensor_parallel": {"gz": 2}}, 2, tempfile.mkdtemp()).train)


def by_metrics() -> Any:
    """DeepSpeed would step the schedule by the batch size."""
    arguments = EPOCH | {"lr_scheduler_type": "reduce_lr_on_plateau"}
    case = Case(gpt2, arguments=arguments, config={"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}})
    return attempt(trainer(case, {"tensor_parallel": {"gz": 2}}, 2, tempfile.mkdtemp()).train)


def routed_padding() -> Any:
    """Each reader pads to its own longest."""
    return attempt(trainer(Case(nllb, longest, EPOCH, NO_AUTO), {"tensor_parallel": {"gz": 2}}, 2, "unused").train)


def averaged_padding() -> Any:
    """Labels are of one length, and so are their padding's tokens."""
    case = Case(switch, lambda some: longest(some) | {"labels": padded(some)["labels"]}, EPOCH | ALL, NO_AUTO)
    return attempt(trainer(case, {"tensor_parallel": {"gz": 2, "plan": "auto"}}, 2, "unused").train)


def of_pairs() -> str:
    """What is said of a loss of no kind that could be one process's; only rank 0 says it."""
    used = trainer(Case(gpt2, arguments={"max_steps": 1}), {"tensor_parallel": {"gz": 2}}, 2, "unused")
    used.__class__ = OwnOfPairs
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        used.train()
    return next((line for line in said.getvalue().splitlines() if "neither" in line), "")


def asked_to_end() -> tuple[list[Any], ...]:
    """Rank 1 alone is told by a signal, in the second of four steps; the last two as they are, and as a run goes on with them."""
    folder = same_on_all(tempfile.mkdtemp())
    case = Case(gpt2, arguments={"max_steps": 4, "optim": "sgd", "learning_rate": 0.1})
    whole, ended, again = (
        trainer(case, {"tensor_parallel": {"gz": 2}}, 2, folder, enable_jit_checkpoint=number == 1)
        for number in range(3)
    )
    (manager,) = [each.jit_manager for each in ended.callback_handler.callbacks if hasattr(each, "jit_manager")]

    def signal(*given: Any) -> None:
        manager.is_checkpoint_requested |= ended.state.global_step == 1 and torch.distributed.get_rank() == 1

    ended.model.register_forward_hook(signal)
    whole.train()
    ended.train()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return tuple([entry for entry in history(used)[:-1] if entry["step"] > 2] for used in (whole, again))


def of_tuples() -> Any:
    """Batches without names, of which a script's own loss would be each reader's."""
    case = Case(gpt2, lambda some: tuple(padded(some).values()), {"max_steps": 1})
    return attempt(trainer(case, {"tensor_parallel": {"gz": 2}}, 2, "unused").train)


def all_refused() -> tuple[Any, ...]:
    return (
        of_tuples(),
        refused(),
        two_optimizers(),
        routed_padding(),
        averaged_padding(),
        by_metrics(),
        attempt(asked_to_end),
        of_pairs(),
    )


def test_what_one_rank_has_is_told_to_all() -> None:
    found = run_ranks(all_refused, 2)
    assert (
        "the loss of OwnOfPairs is neither a sum nor a mean over the rows or the labels" in found[0][-1]
        and not found[1][-1]
    )
    for unnamed, told, given, routed, averaged, metrics, (whole, again), _ in found:
        assert "a batch of the Trainer is of type tuple, in which rows and labels have no names" in unnamed
        assert whole == again and len(whole) == 2
        assert 'lr_scheduler_type = "reduce_lr_on_plateau" goes by what evaluations find' in metrics
        assert "or are routed to experts whose balance is part of the loss, and readers pad" in routed
        assert "is a mean over tokens of padding, too, and readers pad their rows to different lengths" in averaged
        assert "labels are in the batches of 1 of 2 ranks" in told
        assert "the Trainer was given an optimizer (SGD, by optimizers=)" in given
