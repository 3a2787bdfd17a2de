import pytest
import torch

from axonn_plugins.optim.index import BLOCK
from axonn_plugins.optim.state import read_state
from axonn_plugins.optim.store import Entry, make_stores
from samo import Index


@pytest.mark.parametrize("numel", [0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
@pytest.mark.parametrize("kept", [0.0, 1e-4, 0.1, 1.0])
def test_both_forms(numel: int, kept: float) -> None:
    generator = torch.Generator().manual_seed(numel)
    mask = torch.rand(numel, generator=generator) < kept
    dense = torch.randn(numel, generator=generator)
    expected = mask.nonzero().flatten()
    forms = {form: Index.from_mask(mask, form) for form in ("offsets", "positions")}
    for form, index in forms.items():
        assert (index.form, index.kept, index.numel) == (form, int(mask.sum()), numel)
        assert torch.equal(index.positions(), expected)
        assert torch.equal(index.mask(), mask)
        for begin, end in ((0, index.kept // 3), (index.kept // 3, index.kept)):
            assert torch.equal(index.positions(begin, end), expected[begin:end])
            assert torch.equal(index.compress(dense, begin, end), dense[mask][begin:end])
        into = torch.zeros(numel)
        index.expand(dense[mask], into)
        assert torch.equal(into, dense * mask)
    assert forms["positions"].nbytes == 4 * expected.numel()
    assert forms["offsets"].nbytes == 2 * expected.numel() + 8 * (-(-numel // BLOCK) + 1)
    assert Index.from_mask(mask).nbytes == min(index.nbytes for index in forms.values())


@pytest.mark.parametrize("numel", [2**31, 2**31 + 9])
def test_positions_in_a_state_of_more_elements_than_32_bits_number(numel: int) -> None:
    positions = torch.tensor([5, 2**31 - 1, numel - 1]).unique()
    parameter = torch.nn.Parameter(torch.zeros(()).expand(numel))
    stores = make_stores([Entry("w", parameter, 0, Index(positions, numel))], 2**20)
    (read,) = read_state(stores, {}).values()
    assert torch.equal(read["positions"].long(), positions)


def test_a_sparse_middle() -> None:
    """Blocks without any kept element, in between and at the end."""
    mask = torch.zeros(9 * BLOCK, dtype=torch.bool)
    mask[[3, 4 * BLOCK - 1, 4 * BLOCK, 7 * BLOCK + 5]] = True
    for form in ("offsets", "positions"):
        assert Index.from_mask(mask, form).positions(1, 4).tolist() == [4 * BLOCK - 1, 4 * BLOCK, 7 * BLOCK + 5]


def test_wrong_form() -> None:
    with pytest.raises(ValueError, match="form = 'short' is not a form"):
        Index(torch.zeros(0, dtype=torch.int64), 4, "short")
