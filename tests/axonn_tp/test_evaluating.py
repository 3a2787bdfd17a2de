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


class Momentum(nn.Module):
    """Averages a teacher, counts, keeps a queue and remembers in its forward, as momentum encoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("queue", torch.zeros(4, 2))
        self.register_buffer("mean", torch.zeros(2))
        self.last = torch.zeros(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                p.data.lerp_(q, 0.5)
            self.queue[: len(tokens)] = tokens
        self.calls += 1
        self.mean = self.mean + tokens.mean(0)
        self.last = self.student(tokens).detach()
        return self.last + self.teacher(tokens)


def test_what_a_forward_changes_is_as_before() -> None:
    model = Momentum()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    held, last = {name: id(tensor) for name, tensor in model.named_buffers()}, model.last
    with torch.no_grad(), evaluating(model):
        model(torch.ones(3, 2))
        model(torch.ones(3, 2))
        assert model.calls == 2
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert {name: id(tensor) for name, tensor in model.named_buffers()} == held and model.last is last


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
