"""The norm of gradients whose squares overflow their dtype, complex and sparse ones too."""

from __future__ import annotations

import math

import pytest
import torch

from meshwright.apply.norm import squares_of, total_norm

CPU = torch.device("cpu")
LARGE = torch.tensor([3e30 + 4e30j], dtype=torch.complex64)


@pytest.mark.parametrize("gradient", [LARGE, LARGE.conj(), torch.tensor([3e30, 4e30])], ids=["complex", "conj", "real"])
def test_squares_that_overflow_are_taken_in_float64(gradient: torch.Tensor) -> None:
    assert total_norm([gradient], CPU).item() == pytest.approx(5e30)
    assert squares_of([gradient], CPU, exact=True).item() == pytest.approx(25e60)


def test_a_complex_gradient_that_is_not_finite_has_no_finite_norm() -> None:
    assert not math.isfinite(total_norm([torch.tensor([complex(math.inf, 0)])], CPU).item())


def test_a_sparse_gradient_counts_its_rows_once() -> None:
    twice = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([[1.0], [2.0]]), (3, 1), check_invariants=True)
    assert total_norm([twice, torch.tensor([4.0])], CPU).item() == pytest.approx(5.0)
