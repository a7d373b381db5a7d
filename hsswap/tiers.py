"""Who holds which slot: pure state, no I/O, no device calls, no waiting.

Methods move the state and return what is to be read, written or given up; the prefetcher and the
swap do it. All of it is guarded by the swap's one lock. Host slots go through these states::

    FREE --take--> READING --finish_read--> CLEAN --release/evict--> FREE
    FREE --take--> DIRTY --start_write--> WRITING --finish_write--> CLEAN
                     ^----------- (failed) ----------'

A *lease* keeps a slot from being given up while work in flight uses it. A *pinned* lease is held
for longer: nobody waits for it to come back. One that a sequence *holds* over its steps comes back
when somebody asks. A slot read *ahead* waits for its first use; a *cached* one stays after use.
Exact mode is a cyclic scan, for which keeping a fixed part is optimal and recency is the worst
choice, so a scan never pushes out what is cached.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import OutOfSlots

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]


class SlotState(IntEnum):
    """What a host slot is doing."""

    FREE = 0
    READING = 1
    CLEAN = 2
    DIRTY = 3
    WRITING = 4


# As plain integers: a member of an enum costs a conversion in every NumPy call.
FREE, READING, CLEAN, DIRTY, WRITING = map(int, SlotState)


class HostTier:
    """Host slots of one layer group, and the table (layer, block index) -> slot.

    ``window``: slots kept out of the cache so that a scan always has buffers to stream through.
    """

    def __init__(self, layers: int, ids: int, slots: int, *, window: int) -> None:
        self.slot_of = np.full((layers, ids), -1, np.int32)
        # Rows, because one index is looked up 5 times as fast as a pair. Not by ndarray.take: it
        # lets go of the GIL, and to get it back among busy threads takes 30 us.
        self._rows = list(self.slot_of)
        self.state = np.zeros(slots, np.int8)
        self.leases = np.zeros(slots, np.int32)
        self.pinned = np.zeros(slots, np.int32)
        self.layer_of = np.full(slots, -1, np.int32)
        self.index_of = np.full(slots, -1, np.int64)
        self.evictions = 0
        self._ahead = np.zeros(slots, np.bool_)
        self._cached = np.zeros(slots, np.bool_)
        self._stamp = np.zeros(slots, np.int64)
        self._free = np.arange(slots - 1, -1, -1, dtype=np.int32)
        self._free_count = slots
        self._cached_in_layer = np.zeros(layers, np.int64)
        self._quota = max(0, slots - window) // layers
        self._clock = 0

    @property
    def quota(self) -> int:
        """Slots that a layer may keep for scans to come."""
        return self._quota

    @property
    def slot_count(self) -> int:
        """All host slots of the group."""
        return len(self.state)

    @property
    def free_count(self) -> int:
        """Slots that hold nothing."""
        return self._free_count

    def lookup(self, layer: int, indices: I64) -> I32:
        """The slot of each block, -1 where the tier does not hold it."""
        return self._rows[layer][indices]

    def loaded(self, slots: I32) -> NDArray[np.bool_]:
        """Which of the slots that :meth:`lookup` gave hold their bytes already."""
        there: NDArray[np.bool_] = (slots >= 0) & (self.state[slots] != READING)
        return there

    def is_loaded(self, slots: I32) -> bool:
        """Whether every slot's bytes are there (none is still being read)."""
        return READING not in self.state[slots].tobytes()

    def lease(self, slots: I32) -> None:
        """Keep distinct slots until :meth:`release`; reading ahead has paid off for them."""
        places = slots.astype(np.intp)  # once: NumPy makes these of indices at every use
        self.leases[places] += 1
        self._ahead[places] = False
        self._clock += 1
        self._stamp[places] = self._clock

    def release(self, slots: I32, *, scan: bool) -> None:
        """Give leases back. Slots nobody else uses stay cached or become free.

        ``scan``: the blocks were part of a scan over all of a sequence; they stay only within the
        layer's quota. Otherwise they stay until something else needs the room.
        """
        places = slots.astype(np.intp)  # once, as in lease()
        self.leases[places] -= 1
        self._settle(places, scan=scan)

    def hold(self, group_layer: int, slots: I32) -> bool:
        """Lease distinct slots of a layer until somebody needs the room, and keep them cached; not
        beyond the layer's quota.
        """
        new = slots[~self._cached[slots]]
        if self._cached_in_layer[group_layer] + len(new) > self._quota:
            return False
        self._keep(new)
        self.lease(slots)
        return True

    def pin(self, slots: I32) -> None:
        """Say of leases on distinct slots that they are held until :meth:`unpin`."""
        self.pinned[slots] += 1

    def unpin(self, slots: I32) -> None:
        """They are leases like others again, to be released."""
        self.pinned[slots] -= 1

    @property
    def pinned_count(self) -> int:
        """Slots with a lease that is pinned."""
        return int(np.count_nonzero(self.pinned))

    def admit(self, layer: int, indices: I64) -> tuple[I32, NDArray[np.bool_]] | None:
        """Lease slots for distinct blocks that are needed now, all or none.

        Returns the slots and which of them are new and must be read, or None when there is no room:
        then nothing is held, so that waiting callers cannot starve each other by halves.
        """
        slots = self._rows[layer][indices]
        absent = slots < 0
        if absent.any():
            present = slots[~absent]  # these must not make room for the absent ones
            if not self._make_room(int(absent.sum()), present):
                return None
            slots[absent] = self._fill(layer, indices[absent], READING, ahead=False)
        self.lease(slots)
        return slots, absent

    def take(
        self,
        layer: int,
        indices: I64,
        state: int,
        *,
        needed: bool,
        spare: I32 | None = None,
    ) -> I32 | None:
        """Slots for distinct blocks the tier does not hold, all or none.

        What is ``needed`` now may push out blocks read ahead (the latest first) and, while no lease
        is held that will give room back soon, cached ones (least recently used first). Reading
        ahead takes free slots only. Slots of ``spare`` make no room.
        """
        if needed:
            if not self._make_room(len(indices), indices[:0] if spare is None else spare):
                return None
        elif len(indices) > self._free_count:
            return None
        return self._fill(layer, indices, state, ahead=not needed)

    def finish_read(self, slots: I32, *, ok: bool) -> None:
        """The bytes are there, or did not come and the slots are free again."""
        self.state[slots] = CLEAN
        idle = slots[self.leases[slots] == 0]
        if len(idle):
            self._ahead[idle] = True  # nobody waits for them (any more)
        if not ok:
            self.leases[slots] = 0  # who waited for them is told, and must not release them
            self._drop(slots)

    def discard(self, slots: I32) -> None:
        """Free taken slots that were never filled."""
        self._drop(slots)

    def refill(self, slots: I32) -> None:
        """Slots that hold blocks, unleased, are about to be filled anew: they are DIRTY."""
        cached = slots[self._cached[slots]]
        np.subtract.at(self._cached_in_layer, self.layer_of[cached], 1)
        self._cached[cached] = False
        self._ahead[slots] = False
        self.state[slots] = DIRTY

    def start_write(self, slots: I32) -> None:
        """DIRTY slots are on their way to disk; they are kept until :meth:`finish_write`."""
        self.state[slots] = WRITING

    def finish_write(self, slots: I32, *, ok: bool, scan: bool, keep: bool) -> None:
        """The blocks are on disk (``ok``), or stay dirty. ``keep`` false: nobody needs the copy."""
        self.state[slots] = CLEAN if ok else DIRTY
        if not keep:
            self._drop(slots[self._idle(slots)])
            slots = slots[self.state[slots] == CLEAN]
        self._settle(slots, scan=scan)

    def forget(self, indices: I64) -> None:
        """Drop blocks whose ids were freed, in all layers. None may be read, written or leased."""
        slots = self.slot_of[:, indices].ravel()
        self._drop(slots[slots >= 0])

    def _idle(self, slots: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which slots hold a clean block that nobody leases."""
        idle: NDArray[np.bool_] = (self.state[slots] == CLEAN) & (self.leases[slots] == 0)
        return idle

    def _settle(self, slots: NDArray[np.integer], *, scan: bool) -> None:
        idle = slots[self._idle(slots) & ~self._cached[slots]]
        if not len(idle):
            return
        if not scan:
            self._keep(idle)
            return
        layer = self.layer_of[idle[0]]
        room = max(0, int(self._quota - self._cached_in_layer[layer]))
        self._keep(idle[:room])
        self._drop(idle[room:])

    def _keep(self, slots: NDArray[np.integer]) -> None:
        self._cached[slots] = True
        self._ahead[slots] = False
        np.add.at(self._cached_in_layer, self.layer_of[slots], 1)

    def _drop(self, slots: NDArray[np.integer]) -> None:
        count = len(slots)
        if not count:
            return
        cached = slots[self._cached[slots]]
        if len(cached):
            np.subtract.at(self._cached_in_layer, self.layer_of[cached], 1)
            self._cached[cached] = False
        layer, index = self.layer_of[slots], self.index_of[slots]
        if (layer == layer[0]).all():
            self._rows[layer[0]][index] = -1
        else:
            self.slot_of[layer, index] = -1
        self.state[slots] = FREE
        self.layer_of[slots] = -1
        self._ahead[slots] = False
        self._free[self._free_count : self._free_count + count] = slots
        self._free_count += count

    def _fill(self, layer: int, indices: I64, state: int, *, ahead: bool) -> I32:
        """Free slots, as many as there are indices, given to these blocks."""
        count = len(indices)
        self._free_count -= count
        slots = self._free[self._free_count : self._free_count + count][::-1].copy()
        self.state[slots] = state
        self.layer_of[slots] = layer
        self.index_of[slots] = indices
        self._rows[layer][indices] = slots
        self._ahead[slots] = ahead
        self._clock += 1
        self._stamp[slots] = self._clock
        return slots

    def _make_room(self, count: int, spare: NDArray[np.integer]) -> bool:
        """Have ``count`` slots free, pushing out others but those of ``spare``; False: not now."""
        short = count - self._free_count
        if short <= 0:
            return True
        candidates = (self.state == CLEAN) & (self.leases == 0)
        candidates[spare] = False
        if (self.leases > self.pinned).any():
            candidates &= self._ahead
        idle = np.flatnonzero(candidates).astype(np.int32)
        if len(idle) < short:
            return False
        ahead, stamp = self._ahead[idle], self._stamp[idle]
        order = np.lexsort((np.where(ahead, -stamp, stamp), ~ahead))
        self._drop(idle[order[:short]])
        self.evictions += short
        return True

    def check(self) -> None:
        """Assert what must always hold; for tests."""
        held = np.flatnonzero(self.state != FREE)
        table = self.slot_of[self.layer_of[held], self.index_of[held]]
        assert (table == held).all()
        assert (self.slot_of >= 0).sum() == len(held)
        assert self._free_count == len(self.state) - len(held)
        assert len(set(self._free[: self._free_count].tolist())) == self._free_count
        assert (self.leases >= 0).all()
        assert (self.leases[self.state == FREE] == 0).all()
        assert (self.pinned <= self.leases).all()
        assert self._cached_in_layer.sum() == self._cached.sum()


class DeviceSlots:
    """Block-sized device slots of one layer group: given out, taken back, nothing more.

    Block slot j is the units ``j * kv_heads ... j * kv_heads + kv_heads - 1`` of the pool. The
    ring of tiles is set aside first.
    """

    def __init__(self, slots: int, ring_slots: int, kv_heads: int) -> None:
        self.ring = np.arange(ring_slots, dtype=np.int32)
        self._heads = np.arange(kv_heads, dtype=np.int32)
        self._free = list(range(slots - 1, ring_slots - 1, -1))
        self._slots = slots

    @property
    def free_count(self) -> int:
        """Slots not given out, the ring left aside."""
        return len(self._free)

    @property
    def used_count(self) -> int:
        """Slots given out, the ring included."""
        return self._slots - len(self._free)

    def take(self, count: int, purpose: str) -> I32:
        """``count`` slots, all or none. Raises OutOfSlots naming ``purpose`` and the number."""
        if count > len(self._free):
            raise OutOfSlots(
                f"{purpose} needs {count} device slots and {len(self._free)} are free; raise "
                f"device_slots by at least {count - len(self._free)}, or close a sequence"
            )
        return np.array([self._free.pop() for _ in range(count)], np.int32)

    def give_back(self, slots: I32) -> None:
        """Return slots that no enqueued work reads any more."""
        self._free.extend(slots.tolist())

    def table(self, slots: I32) -> I32:
        """The same as ``[1, kv_heads, n]``, not to be changed: nobody has to copy it."""
        heads = np.int32(len(self._heads))
        table = slots[None, None, :] * heads + self._heads[None, :, None]
        table.flags.writeable = False
        return table

    def mixed_table(self, slots: I32, in_host: NDArray[np.intp], host_slots: I32) -> I32:
        """The same with the blocks at ``in_host`` in these host slots.

        Those count down from -2 (operations.host_unit), also from one head of a block to the next.
        """
        count = np.int32(len(self._heads))
        first, step = slots * count, np.ones(len(slots), np.int32)
        first[in_host], step[in_host] = np.int32(-2) - host_slots * count, -1
        table = first + step * self._heads[None, :, None]
        table.flags.writeable = False
        return table

    def units(self, slots: I32) -> I32:
        """Unit slots ``[kv_heads, n]`` of block slots ``[n]``."""
        return slots[None, :] * np.int32(len(self._heads)) + self._heads[:, None]


@dataclass(frozen=True, slots=True)
class Tile:
    """Blocks ``start`` to ``stop`` (exclusive) of a sequence, start at a fixed boundary."""

    start: int
    stop: int


def tiles_of(first_token: int, length: int, block_size: int, tile_tokens: int) -> list[Tile]:
    """The tiles that hold tokens ``first_token`` to ``length`` (exclusive), in order.

    Boundaries are multiples of ``tile_tokens`` whatever the length, so that what is read ahead for
    the next step is what that step asks for.
    """
    tile_blocks = tile_tokens // block_size
    blocks = -(-length // block_size)
    start = first_token // tile_tokens * tile_blocks
    return [Tile(at, min(at + tile_blocks, blocks)) for at in range(start, blocks, tile_blocks)]


def joined(tiles: list[Tile], is_missing: NDArray[np.bool_], room: int) -> list[Tile]:
    """Neighbouring tiles made one as long as at most ``room`` of its blocks are missing.
    ``is_missing``: of each block from the first tile's start on.
    """
    starts = [tile.start - tiles[0].start for tile in tiles]
    counts = np.add.reduceat(is_missing, starts, dtype=np.intp).tolist()
    merged: list[Tile] = []
    missing = 0  # of the last one
    for tile, more in zip(tiles, counts, strict=True):
        if merged and missing + more <= room:
            merged[-1] = Tile(merged[-1].start, tile.stop)
            missing += more
        else:
            merged.append(tile)
            missing = more
    return merged
