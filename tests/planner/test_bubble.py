"""The dissertation's pipeline model, against its own numbers."""

import pytest

from axonn_plugins.planner.bubble import (
    batch_time,
    bubble_slope,
    bubble_time,
    least_stages,
    messages,
    microbatches,
    model_state,
    send_time,
)


def test_figure_4_3():
    """Three stages, forward one unit on a stage, backward two: six units of bubble on every stage; a batch of five is 15 + 6."""
    assert bubble_time(3, 6, 3) == pytest.approx(6)
    split = batch_time(3, 6, batch=5, size=1, g_inter=3, ranks=3)
    assert split == pytest.approx({"compute": 15, "point-to-point": 0, "bubble": 6})


def test_equations_4_8_and_4_11():
    """Slopes are the differences' limits: the bubble grows less and less, transmission in proportion."""
    for g_inter in (6, 12, 24, 48):
        around = (bubble_time(1, 2, g_inter + 1) - bubble_time(1, 2, g_inter - 1)) / 2
        assert bubble_slope(1, 2, g_inter) == pytest.approx(around, rel=0.05)
        assert send_time(2048, 1, g_inter, 48, 1e-3) == pytest.approx(4 * 2048 / 48 * g_inter * 1e-3)
    assert bubble_time(1, 2, 1) == 0 and messages(8, 1, 1, 4) == 0


def test_lemmas_of_section_3_3_2():
    """Figure 3.3's ranks: communication grows with the stages, compute stays."""
    splits = [batch_time(1, 2, 2048, 1, g_inter, 48, 1e-3) for g_inter in (6, 12, 24, 48)]
    assert len({round(split["compute"], 9) for split in splits}) == 1
    assert [split["point-to-point"] / splits[0]["point-to-point"] for split in splits] == pytest.approx([1, 2, 4, 8])
    assert [microbatches(2048, 1, 48 // g) for g in (6, 12, 24, 48)] == [256, 512, 1024, 2048]


def test_model_state_of_the_reference_transformer():
    """12 billion parameters: 40 GB a GPU at 6 stages, 2.5 times a V100's 16 GB; bucketed it fits, at a fifth of the memory."""
    state = model_state(12 * 10**9, 6)
    assert state.plain == 40 * 10**9 and state.plain / (16 * 10**9) == 2.5
    assert state.bucketed == 8 * 10**9 + 256 * 10**6
    assert 4.8 < state.plain / state.bucketed < 5
    assert least_stages(12 * 10**9, 16 * 10**9, 48) == 16
    assert least_stages(12 * 10**9, 16 * 10**9, 48, 16_000_000) == 4
    with pytest.raises(ValueError, match="do not fit"):
        least_stages(12 * 10**9, 10**9, 48)


def test_wrong_arguments():
    for call, said in (
        (lambda: bubble_time(1, 2, 0), "g_inter = 0"),
        (lambda: microbatches(7, 2, 1), "batch = 7 does not divide"),
        (lambda: messages(8, 1, 3, 4), "g_inter = 3 does not divide the 4 ranks"),
    ):
        with pytest.raises(ValueError, match=said):
            call()
