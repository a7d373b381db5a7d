"""Backends that move bytes on a fixed set of threads: the queue, and the way back to the loop."""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from hsswap.errors import ArgumentError, HsswapError
from hsswap.io.base import IOFile, Operation, Priority, SpanReads, Transfer
from hsswap.io.counted import CountedIO, Ended, EndedSpans
from hsswap.io.deadlines import has_passed, too_late
from hsswap.io.hooks import run_hook
from hsswap.io.problems import unexpected
from hsswap.io.together import TOGETHER, SpanGroup, WriteGroup, prepare_some, verified
from hsswap.io.waiting import until_done

T = TypeVar("T")

DELIVERIES = 16
"""Ends told in one go; then the loop has its turn, however many threads go on adding to them."""


@dataclass(eq=False, slots=True)
class Job:
    """Work on a file that is not a transfer: ``run()`` on a thread, its result in ``future``."""

    run: Callable[[], Any]
    future: asyncio.Future[Any]
    result: Any = None


Work = Transfer | Job | SpanGroup | WriteGroup


class ThreadedIO(CountedIO):
    """A heap of work under one condition, taken by fixed threads.

    Results go back through a deque. The first result after the loop last looked wakes it with one
    ``call_soon_threadsafe``; what ends until it looks again rides along. (Measured: 2 us a
    completion at 64 in flight where one wake-up each costs 7.6.)

    The state below the line in ``__init__`` is shared with the threads under ``_condition``, except
    the deque, whose ends are atomic; everything else is the loop's.
    """

    def __init__(self, thread_names: Sequence[str], limit: int) -> None:
        super().__init__(limit)
        self._thread_names = tuple(thread_names)
        self._threads: list[threading.Thread] = []
        self._files: set[IOFile] = set()
        self._sequence = 0
        self._jobs_in_flight = 0
        self._ended: deque[Ended] = deque()
        self._ended_spans: deque[EndedSpans] = deque()
        self._unprepared: deque[Transfer] = deque()
        self._next_preparing: asyncio.Handle | None = None
        # --- shared with the threads
        self._condition = threading.Condition(threading.Lock())
        self._queue: list[tuple[int, int, Work]] = []
        self._stopping = False
        self._completed: deque[tuple[Work, HsswapError | None]] = deque()
        self._wake_pending = False

    # What a backend of this kind supplies; all of it runs on the threads.

    @abstractmethod
    def _probe(self, directory: Path | None) -> None:
        """Find out how files of the directory are moved."""

    @abstractmethod
    def _create(self, path: Path, nbytes: int) -> IOFile: ...

    @abstractmethod
    def _open(self, path: Path, nbytes: int) -> IOFile: ...

    @abstractmethod
    def _sizes(self, directory: Path) -> dict[str, int]: ...

    @abstractmethod
    def _remove(self, file: IOFile) -> None: ...

    @abstractmethod
    def _sync(self, file: IOFile) -> None: ...

    @abstractmethod
    def _move(self, transfer: Transfer) -> None:
        """Move the bytes of a transfer, or raise HsswapError."""

    def _goes_together(self, transfer: Transfer) -> bool:
        """Whether a write, whose hook is quick, is made beside others by one thread. On the loop's
        thread.
        """
        return False

    def _write_together(self, transfers: Sequence[Transfer]) -> list[HsswapError | None]:
        """Make writes that go together, whose hooks have run; what became of each."""
        return [run_hook(self._move, transfer) for transfer in transfers]

    def _spans_together(self, reads: SpanReads) -> int:
        """How many of them one thread reads."""
        return min(TOGETHER, -(-len(reads.files) // len(self._thread_names)))

    @abstractmethod
    def _read_spans(self, reads: SpanReads, numbers: list[int]) -> list[EndedSpans]:
        """Read spans; those that failed, each with its error. The others are verified later."""

    def _close_file(self, file: IOFile) -> None:
        """Give back what an open file holds. On the loop's thread, at the end of close."""

    # The contract.

    def is_open(self, file: IOFile) -> bool:
        return file in self._files

    async def start(self, directory: Path | None) -> None:
        self._begin_start()
        for name in self._thread_names:
            thread = threading.Thread(target=self._work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()
        try:
            await self._call(lambda: self._probe(directory))
        except BaseException:
            await self.close()
            raise

    def create_file(self, path: Path, nbytes: int) -> asyncio.Future[IOFile]:
        def create() -> IOFile:
            file = self._create(path, nbytes)
            self._files.add(file)
            return file

        return self._call(create)

    def open_file(self, path: Path, nbytes: int) -> asyncio.Future[IOFile]:
        def open_() -> IOFile:
            file = self._open(path, nbytes)
            self._files.add(file)
            return file

        return self._call(open_)

    def file_sizes(self, directory: Path) -> asyncio.Future[dict[str, int]]:
        return self._call(lambda: self._sizes(directory))

    def remove_file(self, file: IOFile) -> asyncio.Future[None]:
        if file not in self._files or file.in_flight:
            raise ArgumentError(
                f"{file.path} cannot be removed: it is not open here, or has {file.in_flight} "
                "transfers in flight"
            )
        self._require_open()
        self._files.discard(file)

        def remove() -> None:
            try:
                self._remove(file)
            except BaseException:
                self._files.add(file)
                raise

        return self._call(remove)

    def sync(self, file: IOFile) -> asyncio.Future[None]:
        return self._call(lambda: self._sync(file))

    def submit(self, batch: Sequence[Transfer]) -> None:
        self._accept(batch)
        alone = list[tuple[Priority, Work]]()
        for transfer in batch:
            if transfer.operation is Operation.WRITE and self._goes_together(transfer):
                self._unprepared.append(transfer)
            else:
                alone.append((transfer.priority, transfer))
        self._push(alone)
        self._prepare_soon()

    def submit_spans(self, reads: SpanReads) -> None:
        if not self.span_limit:
            super().submit_spans(reads)
        self._accept_spans(reads)
        count, size = len(reads.files), self._spans_together(reads)
        self._push(
            [
                (reads.priority, SpanGroup(reads, list(range(at, min(at + size, count)))))
                for at in range(0, count, size)
            ]
        )

    # On the loop's thread.

    def _call(self, run: Callable[[], T]) -> asyncio.Future[T]:
        """Run a function on a thread, after the reads that wait."""
        future: asyncio.Future[T] = self._require_open().create_future()
        self._jobs_in_flight += 1
        self._push([(Priority.WRITE, Job(run, future))])
        return future

    def _prepare_soon(self) -> None:
        assert self._loop is not None
        if self._unprepared and self._next_preparing is None:
            self._next_preparing = self._loop.call_soon(self._prepare)

    def _prepare(self) -> None:
        """Run the hooks of as many writes as a turn may, and give them to a thread."""
        self._next_preparing = None
        try:
            group, failed = prepare_some(self._unprepared)
            if group.transfers:
                self._push([(group.transfers[0].priority, group)])
            for transfer, error, _ in failed:
                self._complete(transfer, error)
        finally:
            self._prepare_soon()

    def _push(self, work: Sequence[tuple[Priority, Work]]) -> None:
        with self._condition:
            for priority, item in work:
                self._sequence += 1
                heapq.heappush(self._queue, (priority, self._sequence, item))
            self._condition.notify(len(work))

    def _expire(self, now: float) -> list[float]:
        late: list[tuple[Work, HsswapError]] = []
        left: list[float] = []
        with self._condition:
            for entry in list(self._queue):
                item = entry[2]
                waiting = item.reads if isinstance(item, SpanGroup) else item
                if isinstance(waiting, Job | WriteGroup) or waiting.deadline is None:
                    continue
                if has_passed(waiting, now):
                    self._queue.remove(entry)
                    late.append((item, too_late(waiting)))
                else:
                    left.append(waiting.deadline)
            heapq.heapify(self._queue)
        for item, error in late:
            self._complete(item, error)
        return left

    def _deliver(self) -> None:
        """Hand out what has ended, so many at a time. Scheduled by the threads."""
        self._wake_pending = False
        completed, ended, spans, taken = self._completed, self._ended, self._ended_spans, 0
        try:
            while completed and taken < DELIVERIES:
                item, error = completed.popleft()
                taken += 1
                if isinstance(item, SpanGroup):
                    spans.extend(map(verified, item.ended) if error is None else item.failed(error))
                    taken += len(item.numbers) - 1
                elif isinstance(item, WriteGroup):
                    ended.extend(item.ended(error))
                    taken += len(item.transfers) - 1
                elif isinstance(item, Job):
                    self._deliver_job(item, error)
                else:
                    ended.append((item, error, item.nbytes))
            self._end_transfers(ended)
            self._end_spans(spans)
            if self.after_deliveries is not None:
                self.after_deliveries()
        finally:
            # Left over: more than that, or KeyboardInterrupt or SystemExit came through an on_done.
            left = completed or ended or spans
            if left and not self._wake_pending and self._loop is not None:
                self._wake_pending = True
                self._loop.call_soon(self._deliver)
            self._tell_idle()

    def _deliver_job(self, job: Job, error: HsswapError | None) -> None:
        self._jobs_in_flight -= 1
        if job.future.done() or job.future.get_loop().is_closed():
            return  # cancelled by who awaited it, or nobody does
        if error is None:
            job.future.set_result(job.result)
        else:
            job.future.set_exception(error)

    async def _at_the_end(self, *calls: Callable[[], object]) -> None:
        """Run functions on the threads behind everything else: what may wait, of closing."""
        assert self._loop is not None
        futures = [self._loop.create_future() for _ in calls if self._threads]
        self._jobs_in_flight += len(futures)
        jobs = (Job(run, future) for run, future in zip(calls, futures, strict=False))
        self._push([(Priority.WRITE, job) for job in jobs])
        for future in futures:
            await until_done(future)

    def _go_on(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon(self._deliver)
        self._next_preparing = None  # one that was due on the other loop never comes
        self._prepare_soon()

    def _is_idle(self) -> bool:
        return self._in_flight == 0 and self._jobs_in_flight == 0

    async def _stop(self) -> None:
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()  # does not wait for the disk: all are idle, and end at once
        for file in self._files:
            self._close_file(file)
        self._files.clear()

    # On the threads.

    def _work(self) -> None:
        while True:
            item = self._take()
            if item is None:
                return
            self._execute(item)
            del item  # an idle thread must not keep a buffer alive

    def _take(self) -> Work | None:
        with self._condition:
            while not self._queue:
                if self._stopping:
                    return None
                self._condition.wait()
            priority, _, item = heapq.heappop(self._queue)
            if isinstance(item, WriteGroup):
                # What ends together is asked for again together: groups would never grow.
                while self._queue and self._queue[0][0] == priority:
                    other = self._queue[0][2]
                    if not isinstance(other, WriteGroup) or not item.join(other):
                        break
                    heapq.heappop(self._queue)
            return item

    def _execute(self, item: Work) -> None:
        error: HsswapError | None = None
        try:
            if isinstance(item, SpanGroup):
                self._read_group(item)
            elif isinstance(item, Job):
                item.result = item.run()
            elif isinstance(item, WriteGroup):
                item.errors = self._write_together(item.transfers)
            else:
                self._transfer(item)
        except HsswapError as problem:
            error = problem
        except Exception as problem:  # a fault of ours: whoever waits must hear of it
            error = unexpected(self.name, problem)
        self._complete(item, error)

    def _read_group(self, group: SpanGroup) -> None:
        reads, numbers = group.reads, group.numbers
        error = None
        try:
            if has_passed(reads, time.monotonic()):
                raise too_late(reads)
            group.ended = self._read_spans(reads, numbers)
            failed = {number for _, part, _ in group.ended for number in part}
            numbers = [number for number in numbers if number not in failed]
        except HsswapError as problem:
            error = problem
        except Exception as problem:
            error = unexpected(self.name, problem)
        if numbers:
            if error is None and not reads.quick:
                error = run_hook(reads.verify, reads, numbers)
            group.ended.append((reads, numbers, error))

    def _transfer(self, transfer: Transfer) -> None:
        if has_passed(transfer, time.monotonic()):
            raise too_late(transfer)
        if transfer.operation is Operation.WRITE:
            if transfer.prepare is not None:
                transfer.prepare(transfer)
            self._move(transfer)
        else:
            self._move(transfer)
            if transfer.verify is not None:
                transfer.verify(transfer)

    def _complete(self, item: Work, error: HsswapError | None) -> None:
        self._completed.append((item, error))
        if not self._wake_pending:
            # Two threads may both get here: one wake-up too many, which finds nothing to do.
            self._wake_pending = True
            assert self._loop is not None
            try:
                self._loop.call_soon_threadsafe(self._deliver)
            except RuntimeError:
                # The loop was closed without closing us: nobody is left to tell.
                self._wake_pending = False
