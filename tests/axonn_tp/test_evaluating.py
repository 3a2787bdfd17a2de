"""What a model notes in evaluation mode is forgotten behind a run of ours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from axonn_tp.plan.evaluating import evaluating


class Router(nn.Module):
    """Takes its capacity from the first batch, and from each in evaluation mode, as NLLB-MoE's does."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity: int | None = None
        self.inner = nn.Dropout(0.5)

    def forward(self, tokens: Tensor) -> Tensor:
        if self.capacity is None or not self.training:
            self.capacity = len(tokens)
        return self.inner(tokens)


@pytest.mark.parametrize("fails", [False, True])
def test_modes_and_notes_are_those_of_before(fails: bool) -> None:
    model = nn.Sequential(Router(), Router().eval())
    with pytest.raises(RuntimeError) if fails else torch.no_grad(), evaluating(model):
        assert not any(module.training for module in model.modules())
        model(torch.ones(3, 2))
        if fails:
            raise RuntimeError
    assert [module.training for module in model.modules()] == [True, True, True, False, False]
    assert [router.capacity for router in model] == [None, None]
