"""Tables that models keep in variables: a description leaves none without values in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw

TABLE: Tensor | None = None
CACHE: dict[str, Any] = {"real": torch.ones(2)}
SEEN: list[Any] = [1]


class Tables(nn.Module):
    """Keeps what its first forward computes in four places outside of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        global TABLE
        if TABLE is None:
            TABLE = torch.arange(4.0).cos()
        kind: Any = type(self)
        if "slopes" not in vars(kind):
            kind.slopes = torch.linspace(0.0, 1.0, 4)
        CACHE.setdefault("angles", (torch.ones(4), 3))
        SEEN.append(x)
        return self.layer(x) * TABLE + kind.slopes + CACHE["angles"][0]


@pytest.mark.parametrize("is_built", [False, True])
def test_no_table_without_values_is_left_in_a_variable(is_built: bool) -> None:
    """They were left in: the next forward of the same process computed with tensors that have no values."""
    module = Tables()
    mw.describe_model(module if is_built else Tables, (torch.zeros(2, 4), torch.zeros(2, 4)))
    assert TABLE is None
    assert "slopes" not in vars(Tables)
    assert list(CACHE) == ["real"]
    assert SEEN == [1]
    with torch.no_grad():
        assert type(module(torch.zeros(1, 4))) is Tensor
    tidy()


def tidy() -> None:
    """Forget what a forward with values has kept."""
    global TABLE
    TABLE = None
    del CACHE["angles"], SEEN[1:]
    del Tables.slopes  # pyright: ignore[reportAttributeAccessIssue]
