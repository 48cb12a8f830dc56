"""Hooks that see a gradient of the script's own: aside while the engine computes, and back with those of the user."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.apply.shards.switch import ShardSwitch
from meshwright.run.arrivals import GradientArrivals


def _watched() -> tuple[nn.Linear, GradientArrivals, ShardSwitch]:
    module, switch = nn.Linear(2, 2), ShardSwitch("dp=2")
    arrivals = GradientArrivals(module, switch, "dp=2", "call model.backward(loss)")
    switch.begin()
    return module, arrivals, switch


def _backward(module: nn.Module) -> None:
    module(torch.ones(1, 2)).sum().backward()


def test_a_gradient_of_ones_own_is_refused_before_and_after_the_engines_work() -> None:
    module, arrivals, _ = _watched()
    with pytest.raises(mw.ApplyError, match="a backward of the script's own"):
        _backward(module)
    with arrivals.put_aside():
        _backward(module)
    with pytest.raises(mw.ApplyError, match="a backward of the script's own"):
        _backward(module)


def test_they_come_back_after_an_error() -> None:
    module, arrivals, _ = _watched()
    with pytest.raises(ZeroDivisionError), arrivals.put_aside():
        raise ZeroDivisionError
    with pytest.raises(mw.ApplyError, match="a backward of the script's own"):
        _backward(module)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_hooks_of_the_user_are_called_in_the_engines_work_and_after_it(when: str) -> None:
    module, arrivals, switch = _watched()
    seen: list[torch.Tensor] = []
    handles = [module.weight.register_hook(seen.append)] if when == "before" else []
    with switch.plain(), arrivals.put_aside():
        if when == "meanwhile":
            handles.append(module.weight.register_hook(seen.append))
        _backward(module)
    assert len(seen) == 1
    with pytest.raises(mw.ApplyError, match="a backward of the script's own"):
        _backward(module)
    with switch.plain():
        _backward(module)
    handles[0].remove()
    with switch.plain():
        _backward(module)
    assert len(seen) in (2, 3)  # the refused backward may have come to the hook before it was refused


def test_nothing_is_left_on_the_parameters() -> None:
    module, arrivals, _ = _watched()
    with arrivals.put_aside():
        pass
    arrivals.close()
    assert not any(parameter._backward_hooks for parameter in module.parameters())
    _backward(module)
