"""A layer's blocks in device slots, as a table that attention reads and that is never built again.

A sequence's table of units would cost time in its length at every step. Here only entries of blocks
that changed are written: what a step appends. The table lies in memory that the device reaches, and
launches of earlier steps may still read it; so an entry they read is never changed in place: then
the table moves.

::

    blocks   | 0 ...             settled | ...            stop |
    entries  | as the device's tables say | written at settle() |
"""

from __future__ import annotations

from bisect import insort

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.base import Buffer, Device
from hsswap.driver.tensor import Tensor, tensor_in

I32 = NDArray[np.int32]
LEAST_BLOCKS = 64
"""Blocks of the smallest table; they double."""


class TableMemory:
    """Room for the tables of one layer group: at most twice as many entries as there are units.

    Host memory that the device reads where it is: an entry is read once a launch, beside the 8 KiB
    and more of the unit it names.
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

    def entries(self, first: int, blocks: int) -> Tensor:
        """A table ``[H, blocks]`` int32."""
        offset = 4 * first * self.heads
        return tensor_in(self.memory, "i32", (self.heads, blocks), offset_bytes=offset)


class ResidentTable:
    """The table of one layer of one sequence, and how many of its blocks are in no device slot."""

    def __init__(self, memory: TableMemory) -> None:
        self.missing = 0
        self.left: list[tuple[int, int]] = []
        """Room that launches enqueued so far may still read, to be given back behind them."""
        self._memory = memory
        self._seen = np.empty(0, np.int32)
        self._stop = 0
        self._changed = 0
        self._place: tuple[int, int] | None = None
        self._entries: Tensor | None = None

    def changed(self, block: int) -> None:
        """Entries from this block on may be others now."""
        self._changed = min(self._changed, block)

    def settle(self, device_slot: I32, stop: int) -> None:
        """Take in what changed among the first ``stop`` blocks of a layer."""
        if stop == self._stop <= self._changed:
            return
        start = min(self._changed, stop, self._stop)
        old, new = self._seen[start : self._stop], device_slot[start:stop]
        both = min(len(old), len(new))
        moved = ((old[:both] >= 0) & (old[:both] != new[:both])).any() or stop < self._stop
        self.missing += int((new < 0).sum()) - int((old < 0).sum())
        if stop > len(self._seen):
            grown = np.full(max(2 * len(self._seen), stop, LEAST_BLOCKS), -1, np.int32)
            grown[: self._stop] = self._seen[: self._stop]
            self._seen = grown
        self._seen[start:stop] = new
        self._stop = self._changed = stop
        if moved or self.missing or (self._place is not None and self._place[1] < stop):
            self.leave()
        elif self._entries is not None:
            self._write(start)

    def units(self, start: int, stop: int) -> Tensor | None:
        """Entries ``[1, H, stop - start]`` of blocks that are all in device slots; None: no room.

        To be asked after :meth:`settle`, with ``missing`` 0.
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

    def _write(self, start: int) -> None:
        assert self._entries is not None
        heads = np.arange(self._memory.heads, dtype=np.int32)[:, None]
        slots = self._seen[None, start : self._stop]
        self._entries.array()[:, start : self._stop] = slots * self._memory.heads + heads
