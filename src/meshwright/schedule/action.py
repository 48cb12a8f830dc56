"""Action: one cell of a schedule, and the actions that must precede it."""

from __future__ import annotations

import enum
import re
from typing import Final, NamedTuple

from meshwright.errors import ConfigError

__all__: list[str] = []


class ActionKind(enum.StrEnum):
    """The kind of an action; the letters are those of torch's pipelining."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward pass."""
    INPUT_GRAD = "I"
    """The half of backward that the previous stage waits for."""
    WEIGHT_GRAD = "W"
    """The half that nobody waits for."""


_PATTERN: Final = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")


class Action(NamedTuple):
    """One micro-batch's work on one stage; prints as "2F0": stage 2, forward, micro-batch 0.

    Args:
        stage: The stage, counted from 0 over all ranks.
        kind: Forward, backward, or one of backward's halves.
        micro_batch: The micro-batch, counted from 0.

    >>> str(Action.parse("1B3")), Action.parse("1B3").micro_batch
    ('1B3', 3)
    """

    stage: int
    kind: ActionKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read what ``str`` printed.

        Raises:
            ConfigError: The text is not an action.
        """
        match = _PATTERN.fullmatch(text)
        if match is None:
            raise ConfigError(
                f"'{text}' is not an action (rule: stage, then F, B, I or W, then micro-batch)",
                fix="write it as in '2F0'",
            )
        return cls(int(match[1]), ActionKind(match[2]), int(match[3]))

    @property
    def is_backward(self) -> bool:
        """Whether the previous stage's backward waits for it: B and I."""
        return self.kind in (ActionKind.BACKWARD, ActionKind.INPUT_GRAD)

    @property
    def frees_activations(self) -> bool:
        """Whether nothing of the micro-batch's forward is needed on this stage afterwards: B and W."""
        return self.kind in (ActionKind.BACKWARD, ActionKind.WEIGHT_GRAD)


class Milestone(NamedTuple):
    """A result that other actions wait for: a stage's forward, or its gradient with respect to its input."""

    stage: int
    micro_batch: int
    backward: bool


def milestone_of(action: Action) -> Milestone | None:
    """Return the result that others may wait for once the action is done; None after W."""
    if action.kind is ActionKind.WEIGHT_GRAD:
        return None
    return Milestone(action.stage, action.micro_batch, action.is_backward)


def inputs_of(action: Action, num_stages: int) -> tuple[Milestone, ...]:
    """Return the results that an action needs before it can start.

    A forward needs the previous stage's forward; a backward its own forward and the next stage's backward; a weight
    gradient its own input gradient.
    """
    stage, kind, micro_batch = action
    if kind is ActionKind.FORWARD:
        return (Milestone(stage - 1, micro_batch, False),) if stage > 0 else ()
    if kind is ActionKind.WEIGHT_GRAD:
        return (Milestone(stage, micro_batch, True),)
    own = Milestone(stage, micro_batch, False)
    return (own, Milestone(stage + 1, micro_batch, True)) if stage < num_stages - 1 else (own,)
