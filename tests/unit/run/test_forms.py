"""Forms of batches: keys, types and flags are a batch's form; sizes, numbers and texts of samples are its data."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.run.losses.model_watch import _form_of

_X = torch.zeros(3, 2)


@pytest.mark.parametrize(
    ("batch", "other"),
    [
        ({"x": _X}, {"x": torch.ones(5, 7)}),
        ({"x": _X, "texts": ["a", "b", "c"]}, {"x": _X, "texts": ["d", "e", "f"]}),
        ((_X, 3), (_X, 4)),
    ],
    ids=["sizes", "texts", "numbers"],
)
def test_data_are_no_part_of_the_form(batch: Any, other: Any) -> None:
    assert _form_of(batch) == _form_of(other)


@pytest.mark.parametrize(
    ("batch", "other"),
    [
        ({"x": _X}, {"x": _X, "mask": _X}),
        ({"x": _X}, {"x": _X.double()}),
        ({"x": _X, "causal": True}, {"x": _X, "causal": False}),
        ((_X, "sum"), (_X, "mean")),
        ((_X, None), (_X, _X)),
    ],
    ids=["key", "type", "flag", "word", "none"],
)
def test_keys_types_and_flags_are(batch: Any, other: Any) -> None:
    assert _form_of(batch) != _form_of(other)
