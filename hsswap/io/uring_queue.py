"""Transfers as entries of a ring: filled together, continued when they come back short."""

from __future__ import annotations

import errno

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import HsswapError
from hsswap.io import uring_abi as abi
from hsswap.io.base import Operation, Transfer
from hsswap.io.linux import IOV_MAX, Moved
from hsswap.io.posix import PosixFile, transfer_error
from hsswap.io.uring_ring import Ring

ATTEMPTS = 1000
"""A transfer that the kernel turns away or interrupts is tried again so many times."""
AGAIN = (errno.EAGAIN, errno.EINTR)
ASYNC = abi.SQE_ASYNC << 8
"""In the first word of an entry."""
IOVEC_BYTES = 16


class DriveQueue:
    """What is in a ring. ``user_data`` is a number into the lists here, one entry each.

    At most ``ring.entries`` transfers are in it together; the caller counts.
    """

    def __init__(self, ring: Ring, alignment: int) -> None:
        self.ring = ring
        self._alignment = alignment
        count = ring.entries
        self._free = list(range(count))
        self._transfers: list[Transfer | None] = [None] * count
        self._missing = [0] * count  # bytes still to come
        self._attempts = [0] * count
        # The kernel copies iovecs when it takes an entry; they are kept until it took all.
        self._iovecs: list[NDArray[np.uint64]] = []
        self._pushed: list[int] = []

    @property
    def in_kernel(self) -> int:
        """Operations the kernel has taken and not completed."""
        return self.ring.entries - len(self._free) - self.ring.pending

    def add(self, transfers: list[Transfer], direct: bool) -> None:
        """Put transfers into the ring, for :meth:`submit`."""
        mode = 0 if direct else ASYNC
        rows, vectors = [], []
        for transfer in transfers:
            number = self._free.pop()
            self._transfers[number] = transfer
            addresses, span_bytes = transfer.addresses, transfer.span_bytes
            spans = len(addresses)
            self._missing[number] = spans * span_bytes
            if spans == 1:
                rows.append(_single(transfer, addresses.item(), number, mode))
                continue
            if spans > IOV_MAX:
                addresses = addresses[:IOV_MAX]
            vectors.append((len(rows), addresses, span_bytes))
            rows.append(_row(transfer, transfer.offset, len(addresses), number, mode))
        entries = np.array(rows, np.uint64)
        if vectors:
            pieces = [addresses for _, addresses, _ in vectors]
            counts = [len(addresses) for addresses in pieces]
            iovecs = np.empty((sum(counts), 2), np.uint64)
            iovecs[:, 0] = np.concatenate(pieces)
            iovecs[:, 1] = np.repeat([span_bytes for _, _, span_bytes in vectors], counts)
            self._point(entries, [at for at, _, _ in vectors], iovecs)
        self._push(entries)

    def submit(self) -> int:
        """Hand over what was added. 0, or the error number; what was not taken stays."""
        number = self.ring.submit()
        if number == 0:
            self._iovecs.clear()
            self._pushed.clear()
        return number

    def withdraw(self) -> list[Transfer]:
        """Take out what the kernel did not take; returns its transfers."""
        left = self._pushed[len(self._pushed) - self.ring.withdraw() :]
        self._iovecs.clear()
        self._pushed.clear()
        return [self._release(number) for number in left]

    def reap(self) -> list[tuple[Transfer, HsswapError | None]]:
        """Transfers that have ended. Those that came short are added again."""
        numbers, results = self.ring.reap()
        ended: list[tuple[Transfer, HsswapError | None]] = []
        for number, result in zip(numbers.tolist(), results.tolist(), strict=True):
            if result == self._missing[number]:
                ended.append((self._release(number), None))
            elif (moved := self._go_on(number, result)) is not None:
                transfer = self._release(number)
                ended.append((transfer, transfer_error(transfer, moved)))
        return ended

    def _release(self, number: int) -> Transfer:
        transfer = self._transfers[number]
        assert transfer is not None
        self._transfers[number] = None
        self._attempts[number] = 0
        self._free.append(number)
        return transfer

    def _go_on(self, number: int, result: int) -> Moved | None:
        """Add the rest of a transfer, or return how far it came when it cannot go on."""
        transfer, missing = self._transfers[number], self._missing[number]
        assert transfer is not None
        moved = transfer.nbytes - missing
        if result < 0:
            self._attempts[number] += 1
            if -result not in AGAIN or self._attempts[number] > ATTEMPTS:
                return Moved(moved, -result)
            step = 0
        else:
            # Direct I/O goes on only at an aligned place; the rest of that page is moved again.
            step = result - result % self._alignment
            if step == 0:
                return Moved(moved, 0)
        moved += step
        self._missing[number] = missing - step
        span, within = divmod(moved, transfer.span_bytes)
        addresses = transfer.addresses[span : span + IOV_MAX]
        iovecs = np.empty((len(addresses), 2), np.uint64)
        iovecs[:, 0] = addresses
        iovecs[:, 1] = transfer.span_bytes
        iovecs[0] += np.array([within, -within], np.int64).view(np.uint64)
        row = _row(transfer, transfer.offset + moved, len(addresses), number, ASYNC)
        entries = np.array([row], np.uint64)
        self._point(entries, [0], iovecs)
        self._push(entries)
        return None

    def _point(
        self, entries: NDArray[np.uint64], rows: list[int], iovecs: NDArray[np.uint64]
    ) -> None:
        """Give entries in these rows the addresses of their iovecs, which follow each other."""
        counts = entries[rows, 3]
        table: int = iovecs.__array_interface__["data"][0]
        begins = np.add.accumulate(counts) - counts
        entries[rows, 2] = begins * np.uint64(IOVEC_BYTES) + np.uint64(table)
        self._iovecs.append(iovecs)

    def _push(self, entries: NDArray[np.uint64]) -> None:
        """Put finished entries into the ring at once."""
        self._pushed += entries[:, 4].tolist()
        self.ring.push(entries)


def _single(transfer: Transfer, address: int, number: int, mode: int) -> tuple[int, ...]:
    """The entry of a transfer in one span; its words are drawn in uring_abi."""
    file = transfer.file
    assert isinstance(file, PosixFile)
    opcode = abi.OP_READ if transfer.operation is Operation.READ else abi.OP_WRITE
    word = opcode | mode | file.descriptor << 32
    return word, transfer.offset, address, transfer.span_bytes, number, 0, 0, 0


def _row(transfer: Transfer, offset: int, count: int, number: int, mode: int) -> tuple[int, ...]:
    """An entry without the address of its iovecs."""
    file = transfer.file
    assert isinstance(file, PosixFile)
    opcode = abi.OP_READV if transfer.operation is Operation.READ else abi.OP_WRITEV
    return opcode | mode | file.descriptor << 32, offset, 0, count, number, 0, 0, 0
