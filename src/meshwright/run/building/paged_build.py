"""A model built in pages of a file: large tensors go there as they are made, and those that the rank keeps come back."""

from __future__ import annotations

import contextlib
import gc
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from meshwright._torch_private import PIN_MEMORY, TorchDispatchMode, num_users
from meshwright._torch_texts import says_not_resizable
from meshwright.run.building.pages import Pages, find_directory
from meshwright.trees import end_of_memory, tensors_in

__all__: list[str] = []

PLAIN_BYTES = 64 * 2**20
"""As much of a model is built in plain memory: small models never see a file [bytes]."""
LARGE_BYTES = 2**20
"""Smaller tensors stay in plain memory [bytes]."""
_USED_BYTES = 64 * 2**20
"""Use of pages after which all are let go [bytes]."""
_PERIOD_S = 0.02

_EMPTY = frozenset(
    {
        torch.ops.aten.empty,
        torch.ops.aten.empty_like,
        torch.ops.aten.empty_strided,
        torch.ops.aten.new_empty,
        torch.ops.aten.new_empty_strided,
        torch.ops.aten.empty_permuted,
    }
)
_OF_THEIR_OWN = frozenset({torch.ops.aten.from_file, PIN_MEMORY})
"""Operations whose results lie in memory that was chosen."""


class PagedBuild:
    """Pages for what a rank builds and holds only in part later. `finish` is called once the plan has cut the model.

    Where there is no disk for them, or it is full, the model is built in plain memory, with a warning.
    """

    def __init__(self) -> None:
        self._pages: Pages | None = None
        self._stop = threading.Event()
        self._plain_bytes = 0
        self._has_failed = False

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """Put large tensors that are made inside into pages; values and random numbers are those of plain memory."""
        with _LargeTensors(self):
            yield
        if self._pages is not None:
            self._pages.release()
            # Proofs and trials of the first batch use what they use: a thread lets go what is not in use.
            target = _release_for_ever
            threading.Thread(
                target=target, args=(weakref.ref(self._pages), self._stop), name="meshwright-pages", daemon=True
            ).start()

    @property
    def num_bytes(self) -> int:
        """What lies in the file [bytes]."""
        return 0 if self._pages is None else self._pages.num_bytes

    def finish(self) -> None:
        """Bring what is left into plain memory: this rank's own part of the model."""
        self._stop.set()
        if self._pages is not None:
            gc.collect()  # graphs of the first look refer to themselves, and to parameters that other ranks hold now
            self._pages.bring_in()
            self._pages.close()  # blocks keep the object, and one may live for as long as the process
            self._pages = None

    def close(self) -> None:
        """End without a cut: pages stay where they are, and in memory once they are used."""
        self._stop.set()

    def allocate(self, num_bytes: int) -> torch.UntypedStorage | None:
        """Return pages for a tensor, or None where it belongs into plain memory."""
        if num_bytes < LARGE_BYTES or self._has_failed:
            return None
        if self._pages is not None and self._pages.is_inherited:
            return None  # a process that was forked off while the model is built
        if self._plain_bytes + num_bytes <= PLAIN_BYTES:
            self._plain_bytes += num_bytes
            return None
        try:
            if self._pages is None:
                directory = find_directory()
                if directory is None:
                    raise OSError("no directory for temporary files lies on a disk")
                self._pages = Pages(directory)
            return self._pages.allocate(num_bytes)
        except OSError as error:
            self._has_failed = True
            where = "" if self._pages is None else f" in {self._pages.directory}"
            warnings.warn(
                f"a model is built in memory, whole on every rank: there is no room for {num_bytes} bytes more{where} ({error}); "
                "set TMPDIR to a directory on a disk with room for the model once for each rank",
                stacklevel=2,
            )
            return None

    def holds(self, tensor: Tensor) -> bool:
        """Tell whether a tensor lies in pages."""
        return self._pages is not None and self._pages.holds(tensor.untyped_storage())

    def note_use(self, tensors: list[Tensor], used: int) -> int:
        """Return the bytes of pages that were used since they were let go, these tensors' included."""
        pages = self._pages
        if pages is None:
            return 0
        used += sum(tensor.untyped_storage().nbytes() for tensor in tensors if pages.holds(tensor.untyped_storage()))
        if used < _USED_BYTES:
            return used
        pages.release()
        return 0


class _LargeTensors(TorchDispatchMode):
    """Moves the large results of each operation into pages, before anybody has seen them."""

    def __init__(self, build: PagedBuild) -> None:
        super().__init__()
        self._build = build
        self._used = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = list(tensors_in((args, kwargs)))
        results = self._run(func, args, kwargs or {}, given)
        made = list(tensors_in(results))
        if not made or not all(map(_is_plain, (*given, *made))):
            return results
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        fresh = [tensor for tensor in made if tensor.untyped_storage().data_ptr() not in known]
        if fresh and func.overloadpacket not in _OF_THEIR_OWN and not (kwargs or {}).get("pin_memory"):
            # Deterministic algorithms fill empty tensors.
            is_empty = func.overloadpacket in _EMPTY and not torch.are_deterministic_algorithms_enabled()
            self._move(fresh, is_empty=is_empty)
        self._used = self._build.note_use([*given, *made], self._used)
        return results

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], given: list[Tensor]) -> Any:
        """Run an operation; a tensor in pages that it makes larger goes into plain memory first."""
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            if not says_not_resizable(error):
                raise
            paged = [tensor for tensor in given if _is_plain(tensor) and self._build.holds(tensor)]
            if not paged or any(num_users(tensor) > 1 for tensor in paged):
                raise
            for tensor in paged:  # its size is the new one already
                plain = tensor.untyped_storage().clone()
                plain.resize_(max(plain.nbytes(), end_of_memory(tensor) * tensor.element_size()))
                tensor.set_(plain, tensor.storage_offset(), tensor.size(), tensor.stride())
        return func(*args, **kwargs)

    def _move(self, tensors: list[Tensor], *, is_empty: bool) -> None:
        together: dict[int, list[Tensor]] = {}
        for tensor in tensors:
            together.setdefault(tensor.untyped_storage().data_ptr(), []).append(tensor)
        for sharing in together.values():
            if num_users(sharing[0]) > len({id(tensor) for tensor in sharing}):
                continue  # memory that the operation has kept, or had before
            old = sharing[0].untyped_storage()
            pages = self._build.allocate(old.nbytes())
            if pages is None:
                continue
            if not is_empty:
                pages.copy_(old)
            for tensor in sharing:
                tensor.set_(pages, tensor.storage_offset(), tensor.size(), tensor.stride())


def _is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor has values in this process's memory; a subclass may have them anywhere."""
    is_own = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
    is_strided = tensor.layout == torch.strided and not tensor.is_nested and not tensor._is_zerotensor()
    return is_own and tensor.device.type == "cpu" and is_strided


def _release_for_ever(pages: weakref.ref[Pages], stop: threading.Event) -> None:
    while not stop.wait(_PERIOD_S):
        found = pages()
        if found is None:
            return
        found.release()
        del found
