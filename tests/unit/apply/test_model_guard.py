"""Ranks that do not apply one plan to one model: refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.apply.model_guard import ModelGuard, require_equal_on_ranks
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


@pytest.mark.parametrize(("option", "value"), [("max_norm", 0.5), ("scale_grad_by_freq", True)])
def test_an_embedding_that_begins_to_go_by_the_ids_of_its_batch_is_refused(option: str, value: Any) -> None:
    """It was looked at when the plan was applied alone: set later, ranks trained other rows without a word."""
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 2))
    whole, cut = ModelGuard(model), ModelGuard(model, cuts_batch=True)
    assert cut.find_change() is None
    setattr(model[0], option, value)
    assert whole.find_change() is None
    change = cut.find_change()
    assert change is not None
    assert f"{option} of embedding '0'" in str(change)
    setattr(model[0], option, None if option == "max_norm" else False)
    assert cut.find_change() is None
