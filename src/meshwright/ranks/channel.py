"""Messages between the launching process and one rank, over an inherited socket pair.

The pair is private: it has no name, and only the two processes hold it. Both run as one user, and the launching process chose
the code that the rank runs, so a rank reads pickles from it. The launching process reads plain data alone: a message of a rank
that names a class or a function is not read, since to find those would import modules (torch takes seconds), while nobody watches
the ranks. A result is bytes to the channel; `read_result` makes the user's value of them, at the end of a call.
"""

from __future__ import annotations

import collections
import contextlib
import io
import os
import pickle
import socket
import struct
import sys
import threading
from typing import Any

__all__: list[str] = []

_HEADER = struct.Struct("<Q")
_READ_BYTES = 1 << 18
_CLOSED_STATUS = 70
_MOST_LINE_BYTES = 1 << 16


def pack(message: tuple[Any, ...]) -> bytes:
    """Return a message as the bytes that cross the channel."""
    payload = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return _HEADER.pack(len(payload)) + payload


class ParentEnd:
    """The launching process's end. It never blocks, so that a stopped rank cannot stop its supervisor."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._incoming = bytearray()
        self._outgoing: collections.deque[memoryview] = collections.deque()
        self.closed = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def has_unsent(self) -> bool:
        """Whether bytes are waiting for room in the channel."""
        return bool(self._outgoing) and not self.closed

    def send(self, packed: bytes) -> None:
        """Queue a packed message and send as much as fits; `flush` sends the rest."""
        self._outgoing.append(memoryview(packed))
        self.flush()

    def flush(self) -> None:
        """Send as much as fits. A dead rank is not an error here: its death is noticed elsewhere."""
        while self._outgoing and not self.closed:
            head = self._outgoing[0]
            try:
                sent = self._socket.send(head)
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()
                return
            if sent == len(head):
                self._outgoing.popleft()
            else:
                self._outgoing[0] = head[sent:]

    def receive(self) -> list[tuple[Any, ...]]:
        """Return the messages that have arrived in full; sets `closed` at the end of the stream.

        A message that cannot be rebuilt here comes as ``("unreadable", reason)``.
        """
        while not self.closed:
            try:
                part = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError:
                part = b""
            if part:
                self._incoming += part
            else:
                self.closed = True
        return self._take_whole()

    def _take_whole(self) -> list[tuple[Any, ...]]:
        messages = []
        start = 0
        while len(self._incoming) - start >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._incoming, start)
            end = start + _HEADER.size + length
            if len(self._incoming) < end:
                break
            with memoryview(self._incoming) as view, view[start + _HEADER.size : end] as payload:
                messages.append(_unpickle(payload))
            start = end
        if start:
            del self._incoming[:start]
        return messages

    def close(self) -> None:
        """Close this end; the rank reads the end of the stream."""
        self.closed = True
        self._socket.close()


class _MemoryFile(io.RawIOBase):
    """A part of memory as a file that is read without a copy of the whole."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._at = 0

    def read(self, size: int = -1) -> bytes:
        end = len(self._memory) if size < 0 else self._at + size
        part = bytes(self._memory[self._at : end])
        self._at += len(part)
        return part

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        size = min(len(target), len(self._memory) - self._at)
        target[:size] = self._memory[self._at : self._at + size]
        self._at += size
        return size

    def readline(self, size: int | None = -1) -> bytes:  # noqa: ARG002 - lines of opcodes are short
        rest = bytes(self._memory[self._at : self._at + _MOST_LINE_BYTES])
        return self.read(rest.find(b"\n") + 1 or len(rest))


class _PlainReader(pickle.Unpickler):
    """Reads numbers, text, bytes, lists, tuples, sets and dicts, and nothing that would run or import code."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain data")


def read_plain(data: bytes | memoryview) -> Any:
    """Return pickled plain data.

    Raises:
        pickle.UnpicklingError: It is something else, or damaged.
    """
    try:
        return _PlainReader(_MemoryFile(memoryview(data))).load()
    except pickle.UnpicklingError:
        raise
    except Exception as error:  # noqa: BLE001 - damaged pickles raise anything
        raise pickle.UnpicklingError(f"{type(error).__name__}: {error}") from None


def read_result(data: bytes) -> Any:
    """Return what a call gave on a rank: plain data as such; values of the user's classes as pickle makes them.

    Raises:
        Exception: Whatever rebuilding raises, which runs the classes' own code.
    """
    try:
        return read_plain(data)
    except pickle.UnpicklingError:
        return pickle.loads(data)  # noqa: S301 - what the caller of `launch` has asked for


def _unpickle(payload: memoryview) -> tuple[Any, ...]:
    try:
        return read_plain(payload)
    except pickle.UnpicklingError as error:
        return ("unreadable", str(error))


class RankEnd:
    """The rank's end: blocking, and safe to send from several threads."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._file = _file_of(sock)
        self._lock = threading.Lock()
        self.muted = False

    def send(self, message: tuple[Any, ...]) -> None:
        """Send a message.

        Raises:
            Exception: Pickle's own, if the message cannot be pickled; nothing was sent then.
        """
        packed = pack(message)
        if _file_of(self._socket) != self._file:
            # What is sent would be lost, or go into a file of the user's that has the number now, and nobody would be told.
            sys.stderr.write("code of this rank has closed its connection to the launching process; the rank ends\n")
            sys.stderr.flush()
            os._exit(_CLOSED_STATUS)
        # Without the other end this process is about to be killed, and there is nobody to tell.
        with self._lock, contextlib.suppress(OSError):
            if not self.muted:
                self._socket.sendall(packed)

    def receive(self) -> tuple[Any, ...] | None:
        """Return the next message, or None at the end of the stream."""
        header = self._read_exactly(_HEADER.size)
        if header is None:
            return None
        payload = self._read_exactly(_HEADER.unpack(header)[0])
        return None if payload is None else pickle.loads(payload)  # noqa: S301 - see the module's docstring

    def _read_exactly(self, length: int) -> bytearray | None:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            try:
                count = self._socket.recv_into(view)
            except OSError:
                return None
            if count == 0:
                return None
            view = view[count:]
        return data


def _file_of(sock: socket.socket) -> tuple[int, int] | None:
    """Return which file a socket's descriptor is; None where it is closed."""
    try:
        found = os.fstat(sock.fileno())
    except OSError:
        return None
    return found.st_dev, found.st_ino
