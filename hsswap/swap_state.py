"""What a swap is made of, for the calls of its users and the other files of this room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import ArrayLike

from hsswap.calibrating import Calibration
from hsswap.config import PredictorConfig, SwapConfig
from hsswap.driver.base import Buffer, Device, Event, Stream, protocol_handle
from hsswap.errors import ArgumentError, ClosedError, HsswapError
from hsswap.forked import REFUSED, watch
from hsswap.io.ids import INDEX_MASK
from hsswap.io.statistics import StoreStatistics
from hsswap.io.store import BlockStore
from hsswap.loop import Mailbox
from hsswap.metrics import Counters
from hsswap.pools import GroupPool, ScratchPool
from hsswap.predictor import CodesPredictor, Predictor, ProjectionPredictor
from hsswap.prefetch import Prefetcher
from hsswap.retiring import Retiring
from hsswap.tiers import I32, I64
from hsswap.writeback import WriteBehind

if TYPE_CHECKING:
    from hsswap.sequence import Sequence


class Closes(Protocol):
    """What a swap closes at its end."""

    def close(self) -> None:
        """Free it. Twice is fine."""
        ...


MAX_TILES_AHEAD = 16
"""Tiles of one attend enqueued and not yet run: enough to keep a device busy, few enough that a
stream's queue never fills."""


class SwapState:
    """Pools, streams and owners of one swap; :class:`hsswap.HighSpeedSwap` has the calls."""

    def __init__(self, config: SwapConfig, device: Device, store: BlockStore) -> None:
        """Make the pools, which allocates memory and can take a while."""
        self.config = config
        self.device = device
        self.lock = RLock()
        self.counters = Counters()
        self.closed = False
        self.is_inherited = False
        """Whether this is a copy in a fork of the process that opened it."""
        self.max_tiles_ahead = MAX_TILES_AHEAD
        self._store = store
        self._sequences: dict[int, Sequence] = {}
        self._next_number = 0
        self._streams: dict[int, Stream] = {}
        self._ended: asyncio.Future[None] | None = None  # there once closing began
        self._resources: list[Closes] = []
        self._scratch_of: dict[tuple[Stream, int], Buffer] = {}
        try:
            self._scratch = ScratchPool(device)
            self._resources.append(self._scratch)
            self._pools: list[GroupPool] = []
            first = 0
            for index, group in enumerate(config.dims.groups):
                self._pools.append(GroupPool(config, index, first, device))
                self._resources.append(self._pools[-1])
                first += group.layers
            self.predictor = self._make_predictor(config.predictor)
            self.calibration: Calibration | None = None
            if self.predictor is not None:
                self._resources.append(self.predictor)
                if config.predictor is not None and isinstance(self.predictor, CodesPredictor):
                    folder = store.directory if store.persistent else None
                    self.calibration = Calibration(self, self.predictor, config.predictor, folder)
                    self._resources.append(self.calibration)
            self._stream = device.stream()
            self._resources.append(self._stream)
        except BaseException:
            self._free()
            raise

    @property
    def pool(self) -> tuple[GroupPool, ...]:
        """The slots of each layer group, to look at."""
        return tuple(self._pools)

    @property
    def sequence_count(self) -> int:
        """Open sequences."""
        return len(self._sequences)

    @property
    def path_reason(self) -> str:
        """Why ``io="auto"`` chose its backend, with what it measured; "" for a named one."""
        return self._store.why

    def store_statistics(self) -> StoreStatistics:
        """What the store counted since it was opened."""
        return self._store.statistics()

    def check_open(self) -> None:
        """Raise ClosedError once closing has begun: no work may be enqueued any more."""
        if self.closed:
            refused = "the swap is closed; open a new one"
            raise ClosedError(REFUSED if self.is_inherited else refused)

    def check_loop(self) -> None:
        """Raise ArgumentError on another loop than the swap's, where a call would wait for ever."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:  # another library's
            here = None
        if here is not self._loop and not self.closed:
            raise ArgumentError(
                "the swap was opened on another event loop; open, use and close it inside one "
                "asyncio.run(), or use hsswap.blocking()"
            )

    def _in_child(self) -> None:
        self.closed = self.is_inherited = True
        self.lock._at_fork_reinit()  # type: ignore[attr-defined]  # another thread may hold it
        self.mailbox.in_child()
        self.prefetcher.close()  # what is under way ends there: none of it may be gone on with

    def pool_of(self, layer: int) -> GroupPool:
        """The slots of a layer's group."""
        return self._pools[self.config.dims.group_index(layer)]

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
        new = self._store.ids.allocate(count, int(ids[-1]) if len(ids) else None)
        if self.predictor is not None:  # what is under these indices is the last owner's
            self.predictor.forget(new & np.int64(INDEX_MASK))
        return new

    def drop_ids(self, ids: I64) -> None:
        """Give ids back that no block is kept or on its way under."""
        self._store.ids.drop_reference(ids)

    def check_ids(self, ids: I64) -> None:
        """Raise StaleBlockId when one of the ids was freed."""
        self._store.ids.check(ids)

    async def commit_ids(self, tokens: ArrayLike, ids: I64) -> None:
        """Write these blocks if they are not yet, name them by their tokens, make that durable."""
        await self.writes.settle()
        try:
            self._store.commit_prefix(tokens, ids)
        except ArgumentError:
            await self.writes.flush(ids & np.int64(INDEX_MASK))  # raises what keeps one from it
            self._store.commit_prefix(tokens, ids)
        if self._store.persistent:
            await self._store.flush()

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
                # What was closed goes; of others a device takes only so many.
                known = self._streams.items()
                self._streams = {k: s for k, s in known if not getattr(s, "closed", False)}
                self._streams[stream.handle] = stream
            return stream

    @contextmanager
    def scratch(self, nbytes: int, stream: Stream) -> Iterator[Buffer]:
        """Device memory for work enqueued on ``stream`` inside the block."""
        with self.lock:
            buffer = self._scratch.take(nbytes, stream)
        try:
            yield buffer
        finally:
            with self.lock:
                self._scratch.give_back_behind(buffer, stream)

    def scratch_of(self, stream: Stream, nbytes: int) -> Buffer:
        """Device memory for all small work of one stream, which runs in order. Under the lock."""
        key = stream, nbytes
        if key not in self._scratch_of:
            self._scratch_of[key] = self.device.allocate(nbytes)
            self._resources.append(self._scratch_of[key])
        return self._scratch_of[key]

    def free_at_close(self, memory: Closes) -> None:
        """Keep memory that work of a call that failed may use. Under the lock."""
        self._resources.append(memory)

    def release_after(
        self, event: Event, pool: GroupPool, slots: I32, *, scan: bool = True
    ) -> None:
        """Give leases of host slots back once ``event`` is done."""

        def release() -> None:
            with self.lock:
                pool.tier.release(slots, scan=scan)
            self.prefetcher.pump_soon()

        event.call_when_done(lambda: self.mailbox.post(release))

    def call_behind(self, event: Event, calls: list[Callable[[], None]]) -> None:
        """Call these under the lock, on the loop, once ``event`` is done."""

        def call() -> None:
            with self.lock:
                for each in calls:
                    each()
            self.prefetcher.pump_soon()

        event.call_when_done(lambda: self.mailbox.post(call))

    def release_behind(self, pool: GroupPool, event: Event | None, slots: I32) -> None:
        """Give leases that were held back once ``event`` is done, or now without one."""
        if event is None:
            self.release_now(pool, slots)
        else:
            self.release_after(event, pool, slots)

    def release_now(self, pool: GroupPool, slots: I32) -> None:
        """Give leases back of slots that no launch was told of. From any thread."""
        with self.lock:
            pool.tier.release(slots, scan=True)
        self.mailbox.post(self.prefetcher.pump_soon)

    async def release_sequence(self, sequence: Sequence) -> None:
        """Take a closed sequence's slots and ids back, after all work and I/O on them."""
        self.prefetcher.plan(sequence.number, [])
        await sequence.quiet()
        with self.lock:
            sequence.let_go()
        await self.retiring.settle(sequence.number)  # what it let go before is back too, then

        def free() -> None:
            if self.calibration is not None:
                self.calibration.ended(sequence.number)
            sequence.free_slots()
            self._sequences.pop(sequence.number, None)

        await self.retiring.now(sequence.ids, free)

    def _start(self) -> None:
        """Bind to the running loop."""
        self._loop = asyncio.get_running_loop()
        self.mailbox = Mailbox(self._loop)
        self.prefetcher = Prefetcher(self._store, self.lock, self.counters, self._starved)
        self.writes = WriteBehind(
            self._store, self.lock, self.counters, self.mailbox, self.prefetcher.pump_soon
        )
        self.retiring = Retiring(self, self._store, self._pools)
        watch(self, SwapState._in_child)

    def _starved(self) -> HsswapError | None:
        for pool in self._pools:  # what is held in any of them would look as if it came back
            pool.holders.ask_back()
        return self.writes.starved(self._pools)

    def _make_predictor(self, config: PredictorConfig | None) -> Predictor | None:
        if config is None:
            return None
        dims, ids = self.config.dims, self.config.capacity_blocks
        if config.kind == "projection":
            return ProjectionPredictor(config, dims, ids, self.device)
        return CodesPredictor(dims, ids, self.device)

    async def _launched(self) -> None:
        for sequence in list(self._sequences.values()):
            await sequence.launched()

    async def _quiet(self) -> None:
        """Wait for what sequences have enqueued: by its events, since the callers' streams may be
        gone by now.
        """
        for sequence in list(self._sequences.values()):
            await sequence.quiet()

    async def _calibrated(self) -> None:
        if self.calibration is not None:
            await self.calibration.settle()

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
    number = protocol_handle(handle)
    if number is not None:
        return number
    return handle if isinstance(handle, int) else None
