"""Codecs and the steps of PowerSGD: bounds, round trips, odd sizes, and that nothing hides an Inf."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from meshwright.comm.compression import low_rank
from meshwright.comm.compression.codecs import ALIGNMENT, Cast, Codec, Int4, Int8
from meshwright.comm.compression.reducer import GradientSpec, KeptTensors
from meshwright.errors import ApplyError

CODECS = {"int8": Int8(), "int4": Int4(), "bf16": Cast(torch.bfloat16), "exact": Cast(None)}
DTYPES = (torch.float32, torch.float64)


def through(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    payload = torch.full((codec.payload_bytes(values.numel(), values.dtype),), 0xA5, dtype=torch.uint8)
    codec.encode(values, payload)
    back = torch.full_like(values, 7.0)
    codec.decode(payload, back)
    return back


def bound(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Half a scale of each number's block, with room for the rounding of the scale itself."""
    if isinstance(codec, Cast):
        return values.abs() * (2**-8 if codec.dtype == torch.bfloat16 else 0)
    padded = torch.nn.functional.pad(values, (0, -values.numel() % codec.block)).view(-1, codec.block)
    half = padded.abs().amax(dim=1, keepdim=True) / codec.largest_code / 2
    return (half.expand_as(padded).reshape(-1)[: values.numel()]) * (1 + 1e-4)


arrays = hnp.arrays(
    np.float32,
    st.integers(0, 1200),
    elements=st.floats(-1e6, 1e6, width=32, allow_subnormal=False).filter(lambda x: x == 0 or abs(x) > 1e-20),
)


@given(array=arrays)
@settings(max_examples=40, deadline=None)
def test_no_number_is_off_by_more_than_half_a_scale(array: np.ndarray) -> None:
    # All codecs take the same arrays: to draw one takes longer than all that is done with it.
    for name, codec in CODECS.items():
        for dtype in DTYPES:
            values = torch.from_numpy(array.copy()).to(dtype)
            back = through(codec, values)
            assert bool(((back - values).abs() <= bound(codec, values)).all()), (name, dtype)


@pytest.mark.parametrize("name", ["int8", "int4"])
@given(numel=st.integers(1, 700), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_every_code_survives_at_its_place(name: str, numel: int, seed: int) -> None:
    codec = CODECS[name]
    largest = codec.largest_code
    values = torch.randint(-largest, largest + 1, (numel,), generator=torch.Generator().manual_seed(seed)).float()
    values[:: codec.block] = largest  # so that every block's scale is 1
    assert torch.equal(through(codec, values), values)


@pytest.mark.parametrize("name", CODECS)
def test_zeros_and_nothing_at_all(name: str) -> None:
    assert torch.equal(through(CODECS[name], torch.zeros(301)), torch.zeros(301))
    assert through(CODECS[name], torch.empty(0)).numel() == 0


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_payload_of_zero_bytes_reads_as_zeros(name: str) -> None:
    # What a rank without a gradient sends.
    values = torch.full((300,), 7.0)
    CODECS[name].decode(torch.zeros(CODECS[name].payload_bytes(300, values.dtype), dtype=torch.uint8), values)
    assert not values.any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", CODECS)
@given(numel=st.integers(1, 600), data=st.data())
@settings(max_examples=20, deadline=None)
def test_what_is_not_finite_stays_visible(name: str, bad: float, numel: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, numel - 1))
    values = torch.ones(numel)
    values[place] = bad
    back = through(CODECS[name], values)
    assert not math.isfinite(back[place].item())
    assert not math.isfinite(torch.linalg.vector_norm(back).item())
    block = getattr(CODECS[name], "block", 1)
    others = torch.arange(numel) // block != place // block
    assert bool(torch.isfinite(back[others]).all())


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_magnitudes_at_the_edges_of_the_dtype(name: str) -> None:
    for value in (1e-45, 1e-39, 1e-37, 3e38):
        back = through(CODECS[name], torch.tensor([value, -value, 0.0]))
        assert bool(torch.isfinite(back).all())
        assert bool((back.abs() <= value * 1.01).all())
    tiny = torch.tensor([1e-300, 1e300], dtype=torch.float64)
    assert through(CODECS[name], tiny)[1].item() == pytest.approx(1e300)


@pytest.mark.parametrize(("name", "ratio"), [("bf16", 2.0), ("int8", 3.93), ("int4", 7.5)])
def test_bytes_scales_included(name: str, ratio: float) -> None:
    numel = 1024 * 1024
    assert 4 * numel / CODECS[name].payload_bytes(numel, torch.float32) >= ratio
    assert all(CODECS[name].payload_bytes(n, torch.float32) % ALIGNMENT == 0 for n in range(1, 300))


# -- PowerSGD ---------------------------------------------------------------------------------------------------------


def power_sgd_step(matrices: list[torch.Tensor], basis: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum the ranks' matrices, which become what is not sent; return (sum, next basis)."""
    start = low_rank.orthonormal(basis)
    left = low_rank.orthonormal(torch.stack([low_rank.project(matrix, start) for matrix in matrices]).sum(0))
    right = torch.stack([low_rank.take_out(matrix, left) for matrix in matrices]).sum(0)
    return left @ right.t(), right


@given(rows=st.integers(4, 40), columns=st.integers(4, 40), seed=st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_what_is_sent_and_what_is_kept_add_up(rows: int, columns: int, seed: int) -> None:
    torch.manual_seed(seed)
    matrices = [torch.randn(rows, columns, dtype=torch.float64) for _ in range(3)]
    true_sum = torch.stack(matrices).sum(0)
    kept = [matrix.clone() for matrix in matrices]
    sent, _ = power_sgd_step(kept, low_rank.first_basis("w", columns, 4, true_sum))
    torch.testing.assert_close(sent + torch.stack(kept).sum(0), true_sum, rtol=0, atol=1e-12)
    # A projection: what was sent and what was kept stand at right angles, so what is kept is never longer.
    assert torch.linalg.norm(torch.stack(kept).sum(0)) <= torch.linalg.norm(true_sum) * (1 + 1e-12)


def test_a_matrix_of_low_rank_is_sent_whole_at_once() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(50, 3, dtype=torch.float64) @ torch.randn(3, 30, dtype=torch.float64)
    kept = [matrix.clone()]
    sent, _ = power_sgd_step(kept, low_rank.first_basis("w", 30, 4, matrix))
    torch.testing.assert_close(sent, matrix, rtol=0, atol=1e-11)


def test_warm_start_finds_the_largest_directions() -> None:
    torch.manual_seed(0)
    u, v = low_rank.orthonormal(torch.randn(60, 20)), low_rank.orthonormal(torch.randn(40, 20))
    matrix = u @ torch.diag(torch.tensor([10.0, 9, 8, 7] + [0.5] * 16)) @ v.t()
    basis = low_rank.first_basis("w", 40, 4, matrix)
    errors = []
    for _ in range(5):
        sent, basis = power_sgd_step([matrix.clone()], basis)
        errors.append(torch.linalg.norm(sent - matrix).item())
    assert errors[-1] < errors[0]
    assert errors[-1] == pytest.approx(2.0, rel=1e-3)  # sqrt(16 * 0.5 ** 2): the best that rank 4 can do


def test_a_gradient_of_zeros_does_not_end_the_basis() -> None:
    torch.manual_seed(0)
    sent, basis = power_sgd_step([torch.zeros(20, 10)], low_rank.first_basis("w", 10, 4, torch.zeros(1)))
    assert not sent.any()
    matrix = torch.randn(20, 10)
    sent, _ = power_sgd_step([matrix.clone()], basis)
    assert torch.linalg.norm(sent) > 0.3 * torch.linalg.norm(matrix)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_power_sgd_does_not_hide_what_is_not_finite(bad: float) -> None:
    matrix = torch.ones(20, 10)
    matrix[3, 4] = bad
    sent, _ = power_sgd_step([matrix, torch.ones(20, 10)], low_rank.first_basis("w", 10, 4, matrix))
    assert not math.isfinite(torch.linalg.norm(sent).item())


def test_first_bases_are_equal_everywhere_and_differ_by_name() -> None:
    like = torch.zeros(1)
    assert torch.equal(low_rank.first_basis("a", 9, 4, like), low_rank.first_basis("a", 9, 4, like))
    assert not torch.equal(low_rank.first_basis("a", 9, 4, like), low_rank.first_basis("b", 9, 4, like))


# -- what a reducer knows of a gradient ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parameter", "numel", "row"),
    [
        (torch.zeros(6, 4), 24, 4),
        (torch.zeros(4, 6).t(), 24, 6),  # rows as they lie in memory
        (torch.zeros(8, 3, 5, 5), 600, 75),
        (torch.zeros(8, 3, 5, 5).contiguous(memory_format=torch.channels_last), 600, 75),
        (torch.zeros(7), 7, 1),
        (torch.zeros(()), 1, 1),
        (torch.zeros(1, 9), 9, 1),
        (torch.zeros(9, 1), 9, 1),
        (torch.zeros(0, 3), 0, 1),
        (torch.zeros(6, 4, dtype=torch.complex64), 48, 8),
        (torch.zeros(6, dtype=torch.complex64), 12, 1),
    ],
)
def test_rows_of_a_gradient(parameter: torch.Tensor, numel: int, row: int) -> None:
    spec = GradientSpec.of("w", parameter)
    assert (spec.numel, spec.row_numel, spec.is_matrix) == (numel, row, row > 1)


def test_a_stretch_of_a_gradient_knows_where_it_begins() -> None:
    spec = GradientSpec.of("w", torch.zeros(6, 4), 5, 17)
    assert (spec.name, spec.numel, spec.row_numel, spec.start) == ("w[5:17]", 12, 4, 5)


def test_kept_tensors_are_refused_where_their_shape_is_another() -> None:
    kept = KeptTensors("unsent")
    kept.load_state({"w/unsent": torch.ones(3), "w/basis": torch.ones(2)})
    assert set(kept.state()) == {"w/unsent"}
    found = kept.get("w", (3,), torch.float64, torch.device("cpu"))
    assert found is not None
    assert found.dtype == torch.float64
    with pytest.raises(ApplyError, match=r"'w' has the shape \(3,\)"):
        kept.get("w", (4,), torch.float32, torch.device("cpu"))
