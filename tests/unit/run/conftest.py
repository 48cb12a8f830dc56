"""Pages for every tensor that is built, however small."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from meshwright.run.building import paged_build


@pytest.fixture
def everything_in_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(paged_build, "PLAIN_BYTES", 0)
    monkeypatch.setattr(paged_build, "LARGE_BYTES", 1)
    yield
    gc.collect()
