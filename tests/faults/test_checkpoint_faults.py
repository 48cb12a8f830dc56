"""F21, F22, F26: a save is killed, the power is cut, files are damaged; samples of what `benchmarks/faults` does exhaustively."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.faults.cut_power import one
from tests.faults.checkpoint_damage import flipped, other_lengths, refusal, replaced
from tests.faults.checkpoint_kills import Kill, KilledSave
from tests.faults.checkpoint_saves import SCENARIOS, Version, save_alone
from tests.faults.cut_disk import can_mount


@pytest.fixture
def memory() -> Iterator[Path]:
    """A directory in memory where there is one: neither kills nor damage need a disk."""
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as directory:
        yield Path(directory)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_rank_that_is_killed_leaves_the_old_or_the_new(memory: Path, scenario: str) -> None:
    saves = KilledSave(memory, scenario, 2)
    source = random.Random(scenario)
    for rank, last in ((0, 18), (1, 7)):
        for number in source.sample(range(last), 2):
            killed = saves.kill(Kill(rank, number, "before"))
            assert killed.operation
            assert killed.found in ("nothing" if scenario == "first" else "old", "new")
            assert killed.found != "new" or rank == 0


@pytest.mark.root
def test_a_power_cut_leaves_the_old_or_the_new(memory: Path) -> None:
    # That a sync which is left out is noticed depends on what the kernel writes by itself: it is shown by many cuts, in
    # benchmarks/faults (cut_power_controls.json).
    if not can_mount(memory):
        pytest.skip("loop devices cannot be mounted here (it takes root and a kernel that has them)")
    row = one("the same step", 1, "any", num_mixed=1, left_out="")
    assert row["cuts"] >= 3
    assert not row["failures"], row


def test_damage_is_refused_with_the_file_named(memory: Path) -> None:
    path, other = save_alone(memory, Version(2), 2), save_alone(memory, Version(1), 2)
    assert refusal(path, "") == "accepted"
    for place in sorted(path.iterdir()):
        others = {"another step's": other / place.name}
        answers = [
            *flipped(path, place.name, step=29),
            *other_lengths(path, place.name, step=23),
            *replaced(path, place.name, others),
        ]
        assert len(answers) > 15
        assert [(place.name, what, wrong) for what, wrong in answers if wrong is not None] == []
    assert refusal(path, "") == "accepted"
