from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.errors import ConfigError
from meshwright.schedule import Action, ActionKind, PipelineSchedule

KINDS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
RANKS = st.integers(1, 6)
MICRO_BATCHES = st.integers(1, 14)


@st.composite
def schedules(draw: st.DrawFn, kinds: tuple[str, ...] = KINDS) -> PipelineSchedule:
    kind = draw(st.sampled_from(kinds))
    virtual = draw(st.integers(2, 4)) if kind == "interleaved" else None
    return PipelineSchedule.build(kind, num_ranks=draw(RANKS), num_micro_batches=draw(MICRO_BATCHES), virtual=virtual)


@given(schedules())
def test_each_stage_runs_each_micro_batch_once_and_never_before_its_inputs(schedule: PipelineSchedule) -> None:
    # Told again from the outside, without the validation's own code.
    simulation = schedule.simulate(send_s=0.25)
    starts, ends = {}, {}
    for rank, row in enumerate(schedule.actions):
        for action, start, end in zip(row, simulation.starts[rank], simulation.ends[rank], strict=True):
            assert str(action) not in starts
            assert action.stage in schedule.stages_of_rank(rank)
            starts[str(action)], ends[str(action)] = start, end
    assert len(starts) == sum(len(row) for row in schedule.actions)
    for stage in range(schedule.num_stages):
        for index in range(schedule.num_micro_batches):
            in_halves = f"{stage}I{index}" in starts
            assert in_halves == (f"{stage}W{index}" in starts) == (f"{stage}B{index}" not in starts)
            backward = _backward(starts, stage, index)
            assert ends[f"{stage}F{index}"] <= starts[backward]
            if in_halves:
                assert schedule.kind in ("zb-h1", "zbv")
                assert ends[f"{stage}I{index}"] <= starts[f"{stage}W{index}"]
            if stage:
                hop = 0.25 if schedule.rank_of_stage(stage) != schedule.rank_of_stage(stage - 1) else 0.0
                assert ends[f"{stage - 1}F{index}"] + hop <= starts[f"{stage}F{index}"]
                assert ends[backward] + hop <= starts[_backward(starts, stage - 1, index)]


def _backward(starts: dict[str, float], stage: int, index: int) -> str:
    """Return the action that gives the gradient with respect to a stage's input."""
    return next(text for text in (f"{stage}B{index}", f"{stage}I{index}") if text in starts)


@given(st.integers(2, 8), st.integers(0, 24))
def test_no_more_backwards_run_in_halves_than_there_are_ranks(p: int, more: int) -> None:
    schedule = PipelineSchedule.build("zb-h1", num_ranks=p, num_micro_batches=p + more)
    halves = [sum(action.kind is ActionKind.INPUT_GRAD for action in row) for row in schedule.actions]
    assert halves == [0, *[p] * (p - 1)]


@settings(max_examples=30)
@given(RANKS.filter(lambda p: p > 1), MICRO_BATCHES)
def test_joined_halves_do_not_make_a_v_longer(p: int, m: int) -> None:
    schedule = PipelineSchedule.build("zbv", num_ranks=p, num_micro_batches=m)
    in_halves = [[half for action in row for half in _halves_of(action)] for row in schedule.actions]
    apart = PipelineSchedule(
        kind="zbv", num_ranks=p, num_micro_batches=m, virtual=2, actions=tuple(map(tuple, in_halves))
    )
    assert schedule.simulate().makespan_s <= apart.simulate().makespan_s
    assert any(action.kind is ActionKind.BACKWARD for action in schedule.actions[0])
    assert schedule.simulate().peak_activations == apart.simulate().peak_activations


def _halves_of(action: Action) -> list[Action]:
    if action.kind is not ActionKind.BACKWARD:
        return [action]
    return [action._replace(kind=kind) for kind in (ActionKind.INPUT_GRAD, ActionKind.WEIGHT_GRAD)]


@given(st.sampled_from(["gpipe", "1f1b"]), RANKS, MICRO_BATCHES)
def test_the_bubble_of_gpipe_and_1f1b_is_the_closed_form(kind: str, p: int, m: int) -> None:
    simulation = PipelineSchedule.build(kind, num_ranks=p, num_micro_batches=m).simulate()
    assert simulation.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
    assert simulation.makespan_s == 3 * (m + p - 1)


@given(RANKS, MICRO_BATCHES, st.integers(2, 4))
def test_interleaving_shrinks_the_bubble(p: int, m: int, virtual: int) -> None:
    one = PipelineSchedule.build("1f1b", num_ranks=p, num_micro_batches=m).simulate()
    many = PipelineSchedule.build("interleaved", num_ranks=p, num_micro_batches=m, virtual=virtual).simulate()
    assert many.bubble_fraction <= one.bubble_fraction + 1e-12
    if m % p == 0:
        assert many.bubble_fraction == pytest.approx((p - 1) / (virtual * m + p - 1))


@given(RANKS, MICRO_BATCHES)
def test_zero_bubble_schedules_beat_1f1b_with_no_more_memory(p: int, m: int) -> None:
    base = PipelineSchedule.build("1f1b", num_ranks=p, num_micro_batches=m).simulate()
    half = PipelineSchedule.build("zb-h1", num_ranks=p, num_micro_batches=m).simulate()
    vee = PipelineSchedule.build("zbv", num_ranks=p, num_micro_batches=m).simulate()
    assert half.bubble_fraction <= base.bubble_fraction + 1e-12
    assert vee.bubble_fraction <= base.bubble_fraction + 1e-12
    assert max(half.peak_activations) <= p
    assert max(vee.peak_activations) <= 2 * p  # each half as large
    if m >= p:
        assert half.makespan_s == 3 * m + p - 1  # Qi et al. 2023, table 2, with F = I = W
        assert vee.makespan_s == 6 * m + p - 1  # as short: only the first forward's way to the last rank is idle
    if p > 1:
        assert vee.bubble_fraction < base.bubble_fraction


@given(RANKS, MICRO_BATCHES)
@settings(max_examples=40)
def test_messages_are_not_waited_for_in_every_turn_of_zbv(p: int, m: int) -> None:
    # What a rank does while a message is under way hides it; without that, each micro-batch would wait for its own.
    vee = PipelineSchedule.build("zbv", num_ranks=p, num_micro_batches=max(p, m))
    assert vee.simulate(send_s=0.1).makespan_s <= vee.simulate().makespan_s + 0.6 * p


@given(RANKS, MICRO_BATCHES)
def test_1f1b_holds_no_more_micro_batches_than_stages_are_behind(p: int, m: int) -> None:
    one = PipelineSchedule.build("1f1b", num_ranks=p, num_micro_batches=m).simulate()
    assert one.peak_activations == tuple(min(m, p - rank) for rank in range(p))
    all_first = PipelineSchedule.build("gpipe", num_ranks=p, num_micro_batches=m).simulate()
    assert all_first.peak_activations == (m,) * p


@given(schedules(), st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_what_is_broken_is_refused_with_the_place(schedule: PipelineSchedule, random) -> None:
    rows = [list(row) for row in schedule.actions]
    rank = random.randrange(len(rows))
    dropped = rows[rank].pop(random.randrange(len(rows[rank])))
    with pytest.raises(ConfigError, match="<-- ERROR HERE") as caught:
        schedule.replace(actions=rows)
    assert str(dropped)[0] in str(caught.value)
    assert str(caught.value).count("rank ") >= len(rows)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([["0F0", "0B0"], ["1B0", "1F0"]], "'1B0' waits for ever"),
        ([["0F0", "0B0"], ["1F0"]], "'1B0' is missing"),
        ([["0F0", "0I0"], ["1F0", "1B0"]], "'0W0' is missing"),
        ([["0F0", "0F0", "0B0"], ["1F0", "1B0"]], "'0F0' is there twice"),
        ([["0F0", "0B0", "0W0"], ["1F0", "1B0"]], "'0W0' does again"),
        ([["0F0", "0W0", "0I0"], ["1F0", "1B0"]], "'0W0' waits for ever"),
        ([["0F0", "0B0", "1F0"], ["1B0"]], "rule: stage 1 is on rank 1"),
        ([["0F0", "0B0", "0F1"], ["1F0", "1B0"]], "'0F1' on rank 0 does not exist"),
        ([["0F0", "0B0"]], "1 rows for 2 ranks"),
        ([["0X0"], []], "'0X0' is not an action"),
    ],
)
def test_each_mistake_is_named(rows: list[list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineSchedule(kind="1f1b", num_ranks=2, num_micro_batches=1, actions=rows)


def test_the_table_marks_the_place() -> None:
    with pytest.raises(ConfigError) as caught:
        PipelineSchedule(kind="1f1b", num_ranks=2, num_micro_batches=1, actions=[["0F0", "0B0"], ["1B0", "1F0"]])
    assert str(caught.value).splitlines()[1:] == ["rank 0: 0F0 0B0", "rank 1: 1B0 <-- ERROR HERE 1F0"]


@given(schedules())
def test_json_round_trip(schedule: PipelineSchedule) -> None:
    copy = PipelineSchedule.from_json(schedule.to_json())
    assert copy == schedule
    assert copy.hash == schedule.hash


@given(st.integers(0, 999), st.sampled_from(list(ActionKind)), st.integers(0, 999))
def test_actions_print_and_read_back(stage: int, kind: ActionKind, micro_batch: int) -> None:
    action = Action(stage, kind, micro_batch)
    assert Action.parse(str(action)) == action


def test_a_v_has_the_first_and_the_last_stage_on_one_rank() -> None:
    schedule = PipelineSchedule.build("zbv", num_ranks=3, num_micro_batches=4)
    assert [schedule.stages_of_rank(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]
    dealt = PipelineSchedule.build("interleaved", num_ranks=3, num_micro_batches=4)
    assert [dealt.stages_of_rank(rank) for rank in range(3)] == [(0, 3), (1, 4), (2, 5)]


@pytest.mark.parametrize(
    ("kind", "numbers", "message"),
    [
        ("zbb", {}, r"unknown kind 'zbb' \(did you mean 'zbv'\?\)"),
        ("zbv", {"virtual": 3}, "a V has two stages"),
        ("interleaved", {"virtual": 1}, "several stages"),
        ("1f1b", {"virtual": 2}, "one stage a rank"),
        ("1f1b", {"num_ranks": 0, "num_micro_batches": -1}, "2 problems"),
        ("1f1b", {"num_ranks": "2"}, "a whole number"),
    ],
)
def test_impossible_numbers_are_refused(kind: str, numbers, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PipelineSchedule.build(kind, **({"num_ranks": 2, "num_micro_batches": 2} | numbers))


def test_unequal_stages_cost_what_they_cost() -> None:
    schedule = PipelineSchedule.build("gpipe", num_ranks=2, num_micro_batches=2)
    simulation = schedule.simulate(lambda action: 2.0 if action.stage == 1 else 1.0)
    assert simulation.makespan_s == 1 + 4 * 2 + 1
    assert simulation.bubble_fraction == pytest.approx(1 - 12 / 20)
    with pytest.raises(ConfigError, match="a cost is negative"):
        schedule.simulate(lambda _: -1.0)
    assert schedule.simulate(lambda _: 0.0).bubble_fraction == 0.0
