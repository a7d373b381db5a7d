"""Group commit of a persistent store: data first, then the records that speak of it.

A record on disk that is valid speaks of bytes that are on disk: at every instant, whatever of the
un-synced writes a loss of power takes. Two rules keep that:

1. A record becomes valid only after the bytes it speaks of were synced.
2. Bytes under a valid record are overwritten, or their file removed, only after the record was
   cleared and that was synced. When the block is to have new content under the same id, that is
   stored aside first, and the record names the place (:mod:`hsswap.io.spare`), so that the old
   content or the new one is there at every instant.

The stages of a block, in ``_stage``::

    NONE --write ended--> WRITTEN --commit--> SYNCING --data synced--> DURABLE
     ^                       |                   |                        |
     +------ write begins ---+-------------------+                 write begins, or freed
     |                                                                    v
     +---- record page synced ---- CLEARING <--commit-- CLEAR_WANTED <----+

All of it runs on the loop, except :meth:`Journal.freed`. One cycle runs at a time; what is asked
for meanwhile is done by the next one, together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import ClosedError, HsswapError
from hsswap.forked import awaited
from hsswap.io.base import BlockIO, IOFile
from hsswap.io.contents import Contents
from hsswap.io.ids import BlockIds
from hsswap.io.layout import SEGMENT_IDS
from hsswap.io.pending import PendingKeys, PrefixRecord
from hsswap.io.recordfile import write_pages
from hsswap.io.records import CLEARED, REPLACED, VALID, Records
from hsswap.io.runs import BlockRun
from hsswap.io.segments import Segments
from hsswap.io.spare import Spare
from hsswap.io.tables import sparse_zeros

NONE, WRITTEN, SYNCING, DURABLE, CLEAR_WANTED, CLEARING = range(6)

GENERATION_STEP = 1 << 16
"""Generations that a store sets aside when it is opened, so that an id which a killed process gave
out is not given out again. Of 2**31, so that is good for 32,768 crashes."""

JOURNAL_TRANSFERS = 2
"""In flight at most beside those of blocks: one of records, one to the spare file."""

Resume = Callable[[HsswapError | None], None]
"""Called when records were cleared, or could not be."""


class Journal:
    """The records of one store, and when they are written. ``file``: the record file."""

    def __init__(
        self,
        io: BlockIO,
        file: IOFile,
        records: Records,
        contents: Contents,
        ids: BlockIds,
        segments: Segments,
        spare: Spare,
    ) -> None:
        self.commits = 0
        self.nbytes_written = 0
        self._io = io
        self._file = file
        self._records = records
        self._contents = contents
        self._ids = ids
        self._segments = segments
        self._spare = spare
        self._failed: list[tuple[int, int]] = []  # layer and index
        self._saving: set[asyncio.Task[None]] = set()
        self._ended: asyncio.Future[None] | None = None  # resolved when slots may be free
        self._loop = asyncio.get_running_loop()
        self._stage = sparse_zeros(contents.written.shape, np.uint8)
        self._stage[records.blocks["state"][:, : ids.capacity] == VALID] = DURABLE
        self._serial = int(records.header["serial"][0])
        self._keys = PendingKeys()
        self._freed: deque[NDArray[np.int64]] = deque()  # filled by any thread
        self._waiting: list[Resume] = []
        self._flushes: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def total_written(self) -> int:
        """Bytes written beside the blocks themselves."""
        return self.nbytes_written + self._spare.nbytes_written

    # What others tell it.

    def begin_write(self, run: BlockRun, resume: Resume) -> bool:
        """A write wants to begin. False: it must wait until ``resume`` is called."""
        stage = self._stage[run.layer, run.blocks]
        lasting = stage >= DURABLE
        stage[~lasting] = NONE
        if not lasting.any():
            return True
        recorded = self._records.blocks["generation"][run.layer, run.blocks]
        if ((stage == DURABLE) & (recorded == run.generations)).any():
            task = self._loop.create_task(self._save(run, resume))
            self._saving.add(task)
            task.add_done_callback(self._saving.discard)
        else:
            self._clear(run.layer, run.first + np.flatnonzero(stage == DURABLE))
            self._wait(resume)
        return False

    def overwriting(self, run: BlockRun) -> None:
        """A write that had to wait begins now."""
        self._stage[run.layer, run.blocks] = NONE

    def written(self, run: BlockRun) -> None:
        """A write succeeded."""
        self._stage[run.layer, run.blocks] = WRITTEN
        self._wake()

    def failed(self, run: BlockRun) -> None:
        """A write that began failed: its blocks have no content. What was set aside stays, and is
        there when the store is opened again, as long as its slot is not needed.
        """
        self._failed.extend((run.layer, index) for index in range(run.first, run.first + run.count))
        self._wake()

    def given_up(self, run: BlockRun) -> None:
        """A write that had to wait does not begin: what was there is there still."""
        stage = self._stage[run.layer, run.blocks]
        intact = self._contents.written[run.layer, run.blocks] == run.generations
        stage[(stage == NONE) & intact] = WRITTEN

    def clear_segment(self, number: int, resume: Resume) -> bool:
        """The file of a segment without used ids is to be removed. False: nothing speaks of it;
        else it must stay until ``resume`` is called.
        """
        first = number * SEGMENT_IDS
        stage = self._stage[:, first : first + SEGMENT_IDS]
        stage[stage < DURABLE] = NONE
        if not stage.any():
            return False
        layers, indices = np.nonzero(stage == DURABLE)
        self._clear(layers, first + indices)
        self._wait(resume)
        return True

    def freed(self, indices: NDArray[np.int64]) -> None:
        """Blocks were freed; the next commit clears their records. On any thread."""
        self._freed.append(indices)

    def put_key(self, index: int, record: PrefixRecord) -> None:
        """A block got a prefix key, to be written once the block is durable in every layer."""
        self._keys.put(index, record)

    def drop_key(self, index: int) -> None:
        """A block has no prefix key any more; the next commit writes that down."""
        self._keys.drop(index, self._records)

    def durable(self, layers: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which blocks, by layer and index, have a record on disk of their present content."""
        on_disk: NDArray[np.bool_] = self._stage[layers, indices] == DURABLE
        return on_disk & ~self._records.dirty_blocks(layers, indices)

    async def commit(self) -> None:
        """Make durable what was written so far. Raises the first error; then nothing more than
        before is known to be durable, and the next commit tries again.
        """
        if self._closed:
            raise ClosedError("the store is closed; open it again")
        self._flushes.append(flush := awaited(self._loop.create_future()))
        self._start()
        await flush

    async def close(self) -> None:
        """End what is under way, and refuse more."""
        self._closed = True
        self._wake()
        while self._saving:
            await asyncio.wait(self._saving)
        while self._task is not None:
            await asyncio.wait([self._task])

    # Writing stored blocks again.

    async def _save(self, run: BlockRun, resume: Resume) -> None:
        """Store the new content of a run's stored blocks aside, then clear their records."""
        layer, stage = run.layer, self._stage[run.layer, run.blocks]
        numbers = np.flatnonzero(stage == DURABLE)
        slots: list[int] = []
        try:
            slots = await self._take_slots(len(numbers))
            await self._spare.write(run, numbers.tolist(), slots)
        except HsswapError as error:
            self._give_back(slots)
            resume(error)
            return
        table = self._records.blocks
        for number, slot in zip(numbers.tolist(), slots, strict=True):
            index, row = run.first + number, table[layer, run.first + number]
            same = row["generation"] == run.generations[number]
            if stage[number] != DURABLE or not same:  # another owner's, or freed meanwhile
                self._give_back([slot])
                continue
            row["state"], row["checksum"], row["spare"] = REPLACED, run.crcs[number], slot + 1
            row["length"], row["codes_version"] = run.lengths[number], run.codes_version
            stage[number] = CLEAR_WANTED
            self._spare.name(layer, index, slot)
            self._records.touch_blocks(np.array([layer]), np.array([index]))
        self._clear(layer, run.first + np.flatnonzero(stage == DURABLE))
        self._wait(resume)

    async def _take_slots(self, count: int) -> list[int]:
        """Wait for slots: commits free those whose blocks have been written in their place."""
        while (slots := self._spare.take(count)) is None:
            if self._closed:
                raise ClosedError("the store is closed; open it again")
            ended = self._ended = self._ended or self._loop.create_future()
            await self.commit()
            if (slots := self._spare.take(count)) is not None:
                break
            if self._failed:
                self._give_failed_up()
            else:
                await ended
        return slots

    def _give_failed_up(self) -> None:
        """Free slots, with the next commit, of blocks whose write failed."""
        failed, self._failed = np.array(self._failed), []
        layers, indices = failed[:, 0], failed[:, 1]
        again = self._stage[layers, indices] == NONE
        replaced = self._records.blocks["state"][layers, indices] == REPLACED
        layers, indices = layers[again & replaced], indices[again & replaced]
        self._records.blocks["state"][layers, indices] = CLEARED
        self._records.touch_blocks(layers, indices)

    def _give_back(self, slots: list[int]) -> None:
        self._spare.give_back(slots)
        self._wake()

    def _wake(self) -> None:
        """Let those look again that wait for slots."""
        ended, self._ended = self._ended, None
        if ended is not None and not ended.done():
            ended.set_result(None)

    # Cycles.

    def _wait(self, resume: Resume) -> None:
        if self._closed:
            self._loop.call_soon(resume, ClosedError("the store is closed; open it again"))
            return
        self._waiting.append(resume)
        self._start()

    def _start(self) -> None:
        if self._task is None:
            self._task = self._loop.create_task(self._work())

    async def _work(self) -> None:
        try:
            while self._flushes or self._waiting:
                flushes, self._flushes = self._flushes, []
                error = await self._cycle(with_data=bool(flushes))
                for flush in flushes:
                    if flush.done():  # its caller was cancelled
                        continue
                    if error is None:
                        flush.set_result(None)
                    else:
                        flush.set_exception(error)
        finally:
            self._task = None

    async def _cycle(self, *, with_data: bool) -> HsswapError | None:
        """One commit; without data when only records are to be cleared."""
        self._serial += 1
        error = None
        if with_data:
            self._clear_freed()
            error = await self._sync_data()
            self._keys.fill(self._records, self._ids, self._stage == DURABLE, self._serial)
            self._raise_limit()
        waiting, self._waiting = self._waiting, []
        self._stage[self._stage == CLEAR_WANTED] = CLEARING
        problem = await self._write_records()
        cleared = self._stage == CLEARING
        if problem is not None:
            self._stage[cleared] = CLEAR_WANTED
        elif cleared.any():
            # Intact still, unless a write that waited begins now: then it is recorded again.
            layers, indices = np.nonzero(cleared)
            intact = self._contents.written[layers, indices] == self._ids.generations(indices)
            self._stage[layers, indices] = np.where(intact, WRITTEN, NONE)
        for resume in waiting:
            resume(problem)
        return error or problem

    async def _sync_data(self) -> HsswapError | None:
        """Sync what was written, and make its records valid in memory."""
        stage = self._stage
        layers, indices = np.nonzero(stage == WRITTEN)
        alive = self._contents.written[layers, indices] == self._ids.generations(indices)
        stage[layers, indices] = np.where(alive, SYNCING, NONE)
        numbers = np.unique(np.nonzero(stage == SYNCING)[1] // SEGMENT_IDS).tolist()
        files = [self._segments.hold(number) for number in numbers]  # before anything can go
        syncs = [self._sync_segment(n, file) for n, file in zip(numbers, files, strict=True)]
        errors = await asyncio.gather(*syncs)
        first_error = None
        for number, error in zip(numbers, errors, strict=True):
            if error is not None:
                first_error = first_error or error
                part = stage[:, number * SEGMENT_IDS : (number + 1) * SEGMENT_IDS]
                part[part == SYNCING] = WRITTEN
        # Blocks that began to be written again meanwhile are not SYNCING any more.
        layers, indices = np.nonzero(stage == SYNCING)
        contents, table = self._contents, self._records.blocks
        rows = np.zeros(len(layers), table.dtype)
        rows["state"] = VALID
        rows["generation"] = contents.written[layers, indices]
        rows["checksum"] = contents.checksums[layers, indices]
        rows["length"] = contents.lengths[layers, indices]
        rows["codes_version"] = contents.codes_versions[layers, indices]
        rows["serial"] = self._serial
        table[layers, indices] = rows
        stage[layers, indices] = DURABLE
        self._records.touch_blocks(layers, indices)
        return first_error

    async def _sync_segment(self, number: int, file: IOFile | None) -> HsswapError | None:
        try:
            assert file is not None, "there is a file where something was written"
            await self._io.sync(file)
        except HsswapError as error:
            return error
        finally:
            self._segments.let_go(number)
        return None

    async def _write_records(self) -> HsswapError | None:
        pages = np.flatnonzero(self._records.dirty)
        if len(pages) == 0:
            return None
        self._records.dirty[pages] = False
        self._records.in_flight[pages] = True
        try:
            self.nbytes_written += await write_pages(self._io, self._file, self._records, pages)
            await self._io.sync(self._file)
        except HsswapError as error:
            self._records.dirty[pages] = True  # what reached the disk is not known
            return error
        finally:
            self._records.in_flight[pages] = False
        self.commits += 1
        self._spare.free_unnamed(self._records)
        self._wake()
        return None

    # What goes into the records.

    def _clear(self, layers: NDArray[np.int64] | int, indices: NDArray[np.int64]) -> None:
        """Clear records that are valid on disk, or may be."""
        where = np.broadcast_to(np.asarray(layers, np.int64), indices.shape)
        self._records.blocks["state"][where, indices] = CLEARED
        self._records.touch_blocks(where, indices)
        self._stage[where, indices] = CLEAR_WANTED

    def _clear_freed(self) -> None:
        while self._freed:
            indices = self._freed.popleft()
            generations = self._ids.generations(indices)
            rows = self._records.ids[indices]
            old = (rows["state"] == VALID) & (rows["generation"] != generations)
            self._records.ids["state"][indices[old]] = CLEARED
            self._records.touch_ids(indices[old])
            recorded = self._records.blocks["generation"][:, indices] != generations
            layers, places = np.nonzero(recorded & (self._stage[:, indices] == DURABLE))
            self._clear(layers, indices[places])
            replaced = recorded & (self._records.blocks["state"][:, indices] == REPLACED)
            layers, places = np.nonzero(replaced)
            self._records.blocks["state"][layers, indices[places]] = CLEARED
            self._records.touch_blocks(layers, indices[places])

    def _raise_limit(self) -> None:
        """Set more generations aside long before they are used up."""
        header = self._records.header
        header["serial"] = self._serial
        last = self._ids.last_generation
        if last + GENERATION_STEP // 2 > int(header["generation_limit"][0]):
            header["generation_limit"] = last + GENERATION_STEP
            self._records.touch_header()
