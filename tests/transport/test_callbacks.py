"""Groups that end inside a future's callback, in whichever thread that runs."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.transport import backends
from tests.transport.values import Report, assert_reports

from meshwright import testing


def _destroyed_in_callback(kind: str, waits: bool) -> Report:
    report = Report()
    for round_ in range(6):
        group = backends.new_group(range(dist.get_world_size()))
        assert group is not None
        found: list[str] = []
        done = threading.Event()

        # The function must not keep the group itself: what it destroys may be the last reference.
        def destroy(future: Any, box: list[Any], found: list[str] = found, done: threading.Event = done) -> None:
            try:
                future.value()
                dist.destroy_process_group(box.pop())
                found.append("destroyed")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")
            done.set()

        box: list[Any] = [group]
        data = torch.full((1000 * round_ + 1,), group.rank() + 1.0)
        if kind == "collective":
            work = dist.all_reduce(data, group=group, async_op=True)
        elif group.rank() == 0:
            work = dist.isend(data, group_dst=1, group=group)
        else:
            work = dist.irecv(data, group_src=0, group=group)
        assert work is not None
        del group
        work.get_future().then(lambda future, box=box, destroy=destroy: destroy(future, box))
        if waits:
            work.wait()
        report.true("called back", done.wait(20.0))
        report.equal("in the callback", found, ["destroyed"])
        report.equal("value", float(data[0]), 3.0 if kind == "collective" else 1.0)
        del work
        dist.barrier()
    return report


@pytest.mark.skipif(backends.IS_GLOO, reason="gloo ends the process: its thread waits for its own end")
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", ["collective", "message"])
def test_a_callback_may_destroy_its_group(kind: str, waits: bool) -> None:
    assert_reports(testing.run_ranks(_destroyed_in_callback, 2, kind, waits), at_least=36)
