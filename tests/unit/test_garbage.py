"""Threads that run the user's code at the same time: what Python collects meanwhile can block none of them."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from meshwright.garbage import paused_collection


@pytest.mark.parametrize("enabled", [True, False])
def test_collection_is_off_inside_and_as_it_was_after(enabled: bool) -> None:
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with paused_collection(), paused_collection():
            assert not gc.isenabled()
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_it_stays_off_until_the_last_thread_leaves() -> None:
    inside, leave = threading.Event(), threading.Event()

    def work() -> None:
        with paused_collection():
            inside.set()
            leave.wait(30)

    thread = threading.Thread(target=work)
    with paused_collection():
        thread.start()
        assert inside.wait(30)
    assert not gc.isenabled()
    leave.set()
    thread.join(30)
    assert gc.isenabled()


_SETTING = """
import gc, time, torch
from torch import nn
from torch.utils.checkpoint import checkpoint

class Cycle:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0.01)  # hands the interpreter to another thread

plain = torch.get_rng_state

def with_garbage():
    Cycle()
    return plain()

torch.get_rng_state = with_garbage  # as the one among many calls at which a collection is due
gc.set_threshold(1)

class Block(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.block = block
    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)
"""

_REPLICAS = """
import meshwright as mw
model = mw.apply_plan(
    nn.Sequential(*[Block(nn.Linear(4, 4).double()) for _ in range(8)]),
    mw.Plan.parse("data_parallel", num_devices=2), devices=["cpu", "cpu"],
    loss_fn=lambda outputs, batch: outputs.square().mean(), optimizer=lambda given: torch.optim.SGD(given, lr=0.1))
for _ in range(6):
    model.step(torch.randn(4, 4, dtype=torch.float64))
print("replicas", flush=True)
"""

_PROOF = """
from tests.unit.apply.tensor.tensor_type_cases import PAIR, Between, experiment_of
class Recomputed(Between):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)
for _ in range(10):
    experiment_of(Recomputed(lambda _, h: h.relu())).prove(PAIR)
print("proof")
"""


def test_recompute_in_several_threads_blocks_none_of_them() -> None:
    # torch.get_rng_state, which recompute calls, holds the generator's lock where a collection may run.
    program = _SETTING + _REPLICAS + _PROOF
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == ["replicas", "proof"], done.stderr[-2000:]
