"""CUDA source of Philox, compiled as C++ and run one thread after the other: torch operators' bits."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from meshwright.apply.randomness import gpu, native
from meshwright.apply.randomness.distributions import uniform
from meshwright.apply.randomness.philox import ElementPlace, Level, key_of, words_at
from meshwright.comm.shm.build import find_compiler, run_all

CPU = torch.device("cpu")
SHIM = """
#define __global__
static struct { unsigned x; } blockIdx, blockDim, threadIdx;
#include "philox.cu"
extern "C" void run(u32 blocks, u32 threads, const i64* loops, int levels, const u32* n, int kind, int a, int b, void* out) {
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x)
    for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
      meshwright_philox(loops, levels, n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], kind, a, b, out);
}
"""
PLACES = [
    ElementPlace(key_of("rows"), (Level(4, 1, 0), Level(103, 0, 1)), 2**33, 2**34 + 1),
    ElementPlace(key_of("middle"), (Level(3, 0, 7), Level(4, 1, 0), Level(7, 0, 1)), 9, 2),
    ElementPlace(key_of("one"), (Level(1, 0, 1),)),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if native.library() is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "shim.cpp").write_text(SHIM, encoding="utf-8")
    source = Path(gpu.__file__).parent / "csrc"
    run_all(
        [[*find_compiler(), "-shared", "-fPIC", f"-I{source}", str(folder / "shim.cpp"), "-o", str(folder / "a.so")]]
    )
    return ctypes.CDLL(str(folder / "a.so"))


@pytest.mark.parametrize("place", PLACES)
def test_numbers_are_those_of_torch_operators(
    run: ctypes.CDLL, place: ElementPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernel(*, grid: tuple[int, ...], block: tuple[int, ...], args: list[object]) -> None:
        loops, levels, *numbers = args[:10]
        kind, first, second, out = args[10:]
        assert isinstance(loops, torch.Tensor)
        assert isinstance(out, torch.Tensor)
        words = (ctypes.c_uint32 * 8)(*numbers)
        run.run(
            *(grid[0], block[0], ctypes.c_void_p(loops.data_ptr()), levels, words, kind),
            *(ctypes.c_int(first), ctypes.c_int(second), ctypes.c_void_p(out.data_ptr())),  # type: ignore[arg-type]
        )

    monkeypatch.setattr(gpu, "_of", lambda _: kernel)
    monkeypatch.setattr(torch.cuda, "device", lambda _: torch.inference_mode(False))
    wanted = words_at(place, 0, CPU)
    for plane in (0, 1):
        found = torch.empty(place.count, dtype=torch.int32)
        gpu.fill_words(found, place, plane)
        assert torch.equal(found.to(torch.int64) & 0xFFFFFFFF, words_at(place, plane, CPU))
    for dtype in (torch.bool, torch.float32):
        kept = torch.empty(place.count, dtype=dtype)
        gpu.fill_kept(kept, place, 3_000_000_000)
        assert torch.equal(kept.bool(), wanted <= 3_000_000_000)
    for dtype, bits in ((torch.float32, 24), (torch.float64, 53)):
        numbers = torch.empty(place.count, dtype=dtype)
        gpu.fill_uniform(numbers, place, bits)
        assert torch.equal(numbers, uniform(place, dtype, CPU))
