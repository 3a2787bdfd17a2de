"""The ``"ted"`` key of the ``"axonn"`` block."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from axonn_plugins.config.base import Block, Size
from axonn_plugins.config.tensor_parallel import GridSize


class Ted(Block):
    """TED: mixtures of experts by tensor, expert and data parallelism (dissertation chapter 7).

    Every deepspeed.moe.layer.MoE of the model becomes TED's layer, and so do the experts of HF's and other models that are called with
    hidden states, expert indices and weights.
    """

    expert: GridSize = Field(
        "auto",
        description="Ranks that have different experts. By default what DeepSpeed's layers say (ep_size); for other models' experts the largest "
        "number that divides the experts and the ranks that read different data.",
    )
    tensor: Size = Field(
        1,
        description="Ranks that split a layer, dense or expert, as Megatron does; neighbours, which read the same data.",
    )
    expert_tensor_parallel: bool | None = Field(
        None,
        description="Whether experts, too, are split over the tensor ranks. false: tensor ranks hold different, whole experts, so that ep_size "
        "counts them, too. By default true; in a script with an mpu what its layers' enable_expert_tensor_parallelism says: true there means "
        "that the script has split them itself.",
    )
    duplicate_token_dropping: bool = Field(
        True, description="Each tensor rank sends its share of the tokens through the all-to-alls, not all of them."
    )
    fused: bool = Field(
        True,
        description="Where a drop of duplicate tokens follows an all-reduce, the two become one reduce-scatter, which moves half the bytes.",
    )
    overlap_degree: Size = Field(
        1,
        description="Slices of the tokens on their way to experts: while these work on one, the all-to-all of the next is under way, as that of "
        "the last one's results. As many bytes in so many times the calls; 2 where links are as slow as the experts, 1 where ranks wait for "
        "neither.",
    )
    dropless: bool = Field(
        False,
        description="No token is dropped and no slot padded, whatever the layers' capacities: uneven all-to-alls.",
    )
    communication_aware_checkpointing: bool = Field(
        True,
        description="In blocks under torch's or DeepSpeed's activation checkpointing, the recomputation is given what the first forward "
        "communicated.",
    )
    stash: Literal["device", "cpu"] = Field(
        "device",
        description="Where what the first forward communicated is kept until the recomputation: on the device, or in the host's (pinned) memory.",
    )
    tile_size: Size | None = Field(
        1_800_000,
        description="Under ZeRO-1 and 2, elements whose float32 gradients exist at a time in the optimizer's step, which needs 4 bytes of "
        "temporary memory for each. null: all at once, as DeepSpeed does. Where the optimizer is the suite's, as with tensor, its tiles have "
        "this size if the key is given, else 262,144 elements.",
    )
