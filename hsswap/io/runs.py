"""A store's runs: the record that travels through a backend, and who may touch a block when."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hsswap.checksum import crc32, crc32_each
from hsswap.errors import BlockIOError, ClosedError, HsswapError
from hsswap.io.base import BlockChecksums, Operation, Transfer
from hsswap.io.ids import id_of
from hsswap.io.tables import FEW, sparse_zeros
from hsswap.io.views import array_type, block_views

OnBlocksDone = Callable[[NDArray[np.int64], HsswapError | None], None]
"""``on_done(positions, error)`` of a read or a write."""

Report = tuple[OnBlocksDone, NDArray[np.int64]]
"""Blocks that succeeded, and whom to tell."""

RunDone = Callable[["BlockRun", HsswapError | None], None]
"""``run_done(run, error)``."""


_ONE = np.int32(1)  # of the array's own kind: ufunc.at takes twice the time with another
_NO_LENGTHS = np.empty(0, np.uint16)


def _no_lengths() -> NDArray[np.uint16]:
    return _NO_LENGTHS


@dataclass(eq=False, slots=True, kw_only=True)
class BlockRun(Transfer):
    """Neighbouring blocks of one layer and segment, read or written together.

    ``positions``: where its blocks stand in the call's arrays. ``first``: index of the first block.
    ``generations``, ``seeds``, ``crcs``: of each block. A read takes seeds and the checksums to
    expect from what was written, once it holds its blocks; the checksums of a write are filled in
    on the way (lists, because most runs are so short that an array costs more than it saves).
    ``bad``: blocks of a read whose checksum is another, None without any. ``waited``: whether other
    runs had to end first. ``lengths`` (of each block) and ``codes_version``: what a write says of
    its blocks. ``ticket``: the number of a write in the order they began.
    """

    layer: int
    first: int
    positions: NDArray[np.int64]
    generations: NDArray[np.int64]
    seeds: list[int]
    notify: OnBlocksDone
    crcs: list[int] = field(default_factory=list)
    bad: NDArray[np.bool_] | None = None
    waited: bool = False
    lengths: NDArray[np.uint16] = field(default_factory=_no_lengths)
    codes_version: int = 0
    ticket: int = 0

    @property
    def count(self) -> int:
        """Blocks."""
        return len(self.positions)

    @property
    def blocks(self) -> slice:
        """The blocks' indices."""
        return slice(self.first, self.first + len(self.positions))

    def block_name(self, number: int) -> str:
        """The n-th block in words, for messages."""
        block_id = id_of(self.first + number, int(self.generations[number]))
        return f"layer {self.layer}, block id {block_id}"

    def single(self, number: int) -> BlockRun:
        """The n-th block as a run of its own."""
        part = slice(number, number + 1)
        return BlockRun(
            self.operation,
            self.file,
            self.offset + number * self.span_bytes,
            self.addresses[part],
            self.span_bytes,
            self.priority,
            self.on_done,
            self.prepare,
            self.verify,
            self.deadline,
            self.owner,
            self.quick,
            layer=self.layer,
            first=self.first + number,
            positions=self.positions[part],
            generations=self.generations[part],
            seeds=self.seeds[part],
            notify=self.notify,
            crcs=self.crcs[part],
            waited=self.waited,
            lengths=self.lengths[part],
            codes_version=self.codes_version,
            ticket=self.ticket,
        )


def fill_checksums(run: BlockRun) -> None:
    """The prepare hook: checksums of what is about to be written."""
    run.crcs = list(crc32_each(block_views(run.addresses, run.span_bytes), run.seeds))


def compare_checksums(run: BlockRun) -> None:
    """The verify hook: find the blocks that came back as others than were written."""
    seeds = run.seeds
    if len(seeds) == 1:  # a quarter of the cost; random reads are full of them
        view = array_type(run.span_bytes).from_address(run.addresses.item())
        if crc32(view, seeds[0]) != run.crcs[0]:
            run.bad = np.ones(1, np.bool_)
        return
    found = list(crc32_each(block_views(run.addresses, run.span_bytes), seeds))
    if found != run.crcs:
        run.bad = np.array(found) != np.array(run.crcs)


def fill_by(checksums: BlockChecksums, run: BlockRun) -> None:
    """:func:`fill_checksums` of memory that the processor cannot read."""
    run.crcs = _checksums_by(checksums, run)


def compare_by(checksums: BlockChecksums, run: BlockRun) -> None:
    """:func:`compare_checksums` of memory that the processor cannot read."""
    found = _checksums_by(checksums, run)
    if found != run.crcs:
        run.bad = np.array(found) != np.array(run.crcs)


def _checksums_by(checksums: BlockChecksums, run: BlockRun) -> list[int]:
    seeds = np.array(run.seeds, np.uint32)
    found: list[int] = checksums(run.addresses, run.span_bytes, seeds).tolist()
    return found


def indices_of(runs: list[BlockRun]) -> NDArray[np.int64]:
    """The indices of the blocks of many runs, run by run."""
    firsts = [run.first for run in runs]
    counts = [len(run.positions) for run in runs]
    total = sum(counts)
    if total == len(runs):
        return np.array(firsts)
    before = np.add.accumulate([0, *counts[:-1]])
    return np.repeat(np.array(firsts) - before, counts) + np.arange(total)


def error_of_block(error: HsswapError, run: BlockRun, number: int) -> HsswapError:
    """The same error, with the block's name; the original is its cause."""
    message = f"{run.block_name(number)}: {error}"
    named: HsswapError
    if isinstance(error, BlockIOError):
        named = type(error)(message, errno=error.errno)
    elif isinstance(error, ClosedError):
        named = ClosedError(message)
    else:
        named = BlockIOError(message)
    named.__cause__ = error
    return named


class BlockOrder:
    """Lets many readers or one writer at a block, in the order they asked. Pure state.

    A write waits for everything in flight on its blocks, a read for writes; whoever comes behind a
    run that waits for the same block waits too. So a reader sees a block as it was before a write
    or after it, and writes land in the order of the calls.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        # Of each block: reads in flight, or -1 for a write; and runs that wait for it.
        self._holders = sparse_zeros((layers, capacity), np.int32)
        # The same, for few blocks: 0.1 us each, where ufunc.at takes 1 us, and 16 after a sleep.
        self._held = [memoryview(row) for row in self._holders]
        self._waiters = sparse_zeros((layers, capacity), np.int32)
        self._waiting: list[BlockRun] = []

    def unsettled(self, layer: int, indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which blocks are being written, or have runs waiting: their content may change."""
        writing: NDArray[np.bool_] = self._holders[layer, indices] < 0
        writing |= self._waiters[layer, indices] > 0
        return writing

    def admit(self, run: BlockRun) -> bool:
        """Whether the run may start now; then it holds its blocks until :meth:`release`."""
        holders = self._holders[run.layer, run.blocks]
        writing = run.operation is Operation.WRITE
        blocked = holders.any() if writing else holders.min() < 0
        if self._waiting and not blocked:
            blocked = self._waiters[run.layer, run.blocks].any()
        if blocked:
            run.waited = True
            self._waiters[run.layer, run.blocks] += 1
            self._waiting.append(run)
            return False
        holders += -1 if writing else 1
        return True

    def admit_reads(self, layer: int, indices: NDArray[np.int64]) -> bool:
        """:meth:`admit` for all reads of a call at once. False: some must wait; admit each."""
        if self._waiting:
            return False
        if len(indices) > FEW:
            holders = self._holders[layer]
            if np.minimum.reduce(holders[indices]) < 0:
                return False
            np.add.at(holders, indices, _ONE)
            return True
        held, listed = self._held[layer], indices.tolist()
        if min([held[index] for index in listed]) < 0:
            return False
        for index in listed:
            held[index] += 1
        return True

    def admit_writes(self, layer: int, indices: NDArray[np.int64]) -> bool:
        """:meth:`admit` for all writes of a call at once. False: some must wait; admit each."""
        holders = self._holders[layer]
        if self._waiting or np.logical_or.reduce(holders[indices]):
            return False
        np.subtract.at(holders, indices, _ONE)
        if np.minimum.reduce(holders[indices]) < -1:  # a block is given twice
            holders[indices] = 0
            return False
        return True

    def release_reads(self, layer: int, indices: list[int]) -> bool:
        """:meth:`release` of reads of single blocks. False: somebody waits; release each."""
        if self._waiting:
            return False
        held = self._held[layer]
        for index in indices:
            held[index] -= 1
        return True

    def release_many(self, operation: Operation, runs: list[BlockRun]) -> bool:
        """:meth:`release` of many runs of a layer at once. False: somebody waits; release each."""
        if self._waiting:
            return False
        layer = runs[0].layer
        if operation is Operation.WRITE:
            self._holders[layer][indices_of(runs)] = 0
        elif sum([len(run.positions) for run in runs]) > FEW:
            np.subtract.at(self._holders[layer], indices_of(runs), _ONE)
        else:
            held = self._held[layer]
            for run in runs:
                for index in range(run.first, run.first + len(run.positions)):
                    held[index] -= 1
        return True

    def release(self, run: BlockRun) -> list[BlockRun]:
        """Let go of a run's blocks. Returns waiting runs that start now, in their order."""
        self._holders[run.layer, run.blocks] += 1 if run.operation is Operation.WRITE else -1
        if not self._waiting or not self._waiters[run.layer, run.blocks].any():
            return []
        return [waiting for waiting in self.drain() if self.admit(waiting)]

    def drain(self) -> list[BlockRun]:
        """Take out all waiting runs, in their order."""
        waiting, self._waiting = self._waiting, []
        for run in waiting:
            self._waiters[run.layer, run.blocks] -= 1
        return waiting
