"""The posix backend: preadv and pwritev on a fixed pool of threads, O_DIRECT where it works.

It needs nothing but Linux. Each run costs two wake-ups of threads and the way through the GIL, so
``auto`` takes uring where there is one (``hsswap bench io`` shows both).
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hsswap.config import DISK_ALIGNMENT
from hsswap.errors import BlockIOError, ConfigError, HsswapError
from hsswap.io import linux
from hsswap.io.aio import Aio
from hsswap.io.base import IOFile, Operation, SpanReads, Transfer
from hsswap.io.counted import QUEUE_LIMIT, EndedSpans
from hsswap.io.hooks import run_hook
from hsswap.io.problems import CameShort, ended_early, from_os_error, io_error, is_named, lost
from hsswap.io.threads import ThreadedIO
from hsswap.io.together import GROUP_BYTES, TOGETHER
from hsswap.io.waiting import to_the_end

PROBE_NAME = "hsswap.probe"
OPEN_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
MAX_THREADS = 64
AGAIN = (errno.EAGAIN, errno.EINTR)
SPAN_LIMIT = 256 * 1024
"""Longer ones gain nothing by sharing a thread's way through queue and loop."""


def sync_directory(path: Path) -> None:
    """Make the names in a directory survive a loss of power. Blocks; raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class VectoredCalls(NamedTuple):
    """The two system calls; tests put others in their place."""

    read: linux.VectoredCall = linux.preadv
    write: linux.VectoredCall = linux.pwritev


class PosixFile(IOFile):
    """A file with its descriptor. ``is_new``: its directory does not know it durably yet."""

    __slots__ = ("descriptor", "is_new")

    def __init__(self, path: Path, nbytes: int, descriptor: int, *, is_new: bool = True) -> None:
        super().__init__(path, nbytes)
        self.descriptor = descriptor
        self.is_new = is_new


class PosixIO(ThreadedIO):
    """Blocking vectored calls on ``threads`` threads named ``hsswap-io-N``.

    As many transfers as threads are in the drive's queue at once. Whether bytes go by O_DIRECT is
    decided once, for the directory: what statx says of a file there, else the kind of its file
    system. That the open succeeds says nothing: tmpfs accepts the flag and ignores it.
    """

    name = "posix"
    needs_directory = True
    spans_on_threads = True

    def __init__(
        self,
        threads: int = 4,
        *,
        limit: int = QUEUE_LIMIT,
        calls: VectoredCalls | None = None,
    ) -> None:
        if not 1 <= threads <= MAX_THREADS:
            raise ConfigError(f"io_threads is {threads}; it must be from 1 to {MAX_THREADS}")
        super().__init__([f"hsswap-io-{number}" for number in range(threads)], limit)
        self._system = calls or VectoredCalls()
        self._direct = False
        # Whether a thread moves several things at the same time. Not with other system calls.
        self._side_by_side = calls is None
        self._of_thread = threading.local()
        self._aios: list[Aio] = []
        self._path = "not started"

    @property
    def path(self) -> str:
        return self._path

    @property
    def direct(self) -> bool:
        """Whether files are opened with O_DIRECT. Known once started."""
        return self._direct

    def _probe(self, directory: Path | None) -> None:
        if directory is None:
            raise ConfigError("the posix backend needs a directory")
        try:
            system = linux.file_system(directory)
            descriptor = self._open_probe(directory)
        except OSError as error:
            raise from_os_error(error, f"making a file in {directory}") from error
        try:
            alignment = linux.direct_alignment(descriptor)
        finally:
            os.close(descriptor)
        if alignment is None:
            self._direct = system.direct
        else:
            self._direct = 0 < alignment <= DISK_ALIGNMENT
        self._path = "O_DIRECT" if self._direct else f"page cache ({system.name})"
        self._side_by_side &= self._direct  # else starting them is reading them

    async def _stop(self) -> None:
        # The kernel takes 40 ms to give one back.
        await to_the_end(
            lambda: self._at_the_end(*(aio.close for aio in self._aios)), super()._stop
        )

    @staticmethod
    def _open_probe(directory: Path) -> int:
        """A file without a name where the file system can, else one whose name is removed."""
        with suppress(OSError):
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        path = directory / PROBE_NAME
        descriptor = os.open(path, OPEN_FLAGS, 0o600)
        path.unlink()
        return descriptor

    def _create(self, path: Path, nbytes: int) -> IOFile:
        what = f"making {path} of {nbytes} bytes"
        try:
            descriptor = os.open(path, OPEN_FLAGS, 0o600)
        except OSError as error:
            raise from_os_error(error, what) from error
        try:
            os.fchmod(descriptor, 0o600)  # whatever the umask took or an ACL of the folder gave
            os.posix_fallocate(descriptor, 0, nbytes)
            if self._direct:
                descriptor = self._reopen_direct(path, descriptor)
        except OSError as error:
            os.close(descriptor)
            with suppress(OSError):
                path.unlink()
            raise from_os_error(error, what) from error
        return PosixFile(path, nbytes, descriptor)

    def _open(self, path: Path, nbytes: int) -> IOFile:
        what = f"opening {path}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise from_os_error(error, what) from error
        try:
            if os.fstat(descriptor).st_size < nbytes:
                os.posix_fallocate(descriptor, 0, nbytes)
            if self._direct:
                descriptor = self._reopen_direct(path, descriptor)
        except OSError as error:
            os.close(descriptor)
            raise from_os_error(error, what) from error
        return PosixFile(path, nbytes, descriptor, is_new=False)

    def _sizes(self, directory: Path) -> dict[str, int]:
        try:
            with os.scandir(directory) as entries:
                return {
                    entry.name: entry.stat(follow_symlinks=False).st_size
                    for entry in entries
                    if entry.is_file(follow_symlinks=False)
                }
        except OSError as error:
            raise from_os_error(error, f"listing {directory}") from error

    def _reopen_direct(self, path: Path, descriptor: int) -> int:
        """The descriptor to use for a new file; the other one is closed.

        Space is allocated before, without the flag, because where fallocate is emulated it writes
        single bytes, which O_DIRECT refuses.
        """
        try:
            direct = os.open(path, os.O_RDWR | os.O_DIRECT | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            # Only an overlay whose layer below cannot, or a kind that our table has wrong.
            self._direct = self._side_by_side = False
            self._path = f"page cache (O_DIRECT refused: {os.strerror(error.errno or 0)})"
            return descriptor
        os.close(descriptor)
        return direct

    def _remove(self, file: IOFile) -> None:
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:
            raise from_os_error(error, f"removing {file.path}") from error
        self._close_file(file)

    def _sync(self, file: IOFile) -> None:
        assert isinstance(file, PosixFile)
        try:
            os.fdatasync(file.descriptor)
            if not is_named(file.path, file.descriptor):
                raise lost(f"syncing {file.path}")
            if file.is_new:
                sync_directory(file.path.parent)
                file.is_new = False
        except OSError as error:
            raise from_os_error(error, f"syncing {file.path}") from error

    def _close_file(self, file: IOFile) -> None:
        assert isinstance(file, PosixFile)
        os.close(file.descriptor)

    @property
    def span_limit(self) -> int:
        return SPAN_LIMIT

    def _spans_together(self, reads: SpanReads) -> int:
        return TOGETHER if self._side_by_side else super()._spans_together(reads)

    def _read_spans(self, reads: SpanReads, numbers: list[int]) -> list[EndedSpans]:
        aio = self._aio() if len(numbers) > 1 else None
        if aio is None:
            return self._read_one_by_one(reads, numbers)
        files = [reads.files[number] for number in numbers]
        moved = aio.read(
            [file.descriptor for file in files if isinstance(file, PosixFile)],
            [reads.offsets[number] for number in numbers],
            [reads.addresses[number] for number in numbers],
            reads.span_bytes,
        )
        return [
            (reads, [number], span_error(reads, number, nbytes))
            for number, nbytes in zip(numbers, moved, strict=True)
            if nbytes != reads.span_bytes
        ]

    def _aio(self) -> Aio | None:
        """This thread's; None where nothing can go side by side."""
        found: Aio | None = getattr(self._of_thread, "aio", None)
        if found is None and self._side_by_side:
            try:
                found = self._of_thread.aio = Aio(TOGETHER)
            except OSError:  # forbidden, or too many on this machine (fs.aio-max-nr)
                self._side_by_side = False
            else:
                self._aios.append(found)
        return found

    def _goes_together(self, transfer: Transfer) -> bool:
        if not (self._side_by_side and transfer.quick and transfer.deadline is None):
            return False
        return transfer.nbytes <= GROUP_BYTES

    def _write_together(self, transfers: Sequence[Transfer]) -> list[HsswapError | None]:
        aio = self._aio() if len(transfers) > 1 else None
        if aio is None:
            return super()._write_together(transfers)
        spans = [len(transfer.addresses) for transfer in transfers]
        iovecs = np.empty((sum(spans), 2), np.uint64)
        np.concatenate([transfer.addresses for transfer in transfers], out=iovecs[:, 0])
        iovecs[:, 1] = np.repeat([transfer.span_bytes for transfer in transfers], spans)
        table: int = iovecs.__array_interface__["data"][0]
        begins = accumulate(spans[:-1], initial=0)
        moved = aio.write(
            [t.file.descriptor for t in transfers if isinstance(t.file, PosixFile)],
            [transfer.offset for transfer in transfers],
            [table + linux.IOVEC_BYTES * begin for begin in begins],
            spans,
        )
        return [
            None if nbytes == transfer.nbytes else self._write_again(transfer, nbytes)
            for transfer, nbytes in zip(transfers, moved, strict=True)
        ]

    def _write_again(self, transfer: Transfer, moved: int) -> HsswapError | None:
        """A write that made so many bytes, or failed with ``-errno``: again alone, where it may go
        on.
        """
        if moved < 0 and -moved not in AGAIN:
            return transfer_error(transfer, linux.Moved(0, -moved))
        return run_hook(self._move, transfer)

    def _read_one_by_one(self, reads: SpanReads, numbers: list[int]) -> list[EndedSpans]:
        iovecs = np.empty((len(numbers), 2), np.uint64)
        iovecs[:, 0] = [reads.addresses[number] for number in numbers]
        iovecs[:, 1] = reads.span_bytes
        entry: int = iovecs.__array_interface__["data"][0]
        failed: list[EndedSpans] = []
        for number in numbers:
            file = reads.files[number]
            assert isinstance(file, PosixFile)
            moved = -errno.EINTR
            while moved == -errno.EINTR:
                moved = self._system.read(file.descriptor, entry, 1, reads.offsets[number])
            if moved != reads.span_bytes:
                failed.append((reads, [number], span_error(reads, number, moved)))
            entry += linux.IOVEC_BYTES
        return failed

    def _move(self, transfer: Transfer) -> None:
        file = transfer.file
        assert isinstance(file, PosixFile)
        reading = transfer.operation is Operation.READ
        moved = linux.move_all(
            self._system.read if reading else self._system.write,
            file.descriptor,
            transfer.addresses,
            transfer.span_bytes,
            transfer.offset,
            self.alignment,
        )
        if moved.error or moved.nbytes < transfer.nbytes:
            raise transfer_error(transfer, moved)


def span_error(reads: SpanReads, number: int, moved: int) -> BlockIOError:
    """The error of a span of which so many bytes came, or which failed with ``-errno``."""
    what = describe_span(reads, number)
    if moved < 0 and -moved not in AGAIN:
        return io_error(-moved, what)
    error = io_error(-moved, what) if moved < 0 else ended_early(what, moved, reads.span_bytes)
    return CameShort(str(error), errno=error.errno)


def describe_span(reads: SpanReads, number: int) -> str:
    """The beginning of a message about a span."""
    place = f"{reads.offsets[number]} of {reads.files[number].path}"
    return f"reading {reads.span_bytes} bytes at {place}"


def transfer_error(transfer: Transfer, moved: linux.Moved) -> BlockIOError:
    """The error of a transfer that came only so far."""
    verb = "reading" if transfer.operation is Operation.READ else "writing"
    what = f"{verb} {transfer.nbytes} bytes at {transfer.offset} of {transfer.file.path}"
    if moved.error:
        return io_error(moved.error, what)
    return ended_early(what, moved.nbytes, transfer.nbytes)
