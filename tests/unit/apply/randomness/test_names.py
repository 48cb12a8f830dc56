"""Places in the code of a model that draws."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright.apply.randomness.names import Names


class Noted(nn.Module):
    """Notes where it is called from, by the names of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Names | None = None
        self.sites: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        assert self.names is not None
        self.sites.append(self.names.site())
        return x


class Block(nn.Module):
    """Calls one module at two places of its code."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = Noted()

    def forward(self, x: Tensor, *, is_last: bool) -> Tensor:
        """Return the input."""
        for _ in range(2):
            x = self.drop(x)
        return self.drop(x) if is_last else x


def sites_of(run: functools.partial[Tensor], model: Block) -> list[int]:
    model.drop.names, model.drop.sites = Names(model), []
    run()
    return model.drop.sites


def test_a_site_is_a_place_in_the_code_of_a_module() -> None:
    model = Block()
    first, second, last = sites_of(functools.partial(model, torch.ones(2), is_last=True), model)
    assert first == second != last
    assert sites_of(functools.partial(model, torch.ones(2), is_last=False), model) == [first, first]


SOURCE = """
class Inner(Block):
    def forward(self, x, *, is_last):
        draw = lambda value: self.drop(value)
        other = lambda value: self.drop(value)
        return other(draw(x))
"""


def test_lines_above_a_model_change_no_site() -> None:
    found = []
    for above in ("", "# a comment\nimport os\n\n"):
        names = {"Block": Block, "__name__": "of_somebody"}
        exec(compile(above + SOURCE, "of_somebody.py", "exec"), names)
        model = names["Inner"]()
        found.append(sites_of(functools.partial(model, torch.ones(2), is_last=True), model))
    assert found[0] == found[1]
    assert len(set(found[0])) == 2, "two functions of one name are two places"


def test_whoever_calls_the_model_changes_no_site() -> None:
    model, x = Block(), torch.ones(2)

    def evaluate() -> Tensor:
        return model(x, is_last=True)

    found = sites_of(functools.partial(model, x, is_last=True), model)
    assert sites_of(functools.partial(evaluate), model) == found
    assert sites_of(functools.partial(checkpoint, model, x, is_last=True, use_reentrant=False), model) == found
