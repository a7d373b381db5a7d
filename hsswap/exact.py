"""Exact attention: every block of a sequence, tile by tile through the ring."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hsswap.config import SPAN_TOKENS
from hsswap.driver.base import Buffer, Device, Event, Stream
from hsswap.driver.operations import (
    AttendWork,
    AttentionState,
    FinalizeWork,
    GatherWork,
)
from hsswap.driver.tensor import Tensor
from hsswap.loads import Blocks
from hsswap.pools import GroupPool, RingRegion, state_bytes, state_in
from hsswap.resident_table import ResidentTable
from hsswap.ring import columns, parts_of, place, tables_at, tapered, tile_tokens_for, upload
from hsswap.tiers import I32, I64, SlotState, Tile, joined, tiles_of

if TYPE_CHECKING:
    from hsswap.batch_table import BatchTable
    from hsswap.lessons import Lessons
    from hsswap.repeating import Repeated

NOTHING = np.empty(0, np.intp)
NO_SLOTS = np.empty(0, np.int32)


class Ready(NamedTuple):
    """Ready host slots of what is missing of the next ``tiles`` tiles, in order."""

    slots: I32
    tiles: int = 1


@dataclass(slots=True)
class LayerCache:
    """One layer of one sequence: its length and where its blocks are on the device.

    ``device_slot[b]`` is the block slot that holds logical block b, -1 when none does; who changes
    entries says so (:meth:`changed`). ``active`` is the slot of the block being filled.
    ``residents``: where they are as attention reads it, None for a list of blocks that is used
    once. ``repeated``: the last call of one row, if it may be made again. ``batch``: the table of
    the last batch that began with this sequence. ``lessons``: what top-k learns from exact calls.
    """

    pool: GroupPool
    layer: int
    active: int
    length: int = 0
    device_slot: I32 = field(default_factory=lambda: np.full(64, -1, np.int32))
    residents: ResidentTable | None = None
    repeated: Repeated | None = None
    batch: BatchTable | None = None
    lessons: Lessons | None = None

    def changed(self, block: int) -> None:
        """Entries of ``device_slot`` from this block on may be others now."""
        if self.residents is not None:
            self.residents.changed(block)

    def cut(self, block: int) -> None:
        """Entries from this block on are no more."""
        self.changed(block)
        if self.residents is not None:
            self.residents.cut(block)

    def settled(self, indices: I64) -> ResidentTable | None:
        """The table, which says what is where without that anybody looks at all blocks."""
        if self.residents is not None:
            stop = -(-self.length // self.pool.block_size)
            self.residents.settle(self.device_slot, indices, stop)
        return self.residents

    @property
    def group_layer(self) -> int:
        """The layer's number inside its group."""
        return self.layer - self.pool.first_layer

    def grow(self, blocks: int) -> None:
        """Make room in the table for ``blocks`` blocks."""
        if blocks > len(self.device_slot):
            grown = np.full(max(blocks, 2 * len(self.device_slot)), -1, np.int32)
            grown[: len(self.device_slot)] = self.device_slot
            self.device_slot = grown

    def first_visible(self, rows: int) -> int:
        """The first token that any of the last ``rows`` rows sees."""
        return max(0, self.length - rows + 1 - (self.pool.group.window or self.length))


def blocks_ahead(cache: LayerCache, indices: I64, rows: int, start: int = 0) -> Blocks:
    """What exact attention of this layer must have read from disk, from block ``start`` on."""
    size = cache.pool.block_size
    if (table := cache.settled(indices)) is not None and table.is_whole:
        return Blocks(cache.pool, cache.layer, NOTHING)
    first = max(start, cache.first_visible(rows) // SPAN_TOKENS * (SPAN_TOKENS // size))
    part = slice(first, cache.length // size)
    host_slot = cache.pool.tier.lookup(cache.group_layer, indices[part])
    absent = (host_slot & cache.device_slot[part]) < 0  # -1 in both
    return Blocks(cache.pool, cache.layer, indices[part][absent])


class ExactPass:
    """One attend of one layer: which tiles are next, what they need, and their launches.

    ``queries`` ``[1, rows, Q, dk]``; ``end(state)``: where the output goes, and what else is
    wanted. ``release(event, pool, host_slots)`` is asked to give leases back behind an event.
    """

    def __init__(
        self,
        device: Device,
        stream: Stream,
        cache: LayerCache,
        indices: I64,
        queries: Tensor,
        end: Callable[[AttentionState], FinalizeWork],
        tile_tokens: int,
        release: Callable[[Event, GroupPool, I32], None],
    ) -> None:
        self._device = device
        self._stream = stream
        self._cache = cache
        self._indices = indices
        self._queries = queries
        self._end = end
        self._release = release
        self._read_slots: list[I32] = []
        self._last_reader: Event | None = None
        self._in_place = device.reads_in_place(queries.shape[1])
        self._tables_at = tables_at(cache.pool, queries.shape[1])
        self._lengths = np.array([cache.length], np.int64)
        self._lengths.flags.writeable = False  # so that no launch has to copy them
        span = device.span_tokens(cache.length)
        self.tile_tokens = tile_tokens_for(span, tile_tokens)
        self._span_blocks = span // cache.pool.block_size
        self._table: ResidentTable | None = None
        self._is_resident = False
        # Which are in no device slot, the same for a whole call, and their indices.
        self._missing = self._wanted = NOTHING
        self._tiles = self._make_tiles(cache.first_visible(queries.shape[1]))
        self._start = self._tiles[0].start
        self._state: AttentionState | None = None
        self._scratch: Buffer | None = None
        self.next_tile = 0
        self.device_hits = 0
        self.held_hits = 0
        self.behind: Event | None = None
        """An event behind the last launch, where it needed one."""
        self.whole: AttendWork | None = None
        """The launch that attended everything, if it was one row over a table in device memory."""
        self.unread: I32 | None = None
        """Ready slots of tiles whose launch failed before their readers had an event."""

    @property
    def tile_count(self) -> int:
        """Tiles of the whole pass."""
        return len(self._tiles)

    @property
    def finished(self) -> bool:
        """Whether every tile has been enqueued."""
        return not self.tiles_left

    @property
    def scratch_bytes(self) -> int:
        """Device memory that the pass needs: carried state, and tables of the ring's tiles."""
        group, rows = self._cache.pool.group, self._queries.shape[1]
        if self._in_place or self._is_resident:
            return state_bytes(group, rows)
        return self._tables_at + 4 * group.kv_heads * (self._tiles[-1].stop - self._start)

    def use(self, scratch: Buffer) -> None:
        """Work in this memory, of ``scratch_bytes`` at least, until everything is enqueued."""
        self._scratch = scratch
        self._state = state_in(scratch, self._cache.pool.group, self._queries.shape[1])

    def _make_tiles(self, first_token: int) -> list[Tile]:
        """The tiles, neighbouring ones in one launch as long as what is missing fits a ring region.

        Spans stay the same, and so does every bit; a launch and its hand-overs cost 0.1 ms here.
        """
        cache, size = self._cache, self._cache.pool.block_size
        room = self.tile_tokens // size
        start, stop = first_token // self.tile_tokens * room, -(-cache.length // size)
        table = cache.settled(self._indices)
        if table is not None and self._in_place and self._is_whole(table):
            self._table = table
        if self._table is not None or (table is not None and not table.missing):
            self._is_resident = True
            return [Tile(start, stop)]
        is_missing = cache.device_slot[start:stop] < 0
        self._missing = start + np.flatnonzero(is_missing)
        self._wanted = self._indices[self._missing]
        self._is_resident = not len(self._missing)
        if len(self._missing) <= room:  # in steps that do not grow with the length
            return [Tile(start, stop)]
        return joined(tiles_of(first_token, cache.length, size, self.tile_tokens), is_missing, room)

    def _is_whole(self, table: ResidentTable) -> bool:
        """Whether one launch over the table attends everything: what is in no device slot is held
        in host slots. A window needs few of its blocks, and holds none.
        """
        if table.is_whole:
            return table.has_room()
        return self._cache.pool.group.window is None and table.hold(self._indices)

    def needs(self) -> Blocks:
        """The blocks of the next tile that are not in device slots."""
        return self._blocks_to(self._tiles[self.next_tile].stop)

    def _part(self, start: int, stop: int) -> slice:
        """Which of the missing blocks are these."""
        return slice(*np.searchsorted(self._missing, (start, stop)).tolist())

    def _blocks_to(self, stop: int) -> Blocks:
        part = self._part(self._tiles[self.next_tile].start, stop)
        return Blocks(self._cache.pool, self._cache.layer, self._wanted[part])

    @property
    def tiles_left(self) -> int:
        """Tiles that have not been enqueued."""
        return len(self._tiles) - self.next_tile

    def in_one(self) -> Blocks | None:
        """What all tiles left miss, if they can be attended in one launch."""
        return None if self._is_resident or not self._in_place else self._left()

    def all_on_device(self) -> bool:
        """Whether no tile left needs a host slot."""
        return self._is_resident or not len(self._left().indices)

    def all_in_host_tier(self) -> bool:
        """Whether every tile left can be gathered without reading from disk."""
        return self._is_resident or self._left().loaded() is not None

    def _left(self) -> Blocks:
        return self._blocks_to(self._tiles[-1].stop)

    def lease_next(self, most: int) -> Ready | None:
        """Lease the blocks of the next tiles that the host tier has all of, ``most`` at most; None
        if it has not all of the first. Where host slots are read in place, of all tiles.
        """
        if self._is_resident:
            return Ready(NO_SLOTS)
        tier = self._cache.pool.tier
        tiles = self._tiles[self.next_tile : None if self._in_place else self.next_tile + most]
        part = self._part(tiles[0].start, tiles[-1].stop)
        slots = tier.lookup(self._cache.group_layer, self._wanted[part])
        absent = np.flatnonzero(~tier.loaded(slots))
        count = len(tiles)
        if len(absent):
            count = sum(tile.stop <= self._missing[part.start + absent[0]] for tile in tiles)
            if not count:
                return None
            slots = slots[: np.searchsorted(self._missing[part], tiles[count - 1].stop)]
        tier.lease(slots)
        return Ready(slots, count)

    def enqueue(self, ready: Ready) -> list[Event]:
        """Launch the next tiles, in one where host slots are read in place. Their missing blocks
        are in the leased host slots. Returns events behind launches that needed one.
        """
        first = self._tiles[self.next_tile]
        if self._is_resident:
            self.held_hits = 0 if self._table is None else self._table.missing
            self.device_hits += first.stop - first.start - self.held_hits
            self._attend(first, self._resident_units(first))
            self.behind = self._stream.record()
            if self._table is not None:
                self._table.reader = self.behind
            return [self.behind]
        tiles = self._tiles[self.next_tile : self.next_tile + ready.tiles]
        placed = self._cache.device_slot[first.start : tiles[-1].stop].copy()
        missing = self._missing[self._part(first.start, tiles[-1].stop)] - first.start
        self.device_hits += len(placed) - len(missing)
        self.unread = ready.slots
        if self._in_place or not len(missing):
            first = Tile(first.start, tiles[-1].stop)
            self._tiles[self.next_tile : self.next_tile + len(tiles)] = [first]
            return self._attend_in_place(first, placed, missing, ready.slots)
        return self._attend_through_ring(tiles, placed, missing, ready.slots)

    def give_back(self) -> None:
        """Give the leases of what is enqueued back, behind the last reader: all are of one stream.

        Once for many tiles: each time costs the GPU a callback and this process a wake-up of a
        thread, which takes the interpreter from the launches.
        """
        slots, self._read_slots = self._read_slots, []
        if slots:
            assert self._last_reader is not None
            self._release(self._last_reader, self._cache.pool, np.concatenate(slots))

    def _read(self, event: Event, slots: I32) -> None:
        self._last_reader = event
        self._read_slots.append(slots)

    def _resident_units(self, tile: Tile) -> I32 | Tensor:
        """Entries of a tile of which every block is in a device slot, or held."""
        units = None if self._table is None else self._table.units(tile.start, tile.stop)
        if units is None:  # for many rows arrays are as good
            slots = self._cache.device_slot[tile.start : tile.stop]
            return self._cache.pool.slots.table(slots)
        return units

    def _attend_in_place(
        self, tile: Tile, placed: I32, missing: NDArray[np.intp], host_slots: I32
    ) -> list[Event]:
        """One tile whose missing blocks are read in their host slots."""
        self._attend(tile, self._cache.pool.slots.mixed_table(placed, missing, host_slots))
        self.behind = self._stream.record() if len(missing) else None
        self.unread = None
        if self.behind is None:
            return []
        self._read(self.behind, host_slots)
        return [self.behind]

    def _attend_through_ring(
        self, tiles: list[Tile], placed: I32, missing: NDArray[np.intp], host_slots: I32
    ) -> list[Event]:
        """Tiles through the ring; ``placed``: device slots of their blocks, -1 where missing."""
        pool, copies, start = self._cache.pool, self._cache.pool.copies, tiles[0].start
        assert copies is not None  # a device that does not read so many rows in place
        stop, tiles = self.next_tile + len(tiles), tapered(tiles, self._span_blocks)
        self._tiles[self.next_tile : stop] = tiles
        parts = parts_of(tiles, missing)
        place(pool, placed, missing, parts)
        assert self._scratch is not None
        at = self._tables_at + 4 * pool.group.kv_heads * (start - self._start)
        table = upload(self._device, self._stream, pool, placed, self._scratch, at)
        if (pool.tier.state[host_slots] == SlotState.DIRTY).any():
            # Perhaps being filled by an append that this stream has yet to run.
            copies.wait_for(self._stream.record())
        events: list[Event] = []
        for tile, part in zip(tiles, parts, strict=True):
            region = None
            if part.start < part.stop:
                region = self._gather(copies, host_slots[part])
                self.unread = host_slots[part.stop :]
            self._attend(tile, columns(table, tile.start - start, tile.stop - start))
            self.behind = None
            if region is not None:
                self.behind = region.last_read = self._stream.record()
                events.append(self.behind)
        self.unread = None
        return events

    def _gather(self, copies: Stream, host_slots: I32) -> RingRegion:
        """Bring a tile's missing blocks into the ring, in order; the stream waits for them.

        The copies wait for the ring's last reader, not for what the caller has enqueued before: so
        they run beside it.
        """
        pool = self._cache.pool
        region = pool.next_region(copies)
        to = region.slots[: len(host_slots)]
        self._device.gather(copies, GatherWork(pool.blocks, pool.units, host_slots, None, to))
        gathered = copies.record()
        region.last_read = gathered  # should the attend that follows be refused
        self._read(gathered, host_slots)
        self._stream.wait_for(gathered)
        return region

    def _attend(self, tile: Tile, units: I32 | Tensor) -> None:
        pool, state = self._cache.pool, self._state
        assert state is not None
        is_last = self.next_tile == len(self._tiles) - 1
        in_ring = isinstance(units, Tensor) and self._table is None
        work = AttendWork(
            queries=self._queries,
            lengths=self._lengths,
            units=pool.units,
            slots=units,
            first_block=tile.start,
            positions=None,
            span_blocks=self._span_blocks,
            state=state,
            begin=self.next_tile == 0,
            blocks=None if in_ring else pool.blocks,
            end=self._end(state) if is_last else None,
            is_full=in_ring,
        )
        self._device.attend(self._stream, work)
        self.next_tile += 1
        if self._table is not None and not tile.start and self._queries.shape[1] == 1:
            self.whole = work
