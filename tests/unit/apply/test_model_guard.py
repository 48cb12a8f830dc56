"""Ranks that do not apply one plan to one model: refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.apply.model_guard import require_equal_on_ranks
from meshwright.errors import ApplyError


class _Group:
    """Two ranks, of which the other one tells something else at the same time."""

    size = 2
    ranks = (0, 3)

    def __init__(self, theirs: Any) -> None:
        self._theirs = theirs

    def all_gather_json(self, mine: Any, *, device: torch.device) -> list[Any]:
        return [mine, self._theirs]


@pytest.mark.parametrize("theirs", [["a name", 2], {"step": 1}, None, "four"])
def test_a_rank_that_is_in_another_call_is_named(theirs: Any) -> None:
    group: Any = _Group(theirs)
    with pytest.raises(ApplyError, match="ranks are in different calls: rank 3 does not apply a plan") as error:
        require_equal_on_ranks(group, nn.Linear(2, 2), "{}", torch.device("cpu"))
    assert error.value.fix is not None
