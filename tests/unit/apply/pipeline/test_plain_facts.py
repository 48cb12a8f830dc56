"""Facts of results: what two results differ in beside the numbers in their tensors."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import subprocess
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.apply.pipeline.walking.plain_facts import facts_in, sizes_in


class Color(enum.Enum):
    RED = 1
    GREEN = 2


class Slotted:
    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


@dataclasses.dataclass
class Held:
    tensor: torch.Tensor
    number: int


def scaled(factor: int) -> Any:
    return lambda x: x * factor


def counted(number: int) -> Any:
    yield from range(number)


ONES = torch.ones(2)
UNLIKE: dict[str, tuple[Any, Any]] = {
    "negative numbers, whose hashes Python has alike": (-1, -2),
    "a flag and a number": (True, 1),
    "a number of another kind": (1, 1.0),
    "nothing and zero": (None, 0),
    "a list and a tuple": ([1], (1,)),
    "order of keys": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "NumPy's numbers": (np.int64(1), np.int64(2)),
    "NumPy's arrays": (np.array([1.0, 2.0]), np.array([1.0, 3.0])),
    "enumerations": (Color.RED, Color.GREEN),
    "texts": ("ab", "ba"),
    "bytes": (b"a", b"b"),
    "sets": ({1, 2}, {1, 3}),
    "slices": (slice(0, 2), slice(0, 3)),
    "ranges": (range(2), range(3)),
    "complex numbers": (1j, 2j),
    "classes": (nn.ReLU, nn.Tanh),
    "functions": (torch.sin, torch.cos),
    "closures": (scaled(1), scaled(2)),
    "bound arguments": (functools.partial(max, 1), functools.partial(max, 2)),
    "dtypes": (torch.float32, torch.float64),
    "attributes": (types.SimpleNamespace(number=1), types.SimpleNamespace(number=2)),
    "slots": (Slotted(1), Slotted(2)),
    "data beside tensors": (Held(ONES, 1), Held(ONES, 2)),
    "queues": (collections.deque([1]), collections.deque([1, 1])),
    "decimals": (decimal.Decimal(1), decimal.Decimal(2)),
    "times": (datetime.timedelta(1), datetime.timedelta(2)),
    "iterators": (iter([1]), iter([2])),
    "generators": (counted(1), counted(2)),
    "inside of each other": ({"a": [Slotted(1)]}, {"a": [Slotted(2)]}),
}


@pytest.mark.parametrize("name", list(UNLIKE))
def test_results_that_code_can_tell_apart_differ(name: str) -> None:
    one, other = UNLIKE[name]
    assert hash(facts_in((ONES, one))) != hash(facts_in((ONES, other)))
    assert facts_in((ONES, one)) == facts_in((ONES, one))


def test_numbers_in_tensors_and_modules_do_not_count() -> None:
    assert facts_in([torch.ones(2), Held(torch.ones(3), 1)]) == facts_in([torch.zeros(4), Held(torch.zeros(5), 1)])
    assert facts_in([nn.Linear(2, 2)]) == facts_in([nn.ReLU()])
    assert facts_in(ONES) == ()
    assert list(sizes_in((torch.ones(2, 3), [torch.ones(4)]))) == [2, 3, 4]


def test_not_a_number_is_itself() -> None:
    assert hash(facts_in([float("nan")])) == hash(facts_in([float("inf") - float("inf")]))


def test_what_lies_in_itself_and_what_shows_nothing_ends() -> None:
    own: list[Any] = [1]
    own.append(own)
    assert facts_in(own) != facts_in([1, 1])
    assert facts_in([torch.Generator()]) == facts_in([torch.Generator()])


def test_they_are_the_same_in_another_process() -> None:
    """Python's hash of a text is not."""
    code = (
        "from tests.unit.apply.pipeline.test_plain_facts import *; print([facts_in(v[0]) for k, v in UNLIKE.items()])"
    )
    here = str([facts_in(one) for one, _ in UNLIKE.values()])
    assert (
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip() == here
    )
