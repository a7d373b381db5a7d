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

from hsswap.config import PredictorConfig, SwapConfig
from hsswap.driver import open_device
from hsswap.driver.base import Buffer, Device, Event, Stream
from hsswap.driver.tensor import tensor_in
from hsswap.errors import ArgumentError, ClosedError, ConfigError, HsswapError, OutOfSlots
from hsswap.io.base import BlockIO
from hsswap.io.store import BlockStore
from hsswap.io.waiting import to_the_end
from hsswap.loop import Mailbox, in_thread, insist
from hsswap.metrics import Counters, SwapStatistics
from hsswap.pools import GroupPool, ScratchPool
from hsswap.predictor import ProjectionPredictor, projection_matrix
from hsswap.prefetch import Prefetcher
from hsswap.retiring import Retiring
from hsswap.sequence import Sequence
from hsswap.tiers import I32, I64
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
        self._ended: asyncio.Future[None] | None = None  # there once closing began
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
        if hasattr(self, "mailbox") and not self.closed:
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
            used = device
            if used is None:
                used = await in_thread(lambda: open_device(config.device), Device.close)
            undo.push_async_callback(in_thread, used.close)
            store = await BlockStore.open(
                config.dims,
                None if config.directory is None else Path(config.directory),
                config.capacity_blocks,
                io if io is not None else config.io,
                io_threads=config.io_threads,
            )
            undo.push_async_callback(store.close)
            swap = await in_thread(lambda: cls(config, used, store), cls._free)
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

        Calls still waiting get ClosedError. Twice is fine, and the second waits for the first. Goes
        on to the end when cancelled meanwhile.
        """
        with self.lock:
            self.closed = True  # from here on nothing is enqueued
        if self._ended is not None:
            await asyncio.shield(self._ended)
            return
        self._ended = asyncio.get_running_loop().create_future()
        self.prefetcher.close()
        try:
            # Launches end, then I/O (the store ends also what never answers), then what they report
            # is taken in, and last the memory they used is freed.
            await to_the_end(
                lambda: insist(self._quiet),
                self._store.close,
                lambda: insist(self.prefetcher.settle),
                lambda: insist(self.writes.settle),
                lambda: insist(self.retiring.ended),
                # Calls that waited for any of this end now, with launches of their own behind them.
                lambda: insist(lambda: self.prefetcher.until(self._no_call)),
                lambda: insist(self._quiet),
                lambda: in_thread(self._free),
                lambda: in_thread(self.device.close),
            )
        finally:
            self.mailbox.close()
            self._sequences.clear()
            self._ended.set_result(None)

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

    def share_ids(self, ids: I64) -> I64:
        """The same ids for one more holder."""
        self._store.ids.add_reference(ids)
        return ids

    def stream_of(self, handle: object | None) -> Stream:
        """The swap's own stream for None, else the caller's, wrapped once."""
        if handle is None:
            return self._stream
        key = _stream_number(handle)
        with self.lock:
            stream = self._streams.get(key) if key is not None else None
            if stream is None or getattr(stream, "closed", False):
                stream = self.device.stream(handle)  # refuses what is no stream of this device
                self._streams[stream.handle] = stream
            return stream

    @contextmanager
    def scratch(self, nbytes: int, stream: Stream) -> Iterator[Buffer]:
        """Device memory for work enqueued on ``stream`` inside the block."""
        with self.lock:
            buffer = self._scratch.take(nbytes)
        try:
            yield buffer
        finally:
            try:
                stream.record().call_when_done(
                    lambda: self.mailbox.post(lambda: self._reuse(buffer))
                )
            except HsswapError:  # nobody can say when it is unused
                with self.lock:
                    self._resources.append(buffer)

    def release_after(
        self, event: Event, pool: GroupPool, slots: I32, *, scan: bool = True
    ) -> None:
        """Give leases of host slots back once ``event`` is done."""

        def release() -> None:
            with self.lock:
                pool.tier.release(slots, scan=scan)
            self.prefetcher.pump_soon()

        event.call_when_done(lambda: self.mailbox.post(release))

    def release_now(self, pool: GroupPool, slots: I32) -> None:
        """Give leases back of slots that no launch was told of. From any thread."""
        with self.lock:
            pool.tier.release(slots, scan=True)
        self.mailbox.post(self.prefetcher.pump_soon)

    async def release_sequence(self, sequence: Sequence) -> None:
        """Take a closed sequence's slots and ids back, after all work and I/O on them."""
        self.prefetcher.plan(sequence.number, [])
        await sequence.quiet()
        await self.retiring.settle()  # what the sequence let go before is back too, then

        def free() -> None:
            sequence.free_slots()
            self._sequences.pop(sequence.number, None)

        await self.retiring.now(sequence.ids, free)

    def _start(self) -> None:
        """Bind to the running loop."""
        self.mailbox = Mailbox(asyncio.get_running_loop())
        self.prefetcher = Prefetcher(self._store, self.lock, self.counters, self._starved)
        self.writes = WriteBehind(
            self._store, self.lock, self.counters, self.mailbox, self.prefetcher.pump_soon
        )
        self.retiring = Retiring(self, self._store, self._pools)

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

    def _reuse(self, buffer: Buffer) -> None:
        with self.lock:
            self._scratch.give_back(buffer)

    async def _quiet(self) -> None:
        """Wait for what sequences have enqueued: by its events, since the callers' streams may be
        gone by now.
        """
        for sequence in list(self._sequences.values()):
            await sequence.quiet()

    def _no_call(self) -> bool:
        return not any(sequence.busy for sequence in self._sequences.values())

    def _free(self) -> None:
        for stream in self._streams.values():
            stream.close()
        for resource in reversed(self._resources):
            resource.close()
        self._resources.clear()


def _stream_number(handle: object) -> int | None:
    """The raw handle of a caller's stream; None for what is none. Not the object's id, which is
    another's once it is gone.
    """
    if isinstance(handle, Stream):
        return handle.handle
    protocol = getattr(handle, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    return handle if isinstance(handle, int) else None
