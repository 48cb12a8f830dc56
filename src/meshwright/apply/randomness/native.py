"""Philox in C++, built once for this compiler and kind of processor; without a compiler torch operators compute the same bits."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from meshwright.apply.randomness.philox import ElementPlace, Level
from meshwright.comm.shm.build import (
    FLAGS,
    BuildError,
    cache_directory,
    describe_processor,
    find_compiler,
    held_lock,
    is_sound,
    run_all,
)
from meshwright.kept_files import keep_file

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")
_SOURCE = Path(__file__).parent / "csrc" / "philox.cpp"
_FLAGS = (*FLAGS, "-pthread")
_MAX_LEVELS = 8
_PER_THREAD = 2**19
"""Elements for which another thread is worth its start [count]."""


class _Loops(ctypes.Structure):
    _fields_ = [
        ("key", ctypes.c_uint64),
        ("count", ctypes.c_int64 * _MAX_LEVELS),
        ("sample", ctypes.c_int64 * _MAX_LEVELS),
        ("index", ctypes.c_int64 * _MAX_LEVELS),
        ("levels", ctypes.c_int64),
        ("first_sample", ctypes.c_int64),
        ("first_index", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("row_sample", ctypes.c_void_p),
        ("row_index", ctypes.c_void_p),
    ]


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the library, building it first if the cache has none; None where it cannot be built, which is logged once."""
    try:
        return ctypes.CDLL(str(_build()))
    except (BuildError, OSError) as error:
        _LOG.warning("random numbers are drawn by torch operators, which are slower: %s", error)
        return None


def _build() -> Path:
    if not sys.platform.startswith("linux"):
        raise BuildError(f"it is built on Linux alone, this is {sys.platform}")
    directory = cache_directory()
    digest = hashlib.sha256(_SOURCE.read_bytes() + repr((_FLAGS, describe_processor())).encode()).hexdigest()[:20]
    target = directory / f"_meshwright_philox-{digest}.so"
    if is_sound(target):
        return target
    with held_lock(directory / "build.lock"):
        if not is_sound(target):
            with tempfile.TemporaryDirectory(prefix="philox-", dir=directory) as scratch:
                made = Path(scratch, target.name)
                run_all([[*find_compiler(), *_FLAGS, "-shared", str(_SOURCE), "-o", str(made)]])
                keep_file(target, made.read_bytes())
    return target


def takes(place: ElementPlace, device: torch.device) -> bool:
    """Tell whether the library can fill a tensor on a device."""
    return device.type == "cpu" and len(place.levels) <= _MAX_LEVELS and library() is not None


def _given(place: ElementPlace) -> tuple[ctypes.CDLL, _Loops, int]:
    found = library()
    if found is None:
        raise BuildError("the library is not there")
    template, count = _with_levels(place.levels)
    given = _Loops.from_buffer_copy(template)
    given.key, given.first_sample, given.first_index = place.key, place.first_sample, place.first_index
    if place.rows is not None:
        given.rows, count = len(place.rows.samples), place.count
        given.row_sample, given.row_index = place.rows.samples.data_ptr(), place.rows.indices.data_ptr()
    return found, given, max(1, min(torch.get_num_threads(), count // _PER_THREAD))


@functools.lru_cache(maxsize=1024)
def _with_levels(levels: tuple[Level, ...]) -> tuple[_Loops, int]:
    """Return a place with these levels, and its elements [count]."""
    given, count = _Loops(levels=len(levels), rows=-1), 1
    for at, level in enumerate(levels):
        given.count[at], given.sample[at], given.index[at] = level.count, level.sample, level.index
        count *= level.count
    return given, count


def fill_words(out: Tensor, place: ElementPlace, plane: int) -> None:
    """Fill a contiguous int32 tensor with the bits of a plane's words."""
    found, given, threads = _given(place)
    found.meshwright_philox_words(
        ctypes.byref(given), ctypes.c_int64(threads), ctypes.c_int64(plane), ctypes.c_void_p(out.data_ptr())
    )


@functools.cache
def _bits_of_one(dtype: torch.dtype) -> int:
    return int.from_bytes(bytes(torch.ones(1, dtype=dtype).view(torch.uint8).tolist()), "little")


def fill_kept(out: Tensor, place: ElementPlace, most: int) -> None:
    """Fill a contiguous tensor with 1 where an element's word is at most `most`, and with 0 elsewhere."""
    found, given, threads = _given(place)
    width = out.element_size()
    one = _bits_of_one(out.dtype)
    found.meshwright_philox_keep(
        ctypes.byref(given),
        ctypes.c_int64(threads),
        ctypes.c_uint32(most),
        ctypes.c_uint64(one),
        ctypes.c_int64(width),
        ctypes.c_void_p(out.data_ptr()),
    )


def fill_uniform(out: Tensor, place: ElementPlace, bits: int) -> None:
    """Fill a contiguous float32 tensor (bits at most 24) or a float64 one (53) with multiples of 2**-bits in [0, 1)."""
    found, given, threads = _given(place)
    address = ctypes.c_void_p(out.data_ptr())
    if out.dtype == torch.float64:
        found.meshwright_philox_uniform64(ctypes.byref(given), ctypes.c_int64(threads), address)
    else:
        found.meshwright_philox_uniform32(ctypes.byref(given), ctypes.c_int64(threads), ctypes.c_int64(bits), address)


def place_chosen_rows(
    sources: Tensor, counts: Tensor, *, each: int, num_samples: int, is_minor: bool, first: int, turn_bits: int
) -> tuple[Tensor, Tensor]:
    """Return the samples of chosen rows, with their turns above `turn_bits`, and their places within them: int64, one dim each.

    Args:
        sources: Each row's number among those that were there to choose: contiguous int64, one dim.
        counts: How often each row of each sample has drawn before, the samples innermost: the like, raised here.
        each: Rows of a sample [count].
        num_samples: Of the forward [count].
        is_minor: Whether the rows of a sample lie `num_samples` apart, not beside each other.
        first: The place of the forward's first sample.
        turn_bits: Bits of a sample's number [bits].
    """
    found = library()
    if found is None:
        raise BuildError("the library is not there")
    samples, indices = torch.empty_like(sources), torch.empty_like(sources)
    numbers = (each, num_samples, int(is_minor), first, turn_bits)
    found.meshwright_chosen_rows(
        ctypes.c_void_p(sources.data_ptr()),
        ctypes.c_int64(len(sources)),
        ctypes.c_void_p(counts.data_ptr()),
        *map(ctypes.c_int64, numbers),
        ctypes.c_void_p(samples.data_ptr()),
        ctypes.c_void_p(indices.data_ptr()),
    )
    return samples, indices
