"""One thread for the reference, as in the ranks: small models gain nothing from more, and ranks share the cores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cell_command import pytest_runtest_makereport  # noqa: F401 - a hook


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
