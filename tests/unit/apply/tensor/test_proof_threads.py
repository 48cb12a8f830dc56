"""Threads as ranks: what one sets for the process while it exchanges is not another's, and not the caller's afterwards."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwright.apply.tensor.proof.threads import run_as_ranks


def settings() -> tuple[Any, ...]:
    attention = torch.backends.cuda
    kernels = (attention.flash_sdp_enabled(), attention.mem_efficient_sdp_enabled(), attention.math_sdp_enabled())
    return (kernels, torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), list(warnings.filters))


def sum_inside(group: Any) -> tuple[Any, ...]:
    """Exchange under settings of one's own; return what they are afterwards, still inside."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings(record=True):
            group.all_reduce(torch.ones(1))
            inside = settings()[:3]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
    group.leave()
    return inside


def test_settings_of_the_process_are_each_threads_own_and_restored() -> None:
    before, functions = settings(), (warnings.filters, warnings.showwarning)
    found, errors = run_as_ranks(3, sum_inside)
    assert not errors
    assert found == [((False, False, True), torch.float64, True)] * 3
    assert settings() == before
    assert (warnings.filters, warnings.showwarning) == functions
    with pytest.warns(UserWarning, match="still heard"):
        warnings.warn("still heard", UserWarning, stacklevel=1)


def test_settings_are_restored_where_a_thread_raises() -> None:
    def work(group: Any) -> None:
        with sdpa_kernel(SDPBackend.MATH):
            group.all_reduce(torch.ones(1))
            if group.group_rank == 1:
                raise ValueError("mine")
            group.leave()

    before = settings()
    _, errors = run_as_ranks(3, work)
    assert type(errors[0]) is ValueError
    assert settings() == before


def test_a_warning_that_was_shown_is_not_shown_again() -> None:
    def warn(_: Any) -> None:
        warnings.warn("once", UserWarning, stacklevel=1)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            run_as_ranks(2, warn)
    assert len(shown) == 1
