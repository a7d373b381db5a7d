"""The middle of a store: takes runs, lets them through to the backend in order, ends them.

State moves here, in plain functions on the loop's thread; awaiting and directories are the store's
business (:mod:`hsswap.io.store`), moving bytes the backend's.

::

    begin -> order: waits for its blocks -> segments: waits for its file -> backlog: for room
               ^                                                                      |
               +---- woken by ---- run_done <-- backend <-----------------------------+
                                      |  a failed run of several blocks: each block again, alone
                                      +--> on_done(positions, error)
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import ClosedError, CorruptBlock, HsswapError, StaleBlockId
from hsswap.io.base import BlockIO, Operation, Priority
from hsswap.io.ids import BlockIds, id_of
from hsswap.io.layout import SegmentLayout
from hsswap.io.runs import BlockOrder, BlockRun, OnBlocksDone, error_of_block
from hsswap.io.segments import Segments


class Counters:
    """What a mover counted, by direction."""

    def __init__(self) -> None:
        self.calls = {Operation.READ: 0, Operation.WRITE: 0}
        self.blocks = {Operation.READ: 0, Operation.WRITE: 0}
        self.nbytes = {Operation.READ: 0, Operation.WRITE: 0}
        self.errors = 0
        self.checksum_failures = 0
        self.in_flight = 0


class RunMover:
    """Everything between a store's calls and its backend.

    ``checksums`` and ``written``, ``[layers, capacity]``, record the last write of each block: its
    CRC and its generation, which is 0 when there was none or it failed.
    """

    def __init__(
        self, backend: BlockIO, layout: SegmentLayout, directory: Path | None, ids: BlockIds
    ) -> None:
        self.counters = Counters()
        self.segments = Segments(backend, layout, directory, ids, self._files_ready)
        self._io = backend
        self._ids = ids
        self._loop = asyncio.get_running_loop()
        shape = layout.dims.layers, ids.capacity
        self._checksums = np.zeros(shape, np.uint32)
        self._written = np.zeros(shape, np.int64)
        self._order = BlockOrder(*shape)
        self._woken: deque[BlockRun] = deque()
        self._ready: list[BlockRun] = []
        # Runs beyond the backend's limit, by priority. At most as many as callers have buffers.
        self._backlog: list[tuple[Priority, int, BlockRun]] = []
        self._sequence = itertools.count()
        self._closing = False

    def unreadable(
        self, layer: int, indices: NDArray[np.int64], generations: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Which blocks have no content of their generation, and none on the way."""
        unknown: NDArray[np.bool_] = self._written[layer, indices] != generations
        if unknown.any():
            # What is being written now is judged when that is done.
            unknown &= ~self._order.unsettled(layer, indices)
        return unknown

    def begin(self, runs: list[BlockRun]) -> None:
        """Take runs over. Their reports come later, on the loop."""
        for run in runs:
            self.counters.in_flight += run.count
            if self._order.admit(run):
                self._start(run)
        self._pump()

    def refuse(
        self,
        layer: int,
        indices: NDArray[np.int64],
        positions: NDArray[np.int64],
        notify: OnBlocksDone,
    ) -> None:
        """Report blocks that were not written, or whose ids are free, later, on the loop."""
        self.counters.in_flight += len(positions)
        for number, index in enumerate(indices[positions].tolist()):
            error = self._no_content(layer, index)
            where = positions[number : number + 1]
            self._loop.call_soon(self._report, notify, where, error)

    def run_done(self, run: BlockRun, error: HsswapError | None) -> None:
        """A run came back from the backend."""
        self.counters.calls[run.operation] += 1
        try:
            if error is not None and run.count > 1 and not self._closing:
                # Which blocks have the fault? Each goes again, alone, still holding its block.
                self._ready.extend(run.single(number) for number in range(run.count))
                return
            self.segments.leave(run)
            if error is None:
                self._succeed(run)
            else:
                self._fail(run, error)
        finally:
            self._pump()

    def close(self) -> None:
        """End with ClosedError whatever the backend has not been given; take no more."""
        self._closing = True
        error = ClosedError("the store was closed before the block was moved")
        held_back = self._ready + [run for _, _, run in sorted(self._backlog, key=lambda e: e[:2])]
        self._ready, self._backlog = [], []
        for run in self.segments.close() + held_back:
            self._fail(run, error)
        self._pump()

    # On the way in.

    def _start(self, run: BlockRun) -> None:
        """A run that holds its blocks goes on to its segment's file."""
        if run.operation is Operation.READ:
            if run.waited and not self._still_readable(run):
                return
            run.crcs = self._checksums[run.layer, run.blocks].copy()
        if self.segments.enter(run):
            self._ready.append(run)

    def _still_readable(self, run: BlockRun) -> bool:
        """Judge a read by the write it waited for. False: it was taken apart."""
        known = self._written[run.layer, run.blocks] == run.generations
        if known.all():
            return True
        for number in range(run.count):
            single = run.single(number)
            if known[number]:
                single.waited = False
                self._start(single)
            else:
                self._fail(single, self._no_content(run.layer, single.first), named=True)
        return False

    def _files_ready(self, runs: list[BlockRun], error: HsswapError | None) -> None:
        try:
            if error is None and not self._closing:
                self._ready.extend(runs)
                return
            problem = error or ClosedError("the store was closed before the block was moved")
            for run in runs:
                self.segments.leave(run)
                self._fail(run, problem)
        finally:
            self._pump()

    def _pump(self) -> None:
        """Start what was woken, hand over what is ready, as far as the backend has room."""
        while self._woken:
            run = self._woken.popleft()
            if self._closing:
                self._fail(run, ClosedError("the store was closed before the block was moved"))
            else:
                self._start(run)
        room = self._io.room
        if not self._backlog and len(self._ready) <= room:
            batch, self._ready = self._ready, []
        else:
            for run in self._ready:
                heapq.heappush(self._backlog, (run.priority, next(self._sequence), run))
            self._ready = []
            count = min(room, len(self._backlog))
            batch = [heapq.heappop(self._backlog)[2] for _ in range(count)]
        if not batch:
            return
        try:
            self._io.submit(batch)
        except HsswapError as error:  # the backend was closed by somebody else
            self._loop.call_soon(self._files_ready, batch, error)

    # On the way out. State first, reports last: a report may call the store again.

    def _succeed(self, run: BlockRun) -> None:
        good = run.positions
        bad: list[int] = []
        if run.operation is Operation.WRITE:
            self._checksums[run.layer, run.blocks] = run.crcs
            self._written[run.layer, run.blocks] = run.generations
        elif run.bad is not None:
            bad = np.flatnonzero(run.bad).tolist()
            good = good[~run.bad]
            self.counters.checksum_failures += len(bad)
        self.counters.blocks[run.operation] += len(good)
        self.counters.nbytes[run.operation] += len(good) * run.span_bytes
        self._woken.extend(self._order.release(run))
        if len(good):
            self._report(run.notify, good, None)
        for number in bad:
            error = CorruptBlock(
                f"{run.block_name(number)} came back from {run.file.path} with other bytes than "
                "were written; it was not used, compute it again and check the drive"
            )
            self._report(run.notify, run.positions[number : number + 1], error)

    def _fail(self, run: BlockRun, error: HsswapError, *, named: bool = False) -> None:
        if run.operation is Operation.WRITE:
            self._written[run.layer, run.blocks] = 0  # old bytes, new ones or both are there
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

    def _no_content(self, layer: int, index: int) -> HsswapError:
        generation = int(self._ids.generations(np.array([index]))[0])
        name = f"layer {layer}, block id {id_of(index, generation)}"
        if not self._ids.any_used(index, index + 1):
            return StaleBlockId(f"{name} is not given out; use ids that were not freed")
        return CorruptBlock(f"{name} has no content: it was not written since it was given out")
