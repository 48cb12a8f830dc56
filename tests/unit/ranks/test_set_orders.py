"""Orders of sets of texts, which each process draws by itself unless its launcher says how."""

from __future__ import annotations

import pytest

from meshwright.ranks.launch import launch
from meshwright.ranks.processes import rank_environment


def order() -> list[str]:
    return list({f"layer of kind {number}" for number in range(20)})


def test_all_ranks_go_through_a_set_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's forward does so with its kinds of attention, and its stages took different paths in one run of two."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    first, second = launch(order, 2)
    assert first == second == launch(order, 1)[0]


def test_a_users_own_order_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "5")
    assert rank_environment("", None, None)["PYTHONHASHSEED"] == "5"
    assert rank_environment("", None, {"PYTHONHASHSEED": "6"})["PYTHONHASHSEED"] == "6"
