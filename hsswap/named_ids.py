"""Ids that callers hold, and the order of the work on their blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property

import numpy as np

from hsswap.driver.base import Event, Stream
from hsswap.errors import ArgumentError
from hsswap.named_blocks import NamedBlocks, Reads
from hsswap.retiring import Resident
from hsswap.swap_state import SwapState
from hsswap.tiers import I64, SlotState
from hsswap.writeback import Batch


class NamedIds(SwapState):
    """The id calls of :class:`hsswap.HighSpeedSwap`, and what the calls on blocks share."""

    @cached_property
    def named(self) -> NamedBlocks:
        """State of these blocks; made when the first of the calls comes."""
        return NamedBlocks.of(self.config.dims, self.config.capacity_blocks)

    @property
    def _has_named(self) -> bool:
        """Whether one of the calls came: what they need takes 6 bytes a layer and id."""
        return "named" in self.__dict__

    async def alloc_disk_block_id(self) -> int:
        """A new id, valid in every layer, with one reference. Raises OutOfBlocks."""
        self.check_open()
        block = int(self._store.ids.allocate(1)[0])
        self.named.refer(block, 1)
        return block

    async def inc_disk_ref(self, *, block: int) -> None:
        """One more holder of an id; its blocks cannot be changed then. Raises StaleBlockId."""
        self.check_loop()
        async with self.named.turn:  # behind an offload to the same id
            self.check_open()
            self._store.ids.add_reference([block])
            self.named.refer(int(block), 1)

    async def dec_disk_ref(self, *, block: int) -> int:
        """One holder less; how many are left. The last frees the id, behind work that uses it.

        Raises StaleBlockId for an id that nobody holds, ArgumentError for one that only sequences
        hold.
        """
        self.check_loop()
        async with self.named.turn:  # behind an offload to the same id
            self.check_open()
            count = self._store.ids.refcount(block)
            if int(block) not in self.named.references:
                raise ArgumentError(
                    f"block id {block} is a sequence's, which gives it back; dec_disk_ref takes "
                    "back what alloc_disk_block_id or inc_disk_ref gave"
                )
            if count > 1:
                left = self._store.ids.drop_one(block)
            else:
                await self._free_id(block)
                left = 0
            self.named.refer(int(block), -1)
            return left

    def disk_refcount(self, *, block: int) -> int:
        """How many hold an id. Raises StaleBlockId when nobody does."""
        return self._store.ids.refcount(block)

    def disk_free_count(self) -> int:
        """Ids that can be given out."""
        return self._store.ids.free_count

    async def _free_id(self, block: int) -> None:
        """Let go of an id that has one holder, in every layer."""
        named, index = self.named, int(self._store.ids.check([block])[0])
        for owner in named.plans:
            self.prefetcher.plan(("ids", owner), [])
        named.plans.clear()
        await named.unused()
        # Until then nothing is given up: a call that is cancelled has changed nothing.
        await self.prefetcher.until(lambda: self.closed or not self._is_in_use(index))

        def free() -> None:
            named.valid[:, index] = 0
            for layer in np.flatnonzero(named.resident[:, index] >= 0).tolist():
                self._take_resident(layer, index).give_back()

        with self.lock:
            self.check_open()
            for key in [key for key in named.parked if key[1] == index]:
                batch = self._unpark(key)
                batch.blocks.pool.tier.discard(batch.slots)
        await self.retiring.now(np.array([block], np.int64), free)

    def _write_parked(self) -> None:
        """Let blocks that are not full go to disk as they are. On the loop."""
        if not self._has_named:
            return
        with self.lock:
            for key in list(self.named.parked):
                batch = self._unpark(key)
                assert self.named.filled is not None  # fills are in one order, so all are before it
                self.writes.write_after(self.named.filled[1], batch)

    def _unpark(self, key: tuple[int, int]) -> Batch:
        batch = self.named.parked.pop(key)
        batch.blocks.pool.reserved_slots -= 1
        return batch

    def _is_in_use(self, index: int) -> bool:
        """Whether a call, I/O or work in flight uses a block of that id. Parked ones wait for a
        flush.
        """
        if self.named.is_read(index):
            return True
        for layer in range(self.config.dims.layers):
            pool = self.pool_of(layer)
            slot = pool.tier.lookup(layer - pool.first_layer, np.array([index]))
            if slot[0] < 0:
                continue
            state = pool.tier.state[slot[0]]
            parked = (layer, index) in self.named.parked
            written = state == SlotState.CLEAN or self.writes.all_failed(pool, slot)
            if pool.tier.leases[slot[0]] or not (parked or written):
                return True
        return False

    def _take_resident(self, layer: int, index: int) -> Resident:
        """The device slot of a block, which is no longer its."""
        pool = self.pool_of(layer)
        slot = self.named.resident[layer, index : index + 1].copy()
        self.named.resident[layer, index] = -1
        return Resident(pool, layer - pool.first_layer, slot)

    def _behind_all_uses(self) -> Event:
        """An event behind everything enqueued on such blocks so far."""
        stream = self.stream_of(None)
        self.named.record_rest()
        for event in self.named.uses.values():
            stream.wait_for(event)
        return stream.record()

    @contextmanager
    def _call(self) -> Iterator[None]:
        """A call is under way; closing waits for it."""
        self.check_open()
        self.named.calls += 1
        try:
            yield
        finally:
            self.named.calls -= 1
            if self.closed:
                self.prefetcher.pump_soon()

    @contextmanager
    def _reads(self, layer: int, indices: I64) -> Iterator[None]:
        """A call attends these blocks inside: none of them is filled anew, or freed."""
        reads = Reads(layer, indices)
        self.named.reads.append(reads)
        try:
            yield
        finally:
            self.named.reads.remove(reads)
            if self.named.turn.locked():
                self.prefetcher.pump_soon()

    @contextmanager
    def _fills(self, layer: int, index: int) -> Iterator[None]:
        """A block is about to be filled inside: no call begins to attend it."""
        self.named.filling = layer, index
        try:
            yield
        finally:
            self.named.filling = None
            self.prefetcher.pump_soon()

    @contextmanager
    def _named_use(self, stream: Stream, *, fills: bool = False) -> Iterator[None]:
        """Work on such blocks is enqueued inside: behind what filled them, before what is freed."""
        named = self.named
        named.record_rest()
        if named.filled is not None and named.filled[0] is not stream:
            stream.wait_for(named.filled[1])
        try:
            yield
        finally:
            event = named.record(stream)
            if fills:
                named.filled = (stream, event)

    async def _quiet(self) -> None:
        await super()._quiet()
        if self._has_named:
            await self.named.unused()

    def _no_call(self) -> bool:
        return super()._no_call() and not (self._has_named and self.named.calls)
