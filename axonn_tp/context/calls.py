"""One call of a model whose sequences are shared: what this rank is given of its arguments, and what it gives back."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from axonn_tp.comm.collectives import all_gather
from axonn_tp.context.chunks import Chunks
from axonn_tp.context.shared import AXIS, Shared
from axonn_tp.grid.mesh import Mesh

_MAIN = ("input_ids", "inputs_embeds")


def main_input(arguments: Mapping[str, Any]) -> Tensor | None:
    """The argument whose dims 0 and 1 are samples and tokens; None where there is none."""
    named = [arguments[name] for name in _MAIN if isinstance(arguments.get(name), Tensor)]
    leaves = tree_leaves(list(arguments.values()))
    tensors = [value for value in leaves if isinstance(value, Tensor) and value.dim() > 1]
    return next(iter([*named, *tensors]), None)


def padded_in_front(mask: Any) -> int | None:
    """A place of (samples, tokens) where padding ends and tokens begin; None where padding is behind, or there is none."""
    if not isinstance(mask, Tensor) or mask.dim() != 2:
        return None
    valid = mask.bool()
    begins = (valid[:, 1:] & ~valid[:, :-1]).any(0).nonzero()
    return int(begins[0]) + 1 if len(begins) else None


@dataclass(eq=False)
class Call:
    """The tokens of one call.

    Attributes:
        mesh: the mesh.
        shared: how a sequence lies on its ranks.
        batch: samples.
        places: of this rank's tokens in the sequence; padding is at its last one.
        documents: (batch, padded) numbers, −1 for padding, which nobody sees, else 0; None where there is none.
        causal_documents: the same where queries see nothing after them, which hides padding at the end, with the numbers of sequences packed in one.
        labels: whole, of an HF model.
        label_share: this rank's, as the model is given them.
        counted: how often code asked for places of tokens.
        attended: how often torch's attention was given other keys than shares of tokens, and how often such shares.
        head: by what TRL's head divides its loss; None for the number of targets.
        losses: how many sums over all tokens, as of losses, the forward has made.
        kind: of its arguments, as `check_same` tells them apart, whether or not shares are padded.
    """

    mesh: Mesh
    shared: Shared
    batch: int
    places: Tensor
    documents: Tensor | None = None
    causal_documents: Tensor | None = None
    labels: Tensor | None = None
    label_share: Tensor | None = None
    counted: int = 0
    attended: list[int] = field(default_factory=lambda: [0, 0])
    head: Any = None
    losses: int = 0
    kind: int = -1

    @classmethod
    def of(cls, main: Tensor, mesh: Mesh, how: str | None, tokens: int | None = None) -> Call:
        """The call of a model on samples and tokens of `main`; where it is a share itself, of sequences of so many `tokens`."""
        batch, given = main.shape[:2]
        shared = Shared(mesh, Chunks(tokens or given, mesh.size(AXIS)), how)
        if tokens is not None and given != shared.chunks.share:
            raise ValueError(
                f"what the layers before gave, of shape {tuple(main.shape)}, is to have samples and this rank's {shared.chunks.share} of "
                f"{tokens} tokens in its first dims where ranks share sequences; have layers pass (samples, tokens, ...)"
            )
        places = shared.places(main.device)
        return cls(mesh, shared, batch, places.clamp(max=(tokens or given) - 1))

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return self.shared.chunks.tokens

    @property
    def share(self) -> int:
        """Tokens of this rank, padding included."""
        return self.shared.chunks.share

    def pack(self, mask: Tensor | None, positions: Tensor | None) -> None:
        """Note padding, true where `mask` is not, or sequences packed in one, where `positions` do not go on by 1.

        HF's models see the latter where attention is causal alone.
        """
        numbers = None
        if mask is not None:
            valid = mask.bool()
            if not valid.all():
                numbers = valid.long() - 1
                # At the end it is after all that counts.
                self.causal_documents = None if padded_in_front(mask) is None else self._padded(numbers)
        elif positions is not None and positions.dim() == 2:
            packed = (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
            self.causal_documents = self._padded(packed) if packed.any() else None
        if numbers is None and self.tokens < self.shared.chunks.padded:
            numbers = self.places.new_zeros((1, self.tokens))
        self.documents = None if numbers is None else self._padded(numbers)

    def _padded(self, numbers: Tensor) -> Tensor:
        return F.pad(numbers, (0, self.shared.chunks.padded - numbers.shape[-1]), value=-1)

    def seen(self, causal: bool) -> Tensor | None:
        """Documents that attention must know of."""
        return self.causal_documents if causal else self.documents

    def token_dim(self, shape: torch.Size, tokens: int) -> int | None:
        """Which dim of an argument is that of tokens, if one is."""
        if len(shape) > 1 and shape[1] == tokens and shape[0] in (1, self.batch):
            return 1
        return -1 if len(shape) and shape[-1] == tokens else None

    def cut(self, values: Any) -> Any:
        """This rank's tokens of a tensor that has tokens, or of all among `values`."""

        def one(value: Any) -> Any:
            dim = self.token_dim(value.shape, self.tokens) if isinstance(value, Tensor) else None
            return value if dim is None else value.index_select(dim, self.places.to(value.device))

        return tree_map(one, values)

    def without_padding(self, targets: Tensor, ignored: int) -> Tensor:
        """Targets of which those of padding are `ignored`."""
        if self.shared.chunks.padded == self.tokens or targets.numel() != self.batch * self.share:
            return targets
        padding = self.shared.places(targets.device) >= self.tokens
        return targets.reshape(self.batch, -1).masked_fill(padding, ignored).view_as(targets)

    def joined(self, output: Any) -> Any:
        """A model's output with all tokens; in training beside a loss, which is of all tokens by itself, as it is, and without gradients."""
        leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        # A penalty alone, as of routers, is added to a loss of the logits outside.
        lossless = getattr(output, "loss", None if not self.losses else output) is None
        if lossless or not any(not leaf.dim() and leaf.requires_grad for leaf in leaves):
            return self.whole(output)
        return tree_map(
            lambda value: _Apart.apply(value) if self._is_share(value) and value.requires_grad else value, output
        )

    def _is_share(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.shape[:2] == (self.batch, self.share)

    def whole(self, values: Any) -> Any:
        """With all tokens where `values` have this rank's; every rank that shares the sequences goes on with the same."""

        def one(value: Any) -> Any:
            return _Whole.apply(value, self, self.mesh.size(AXIS)) if self._is_share(value) else value

        return tree_map(one, values)

    # Tokens of all samples in one dim, as routers see them

    @property
    def rows(self) -> int:
        """This rank's tokens of all samples, padding included."""
        return self.batch * self.share

    def all_rows(self, rows: Tensor, times: int = 1) -> Tensor:
        """The rows (tokens, …) of all ranks' tokens of all samples, in the order of one process, without padding.

        Args:
            rows: (`rows`, …): this rank's.
            times: by what the gradient of this rank's rows is multiplied: 1 where each rank goes on with its own, the ranks that share
                a sequence where all of them compute the same of all.
        """
        return _Whole.apply(rows.unflatten(0, (self.batch, self.share)), self, times).flatten(0, 1)

    def own_rows(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where this rank's rows are among `all_rows`, and whether they are padding, which is at the last token."""
        first = self.tokens * torch.arange(self.batch, device=device)
        padding = (self.shared.places(device) >= self.tokens).repeat(self.batch)
        return (first[:, None] + self.places.to(device)).flatten(), padding

    def check_same(self, arguments: Mapping[str, Any]) -> frozenset[int]:
        """Refuse arguments that are not the same on all ranks that share the sequences; all ranks of z call it.

        Returns:
            Of the ranks of z, by what they go other ways through a model: which arguments are given that may have tokens, whether shares are padded,
            and whether samples are padded in front.

        Raises:
            ValueError: names the first, on all of them.
        """
        mine = {name: tuple(map(_digest, tree_leaves(value))) for name, value in arguments.items()}
        number = int.from_bytes(hashlib.sha256(repr(mine).encode()).digest()[:7], "little")
        given = sorted(name for name, value in arguments.items() if any(map(_has_dims, tree_leaves(value))))
        self.kind = 4 * zlib.crc32(repr(given).encode())
        self.kind += padded_in_front(arguments.get("attention_mask")) is not None
        kind = self.kind + 2 * (self.tokens < self.shared.chunks.padded)
        found = all_gather(torch.tensor([[number, kind]], device=self.mesh.device), self.mesh, "z")
        first = self.mesh.rank("z") // self.mesh.size(AXIS) * self.mesh.size(AXIS)
        if (found[first : first + self.mesh.size(AXIS), 0] == number).all():
            return frozenset(found[:, 1].tolist())
        everyone: list[Any] = [None] * self.mesh.size(AXIS)
        dist.all_gather_object(everyone, mine, group=self.mesh.group(AXIS))
        names = dict.fromkeys(name for found in everyone for name in found)
        odd = next((name for name in names if len({found.get(name) for found in everyone}) > 1), "order")
        raise ValueError(
            f"the model's argument {odd} is not the same on the {self.mesh.size(AXIS)} ranks that share sequences along z; feed all of them "
            'the same samples, whole, by mesh.shard_batch or a sampler over mesh.rank("readers") of mesh.size("readers")'
        )


def _has_dims(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def _digest(value: Any) -> tuple:
    """Digest of a tensor's shape and values, or of a number or word; the same on every rank."""
    if not isinstance(value, Tensor):
        return (repr(value),) if isinstance(value, (int, float, str, bool, type(None))) else (type(value).__name__,)
    flat = value.detach().reshape(-1)
    bits = flat.double().view(torch.int64) if flat.is_floating_point() else flat.long()
    weights = torch.arange(1, 2 * len(flat), 2, device=flat.device)
    return (tuple(value.shape), int((bits * weights).sum()))


class _Whole(torch.autograd.Function):
    # Where every rank goes on with the same, its gradient is one of as many that are averaged.
    @staticmethod
    def forward(ctx: Any, share: Tensor, call: Call, times: int) -> Tensor:
        ctx.call, ctx.times = call, times
        laid = all_gather(share, call.mesh, AXIS, 1)
        order = torch.tensor(call.shared.chunks.order()[: call.tokens], device=share.device)
        return laid.index_select(1, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        call: Call = ctx.call
        padding = (call.shared.places(grad.device) >= call.tokens).view(1, -1, *[1] * (grad.dim() - 2))
        return grad.index_select(1, call.places).masked_fill(padding, 0) * ctx.times, None, None


class _Apart(torch.autograd.Function):
    """This rank's tokens of what a model gives beside its loss."""

    @staticmethod
    def forward(ctx: Any, share: Tensor) -> Tensor:
        return share.view_as(share)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError(
            "a loss is computed of what the model gives beside its own loss, which are each rank's tokens alone where ranks share sequences; leave "
            "labels out, and compute the whole loss of the model's logits, which then are those of all tokens"
        )
