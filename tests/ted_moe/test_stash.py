"""Communication-aware checkpoints in checkpoints: each collective happens once, whatever the form of either."""

import gc
import weakref
from collections import Counter
from itertools import product

import deepspeed
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import ted_moe
from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.ted.stock import EXPERTS, FEATURES, Plain, groups_of
from ted_moe import Stashing, Topology
from tests.distributed import BACKEND, run_ranks
from tests.matrix import thorough
from tests.ted_moe.stock import CHECKPOINTS

LAYERS = 3
FORMS = list(product(CHECKPOINTS, CHECKPOINTS))
"""Of the outer and the inner checkpoint."""
IN_TURN = [
    (form, list(CHECKPOINTS)[(turn + more) % len(CHECKPOINTS)])
    for more in (0, 1)
    for turn, form in enumerate(CHECKPOINTS)
]
"""Each form within itself, and within one other."""


class Nest:
    """Three layers: a checkpoint around the first two, in it one around the second, and the third in one of its own.

    Args:
        layers: of them.
        forms: of the outer and the inner checkpoint.
        wrap: what is done to a function before it is checkpointed.
    """

    def __init__(self, layers, forms, wrap):
        self.layers, self.wrap = layers, wrap
        self.outer, self.inner = (CHECKPOINTS[form] for form in forms)

    def call(self, number, tokens):
        output, l_aux, _ = self.layers[number](tokens)
        return tokens + output + l_aux

    def both(self, tokens):
        return self.inner(self.wrap(lambda given: self.call(1, given)), self.call(0, tokens))

    def __call__(self, tokens):
        return self.inner(self.wrap(lambda given: self.call(2, given)), self.outer(self.wrap(self.both), tokens))


def nested(chosen):
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a kernel that nothing here needs
    deepspeed.init_distributed(BACKEND)
    deepspeed.checkpointing.configure(None)
    groups = groups_of(Topology(4, 2, 2))
    torch.manual_seed(0)
    layers = torch.nn.ModuleList(
        ted_moe.MoE(FEATURES, Plain(), EXPERTS, 2, k=2, groups=groups, top2_2nd_expert_sampling=False)
        for _ in range(LAYERS)
    )
    torch.manual_seed(groups.rank("data"))
    given = torch.randn(16, FEATURES)

    def gradients(run):
        layers.zero_grad()
        tokens = given.clone().requires_grad_()
        with Ledger(groups.axis_names()) as ledger:
            run(tokens * 1.0).square().sum().backward()
        return [tokens.grad, *(p.grad for p in layers.parameters())], Counter(e.name for e in ledger.entries)

    def plain(tokens):
        for number in range(LAYERS):
            tokens = Nest.call(made, number, tokens)
        return tokens

    made = Nest(layers, ("reentrant", "reentrant"), Stashing)
    wanted, found = gradients(plain)
    counts = {"no checkpoint": found}
    for forms in chosen:
        kept = weakref.WeakSet()

        def wrap(function, kept=kept):
            stashing = Stashing(function)
            kept.add(stashing)
            return stashing

        mine, counts[forms] = gradients(Nest(layers, forms, wrap))
        for one, other in zip(mine, wanted, strict=True):
            torch.testing.assert_close(one, other)
        for layer in layers:
            layer.deepspeed_moe.l_aux = None  # whose graph may be that of a recomputation
        gc.collect()
        assert not sum(stashing.nbytes for stashing in kept), forms
    return counts


def persistent():
    """One object for the inner checkpoint of every step."""
    groups = groups_of(Topology(4, 2, 2))
    torch.manual_seed(0)
    layer = ted_moe.MoE(FEATURES, Plain(), EXPERTS, 2, k=2, groups=groups)
    checkpoint = CHECKPOINTS["not reentrant"]
    inner = Stashing(lambda tokens: layer(tokens)[0])

    def outer(tokens):
        return tokens + layer(checkpoint(inner, tokens))[0]

    found = []
    for step in range(2):
        torch.manual_seed(10 * step + groups.rank("data"))
        tokens = torch.randn(16, FEATURES)
        grads = []
        for run in (lambda t: checkpoint(Stashing(outer), t), lambda t: t + layer(layer(t)[0])[0]):
            layer.zero_grad()
            with Ledger(groups.axis_names()) as ledger:
                run(tokens.clone().requires_grad_()).square().sum().backward()
            grads.append([p.grad for p in layer.parameters()])
            found.append(Counter(entry.name for entry in ledger.entries))
        torch.testing.assert_close(*grads)
    return found


@pytest.mark.parametrize("chosen", [IN_TURN[4:], thorough(IN_TURN), thorough(FORMS)], ids=len)
def test_each_collective_happens_once_whatever_is_nested_in_what(chosen):
    for counts in run_ranks(nested, 4, chosen):
        once = counts.pop("no checkpoint")
        assert once["all_to_all expert"] == 4 * LAYERS
        assert counts.keys() == set(chosen)
        for forms, found in counts.items():
            assert found == once, forms


def test_an_object_may_serve_one_checkpoint_in_every_step():
    for counts in run_ranks(persistent, 4):
        assert all(found == counts[0] for found in counts) and counts[0]["all_to_all expert"] == 8


def test_a_recomputation_is_under_the_first_calls_autocast():
    """DeepSpeed's own checkpoints leave it out: float32 gradients of a bfloat16 forward."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
    types, found = [], {}
    model[0].register_forward_hook(lambda module, given, output: types.append(output.dtype))
    for name, checkpoint in {"none": lambda function, x: function(x), **CHECKPOINTS}.items():
        model.zero_grad()
        tokens = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = checkpoint(Stashing(model), tokens) * 1.0
        output.float().square().sum().backward()
        found[name] = [tokens.grad, *(parameter.grad for parameter in model.parameters())]
    assert set(types) == {torch.bfloat16}
    for grads in found.values():
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(grads, found["none"], strict=True))


def test_only_collectives_are_looked_at_and_torch_is_left_as_it_was():
    """Modes would be asked for each operator of a block."""
    before, modes = torch.ops._c10d_functional.all_reduce, []

    def block(x):
        modes.append(_get_current_dispatch_mode_stack())
        assert torch.ops._c10d_functional.all_reduce is not before
        assert torch.ops._c10d_functional.all_reduce.default is before.default
        if len(modes) > 1:
            raise KeyError("a block's error")
        return x * 2

    Stashing(block)(torch.ones(2))
    with pytest.raises(KeyError):
        Stashing(block)(torch.ones(2))
    assert modes == [[], []] and torch.ops._c10d_functional.all_reduce is before
