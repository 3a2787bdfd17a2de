"""The FusedAdam of apex and Transformer Engine, which count steps in groups and keep arguments as attributes, by a double on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import samo
from axonn_plugins.config import ConfigError
from axonn_plugins.hosts.deepspeed.optim.wrapped import factory_of
from tests.samo.reference import Masked
from tests.samo.test_optimizer import pair, train


class FusedAdam(torch.optim.Optimizer):
    """What both document: `bias_correction` and the like in defaults, a group's `step`, moments by parameter."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        master_weights: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self.adam_w_mode, self.master_weights = 1 if adam_w_mode else 0, master_weights
        self.name_to_dtype_map = {"exp_avg": exp_avg_dtype, "exp_avg_sq": torch.float32}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for weights in group["params"]:
                if weights.grad is None:
                    continue
                state, gradient = self.state[weights], weights.grad
                if not state:
                    state.update(exp_avg=torch.zeros_like(weights), exp_avg_sq=torch.zeros_like(weights))
                if not self.adam_w_mode:
                    gradient = gradient + group["weight_decay"] * weights
                first, second = group["betas"]
                mean = state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first) / (1 - first ** group["step"])
                square = state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                update = mean / ((square / (1 - second ** group["step"])).sqrt() + group["eps"])
                if self.adam_w_mode:
                    update = update + group["weight_decay"] * weights
                weights.sub_(group["lr"] * update)


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_copy_steps_in_tiles_as_the_original(decoupled: bool) -> None:
    make = partial(FusedAdam, lr=1e-2, weight_decay=0.1, adam_w_mode=decoupled)
    copied = factory_of(make([torch.nn.Parameter(torch.zeros(3))]), "samo")
    ours, dense, masks = pair(0.5)
    mine = train(ours, samo.Optimizer(copied, ours, masks, tile_size=100).step)
    assert mine == pytest.approx(train(dense, Masked(make, dense, masks).step), rel=1e-6)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"master_weights": True}, "FusedAdam has master_weights = True, and samo keeps .*; leave it out"),
        ({"exp_avg_dtype": torch.float16}, "FusedAdam has exp_avg_dtype = torch.float16, and samo keeps"),
    ],
)
def test_what_it_would_keep_beside_its_states_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        factory_of(FusedAdam([torch.nn.Parameter(torch.zeros(3))], **given), "samo")


class Signed(torch.optim.SGD):
    """With an argument that is neither among its defaults, nor an attribute of its name."""

    def __init__(self, params: Any, by_sign: bool = False) -> None:
        super().__init__(params, lr=0.1)
        self._sign = by_sign


def test_a_copy_has_settings_that_are_attributes_alone() -> None:
    copied = factory_of(Signed([torch.nn.Parameter(torch.zeros(3))], by_sign=True), "samo")
    made: Any = copied([{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.3}])
    assert made._sign and made.param_groups[0]["lr"] == 0.3 and len(made.param_groups[0]["params"][0]) == 2
