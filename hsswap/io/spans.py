"""Reads of single blocks all over the disk, asked for in one call: the short way through a store.

A :class:`~hsswap.io.runs.BlockRun` costs 10 us of processor on its way, whatever its length; here
that is spent once a call and once a turn of the loop. What is not plain goes the other way: blocks
with neighbours, that wait for a write, whose file is not there, or that came in part.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hsswap.checksum import crc32
from hsswap.errors import HsswapError
from hsswap.io.base import BlockChecksums, BlockIO, Operation, SpanReads
from hsswap.io.calls import Call
from hsswap.io.contents import Contents
from hsswap.io.counters import Counters
from hsswap.io.layout import MAX_RUN_BYTES, SegmentLayout, is_stretch, plan_runs
from hsswap.io.runs import (
    BlockOrder,
    BlockRun,
    OnBlocksDone,
    Report,
    RunDone,
    compare_by,
    compare_checksums,
)
from hsswap.io.segments import Segment, Segments
from hsswap.io.tables import FEW
from hsswap.io.views import array_type


@dataclass(eq=False, slots=True, kw_only=True)
class BlockSpans(SpanReads):
    """Blocks of one layer. Of each: ``indices``, ``positions`` in the call's arrays, the segment,
    the generation, the seed of its checksum and the checksum to expect. ``bad``: numbers of blocks
    that came back as others than were written.
    """

    layer: int
    indices: list[int]
    positions: NDArray[np.int64]
    segments: list[Segment]
    generations: NDArray[np.int64]
    seeds: list[int]
    crcs: list[int]
    notify: OnBlocksDone
    run_done: RunDone
    checksums: BlockChecksums | None
    bad: set[int] = field(default_factory=set)

    def single(self, number: int) -> BlockRun:
        """The n-th block as a run."""
        part = slice(number, number + 1)
        return BlockRun(
            Operation.READ,
            self.files[number],
            self.offsets[number],
            np.array(self.addresses[part], np.uint64),
            self.span_bytes,
            self.priority,
            self.run_done,
            None,
            partial(compare_by, self.checksums) if self.checksums else compare_checksums,
            self.deadline,
            self.owner,
            self.checksums is None,
            layer=self.layer,
            first=self.indices[number],
            positions=self.positions[part],
            generations=self.generations[part],
            seeds=self.seeds[part],
            notify=self.notify,
            crcs=self.crcs[part],
        )


def compare_spans(spans: BlockSpans, numbers: list[int]) -> None:
    """The verify hook: find the blocks that came back as others than were written."""
    addresses, seeds, crcs = spans.addresses, spans.seeds, spans.crcs
    if spans.checksums is not None:
        where = np.array([addresses[number] for number in numbers], np.uint64)
        begins = np.array([seeds[number] for number in numbers], np.uint32)
        found = spans.checksums(where, spans.span_bytes, begins).tolist()
        spans.bad.update(n for n, crc in zip(numbers, found, strict=True) if crc != crcs[n])
        return
    view = array_type(spans.span_bytes).from_address
    for number in numbers:
        if crc32(view(addresses[number]), seeds[number]) != crcs[number]:
            spans.bad.add(number)


_NOTHING = np.empty(0, np.int64)

WORTH_IT = 4
"""Fewer blocks that are alone, in a call with neighbours, are runs like those: a second way through
the store costs the call more (uring, beside 10 runs of 4, us of processor a call behind a wait, the
kernel's left out: 1 alone 1,894 the short way and 1,656 as runs, 3: 1,920 and 1,709, 10: 2,098 and
1,976, 16: 2,298 and 2,251; 2 cores, 2026-12-01). No more than that, because posix reads those that
go the short way side by side, and runs one by one."""


def alone_and_joined(
    indices: NDArray[np.int64], block_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of the blocks that are runs of their own, and of the others."""
    if is_stretch(indices) and 2 * block_bytes <= MAX_RUN_BYTES:
        return _NOTHING, np.arange(len(indices))
    if len(indices) <= FEW:  # a fifth of the cost
        listed = indices.tolist()
        known = set(listed)
        if len(known) == len(listed):
            lonely = [
                2 * block_bytes > MAX_RUN_BYTES
                or (index + 1 not in known and index - 1 not in known)
                for index in listed
            ]
            if all(lonely):
                return np.arange(len(listed)), _NOTHING
            return np.flatnonzero(lonely), np.flatnonzero(np.logical_not(lonely))
    order, bounds = plan_runs(indices, block_bytes)
    if len(bounds) == len(order) + 1:
        return order, order[:0]
    single = np.repeat((lengths := np.diff(bounds)) == 1, lengths)
    return order[single], order[~single]


class SpanReader:
    """Starts and ends the reads of a store that go the short way. On the loop's thread.

    ``on_failed(run, error)``: a block that did not come back, or (no error, ``run.bad``) not as it
    was written. ``on_refused(runs, error)``: blocks that the backend did not take. They still hold
    their blocks and segments. ``woken`` and ``reports`` are the mover's.
    """

    def __init__(
        self,
        backend: BlockIO,
        contents: Contents,
        segments: Segments,
        order: BlockOrder,
        counters: Counters,
        woken: deque[BlockRun],
        reports: deque[Report],
        on_failed: RunDone,
        on_refused: Callable[[list[BlockRun], HsswapError], None],
    ) -> None:
        self._io = backend
        self._contents = contents
        self._segments = segments
        self._order = order
        self._counters = counters
        self._woken = woken
        self._reports = reports
        self._on_failed = on_failed
        self._on_refused = on_refused
        self._good: list[tuple[BlockSpans, list[int]]] = []

    def begin(
        self,
        call: Call,
        positions: NDArray[np.int64] | None,
        layout: SegmentLayout,
        room: int,
        run_done: RunDone,
    ) -> NDArray[np.int64] | None:
        """Start the blocks of a call that may go this way. Returns the positions that are left.

        ``positions``: of the blocks to read in the call's arrays, None for all. ``room``: how many
        may be started.
        """
        layer, block_bytes = call.layer, layout.block_bytes[call.layer]
        wanted = call.indices if positions is None else call.indices[positions]
        if not 1 <= len(wanted) <= room or block_bytes > self._io.span_limit:
            return positions
        if call.checksums is not None and not self._io.spans_on_threads:
            return positions  # it may wait for the device
        alone, joined = alone_and_joined(wanted, block_bytes)
        if len(alone) < (WORTH_IT if len(joined) else 1):
            return positions
        if positions is not None:
            alone, joined = positions[alone], positions[joined]
        indices = call.indices[alone]
        listed: list[int] = indices.tolist()
        segments = self._segments.with_files(listed)
        if segments is None:
            return positions
        if not self._order.admit_reads(layer, indices):
            return positions
        contents = self._contents
        spans = BlockSpans(
            [segment.file for segment in segments if segment.file is not None],
            layout.offsets(layer, listed),
            call.addresses[alone].tolist(),
            block_bytes,
            call.priority,
            self._done,
            compare_spans,
            call.deadline,
            call.owner,
            call.checksums is None,
            layer=layer,
            indices=listed,
            positions=alone,
            segments=segments,
            # Of the write that they hold: nobody writes them now.
            generations=contents.written[layer][indices],
            seeds=contents.seeds[layer][indices].tolist(),
            crcs=contents.checksums[layer][indices].tolist(),
            notify=call.on_done,
            checksums=call.checksums,
            run_done=run_done,
        )
        for segment in segments:
            segment.users += 1
        self._counters.in_flight += len(listed)
        try:
            self._io.submit_spans(spans)
        except HsswapError as error:  # the backend was closed by somebody else
            runs = [spans.single(number) for number in range(len(listed))]
            asyncio.get_running_loop().call_soon(self._on_refused, runs, error)
        return joined

    def _done(self, spans: BlockSpans, numbers: list[int], error: HsswapError | None) -> None:
        """Blocks came back from the backend. What follows is done for all that came in one go."""
        if error is None and not spans.bad:
            self._good.append((spans, numbers))
            return
        for number in numbers:
            if error is None and number not in spans.bad:
                self._good.append((spans, [number]))
                continue
            run = spans.single(number)
            if error is None:
                run.bad = np.ones(1, np.bool_)
            self._on_failed(run, error)

    def settle(self) -> None:
        """End the blocks that came back as they were written; their reports are put in line."""
        good, self._good = self._good, []
        layers: dict[int, list[int]] = {}
        for spans, numbers in good:
            indices = layers.setdefault(spans.layer, [])
            indices += [spans.indices[number] for number in numbers]
        for layer, indices in layers.items():
            if not self._order.release_reads(layer, indices):
                for spans, numbers in good:
                    if spans.layer == layer:
                        for number in numbers:
                            self._woken.extend(self._order.release(spans.single(number)))
        counters, read = self._counters, Operation.READ
        for spans, numbers in good:
            self._segments.leave([spans.segments[number] for number in numbers])
            counters.calls[read] += len(numbers)
            counters.blocks[read] += len(numbers)
            counters.nbytes[read] += len(numbers) * spans.span_bytes
            self._reports.append((spans.notify, spans.positions[numbers]))
