"""Text of a model on a grid, to look at what was trained: each token by one forward pass over all before it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from axonn_plugins.config import ConfigError
from axonn_plugins.observe.progress import each
from axonn_plugins.weights import hf
from axonn_plugins.weights.source import open_weights
from axonn_tp import Grid, Mesh, parallelize
from axonn_tp.grid.distribute import read_rest


@dataclass(frozen=True)
class Sampling:
    """The choice of a token: temperature, nucleus and seed.

    Attributes:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_p: the likeliest tokens that together have this probability are drawn from.
        seed: of the draws.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


def generate(
    folder: Path, prompt: str, tokens: int, sampling: Sampling, sizes: dict[str, int], config: Path | None = None
) -> str:
    """The prompt and what the model says next; every rank of the group calls it, if there is one.

    Args:
        folder: of any format that `open_weights` knows, with a tokenizer beside it.
        prompt: text.
        tokens: at most so many are made.
        sampling: how.
        sizes: gx, gy and gz.
        config: see `open_weights`.

    Raises:
        ConfigError: a mistake of the user's; the same on every rank.
    """
    weights = open_weights(folder, config)
    settings, tensors = weights.in_hf_names()
    if getattr(settings, "is_encoder_decoder", False) or not hf.class_of(settings).can_generate():
        raise ConfigError(
            f'{folder} holds a "{hf.class_of(settings).__name__}", which does not continue a text; give a causal language model'
        )
    tokenizer = _tokenizer(weights.beside)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    most = getattr(settings, "max_position_embeddings", None)
    if not ids.numel():
        raise ConfigError("--prompt has 0 tokens, which nothing continues; give at least one word")
    if most is not None and ids.shape[1] + tokens > most:
        raise ConfigError(
            f"--prompt has {ids.shape[1]} tokens, which with --tokens = {tokens} are more than the {most} that the model knows; shorten one of them"
        )
    model: Any = hf.loaded(settings, tensors).eval()
    mesh = _split(model, sizes)
    found = [*ids[0].tolist(), *_continued(model, mesh, ids, tokens, sampling, _ends(model, weights.beside))]
    return str(tokenizer.decode(found, skip_special_tokens=True))


def _tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    # What transformers raises where there is none is of many kinds.
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(
            f"{folder} has no tokenizer that transformers can use: {' '.join(str(error).split())}"
        ) from None


def _ends(model: Any, folder: Path) -> set[int]:
    """Tokens after which nothing is made."""
    from transformers import GenerationConfig

    told = model.generation_config
    if (folder / "generation_config.json").is_file():
        try:
            told = GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{folder / 'generation_config.json'} cannot be read: {' '.join(str(error).split())}"
            ) from None
    ends = told.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends} - {None}


def _split(model: nn.Module, sizes: dict[str, int]) -> Mesh | None:
    if not dist.is_initialized():
        for module in model.modules():
            read_rest(module, torch.device("cpu"))
        return None
    try:
        mesh = Mesh(Grid.for_world(dist.get_world_size(), **sizes))
        parallelize(model, mesh, "auto")
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return mesh


@torch.no_grad()
def _continued(
    model: nn.Module, mesh: Mesh | None, ids: Tensor, tokens: int, sampling: Sampling, ends: set[int]
) -> Iterator[int]:
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = ids if mesh is None else ids.to(mesh.device)
    for _ in each(range(tokens), "continuing", "token"):
        logits = model(input_ids=ids, use_cache=False).logits[0, -1].float().cpu()
        chosen = _choose(logits, sampling, generator).to(ids.device)
        if mesh is not None:
            # Replicas may differ in the last bit.
            dist.broadcast(chosen, src=0)
        yield int(chosen)
        if int(chosen) in ends:
            return
        ids = torch.cat([ids, chosen.view(1, 1)], 1)


def _choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The id of a token, of shape (1,)."""
    if sampling.temperature == 0:
        return logits.argmax().view(1)
    # Of the distance to the largest, so that nothing overflows however cold it is.
    colder = (logits - logits.max()).double() / sampling.temperature
    probabilities, order = torch.softmax(colder, 0).sort(descending=True)
    # The first is drawn from in any case.
    kept = probabilities.masked_fill(probabilities.cumsum(0) - probabilities >= sampling.top_p, 0)
    return order[torch.multinomial(kept, 1, generator=generator)]


def as_rank() -> bool:
    """True if this process is one of several, as torchrun starts them."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
