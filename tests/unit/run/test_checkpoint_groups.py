"""Groups of an optimizer, found in a checkpoint by their parameters."""

from __future__ import annotations

import pytest

from meshwright.errors import CheckpointError
from meshwright.run.checkpoints.optimizer_rows import find_groups


def test_a_parameter_without_entries_makes_no_other_group() -> None:
    # An optimizer under ZeRO and tp has no piece of it; a checkpoint of theirs was refused under pp, and the other way round.
    stored = [[["empty", "weight"], {"lr": 0.1}], [["bias"], {"lr": 0.2}]]
    present = [[["bias"], {}], [["weight"], {}]]

    def has_entries(name: str) -> bool:
        return name != "empty"

    assert find_groups(stored, present, has_entries) == [{"lr": 0.2}, {"lr": 0.1}]
    turned = [[["weight"], {"lr": 0.1}], [["bias"], {"lr": 0.2}]]
    assert find_groups(turned, [[["empty", "weight"], {}]], has_entries) == [{"lr": 0.1}]
    with pytest.raises(CheckpointError, match="no group of the checkpoint has the same"):
        find_groups(stored, [[["weight"], {}]])
