"""The memory backend: files in RAM, with faults that a test scripts. For tests, demos and doctor.

Everything runs on one thread, ``hsswap-io-memory``, so that the n-th operation is the same one in
every run.
"""

from __future__ import annotations

import ctypes
import errno
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import ClosedError, HsswapError
from hsswap.io.base import IOFile, Operation, SpanReads, Transfer
from hsswap.io.counted import QUEUE_LIMIT, EndedSpans
from hsswap.io.powercut import PowerModel, PowerState
from hsswap.io.problems import ended_early, io_error
from hsswap.io.threads import ThreadedIO, Work

SPAN_LIMIT = 1 << 20


class FaultKind(Enum):
    """What goes wrong with an operation."""

    ERRNO = "errno"
    """It fails with ``Fault.errno``; no byte moves."""
    SHORT = "short"
    """The first half of the bytes moves; the backend notices and fails the transfer."""
    TORN = "torn"
    """The first half of the bytes moves, and the backend reports success."""
    FLIP = "flip"
    """All bytes move, one bit of them changed (``Fault.bit``), and success is reported."""
    HOLD = "hold"
    """It waits, with all that is queued behind it, until ``Fault.gate`` is opened, then runs."""
    NEVER = "never"
    """It does not end, while others go on; close ends it with ClosedError."""


class Gate:
    """Holds an operation: ``reached`` is set when it got there, ``opened`` lets it go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()


@dataclass(frozen=True)
class Fault:
    """Something that goes wrong, once or while it applies.

    It looks at operations in the order they run (:attr:`MemoryIO.operations`): all of them, or with
    ``only`` those of one kind (see :class:`MemoryIO`), with ``offsets`` only transfers that touch
    these bytes of a file, (first, end): a bad spot of the drive. Of those it hits ``count`` from
    number ``at`` on, counted from 0; with None all. TORN and FLIP change transfers alone; SHORT
    fails the others like ERRNO.
    """

    kind: FaultKind
    at: int = 0
    count: int | None = 1
    errno: int = errno.EIO
    bit: int = 0
    offsets: tuple[int, int] | None = None
    only: str | None = None
    gate: Gate = field(default_factory=Gate)

    def looks_at(self, operation: str, begin: int, end: int) -> bool:
        """Whether it counts this operation, over these bytes of a file."""
        if self.only not in (None, operation):
            return False
        return self.offsets is None or (begin < self.offsets[1] and end > self.offsets[0])

    def hits(self, number: int) -> bool:
        """Whether it hits the ``number``-th operation that it counts."""
        return number >= self.at and (self.count is None or number < self.at + self.count)


class MemoryFile(IOFile):
    """A file's bytes."""

    __slots__ = ("content",)

    def __init__(self, path: Path, nbytes: int, content: NDArray[np.uint8] | None = None) -> None:
        super().__init__(path, nbytes)
        self.content = np.zeros(nbytes, np.uint8) if content is None else content


class MemoryIO(ThreadedIO):
    """Files in RAM under the same contract; ``faults`` are applied in their order, all that hit.

    ``operations`` lists what has been run: "create", "open", "list", "read", "write", "sync",
    "remove". ``files``: what is there at the start. With ``power`` it follows what is synced, for
    :meth:`power_state` and :meth:`power_cut`; ``after_each(self)``, called on its thread after each
    operation, sees every moment.
    """

    name = "memory"
    needs_directory = False
    spans_on_threads = True

    def __init__(
        self,
        faults: Sequence[Fault] = (),
        *,
        limit: int = QUEUE_LIMIT,
        files: Mapping[Path, NDArray[np.uint8]] | None = None,
        power: bool = False,
        after_each: Callable[[MemoryIO], None] | None = None,
    ) -> None:
        super().__init__(["hsswap-io-memory"], limit)
        self.operations: list[str] = []
        self._faults = tuple(faults)
        self._seen = [0] * len(self._faults)  # operations that each looked at
        self._by_path: dict[Path, MemoryFile] = {}
        for path, content in (files or {}).items():
            self._by_path[path] = MemoryFile(path, len(content), content)
        self._power = PowerModel(files or {}) if power else None
        self._after_each = after_each
        self._parked: list[Work] = []
        self._parking = True
        self._park_lock = threading.Lock()

    @property
    def path(self) -> str:
        return "memory"

    def file_at(self, path: Path) -> MemoryFile:
        """The file of that name, for a test that looks at its bytes. KeyError if none."""
        return self._by_path[path]

    def power_state(self) -> PowerState:
        """What a loss of power now could leave. Needs ``power``; not while operations run, except
        in ``after_each``.
        """
        assert self._power is not None, "made without power=True"
        return self._power.state()

    def power_cut(self, survives: Callable[[int], bool] = lambda number: False) -> MemoryIO:
        """A new backend with what a loss of power now leaves: what was synced, and of the rest, in
        the order it was done, the things of which ``survives(number)`` says so.
        """
        return MemoryIO(files=self.power_state().cut(survives), power=True)

    async def close(self) -> None:
        with self._park_lock:
            self._parking = False
            parked, self._parked = self._parked, []
        for fault in self._faults:
            fault.gate.opened.set()
        for item in parked:
            self._complete(item, self._never_ended())
        await super().close()
        self._by_path.clear()

    @staticmethod
    def _never_ended() -> HsswapError:
        return ClosedError("the backend was closed before the operation ended")

    # On the thread.

    def _faults_of(self, operation: str, begin: int = 0, end: int = 0) -> list[Fault]:
        self.operations.append(operation)
        found = []
        for place, fault in enumerate(self._faults):
            if fault.looks_at(operation, begin, end):
                if fault.hits(self._seen[place]):
                    found.append(fault)
                self._seen[place] += 1
        for fault in found:
            if fault.kind is FaultKind.HOLD:
                fault.gate.reached.set()
                fault.gate.opened.wait()
            elif fault.kind is FaultKind.NEVER:
                raise _NeverEndsError
        return found

    def _execute(self, item: Work) -> None:
        try:
            super()._execute(item)
        except _NeverEndsError:
            with self._park_lock:
                if self._parking:
                    self._parked.append(item)
                    return
            self._complete(item, self._never_ended())

    def _complete(self, item: Work, error: HsswapError | None) -> None:
        if self._after_each is not None:
            self._after_each(self)
        super()._complete(item, error)

    def _file_operation(self, operation: str, what: str) -> None:
        for fault in self._faults_of(operation):
            if fault.kind in (FaultKind.ERRNO, FaultKind.SHORT):
                raise io_error(fault.errno, what)

    def _probe(self, directory: Path | None) -> None:
        return

    def _create(self, path: Path, nbytes: int) -> IOFile:
        self._file_operation("create", f"making {path} of {nbytes} bytes")
        if path in self._by_path:
            raise io_error(errno.EEXIST, f"making {path} of {nbytes} bytes")
        file = self._by_path[path] = MemoryFile(path, nbytes)
        if self._power is not None:
            self._power.created(path, nbytes)
        return file

    def _open(self, path: Path, nbytes: int) -> IOFile:
        self._file_operation("open", f"opening {path}")
        file = self._by_path.get(path)
        if file is None:
            raise io_error(errno.ENOENT, f"opening {path}")
        if file.nbytes < nbytes:
            longer = np.zeros(nbytes, np.uint8)
            longer[: file.nbytes] = file.content
            if self._power is not None:
                self._power.written(path, longer, file.nbytes, nbytes)
            file = self._by_path[path] = MemoryFile(path, nbytes, longer)
        return file

    def _sizes(self, directory: Path) -> dict[str, int]:
        self._file_operation("list", f"listing {directory}")
        files = self._by_path.items()
        return {path.name: file.nbytes for path, file in files if path.parent == directory}

    def _remove(self, file: IOFile) -> None:
        self._file_operation("remove", f"removing {file.path}")
        self._by_path.pop(file.path)
        if self._power is not None:
            self._power.removed(file.path)

    def _sync(self, file: IOFile) -> None:
        self._file_operation("sync", f"syncing {file.path}")
        if self._power is not None:
            self._power.synced(file.path)

    def _move(self, transfer: Transfer) -> None:
        operation, nbytes = transfer.operation, transfer.nbytes
        what = f"{operation.value} of {nbytes} bytes at {transfer.offset} of {transfer.file.path}"
        faults = self._faults_of(operation.value, transfer.offset, transfer.offset + nbytes)
        kinds = {fault.kind for fault in faults}
        for fault in faults:
            if fault.kind is FaultKind.ERRNO:
                raise io_error(fault.errno, what)
        moved = nbytes
        if kinds & {FaultKind.SHORT, FaultKind.TORN}:
            moved = nbytes // 2
        _copy(transfer, moved)
        for fault in faults:
            if fault.kind is FaultKind.FLIP:
                _flip(transfer, fault.bit)
        if self._power is not None and transfer.operation is Operation.WRITE:
            assert isinstance(transfer.file, MemoryFile)
            end = transfer.offset + nbytes
            content = transfer.file.content
            self._power.written(transfer.file.path, content, transfer.offset, end)
        if FaultKind.SHORT in kinds:
            raise ended_early(what, moved, nbytes)

    @property
    def span_limit(self) -> int:
        return SPAN_LIMIT

    def _spans_together(self, reads: SpanReads) -> int:
        return 1  # an operation each, as a transfer

    def _read_spans(self, reads: SpanReads, numbers: list[int]) -> list[EndedSpans]:
        failed: list[EndedSpans] = []
        for number in numbers:
            address = np.array([reads.addresses[number]], np.uint64)
            one = Transfer(
                Operation.READ,
                reads.files[number],
                reads.offsets[number],
                address,
                reads.span_bytes,
                reads.priority,
                _not_told,
            )
            try:
                self._move(one)
            except HsswapError as error:
                failed.append((reads, [number], error))
        return failed


def _not_told(transfer: Transfer, error: HsswapError | None) -> None:
    raise AssertionError("it is part of a group")


class _NeverEndsError(BaseException):
    """Leaves an operation without an end. No Exception, so that nothing takes it for a fault."""


def _copy(transfer: Transfer, nbytes: int) -> None:
    assert isinstance(transfer.file, MemoryFile)
    content = transfer.file.content.ctypes.data + transfer.offset
    for number, address in enumerate(transfer.addresses.tolist()):
        begin = number * transfer.span_bytes
        length = min(transfer.span_bytes, nbytes - begin)
        if length <= 0:
            return
        if transfer.operation is Operation.READ:
            ctypes.memmove(address, content + begin, length)
        else:
            ctypes.memmove(content + begin, address, length)


def _flip(transfer: Transfer, bit: int) -> None:
    """Change one bit of a read's buffers, or of what a write left in the file."""
    assert isinstance(transfer.file, MemoryFile)
    byte, mask = bit // 8 % transfer.nbytes, 1 << bit % 8
    if transfer.operation is Operation.WRITE:
        transfer.file.content[transfer.offset + byte] ^= mask
        return
    span, within = divmod(byte, transfer.span_bytes)
    place = ctypes.c_uint8.from_address(int(transfer.addresses[span]) + within)
    place.value ^= mask
