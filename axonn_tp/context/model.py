"""A model that knows nothing of shared sequences, on shares of them.

Its forward takes whole arguments, the same on all ranks that share a sequence, and computes on this rank's tokens. What looks
across tokens is replaced there: torch's scaled_dot_product_attention and HF's attention by `attend`, positions counted by
``torch.arange(tokens)`` by this rank's places, and cross-entropy by that of all ranks' tokens. Whatever else looks across tokens
is found by running the first batch whole, and the first that is padded in front, and refused by its module's name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from axonn_tp.comm.overlap import in_backward
from axonn_tp.context import huggingface
from axonn_tp.context.calls import Call, main_input
from axonn_tp.context.recomputed import install, on
from axonn_tp.context.shared import AXIS
from axonn_tp.context.sums import computed_in, current, sharing
from axonn_tp.context.verify import verify
from axonn_tp.grid.mesh import Mesh

_FLASH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_ROUTER, _KEPT = "output_router_logits", "logits_to_keep"


@dataclass(frozen=True)
class Part:
    """Which layers a model has: all, or as a pipeline's stage those between others.

    Attributes:
        tokens: of a sequence, where what the layers are given are this rank's shares; None: it is whole.
        last: what they give is made whole; else it stays shares.
    """

    tokens: int | None = None
    last: bool = True


class SharedSequences:
    """The state that the modules of a model share while sequences lie on several ranks.

    Args:
        model: the model.
        mesh: the mesh, whose ranks of ``"sequence"`` share sequences.
        how: see `Shared`.
        verify: run the first batch whole as well, and the first that is padded in front, has other arguments, or whose shares are padded.

    Attributes:
        now: the last call, whose recomputation in backward may be under way.
        part: which layers the model has.
        aside: a context in which the model is compared with itself, without what no rounding may change, such as routing.
        defaults: arguments that go with shares: none of HF's caches, beside which its models do not see that sequences are packed.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, how: str | None, verify: bool) -> None:
        self.mesh, self.how, self._verify, self._verified = mesh, how, verify, set[int]()
        self._verifying = False
        self.now: Call | None = None
        self.part = Part()
        self.aside: Callable[[], AbstractContextManager] = nullcontext
        self.published = huggingface.adopt(model)
        self.defaults = {"use_cache": False} if huggingface.takes(self.published, model, "use_cache") else {}
        self._places = huggingface.takes(self.published, model, "position_ids")
        if self.published is not None:
            huggingface.join_routers(self.published, model)
        self._names = [name for name in inspect.signature(model.forward).parameters]
        self._entered: list[AbstractContextManager | None] = []
        self._counted: dict[tuple[int, bool], int] = {}
        self._attended: list[int] | None = None

    def run(self, model: nn.Module, forward: Callable, inputs: tuple, keywords: dict[str, Any]) -> Any:
        """The model's output for whole arguments, computed on shares of their tokens."""
        arguments = dict(zip(self._names, inputs, strict=False)) | keywords
        main = main_input(arguments)
        if main is None or arguments.get("past_key_values") is not None or arguments.get("use_cache"):
            return self.whole(forward, model, inputs, keywords)
        keywords, kept = self._with_all_logits(keywords)
        arguments |= keywords
        part = self.part
        call = Call.of(main, self.mesh, self.how, part.tokens)
        kinds = frozenset({call.kind}) if part.tokens is not None else call.check_same(arguments)
        # Places that a model takes from its mask go wrong only where padding comes first, a loss only where there are labels, or shares are padded.
        if self._verify and not self._verifying and not kinds <= self._verified:
            self._verifying, self.part = True, Part()
            self.forget()
            try:
                with torch.no_grad():
                    first = inputs if part.tokens is None else call.whole(inputs)
                verify(self, model, forward, first, keywords, self._names)
            finally:
                self._verifying, self.part = False, part
            self._verified |= kinds
        if part.tokens is None:
            inputs, keywords = self._shares(call, arguments, inputs, keywords)
        else:
            call.pack(None, None)
        self.now = call
        with self.active():
            output = forward(model, *inputs, **keywords)
            output = huggingface.joined(call, output) if part.last else output
        output = huggingface.with_logits_at(output, kept)
        # Code may count places by what it is given, and in training alone.
        counted = self._counted.setdefault((call.kind, model.training), call.counted)
        if call.counted != counted:
            raise ValueError(
                f"{type(model).__name__} asks for the places of its tokens by torch.arange({call.share}) {call.counted} times, and asked "
                f"{counted} times in its first batch: one of its other sizes is {call.share} too; use another length of sequences"
            )
        self._check_attention(call, model)
        return output

    def _check_attention(self, call: Call, model: nn.Module) -> None:
        """Refuse keys of something else than the tokens, of which there are as many as of a share by chance.

        Raises:
            ValueError: in an earlier call there were others.
        """
        others, shares = self._attended or call.attended
        if call.attended[0] < others and call.attended[1] > shares:
            raise ValueError(
                f"{type(model).__name__} attends to {call.share} keys that are not its tokens, of which a rank has {call.share}, too, and nobody can tell "
                "them from these; use another length of sequences"
            )
        self._attended = self._attended or call.attended

    def _with_all_logits(self, keywords: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        """Arguments by which an HF model gives the logits of all tokens, and at which of them it was to; 0 for all."""
        kept = keywords.get(_KEPT, 0)
        if self.published is None or keywords.get("labels") is not None or not isinstance(kept, (int, Tensor)):
            return keywords, 0
        return keywords | {_KEPT: 0} if _KEPT in keywords else keywords, kept

    def forget(self) -> None:
        """Let the next call be the first."""
        self._counted.clear()

    def whole(self, forward: Callable, model: nn.Module, inputs: tuple, keywords: dict[str, Any]) -> Any:
        """The model's output, computed on all tokens by every rank."""
        with self._apart():
            return forward(model, *inputs, **keywords)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        before, self.now = self.now, None
        self._entered.append(None)
        try:
            with sharing(None, self._apart), huggingface.stock(self.published):
                yield
        finally:
            self._entered.pop()
            self.now = before

    def _shares(
        self, call: Call, arguments: dict[str, Any], inputs: tuple, keywords: dict[str, Any]
    ) -> tuple[tuple, dict[str, Any]]:
        if not self.published:
            call.pack(None, None)
            return call.cut(inputs), call.cut(keywords)
        mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            raise ValueError(
                "attention_mask is to be (samples, tokens) where ranks share sequences; leave it out, and pack by position_ids"
            )
        asked = arguments.get(_ROUTER)
        asked = any(getattr(config, _ROUTER, False) for config, _ in self.published.configs) if asked is None else asked
        if positions is None and any(name in arguments for name in _FLASH):
            raise ValueError(f"{' and '.join(_FLASH[:2])} need position_ids beside them where ranks share sequences")
        call.pack(mask, positions)
        if mask is None and call.causal_documents is not None and self._caches(arguments):
            raise ValueError(
                "position_ids pack several sequences in one, and config.use_cache is true, beside which HF's models attend across them in one "
                "process; set config.use_cache = False"
            )
        call.labels = arguments.get("labels")
        cut = {name: call.cut(value) for name, value in arguments.items() if name not in _FLASH}
        # A loss of how tokens spread over the experts reads it beside `huggingface.with_routers`.
        read = asked and len(self.published.models) > 1
        cut |= {name: mask if read else None for name in ("attention_mask",) if name in arguments}
        call.label_share = cut.get("labels")
        if positions is None and self._places:
            cut["position_ids"] = call.places[None]
        cut |= self.defaults
        given = [name for name, _ in zip(self._names, inputs, strict=False)]
        return tuple(cut.pop(name) for name in given), huggingface.shifted_for_head(call, cut)

    def _caches(self, arguments: dict[str, Any]) -> bool:
        """True if the model would make a cache in one process."""
        assert self.published is not None
        if not self.defaults or arguments.get("use_cache") is not None or arguments.get(huggingface.FUSED):
            return False
        recomputed = any(
            getattr(one, "gradient_checkpointing", False) and one.training for one in self.published.models
        )
        return not recomputed and any(getattr(config, "use_cache", False) for config, _ in self.published.configs)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, what is computed is on shares of tokens."""
        call = self.now
        assert call is not None
        with on(call):
            self._entered.append(None)
            try:
                yield
            finally:
                self._entered.pop()

    # A module outside of the model's forward: recomputed in backward, or called by itself, as PEFT generates, on all tokens

    def enter(self) -> None:
        """A module's forward begins."""
        inside: AbstractContextManager | None = None
        if not self._entered:
            # What torch's checkpoints compute again is on its own tokens (`recomputed`); others' are on those of the last call.
            again, known = in_backward(), computed_in() is not None
            if not again or (known and current() is None):
                inside = self._apart()
            elif not known and self.now is not None:
                inside = self.active()
        if inside is not None:
            inside.__enter__()
        self._entered.append(inside)

    def leave(self) -> None:
        """A module's forward has ended."""
        inside = self._entered.pop()
        if inside is not None:
            inside.__exit__(None, None, None)


def _enter(module: nn.Module, inputs: tuple) -> None:
    module.axonn_sequences.enter()  # type: ignore[operator, union-attr]


def _leave(module: nn.Module, inputs: tuple, output: Any) -> None:
    module.axonn_sequences.leave()  # type: ignore[operator, union-attr]


def share_sequences(model: nn.Module, mesh: Mesh, how: str | None = None, verify: bool = True) -> None:
    """Have a model compute on this rank's tokens of each sequence, in place; see the module's text.

    Args:
        model: a model whose main input is (samples, tokens, …).
        mesh: the mesh.
        how: see `Shared`.
        verify: refuse a model that computes something else so, when it is called first.
    """
    if mesh.size(AXIS) == 1 or hasattr(model, "axonn_sequences"):
        return
    install()
    state = SharedSequences(model, mesh, how, verify)
    for module in model.modules():
        module.axonn_sequences = state  # type: ignore[assignment]
        # Its class becomes a subclass of the same name, so that hooks of the model see whole arguments.
        if module is not model and any(True for _ in module.children()):
            module.register_forward_pre_hook(_enter, prepend=True)  # before what asks for the call
            module.register_forward_hook(_leave, always_call=True)
    kind = type(model)
    original = kind.forward

    @wraps(original)
    def forward(self: nn.Module, *inputs: Any, **keywords: Any) -> Any:
        return self.axonn_sequences.run(self, original, inputs, keywords)  # type: ignore[operator, union-attr]

    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, **same})
    huggingface.share_own_forward(model)
