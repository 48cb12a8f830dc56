"""A few random programs; benchmarks/transport/random_programs.py runs them for as long as one likes."""

from __future__ import annotations

import pytest
from tests.transport import player, programs
from tests.transport.player import Sabotage
from tests.transport.programs import make_program

from meshwright import testing


@pytest.mark.parametrize(
    ("num_ranks", "seeds", "num_steps"), [(2, range(3), 60), (4, range(3, 6), 60), (8, [6, 7], 60)]
)
def test_programs(num_ranks: int, seeds: list[int], num_steps: int) -> None:
    for seed in seeds:
        played = testing.run_ranks(player.play, num_ranks, seed, num_steps)
        assert sum(rank.operations for rank in played) >= num_steps
        assert sum(rank.checks for rank in played) >= num_steps
        assert sum(rank.tensor_bytes for rank in played) > 0


def test_a_seed_is_a_program() -> None:
    assert make_program(5, 8) == make_program(5, 8)
    assert make_program(5, 8) != make_program(6, 8)
    assert {len(make_program(seed, 8).steps) for seed in range(20)} <= set(range(50, 220))


def test_programs_have_everything_in_them() -> None:
    made = [make_program(seed, 8) for seed in range(30)]
    steps = [step for program in made for step in program.steps]
    kinds = {"collective", "coalesced", "send", "receive", "any_source", "batch", "barrier", "objects"}
    kinds |= {"sparse", "refused", "monitored", "split"}
    assert {step.kind for step in steps} == kinds
    calls = [step.calls[0] for step in steps if step.kind == "collective"]
    assert {call.kind for call in calls} == set(programs.KINDS)
    assert {call.dtype for call in calls} == set(programs.DTYPES)
    assert {step.is_async for step in steps if step.kind in ("send", "receive")} == {True, False}
    assert max(call.dtype.itemsize * call.shape[0] for call in calls) > 2**20
    assert min(call.shape[0] for call in calls) == 0
    sizes = {len(ranks) for program in made for ranks in program.groups}
    assert {2, 3, 4, 8} <= sizes
    assert all(3 <= len(program.groups) <= 6 for program in made)


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_programs_cannot_deadlock(num_ranks: int) -> None:
    """What the module promises: messages of one tag keep their order, and whoever blocks comes second."""
    for seed in range(20):
        program = make_program(seed, num_ranks)
        order: dict[tuple[str, int, int, int, int], list[int]] = {}
        sides: dict[int, list[int]] = {}
        for index, step in enumerate(program.steps):
            if step.message is not None:
                message = step.message
                key = (step.kind, message.group, message.source, message.target, message.tag)
                order.setdefault(key, []).append(message.number)
                sides.setdefault(message.number, []).append(index)
        for (kind, *key), numbers in order.items():
            other = "receive" if kind == "send" else "send"
            assert numbers == order[other, *key]
        for first, second in sides.values():
            assert {program.steps[first].kind, program.steps[second].kind} == {"send", "receive"}
            assert program.steps[first].is_async
            assert program.steps[first].ready_at == program.steps[second].ready_at == second


def test_messages_overtake_each_other() -> None:
    # Else receiving in any order of the tags would not be tried at all.
    overtaken = 0
    for seed in range(10):
        seen: dict[tuple[str, int, int, int], list[int]] = {}
        for step in make_program(seed, 4).steps:
            if step.message is not None:
                message = step.message
                seen.setdefault((step.kind, message.group, message.source, message.target), []).append(message.number)
        overtaken += sum(
            numbers != seen["receive", group, source, target]
            for (kind, group, source, target), numbers in seen.items()
            if kind == "send"
        )
    assert overtaken >= 10


def test_a_wrong_value_is_found() -> None:
    with pytest.raises(player.WrongValueError, match=r"seed 11, step 2\d of .* entries differ"):
        testing.run_ranks(player.play, 2, 11, 60, 20.0, None, Sabotage("corrupt", 1, 20))
