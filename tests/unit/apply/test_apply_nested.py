"""An engine around another answers for both: no answer of the base class, which is that of one device, is given in silence."""

from __future__ import annotations

import pytest

from meshwright.apply.engine import Engine
from meshwright.apply.nested import OuterEngine
from meshwright.apply.pipeline.engine import PipelineEngine
from meshwright.apply.tensor.engine import TensorEngine

MADE_OF_OTHERS = {
    "agrees_first": "of needs_lockstep",
    "guard_parts": "of held_parts and use_switch",
    "may_stop_alone": "of everyone, needs_lockstep and copies",
    "norm_of_squares": "of gradient_squares",
    "run": "of arm, forward_backward, begin_backward and idle_pass",
    "try_forward": "of forward_backward",
    "trying": "of begin_forward and end_forward",
}
OWN = {
    "forward_backward": "a pipeline's own run does not call it",
    "look_at": "for layers that move between one process's devices, which nothing stands around",
    "loss_group": "shards of a layer compute one loss, so it is the data-parallel ranks; stages say otherwise",
    "num_replicas": "of one process, which nothing stands around",
    "owes_nothing_to_the_loss": "for stages alone",
    "switch": "set by use_switch, which is handed on",
}
"""What the base class may answer for an engine around another, and why."""


def answers(kind: type[Engine]) -> set[str]:
    """Return the public names that a class, or one between it and `Engine`, gives a meaning of its own."""
    between = [base for base in kind.__mro__ if issubclass(base, Engine) and base is not Engine]
    return {name for base in between for name in vars(base)}


@pytest.mark.parametrize("kind", [TensorEngine, PipelineEngine])
def test_an_engine_around_another_answers_everything(kind: type[Engine]) -> None:
    public = {name for name in vars(Engine) if not name.startswith("_")}
    assert public - answers(kind) - MADE_OF_OTHERS.keys() - OWN.keys() == set()


def test_no_exception_is_left_over() -> None:
    unanswered = {name for name in vars(Engine) if name not in answers(OuterEngine)}
    assert (MADE_OF_OTHERS.keys() | OWN.keys()) - unanswered == set()
