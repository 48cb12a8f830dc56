"""Groups of an optimizer over pieces of parameters, which a script changes between steps."""

from __future__ import annotations

import torch
from torch import nn

from meshwright.apply.data.piece_groups import PieceGroups


def _weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def test_a_group_that_has_lost_pieces_is_refused() -> None:
    """`group["params"][:-1]` chose among pieces, which are others on each rank, and training went on without a word."""
    pieces = [_weight(3) for _ in range(3)]
    optimizer = torch.optim.SGD(pieces, lr=0.1)
    groups = PieceGroups(1)
    groups.note(optimizer)
    held = {number: [piece] for number, piece in enumerate(pieces)}
    assert groups.accept(optimizer, held, ()) is None

    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:-1]
    error = groups.accept(optimizer, held, ())
    assert error is not None
    assert "has lost 1 of its entries" in str(error)
    assert "requires_grad" in (error.fix or "")


def test_a_group_that_load_state_dict_has_made_anew_is_the_one_in_its_place() -> None:
    pieces = [_weight(3) for _ in range(2)]
    optimizer = torch.optim.SGD(pieces, lr=0.1)
    groups = PieceGroups(1)
    groups.note(optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    del optimizer.param_groups[0]["params"][0]
    assert groups.accept(optimizer, {}, pieces) is not None


def test_a_whole_group_may_go_and_another_may_come() -> None:
    first, second, added = _weight(3), _weight(4), _weight(2, 2)
    piece = _weight(2)
    optimizer = torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1)
    groups = PieceGroups(3)
    groups.note(optimizer)
    held = {0: [first], 1: [second], id(added): [piece]}
    optimizer.param_groups.pop(0)
    assert groups.accept(optimizer, held, ()) is None
    optimizer.add_param_group({"params": [added]})
    assert groups.accept(optimizer, held, ()) is None
    assert optimizer.param_groups[1]["params"] == [piece]
