"""Lists of names that differ between ranks in nothing but order get the first rank's; others are refused."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn

from meshwright.comm.communicator import Communicator
from meshwright.errors import ApplyError
from meshwright.run.sentinels.name_orders import require_equal_in_order
from meshwright.run.sentinels.settings import of_modules

CPU = torch.device("cpu")


class Configured(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        self.config = {"names": list(names), "depth": 2}


class FirstAnd:
    """Two ranks, of which the first has another module; what it says to each exchange is made when it is asked."""

    size = 2
    ranks = (0, 1)

    def __init__(self, first: nn.Module, own: nn.Module) -> None:
        self.first, self.own = first, own

    def all_gather_json(self, value: Any, device: torch.device) -> list[Any]:
        del device
        if isinstance(value, str):  # a digest
            return ["same", "same" if of_modules(self.first) == of_modules(self.own) else "another"]
        is_rows = bool(value) and isinstance(value[0], tuple)
        lists = [[".config.names", list(cast("Any", self.first).config["names"])]]
        return [of_modules(self.first) if is_rows else lists, value]


def _require(first: Configured, own: Configured) -> None:
    group = cast("Communicator", FirstAnd(first, own))
    require_equal_in_order(group, own, lambda: of_modules(own), CPU)


def test_lists_in_another_order_get_the_first_ranks() -> None:
    own = Configured("c", "a", "b")
    names = own.config["names"]
    _require(Configured("a", "b", "c"), own)
    assert own.config["names"] is names
    assert names == ["a", "b", "c"]


def test_lists_with_other_names_are_refused() -> None:
    own = Configured("a", "b")
    with pytest.raises(ApplyError, match="attribute 'config' of the model itself"):
        _require(Configured("a", "c"), own)
    assert own.config["names"] == ["a", "b"]
