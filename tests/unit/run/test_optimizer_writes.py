"""Writes to an optimizer's state between steps, and which of them ranks have made alike."""

from __future__ import annotations

import pytest
import torch

from meshwright.run.sentinels.optimizer_writes import OptimizerWrites, find_apart


def _stepped() -> tuple[torch.optim.AdamW, list[torch.nn.Parameter]]:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = torch.optim.AdamW(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    optimizer.step()
    return optimizer, parameters


def test_a_write_in_place_an_assignment_and_a_new_entry_are_seen() -> None:
    optimizer, (first, second) = _stepped()
    watch = OptimizerWrites(optimizer)
    watch.note()
    assert watch.names() == []
    optimizer.state[second]["exp_avg"].mul_(0.5)
    assert watch.names() == ["the optimizer's 'exp_avg'"]
    assert [name for name, _ in watch.written_tensors({id(second): "b"})] == ["b (the optimizer's exp_avg)"]
    optimizer.state[first]["step"] = optimizer.state[first]["step"] + 1
    assert watch.names() == ["the optimizer's 'exp_avg'", "the optimizer's 'step'"]
    optimizer.state[first]["mine"] = 3
    assert watch.names() == ["the optimizer's state"]
    watch.note()
    assert watch.names() == []


def test_tensors_of_inference_mode_are_passed_over() -> None:
    optimizer, (first, _) = _stepped()
    with torch.inference_mode():
        optimizer.state[first]["mine"] = torch.ones(1)
    watch = OptimizerWrites(optimizer)
    watch.note()
    assert watch.names() == []


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ({0: [["a", 0, "m", True]], 1: [["a", 0, "m", True]]}, None),
        ({0: [["a", 0, "m", True]], 1: [["a", 0, "m", False]]}, ("a (the optimizer's m)", [0], [1])),
        # A rank without the parameter has nothing that it could have written.
        ({0: [["a", 0, "m", True], ["b", 0, "m", False]], 1: [["c", 0, "m", False]]}, None),
        ({0: [["a", 0, "m", True]], 1: []}, None),
        ({0: [["a", 0, "m", True]], 1: [["b", 1, "m", False]]}, None),
        # All that one rank holds, and nothing of another: a script that runs on one of them alone.
        ({0: [["a", 0, "m", True]], 1: [["b", 0, "m", False]]}, ("the optimizer's 'm' of group 0", [0], [1])),
    ],
)
def test_what_ranks_have_not_written_alike(rows: dict[int, list[list[object]]], expected: object) -> None:
    assert find_apart(rows) == expected
