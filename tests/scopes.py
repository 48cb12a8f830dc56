"""Which tests run: everything or a choice, and which share what takes seconds to make, on one worker therefore."""

from __future__ import annotations

import os
import re
from typing import Final

from tests.cell_command import OVER_GLOO

__all__: list[str] = []

FULL_GRID: Final = os.environ.get("MESHWRIGHT_FULL_GRID") == "1"
"""Every model under every plan with every setting, every seed and every instant: `make test-grid`."""

FOR_RANKS: Final = (
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "meshwright.compare.run_plans",
    "meshwright.train.session",
)
"""What tests of ranks import, and what an optimizer imports when it is made (torch._dynamo): once, in the pool's templates."""

ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Environment of ranks: the same in all folders, or a worker would keep templates for each."""

_TOGETHER = (
    "docs/test_compare.py",
    "docs/test_wheel.py",
    "faults/test_resumed.py",
    "parity/test_never_wrong_search.py",
    "tensor/test_tensor_search.py",
)
"""Files whose tests look at things that take seconds to make: a comparison, a wheel, undisturbed runs, layouts."""

_EIGHT = re.compile(r"-8[-\]]|\[8[-\]]|dp=2,tp=2,pp=2|eight")
"""Of names of tests on eight ranks."""


def is_hugging_face(nodeid: str) -> bool:
    """Tell whether a test's ranks import `transformers`."""
    return (
        "[hf_" in nodeid
        or "test_hugging_face.py" in nodeid
        or "test_trainer.py" in nodeid
        or "test_fabric.py" in nodeid
    )


def scope_of(nodeid: str) -> str:
    """Return the name of the tests that a test runs with, or its own.

    Each worker has pools of its own, whose ranks would import `transformers` or start anew for another transport, and would make
    its own comparison and wheel.
    """
    if is_hugging_face(nodeid):
        return "hugging_face"
    if nodeid.endswith(OVER_GLOO):
        return "gloo"
    if "/unit/" not in nodeid and _EIGHT.search(nodeid):
        return "eight ranks"
    return next((file for file in _TOGETHER if file in nodeid), nodeid)
