"""Proofs of wrong layouts raise where torch's own kernels would read past the end of a tensor, or end the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from meshwright.apply.tensor.proof.exact import Exact


def _rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _labels(most: int) -> Any:
    return torch.full((2, 3), most), torch.tensor([5, 5]), torch.tensor([3, 3])


WRONG: dict[str, Callable[[], Any]] = {
    "fewer keys than values": lambda: F.scaled_dot_product_attention(_rows(2, 6, 4), _rows(2, 3, 4), _rows(2, 6, 4)),
    "fewer magnitudes than rows": lambda: torch._weight_norm(_rows(9, 4), _rows(3, 1), 0),
    "fewer magnitudes than columns": lambda: torch._weight_norm(_rows(9, 4), _rows(1, 2), 1),
    "labels beyond the classes": lambda: F.ctc_loss(_rows(5, 2, 4).log_softmax(-1), *_labels(6)),
}
RIGHT: dict[str, Callable[[], Tensor]] = {
    "attention": lambda: F.scaled_dot_product_attention(_rows(2, 6, 4), key=_rows(2, 3, 4), value=_rows(2, 3, 4)),
    "one magnitude": lambda: torch._weight_norm(_rows(9, 4), _rows(1), -1),
    "magnitudes of a dim between": lambda: torch._weight_norm(_rows(9, 4, 2), _rows(1, 4, 1), 1),
    "a CTC loss": lambda: F.ctc_loss(_rows(5, 2, 4).log_softmax(-1), *_labels(3)),
}


@pytest.mark.parametrize("name", WRONG)
def test_shapes_that_do_not_go_together_raise(name: str) -> None:
    with Exact(), pytest.raises(ValueError, match=r"keys|magnitudes|label"):
        WRONG[name]()


@pytest.mark.parametrize("name", RIGHT)
def test_shapes_that_go_together_do_not(name: str) -> None:
    with Exact():
        assert RIGHT[name]().isfinite().all()


@pytest.mark.parametrize("num_heads", [2, 0])
def test_no_key_heads_never_end_the_process(num_heads: int) -> None:
    query, key = _rows(2, num_heads, 3, 4), _rows(2, 0, 3, 4)
    with Exact():
        if torch.__version__ < "2.12":  # which would divide by zero, a signal
            with pytest.raises(RuntimeError, match="no heads"):
                F.scaled_dot_product_attention(query, key, key, enable_gqa=True)
        else:
            assert F.scaled_dot_product_attention(query, key, key, enable_gqa=True).shape == query.shape
