"""What every call of a sequence needs: its tables, who may call now, and the order of its work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from hsswap.arguments import checked_layer
from hsswap.driver.base import Event, Stream
from hsswap.errors import ArgumentError, ClosedError, DeviceError, OutOfBlocks
from hsswap.exact import LayerCache
from hsswap.io.ids import INDEX_MASK
from hsswap.loads import Blocks
from hsswap.loop import QUIET_ATTEMPTS, QUIET_PAUSE_S
from hsswap.reserving import Reservation
from hsswap.resident_table import ResidentTable
from hsswap.tiers import I64
from hsswap.topk import TopK, TopKLayer

if TYPE_CHECKING:
    from hsswap.captured import CapturedSteps
    from hsswap.swap import HighSpeedSwap

T = TypeVar("T")


class Ordered:
    """Work of one call. ``event``: one behind all of it, which then needs no other."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event: Event | None = None


class SequenceState:
    """Tables of a sequence and the guards around its calls; :class:`Sequence` has the calls."""

    def __init__(self, swap: HighSpeedSwap, number: int, top_k: TopK | None) -> None:
        self._swap = swap
        self.number = number
        self.top_k = top_k
        self.ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._indices: NDArray[np.int64] = np.empty(0, np.int64)
        self._room: NDArray[np.int64] = np.empty((2, 0), np.int64)  # of both, and of more
        self._layers = [
            LayerCache(swap.pool_of(layer), layer, active)
            for layer, active in enumerate(swap.take_active_slots())
        ]
        for cache in self._layers:
            pool = cache.pool
            cache.residents = ResidentTable(
                pool.tables, pool.holders, pool.tier, cache.group_layer,
                partial(swap.release_behind, pool),
            )  # fmt: skip
        self._top_k_layers: list[TopKLayer] = []
        self._last: tuple[Stream, Event] | None = None
        self._busy = ""
        self._broken: BaseException | None = None
        self._unrecorded: Stream | None = None
        self._behind: list[Callable[[], None]] = []
        """To be called, under the swap's lock, once what is enqueued has run: no event says when
        that is, since one was refused."""
        self._closed = False
        self._steps: CapturedSteps | None = None
        self._cut_to: int | None = None  # a truncate was interrupted at this length
        self._reservation = Reservation(swap, len(self._layers))
        if top_k is not None:
            try:
                self._make_caches(top_k)
            except BaseException:
                self.free_slots()
                raise

    @property
    def closed(self) -> bool:
        """Whether it was closed, by itself or with its swap."""
        return self._closed or self._swap.closed

    @property
    def length(self) -> int:
        """Tokens of the layer that is furthest."""
        return max(cache.length for cache in self._layers)

    def layer_length(self, layer: int) -> int:
        """Tokens appended to one layer."""
        return self._cache(layer).length

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._busy)

    async def launched(self) -> None:
        """Wait for the end of what the sequence has enqueued. For the swap."""
        if self._steps is not None:  # its launches are the engine's, on this stream
            self._unrecorded = self._steps.stream
        for _ in range(QUIET_ATTEMPTS):
            if self._unrecorded is None:
                break
            try:
                with suppress(ClosedError):
                    self._record_rest()
            except DeviceError:
                await asyncio.sleep(QUIET_PAUSE_S)
        if self._last is not None:
            with suppress(DeviceError):  # told to whoever awaited the result; the work has ended
                await self._last[1].wait()

    async def quiet(self) -> None:
        """Wait until no enqueued work uses the sequence's slots. For the swap."""
        await self.launched()
        with self._swap.lock:
            behind, self._behind = self._behind, []
            for give_back in behind:
                give_back()

    def let_go(self) -> None:
        """Hold no host slot any more. For the swap, under its lock."""
        for cache in self._layers:
            assert cache.residents is not None
            cache.residents.let_go()

    def free_slots(self) -> None:
        """Give every device slot back. For the swap, under its lock, once nothing uses them."""
        for cache in self._layers:
            held = cache.device_slot[cache.device_slot >= 0]
            resident = held[held != cache.active]
            cache.pool.give_back(cache.group_layer, cache.active, resident)
            assert cache.residents is not None
            for table in (cache.residents, cache.batch):
                if table is not None:
                    table.leave()
                    table.give_back(table.left)
        for cache, layer in zip(self._layers, self._top_k_layers, strict=False):
            cache.pool.slots.give_back(layer.close())
        self._top_k_layers = []

    def _make_caches(self, top_k: TopK) -> None:
        for cache in self._layers:
            pool = cache.pool
            count = top_k.cache_blocks(pool.block_size)
            slots = pool.slots.take(count, f"top-k with k={top_k.k} in layer {cache.layer}")
            try:
                layer = TopKLayer(
                    self._swap.device,
                    cache,
                    top_k,
                    slots,
                    self._swap.config.capacity_blocks,
                    learns=self._swap.calibration is not None,
                )
            except BaseException:
                pool.slots.give_back(slots)
                raise
            self._top_k_layers.append(layer)

    @contextmanager
    def _exclusive(self, what: str) -> Iterator[None]:
        with self._swap.lock:
            if self.closed:
                if self._swap.is_inherited:
                    self._swap.check_open()
                raise ClosedError("the sequence is closed; open a new one with swap.sequence()")
            if self._busy:
                raise ArgumentError(
                    f"{what} while {self._busy} of the same sequence is running; await it first"
                )
            if self._steps is not None:
                raise ArgumentError(
                    f"{what} while captured steps of the sequence are open; leave their block first"
                )
            if self._broken is not None:
                raise DeviceError(
                    f"an append of this sequence failed half-way ({self._broken}); close it"
                ) from self._broken
            if self._cut_to is not None and what != "truncate":
                raise ArgumentError(
                    f"{what} after a truncate to {self._cut_to} tokens was interrupted; call "
                    "truncate again, or close"
                )
            self._busy = what
        try:
            yield
        finally:
            self._busy = ""
            if self._swap.closed:
                self._swap.prefetcher.pump_soon()  # close() waits for calls to end

    def _cache(self, layer: int) -> LayerCache:
        return self._layers[checked_layer(layer, len(self._layers))]

    def _hold_ids(self, needed: int) -> None:
        """Have ids for the first ``needed`` blocks. Raises OutOfBlocks."""
        if needed > len(self.ids):
            with self._swap.lock:
                more = self._swap.allocate_ids(needed - len(self.ids), self.ids)
            self._append_ids(more)

    def _append_ids(self, more: I64) -> None:
        """Ids behind the others. Arrays handed out before stay as they are."""
        count, total = len(self.ids), len(self.ids) + len(more)
        if total > self._room.shape[1]:
            self._room = np.empty((2, max(64, 2 * total)), np.int64)
            self._room[:, :count] = self.ids, self._indices
        self._room[0, count:total] = more
        self._room[1, count:total] = more & np.int64(INDEX_MASK)
        self.ids, self._indices = self._room[0, :total], self._room[1, :total]

    def _set_ids(self, ids: I64) -> None:
        self.ids = ids
        self._indices = ids & np.int64(INDEX_MASK)
        self._room = np.empty((2, 0), np.int64)  # what was in the old one may still be read

    @contextmanager
    def _ordered(self, stream: Stream) -> Iterator[Ordered]:
        """Work of this sequence runs in call order, also when its calls change streams."""
        with suppress(ClosedError):
            self._record_rest()
        if self._last is not None and self._last[0] is not stream:
            stream.wait_for(self._last[1])
        work = Ordered()
        try:
            yield work
        finally:
            self._unrecorded = stream
            self._record_rest(work.event)

    def _follows(self, stream: Stream) -> bool:
        """Whether the sequence's last work is on this stream, with an event behind it."""
        return self._last is not None and self._last[0] is stream and self._unrecorded is None

    def _record_rest(self, event: Event | None = None) -> None:
        """An event behind what was enqueued last, if there is none yet: the queue may be full."""
        stream = self._unrecorded
        if stream is None:
            return
        try:
            self._last = (stream, event or stream.record())
        except ClosedError:
            self._unrecorded = None  # by its owner, who has waited for its work
            raise
        self._unrecorded = None
        if self._behind and self._last is not None:
            behind, self._behind = self._behind, []
            self._swap.call_behind(self._last[1], behind)

    async def _when_room(self, take: Callable[[], T]) -> T:
        """``take()``; if ids are too few, again when some come back that are on their way now."""
        coming = self._swap.retiring.on_their_way
        while True:
            try:
                return take()
            except OutOfBlocks:
                coming &= self._swap.retiring.on_their_way
                if not coming:
                    raise
            await self._swap.retiring.one_of(coming)
            self._swap.check_open()

    def _plan(self, ahead: list[Blocks]) -> None:
        """On the loop. A closed sequence plans no more: its ids may be another's by now."""
        if not self._closed:
            self._swap.prefetcher.plan(self.number, ahead)
