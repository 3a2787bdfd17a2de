"""The U-Net recipe by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from recipes.models.unet import UNet, UNetConfig, cosine_schedule, diffuse

SMALL = UNetConfig(3, 16, (1, 2, 3), 1, (1,), heads=4, groups=8, zero_init=False)


def batch(images: int, size: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    clean, noise = torch.randn(2, images, 3, size, size, dtype=torch.float64)
    t = torch.randint(1000, (images,))
    return diffuse(clean, t, noise, cosine_schedule(1000)), t, noise


def test_every_parameter_matters_and_the_time_too() -> None:
    torch.manual_seed(1)
    model = UNet(SMALL).double()
    noisy, t, noise = batch(2)
    loss = model(noisy, t, noise)
    loss.backward()
    assert torch.equal(loss, F.mse_loss(model(noisy, t), noise))
    assert all(
        p.grad is not None and p.grad.abs().max() > 0 for name, p in model.named_parameters() if "qkv.bias" not in name
    )
    assert not torch.allclose(model(noisy, t), model(noisy, t + 5))


def test_zero_initialisation_predicts_nothing_at_first() -> None:
    model = UNet(UNetConfig(3, 16, (1, 2), 1, (1,), 2, 8))
    assert model(torch.randn(1, 3, 8, 8), torch.tensor([3])).abs().max() == 0


def test_schedule_keeps_all_signal_at_first_and_none_at_last() -> None:
    signal = cosine_schedule(100)
    assert signal.shape == (100,) and (signal[1:] < signal[:-1]).all()
    assert signal[0] > 0.999 and signal[-1] < 1e-6


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"groups": 24}, "groups = 24 does not divide the 128 features of level 0"),
        ({"heads": 3}, "heads = 3 does not divide the 128 features of level 0"),
        ({"attention_levels": (4,)}, "names level 4, but there are 4"),
    ],
)
def test_sizes_that_cannot_be(options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        UNetConfig(**options)
