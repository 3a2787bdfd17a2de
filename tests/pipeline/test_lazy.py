"""A model of `from_pretrained` in a PipelineModule whose stages are split: a rank reads its shards of its stage's layers, and no more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.nn.functional as F
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn

from axonn_plugins.autoload import activate

activate()
transformers = pytest.importorskip("transformers")
from axonn_tp.grid.lazy import LazyTensor  # noqa: E402
from tests.axonn_tp.families import GROUPED, hf  # noqa: E402
from tests.axonn_tp.test_lazy import counted  # noqa: E402
from tests.distributed import run_ranks  # noqa: E402
from tests.pipeline.training import ready  # noqa: E402

GRIDS = {"x": {"gx": 2}, "z": {"gz": 2}}
STEPS, MICROBATCHES, ROWS, TOKENS = 3, 4, 2, 6


class Words(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.words = model.model.embed_tokens

    def forward(self, ids: Tensor) -> Tensor:
        return self.words(ids)


class Block(nn.Module):
    def __init__(self, layer: nn.Module, places: nn.Module) -> None:
        super().__init__()
        self.layer, self.places = layer, places

    def forward(self, hidden: Tensor) -> Tensor:
        at = torch.arange(hidden.shape[1])[None]
        return self.layer(hidden, position_embeddings=self.places(hidden, at), attention_mask=None)


class Head(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.norm, self.head = model.model.norm, model.lm_head

    def forward(self, hidden: Tensor) -> Tensor:
        return self.head(self.norm(hidden))


def entropy(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def layers(model: Any) -> list[nn.Module]:
    return [Words(model), *(Block(layer, model.model.rotary_emb) for layer in model.model.layers), Head(model)]


def batches(readers: int, reader: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Microbatches of each step; those of one reader are every so manyth."""
    torch.manual_seed(7)
    drawn = torch.randint(GROUPED["vocab_size"], (STEPS, MICROBATCHES, ROWS, TOKENS))
    return [[(ids, ids) for ids in step[reader::readers]] for step in drawn]


def staged(folder: Path, grid: dict[str, int]) -> dict[str, Any]:
    """As a script does it: the configuration is known, the model is loaded, and its layers are a pipeline's."""
    readers = grid.get("gz", 1)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICROBATCHES // readers,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.0, "torch_adam": True}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "axonn": {"pipeline": {}, "tensor_parallel": {**grid, "plan": "auto"}},
    }
    known = transformers.integrations.HfDeepSpeedConfig(config)
    with counted() as sizes:
        model = transformers.LlamaForCausalLM.from_pretrained(folder)
        lazy = sum(isinstance(parameter, LazyTensor) for parameter in model.parameters())
        module = PipelineModule(layers(model), num_stages=2, loss_fn=entropy, partition_method="uniform")
        engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
        del model, known
    losses = [engine.train_batch(iter(step)).item() for step in batches(readers, engine.grid.data_parallel_id)]
    held = list(engine.module.parameters())
    found = {"losses": losses, "lazy": lazy, "read": sum(sizes), "shards": sum(p.nbytes for p in held)}
    engine.destroy()
    return found | {"left": sum(isinstance(p, LazyTensor) for p in held)}


def all_of_it(folder: Path) -> dict[str, Any]:
    ready()
    return {name: staged(folder, grid) for name, grid in GRIDS.items()}


def serial(folder: Path) -> list[float]:
    model = nn.Sequential(*layers(transformers.LlamaForCausalLM.from_pretrained(folder)))
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0), []
    for step in batches(1, 0):
        loss = sum(entropy(model(ids), labels) for ids, labels in step) / len(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_rank_reads_its_shards_of_its_stage(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = hf("LlamaForCausalLM", **GROUPED)
    model.save_pretrained(tmp_path)
    whole = sum(parameter.nbytes for parameter in model.parameters())
    wanted = serial(tmp_path)
    for rank in run_ranks(all_of_it, 4, tmp_path):
        for name, found in rank.items():
            assert found["losses"] == pytest.approx(wanted, rel=2e-6), name
            assert found["lazy"] == len(list(model.parameters())) and found["left"] == 0
            assert found["read"] <= found["shards"] < 0.45 * whole, (name, found)
