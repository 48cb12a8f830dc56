from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright import units
from meshwright.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25 MiB", 25 * 2**20),
        ("25MiB", 25 * 2**20),
        ("1.5GB", 1_500_000_000),
        ("0.5 GiB", 2**29),
        ("1_000", 1000),
        ("2e3 kb", 2_000_000),
        (".5 kB", 500),
        (7, 7),
        ("0", 0),
        ("9007199254740993", 2**53 + 1),
    ],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "MiB", "-1", "1 MiBs", "1 GB/s", "nan", "inf", "1e999", "1 2", "--1", "١"])
def test_what_is_no_size_is_refused_with_a_fix(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a valid size") as caught:
        units.parse_bytes(text)
    assert caught.value.fix is not None


def test_an_unknown_unit_has_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"unit 'MiBB' is unknown \(did you mean 'MiB'\?\)"):
        units.parse_bytes("3 MiBB")


@given(st.integers(0, 2**60))
def test_exact_sizes_read_back_to_the_byte(num_bytes: int) -> None:
    text = units.print_bytes_exactly(num_bytes)
    assert " " not in text
    assert units.parse_bytes(text) == num_bytes


@given(st.integers(0, 2**60))
def test_printed_sizes_are_close(num_bytes: int) -> None:
    assert units.parse_bytes(units.format_bytes(num_bytes)) == pytest.approx(num_bytes, rel=1e-3, abs=1)


def test_bandwidth_is_decimal_and_memory_binary() -> None:
    assert units.format_bandwidth(900e9) == "900 GB/s"
    assert units.format_bytes(80 * 2**30) == "80 GiB"


def test_no_number_prints_as_a_thousand_of_a_smaller_unit() -> None:
    assert units.format_bytes(2**20 - 1) == "1 MiB"
    assert units.format_seconds(0.0009999999) == "1 ms"
    assert units.format_bytes(1023) == "1023 B"
    assert units.format_seconds(0) == "0 ns"


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_config_error(text: str) -> None:
    try:
        size, complaint = units.parse_bytes(text), "is not a valid size"
    except ConfigError as error:
        size, complaint = 0, str(error)
    assert size >= 0
    assert "is not a valid size" in complaint
