"""Digests of tensors, batches and random states in 64 bits: equal bits give equal digests on every rank and kind of device.

Memory is read as 64-bit words. Each word is mixed with its own upper bits, multiplied by a weight of its position, and summed
modulo 2^64. So a flipped bit, swapped rows, or a tensor with its sign changed gives another digest. The arithmetic is the same in
numpy, which is faster on the host, and in torch, which other devices need.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from meshwright.trees import tensors_in

__all__: list[str] = []

_MASK = 2**64 - 1
_SHIFT = 29
_CHUNK = 2**15
"""Words that share one set of weights [count]: with the weights they fit into a core's cache."""
_STEP = 0x9E3779B97F4A7C15
"""What the digest of earlier chunks is multiplied by; odd, so that nothing is lost."""
_SMALL = 2**16
"""Tensors below this size are put together before they are digested [bytes]."""
_SAMPLE_ABOVE = 2**16
"""Tensors of a batch above this size are sampled, unless all of them is asked for [bytes]."""
_EDGE = 2**14
"""What is read of such a tensor's begin and end [bytes]."""
_SAMPLES = 2**11
"""Words that are read between them [count]."""
_VALUES = (bool, int, float, complex, str, type(None))
_MOST_VALUES = 500
"""Values of a batch beside tensors that are compared [count]."""
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_DTYPE_NUMBERS = {
    dtype: number
    for number, dtype in enumerate(
        (
            *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
            *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        )
    )
}
"""Dtypes whose memory numpy reads as it is; `hash` of a text differs from process to process, of a number it does not."""


def _splitmix(count: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return this many 64-bit pseudo-random numbers, the same everywhere (Steele et al. 2014)."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_STEP)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


_WEIGHTS = _splitmix(_CHUNK)
_DEVICE_WEIGHTS: dict[torch.device, torch.Tensor] = {}


def digest_text(text: str) -> int:
    """Return the digest of a text."""
    data = text.encode("utf-8", "surrogatepass")
    return zlib.crc32(data) << 32 | zlib.crc32(data[::-1])


def digest_of(tensors: Sequence[torch.Tensor]) -> int:
    """Return one digest of several tensors in their order; small ones are concatenated first, which takes fewer calls."""
    total = len(tensors)
    for tensor in _joined(tensors):
        total = _follow(total, digest_tensor(tensor))
    return total


def digest_tensor(tensor: torch.Tensor) -> int:
    """Return the digest of all values of a tensor; shape and dtype are not part of it."""
    return _digest_bytes(_bytes_of(tensor))


def digest_batch(batch: Any, *, whole: bool) -> int:
    """Return the digest of a batch: its tensors' shapes, dtypes, values and whether they require a gradient; other values.

    It is fast rather than strong, and depends on the device; where it differs, `digest_tensor` decides.

    Args:
        batch: The batch; None is an empty share.
        whole: Whether to read every value; else only begin, end and a sample of rows of large tensors.
    """
    if batch is None:
        return 0
    total = 1
    for tensor in tensors_in(batch):
        kind = _DTYPE_NUMBERS.get(tensor.dtype)
        is_known = kind is not None and not tensor.is_nested
        total = _follow(total, hash((*tensor.shape, kind)) if is_known else digest_of_shape(tensor))
        total = _follow(total, tensor.requires_grad)
        total = _follow(total, _quick(tensor, whole=whole))
    values = named_values(batch)
    return _follow(total, digest_text(repr(values))) if values else total


def digest_of_shape(tensor: torch.Tensor) -> int:
    """Return the digest of a tensor's shape and dtype."""
    if tensor.is_nested:
        return digest_text("".join(f"{tuple(part.shape)}{part.dtype}" for part in tensor.unbind()))
    return digest_text(f"{tuple(tensor.shape)}{tensor.dtype}")


def digest_rows(tensor: torch.Tensor) -> list[int]:
    """Return the digest of each row along dim 0; of a tensor without dims, its own."""
    return [digest_tensor(row) for row in tensor] if tensor.dim() else [digest_tensor(tensor)]


def digest_rng(cpu: torch.Tensor, cuda: torch.Tensor | None) -> int:
    """Return a fast digest of the states of torch's generators."""
    total = zlib.crc32(cpu.numpy().data)
    return total if cuda is None else _follow(total, zlib.crc32(cuda.numpy().data))


def named_tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (path, tensor) of the tensors inside the containers; those in containers of other kinds are numbered."""
    if isinstance(tree, torch.Tensor):
        yield name or "the batch", tree
    elif isinstance(tree, Mapping) or (isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields")):
        items: Iterable[tuple[Any, Any]] = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            yield from named_tensors(value, f"{name}[{key!r}]")
    else:
        for number, tensor in enumerate(tensors_in(tree)):
            yield f"{name}, tensor {number}".removeprefix(", "), tensor


def named_values(tree: Any, name: str = "") -> list[tuple[str, str]]:
    """Return (path, value as text) of the numbers, flags and texts inside the containers, at most some hundred."""
    found: list[tuple[str, str]] = []
    if isinstance(tree, Mapping) or (isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields")):
        items: Iterable[tuple[Any, Any]] = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            if not isinstance(value, torch.Tensor):
                found += named_values(value, f"{name}[{key!r}]")
            if len(found) >= _MOST_VALUES:
                break
    elif type(tree) in _VALUES:
        found.append((name or "the batch", repr(tree)))
    return found


def _follow(total: int, following: int) -> int:
    return (total * _STEP + following) & _MASK


def _joined(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the tensors as bytes: large ones alone, small ones concatenated, device by device."""
    small: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.layout == torch.strided and tensor.nbytes < _SMALL:
            small.setdefault(tensor.device, []).append(_bytes_of(tensor))
        else:
            yield _bytes_of(tensor)
    for members in small.values():
        yield torch.cat(members)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values as one row of bytes, without a copy where they are contiguous."""
    value = tensor.detach()
    parts = _parts_of(value)
    if parts is not None:
        return torch.cat([_bytes_of(part) for part in parts])
    value = value.as_subclass(torch.Tensor)
    if value.is_conj() or value.is_neg():
        value = value.resolve_conj().resolve_neg()
    row = value.contiguous().view(-1)
    if row.stride(0) != 1:  # one entry, expanded
        row = row.clone(memory_format=torch.contiguous_format)
    return row.view(torch.uint8)


def _parts_of(value: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the plain tensors that a tensor consists of; None where it is one."""
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:  # torch's protocol for subclasses that wrap tensors
        names, _ = flatten()
        return [getattr(value, name) for name in names]
    if value.is_nested:
        return list(value.unbind())
    if value.layout == torch.sparse_coo:
        value = value.coalesce()
        return [value.indices(), value.values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return None if value.layout == torch.strided else [value.to_dense()]


def _quick(tensor: torch.Tensor, *, whole: bool) -> int:
    is_plain = type(tensor) in _PLAIN and tensor.dtype in _DTYPE_NUMBERS and not tensor.is_nested
    if not (is_plain and tensor.layout == torch.strided and tensor.is_contiguous()) or tensor.is_neg():
        return digest_tensor(tensor)
    if tensor.device.type == "cpu" and tensor.nbytes <= _SAMPLE_ABOVE:
        value = tensor.detach() if tensor.requires_grad else tensor
        return zlib.crc32((value.view(torch.int16) if value.dtype == torch.bfloat16 else value).numpy().data)
    row = _bytes_of(tensor)
    if whole or row.numel() <= _SAMPLE_ABOVE:
        return _digest_bytes(row)
    words = row[: row.numel() // 8 * 8]
    stride = max(1, words.numel() // 8 // _SAMPLES) | 1  # odd: not in step with rows of a power of two
    if words.data_ptr() % 8 == 0 and words.storage_offset() % 8 == 0:
        between = words.view(torch.int64)[::stride].contiguous().view(torch.uint8)
    else:
        between = row[::stride].contiguous()
    return _digest_bytes(torch.cat([row[:_EDGE], row[-_EDGE:], between]))


def _digest_bytes(row: torch.Tensor) -> int:
    """Return the digest of a row of bytes: its length, its 64-bit words, and the bytes after the last word."""
    size = row.numel()
    even = size // 8 * 8
    words = _host_words(row[:even]) if row.device.type == "cpu" else _device_words(row[:even])
    rest = int.from_bytes(bytes(row[even:].tolist()), "little") if even < size else 0
    return _follow(_follow(words, rest), size)


def _host_words(row: torch.Tensor) -> int:
    words = row.numpy().view(np.uint64)
    total = 0
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK]
        mixed = chunk ^ (chunk >> np.uint64(_SHIFT))
        total = _follow(total, int(np.dot(mixed, _WEIGHTS[: len(chunk)])))
    return total


def _device_words(row: torch.Tensor) -> int:
    if row.data_ptr() % 8:
        row = row.clone()
    weights = _DEVICE_WEIGHTS.get(row.device)
    if weights is None:
        weights = torch.from_numpy(_WEIGHTS.view(np.int64)).to(row.device)
        _DEVICE_WEIGHTS[row.device] = weights
    sums = []
    words = row.view(torch.int64)
    for block in words.split(_CHUNK * 256):
        whole = block.numel() // _CHUNK * _CHUNK
        mixed = block ^ ((block >> _SHIFT) & (2 ** (64 - _SHIFT) - 1))
        if whole:
            sums.append((mixed[:whole].view(-1, _CHUNK) * weights).sum(1))
        if whole < block.numel():
            sums.append((mixed[whole:] * weights[: block.numel() - whole]).sum().view(1))
    total = 0
    for value in torch.cat(sums).tolist() if sums else ():  # the only wait of the host for the device
        total = _follow(total, value & _MASK)
    return total
