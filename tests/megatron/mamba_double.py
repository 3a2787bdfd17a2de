"""A double of mamba_ssm on CPUs: the functions that Megatron's mixers call, by their pages, as a recurrence in torch; and models of such mixers.

python tests/megatron/mamba_double.py pretrain_mamba.py ...
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root mean square norm by groups of features, of what a gate lets through where there is one."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size or hidden_size
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        x = x if z is None else x * F.silu(z)
        groups = x.unflatten(-1, (-1, self.group_size))
        scale = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return (groups * scale).flatten(-2) * self.weight


def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """The recurrence h ← exp(dt·A)·h + dt·x·Bᵀ, y = h·C + D·x, token by token; h is zero where a sequence begins.

    Args:
        x: (batch, tokens, heads, features).
        dt: (batch, tokens, heads), positive.
        A: (heads), negative.
        B: (batch, tokens, groups of heads, state).
        C: as B.
        D: (heads).
        seq_idx: (batch, tokens), the number of a token's sequence.
    """
    each = x.shape[2] // B.shape[2]
    B, C = (rows.repeat_interleave(each, 2) for rows in (B, C))
    state = x.new_zeros(*x.shape[:1], *x.shape[2:], B.shape[-1])
    made = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        decay = torch.exp(dt[:, t] * A)[..., None, None]
        state = decay * state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        made.append((state * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(made, 1)


def convolve(x: Tensor, weight: Tensor, bias: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """A causal convolution of each feature, (batch, tokens, features), that sees no token of another sequence."""
    made, width = bias.expand_as(x), weight.shape[-1]
    for back in range(width):
        earlier = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
        if seq_idx is not None:
            before = F.pad(seq_idx, (back, 0), value=-1)[:, : x.shape[1]]
            earlier = earlier * (before == seq_idx)[..., None]
        made = made + weight[:, width - 1 - back] * earlier
    return made


def mamba_chunk_scan_combined(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: None = None,
    seq_idx: Tensor | None = None,
    cu_seqlens: None = None,
    dt_softplus: bool = False,
    return_final_states: bool = False,
    return_varlen_states: bool = False,
) -> Tensor:
    assert dt_bias is not None and dt_softplus and initial_states is cu_seqlens is None
    assert not return_final_states and not return_varlen_states
    made = scan(x, F.softplus(dt + dt_bias), A, B, C, D, seq_idx)
    return (made if z is None else made * F.silu(z)).to(x.dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    seq_idx: Tensor | None = None,
    activation: str = "silu",
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
) -> Tensor:
    assert activation == "silu" and headdim is not None and not norm_before_gate
    inner = len(A) * headdim
    z, xbc, dt = zxbcdt.split([inner, zxbcdt.shape[-1] - inner - len(A), len(A)], -1)
    xbc = F.silu(convolve(xbc, conv1d_weight, conv1d_bias, seq_idx))
    states = (xbc.shape[-1] - inner) // 2
    x, b, c = xbc.split([inner, states, states], -1)
    x, z = (rows.unflatten(-1, (-1, headdim)) for rows in (x, z))
    b, c = (rows.unflatten(-1, (ngroups, -1)) for rows in (b, c))
    return mamba_chunk_scan_combined(
        x, dt, A, b, c, chunk_size, D, z, dt_bias, seq_idx=seq_idx, dt_softplus=True
    ).flatten(2)


hybrid_spec: Any = None
"""What ``--spec`` names: `local_spec`, once the double is installed."""


def install() -> None:
    """Have Megatron find the double; this process keeps it."""
    global hybrid_spec
    if "mamba_ssm" in sys.modules:
        return
    contents: dict[str, dict[str, Any]] = {
        "mamba_ssm": {"__version__": "2.2.6"},
        "mamba_ssm.ops": {},
        "mamba_ssm.ops.triton": {},
        "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": RMSNorm},
        "mamba_ssm.ops.triton.ssd_combined": {
            one.__name__: one for one in (mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined)
        },
    }
    for name, attributes in contents.items():
        made = ModuleType(name)
        made.__spec__, made.__path__ = ModuleSpec(name, None), []
        vars(made).update(attributes)
        sys.modules[name] = made
    # Megatron asked for mamba_ssm when it was imported.
    for name in [
        name for name in sys.modules if name.startswith(("megatron.core.ssm.mamba", "megatron.core.models.mamba"))
    ]:
        parent, _, last = name.rpartition(".")
        vars(sys.modules.get(parent, made)).pop(last, None)
        del sys.modules[name]
    block = importlib.import_module("megatron.core.ssm.mamba_block")
    # As scripts do, before their flags are parsed.
    importlib.import_module("megatron.core.models.mamba.mamba_layer_specs")
    if not isinstance(importlib.import_module("megatron.core.extensions.transformer_engine").TELinear, type):
        # The final norm of all its stacks is Transformer Engine's, which is not installed.
        vars(block)["TENorm"] = importlib.import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm
    hybrid_spec = local_spec()


def local_spec() -> Any:
    """Megatron's hybrid stack with its layers in torch, norms by themselves."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm.mamba_block import MambaStack, MambaStackSubmodules
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec as Spec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

    mixer = Spec(MambaMixer, submodules=MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    heads = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear, core_attention=DotProductAttention, linear_proj=RowParallelLinear
    )
    attention = Spec(SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=heads)
    mlp = Spec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    norm, add = WrappedTorchNorm, get_bias_dropout_add

    def after(kind: Any, **parts: Any) -> Any:
        return Spec(kind, submodules=TransformerLayerSubmodules(**parts))

    layers = MambaStackSubmodules(
        mamba_layer=Spec(MambaLayer, submodules=MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=add)),
        attention_layer=after(TransformerLayer, input_layernorm=norm, self_attention=attention, self_attn_bda=add),
        mlp_layer=after(MLPLayer, pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=add),
        moe_layer=after(TransformerLayer, pre_mlp_layernorm=norm, mlp=get_moe_module_spec(False, 4), mlp_bda=add),
    )
    return Spec(MambaStack, submodules=layers)


def build(config: Any, pattern: str, engine: bool, keywords: dict[str, Any]) -> Any:
    """A model whose layers are those of a pattern; `engine`: by Megatron's own spec, of Transformer Engine's layers."""
    from megatron.core.models.mamba import MambaModel
    from megatron.core.models.mamba.mamba_layer_specs import mamba_stack_spec

    spec = mamba_stack_spec if engine else local_spec()
    return MambaModel(config, spec, hybrid_override_pattern=pattern, **keywords)
