"""The BlockIO contract: how runs of blocks travel between files and memory.

Four backends keep it (``posix``, ``uring``, ``gds``, ``memory``); one suite checks them all
(``tests/io/test_conformance.py``). Memory is an integer address and a length, so this room knows
nothing of CUDA.

Rules for every backend:

* **Never waits.** :meth:`BlockIO.submit` queues and returns. What can wait runs on threads of the
  backend, or in the kernel. Everything else here is called on the loop's thread.
* **Exactly once.** ``on_done(transfer, error)`` of every accepted transfer is called exactly once,
  on the loop's thread, never inside :meth:`~BlockIO.submit`. It must not raise.
* **Order is not promised**, neither of execution nor of completion, beyond this: a free worker
  takes the lowest :class:`Priority` first and, within one, what was submitted first. Two transfers
  over the same bytes must not be in flight together; :class:`~hsswap.io.store.BlockStore` sees to
  it. Priorities are strict: while reads are queued, writes wait.
* **Whole or failed.** ``error`` is None when every byte was moved. An error, or a file that ended
  early, belongs to exactly the transfer it hit; which spans of it were moved is then unknown. (The
  store splits a failed run into single blocks, so that its callers see an error for exactly the
  blocks that have one.) Interrupted calls and short counts are continued by the backend.
* **Buffers** belong to the transfer from submission until ``on_done``. No cancellation, deadline
  or close ends that earlier. ``owner`` is kept alive as long.
* **Deadlines.** A transfer that has not started by its deadline is not run, and fails with
  ``ETIMEDOUT``, then, also when the drive is stuck; one that has started runs to its end.
* **Close** refuses new work, runs what was accepted, calls every ``on_done``, and gives back
  threads and descriptors. Files stay where they are.
"""

from __future__ import annotations

import asyncio
import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hsswap.config import DISK_ALIGNMENT
from hsswap.errors import ArgumentError, HsswapError
from hsswap.io.problems import io_error


class QueueFull(HsswapError):
    """More transfers were submitted than the backend's limit allows. None of them was queued."""


class Priority(IntEnum):
    """Who waits for a transfer. Lower goes first."""

    NEEDED = 0
    """Somebody waits for these bytes now."""
    PREFETCH = 1
    """Somebody will probably want them soon."""
    WRITE = 2
    """Write-behind: nobody waits, the bytes are in memory too."""


class Operation(Enum):
    """The direction of a transfer."""

    READ = "read"
    WRITE = "write"

    # Members are one of a kind; Enum's own hash is a Python call, which shows in every lookup.
    __hash__ = object.__hash__


class IOFile:
    """An open file of a backend. ``in_flight`` counts its transfers that are not done."""

    __slots__ = ("in_flight", "nbytes", "path")

    def __init__(self, path: Path, nbytes: int) -> None:
        self.path = path
        self.nbytes = nbytes
        self.in_flight = 0


@dataclass(eq=False, slots=True)
class Transfer:
    """A vectored run: contiguous in a file, scattered in memory.

    ``offset``: where the run begins, in bytes. ``addresses``: uint64 ``[spans]``, where each span
    of ``span_bytes`` bytes lies in memory, in the order of the file. Offset, span and addresses are
    multiples of the backend's alignment.

    ``prepare(transfer)`` runs right before a write and ``verify(transfer)`` right after a read that
    succeeded, both on the backend's thread, while the bytes are in that core's cache: the place for
    checksums. An :class:`~hsswap.errors.HsswapError` raised there is the transfer's error.
    ``quick`` says that they wait for nothing and take 0.1 us a KiB at most; a backend without
    threads may run them on the loop's thread then, a bounded number of bytes in one turn.

    ``on_done(transfer, error)``: see the rules above. ``deadline``: ``time.monotonic()`` seconds,
    or None. ``owner``: whatever must stay alive until then, usually the buffer.

    The callables are typed loosely so that they can take a subclass of Transfer.
    """

    operation: Operation
    file: IOFile
    offset: int
    addresses: NDArray[np.uint64]
    span_bytes: int
    priority: Priority
    on_done: Callable[[Any, HsswapError | None], None]
    prepare: Callable[[Any], None] | None = None
    verify: Callable[[Any], None] | None = None
    deadline: float | None = None
    owner: object = None
    quick: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the whole run."""
        return len(self.addresses) * self.span_bytes

    def check(self, alignment: int) -> None:
        """Raise ArgumentError unless the transfer lies within its file and is aligned."""
        if self.addresses.dtype != np.uint64 or self.addresses.ndim != 1 or not self.nbytes:
            raise ArgumentError("addresses must be a one-dimensional uint64 array with 1 and more")
        if self.offset < 0 or self.offset + self.nbytes > self.file.nbytes:
            raise ArgumentError(
                f"bytes {self.offset} to {self.offset + self.nbytes} are outside {self.file.path}, "
                f"which has {self.file.nbytes}"
            )
        bits = self.offset | self.span_bytes | int(np.bitwise_or.reduce(self.addresses))
        if bits & (alignment - 1) or not self.addresses.all():
            raise ArgumentError(
                f"offset, span and addresses must be multiples of {alignment} and not null"
            )


@dataclass(eq=False, slots=True)
class SpanReads:
    """Reads of single spans anywhere in files, asked for together, each of which ends by itself.

    For many short ones: what a :class:`Transfer` costs each is spent once for all. ``files``,
    ``offsets``, ``addresses``: of each span, numbered from 0; ``span_bytes``: of all.

    ``verify(reads, numbers)`` runs after these spans were read, on the loop's thread if it is
    ``quick`` as there, else on one of the backend's, which :attr:`BlockIO.spans_on_threads` says
    that it has. An HsswapError raised there is the error of these spans. ``on_done(reads, numbers,
    error)`` tells of every number exactly once, of several together where they succeeded. A span
    that came short, or that the kernel turned away for now, is an error (``problems.CameShort``):
    as a transfer it would go on. ``started``: how many the backend has started, in their order.
    Everything else as in a transfer.
    """

    files: list[IOFile]
    offsets: list[int]
    addresses: list[int]
    span_bytes: int
    priority: Priority
    on_done: Callable[[Any, list[int], HsswapError | None], None]
    verify: Callable[[Any, list[int]], None]
    deadline: float | None = None
    owner: object = None
    quick: bool = False
    started: int = 0

    def check(self, alignment: int) -> None:
        """Raise ArgumentError unless every span lies within its file and is aligned."""
        bits = self.span_bytes
        if not self.files:
            raise ArgumentError("no spans were given")
        for file, offset, address in zip(self.files, self.offsets, self.addresses, strict=True):
            bits |= offset | address
            if not 0 <= offset <= file.nbytes - self.span_bytes or not address:
                raise ArgumentError(
                    f"a span at {offset} of {file.path}, or its address {address:#x}, is outside"
                )
        if bits & (alignment - 1) or self.span_bytes <= 0:
            raise ArgumentError(f"offset, span and addresses must be multiples of {alignment}")


def check_transfers(batch: Sequence[Transfer], alignment: int) -> None:
    """:meth:`Transfer.check` of many, at a fraction of the cost of each."""
    bits, smallest = 0, 1
    several: list[NDArray[np.uint64]] = []
    for transfer in batch:
        addresses, offset, spans = transfer.addresses, transfer.offset, len(transfer.addresses)
        bits |= offset | transfer.span_bytes
        if (
            not 0 <= offset < offset + spans * transfer.span_bytes <= transfer.file.nbytes
            or addresses.dtype != np.uint64
            or addresses.ndim != 1
        ):
            transfer.check(alignment)
        if spans == 1:
            address: int = addresses.item()
            bits |= address
            smallest = min(smallest, address)
        else:
            several.append(addresses)
    if several:
        joined = np.concatenate(several)
        bits |= int(np.bitwise_or.reduce(joined))
        smallest = min(smallest, int(np.minimum.reduce(joined)))
    if bits & (alignment - 1) or not smallest:
        for transfer in batch:
            transfer.check(alignment)


class BlockChecksums(Protocol):
    """CRC-32 of blocks in memory that the processor cannot read: a store asks it of device memory.

    This is how a device comes in without this room knowing of any. It is called on the backend's
    threads, by several at once, and may wait for the device.
    """

    def __call__(
        self, addresses: NDArray[np.uint64], nbytes: int, seeds: NDArray[np.uint32]
    ) -> NDArray[np.uint32]:
        """``hsswap.checksum.crc32_of_blocks`` of ``nbytes`` bytes at each address.

        Raises HsswapError when the device fails; the blocks then count as not read, or not written.
        """


@dataclass(frozen=True)
class IOStatistics:
    """What a backend has done since it was started."""

    read_calls: int
    """Read transfers that ended, failed ones included."""
    write_calls: int
    """Write transfers that ended, failed ones included."""
    bytes_read: int
    """By reads that succeeded."""
    bytes_written: int
    """By writes that succeeded."""
    errors: int
    """Transfers that failed."""
    in_flight: int
    """Transfers accepted and not done."""


class BlockIO(ABC):
    """One way to move bytes between files and memory. The rules are in the module's docstring.

    ``name`` is what :func:`hsswap.io.open_backend` knows it by. ``alignment``: bytes, a power of
    two. ``needs_directory``: whether its files are in a file system. ``limit``: transfers in flight
    at most. ``spans_on_threads``: whether spans may be verified on threads, where that may wait.
    ``after_deliveries``: called after the last ``on_done`` of those that are called in one
    go, so that what is done for many costs as for one; set by who submits, must not raise.
    ``why``: the reason for the choice where there was one (``auto``), known once started.
    """

    name: str
    needs_directory: bool
    alignment: int = DISK_ALIGNMENT
    limit: int
    spans_on_threads: bool = False
    after_deliveries: Callable[[], None] | None = None
    why: str = ""

    @property
    @abstractmethod
    def path(self) -> str:
        """The way the bytes take, in plain words: ``"O_DIRECT"``, ``"page cache (tmpfs)"``,
        ``"memory"``. Known once started.
        """

    @property
    @abstractmethod
    def room(self) -> int:
        """How many transfers :meth:`submit` takes now."""

    @abstractmethod
    async def start(self, directory: Path | None) -> None:
        """Bind the running loop, start threads, and find out how files in ``directory`` are moved.

        Once in the life of a backend. ``directory`` is None exactly for backends that need none.
        Raises BlockIOError when the directory cannot hold files, ClosedError after :meth:`close`.
        """

    @abstractmethod
    def create_file(self, path: Path, nbytes: int) -> asyncio.Future[IOFile]:
        """A new file of that length, its space allocated, mode 0600. Starts at once.

        Await it or add a callback. It fails with OutOfSpace when the space is not there, with
        BlockIOError when the file exists or cannot be made; nothing is left behind then.
        """

    def open_file(self, path: Path, nbytes: int) -> asyncio.Future[IOFile]:
        """A file that is there already, as persistent stores need. Starts at once.

        One that is shorter than ``nbytes`` is made that long, with zeros. The future fails with
        OutOfSpace or BlockIOError, and changes nothing then. Raises BlockIOError where a backend
        cannot do it.
        """
        raise io_error(errno.ENOTSUP, f"opening {path} through the backend {self.name}")

    def file_sizes(self, directory: Path) -> asyncio.Future[dict[str, int]]:
        """Names and bytes of the files in a directory. Like :meth:`open_file`."""
        raise io_error(errno.ENOTSUP, f"listing {directory} through the backend {self.name}")

    @abstractmethod
    def remove_file(self, file: IOFile) -> asyncio.Future[None]:
        """Close a file without transfers in flight and delete it. Starts at once.

        When it cannot be deleted, the future fails and the file stays open and usable. Raises
        ArgumentError while transfers are in flight.
        """

    @abstractmethod
    def sync(self, file: IOFile) -> asyncio.Future[None]:
        """Make what was written to a file so far survive a loss of power (fdatasync).

        Of a new file: that it is there, too (fsync of its directory). Fails with BlockIOError for
        one that was removed or replaced in its directory: it would not be found again.
        """

    @abstractmethod
    def submit(self, batch: Sequence[Transfer]) -> None:
        """Queue transfers, all or none. Never waits.

        Raises QueueFull when the batch is longer than :attr:`room`, ArgumentError for a transfer
        outside its file or not aligned, ClosedError once close began; nothing is queued then.
        """

    @property
    def span_limit(self) -> int:
        """Bytes of the longest span that :meth:`submit_spans` takes; 0 where it takes none."""
        return 0

    def submit_spans(self, reads: SpanReads) -> None:
        """Queue reads, all or none, as :meth:`submit` does; each counts as a transfer.

        Raises as that does, and ArgumentError for spans longer than :attr:`span_limit`.
        """
        raise ArgumentError(f"the backend {self.name} takes no spans; submit transfers")

    @abstractmethod
    def statistics(self) -> IOStatistics:
        """Counts since the start."""

    @abstractmethod
    async def close(self) -> None:
        """Refuse new work, finish what was accepted, give everything back. Twice is fine.

        Goes on to the end when the caller is cancelled meanwhile; CancelledError is raised then.
        When the loop it was started on is closed, another one's task may call it: what ends then is
        told to nobody.
        """
