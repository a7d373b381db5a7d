"""The middle of a store: takes runs, lets them through to the backend in order, ends them.

State moves here, in plain functions on the loop's thread; awaiting and directories are the store's
business (:mod:`hsswap.io.store`), moving bytes the backend's.

::

    begin -> order: waits for its blocks -> journal: for records of what is to be overwritten to
               ^                                     be cleared (persistent stores alone)
               |                            -> segments: for its file -> backlog: for room
               |                                                                      |
               +---- woken by ---- run_done <-- backend <-----------------------------+
                                      |  a failed run of several blocks: each block again, alone
                                      +--> on_done(positions, error)
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import BlockIOError, ClosedError, CorruptBlock, HsswapError
from hsswap.io.base import BlockIO, Operation, Priority
from hsswap.io.calls import Call
from hsswap.io.contents import Contents
from hsswap.io.counters import Counters
from hsswap.io.deadlines import DeadlineTimer, has_passed, too_late
from hsswap.io.ids import BlockIds
from hsswap.io.journal import JOURNAL_TRANSFERS, Journal
from hsswap.io.layout import SegmentLayout
from hsswap.io.problems import CameShort
from hsswap.io.refusals import why_refused
from hsswap.io.runs import BlockOrder, BlockRun, OnBlocksDone, Report, error_of_block
from hsswap.io.segments import Segments
from hsswap.io.spans import SpanReader
from hsswap.io.tables import FEW
from hsswap.io.tickets import Tickets


class RunMover:
    """Everything between a store's calls and its backend.

    ``on_corrupt(index)`` is called when a block came back as another than was written.
    """

    def __init__(
        self, backend: BlockIO, ids: BlockIds, contents: Contents, segments: Segments
    ) -> None:
        self.counters = Counters()
        self.segments = segments
        self.tickets = Tickets(self._flushed)
        self.on_corrupt: Callable[[int], None] = lambda index: None
        self._io = backend
        self._ids = ids
        self._loop = asyncio.get_running_loop()
        self._contents = contents
        self._journal: Journal | None = None
        self._reserved = 0
        self._order = BlockOrder(*contents.written.shape)
        self._woken: deque[BlockRun] = deque()
        self._ready: list[BlockRun] = []
        # Runs beyond the backend's limit, by priority. At most as many as callers have buffers.
        self._backlog: list[tuple[Priority, int, BlockRun]] = []
        self._deadlines = DeadlineTimer(self._expire)
        self._sequence = itertools.count()
        self._done: deque[tuple[BlockRun, HsswapError | None]] = deque()
        self._reports: deque[Report] = deque()
        self._closing = False
        self._spans = SpanReader(
            backend,
            contents,
            segments,
            self._order,
            self.counters,
            self._woken,
            self._reports,
            self._span_failed,
            self._files_ready,
        )
        segments.on_ready = self._files_ready
        backend.after_deliveries = self._settle

    def attach(self, journal: Journal) -> None:
        """Ask this before blocks are overwritten, and leave it room for its transfers."""
        self._journal = journal
        self._reserved = JOURNAL_TRANSFERS

    def unreadable(
        self, layer: int, indices: NDArray[np.int64], generations: NDArray[np.int64]
    ) -> NDArray[np.bool_] | None:
        """Which blocks have no content of their generation, and none on the way; None: all have."""
        written = self._contents.written[layer][indices]
        if len(indices) <= FEW and written.tolist() == generations.tolist():
            return None
        unknown: NDArray[np.bool_] = written != generations
        # What is being written now is judged when that is done.
        unknown &= ~self._order.unsettled(layer, indices)
        return unknown

    def begin(self, call: Call, positions: NDArray[np.int64] | None, layout: SegmentLayout) -> None:
        """Take over the blocks at these positions of a call's arrays, None for all. Their reports
        come later, on the loop.
        """
        if call.operation is Operation.READ:
            room = 0 if self._ready or self._backlog else self._io.room - self._reserved
            positions = self._spans.begin(call, positions, layout, room, self.run_done)
        if positions is None or len(positions):
            self._begin_runs(*call.cut(positions, layout, self._ids, self.run_done))

    def _begin_runs(self, runs: list[BlockRun], indices: NDArray[np.int64]) -> None:
        """``indices``: of all their blocks, in the order of the runs."""
        if not runs:
            return
        self.counters.in_flight += len(indices)
        layer, reading = runs[0].layer, runs[0].operation is Operation.READ
        ticket = 0 if reading else self.tickets.take(len(indices))
        if reading and self._order.admit_reads(layer, indices):
            crcs: list[int] = self._contents.checksums[layer][indices].tolist()
            seeds: list[int] = self._contents.seeds[layer][indices].tolist()
            begin = 0
            for run in runs:
                end = begin + len(run.positions)
                run.crcs, run.seeds = crcs[begin:end], seeds[begin:end]
                begin = end
            self._ready += self.segments.enter(runs)
        elif (
            not reading
            and len(runs) > 1
            and self._journal is None
            and self._order.admit_writes(layer, indices)
        ):
            for run in runs:
                run.ticket = ticket
            self._ready += self.segments.enter(runs)
        else:
            for run in runs:
                run.ticket = ticket
                if self._order.admit(run):
                    self._start(run)
        self._pump()

    def refuse(
        self,
        layer: int,
        indices: NDArray[np.int64],
        positions: NDArray[np.int64],
        notify: OnBlocksDone,
        *,
        writing: bool,
    ) -> None:
        """Report blocks that cannot be read or written, and why, later, on the loop."""
        self.counters.in_flight += len(positions)
        for number, index in enumerate(indices[positions].tolist()):
            error = why_refused(self._ids, layer, index, writing=writing)
            where = positions[number : number + 1]
            self._loop.call_soon(self._report, notify, where, error)

    def run_done(self, run: BlockRun, error: HsswapError | None) -> None:
        """A run came back from the backend. What follows is done for all that came in one go."""
        self._done.append((run, error))

    def _span_failed(self, run: BlockRun, error: HsswapError | None) -> None:
        """A block that went the short way: it came in part, or not, or it is not what it was."""
        if isinstance(error, CameShort):
            if not self._closing:
                self.counters.calls[run.operation] += 1
                self._ready.append(run)
                return
            error = BlockIOError(str(error), errno=error.errno)
        self._done.append((run, error))

    def _settle(self) -> None:
        """End the runs that came back. The backend calls it after it delivered some."""
        good: dict[tuple[Operation, int], list[BlockRun]] = {}
        done = self._done
        try:
            while done:
                run, error = done.popleft()
                if error is None and run.bad is None:
                    kind = run.operation, run.layer
                    if kind in good:
                        good[kind].append(run)
                    else:
                        good[kind] = [run]
                    continue
                self.counters.calls[run.operation] += 1
                if error is not None and run.count > 1 and not self._closing:
                    # Which blocks have the fault? Each goes again, alone, holding its block.
                    self._ready.extend(run.single(number) for number in range(run.count))
                    continue
                self.segments.leave_of([run])
                if error is not None:
                    self._fail(run, error)
                elif run.bad is not None:
                    self._partly_bad(run, run.bad)
        finally:  # also when KeyboardInterrupt or SystemExit came through a report
            for (operation, _), runs in good.items():
                self._succeed(operation, runs)
            self._spans.settle()
            self._drain_reports()
            if self._done:
                self._loop.call_soon(self._settle)
            self._pump()

    def close(self) -> None:
        """End with ClosedError whatever the backend has not been given; take no more."""
        self._closing = True
        self._deadlines.cancel()
        error = ClosedError("the store was closed before the block was moved")
        held_back = self._ready + [run for _, _, run in sorted(self._backlog, key=lambda e: e[:2])]
        self._ready, self._backlog = [], []
        for run in self.segments.close() + held_back:
            self._fail(run, error)
        self._flushed()

    # On the way in.

    def _flushed(self) -> None:
        self._woken.extend(self.tickets.held_back())
        self._pump()

    def _start(self, run: BlockRun) -> None:
        """A run that holds its blocks goes on to its segment's file."""
        if run.operation is Operation.READ:
            if run.waited and not self._still_readable(run):
                return
            run.crcs = self._contents.checksums[run.layer, run.blocks].tolist()
            run.seeds = self._contents.seeds[run.layer, run.blocks].tolist()
        elif self._journal is not None and (
            (self._contents.has_any(run) and self.tickets.holds_back(run))
            or not self._journal.begin_write(run, partial(self._cleared, run))
        ):
            return
        self._ready += self.segments.enter([run])

    def _cleared(self, run: BlockRun, error: HsswapError | None) -> None:
        """No record speaks of what a write is about to overwrite, or that could not be done."""
        assert self._journal is not None
        if self._closing and error is None:
            error = ClosedError("the store was closed before the block was moved")
        if error is not None:
            self._journal.given_up(run)
            self._fail(run, error, untouched=True)
        else:
            self._journal.overwriting(run)
            self._ready += self.segments.enter([run])
        self._pump()

    def _still_readable(self, run: BlockRun) -> bool:
        """Judge a read by the write it waited for. False: it was taken apart."""
        known = self._contents.written[run.layer, run.blocks] == run.generations
        if known.all():
            return True
        for number in range(run.count):
            single = run.single(number)
            if known[number]:
                single.waited = False
                self._start(single)
            else:
                error = why_refused(self._ids, run.layer, single.first)
                self._fail(single, error, named=True)
        return False

    def _files_ready(self, runs: list[BlockRun], error: HsswapError | None) -> None:
        try:
            if error is None and not self._closing:
                self._ready.extend(runs)
                return
            problem = error or ClosedError("the store was closed before the block was moved")
            self.segments.leave_of(runs)
            for run in runs:
                self._fail(run, problem)
        finally:
            self._pump()

    def _pump(self) -> None:
        """Start what was woken, hand over what is ready, as far as the backend has room."""
        while self._woken:
            run = self._woken.popleft()
            if self._closing:
                error = ClosedError("the store was closed before the block was moved")
                self._fail(run, error, untouched=True)
            else:
                self._start(run)
        room = max(0, self._io.room - self._reserved)
        if not self._backlog and len(self._ready) <= room:
            batch, self._ready = self._ready, []
        else:
            for run in self._ready:
                heapq.heappush(self._backlog, (run.priority, next(self._sequence), run))
                if run.deadline is not None:
                    self._deadlines.watch(run.deadline)
            self._ready = []
            count = min(room, len(self._backlog))
            batch = [heapq.heappop(self._backlog)[2] for _ in range(count)]
        if not batch:
            return
        try:
            self._io.submit(batch)
        except HsswapError as error:  # the backend was closed by somebody else
            self._loop.call_soon(self._files_ready, batch, error)

    def _expire(self, now: float) -> list[float]:
        """End what is too late for a backend that had no room all the time."""
        late = [entry for entry in self._backlog if has_passed(entry[2], now)]
        self._backlog = [entry for entry in self._backlog if not has_passed(entry[2], now)]
        heapq.heapify(self._backlog)
        for _, _, run in late:
            self.segments.leave_of([run])
            self._fail(run, too_late(run))
        self._pump()
        return [run.deadline for _, _, run in self._backlog if run.deadline is not None]

    # On the way out. State first, reports last: a report may call the store again.

    def _succeed(self, operation: Operation, runs: list[BlockRun]) -> None:
        """Runs of one layer without a fault: one report for each caller."""
        self.counters.calls[operation] += len(runs)
        self.segments.leave_of(runs)
        if operation is Operation.WRITE:
            self._written(runs)
        if not self._order.release_many(operation, runs):
            for run in runs:
                self._woken.extend(self._order.release(run))
        count = 0
        for notify, group in itertools.groupby(runs, attrgetter("notify")):
            parts = [run.positions for run in group]
            positions = parts[0] if len(parts) == 1 else np.concatenate(parts)
            count += len(positions)
            self._reports.append((notify, positions))
        self.counters.blocks[operation] += count
        self.counters.nbytes[operation] += count * runs[0].span_bytes

    def _written(self, runs: list[BlockRun]) -> None:
        self._contents.record(runs)
        for run in runs:
            if self._journal is not None:
                self._journal.written(run)
            self.tickets.give_back(run.ticket, len(run.positions))

    def _drain_reports(self) -> None:
        """Tell the callers of runs that succeeded."""
        try:
            while self._reports:
                self._report(*self._reports.popleft(), None)
        finally:
            if self._reports:
                self._loop.call_soon(self._drain_reports)

    def _partly_bad(self, run: BlockRun, bad: NDArray[np.bool_]) -> None:
        """A read whose blocks did not all come back as they were written."""
        good = run.positions[~bad]
        self.counters.checksum_failures += len(bad) - len(good)
        self.counters.blocks[run.operation] += len(good)
        self.counters.nbytes[run.operation] += len(good) * run.span_bytes
        self._woken.extend(self._order.release(run))
        if len(good):
            self._report(run.notify, good, None)
        for number in np.flatnonzero(bad).tolist():
            self._contents.corrupt[run.layer, run.first + number] = True
            self.on_corrupt(run.first + number)
            error = CorruptBlock(
                f"{run.block_name(number)} came back from {run.file.path} with other bytes than "
                "were written; it was not used, compute it again and check the drive"
            )
            self._report(run.notify, run.positions[number : number + 1], error)

    def _fail(
        self, run: BlockRun, error: HsswapError, *, named: bool = False, untouched: bool = False
    ) -> None:
        if run.operation is Operation.WRITE:
            if not untouched:
                self._contents.forget(run)
                if self._journal is not None and not isinstance(error, ClosedError):
                    self._journal.failed(run)
            self.tickets.give_back(run.ticket, run.count)
        self._woken.extend(self._order.release(run))
        for number in range(run.count):
            problem = error if named else error_of_block(error, run, number)
            self._report(run.notify, run.positions[number : number + 1], problem)

    def _report(
        self, notify: OnBlocksDone, positions: NDArray[np.int64], error: HsswapError | None
    ) -> None:
        self.counters.in_flight -= len(positions)
        self.counters.errors += error is not None
        try:
            notify(positions, error)
        except Exception as problem:  # the others must still hear of their ends
            context = {"message": f"on_done {notify} raised", "exception": problem}
            self._loop.call_exception_handler(context)
