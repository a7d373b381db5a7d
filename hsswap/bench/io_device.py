"""Reads of a store into device memory: directly, or through host slots as sequences do it."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
from numpy.typing import NDArray

from hsswap.bench.io_arms import BenchError, FilledStore, Memory, StoreArm, transfer
from hsswap.driver.base import Buffer, Device, Event, Stream
from hsswap.driver.operations import BlockPool, ChecksumWork, GatherWork, ScatterWork, UnitPool
from hsswap.driver.tensor import tensor_in
from hsswap.errors import HsswapError
from hsswap.io.base import Operation
from hsswap.io.layout import MAX_RUN_SPANS


class DeviceChecksums:
    """The device's CRC-32 kernel for a store's blocks in one pool.

    A stream and a place for results each thread, so that threads of a backend wait side by side.
    """

    def __init__(self, device: Device, pool: BlockPool) -> None:
        self._device = device
        self._pool = pool
        self._mine = threading.local()
        self._all: list[tuple[Stream, Buffer]] = []

    def __call__(
        self, addresses: NDArray[np.uint64], nbytes: int, seeds: NDArray[np.uint32]
    ) -> NDArray[np.uint32]:
        """See :class:`hsswap.io.base.BlockChecksums`; the addresses are slots of the pool."""
        assert nbytes == self._pool.block_bytes
        stream, results = self._of_thread()
        slots = (addresses - np.uint64(self._pool.memory.address)) // np.uint64(nbytes)
        out = tensor_in(results, "u32", (len(slots),))
        work = ChecksumWork(self._pool, slots.astype(np.int32), seeds, out)
        self._device.checksum(stream, work)
        stream.synchronize()
        found: NDArray[np.uint32] = out.array().copy()
        return found

    def _of_thread(self) -> tuple[Stream, Buffer]:
        found: tuple[Stream, Buffer] | None = getattr(self._mine, "both", None)
        if found is None:
            found = self._device.stream(), self._device.allocate_host(4 * MAX_RUN_SPANS)
            self._mine.both = found
            self._all.append(found)
        return found

    def close(self) -> None:
        """Give streams and places back; nothing may be under way."""
        while self._all:
            stream, results = self._all.pop()
            stream.close()
            results.close()


class DeviceMemory:
    """``count`` device slots of whole blocks, and as many host slots on the way there.

    ``direct``: the store reads into the device slots and the device verifies them; ``addresses``
    are of the slots it reads into.
    """

    def __init__(self, device: Device, filled: FilledStore, count: int, *, direct: bool) -> None:
        dims, block_bytes = filled.store.dims, filled.store.block_bytes(0)
        group, tokens = dims.groups[0], dims.block_size
        self._device = device
        self._arena = device.allocate(count * block_bytes)
        self._host = device.allocate_host(count * block_bytes)
        self._stream = device.stream()
        whole = (count, block_bytes)
        self._slots = BlockPool(tensor_in(self._host, "u8", whole), group, tokens)
        unit_bytes = self._slots.unit_bytes
        assert block_bytes == group.kv_heads * unit_bytes  # dims_of makes no others
        units = tensor_in(self._arena, "u8", (count * group.kv_heads, unit_bytes))
        self._units = UnitPool(units, group, tokens)
        self.checksums: DeviceChecksums | None = None
        if direct:
            pool = BlockPool(tensor_in(self._arena, "u8", whole), group, tokens)
            self.checksums = DeviceChecksums(device, pool)
        base = (self._arena if direct else self._host).address
        begins = np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
        self.addresses = begins + np.uint64(base)

    def gather(self, slots: NDArray[np.int64]) -> Event:
        """Copy host slots to the device slots of the same numbers; returns at once."""
        blocks = slots.astype(np.int32)
        self._device.gather(
            self._stream, GatherWork(self._slots, self._units, blocks, None, blocks)
        )
        return self._stream.record()

    def content(self) -> NDArray[np.uint8]:
        """What is in the device slots, by way of the host slots. Waits."""
        slots = np.arange(len(self.addresses))
        self._device.scatter(
            self._stream, ScatterWork(self._slots, self._units, *self._units_of(slots))
        )
        self._stream.synchronize()
        found: NDArray[np.uint8] = self._slots.memory.array().copy()
        return found

    def _units_of(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int32], ...]:
        """Host slot, head and device slot of each unit of whole blocks."""
        count = self._units.group.kv_heads
        blocks = np.repeat(slots.astype(np.int32), count)
        heads = np.tile(np.arange(count, dtype=np.int32), len(slots))
        return blocks, heads, blocks * np.int32(count) + heads

    def close(self) -> None:
        """Give everything back; nothing may be in flight."""
        if self.checksums is not None:
            self.checksums.close()
        self._stream.close()
        self._host.close()
        self._arena.close()


class DeviceArm(StoreArm):
    """Reads that count when they are in device memory. ``direct``: see :class:`DeviceMemory`.

    Where they go through host slots, of which there are twice as many as are asked for, a block is
    asked for when another has come there. One gather at a time takes on ``depth`` or more: each
    holds the loop for 0.3 ms (H200 host; of half as many, 64 KiB each: 0.93 of the MB/s, 47 us of
    processor a block for 40). Whether it is done is looked at when more comes, and waited for only
    when slots are wanting.
    """

    def __init__(
        self,
        filled: FilledStore,
        depth: int,
        device: Device,
        *,
        direct: bool,
        ahead: bool = False,
    ) -> None:
        """``ahead``: see :class:`StoreArm`."""
        asked = 2 * depth if ahead else depth
        slots = asked if direct else 2 * asked
        self._there = DeviceMemory(device, filled, slots, direct=direct)
        try:
            super().__init__(filled, Operation.READ, depth, self._there, ahead=ahead)
        except BaseException:
            self._there.close()
            raise
        self.destination = f"device {device.name}"
        self.path += ", verified there" if direct else ", gathered from host slots"
        self._direct = direct
        self._arrived: list[NDArray[np.int64]] = []  # in this turn of the loop
        self._here: list[NDArray[np.int64]] = []  # in host slots, in no gather
        self._gather: tuple[Event, NDArray[np.int64]] | None = None
        self._waits = False
        self._owed = 0  # blocks to ask for when there are slots again
        self._least = depth  # blocks of a gather, unless slots are wanting

    async def verify(self) -> None:
        """Move a block to every slot, and compare. Raises BenchError when one is wrong."""
        indices = self._filled.indices[: self.slots]
        expected = Memory(self.slots, self._filled.store.block_bytes(0))
        await transfer(self._filled.store, Operation.READ, indices, expected)
        await transfer(self._filled.store, Operation.READ, indices, self._there)
        if not self._direct:
            await self._there.gather(np.arange(self.slots)).wait()
        if not np.array_equal(self._there.content(), expected.blocks):
            raise BenchError(f"{self.name}: blocks came to {self.destination} wrong; report it")

    def _done(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], error: HsswapError | None
    ) -> None:
        if self._direct or error is not None:
            super()._done(slots, positions, error)
            return
        if not self._arrived:
            asyncio.get_running_loop().call_soon(self._take_on)
        self._arrived.append(slots[positions])

    def _take(self, count: int) -> NDArray[np.int64]:
        """So many slots, those used last: they are in the caches."""
        slots, self._free = self._free[-count:], self._free[:-count]
        return slots

    def _take_on(self) -> None:
        """Ask for as many blocks as have come, then see them to the device."""
        self._owed += sum(map(len, self._arrived))
        self._here += self._arrived
        self._arrived.clear()
        self._go_on()

    def _go_on(self) -> None:
        """Count a gather that is done, ask for blocks as far as there are slots, begin the next."""
        assert self._end is not None
        try:
            if self._gather is not None and self._gather[0].is_done():
                self._gathered(self._gather[1])
        except HsswapError as problem:
            if not self._end.done():
                self._end.set_exception(problem)
            return
        if time.perf_counter() >= self._deadline:
            self._owed = 0
        if count := min(self._owed, len(self._free)):
            self._owed -= count
            self._in_flight += count
            self._ask(self._take(count))
        here = sum(map(len, self._here))
        gathering = len(self._gather[1]) if self._gather is not None else 0
        wanting = self._owed > 0 or self._in_flight == here + gathering  # nothing else comes here
        if here and self._gather is None and (wanting or here >= self._least):
            slots = np.concatenate(self._here)
            self._here.clear()
            self._gather = self._there.gather(slots), slots
        if self._gather is not None and wanting and not self._waits:
            self._waits = True
            self._gather[0].call_when_done(self._wake)
        if self._in_flight == 0 and not self._end.done():
            self._end.set_result(None)

    def _gathered(self, slots: NDArray[np.int64]) -> None:
        self._gather = None
        self._free = np.concatenate((self._free, slots))
        self._operations += len(slots)
        self._in_flight -= len(slots)

    def _wake(self) -> None:
        """On the device's thread."""
        assert self._end is not None

        def go_on() -> None:
            self._waits = False
            self._go_on()

        self._end.get_loop().call_soon_threadsafe(go_on)

    async def close(self) -> None:
        """Give the memory back."""
        self._there.close()
