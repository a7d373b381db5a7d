"""What backends with a queue share: who may come in, what is counted, and the order of closing."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence

from hsswap.errors import ArgumentError, ClosedError, HsswapError
from hsswap.io.base import (
    BlockIO,
    IOFile,
    IOStatistics,
    Operation,
    QueueFull,
    SpanReads,
    Transfer,
    check_transfers,
)
from hsswap.io.deadlines import DeadlineTimer
from hsswap.io.waiting import goes_on, is_own, to_the_end, until_done

Ended = tuple[Transfer, HsswapError | None, int]
"""A transfer that ended, its error, and its bytes."""

EndedSpans = tuple[SpanReads, list[int], HsswapError | None]
"""Spans that ended together, by number, and their error."""

QUEUE_LIMIT = 1024
"""Transfers in flight. Some 100 times what keeps a drive busy; the store holds back the rest."""


class CountedIO(BlockIO):
    """The loop's half of a backend. Everything here is called on the loop's thread."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight = 0
        self._calls_done = {Operation.READ: 0, Operation.WRITE: 0}
        self._bytes = {Operation.READ: 0, Operation.WRITE: 0}
        self._errors = 0
        self._deadlines = DeadlineTimer(self._expire)
        self._closed: asyncio.Future[None] | None = None  # there once closing began
        self._is_untold = False  # whoever waited for ends was on a loop that is closed
        self._drained: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open" if self._loop else "new"
        return f"<{type(self).__name__} {state}, {self._in_flight} in flight>"

    @abstractmethod
    def is_open(self, file: IOFile) -> bool:
        """Whether a file was made here and not removed."""

    @abstractmethod
    def _expire(self, now: float) -> list[float]:
        """End what has not started by its deadline. Returns the deadlines of what waits on."""

    @abstractmethod
    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take out on this loop what ends, in place of one that was closed: it lost wake-ups."""

    @abstractmethod
    async def _stop(self) -> None:
        """Give threads and descriptors back; nothing is in flight any more."""

    @property
    def room(self) -> int:
        return self.limit - self._in_flight

    def statistics(self) -> IOStatistics:
        return IOStatistics(
            read_calls=self._calls_done[Operation.READ],
            write_calls=self._calls_done[Operation.WRITE],
            bytes_read=self._bytes[Operation.READ],
            bytes_written=self._bytes[Operation.WRITE],
            errors=self._errors,
            in_flight=self._in_flight,
        )

    async def close(self) -> None:
        if self._closed is not None and goes_on(self._closed):
            await until_done(self._closed)
            return
        bound, self._loop = self._loop, asyncio.get_running_loop()
        closing = self._closed = self._loop.create_future()
        self._is_untold = bound is not None and bound.is_closed()
        if self._is_untold:
            self.after_deliveries = self._drained = None
            self._go_on(self._loop)
        try:
            await to_the_end(self._drain, self._stop)
        finally:
            if is_own(closing, self._closed):
                self._deadlines.cancel()
                closing.set_result(None)

    async def _drain(self) -> None:
        assert self._loop is not None
        if not self._is_idle():
            self._drained = self._loop.create_future()
            await until_done(self._drained)

    def _is_idle(self) -> bool:
        return self._in_flight == 0

    def _tell_idle(self) -> None:
        """End :meth:`_drain` if nothing is in flight; to be called after ends were told."""
        if self._drained and not self._drained.done() and self._is_idle():
            self._drained.set_result(None)

    def _begin_start(self) -> asyncio.AbstractEventLoop:
        """Bind the running loop. Raises ClosedError or ArgumentError for a second start."""
        if self._closed is not None:
            raise ClosedError(f"{self!r} takes no more work; open a new one")
        if self._loop is not None:
            raise ArgumentError(f"{self!r} was started before; make a new one")
        self._loop = asyncio.get_running_loop()
        return self._loop

    def _require_open(self) -> asyncio.AbstractEventLoop:
        if self._closed is not None:
            raise ClosedError(f"{self!r} takes no more work; open a new one")
        if self._loop is None:
            raise ClosedError(f"{self!r} was not started; await start() first")
        return self._loop

    def _accept(self, batch: Sequence[Transfer]) -> None:
        """The beginning of :meth:`submit`: check, then count in. Raises as that does."""
        self._admit(len(batch), {transfer.file for transfer in batch})
        check_transfers(batch, self.alignment)
        for transfer in batch:
            transfer.file.in_flight += 1
        self._in_flight += len(batch)
        if deadlines := [one.deadline for one in batch if one.deadline is not None]:
            self._deadlines.watch(min(deadlines))

    def _accept_spans(self, reads: SpanReads) -> None:
        """The beginning of :meth:`submit_spans`."""
        self._admit(len(reads.files), set(reads.files))
        if reads.span_bytes > self.span_limit:
            raise ArgumentError(f"spans of {reads.span_bytes} bytes; {self.span_limit} at most")
        reads.check(self.alignment)
        for file in reads.files:
            file.in_flight += 1
        self._in_flight += len(reads.files)
        if reads.deadline is not None:
            self._deadlines.watch(reads.deadline)

    def _admit(self, count: int, files: set[IOFile]) -> None:
        self._require_open()
        if count > self.room:
            raise QueueFull(
                f"{count} transfers submitted with room for {self.room} of {self.limit}; "
                "wait for some to be done"
            )
        for file in files:
            if not self.is_open(file):
                raise ArgumentError(f"{file.path} is not open in {self!r}")

    def _end_transfers(self, ended: deque[Ended]) -> None:
        """Count out, and tell of, each; what an on_done adds at the end, too."""
        calls, moved = self._calls_done, self._bytes
        while ended:
            transfer, error, nbytes = ended.popleft()
            operation = transfer.operation
            self._in_flight -= 1
            transfer.file.in_flight -= 1
            calls[operation] += 1
            if error is None:
                moved[operation] += nbytes
            else:
                self._errors += 1
            try:
                transfer.on_done(transfer, error)
            except Exception as problem:  # the others must still hear of their ends
                self._on_done_raised(transfer, problem)

    def _end_spans(self, ended: deque[EndedSpans]) -> None:
        """:meth:`_end_transfers` for spans."""
        while ended:
            reads, numbers, error = ended.popleft()
            count = len(numbers)
            self._in_flight -= count
            for number in numbers:
                reads.files[number].in_flight -= 1
            self._calls_done[Operation.READ] += count
            if error is None:
                self._bytes[Operation.READ] += count * reads.span_bytes
            else:
                self._errors += count
            try:
                reads.on_done(reads, numbers, error)
            except Exception as problem:
                self._on_done_raised(reads, problem)

    def _on_done_raised(self, what: Transfer | SpanReads, problem: Exception) -> None:
        if self._is_untold:
            return
        assert self._loop is not None
        context = {"message": f"on_done of {what} raised", "exception": problem}
        self._loop.call_exception_handler(context)
