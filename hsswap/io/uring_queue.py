"""Transfers as entries of a ring: filled together, continued when they come back short."""

from __future__ import annotations

from itertools import accumulate, repeat

import numpy as np
from numpy.typing import NDArray

from hsswap.io import uring_abi as abi
from hsswap.io.base import Operation, SpanReads, Transfer
from hsswap.io.counted import Ended, EndedSpans
from hsswap.io.linux import IOV_MAX, Moved
from hsswap.io.posix import AGAIN, PosixFile, span_error, transfer_error
from hsswap.io.uring_ring import Entry, Ring

ATTEMPTS = 1000
"""A transfer that the kernel turns away or interrupts is tried again so many times."""
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
        self._reads: list[SpanReads | None] = [None] * count
        self._spans = [-1] * count  # of those reads; -1: it is a transfer
        self._nbytes = [0] * count
        self._missing = [0] * count  # of them, still to come
        self._attempts: dict[int, int] = {}
        # The kernel copies iovecs when it takes an entry; they are kept until it took all.
        self._iovecs: list[NDArray[np.uint64]] = []
        self._pushed: list[Entry] = []

    @property
    def in_kernel(self) -> int:
        """Operations the kernel has taken and not completed."""
        return self.ring.entries - len(self._free) - self.ring.pending

    @property
    def in_drive(self) -> int:
        """How many of them have not ended, at least."""
        return 0 if self.ring.unposted else self.in_kernel - self.ring.waiting

    def add(self, transfers: list[Transfer], direct: bool) -> None:
        """Put transfers into the ring, for :meth:`submit`."""
        mode = 0 if direct else ASYNC
        entries: list[Entry] = []
        tables = iter(self._iovecs_of([one for one in transfers if len(one.addresses) > 1]))
        for transfer in transfers:
            number = self._free.pop()
            self._transfers[number] = transfer
            file, span_bytes = transfer.file, transfer.span_bytes
            assert isinstance(file, PosixFile)
            spans, reads = len(transfer.addresses), transfer.operation is Operation.READ
            self._nbytes[number] = self._missing[number] = spans * span_bytes
            if spans > 1:
                opcode = abi.OP_READV if reads else abi.OP_WRITEV
                where, length = next(tables), min(spans, IOV_MAX)
            else:
                opcode = abi.OP_READ if reads else abi.OP_WRITE
                where, length = transfer.addresses.item(), span_bytes
            head = opcode | mode | file.descriptor << 32
            entries.append((head, transfer.offset, where, length, number))
        self._push(entries)

    def add_spans(self, reads: SpanReads, begin: int, end: int, direct: bool) -> None:
        """Put spans with these numbers into the ring, for :meth:`submit`."""
        head = abi.OP_READ if direct else abi.OP_READ | ASYNC
        numbers = self._free[begin - end :]
        del self._free[begin - end :]
        for number, span in zip(numbers, range(begin, end), strict=True):
            self._reads[number] = reads
            self._spans[number] = span
        words = [
            head | file.descriptor << 32  # type: ignore[attr-defined]
            for file in reads.files[begin:end]
        ]
        offsets, addresses = reads.offsets[begin:end], reads.addresses[begin:end]
        lengths = repeat(reads.span_bytes, end - begin)
        self._push(list(zip(words, offsets, addresses, lengths, numbers, strict=True)))

    def submit(self) -> int:
        """Hand over what was added. 0, or the error number; what was not taken stays."""
        number = self.ring.submit()
        if number == 0:
            self._iovecs.clear()
            self._pushed.clear()
        return number

    def withdraw(self, error: int) -> tuple[list[Ended], list[EndedSpans]]:
        """Take out what the kernel did not take; it failed with this error number."""
        left = self._pushed[len(self._pushed) - self.ring.withdraw() :]
        self._iovecs.clear()
        self._pushed.clear()
        ended: list[Ended] = []
        spans: list[EndedSpans] = []
        for *_, number in left:
            if self._spans[number] >= 0:
                spans.append(self._failed_span(number, -error))
            else:
                transfer = self._release(number)
                problem = transfer_error(transfer, Moved(0, error))
                ended.append((transfer, problem, self._nbytes[number]))
        return ended, spans

    def reap(self, most: int, ended: list[Ended], ended_spans: list[EndedSpans]) -> int:
        """Add what has ended, at most so many, to these. Transfers that came short go on. How many
        were added.
        """
        before = self.ring.entries - len(self._free)
        good: dict[SpanReads, list[int]] = {}
        spans, missing, all_reads, free = self._spans, self._missing, self._reads, self._free
        for number, result in zip(*self.ring.take(most), strict=True):
            if (span := spans[number]) >= 0:
                reads = all_reads[number]
                assert reads is not None
                if result != reads.span_bytes:
                    ended_spans.append(self._failed_span(number, result))
                    continue
                # _release_span, in place: a third of the cost of this loop is that call.
                all_reads[number] = None
                spans[number] = -1
                free.append(number)
                if reads in good:
                    good[reads].append(span)
                else:
                    good[reads] = [span]
            elif result == missing[number]:
                ended.append((self._release(number), None, self._nbytes[number]))
            elif (moved := self._go_on(number, result)) is not None:
                transfer = self._release(number)
                ended.append((transfer, transfer_error(transfer, moved), self._nbytes[number]))
        ended_spans.extend((reads, numbers, None) for reads, numbers in good.items())
        return before - (self.ring.entries - len(free))

    def _release_span(self, number: int) -> SpanReads:
        reads = self._reads[number]
        assert reads is not None
        self._reads[number] = None
        self._spans[number] = -1
        self._free.append(number)
        return reads

    def _failed_span(self, number: int, result: int) -> EndedSpans:
        """A span of which so many bytes came, or which failed with ``-errno``."""
        span = self._spans[number]
        reads = self._release_span(number)
        return reads, [span], span_error(reads, span, result)

    def _release(self, number: int) -> Transfer:
        transfer = self._transfers[number]
        assert transfer is not None
        self._transfers[number] = None
        self._free.append(number)
        if self._attempts:
            self._attempts.pop(number, None)
        return transfer

    def _go_on(self, number: int, result: int) -> Moved | None:
        """Add the rest of a transfer, or return how far it came when it cannot go on."""
        transfer, missing = self._transfers[number], self._missing[number]
        assert transfer is not None
        moved = self._nbytes[number] - missing
        if result < 0:
            attempts = self._attempts.get(number, 0) + 1
            if -result not in AGAIN or attempts > ATTEMPTS:
                return Moved(moved, -result)
            self._attempts[number] = attempts
            step = 0
        else:
            # Direct I/O goes on only at an aligned place; the rest of that page is moved again.
            step = result - result % self._alignment
            if step == 0:
                return Moved(moved, 0)
        self._missing[number] = missing - step
        self._push([self._rest_of(transfer, moved + step, number)])
        return None

    def _iovecs_of(self, transfers: list[Transfer]) -> list[int]:
        """Where the iovecs of each transfer are, made together: one by one 7 us each."""
        if not transfers:
            return []
        counts = [len(transfer.addresses) for transfer in transfers]
        iovecs = np.empty((sum(counts), 2), np.uint64)
        np.concatenate([transfer.addresses for transfer in transfers], out=iovecs[:, 0])
        sizes = [transfer.span_bytes for transfer in transfers]
        # Of one store all have the same; the general way costs five times as much.
        iovecs[:, 1] = sizes[0] if len(set(sizes)) == 1 else np.repeat(sizes, counts)
        self._iovecs.append(iovecs)
        table: int = iovecs.__array_interface__["data"][0]
        return [table + IOVEC_BYTES * first for first in accumulate(counts[:-1], initial=0)]

    def _rest_of(self, transfer: Transfer, begin: int, number: int) -> Entry:
        """The entry of a transfer from its byte ``begin`` on, as far as one entry goes."""
        file, span_bytes = transfer.file, transfer.span_bytes
        assert isinstance(file, PosixFile)
        span, within = divmod(begin, span_bytes)
        addresses = transfer.addresses[span : span + IOV_MAX]
        iovecs = np.empty((len(addresses), 2), np.uint64)
        iovecs[:, 0] = addresses
        iovecs[:, 1] = span_bytes
        if within:
            iovecs[0] += np.array([within, -within], np.int64).view(np.uint64)
        self._iovecs.append(iovecs)
        opcode = abi.OP_READV if transfer.operation is Operation.READ else abi.OP_WRITEV
        head = opcode | ASYNC | file.descriptor << 32
        table: int = iovecs.__array_interface__["data"][0]
        return head, transfer.offset + begin, table, len(addresses), number

    def _push(self, entries: list[Entry]) -> None:
        """Put finished entries into the ring at once."""
        self._pushed += entries
        self.ring.push(entries)
