"""The mixture-of-experts layer under tensor × expert × data parallelism (000, section 7.1)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from axonn_tp.comm.clipping import measure_alike
from axonn_tp.comm.collectives import gather_from, gather_to, scatter_from, split_to
from axonn_tp.context.sums import Tokens, current, of_all, sharing
from axonn_tp.grid.mesh import Axes, Mesh
from axonn_tp.layers.boundary import share_again, whole_activation
from ted_moe.agreement import Agreement, begin_forward, same_seed, watch_outputs
from ted_moe.alike import facts_of, require_alike, sizes_problem
from ted_moe.dispatch import as_trained, combine, dispatch, exchange_in_turn, slots_of
from ted_moe.dropless import through_experts
from ted_moe.experts import plan_expert, split_expert
from ted_moe.gating import Gate, Routes, number_of, routes_to, same_on_replicas
from ted_moe.grouped import run, run_each
from ted_moe.own_calls import take_over
from ted_moe.topology import Groups

_MARKS = ("allreduce", "group_name", "ted_apart", "ted_split", "tensor_model_parallel")
"""Attributes that decide over which ranks a parameter's gradient is summed, and how norms count it."""


class MoE(nn.Module):
    """DeepSpeed-MoE's layer, with its arguments, results and parameter names, under tensor × expert × data parallelism.

    Tensor ranks are given the same tokens and give back the same. Each rank keeps ``num_experts / ep_size`` experts,
    split over the tensor ranks as Megatron splits a feed-forward block; an expert in which no pair of linears is found
    is whole on each of them.

    Args:
        hidden_size: features of a token, M.
        expert: the module that every expert is a copy of; works token by token on (..., M).
        num_experts: experts in all, E.
        ep_size: ranks among which they are dealt out; `groups`' expert axis.
        k: experts a token.
        capacity_factor: slots an expert, as a multiple of its even share, in training.
        eval_capacity_factor: the same in evaluation.
        min_capacity: at least so many slots.
        use_residual: add a dense copy of the expert, mixed by a learnt coefficient (arXiv 2201.05596).
        noisy_gate_policy: "Jitter", "RSample" or None.
        drop_tokens: whether tokens beyond the capacity are passed by; else the capacity is what the fullest expert needs.
        use_rts: with k = 1, which tokens find room is drawn by lot; else `torch.topk` of equals decides, as in DeepSpeed.
        enable_expert_tensor_parallelism: there for DeepSpeed's sake: the topology decides.
        top2_2nd_expert_sampling: with k = 2, noise on the second choice.
        groups: the process groups; None: this rank alone.
        duplicate_token_dropping: tensor ranks send a share of the tokens each, not all the same ones (section 7.3.1).
        fused: where a drop follows an all-reduce, the two are one reduce-scatter.
        dropless: every token finds room, and no slot is padded: `drop_tokens=False` by uneven all-to-alls. Capacities, and
            `drop_tokens`, have no effect.
        overlap_degree: slices of the slots; while the experts work on one, the all-to-all of the next is under way, as that of the last
            one's results. As many bytes, in so many times as many calls. Tutel (arXiv 2206.03382) calls it so.

    Raises:
        ValueError: sizes that do not fit.
    """

    number = 0
    """In exchanges of tokens, by which ranks that call another layer see it (`Groups.enrol`)."""
    mesh: Mesh | None = None
    """The mesh of the layers around this one, where they leave activations split over the tensor ranks (`axonn_tp`)."""
    _others_train = False

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        enable_expert_tensor_parallelism: bool = True,
        top2_2nd_expert_sampling: bool = True,
        *,
        groups: Groups | None = None,
        duplicate_token_dropping: bool = True,
        fused: bool = True,
        dropless: bool = False,
        overlap_degree: int = 1,
    ) -> None:
        super().__init__()
        self.overlap_degree = overlap_degree
        problem = sizes_problem(num_experts, ep_size, overlap_degree, groups)
        try:
            self.routing = Gate(
                k,
                capacity_factor,
                eval_capacity_factor,
                min_capacity,
                noisy_gate_policy,
                drop_tokens,
                use_rts,
                top2_2nd_expert_sampling,
                dropless,
            )
        except ValueError as error:
            problem = problem or str(error)
        if problem is not None:
            require_alike(groups, {}, problem)
        self.num_experts, self.ep_size, self.use_residual = num_experts, ep_size, use_residual
        local = nn.ModuleList([copy.deepcopy(expert) for _ in range(num_experts // ep_size)])
        self.deepspeed_moe = nn.ModuleDict(
            {
                "gate": nn.ModuleDict({"wg": nn.Linear(hidden_size, num_experts, bias=False)}),
                "experts": nn.ModuleDict({"deepspeed_experts": local}),
            }
        )
        for parameter in local.parameters():
            parameter.allreduce, parameter.group_name = False, f"ep_size_{ep_size}"  # type: ignore[attr-defined]
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)
        self._spread(groups, duplicate_token_dropping, fused)

    def __deepcopy__(self, memo: dict[int, Any]) -> MoE:
        """A copy, whose gradients are summed and measured as this layer's are; torch's copies of parameters lose their marks."""
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        for parameter, copied in zip(self.parameters(), made.parameters(), strict=True):
            vars(copied).update({mark: value for mark, value in vars(parameter).items() if mark in _MARKS})
            measure_alike(parameter, copied)
        return made

    def _spread(
        self, groups: Groups | None, duplicate_token_dropping: bool, fused: bool, already_split: bool = False
    ) -> None:
        """Give replicas the same weights, and tensor ranks their shares of the experts, which may be `already_split`."""
        sizes = {"num_experts": self.num_experts, "ep_size": self.ep_size, "use_residual": self.use_residual}
        sizes |= {"hidden_size": self.gate.in_features, "overlap_degree": self.overlap_degree, "fused": fused}
        sizes |= {"duplicate_token_dropping": duplicate_token_dropping, **vars(self.routing)}
        require_alike(groups, sizes if already_split else {**sizes, **dict(facts_of(self.local[0]))})
        self.duplicate_token_dropping = duplicate_token_dropping
        self.groups: Axes = Alone() if groups is None else groups
        self.experts_split = groups is not None and groups.topology.expert_tensor_parallel
        self.already_split = already_split
        self._seed = None if groups is None else same_seed(groups)
        if groups is not None:
            self.number = groups.enrol(f"number {len(groups.mixtures) + 1}")
            self._agree(groups)
        axes = self.groups if self.experts_split and not already_split else Alone()
        plan = plan_expert(self.local[0], self.gate.in_features, axes, fused and duplicate_token_dropping)
        self.fused = plan.fused
        for expert in self.local:
            split_expert(expert, plan, axes)
        if groups is not None and (groups.size("expert") > 1 or plan.layers):
            for parameter in self.local.parameters():
                parameter.ted_apart = True  # type: ignore[attr-defined]
            take_over()
        if already_split and self.groups.size("tensor") > 1:
            watch_outputs(self.local[0], self.groups)  # type: ignore[arg-type]

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Send every token through its experts.

        Args:
            hidden_states: (..., M), the same on all tensor ranks; or split over them as `mesh` says, and so is the output then.
            used_token: one number a token; zero: it goes nowhere. With k = 1.

        Returns:
            The output, of the input's shape; l_aux, a scalar; exp_counts, how many of this rank's tokens asked for each expert, or
            where ranks share sequences, found room in it.
            The last two are in `deepspeed_moe.l_aux` and `deepspeed_moe.exp_counts` until the next forward, too.

        Raises:
            ValueError: tensor ranks were not given the same tokens; on all ranks that they would exchange them with.
        """
        shared = current()
        with sharing(None):
            if self.mesh is None:
                return self._mix(hidden_states, used_token, shared)
            whole = whole_activation(hidden_states, self.mesh, self.gate.in_features)
            output, l_aux, exp_counts = self._mix(whole, used_token, shared)
            return share_again(output, hidden_states, self.mesh), l_aux, exp_counts

    @torch.compiler.disable  # ranks ask each other, and decide by the answers; what is around is compiled
    def _mix(
        self, hidden_states: Tensor, used_token: Tensor | None, shared: Tokens | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        draw = partial(same_on_replicas, seed=self._seed)
        logits = F.linear(self.routing.jitter(tokens, self.training, draw), self.gate.weight.float())
        drawn = number_of(logits) if self.routing.random(self.training) and self.groups.size("tensor") > 1 else 0
        largest = partial(self._largest, tokens, drawn)
        if shared is not None and len(logits) == shared.rows:
            room, routes = None, self._routed_together(logits, used_token, shared, largest, draw)
        else:
            room = self._start_agreeing(tokens, drawn)
            routes = self.routing(logits, self.training, used_token, largest, draw)
        layer: Any = self.deepspeed_moe
        layer.l_aux, layer.exp_counts = routes.l_aux, routes.exp_counts
        output = self._through_experts(tokens, routes, room).reshape(hidden_states.shape)
        if self.use_residual:
            dense = self.mlp(hidden_states)
            dense = dense[0] if isinstance(dense, tuple) else dense
            share = F.softmax(self.coefficient(hidden_states), dim=-1)
            output = output * share[..., 0:1] + dense * share[..., 1:]
        return output, routes.l_aux, routes.exp_counts

    def _routed_together(
        self,
        logits: Tensor,
        used_token: Tensor | None,
        shared: Tokens,
        largest: Callable[[Tensor], int],
        draw: Callable[[Tensor], torch.Generator],
    ) -> Routes:
        """This rank's routes where ranks share sequences: their tokens are routed as those of one rank, by logits of all of them."""
        used = None if used_token is None else shared.all_rows(used_token.reshape(-1, 1)).flatten()
        whole = self.routing(shared.all_rows(logits), self.training, used, int, draw)
        own, padding = shared.own_rows(logits.device)
        experts = whole.experts[:, own].masked_fill(padding, -1)
        weights = whole.weights[:, own].masked_fill(padding, 0)
        routes = routes_to(experts.t(), weights.t(), self.num_experts)
        capacity = routes.capacity if self.routing.dropless else max(largest(routes.exp_counts.max()), 1)
        return replace(routes, capacity=capacity, l_aux=of_all(whole.l_aux, shared))

    @property
    def gate(self) -> nn.Linear:
        """Whose outputs the tokens are routed by."""
        return self.get_submodule("deepspeed_moe.gate.wg")  # type: ignore[return-value]

    @property
    def local(self) -> nn.ModuleList:
        """This rank's experts."""
        return self.get_submodule("deepspeed_moe.experts.deepspeed_experts")  # type: ignore[return-value]

    def _start_agreeing(self, tokens: Tensor, drawn: int) -> Agreement | None:
        """Begin to ask the block's ranks, which may have other numbers of tokens, for the largest capacity, where it is known."""
        capacity = self.routing.capacity(len(tokens), self.num_experts, self.training)
        return None if capacity is None else Agreement(capacity, tokens, self.groups, drawn, self.number, self._trained)

    @property
    def _trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.local.parameters())

    def _through_experts(self, tokens: Tensor, routes: Routes, room: Agreement | None) -> Tensor:
        """Run the experts on the tokens, S × M, wherever these experts are; S × M again."""
        groups, experts = self.groups, list(self.local)
        ranks = groups.size("tensor")
        # Where experts are not split, tensor ranks that sent the same tokens would count them twice.
        drop = ranks > 1 and (self.duplicate_token_dropping or not self.experts_split)
        gathered = drop and self.experts_split
        if self.routing.dropless:
            run_all = partial(run, experts)
            return through_experts(
                tokens,
                routes,
                run_all,
                groups,
                drop,
                gathered,
                self.fused,
                self.number,
                self._trained,
                self.overlap_degree,
            )
        begin_forward(groups, tokens.device, partial(_meet, groups, tokens.new_zeros(0, tokens.shape[1])))
        # Tokens were routed by this rank's own capacity, as stock DeepSpeed's; slots beyond it stay empty.
        capacity = routes.capacity if room is None else room.wait()
        trained = self._others_train if room is None else room.trained
        shares = ranks if drop else 1
        slices = max(min(self.overlap_degree, -(-capacity // shares)), 1) if self.ep_size > 1 else 1
        shares *= slices
        capacity = -(-capacity // shares) * shares
        slots = slots_of(routes, self.num_experts, capacity, shares)
        rows = dispatch(tokens, slots, self.num_experts * capacity, groups, drop)
        parts = rows.view(slices, self.num_experts, -1, rows.shape[1]).unbind()
        work = partial(self._on_slice, experts, gathered, trained)
        back = exchange_in_turn(parts, work, groups, [None] * slices, [None] * slices)
        whole = back[0] if slices == 1 else torch.cat(back)
        return combine(gather_from(whole, groups, "tensor", 0) if drop else whole, slots, routes.weights)

    def _on_slice(self, experts: list[nn.Module], gathered: bool, trained: bool, _: int, rows: Tensor) -> Tensor:
        """Run this rank's experts on a slice of the slots, as it came from all ranks: E × slots × M, and so is the result."""
        there = rows.unflatten(0, (self.ep_size, len(experts)))
        if gathered:
            there = (gather_to if self.fused else gather_from)(there, self.groups, "tensor", 0)
        by_expert = there.transpose(0, 1)
        shape = by_expert.shape[1:3]
        parts = run_each(experts, by_expert.flatten(0, 2), [shape.numel()] * len(experts))
        output = as_trained(torch.stack([part.unflatten(0, shape) for part in parts], dim=1), trained)
        if gathered:
            output = (scatter_from if self.fused else split_to)(output, self.groups, "tensor", 0)
        return output.flatten(0, 1)

    def _largest(self, tokens: Tensor, drawn: int, count: Tensor) -> int:
        asked = Agreement(int(count), tokens, self.groups, drawn, self.number, self._trained)
        largest, self._others_train = asked.wait(), asked.trained
        return largest

    def _agree(self, groups: Groups) -> None:
        """Give replicas the weights of the first of them."""
        experts = {id(parameter) for parameter in self.local.parameters()}
        # The dense copy is made as the experts are.
        made = experts | ({id(parameter) for parameter in self.mlp.parameters()} if self.use_residual else set())
        apart = made if self.already_split else set() if self.experts_split else experts
        for parameter in self.parameters():
            among = ["expert_data" if id(parameter) in experts else "data"]
            among += [] if id(parameter) in apart else ["tensor"]
            for axis in among:
                if groups.size(axis) > 1:
                    whole = parameter.data.to(groups.sender(axis, parameter.device)).contiguous()
                    dist.broadcast(whole, group=groups.group(axis), group_src=0)
                    parameter.data.copy_(whole)


def _meet(groups: Any, nothing: Tensor, number: int) -> None:
    """The question of a mixture without tokens."""
    Agreement(0, nothing, groups, 0, number).wait()


class Alone:
    """Axes of size 1."""

    def group(self, axis: str) -> dist.ProcessGroup:
        """There is none."""
        raise KeyError(axis)

    def size(self, axis: str) -> int:
        """1."""
        return 1

    def rank(self, axis: str) -> int:
        """0."""
        return 0
