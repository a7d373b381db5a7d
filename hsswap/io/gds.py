"""The gds backend: kvikio, between files and device memory; between files and host memory, posix.

An address says whose memory it is, so one transfer to each may be in flight together. Host memory
goes the way of the posix backend, which this one extends: one vectored call a run beats kvikio's
call a span, and GPUDirect has no part in it. Device memory goes one of three ways, named in
:attr:`GdsIO.path`:

* **GPUDirect**: the drive writes into the device. Only where cuFile could be opened with its own
  compatibility mode forbidden and a trial transfer, made in a child process, came back right.
* **kvikio's compatibility path**: through kvikio's pinned host memory and a copy. Taken only when
  the caller allowed it by name. cuFile is then not opened at all.
* cuFile's own compatibility path, which looks like GPUDirect to kvikio, is never taken.

Rules that follow from how kvikio works:

* Every call that can wait is made on the backend's own threads. On GPUDirect that is ``raw_read``,
  with the memory's context current: ``pread`` would synchronise the default stream once more, and
  its pool adds nothing to threads that wait anyway. On the compatibility path a transfer in several
  pieces goes to kvikio's pool, which moves them side by side; its futures keep neither file nor
  buffer alive, so the thread holds both until every one has ended, failed ones included. Cancelling
  whoever awaits changes nothing of that.
* Compatibility pins 16 MiB of host memory for every thread that moves something, its own and those
  of the pool, until the last backend of the process closes.
* Spans read in one call are checked in one call of the device as well.
* kvikio orders nothing with streams. Finish what reads or writes the memory before
  :meth:`~hsswap.io.base.BlockIO.submit`, and start what uses it after ``on_done``.
* ``prepare`` and ``verify`` see a transfer's addresses as they are; on device memory they must not
  touch them with the processor.
* Primary contexts of devices whose memory was used stay until the process ends: kvikio would use
  its streams of one that is gone. A context that the caller made must outlive the backend.
* Do not fork after the start: cuFile and kvikio's pool do not survive it. Use spawn.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path

from hsswap.errors import ArgumentError, ConfigError, HsswapError
from hsswap.io.base import IOFile, Operation, SpanReads, Transfer
from hsswap.io.counted import QUEUE_LIMIT, EndedSpans
from hsswap.io.gds_driver import Allocation, CudaDriver, GdsUnavailable
from hsswap.io.gds_kvikio import (
    KVIKIO_ERRORS,
    CuFile,
    DeviceBuffer,
    Kvikio,
    acquire,
    release,
)
from hsswap.io.gds_pieces import Piece, describe, failure, pieces_of
from hsswap.io.gds_probe import Reason, missing_packages, why_no_gpudirect
from hsswap.io.gds_spans import read_here, read_on_pool
from hsswap.io.posix import PosixFile, PosixIO
from hsswap.io.problems import ended_early
from hsswap.io.together import TOGETHER
from hsswap.io.waiting import to_the_end

DEVICE_SPAN_LIMIT = 1 << 20
"""Checking spans costs a launch and a wait for the device, whatever their number and length."""


class Compatibility(Enum):
    """Whether device memory may be reached through host memory."""

    REFUSED = "refused"
    """GPUDirect, or an error that says why not: ``io="gds"``."""
    ALLOWED = "allowed"
    """GPUDirect where it works, kvikio's compatibility path elsewhere: ``io="gds-compat"``."""
    FORCED = "forced"
    """kvikio's compatibility path, without a trial: for comparisons."""


class GdsIO(PosixIO):
    """Device and host memory by ``threads`` threads named ``hsswap-io-N``.

    ``why_not(directory)``: why there is no GPUDirect, empty where there is; tests give their own.
    """

    name = "gds"

    def __init__(
        self,
        threads: int = 4,
        *,
        compatibility: Compatibility = Compatibility.REFUSED,
        limit: int = QUEUE_LIMIT,
        why_not: Callable[[Path], list[Reason]] = why_no_gpudirect,
    ) -> None:
        super().__init__(threads, limit=limit)
        self._compatibility = compatibility
        self._why_not = why_not
        self._driver: CudaDriver | None = None
        self._kvikio: Kvikio | None = None
        self._device_path = ""
        self._context = 0  # one that was used
        # The files again, as kvikio has them open.
        self._cufiles: dict[IOFile, CuFile] = {}
        # Pinned for DMA, by base address.
        self._registered: dict[int, tuple[Allocation, object]] = {}
        self._register_lock = threading.Lock()
        self._arenas: tuple[Allocation, ...] = ()  # the same, replaced as a whole

    @property
    def path(self) -> str:
        host = super().path
        return f"{self._device_path}; host memory: {host}" if self._device_path else host

    @property
    def true_path(self) -> bool:
        """Whether device memory is reached by GPUDirect. Known once started."""
        return self._kvikio is not None and self._kvikio.true_path

    @property
    def registered(self) -> int:
        """Allocations that are registered."""
        return len(self._registered)

    def register_memory(self, address: int, owner: object = None) -> asyncio.Future[None]:
        """Pin the device allocation around ``address`` for GPUDirect, once. Starts at once.

        Make the arena that transfers go to one allocation and register it after :meth:`start`; on
        the compatibility path this does nothing but keep account. ``owner`` is kept alive until it
        is unregistered. The future fails with ArgumentError for an address that is not device
        memory or is registered already, with BlockIOError when the memory cannot be pinned.
        """
        return self._call(lambda: self._register(address, owner))

    def unregister_memory(self, address: int) -> asyncio.Future[None]:
        """Undo :meth:`register_memory`; before the memory is freed, and with nothing in flight
        there. :meth:`close` does it for what is left.
        """
        return self._call(lambda: self._unregister(address))

    # On the threads.

    def _probe(self, directory: Path | None) -> None:
        if directory is None:
            raise ConfigError("the gds backend needs a directory")
        reasons = missing_packages()
        if reasons:  # either path needs what is missing
            raise self._unavailable(reasons, others=())
        super()._probe(directory)
        self._driver = CudaDriver()
        why = ""
        if self._compatibility is not Compatibility.FORCED:
            why = self._try_gpudirect(directory)
        if self._kvikio is None:
            self._kvikio = acquire(true_path=False)
            self._device_path = f"compatibility path ({self._kvikio.version} through host memory"
            self._device_path += f": {why})" if why else ")"

    def _try_gpudirect(self, directory: Path) -> str:
        """Set kvikio up for it; where that is not possible, raise, or say why if it need not be."""
        refused = self._compatibility is Compatibility.REFUSED
        reasons = self._why_not(directory)
        if reasons and refused:
            raise self._unavailable(reasons, others=("gds-compat",))
        if reasons:
            return "; ".join(reason.what for reason in reasons)
        try:
            self._kvikio = acquire(true_path=True)
        except GdsUnavailable as error:
            if refused:
                raise
            return str(error)
        self._device_path = f"GPUDirect Storage ({self._kvikio.version})"
        return ""

    def _unavailable(self, reasons: list[Reason], others: tuple[str, ...]) -> GdsUnavailable:
        """The error for these reasons. ``others``: names that would work all the same."""
        name = "gds" if self._compatibility is Compatibility.REFUSED else "gds-compat"
        known = ", ".join(f"io={other!r}" for other in ("auto", "posix", *others))
        return GdsUnavailable(
            f"io={name!r} cannot work here: {'; '.join(map(str, reasons))}. Otherwise choose "
            f"{known}"
        )

    def _create(self, path: Path, nbytes: int) -> IOFile:
        file = super()._create(path, nbytes)
        try:
            self._open_cufile(file)
        except HsswapError:
            with suppress(OSError):
                path.unlink()
            self._close_file(file)
            raise
        return file

    def _open(self, path: Path, nbytes: int) -> IOFile:
        file = super()._open(path, nbytes)
        try:
            self._open_cufile(file)
        except HsswapError:
            self._close_file(file)
            raise
        return file

    def _open_cufile(self, file: IOFile) -> None:
        assert isinstance(file, PosixFile)
        assert self._kvikio is not None
        try:
            self._cufiles[file] = self._kvikio.open(file.descriptor)
        except KVIKIO_ERRORS as error:
            raise failure(error, f"opening {file.path} with kvikio") from error

    def _close_file(self, file: IOFile) -> None:
        self._close_cufile(file)
        super()._close_file(file)

    def _close_cufile(self, file: IOFile) -> None:
        cufile = self._cufiles.pop(file, None)
        if cufile is not None:
            cufile.close()

    def _move(self, transfer: Transfer) -> None:
        assert self._driver is not None
        assert self._kvikio is not None
        pieces = pieces_of(transfer, self._allocation_of)
        if not pieces:
            super()._move(transfer)
            return
        self._context = pieces[0].allocation.context
        if self._kvikio.true_path or len(pieces) == 1:
            moved = self._move_here(transfer, pieces)
        else:
            moved = self._move_on_pool(transfer, pieces)
        if moved < transfer.nbytes:
            raise ended_early(describe(transfer), moved, transfer.nbytes)

    def _goes_together(self, transfer: Transfer) -> bool:
        return False  # it may be device memory, which the kernel cannot read

    @property
    def span_limit(self) -> int:
        return DEVICE_SPAN_LIMIT

    def _spans_together(self, reads: SpanReads) -> int:
        assert self._kvikio is not None
        # On the pool they go side by side whichever thread waits for them.
        if not self._kvikio.true_path and self._allocation_of(reads.addresses[0]) is not None:
            return TOGETHER
        return super()._spans_together(reads)

    def _read_spans(self, reads: SpanReads, numbers: list[int]) -> list[EndedSpans]:
        assert self._driver is not None
        assert self._kvikio is not None
        first = self._allocation_of(reads.addresses[numbers[0]])
        if first is None:
            return super()._read_spans(reads, numbers)
        self._context = first.context
        if not self._kvikio.true_path:
            return read_on_pool(reads, numbers, self._cufiles, self._allocation_of)
        make_current = self._driver.make_current
        return read_here(reads, numbers, self._cufiles, self._allocation_of, make_current)

    def _allocation_of(self, address: int) -> Allocation | None:
        for found in self._arenas:  # known to stay as they are, so the driver need not be asked
            if found.base <= address < found.end:
                return found
        assert self._driver is not None
        return self._driver.allocation(address)

    def _move_here(self, transfer: Transfer, pieces: Sequence[Piece]) -> int:
        """One piece after the other, in this thread; other transfers go on in other threads.

        Stops at the first short one: past the end of a file cuFile moves less and reports success.
        """
        assert self._driver is not None
        cufile = self._cufiles[transfer.file]
        call = cufile.raw_read if transfer.operation is Operation.READ else cufile.raw_write
        moved = 0
        context = 0
        for piece in pieces:
            base, nbytes, owner = piece.allocation
            if owner != context:
                context = owner
                self._driver.make_current(context)
            try:
                # The allocation's base and an offset: what was registered is found by its base.
                count = call(
                    DeviceBuffer(base, nbytes), piece.nbytes, piece.offset, piece.address - base
                )
            except KVIKIO_ERRORS as error:
                raise failure(error, describe(transfer)) from error
            moved += count
            if count < piece.nbytes:
                break
        return moved

    def _move_on_pool(self, transfer: Transfer, pieces: Sequence[Piece]) -> int:
        """All pieces side by side, on kvikio's threads."""
        cufile = self._cufiles[transfer.file]
        call = cufile.pread if transfer.operation is Operation.READ else cufile.pwrite
        futures = []
        problem: Exception | None = None
        moved = 0
        try:
            for piece in pieces:
                buffer = DeviceBuffer(piece.address, piece.nbytes)
                futures.append(call(buffer, piece.nbytes, piece.offset))
        except KVIKIO_ERRORS as error:
            problem = error
        for future in futures:  # all of them, whatever went wrong: they use file and memory
            try:
                moved += future.get()
            except KVIKIO_ERRORS as error:
                problem = problem or error
        if problem is not None:
            raise failure(problem, describe(transfer)) from problem
        return moved

    def _register(self, address: int, owner: object) -> None:
        assert self._driver is not None
        assert self._kvikio is not None
        found = self._driver.allocation(address)
        if found is None:
            raise ArgumentError(f"{address:#x} is not device memory; register the device arena")
        with self._register_lock:
            if found.base in self._registered:
                raise ArgumentError(f"the allocation at {found.base:#x} is registered already")
            self._driver.make_current(found.context)
            try:
                self._kvikio.register(DeviceBuffer(found.base, found.nbytes))
            except KVIKIO_ERRORS as error:
                raise failure(error, f"registering {found.nbytes} bytes") from error
            self._registered[found.base] = found, owner
            self._arenas += (found,)

    def _unregister(self, address: int) -> None:
        with self._register_lock:
            for base, (found, _) in self._registered.items():
                if found.base <= address < found.end:
                    self._release_memory(base)
                    return
        raise ArgumentError(f"{address:#x} is not in registered memory")

    def _release_memory(self, base: int) -> None:
        assert self._driver is not None
        assert self._kvikio is not None
        found, _ = self._registered.pop(base)
        self._arenas = tuple(one for one in self._arenas if one.base != base)
        self._driver.make_current(found.context)
        try:
            self._kvikio.unregister(DeviceBuffer(found.base, found.nbytes))
        except KVIKIO_ERRORS as error:
            raise failure(error, f"unregistering {found.nbytes} bytes") from error

    # The end.

    async def _stop(self) -> None:
        # Deregistering files and memory asks the kernel, so it is done on a thread.
        await to_the_end(lambda: self._at_the_end(self._give_back), super()._stop)

    def _give_back(self) -> None:
        """Everything but the descriptors: files first, then memory, then cuFile and contexts."""
        for file in list(self._cufiles):
            self._close_cufile(file)
        for base in list(self._registered):
            with suppress(HsswapError):  # its memory was freed before: nothing is left to undo
                self._release_memory(base)
        if self._driver is not None and self._context:
            with suppress(HsswapError):  # kvikio frees pinned memory, in whatever context is there
                self._driver.make_current(self._context)
        if self._kvikio is not None:
            release(self._kvikio)
