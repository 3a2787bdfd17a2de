"""Mixtures of HF families that nobody had in mind, with drawn sizes: loss and gradients on every layout are one process's, or the reason is named.

No family here drops tokens for want of capacity: HF's that do (Switch, NLLB) keep experts in an ``nn.ModuleDict``, which is refused by name.
"""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from tests.distributed import run_ranks
from tests.matrix import thorough
from tests.ted_moe.drawn import DRAWN
from tests.ted_moe.mixtures import LAYOUTS, before_ranks, difference

MIXING = {"shares of sequences": "cannot share sequences", "tensor and shares": "cannot share sequences"}
"""Of layers that mix tokens by other means than attention."""
ODD = {"z": "does not divide the"}
"""Of a number of experts that 2 does not divide."""
WHOLE = {
    "Dbrx": "does not give the weighted sum of what it makes of each token",
    "LongcatFlash": "holds parameters that are neither one for each of a number of experts",
    "Llama4": "its forward does not take (hidden states, expert indices, weights)",
    "JetMoe": "its forward does not take (hidden states, expert indices, weights)",
}
REFUSED = {
    "Qwen3Next": {**MIXING, **ODD},
    "Lfm2Moe": {**MIXING, **ODD},
    "Afmoe": ODD,
    **dict.fromkeys(("MiniMax", "Jamba", "NemotronH", "GraniteMoeHybrid", "Zaya"), MIXING),
    **{name: dict.fromkeys(LAYOUTS, reason) for name, reason in WHOLE.items()},
}
"""By family and layout what is said of why it is not trained so."""


def differences(name: str, layouts: tuple[str, ...]) -> dict[str, tuple[float, float] | str]:
    found: dict[str, tuple[float, float] | str] = {}
    for layout in layouts:
        try:
            found[layout] = difference(name, *LAYOUTS[layout])
        except ValueError as error:
            found[layout] = str(error)
    return found


@pytest.mark.parametrize(
    ("name", "layouts"),
    [("GraniteMoeShared", ("expert and tensor", "y and z")), *(thorough(name, tuple(LAYOUTS)) for name in DRAWN)],
    ids=lambda given: given if isinstance(given, str) else f"{len(given)} layouts",
)
def test_layouts_equal_one_process_or_are_refused(name: str, layouts: tuple[str, ...]) -> None:
    refused = REFUSED.get(name, {})
    if name not in WHOLE:
        before_ranks(name, layouts)
    for found in run_ranks(differences, 4, name, layouts):
        assert len(found) == len(layouts)
        for layout, far in found.items():
            if layout in refused:
                assert isinstance(far, str) and refused[layout] in far, (layout, far)
            else:
                assert not isinstance(far, str) and max(far) < 1e-10, (layout, far)
