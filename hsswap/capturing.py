"""The calls of a sequence that open captured steps, and take the sequence back from them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hsswap.arguments import checked_length
from hsswap.captured import MOST_ROWS, CapturedSteps
from hsswap.captured_layer import CapturedLayer, Handover, Held, TableMemory, hand_over
from hsswap.captured_top_k import CapturedTopK
from hsswap.coding import code_blocks, enqueue_codes
from hsswap.driver.base import Stream
from hsswap.driver.operations import GatherWork, ScatterWork
from hsswap.errors import ArgumentError, OutOfSlots
from hsswap.exact import LayerCache
from hsswap.io.waiting import to_the_end
from hsswap.loads import Blocks
from hsswap.loop import in_thread, insist
from hsswap.pools import GroupPool, Promise
from hsswap.retiring import Resident
from hsswap.reusing import Reusing
from hsswap.tiers import I32
from hsswap.writeback import Batch

MOST_TOKENS = (1 << 31) - 1
"""What a counter on the device can hold; a store with room for fewer raises OutOfBlocks."""


@dataclass(eq=False, slots=True)
class _Holding:
    """What captured steps hold, while it comes together: leased host slots of each layer by block
    (-1: on the device), and device slots for blocks to come.
    """

    leased: list[I32] = field(default_factory=list)
    spare: list[I32] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Before:
    """What was reserved when captured steps began: ids, and host slots of each layer."""

    ids: int
    slots: list[int]


class Capturing(Reusing):
    """Captured steps of :class:`hsswap.Sequence`."""

    @asynccontextmanager
    async def captured(
        self, tokens: int, *, rows: int = 1, stream: object | None = None
    ) -> AsyncIterator[CapturedSteps]:
        """Steps for up to ``tokens`` more tokens, that an engine can capture in a graph.

        Brings every block that is in no device slot into the host tier and keeps it there, and
        takes ids and slots for the tokens. ``rows``: most query rows of a step, 1 to 16. Inside the
        block the sequence can be used through what this gives only. Before its end call
        :meth:`~hsswap.captured.CapturedSteps.finish` with the length the steps came to; without,
        all of them are forgotten. ``stream``: on it the steps run, or it follows them. After the
        block launch no graph that was captured in it: on a GPU, where nothing can refuse an
        engine's own graph, it would read memory that has been given back.

        Raises ArgumentError when layers differ in length, OutOfBlocks, OutOfSlots with the number
        of host slots needed, BlockIOError for a block that cannot be read: nothing is held then.
        """
        self._swap.check_loop()
        raw_stream = self._swap.stream_of(stream)
        with self._exclusive("captured"):
            tokens = checked_length(tokens, MOST_TOKENS, what="tokens")
            rows = checked_length(rows, MOST_ROWS, what="rows", least=1)
            before = _Before(len(self.ids), self._reservation.counts())
            with self._all_or_nothing():
                steps, held = await self._open_steps(tokens, rows, raw_stream)
            self._steps = steps
        try:
            yield steps
        finally:
            steps.end()
            await insist(lambda: self._take_back(steps, held, before, raw_stream))

    async def _open_steps(
        self, tokens: int, rows: int, stream: Stream
    ) -> tuple[CapturedSteps, list[Held]]:
        swap = self._swap
        lengths = {cache.length for cache in self._layers}
        if len(lengths) > 1:
            raise ArgumentError(
                f"captured steps while layers have {min(lengths)} to {max(lengths)} tokens; append "
                "to all"
            )
        size = swap.config.dims.block_size
        first, end = lengths.pop() // size, swap.config.dims.blocks_of(self.length + tokens)
        end = max(end, first + 1)
        await self._reserve_until([end * size] * len(self._layers))
        holding = _Holding()
        try:
            await self._hold_full_blocks(holding, first)
            with swap.lock:
                for cache in self._layers:
                    holding.spare.append(_spare_slots(cache, end - first - 1))
                held = [
                    Held(leased, spare, self._reservation.held(layer, end - first))
                    for layer, (leased, spare) in enumerate(
                        zip(holding.leased, holding.spare, strict=True)
                    )
                ]
            steps = await self._prepare(held, tokens, rows, stream)
        except BaseException:
            with swap.lock:
                self._let_go_of(holding)
            raise
        return steps, held

    async def _prepare(
        self, held: list[Held], tokens: int, rows: int, stream: Stream
    ) -> CapturedSteps:
        """Tables on the device, for what is held."""
        swap, memory = self._swap, TableMemory()
        layers: list[CapturedLayer] = []
        for cache, mine in zip(self._layers, held, strict=True):
            ranked = self._top_k_layers[cache.layer] if self.top_k is not None else None
            if ranked is None or not ranked.applies():
                layers.append(CapturedLayer(swap.device, cache, mine, memory))
                continue
            indices = self._indices[: mine.first]
            with self._ordered(stream):
                await code_blocks(swap, stream, cache, indices)
            assert swap.predictor is not None
            layers.append(
                CapturedTopK(swap.device, cache, mine, memory, ranked, swap.predictor, indices)
            )
        steps = CapturedSteps(swap, layers, memory, tokens, rows, stream, self._write_filled)
        try:
            await in_thread(steps.prepare)
            with swap.lock:
                swap.check_open()
                with self._ordered(stream):
                    steps.begin()
            assert self._last is not None
            await self._last[1].wait()
        except BaseException:
            await to_the_end(lambda: insist(self.quiet), lambda: in_thread(steps.free))
            raise
        return steps

    async def _hold_full_blocks(self, holding: _Holding, first: int) -> None:
        """Lease, and pin, host slots of every block that is in no device slot."""
        swap = self._swap
        missing = [np.flatnonzero(cache.device_slot[:first] < 0) for cache in self._layers]
        wanted: dict[GroupPool, int] = {}
        for cache, blocks in zip(self._layers, missing, strict=True):
            wanted[cache.pool] = wanted.get(cache.pool, 0) + len(blocks)
        with swap.lock:
            for pool, count in wanted.items():
                most = pool.spare_host_slots(swap.config.tile_blocks)
                if count > most:
                    raise OutOfSlots(
                        f"captured steps need {count} host slots for the sequence's blocks and "
                        f"{max(0, most)} can be held; raise host_slots by {count - max(0, most)}"
                    )
            promise = Promise(wanted)
        try:
            for cache, blocks in zip(self._layers, missing, strict=True):
                leased = np.full(first, -1, np.int32)
                holding.leased.append(leased)
                await self._hold_blocks(cache, blocks, leased, promise)
        finally:
            with swap.lock:
                promise.end()

    async def _hold_blocks(
        self, cache: LayerCache, blocks: NDArray[np.intp], leased: I32, promise: Promise
    ) -> None:
        """Those of one layer, into ``leased``."""
        swap, step = self._swap, self._swap.config.tile_blocks
        for start in range(0, len(blocks), step):
            part = blocks[start : start + step]
            asked = Blocks(cache.pool, cache.layer, self._indices[part])
            loaded = await swap.prefetcher.load(asked)
            with swap.lock:
                leased[part] = loaded.slots
                cache.pool.tier.pin(loaded.slots)
                promise.keep(cache.pool, len(part))

    def _write_filled(self, steps: CapturedSteps, filled: int) -> None:
        """Write behind what is full and final: the first ``filled`` of the blocks that the steps
        fill, but those written before. Under the swap's lock.
        """
        swap, start = self._swap, steps.written
        with self._ordered(steps.stream):
            for captured in steps.layers:
                if not start:
                    self._copy_first(
                        *(steps.stream, captured.cache, captured.held, captured.cache.active)
                    )
        assert self._last is not None
        event = self._last[1]
        for captured in steps.layers:
            cache, pool, first = captured.cache, captured.cache.pool, captured.held.first
            slots = self._reservation.take(cache.layer, pool, filled - start)
            # Launches may read them in place.
            pool.tier.lease(slots)
            pool.tier.pin(slots)
            blocks = Blocks(pool, cache.layer, self._indices[first + start : first + filled])
            swap.writes.write_after(event, Batch(blocks, slots, keep=True, scan=self.top_k is None))

    def _let_go_of(self, holding: _Holding) -> None:
        """Give back what was held for steps that never ran. Under the swap's lock."""
        for cache, leased in zip(self._layers, holding.leased, strict=False):
            slots = leased[leased >= 0]
            cache.pool.tier.unpin(slots)
            self._swap.release_now(cache.pool, slots)
        for cache, spare in zip(self._layers, holding.spare, strict=False):
            cache.pool.give_back_resident(cache.group_layer, spare)

    async def _take_back(
        self, steps: CapturedSteps, held: list[Held], before: _Before, stream: Stream
    ) -> None:
        """Go on where the steps ended; then free what they used."""
        swap = self._swap
        with swap.lock:
            if swap.closed and not self._busy:  # with it goes all of this
                return
            self._busy = "the end of captured steps"  # a swap that closes from now on waits for it
        try:
            with swap.lock:
                if self._steps is not None:
                    self._hand_over(steps, held, before, stream)
        finally:
            await self.quiet()
            await in_thread(steps.free)
            self._busy = ""
            swap.prefetcher.pump_soon()

    def _hand_over(
        self, steps: CapturedSteps, held: list[Held], before: _Before, stream: Stream
    ) -> None:
        swap, began_at = self._swap, self.length
        length, written = steps.final_length, steps.written
        self._steps = None
        overs: list[Handover] = []
        try:
            with self._ordered(stream):
                for cache, mine in zip(self._layers, held, strict=True):
                    active = cache.active
                    over = hand_over(cache, mine, length, may_stay=self.top_k is None)
                    overs.append(over)
                    if over.filled and not written:
                        self._copy_first(stream, cache, mine, active)
                    self._enqueue_over(cache, mine, over, stream)
        except BaseException as error:
            self._broken = error
            self._give_up(held, overs, written)
            raise
        assert self._last is not None
        event = self._last[1]
        unused: list[Resident] = []
        for cache, mine, over in zip(self._layers, held, overs, strict=True):
            pool = cache.pool
            slots = self._reservation.take(cache.layer, pool, over.filled - written)
            indices = self._indices[mine.first + written : mine.first + over.filled]
            batch = Batch(
                Blocks(pool, cache.layer, indices), slots, keep=True, scan=self.top_k is None
            )
            for keep in (True, False):
                part = np.flatnonzero(over.stays[written:] != keep)
                if len(part):
                    swap.writes.write_after(event, replace(batch.part(part), keep=keep))
            leased = mine.leased_with(written)
            pool.tier.unpin(leased)
            if len(leased):
                swap.release_after(event, pool, leased, scan=self.top_k is None)
            unused.append(Resident(pool, cache.group_layer, over.unused))
            if self.top_k is not None:
                self._top_k_layers[cache.layer].resume(length - began_at)
        left = [max(0, c - o.filled) for c, o in zip(before.slots, overs, strict=True)]
        swap.call_behind(event, self._reservation.detach(left))
        kept = max(before.ids, swap.config.dims.blocks_of(length))
        ids = self.ids[kept:]
        self._set_ids(self.ids[:kept])
        swap.retiring.later(self.number, ids, unused, event)
        swap.counters.appended_tokens += length - began_at

    def _give_up(self, held: list[Held], overs: list[Handover], written: int) -> None:
        """A hand-over failed: what it would have given back goes once nothing uses it any more.

        ``overs``: of the layers whose tables were moved. Under the swap's lock.
        """
        for cache, mine in zip(self._layers, held, strict=True):
            pool, leased = cache.pool, mine.leased_with(written)
            unused = overs[cache.layer].unused if cache.layer < len(overs) else mine.spare
            pool.tier.unpin(leased)
            self._behind.append(partial(self._swap.release_now, pool, leased))
            self._behind.append(Resident(pool, cache.group_layer, unused).give_back)

    def _copy_first(self, stream: Stream, cache: LayerCache, held: Held, active: int) -> None:
        """Launch the copy of the first block that was filled into its host slot: its first rows are
        in the device slot only.
        """
        pool, moved = cache.pool, _units_of(cache.pool, active, int(held.reserved[0]))
        self._swap.device.scatter(stream, ScatterWork(pool.blocks, pool.units, *moved))

    def _enqueue_over(self, cache: LayerCache, held: Held, over: Handover, stream: Stream) -> None:
        """Launch the copy back that a hand-over needs, and the codes of full blocks."""
        swap, pool = self._swap, cache.pool
        if over.restore is not None:
            slot = int(held.reserved[over.restore - held.first])
            back = _units_of(pool, cache.active, slot)
            swap.device.gather(stream, GatherWork(pool.blocks, pool.units, *back))
        if self.top_k is not None and over.filled:
            indices = self._indices[held.first : held.first + over.filled]
            slots = held.reserved[: over.filled]
            enqueue_codes(swap, stream, Blocks(pool, cache.layer, indices), slots)


def _units_of(pool: GroupPool, slot: int, host_slot: int) -> tuple[I32, I32, I32]:
    """A block between a host slot and a device slot, as copies take it."""
    heads = np.arange(pool.group.kv_heads, dtype=np.int32)
    units = pool.slots.units(np.array([slot], np.int32)).ravel()
    return np.full(len(heads), host_slot, np.int32), heads, units


def _spare_slots(cache: LayerCache, most: int) -> I32:
    """Device slots for blocks behind the one being filled, as many as the layer may take."""
    slots: list[int] = []
    while len(slots) < most and (slot := cache.pool.take_resident(cache.group_layer)) is not None:
        slots.append(slot)
    return np.array(slots, np.int32)
