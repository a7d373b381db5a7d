"""Where a layer's blocks lie, as a table that attention reads and that is never built again.

A sequence's table of units would cost time in its length at every step. Here only entries of blocks
that changed are written: what a step appends. The table lies in memory that the device reaches, and
launches of earlier steps may still read it; so an entry they read is never changed in place: then
the table moves.

::

    blocks   | 0 ...             settled | ...            stop |
    entries  | as the device's tables say | written at settle() |

Blocks that are in no device slot can be attended in their host slots. To lease these at every step
would cost time in their number too, so the table *holds* them: it keeps one lease of each as long
as nobody asks them back for want of room.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable

import numpy as np

from hsswap.driver.base import Buffer, Device, Event
from hsswap.driver.operations import host_unit
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.errors import DeviceError
from hsswap.tiers import I32, I64, HostTier

LEAST_BLOCKS = 64
"""Blocks of the smallest table; they double."""


class TableMemory:
    """Room for the tables of one layer group: twice as many blocks' entries as there are slots.

    Host memory that the device reads where it is: an entry is read once a launch, beside the 8 KiB
    and more of the unit it names. ``slots``: of both tiers.
    """

    def __init__(self, device: Device, slots: int, kv_heads: int) -> None:
        self.heads = kv_heads
        blocks = 2 * max(slots, LEAST_BLOCKS)
        self.memory: Buffer = device.allocate_host(4 * blocks * kv_heads)
        self._free = [(0, blocks)]  # (first, count), by first; none adjoin

    def take(self, blocks: int) -> int | None:
        """Where so many blocks' entries can be; None when there is no such room."""
        for at, (first, count) in enumerate(self._free):
            if count >= blocks:
                self._free[at : at + 1] = [(first + blocks, count - blocks)][: count > blocks]
                return first
        return None

    def give_back(self, first: int, blocks: int) -> None:
        """Nothing reads these entries any more."""
        insort(self._free, (first, blocks))
        merged: list[tuple[int, int]] = []
        for start, count in self._free:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + count)
            else:
                merged.append((start, count))
        self._free = merged

    def entries(self, first: int, blocks: int, *tables: int) -> Tensor:
        """A table ``[H, blocks]`` int32, or so many side by side: ``[*tables, H, blocks]``."""
        offset = 4 * first * self.heads
        shape = (*tables, self.heads, blocks)
        return tensor_in(self.memory, "i32", shape, offset_bytes=offset)


class Holders:
    """The tables of one layer group that hold host slots, so that they can be asked back."""

    def __init__(self) -> None:
        self.tables: set[ResidentTable] = set()
        self.asked = 0
        """How often room was short."""

    def ask_back(self) -> None:
        """Who waits for room gets what is held, behind its last reader. Under the swap's lock."""
        self.asked += 1
        for table in list(self.tables):
            table.let_go()


class ResidentTable:
    """The table of one layer of one sequence.

    ``missing``: how many of its blocks are in no device slot. ``release(event, slots)`` is asked to
    give leases of host slots back behind an event, or now for None.
    """

    def __init__(
        self,
        memory: TableMemory,
        holders: Holders,
        tier: HostTier,
        group_layer: int,
        release: Callable[[Event | None, I32], None],
    ) -> None:
        self.missing = 0
        self.version = 0
        """Another whenever what :meth:`unit_slots` gives may be another."""
        self.left: list[tuple[int, int]] = []
        """Room that launches enqueued so far may still read, to be given back behind them."""
        self.reader: Event | None = None
        """Behind the last launch that reads the table."""
        self._memory = memory
        self._holders = holders
        self._tier = tier
        self._group_layer = group_layer
        self._release = release
        self._seen = np.empty(0, np.int32)  # a device slot; _place_of a host slot that is held; -1
        self._nowhere = 0  # blocks at -1
        self._stop = 0
        self._changed = 0
        self._asked = 0
        self._place: tuple[int, int] | None = None
        self._entries: Tensor | None = None

    @property
    def is_whole(self) -> bool:
        """Whether every block is in a device slot or a host slot that is held."""
        return not self._nowhere

    @property
    def entries(self) -> Tensor | None:
        """The table in memory, if there is one."""
        return self._entries

    def changed(self, block: int) -> None:
        """Entries from this block on may be others now."""
        self._changed = min(self._changed, block)

    def settle(self, device_slot: I32, indices: I64, stop: int) -> None:
        """Take in what changed among the first ``stop`` blocks of a layer, of block indices
        ``indices``. Under the swap's lock.
        """
        if stop == self._stop <= self._changed:
            return
        start = min(self._changed, stop, self._stop)
        old, new = self._seen[start : self._stop].copy(), device_slot[start:stop].copy()
        both = min(len(old), len(new))
        stays = (old[:both] < -1) & (new[:both] < 0)
        new[:both][stays] = old[:both][stays]
        gone = old[np.append(old[:both] < -1, old[both:] < -1) & ~np.append(stays, old[both:] >= 0)]
        self.missing += int((new < 0).sum()) - int((old < 0).sum())
        self._nowhere += int((new == -1).sum()) - int((old == -1).sum())
        if stop > len(self._seen):
            grown = np.full(max(2 * len(self._seen), stop, LEAST_BLOCKS), -1, np.int32)
            grown[: self._stop] = self._seen[: self._stop]
            self._seen = grown
        self._seen[start:stop] = new
        self.version += len(old) != len(new) or bool((old != new).any())
        is_shorter = stop < self._stop
        self._stop = self._changed = stop
        self._give_back(gone)
        if self._nowhere and self in self._holders.tables and not self._take(start, indices):
            self.let_go()
        new = self._seen[start:stop]
        moved = is_shorter or ((old[:both] != -1) & (old[:both] != new[:both])).any()
        too_long = self._place is not None and self._place[1] < stop
        if self._nowhere or too_long or (moved and self._is_read()):
            self.leave()
        elif self._entries is not None:
            self._write(start)

    def hold(self, indices: I64) -> bool:
        """Hold host slots of all that is in no device slot, if the tier has them within its quota
        and nobody asked for room since the last attempt. Looks at every block then.

        To be asked after :meth:`settle`. Under the swap's lock.
        """
        asked, self._asked = self._asked, self._holders.asked
        if asked != self._asked or self._nowhere > self._tier.quota:
            return False
        if not self._take(0, indices):
            return False
        if not self.has_room():
            self.let_go()
            return False
        return True

    def has_room(self) -> bool:
        """Whether there are entries, or memory for them. For a table that :attr:`is_whole`."""
        return self.units(0, self._stop) is not None

    def cut(self, block: int) -> None:
        """Let go of host slots from this block on. Under the swap's lock."""
        seen = self._seen[block : self._stop]
        held = seen < -1
        gone = seen[held]
        if not len(gone):
            return
        seen[held] = -1
        self.version += 1
        self._nowhere += len(gone)
        self.changed(block)
        self.leave()
        if not block:
            self._holders.tables.discard(self)
        self._give_back(gone)

    def let_go(self) -> None:
        """Hold nothing. Under the swap's lock."""
        self._holders.tables.discard(self)
        self.cut(0)

    def units(self, start: int, stop: int) -> Tensor | None:
        """Entries ``[1, H, stop - start]`` of blocks that are all somewhere; None: no room.

        To be asked after :meth:`settle`, where the table :attr:`is_whole`.
        """
        if self._entries is None:
            blocks = LEAST_BLOCKS
            while blocks < stop:
                blocks *= 2
            first = self._memory.take(blocks)
            if first is None:
                return None
            self._place = (first, blocks)
            self._entries = self._memory.entries(first, blocks)
            self._write(0)
        table = self._entries
        shape = (1, table.shape[0], stop - start)
        strides = (table.shape[0] * table.strides[0], *table.strides)
        address = table.address + 4 * start
        return Tensor(address, shape, strides, "i32", table.on_device, table)

    def leave(self) -> None:
        """Begin another table when it is wanted next."""
        if self._place is not None:
            self.left.append(self._place)
        self._place = self._entries = None

    def give_back(self, left: list[tuple[int, int]]) -> None:
        """Room that nothing reads any more."""
        for first, blocks in left:
            self._memory.give_back(first, blocks)

    def _take(self, start: int, indices: I64) -> bool:
        """Hold host slots of the blocks from ``start`` on that are nowhere, all or none."""
        places = start + np.flatnonzero(self._seen[start : self._stop] == -1)
        if len(places) < self._nowhere:
            return False
        slots = self._tier.lookup(self._group_layer, indices[places])
        if (slots < 0).any() or not self._tier.is_loaded(slots):
            return False
        if not self._tier.hold(self._group_layer, slots):
            return False
        self._seen[places] = _place_of(slots)
        self.version += 1
        self._nowhere = 0
        self._holders.tables.add(self)
        return True

    def _give_back(self, places: I32) -> None:
        if len(places):
            self._release(self.reader, _place_of(places))

    def _is_read(self) -> bool:
        """Whether an enqueued launch may still read the table."""
        if self.reader is None:
            return False
        try:
            return not self.reader.is_done()
        except DeviceError:  # told to whoever awaits its result
            return False

    def unit_slots(self, start: int, stop: int) -> I32:
        """Entries ``[H, stop - start]`` of blocks that are all somewhere."""
        count = np.int32(self._memory.heads)
        heads = np.arange(count, dtype=np.int32)[:, None]
        places = self._seen[None, start:stop]
        units: I32 = places * count + heads
        if self.missing:
            in_host = host_unit(_place_of(places), heads, int(count))
            units = np.where(places < 0, in_host, units)
        return units

    def _write(self, start: int) -> None:
        assert self._entries is not None
        self._entries.array()[:, start : self._stop] = self.unit_slots(start, self._stop)


def _place_of(slots: I32) -> I32:
    """What stands for host slots beside device slots, and what host slots it stands for."""
    return np.int32(-2) - slots
