"""Exchanges as operations of autograd, without ranks: what they refuse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from meshwright.comm.functional import copy_to_group
from meshwright.errors import ApplyError


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad], ids=["vmap", "grad"])
def test_a_transform_around_an_exchange_is_refused(transform: Any) -> None:
    group: Any = SimpleNamespace(size=2)
    with pytest.raises(ApplyError, match="no rule for an exchange"):
        transform(lambda one: copy_to_group(one, group).sum())(torch.ones(3))
