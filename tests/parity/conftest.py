"""One thread for the reference, as in the ranks, and one worker for all tests of Hugging Face's models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small models gain nothing from more, and ranks share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(optionalhook=True)  # pytest alone, without xdist, knows no such hook
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of Hugging Face's models to one of the workers, as if they were one test, and the others as usual.

    Importing `transformers` takes each rank of a pool seconds, and every worker has pools of its own.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            is_hugging_face = "[hf_" in nodeid or "test_hugging_face.py" in nodeid
            return "hugging_face" if is_hugging_face else nodeid

    return Scheduling(config, log) if config.getoption("dist") == "load" else None
