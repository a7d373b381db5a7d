"""What an engine holds for one sequence: append K and V, attend, close."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import TracebackType
from typing import Self

import numpy as np

from hsswap.appending import Rows, enqueue_rows
from hsswap.arguments import Given, checked_choice, checked_query, checked_rows
from hsswap.attending import AttendResult, Query, attend_exact, attend_top_k, try_attend_exact
from hsswap.coding import enqueue_codes
from hsswap.driver.base import Stream
from hsswap.errors import ArgumentError, OutOfBlocks
from hsswap.exact import blocks_ahead
from hsswap.loads import Blocks
from hsswap.looking_ahead import LookingAhead
from hsswap.tiers import I32, SlotState
from hsswap.writeback import Batch

LAYERS_AHEAD = 3
"""Layers whose blocks are read while one is attended, if they are few (a tile together): with those
of one layer alone a drive runs out of work while the interpreter launches.
"""


class Sequence(LookingAhead):
    """One sequence of a swap. Get it from :meth:`HighSpeedSwap.sequence`.

    Calls of one sequence must not overlap (ArgumentError); different sequences are independent.
    Layers are used in order, each at its own length. Close it, or leave its ``async with``.

    ``stream`` of a call: what its work is enqueued on, and behind; a raw handle as an int (torch:
    ``stream.cuda_stream``) or an object with ``__cuda_stream__``. None: the swap's own, which waits
    for no other: what is given must be there by then, and what comes out is waited for. Calls on
    several streams follow each other in order.
    """

    def __repr__(self) -> str:
        return f"<Sequence {self.number} length={self.length} blocks={len(self.ids)}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def append(
        self, layer: int, keys: object, values: object, *, stream: object | None = None
    ) -> None:
        """Add rows at the end of a layer; returns when the copy is enqueued.

        ``keys`` ``[rows, kv_heads, head_dim]`` and ``values`` ``[rows, kv_heads, value_dim]``,
        BF16 codes (or what the layer group's dtype is), any strides; they must stay unchanged until
        work enqueued later on the same stream is done (await an attend's ``done()``). Where a group
        keeps E4M3 they are rounded, or both are :class:`~hsswap.E4M3Rows`. Blocks that became full
        go to disk behind.

        Raises ArgumentError for wrong arrays, OutOfBlocks when the store is full: nothing was
        changed then. Raises OutOfSlots, or the error of a failed write, when no host slot can
        become free; rows that fill more than a tile go in parts, and :meth:`layer_length` says how
        many are in. DeviceError when a launch is refused half-way: the sequence can only be closed.
        """
        self._swap.check_loop()
        with self._exclusive("append"):
            raw_stream = self._swap.stream_of(stream)
            rows = await self._when_room(lambda: self._check_rows(layer, keys, values))
            for part in rows.parts(self._swap.config.tile_blocks):
                filled = self._filled_by(part)
                new = self._reservation.missing(layer, len(filled.indices))
                more = await self._swap.prefetcher.reserve(filled.last(new))
                with self._swap.lock:
                    self._swap.check_open()
                    held = self._reservation.take(layer, filled.pool, len(filled.indices))
                    self._enqueue_rows(part, filled, np.append(held, more), raw_stream)

    def try_append(
        self, layer: int, keys: object, values: object, *, stream: object | None = None
    ) -> bool:
        """Like :meth:`append`, from any thread, but False in place of waiting for slots and ids."""
        with self._swap.lock, self._exclusive("append"):
            raw_stream = self._swap.stream_of(stream)
            try:
                rows = self._check_rows(layer, keys, values)
            except OutOfBlocks:
                if self._swap.retiring.on_their_way:
                    return False  # ids that a truncate let go are on their way back
                raise
            filled = self._filled_by(rows)
            new = self._reservation.missing(layer, len(filled.indices))
            if new and self._swap.prefetcher.crowded:
                return False
            if new > self._swap.config.tile_blocks:
                return False
            more = filled.pool.tier.take(
                filled.group_layer, filled.last(new).indices, SlotState.DIRTY, needed=False
            )
            if more is None:
                return False
            held = self._reservation.take(layer, filled.pool, len(filled.indices))
            self._enqueue_rows(rows, filled, np.append(held, more), raw_stream)
            return True

    async def attend(
        self,
        layer: int,
        queries: object,
        out: object | None = None,
        *,
        exact: bool | None = None,
        lse_out: object | None = None,
        sinks: object | None = None,
        stream: object | None = None,
    ) -> AttendResult:
        """Attention of the layer's last rows over all before them; returns when enqueued.

        ``queries`` ``[rows, q_heads, head_dim]`` BF16 codes belong to the layer's last ``rows``
        tokens, row i sees everything up to its own token. ``out`` ``[rows, q_heads, value_dim]``
        BF16 codes, made if None (host device). ``exact`` None: top-k for single rows of a top-k
        sequence, else exact. ``lse_out`` ``[rows, q_heads]`` float32, if given, receives the
        logsumexp of each row's logits. ``sinks`` ``[q_heads]`` float32: a logit of each head that
        takes part in the softmax and has no value. All arrays must stay until the result is done.

        Raises ArgumentError for wrong arrays or more rows than tokens; BlockIOError (CorruptBlock)
        when a block cannot be read; OutOfSlots when the host tier is held by work that never ends.
        """
        self._swap.check_loop()
        # A turn for whatever else is due: where all blocks are there, nothing below waits, and a
        # token's layers would hold the loop, and keep the drive waiting, for milliseconds.
        await asyncio.sleep(0)
        given, exact = Given(queries, out, lse_out, sinks), checked_choice(exact, "exact")
        with self._exclusive("attend"):
            with self._swap.lock:
                repeated = self._attend_repeated(layer, given, stream)
            if repeated is not None:
                return repeated
            query = self._check_query(layer, given, stream)
            chooses = self._uses_top_k(query, exact)
            with self._ordered(query.stream) as work:
                self._show(query)
                if chooses:
                    result = await attend_top_k(self._swap, query, self._top_k_layers[layer])
                else:
                    ahead = self._ahead(query)
                    self._swap.prefetcher.plan(self.number, ahead)
                    if ahead:  # beginning to read takes as long again as what follows
                        await asyncio.sleep(0)
                    result = await attend_exact(self._swap, query)
                work.event = result.event
                return result

    def try_attend(
        self,
        layer: int,
        queries: object,
        out: object | None = None,
        *,
        exact: bool | None = None,
        lse_out: object | None = None,
        sinks: object | None = None,
        stream: object | None = None,
    ) -> AttendResult | None:
        """Like :meth:`attend`, from any thread, without ever waiting.

        None when blocks must come from disk, or when top-k must see which, or when the launches
        would be more than :attr:`~hsswap.swap_state.MAX_TILES_AHEAD`, or when host slots are needed
        that others already queue for; then use :meth:`attend`.
        """
        given, exact = Given(queries, out, lse_out, sinks), checked_choice(exact, "exact")
        with self._swap.lock, self._exclusive("attend"):
            repeated = self._attend_repeated(layer, given, stream)
            if repeated is not None:
                return repeated
            query = self._check_query(layer, given, stream)
            if self._uses_top_k(query, exact):
                return None
            with self._ordered(query.stream) as work:
                self._show(query)
                result = try_attend_exact(self._swap, query)
                work.event = None if result is None else result.event
            if result is not None:
                ahead = self._ahead(query)
                if ahead or self._swap.prefetcher.has_plan(self.number):
                    self._swap.mailbox.post(lambda: self._plan(ahead))
            return result

    async def close(self) -> None:
        """Give back slots and ids, after work and I/O in flight for them. Twice is fine."""
        self._swap.check_loop()
        with self._swap.lock:
            if self._closed:
                return
            if self._steps is not None and not self._swap.closed:
                raise ArgumentError(
                    "close() while captured steps of the sequence are open; leave their block first"
                )
            if self._busy:
                raise ArgumentError(f"close() while {self._busy} of the same sequence is running")
            self._closed = True
            if self._swap.closed:
                return
            # Behind what captured steps that failed at their end may still fill.
            self._behind.append(self._reservation.abandon)
        try:
            await self._swap.release_sequence(self)
        except BaseException:
            self._closed = False  # cancelled while waiting: nothing was given back yet
            raise

    def _check_rows(self, layer: int, keys: object, values: object) -> Rows:
        """Arguments of an append. Takes ids if more are needed."""
        rows = checked_rows(self._cache(layer), keys, values)
        self._hold_ids(self._swap.config.dims.blocks_of(rows.cache.length + rows.count))
        return rows

    def _filled_by(self, rows: Rows) -> Blocks:
        """The blocks that the rows fill."""
        first = rows.first_block
        indices = self._indices[first : first + rows.filled]
        return Blocks(rows.cache.pool, rows.cache.layer, indices)

    def _enqueue_rows(self, rows: Rows, filled: Blocks, slots: I32, stream: Stream) -> None:
        swap, cache = self._swap, rows.cache
        batch = Batch(filled, slots, keep=True, scan=self.top_k is None)
        try:
            with self._ordered(stream):
                stays = enqueue_rows(swap.device, stream, rows, slots, may_stay=self.top_k is None)
                if self.top_k is not None:
                    enqueue_codes(swap, stream, filled, slots)
                    if swap.calibration is not None:
                        first = cache.length - rows.count
                        swap.calibration.keys(self.number, first, rows, stream)
        except BaseException as error:  # some launches may be under way, others never will be
            self._broken = error
            if len(slots):
                swap.writes.refuse(batch, error)
            raise
        assert self._last is not None
        for keep in (True, False):
            part = np.flatnonzero(stays != keep)
            if len(part):
                swap.writes.write_after(self._last[1], replace(batch.part(part), keep=keep))
        swap.counters.appended_tokens += rows.count

    def _check_query(self, layer: int, given: Given, stream: object | None) -> Query:
        raw_stream = self._swap.stream_of(stream)
        return checked_query(self._cache(layer), self._indices, given, raw_stream)

    def _attend_repeated(
        self, layer: int, given: Given, stream: object | None
    ) -> AttendResult | None:
        """The layer's last call once more, if this one is like it. Under the lock."""
        cache, swap = self._cache(layer), self._swap
        known = cache.repeated
        if known is None or self.top_k is not None or swap.prefetcher.has_plan(self.number):
            return None
        table, following = cache.residents, self._layers[(layer + 1) % len(self._layers)]
        if table is None or not known.suits(cache, self._indices):
            return None
        ahead = following.settled(self._indices)
        if ahead is None or not ahead.is_whole:
            return None
        taken = known.taken(cache, given)
        if taken is None or not known.is_on(swap, stream) or not self._follows(known.stream):
            return None
        self._unrecorded = known.stream
        event = known.again(*taken, cache.length)
        self._last, self._unrecorded = (known.stream, event), None
        table.reader = event
        swap.counters.attends += 1
        swap.counters.device_hits += known.blocks - table.missing
        swap.counters.host_hits += table.missing
        nothing = np.zeros(cache.pool.group.kv_heads, np.float32)
        return AttendResult(given.out, event, nothing)

    def _show(self, query: Query) -> None:
        """Let calibration see what a top-k sequence asks; outputs do not depend on it."""
        swap, cache = self._swap, query.cache
        if self.top_k is None or swap.calibration is None:
            return
        with swap.lock:
            swap.check_open()
            first = cache.length - query.queries.shape[0]
            swap.calibration.queries(self.number, cache.layer, first, query.queries, query.stream)

    def _uses_top_k(self, query: Query, exact: bool | None) -> bool:
        if self.top_k is None or exact:
            return False
        single = query.queries.shape[0] == 1
        if exact is False and not single:
            raise ArgumentError("top-k attends one query row at a time; pass exact=True for more")
        return single and self._top_k_layers[query.cache.layer].applies()

    def _ahead(self, query: Query) -> list[Blocks]:
        """What the rest of this attend and the next layers' will read, in that order."""
        layer, rows = query.cache.layer, query.queries.shape[0]
        room, layers = self._swap.config.tile_blocks, len(self._layers)
        with self._swap.lock:
            # The first tile's blocks are asked for as needed, at once.
            ahead = [blocks_ahead(query.cache, self._indices, rows, room)]
            if self._swap.config.look_ahead and self.top_k is None:
                for step in range(1, min(LAYERS_AHEAD, max(1, layers - 1)) + 1):
                    following = self._layers[(layer + step) % layers]
                    ahead.append(blocks_ahead(following, self._indices, rows))
                    room -= len(ahead[-1].indices)
                    if room <= 0:
                        break
        return [blocks for blocks in ahead if len(blocks.indices)]
