"""The uring backend: one io_uring, filled and drained on the loop's thread, no thread on the way.

A turn of the loop: reap what has ended (one system call), start what waits in its place (one
system call for all of it), run short hooks, tell who waited. Nothing of it waits for a drive (seen
on a busy 2-core machine: no voluntary switch inside 7,000 submissions of 64 KiB blocks at depth 64,
none of which took over 0.25 ms of processor):

* direct I/O is queued by the kernel without waiting; what it cannot queue at once, such as a write
  into space never written, goes to a kernel thread of this process;
* where there is no direct I/O, everything goes to such threads, because a copy from the page cache
  would otherwise be made inside the system call, on the loop's thread;
* files are made, removed and synced on the one thread of a posix backend.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from hsswap.errors import ConfigError, HsswapError
from hsswap.io import uring_limits as limits
from hsswap.io.base import IOFile, Operation, Priority, SpanReads, Transfer
from hsswap.io.counted import QUEUE_LIMIT, CountedIO, Ended, EndedSpans
from hsswap.io.deadlines import has_passed, take_late, too_late
from hsswap.io.hooks import HookThreads, run_hook
from hsswap.io.posix import PosixIO
from hsswap.io.uring_moved import Unverified
from hsswap.io.uring_queue import DriveQueue
from hsswap.io.uring_ring import Ring, RingCalls, RingRefused
from hsswap.io.waiting import to_the_end


class UringIO(CountedIO):
    """Transfers through one ring of ``depth`` entries. Needs Linux 5.12 and x86-64.

    :meth:`start` raises ConfigError with the reason where there can be no ring.
    """

    name = "uring"
    needs_directory = True

    def __init__(
        self, depth: int = limits.DEPTH, *, limit: int = QUEUE_LIMIT, calls: RingCalls | None = None
    ) -> None:
        if not 1 <= depth <= limits.MAX_DEPTH:
            raise ConfigError(
                f"the depth of the ring is {depth}; it must be 1 to {limits.MAX_DEPTH}"
            )
        super().__init__(limit)
        self._depth = depth
        self._calls = calls
        self._posix = PosixIO(1)
        self._queue: DriveQueue | None = None
        self._hooks: HookThreads | None = None
        self._waiting: tuple[deque[Transfer | SpanReads], ...] = tuple(deque() for _ in Priority)
        # Of those in the drive's queue, or with a thread's hook: how many, and bytes by priority.
        self._started = 0
        self._started_bytes = [0 for _ in Priority]
        self._unverified = Unverified()
        self._ended: deque[Ended] = deque()
        self._ended_spans: deque[EndedSpans] = deque()
        self._next_turn: asyncio.Handle | None = None
        self._in_turn = False  # what is submitted meanwhile starts at its end
        # Of this turn, until the next begins.
        self._turn_starts = self._turn_bytes = 0
        self._retry: asyncio.Handle | None = None
        self._retries = 0

    @property
    def path(self) -> str:
        return self._posix.path if self._queue is None else f"{self._posix.path}, io_uring"

    async def start(self, directory: Path | None) -> None:
        if directory is None:
            raise ConfigError("the uring backend needs a directory")
        loop = self._begin_start()
        try:
            self._open_ring(loop)
            await self._posix.start(directory)
        except BaseException:
            await self.close()
            raise

    def _open_ring(self, loop: asyncio.AbstractEventLoop) -> None:
        """On the loop's thread, to which a ring belongs; takes 0.2 ms and waits for nothing."""
        try:
            # More entries than transfers cost nothing, and one of 1 has no room to wrap.
            ring = Ring(1 << max(3, (self._depth - 1).bit_length()), self._calls)
        except RingRefused as error:
            raise ConfigError(
                f"io 'uring' cannot be used here: {error.strerror}; use 'posix' or 'auto'"
            ) from error
        self._queue = DriveQueue(ring, self.alignment)
        loop.add_reader(ring.event, self._on_event)
        event = ring.event
        self._hooks = HookThreads(limits.HOOK_THREADS, lambda: os.eventfd_write(event, 1))

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._queue is not None and not self._queue.ring.is_closed:
            loop.add_reader(self._queue.ring.event, self._on_event)
            self._next_turn = loop.call_soon(self._turn)
            if not self._queue.ring.can_collect:  # the kernel keeps the pages that it still uses
                self._in_flight = 0

    def create_file(self, path: Path, nbytes: int) -> asyncio.Future[IOFile]:
        self._require_open()
        return self._posix.create_file(path, nbytes)

    def open_file(self, path: Path, nbytes: int) -> asyncio.Future[IOFile]:
        self._require_open()
        return self._posix.open_file(path, nbytes)

    def file_sizes(self, directory: Path) -> asyncio.Future[dict[str, int]]:
        self._require_open()
        return self._posix.file_sizes(directory)

    def remove_file(self, file: IOFile) -> asyncio.Future[None]:
        self._require_open()
        return self._posix.remove_file(file)

    def sync(self, file: IOFile) -> asyncio.Future[None]:
        self._require_open()
        return self._posix.sync(file)

    def is_open(self, file: IOFile) -> bool:
        return self._posix.is_open(file)

    async def _stop(self) -> None:
        await to_the_end(self._stop_ring, self._posix.close)

    async def _stop_ring(self) -> None:
        if self._hooks is not None:
            self._hooks.stop()
        if self._queue is not None and not self._queue.ring.is_closed:
            asyncio.get_running_loop().remove_reader(self._queue.ring.event)
            self._queue.ring.close()

    # Transfers: waiting -> started (prepare -> drive) -> moved (verify) -> ended -> delivered.

    def submit(self, batch: Sequence[Transfer]) -> None:
        self._accept(batch)
        for transfer in batch:
            self._waiting[transfer.priority].append(transfer)
        self._start_submitted()

    @property
    def span_limit(self) -> int:
        return limits.INLINE_BYTES

    def submit_spans(self, reads: SpanReads) -> None:
        self._accept_spans(reads)
        self._waiting[reads.priority].append(reads)
        self._start_submitted()

    def _start_submitted(self) -> None:
        if not self._in_turn:
            self._start_waiting()
            if self._ended or self._ended_spans:  # a deadline had passed, or a hook failed
                self._turn_soon()

    def _on_event(self) -> None:
        """Something has ended. A turn that is due will find it: two would keep others waiting."""
        if self._next_turn is None:
            self._turn()

    def _turn(self) -> None:
        """Reap, start what waits in the places that are free now, run hooks, tell, start what was
        asked for meanwhile. Started before the hooks: the drive works while bytes are checked.
        """
        if self._queue is None or self._hooks is None or self._queue.ring.is_closed:
            return  # a turn that was due when closing ended
        self._in_turn = True
        self._next_turn = None
        self._turn_starts = self._turn_bytes = 0
        try:
            self._reap(self._queue)
            self._unverified.verify(self._ended, self._ended_spans)
            prepared = []
            for transfer, error in self._hooks.take():
                if error is not None or transfer.operation is Operation.READ:
                    self._end(transfer, error, transfer.nbytes)
                else:
                    prepared.append(transfer)
            self._start_waiting(prepared)
            self._deliver()
            self._start_waiting()
        finally:
            self._in_turn = False
            # Enough for this turn, a hook that failed, or KeyboardInterrupt through an on_done.
            left = self._ended or self._ended_spans or self._unverified.count
            if left or self._queue.ring.more:  # behind whoever asks again now
                self._turn_soon()
            self._tell_idle()

    def _reap(self, queue: DriveQueue) -> None:
        """Take out what has ended, as much as this turn may end, or start in its place."""
        unverified, may = self._unverified.count, self._unverified.may
        goes_on = unverified > 0 or queue.ring.more
        queue.ring.collect()
        if not any(self._waiting):
            may.begin(None if goes_on else queue.in_drive)
            if not unverified:
                self._take_out(queue, may.transfers)
            return
        if not (goes_on or queue.in_drive):
            self._take_out(queue, limits.FIRST_TRANSFERS)  # the drive waits for the first of them
            self._start_waiting()
        # No more than that, or what is needed would come behind too many to be looked at.
        self._take_out(queue, min(limits.TURN_STARTS, self._depth - self._unverified.count))
        self._start_waiting()
        # While the drive can have more, few are looked at.
        may.begin(0 if self._next_turn else queue.in_drive)

    def _take_out(self, queue: DriveQueue, most: int) -> None:
        """Give the places of so many that have ended to others. Hooks that are long go to threads,
        and their transfers keep their places: else they would pile up there.
        """
        assert self._hooks is not None
        ended, spans = list[Ended](), list[EndedSpans]()
        while most > 0:
            most -= queue.reap(most, ended, spans)
            if most and queue.ring.unposted:
                queue.ring.collect()
            if not queue.ring.waiting:
                break
        for reads, numbers, _ in spans:
            self._leave_drive(reads.priority, len(numbers), reads.span_bytes)
        moved, long = list[Ended](), list[Transfer]()
        for one in ended:
            transfer, error, nbytes = one
            verify = transfer.verify if transfer.operation is Operation.READ else None
            if verify is not None and error is None and limits.is_long(transfer, nbytes):
                long.append(transfer)
            else:
                self._leave_drive(transfer.priority, 1, nbytes)
                moved.append(one)
        if long:
            self._hooks.push(long)
        self._unverified.add(moved, spans)

    def _leave_drive(self, priority: Priority, count: int, nbytes: int) -> None:
        """So many, of so many bytes each, have no place in the drive's queue any more."""
        self._started -= count
        self._started_bytes[priority] -= count * nbytes

    def _turn_soon(self) -> None:
        assert self._loop is not None
        if self._next_turn is None:
            self._next_turn = self._loop.call_soon(self._turn)

    def _start_waiting(self, prepared: Sequence[Transfer] = ()) -> None:
        """Start what waits, best priority first, and give the drive what is ready for it."""
        assert self._queue is not None
        assert self._hooks is not None
        if not (prepared or self._queue.ring.pending or any(self._waiting)):
            return
        ready, long = list(prepared), list[Transfer]()
        for priority, queue in enumerate(self._waiting):
            if queue and not self._start_from(queue, priority, ready, long):
                break  # nothing of a lower priority overtakes
        if long:
            self._hooks.push(long)
        if ready:
            self._queue.add(ready, self._posix.direct)
        if self._queue.ring.pending:
            self._offer()

    def _start_from(
        self,
        queue: deque[Transfer | SpanReads],
        priority: int,
        ready: list[Transfer],
        long: list[Transfer],
    ) -> bool:
        """Start transfers of a priority, as many as the drive's queue has places for and this turn
        may. False: some are left. ``ready`` for the drive; ``long``: with a hook to run elsewhere.
        """
        needed = priority == Priority.NEEDED
        # A quarter of the places is for needed ones.
        places = self._depth if needed else self._depth - self._depth // 4
        started_bytes, most = self._started_bytes, limits.BYTES_IN_FLIGHT[priority]
        there = sum(started_bytes) if needed else started_bytes[priority]
        while queue:
            transfer = queue[0]
            if isinstance(transfer, SpanReads):
                if not self._start_spans(transfer, places, most - there):
                    return False
                queue.popleft()
                there = sum(started_bytes) if needed else started_bytes[priority]
                continue
            nbytes = len(transfer.addresses) * transfer.span_bytes
            if self._started >= places or (there and there + nbytes > most):
                return False
            prepare = transfer.prepare if transfer.operation is Operation.WRITE else None
            in_place = prepare is not None and not limits.is_long(transfer, nbytes)
            turn_bytes = self._turn_bytes + (nbytes if in_place else nbytes >> 1)
            if self._turn_starts >= limits.TURN_STARTS or (
                turn_bytes > limits.TURN_BYTES and self._turn_bytes
            ):
                self._turn_soon()
                return False
            queue.popleft()
            self._turn_starts += 1
            self._turn_bytes = turn_bytes
            self._started += 1
            started_bytes[priority] += nbytes
            there += nbytes
            if transfer.deadline is not None and has_passed(transfer, time.monotonic()):
                self._end(transfer, too_late(transfer), nbytes)
                there -= nbytes
            elif prepare is None:
                ready.append(transfer)
            elif not in_place:
                long.append(transfer)
            elif error := run_hook(prepare, transfer):
                self._end(transfer, error, nbytes)
                there -= nbytes
            else:
                ready.append(transfer)
        return True

    def _start_spans(self, reads: SpanReads, places: int, bytes_left: int) -> bool:
        """Start as many of them as may. False: some are left."""
        assert self._queue is not None
        first, end, span_bytes = reads.started, len(reads.offsets), reads.span_bytes
        if has_passed(reads, time.monotonic()):
            self._expire_spans(reads)
            return True
        # One is always started where there is nothing else, however long it is.
        drive = min(places - self._started, max(bytes_left // span_bytes, not self._started))
        turn_left = (limits.TURN_BYTES - self._turn_bytes) * 2 // span_bytes
        turn = min(limits.TURN_STARTS - self._turn_starts, max(turn_left, not self._turn_starts))
        count = min(end - first, drive, turn)
        if count > 0:
            self._queue.add_spans(reads, first, first + count, self._posix.direct)
            reads.started += count
            self._started += count
            self._started_bytes[reads.priority] += count * span_bytes
            self._turn_starts += count
            self._turn_bytes += count * span_bytes >> 1
        if reads.started < end and drive > count:
            self._turn_soon()
        return reads.started == end

    def _expire_spans(self, reads: SpanReads) -> None:
        numbers = list(range(reads.started, len(reads.offsets)))
        reads.started = len(reads.offsets)
        self._ended_spans.append((reads, numbers, too_late(reads)))

    def _expire(self, now: float) -> list[float]:
        late, left = take_late(self._waiting, now)
        for one in late:
            if isinstance(one, SpanReads):
                self._expire_spans(one)
            else:
                self._ended.append((one, too_late(one), one.nbytes))
            self._turn_soon()
        return left

    def _offer(self) -> None:
        """Submit what was put into the ring. Without means the kernel is asked again, later."""
        assert self._queue is not None
        number = self._queue.submit()
        if number == 0:
            self._retries = 0
        elif self._queue.in_kernel == 0:  # else the next completion asks again
            self._retries += 1
            if self._retries > limits.RETRIES:
                self._retries = 0
                failed, spans = self._queue.withdraw(number)
                for one in failed:
                    self._end(*one)
                for part in spans:
                    self._end_started_spans(*part)
            if self._retry is not None:
                self._retry.cancel()
            self._retry = asyncio.get_running_loop().call_later(limits.RETRY_S, self._turn)

    def _end(self, transfer: Transfer, error: HsswapError | None, nbytes: int) -> None:
        """A started transfer is done; it is told at the end of the turn."""
        self._leave_drive(transfer.priority, 1, nbytes)
        self._ended.append((transfer, error, nbytes))

    def _end_started_spans(
        self, reads: SpanReads, numbers: list[int], error: HsswapError | None
    ) -> None:
        """:meth:`_end` for spans."""
        self._leave_drive(reads.priority, len(numbers), reads.span_bytes)
        self._ended_spans.append((reads, numbers, error))

    def _deliver(self) -> None:
        while self._ended or self._ended_spans:
            self._end_transfers(self._ended)
            self._end_spans(self._ended_spans)
            if self.after_deliveries is not None:
                self.after_deliveries()
