"""HighSpeedSwap: a KV cache larger than device memory, for one event loop.

It wires the rooms together: the store on disk, the pools of slots, the prefetcher, write-behind and
the device. Sequences do the rest.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from threading import RLock
from typing import Self

import numpy as np
from numpy.typing import NDArray

from hsswap.config import PredictorConfig, SwapConfig
from hsswap.driver import open_device
from hsswap.driver.base import Buffer, Device, Event, Stream
from hsswap.driver.tensor import tensor_in
from hsswap.errors import ArgumentError, ClosedError, ConfigError, HsswapError, OutOfSlots
from hsswap.io.base import BlockIO
from hsswap.io.store import BlockStore
from hsswap.loop import Mailbox
from hsswap.metrics import Counters, SwapStatistics
from hsswap.pools import GroupPool, ScratchPool
from hsswap.predictor import ProjectionPredictor, projection_matrix
from hsswap.prefetch import Prefetcher
from hsswap.sequence import Sequence
from hsswap.tiers import I32, I64, SlotState
from hsswap.topk import TopK
from hsswap.writeback import WriteBehind

MAX_TILES_AHEAD = 16
"""Tiles of one attend enqueued and not yet run: enough to keep a device busy, few enough that a
stream's queue never fills."""


class HighSpeedSwap:
    """KV blocks of many sequences in device slots, host slots and on disk.

    Open it with ``async with HighSpeedSwap.open(config) as swap``. It belongs to the event loop it
    was opened on; plain functions (``try_attend``, ``statistics``) may be called from any thread.
    """

    def __init__(self, config: SwapConfig, device: Device, store: BlockStore) -> None:
        """For :meth:`create`; makes the pools, which allocates memory and can take a while."""
        self.config = config
        self.device = device
        self.lock = RLock()
        self.counters = Counters()
        self.closed = False
        self.max_tiles_ahead = MAX_TILES_AHEAD
        self._store = store
        self._sequences: dict[int, Sequence] = {}
        self._next_number = 0
        self._streams: dict[int, Stream] = {}
        self._resources: list[Buffer | GroupPool | ScratchPool | Stream] = []
        try:
            self._scratch = ScratchPool(device)
            self._resources.append(self._scratch)
            self._pools: list[GroupPool] = []
            first = 0
            for index, group in enumerate(config.dims.groups):
                self._pools.append(GroupPool(config, index, first, device))
                self._resources.append(self._pools[-1])
                first += group.layers
            self._predictors = self._make_predictors(config.predictor)
            self._stream = device.stream()
            self._resources.append(self._stream)
        except BaseException:
            self._free()
            raise

    def __del__(self) -> None:
        if not getattr(self, "closed", True):
            warnings.warn(
                "a swap was not closed; use 'async with HighSpeedSwap.open(...)'",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"sequences={len(self._sequences)}"
        return f"<HighSpeedSwap {self.device.name} {self._store.path} {state}>"

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: SwapConfig, *, io: BlockIO | None = None, device: Device | None = None
    ) -> AsyncIterator[Self]:
        """:meth:`create` a swap and close it at the end of the ``async with`` block."""
        swap = await cls.create(config, io=io, device=device)
        try:
            yield swap
        finally:
            await swap.close()

    @classmethod
    async def create(
        cls, config: SwapConfig, *, io: BlockIO | None = None, device: Device | None = None
    ) -> Self:
        """A swap on the running loop; the caller closes it.

        ``io`` and ``device`` replace what the config names (a scripted memory backend, for tests);
        the swap closes them. Raises ConfigError, DeviceError, StoreLocked, or BlockIOError when
        the directory cannot be used.
        """
        async with AsyncExitStack() as undo:
            if device is None:
                device = await asyncio.to_thread(open_device, config.device)
            undo.push_async_callback(asyncio.to_thread, device.close)
            store = await BlockStore.open(
                config.dims,
                None if config.directory is None else Path(config.directory),
                config.capacity_blocks,
                io if io is not None else config.io,
                io_threads=config.io_threads,
            )
            undo.push_async_callback(store.close)
            swap = await asyncio.to_thread(cls, config, device, store)
            swap._start()
            undo.pop_all()
            return swap

    def sequence(self, *, top_k: TopK | None = None) -> Sequence:
        """A new, empty sequence. ``top_k`` None: exact mode.

        Raises OutOfSlots when ``max_sequences`` are open or device slots are too few for top-k
        (with the number needed), ConfigError for top-k without a predictor, ClosedError.
        """
        with self.lock:
            self.check_open()
            if len(self._sequences) >= self.config.max_sequences:
                raise OutOfSlots(
                    f"max_sequences is {self.config.max_sequences} and as many are open; close one "
                    f"or raise it ({self.config.dims.layers} device slots for each)"
                )
            if top_k is not None and not isinstance(top_k, TopK):
                raise ArgumentError(f"top_k is {top_k!r}; give hsswap.TopK(k=...)")
            if top_k is not None and self.config.predictor is None:
                raise ConfigError(
                    "top-k needs a predictor; give SwapConfig(predictor=hsswap.PredictorConfig())"
                )
            sequence = Sequence(self, self._next_number, top_k)
            self._sequences[sequence.number] = sequence
            self._next_number += 1
            return sequence

    async def flush(self) -> None:
        """Wait until every full block appended so far is on disk.

        Raises the error of a block that could not be written; it stays in memory and is tried again
        at the next flush.
        """
        self.check_open()
        await self.writes.flush()

    def statistics(self) -> SwapStatistics:
        """What happened since the swap was opened, and what is in use now. From any thread."""
        with self.lock:
            counters, store = self.counters, self._store.statistics()
            return SwapStatistics(
                device_hits=counters.device_hits,
                host_hits=counters.host_hits,
                misses=counters.misses,
                attends=counters.attends,
                appended_tokens=counters.appended_tokens,
                blocks_read=store.blocks_read,
                blocks_written=store.blocks_written,
                bytes_read=store.bytes_read,
                bytes_written=store.bytes_written,
                read_wait_s=counters.read_wait_s,
                read_busy_s=counters.read_busy_s,
                host_evictions=sum(pool.tier.evictions for pool in self._pools),
                write_errors=counters.write_errors,
                device_slots_used=sum(pool.slots.used_count for pool in self._pools),
                host_slots_used=sum(
                    pool.tier.slot_count - pool.tier.free_count for pool in self._pools
                ),
                free_blocks=self._store.ids.free_count,
                path=self._store.path,
            )

    async def close(self) -> None:
        """Close sequences, finish or refuse what is in flight, free everything, remove the store.

        Calls still waiting get ClosedError. Twice is fine.
        """
        with self.lock:
            if self.closed:
                return
            self.closed = True
        async with AsyncExitStack() as last:
            # In reverse: launches end, then I/O (the store ends also what never answers), then what
            # they report is taken in, and last the memory they used is freed.
            last.push_async_callback(asyncio.to_thread, self.device.close)
            last.push_async_callback(asyncio.to_thread, self._free)
            last.callback(self.mailbox.close)
            last.push_async_callback(self.writes.settle)
            last.push_async_callback(self.prefetcher.settle)
            last.push_async_callback(self._store.close)
            for sequence in self._sequences.values():
                last.push_async_callback(sequence.quiet)
            last.callback(self.prefetcher.close)
        self._sequences.clear()

    # What follows is for the other files of this room.

    def check_open(self) -> None:
        """Raise ClosedError once closing has begun: no work may be enqueued any more."""
        if self.closed:
            raise ClosedError("the swap is closed; open a new one")

    def pool_of(self, layer: int) -> GroupPool:
        """The slots of a layer's group."""
        return self._pools[self.config.dims.group_index(layer)]

    def predictor_of(self, layer: int) -> ProjectionPredictor:
        """The predictor of a layer's group."""
        return self._predictors[self.config.dims.group_index(layer)]

    def take_active_slots(self) -> list[int]:
        """A device slot a layer for the blocks being filled, all or none. Raises OutOfSlots."""
        taken: list[I32] = []
        try:
            for pool in self._pools:
                taken.append(pool.take_active(f"sequence {self._next_number}"))
        except BaseException:
            for pool, slots in zip(self._pools, taken, strict=False):
                for layer, slot in enumerate(slots.tolist()):
                    pool.give_back(layer, slot, np.empty(0, np.int32))
            raise
        return [slot for slots in taken for slot in slots.tolist()]

    def allocate_ids(self, count: int, ids: I64) -> I64:
        """``count`` more block ids for a sequence that has ``ids``. Raises OutOfBlocks."""
        return self._store.ids.allocate(count, int(ids[-1]) if len(ids) else None)

    def stream_of(self, handle: object | None) -> Stream:
        """The swap's own stream for None, else the caller's, wrapped once."""
        if handle is None:
            return self._stream
        if isinstance(handle, Stream):
            return handle
        key = handle if isinstance(handle, int) else id(handle)
        stream = self._streams.get(key)
        if stream is None:
            stream = self._streams[key] = self.device.stream(handle)
        return stream

    @contextmanager
    def scratch(self, nbytes: int, stream: Stream) -> Iterator[Buffer]:
        """Device memory for work enqueued on ``stream`` inside the block."""
        with self.lock:
            buffer = self._scratch.take(nbytes)
        try:
            yield buffer
        finally:
            stream.record().call_when_done(
                lambda: self.mailbox.post(lambda: self._scratch.give_back(buffer))
            )

    def release_after(
        self, event: Event, pool: GroupPool, slots: I32, *, scan: bool = True
    ) -> None:
        """Give leases of host slots back once ``event`` is done."""

        def release() -> None:
            with self.lock:
                pool.tier.release(slots, scan=scan)
            self.prefetcher.pump_soon()

        event.call_when_done(lambda: self.mailbox.post(release))

    async def release_sequence(self, sequence: Sequence) -> None:
        """Take a closed sequence's slots and ids back, after all work and I/O on them."""
        self.prefetcher.plan(sequence.number, [])
        await sequence.quiet()
        indices = sequence.ids & np.int64(0xFFFFFFFF)
        await self.prefetcher.until(lambda: self._is_quiet(indices))
        with self.lock:
            self.writes.forget(indices)
            for pool in self._pools:
                pool.tier.forget(indices)
            self._store.ids.drop_reference(sequence.ids)
            sequence.free_slots()
            self._sequences.pop(sequence.number, None)
        self.prefetcher.pump()

    def _is_quiet(self, indices: NDArray[np.int64]) -> bool:
        for pool in self._pools:
            slots = pool.tier.slot_of[:, indices].ravel()
            slots = slots[slots >= 0]
            state = pool.tier.state[slots]
            moving = (state == SlotState.READING) | (state == SlotState.WRITING)
            if moving.any() or (pool.tier.leases[slots] > 0).any():
                return False
            dirty = slots[state == SlotState.DIRTY]
            if len(dirty) and not self.writes.all_failed(pool, dirty):
                return False
        return True

    def _start(self) -> None:
        """Bind to the running loop."""
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self.prefetcher = Prefetcher(self._store, self.lock, self.counters, self._starved)
        self.writes = WriteBehind(
            self._store, self.lock, self.counters, self.mailbox, self.prefetcher.pump_soon
        )

    def _starved(self) -> HsswapError | None:
        return self.writes.starved(self._pools)

    def _make_predictors(self, config: PredictorConfig | None) -> list[ProjectionPredictor]:
        if config is None:
            return []
        predictors = []
        size, ids = self.config.dims.block_size, self.config.capacity_blocks
        for pool in self._pools:
            group = pool.group
            shape = ProjectionPredictor.code_shape(config, group, size, ids)
            memory = self.device.allocate(2 * int(np.prod(shape)))
            self._resources.append(memory)
            values = projection_matrix(config, group.head_dim)
            # Mapped host memory: small, read by every launch, and filled without a copy call.
            matrix = self.device.allocate_host(values.nbytes)
            self._resources.append(matrix)
            tensor = tensor_in(matrix, "bf16", values.shape)
            tensor.array()[...] = values
            predictors.append(
                ProjectionPredictor(
                    config, group, size, ids, tensor_in(memory, "bf16", shape), tensor
                )
            )
        return predictors

    def _free(self) -> None:
        for stream in self._streams.values():
            stream.close()
        for resource in reversed(self._resources):
            resource.close()
        self._resources.clear()
