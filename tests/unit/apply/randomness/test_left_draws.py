"""Draws left to torch's generators, which nothing takes for draws by place, and code that replaced draws have to let pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright._torch_dispatch import draws_intercepted
from meshwright.apply.pipeline.walking.draws import Draws
from meshwright.apply.randomness.forward_draws import ForwardDraws
from meshwright.apply.randomness.names import Names
from meshwright.apply.randomness.operators import install_operators
from meshwright.apply.randomness.sites import StepDraws, draws_by_place, in_forward, in_step
from meshwright.apply.state.undisturbed import GeneratorStates
from meshwright.apply.tensor.masks import NotedDropout


def test_masks_by_place_have_no_state_to_compare() -> None:
    # The sentinel of tensor parallelism took those of two shards for equal.
    def notes(left: str | None) -> int:
        step = StepDraws("", Names(nn.Identity()), {}, left=left)
        with in_step(step), in_forward(ForwardDraws(0, 2)):
            noted = NotedDropout()
        with noted:  # an inspection runs apart from the step
            nn.functional.dropout(torch.ones(2, 2), 0.5)
        return len(noted.notes)

    assert (notes(None), notes("left")) == (0, 1)


def test_stages_share_a_stream_between_layers_where_torch_draws() -> None:
    # A stage that took such a step for one by place drew other numbers between layers than the next stage.
    install_operators()
    told: list[str] = []
    step = StepDraws("", Names(nn.Identity()), {}, on_unknown=told.append, left="left")
    stages = [Draws(3, torch.device("cpu"), apart=True) for _ in range(2)]
    found = []
    for own, draws in enumerate(stages):
        torch.manual_seed(own)
        draws.begin_step()
        with in_step(step), in_forward(ForwardDraws(0, 2)), draws.between_layers(0, own):
            assert not draws_by_place()
            found.append(torch.rand(2))
    assert torch.equal(*found)
    assert set(told) == {"left"}


@pytest.mark.parametrize("apart", [True, False])
def test_trials_notice_draws_between_layers_though_the_generator_is_put_back(apart: bool) -> None:
    # Else a model that draws there in eval mode, too, was refused as one that mixes samples.
    draws = Draws(3, torch.device("cpu"), apart=apart)
    draws.begin_step()

    def has_drawn(func: Any) -> bool:
        states = GeneratorStates(torch.device("cpu"))
        with draws.between_layers(0, 0):
            draws.call(func, (2,), {})
        return states.have_moved()

    assert not has_drawn(torch.ones)
    assert has_drawn(torch.rand)


class Indexed(torch.autograd.Function):
    """An entry at an index, by a function of the user's own: FlexAttention indexes masks so under vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...


def test_a_custom_function_under_vmap_passes_by() -> None:
    install_operators()
    x, index = torch.arange(5.0), torch.tensor([3, 1])
    run = torch.vmap(lambda place: Indexed.apply(x, place))
    with draws_intercepted(True):
        assert torch.equal(run(index), x[index])
