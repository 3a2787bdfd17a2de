"""All-to-alls in slices, each under way while experts work on another: the same numbers, bytes and checkpoints, in the order that overlaps."""

from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import ted_moe
from axonn_plugins.observe.ledger import Ledger
from axonn_plugins.ted.stock import EXPERTS, FEATURES, Gated, Plain, data_tokens, groups_of
from ted_moe import Topology
from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.ted_moe.stock import compare, recomputed, topologies_of, wild_tokens

OPTIONS = [
    {"k": 1, "use_rts": False, "capacity_factor": 1.0, "min_capacity": 1},
    {"k": 2, "top2_2nd_expert_sampling": False, "capacity_factor": 0.9, "min_capacity": 3},
    {"k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False},
    {"k": 3, "drop_tokens": False, "dropless": True},
]
SWITCHES = [{}, {"fused": False}, {"duplicate_token_dropping": False}]


def against_stock(ranks, turns):
    """Even and wild loads, ranks without tokens, and more slices than slots."""
    cases = list(product(topologies_of(ranks), OPTIONS, (data_tokens_of, wild_tokens), (2, 3, 40)))
    for number, (topology, options, tokens, degree) in enumerate(cases):
        if number % turns:
            continue
        switches = SWITCHES[number // turns % 3] if topology.tensor > 1 else {}
        dropless = {"dropless": True} if "dropless" in options else {}
        asked = {name: value for name, value in options.items() if name != "dropless"}
        kind = (Plain, Gated)[number % 2]
        compare(topology, kind, asked, {**switches, **dropless, "overlap_degree": degree}, tokens)


def data_tokens_of(data):
    return data_tokens(data, 29, seed=4)


class Order(TorchDispatchMode):
    """When all-to-alls of floating-point numbers begin (">") and are waited for ("."), with their number, and linears run ("E")."""

    def __init__(self):
        super().__init__()
        self.seen, self.under_way, self.kept = [], {}, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name
        if name == "_c10d_functional::all_to_all_single" and args[0].is_floating_point():
            self.under_way[result.data_ptr()] = len(self.under_way)
            self.seen.append(f">{self.under_way[result.data_ptr()]}")
            self.kept.append(result)  # no other has its memory
        elif name == "_c10d_functional::wait_tensor" and args[0].data_ptr() in self.under_way:
            self.seen.append(f".{self.under_way[args[0].data_ptr()]}")
        elif name in ("aten::relu", "aten::threshold_backward"):
            self.seen.append("E")
        return result


def layer_of(groups, dropless, degree):
    torch.manual_seed(3)
    options = {"k": 2, "top2_2nd_expert_sampling": False, "groups": groups, "dropless": dropless}
    return ted_moe.MoE(FEATURES, Plain(), EXPERTS, 2, overlap_degree=degree, **options)


def ordered(dropless):
    """What forward and backward of one layer begin and wait for; its expert, if it is Plain, has one ReLU."""
    groups = groups_of(Topology(2, 1, 2))
    layer = layer_of(groups, dropless, 3).double()
    for expert in layer.local:
        expert.forward = torch.nn.Sequential(torch.nn.ReLU()).forward
    tokens = torch.randn(24, FEATURES, dtype=torch.float64, requires_grad=True)
    with Order() as order:
        output = layer(tokens)[0]
        forward = list(order.seen)
        output.square().sum().backward()
    return forward, order.seen[len(forward) :]


def counted(dropless):
    """Bytes and calls of all-to-alls of tokens, whole and in slices, of 48 tokens on each of four ranks."""
    found = []
    for degree in (1, 2):
        groups = groups_of(Topology(4, 2, 2))
        layer = layer_of(groups, dropless, degree)
        torch.manual_seed(1 + groups.rank("data"))
        tokens = torch.randn(48, FEATURES, requires_grad=True)
        with Ledger(groups.axis_names()) as ledger:
            layer(tokens)[0].square().sum().backward()
        sent = [e for e in ledger.entries if e.collective.op == "all_to_all" and e.itemsize == 4]
        found.append((len(sent), sum(e.collective.elements for e in sent)))
    return found


def checkpointed(dropless):
    """Gradients and all-to-alls with every checkpoint and place of the stash."""
    groups = groups_of(Topology(4, 2, 2))
    return {
        case: sum(e.collective.op == "all_to_all" and e.itemsize == 4 for e in entries)
        for case, entries in recomputed(layer_of(groups, dropless, 2), groups).items()
    }


def twice_differentiated(dropless):
    """The gradient of a gradient's norm, whole and in slices; and backward again through a kept graph."""
    found = []
    for degree in (1, 3):
        groups = groups_of(Topology(4, 2, 2))
        layer = layer_of(groups, dropless, degree).double()
        torch.manual_seed(1 + groups.rank("data"))
        tokens = torch.randn(24, FEATURES, dtype=torch.float64, requires_grad=True)
        loss = layer(tokens)[0].pow(3).sum()
        (first,) = torch.autograd.grad(loss, tokens, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), tokens, retain_graph=True)
        again = torch.autograd.grad(loss, [tokens, *layer.local.parameters()], retain_graph=True)
        once_more = torch.autograd.grad(loss, [tokens, *layer.local.parameters()])
        found.append([first.detach(), second, *again, *once_more])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("ranks", "turns"), [(4, 5), thorough(8, 1)])
def test_equals_stock_in_slices(ranks, turns):
    run_ranks(against_stock, ranks, ranks, turns)


@pytest.mark.parametrize("dropless", [False, True])
def test_one_slice_is_on_its_way_in_each_direction_while_experts_work(dropless):
    """Three slices, 0, 2 and 4 there, 1, 3 and 5 back; backward does in turn what forward does, with the roles changed."""
    experts = "E" * (EXPERTS // 2)
    for forward, backward in run_ranks(ordered, 2, dropless):
        assert "".join(forward) == f">0.0>1{experts}>2.1>3{experts}.2>4.3{experts}.4>5.5"
        assert "".join(backward) == f">6.6>7{experts}>8.7>9{experts}.8>10.9{experts}.10>11.11"


@pytest.mark.parametrize("dropless", [False, True])
def test_as_many_bytes_in_as_many_times_the_calls(dropless):
    for (calls, elements), (more, same) in run_ranks(counted, 4, dropless):
        assert more == 2 * calls == 8
        assert same == elements


@pytest.mark.parametrize("dropless", [False, True])
def test_checkpointed_slices_are_not_sent_again(dropless):
    for counts in run_ranks(checkpointed, 4, dropless):
        for (name, stash), number in counts.items():
            assert number == (12 if stash is None else 8), (name, stash)


@pytest.mark.parametrize("dropless", [False, True])
def test_gradients_of_gradients_and_kept_graphs(dropless):
    run_ranks(twice_differentiated, 4, dropless)


def test_no_slices_is_refused():
    with pytest.raises(ValueError, match="overlap_degree = 0 must be at least 1"):
        ted_moe.MoE(8, Plain(), 2, overlap_degree=0)
