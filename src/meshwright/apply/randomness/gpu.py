"""Philox on a GPU: a CUDA kernel, compiled by NVRTC when a device first draws, and used where it gives torch operators' bits."""

from __future__ import annotations

import functools
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from meshwright._torch_private import compile_cuda
from meshwright.apply.randomness.philox import ElementPlace, Level, words_at

__all__: list[str] = []

_LOG = logging.getLogger("meshwright")
_SOURCE = Path(__file__).parent / "csrc" / "philox.cu"
_THREADS: Final = 256
_WORDS, _KEPT, _UNIFORM_32, _UNIFORM_64 = range(4)
_LOW: Final = 2**32 - 1
_BYTES: Final = (torch.bool, torch.uint8, torch.int8)


@functools.cache
def kernel_of(index: int) -> Callable[..., None] | None:
    """Return the kernel of a CUDA device; None where it cannot be compiled or gives other bits, which is logged once."""
    try:
        with torch.cuda.device(index):
            kernel = compile_cuda(_SOURCE.read_text(encoding="utf-8"), "meshwright_philox")
            is_right = _is_right(kernel, torch.device("cuda", index))
    except Exception as error:  # noqa: BLE001 - of NVRTC, the driver, ctypes or a private name of torch's
        _LOG.warning("no kernel for random numbers by place on cuda:%d: %s", index, error)
        return None
    if not is_right:
        _LOG.warning("the kernel for random numbers by place gives other numbers on cuda:%d, and is not used", index)
    return kernel if is_right else None


def is_there(device: torch.device) -> bool:
    """Tell whether a device has the kernel."""
    return device.type == "cuda" and kernel_of(_index_of(device)) is not None


def _index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def _is_right(kernel: Callable[..., None], device: torch.device) -> bool:
    place = ElementPlace(0x9E3779B97F4A7C15, (Level(3, 0, 7), Level(5, 1, 0), Level(1003, 0, 1)), 2**33 + 1, 2**34 + 1)
    for plane in (0, 1):
        found = torch.empty(place.count, dtype=torch.int32, device=device)
        _launch(kernel, found, place, _WORDS, plane)
        if not torch.equal(found.to(torch.int64) & _LOW, words_at(place, plane, device)):
            return False
    return True


@functools.lru_cache(maxsize=1024)
def _loops(levels: tuple[Level, ...], device: torch.device) -> Tensor:
    rows = [[level.count, level.sample, level.index] for level in levels]
    return torch.tensor(rows, dtype=torch.int64).to(device)


def _launch(kernel: Callable[..., None], out: Tensor, place: ElementPlace, kind: int, *params: int) -> None:
    numbers = [
        half
        for number in (place.count, place.key, place.first_sample, place.first_index)
        for half in (number & _LOW, number >> 32 & _LOW)
    ]
    arguments: list[Any] = [
        _loops(place.levels, out.device),
        len(place.levels),
        *numbers,
        kind,
        *(*params, 0, 0)[:2],
        out,
    ]
    blocks = -(-place.count // _THREADS)
    if blocks:
        with torch.cuda.device(out.device):
            kernel(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=arguments)


def _of(out: Tensor) -> Callable[..., None]:
    kernel = kernel_of(_index_of(out.device))
    if kernel is None:
        raise RuntimeError(f"{out.device} has no kernel")
    return kernel


def fill_words(out: Tensor, place: ElementPlace, plane: int) -> None:
    """Fill a contiguous int32 tensor with the bits of a plane's words."""
    _launch(_of(out), out, place, _WORDS, plane)


def fill_kept(out: Tensor, place: ElementPlace, most: int) -> None:
    """Fill a contiguous tensor with 1 where an element's word is at most `most`, and with 0 elsewhere."""
    kept = out if out.dtype in _BYTES else torch.empty(out.shape, dtype=torch.bool, device=out.device)
    _launch(_of(out), kept, place, _KEPT, most)
    if kept is not out:
        out.copy_(kept)


def fill_uniform(out: Tensor, place: ElementPlace, bits: int) -> None:
    """Fill a contiguous float32 tensor (bits at most 24) or a float64 one (53) with multiples of 2**-bits in [0, 1)."""
    if out.dtype == torch.float64:
        _launch(_of(out), out, place, _UNIFORM_64)
    else:
        _launch(_of(out), out, place, _UNIFORM_32, bits, struct.unpack("<I", struct.pack("<f", 2.0**-bits))[0])
