"""Models of others, by family: how small ones are built, and the pairs that are found in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from axonn_recipes.models.gpt import GPT, GPTConfig

VOCABULARY = 50
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 16,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def hf(name: str, configuration: str = "", **sizes: Any) -> nn.Module:
    """A model of HF transformers by class name, from a configuration alone, whose class the family's name tells if it is not given."""
    transformers = pytest.importorskip("transformers")
    family = name.partition("For")[0].removesuffix("LMHeadModel").removesuffix("Model")
    config = getattr(transformers, configuration or f"{family}Config")(**{**NO_TOKENS, **sizes})
    model = getattr(transformers, name)(config).eval()
    # The default product of experts knows no float64.
    model.set_experts_implementation("eager")
    return model


@contextmanager
def in_float64() -> Iterator[None]:
    """HF's norms, states and scores round to float32 in any model, which no other order of sums repeats; inside they keep float64."""
    to, to_float = torch.Tensor.to, torch.Tensor.float

    def kept(self: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        if self.dtype == torch.float64:
            args = tuple(torch.float64 if value is torch.float32 else value for value in args)
            keywords = {name: torch.float64 if value is torch.float32 else value for name, value in keywords.items()}
        return to(self, *args, **keywords)

    def wide(self: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
        return self if self.dtype == torch.float64 else to_float(self, *args, **keywords)

    with mock.patch.object(torch.Tensor, "to", kept), mock.patch.object(torch.Tensor, "float", wide):
        yield


def litgpt(**sizes: Any) -> nn.Module:
    model = pytest.importorskip("litgpt.model")
    config = pytest.importorskip("litgpt.config")
    common = {"block_size": 16, "vocab_size": VOCABULARY, "padded_vocab_size": VOCABULARY, "n_embd": 32}
    return model.GPT(config.Config(**{**common, "n_layer": 2, "n_head": 4, **sizes}))


class Encoder(nn.Module):
    """torch's own encoder, whose attention reads its weights directly, and an nn.Sequential head."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x))


class WidthAttention(nn.Module):
    """Attention as in nanoGPT and timm: heads and widths of what the layers give are taken from the shape of the input."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.n_head, self.n_embd, self.causal = 4, 32, causal
        self.c_attn, self.c_proj = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        B, T, C = x.size()  # noqa: N806
        if self.causal:
            q, k, v = (
                part.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
                for part in self.c_attn(x).split(self.n_embd, dim=2)
            )
        else:
            q, k, v = self.c_attn(x).reshape(B, T, 3, self.n_head, x.shape[2] // self.n_head).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, C))


class WidthBlock(nn.Module):
    """A block of nanoGPT's."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(32), WidthAttention(causal), nn.LayerNorm(32)
        self.fc, self.back = nn.Linear(32, 48), nn.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.back(nn.functional.gelu(self.fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """Two blocks on token and position embeddings, with a tied head."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, 32), nn.Embedding(16, 32)
        self.h = nn.Sequential(WidthBlock(causal), WidthBlock(causal))
        self.ln_f, self.lm_head = nn.LayerNorm(32), nn.Linear(32, VOCABULARY, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.ln_f(self.h(self.wte(ids) + self.wpe(torch.arange(ids.shape[1])))))


NANOGPT = {"c_attn": 4, "c_proj": None, "fc": None, "back": None}
LLAMA = {"q_proj": 2, "k_proj": 2, "v_proj": 2, "o_proj": None, "gate_proj": None, "up_proj": None, "down_proj": None}
MHA = {"q_proj": 4, "k_proj": 4, "v_proj": 4, "fc1": None, "fc2": None}
VISION = {k: v for k, v in SIZES.items() if k not in ("vocab_size", "max_position_embeddings")}
VISION |= {"image_size": 16, "patch_size": 4}
OPT = {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}
WHISPER = {
    "d_model": 32,
    "vocab_size": VOCABULARY,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 16,
    **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 4 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 2, "vocab_size": VOCABULARY}
T5 |= {"pad_token_id": 0, "decoder_start_token_id": 0}
# By family: how to build it, and the heads of each layer (by the end of its name) that becomes part of a pair.
FAMILIES: dict[str, tuple[Callable[[], nn.Module], dict[str, int | None]]] = {
    "llama": (lambda: hf("LlamaForCausalLM", **GROUPED), LLAMA),
    "mistral": (lambda: hf("MistralForCausalLM", **GROUPED), LLAMA),
    "qwen2": (lambda: hf("Qwen2ForCausalLM", **GROUPED), LLAMA),
    "qwen3": (lambda: hf("Qwen3ForCausalLM", **GROUPED, head_dim=8), LLAMA),
    "gemma2": (lambda: hf("Gemma2ForCausalLM", **GROUPED, head_dim=8), LLAMA),
    "gemma3": (
        lambda: hf("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=8, query_pre_attn_scalar=8),
        LLAMA,
    ),
    "phi": (
        lambda: hf("PhiForCausalLM", **SIZES),
        {"q_proj": 4, "k_proj": 4, "v_proj": 4, "self_attn.dense": None, "fc1": None, "fc2": None},
    ),
    "phi3": (lambda: hf("Phi3ForCausalLM", **GROUPED), {"gate_up_proj": None, "down_proj": None}),
    "mixtral": (
        lambda: hf("MixtralForCausalLM", **GROUPED, num_local_experts=4),
        {"q_proj": 2, "k_proj": 2, "v_proj": 2, "o_proj": None},
    ),
    "bert": (
        lambda: hf("BertForMaskedLM", **SIZES, pad_token_id=0),
        {"self.query": 4, "self.key": 4, "self.value": 4, "intermediate.dense": None, "output.dense": None},
    ),
    "vit": (lambda: hf("ViTForImageClassification", **VISION, num_labels=VOCABULARY), {**MHA, "o_proj": None}),
    "convnext": (
        lambda: hf(
            "ConvNextForImageClassification",
            **{"num_stages": 2, "hidden_sizes": [16, 32], "depths": [2, 1], "image_size": 16},
            num_labels=VOCABULARY,
        ),
        {"pwconv1": None, "pwconv2": None},
    ),
    "mamba": (
        lambda: hf("MambaForCausalLM", hidden_size=32, state_size=4, num_hidden_layers=2, vocab_size=VOCABULARY),
        {},
    ),
    "opt": (lambda: hf("OPTForCausalLM", **OPT, pad_token_id=1), {**MHA, "out_proj": None}),
    "whisper": (lambda: hf("WhisperForConditionalGeneration", **WHISPER), {**MHA, "out_proj": None}),
    "neox": (
        lambda: hf("GPTNeoXForCausalLM", **SIZES),
        {"query_key_value": 4, "attention.dense": None, "dense_h_to_4h": None, "dense_4h_to_h": None},
    ),
    "t5": (
        lambda: hf("T5ForConditionalGeneration", **T5),
        {"EncDecAttention.q": 4, "EncDecAttention.k": 4, "EncDecAttention.v": 4, "EncDecAttention.o": None}
        | {"wi": None, "wo": None},
    ),
    "bloom": (
        lambda: hf("BloomForCausalLM", hidden_size=32, n_head=4, n_layer=2, vocab_size=VOCABULARY),
        {"dense_h_to_4h": None, "dense_4h_to_h": None},
    ),
    "gpt2": (
        lambda: hf("GPT2LMHeadModel", n_embd=32, n_head=4, n_layer=2, vocab_size=VOCABULARY, n_positions=16),
        {"c_attn": 4, "attn.c_proj": None, "c_fc": None, "mlp.c_proj": None},
    ),
    "litgpt": (lambda: litgpt(), {"attn.qkv": 4, "attn.proj": None, "mlp.fc": None, "mlp.proj": None}),
    "litgpt grouped": (
        lambda: litgpt(n_query_groups=2, mlp_class_name="LLaMAMLP", intermediate_size=48, bias=False),
        {"mlp.fc_1": None, "mlp.fc_2": None, "mlp.proj": None},
    ),
    "torch": (Encoder, {"linear1": None, "linear2": None, "head.0": None, "head.3": None}),
    "nanogpt": (NanoGPT, NANOGPT),
    "timm": (lambda: NanoGPT(causal=False), NANOGPT),
    "ours": (
        lambda: GPT(GPTConfig(VOCABULARY, 16, 2, 4, 32)),
        {"qkv": 4, "proj": None, "fc1": None, "fc2": None},
    ),
}
