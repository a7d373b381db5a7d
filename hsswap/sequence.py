"""What an engine holds for one sequence: append K and V, attend, close."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from hsswap.appending import Rows, enqueue_rows
from hsswap.attending import AttendResult, Query, attend_exact, attend_top_k, try_attend_exact
from hsswap.driver.base import Event, Stream
from hsswap.driver.tensor import tensor_of
from hsswap.errors import ArgumentError, ClosedError, DeviceError
from hsswap.exact import LayerCache, blocks_ahead
from hsswap.prefetch import Blocks
from hsswap.tiers import I32, SlotState
from hsswap.topk import TopK, TopKLayer
from hsswap.writeback import Batch

if TYPE_CHECKING:
    from hsswap.swap import HighSpeedSwap

QUIET_ATTEMPTS, QUIET_PAUSE_S = 200, 0.05
"""How often closing a sequence asks a full stream for room for an event: 10 seconds."""


class Sequence:
    """One sequence of a swap. Get it from :meth:`HighSpeedSwap.sequence`.

    Calls of one sequence must not overlap (ArgumentError); different sequences are independent.
    Layers are used in order, each at its own length. Close it, or leave its ``async with``.
    """

    def __init__(self, swap: HighSpeedSwap, number: int, top_k: TopK | None) -> None:
        self._swap = swap
        self.number = number
        self.top_k = top_k
        self.ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._indices: NDArray[np.int64] = np.empty(0, np.int64)
        self._layers = [
            LayerCache(swap.pool_of(layer), layer, active)
            for layer, active in enumerate(swap.take_active_slots())
        ]
        self._top_k_layers: list[TopKLayer] = []
        self._last: tuple[Stream, Event] | None = None
        self._busy = ""
        self._broken: BaseException | None = None
        self._unrecorded: Stream | None = None
        self._closed = False
        if top_k is not None:
            try:
                self._make_caches(top_k)
            except BaseException:
                self.free_slots()
                raise

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

    async def append(
        self, layer: int, keys: object, values: object, *, stream: object | None = None
    ) -> None:
        """Add rows at the end of a layer; returns when the copy is enqueued.

        ``keys`` ``[rows, kv_heads, head_dim]`` and ``values`` ``[rows, kv_heads, value_dim]``,
        BF16 codes, any strides; they must stay unchanged until work enqueued later on the same
        stream is done (await an attend's ``done()``). Blocks that became full go to disk behind.

        Raises ArgumentError for wrong arrays, OutOfBlocks when the store is full: nothing was
        changed then. Raises OutOfSlots, or the error of a failed write, when no host slot can
        become free; rows that fill more than a tile go in parts, and :meth:`layer_length` says how
        many are in. DeviceError when a launch is refused half-way: the sequence can only be closed.
        """
        with self._exclusive("append"):
            raw_stream = self._swap.stream_of(stream)
            rows = self._check_rows(layer, keys, values)
            for part in rows.parts(self._swap.config.tile_blocks):
                filled = self._filled_by(part)
                slots = await self._swap.prefetcher.reserve(filled)
                with self._swap.lock:
                    self._swap.check_open()
                    self._enqueue_rows(part, filled, slots, raw_stream)

    def try_append(
        self, layer: int, keys: object, values: object, *, stream: object | None = None
    ) -> bool:
        """Like :meth:`append`, from any thread, but False in place of waiting for host slots."""
        with self._swap.lock, self._exclusive("append"):
            raw_stream = self._swap.stream_of(stream)
            rows = self._check_rows(layer, keys, values)
            filled = self._filled_by(rows)
            if len(filled.indices) and self._swap.prefetcher.crowded:
                return False
            if len(filled.indices) > self._swap.config.tile_blocks:
                return False
            slots = filled.pool.tier.take(
                filled.group_layer, filled.indices, SlotState.DIRTY, needed=False
            )
            if slots is None:
                return False
            self._enqueue_rows(rows, filled, slots, raw_stream)
            return True

    async def attend(
        self,
        layer: int,
        queries: object,
        out: object | None = None,
        *,
        exact: bool | None = None,
        stream: object | None = None,
    ) -> AttendResult:
        """Attention of the layer's last rows over all before them; returns when enqueued.

        ``queries`` ``[rows, q_heads, head_dim]`` BF16 codes belong to the layer's last ``rows``
        tokens, row i sees everything up to its own token. ``out`` ``[rows, q_heads, value_dim]``
        BF16 codes, made if None (host device). ``exact`` None: top-k for single rows of a top-k
        sequence, else exact. Both arrays must stay until the result is done.

        Raises ArgumentError for wrong arrays or more rows than tokens; BlockIOError (CorruptBlock)
        when a block cannot be read; OutOfSlots when the host tier is held by work that never ends.
        """
        with self._exclusive("attend"):
            query = self._check_query(layer, queries, out, stream)
            with self._ordered(query.stream):
                if self._uses_top_k(query, exact):
                    return await attend_top_k(self._swap, query, self._top_k_layers[layer])
                self._swap.prefetcher.plan(self.number, self._ahead(query))
                return await attend_exact(self._swap, query)

    def try_attend(
        self,
        layer: int,
        queries: object,
        out: object | None = None,
        *,
        exact: bool | None = None,
        stream: object | None = None,
    ) -> AttendResult | None:
        """Like :meth:`attend`, from any thread, without ever waiting.

        None when blocks must come from disk, or when top-k must see which, or when the launches
        would be more than :attr:`~hsswap.swap.MAX_TILES_AHEAD`, or when host slots are needed that
        others already queue for; then use :meth:`attend`.
        """
        with self._swap.lock, self._exclusive("attend"):
            query = self._check_query(layer, queries, out, stream)
            if self._uses_top_k(query, exact):
                return None
            with self._ordered(query.stream):
                result = try_attend_exact(self._swap, query)
            if result is not None:
                ahead = self._ahead(query)
                self._swap.mailbox.post(lambda: self._plan(ahead))
            return result

    async def close(self) -> None:
        """Give back slots and ids, after work and I/O in flight for them. Twice is fine."""
        with self._swap.lock:
            if self._closed:
                return
            if self._busy:
                raise ArgumentError(f"close() while {self._busy} of the same sequence is running")
            self._closed = True
        if self._swap.closed:
            return
        try:
            await self._swap.release_sequence(self)
        except BaseException:
            self._closed = False  # cancelled while waiting: nothing was given back yet
            raise

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._busy)

    async def quiet(self) -> None:
        """Wait until no enqueued work uses the sequence's slots. For the swap."""
        for _ in range(QUIET_ATTEMPTS):
            if self._unrecorded is None:
                break
            try:  # What was enqueued last is behind the last event: the queue was full, perhaps.
                self._last = (self._unrecorded, self._unrecorded.record())
                self._unrecorded = None
            except ClosedError:
                self._unrecorded = None  # by its owner, who has waited for its work
            except DeviceError:
                await asyncio.sleep(QUIET_PAUSE_S)
        if self._last is not None:
            with suppress(DeviceError):  # told to whoever awaited the result; the work has ended
                await self._last[1].wait()

    def free_slots(self) -> None:
        """Give every device slot back. For the swap, under its lock, once nothing uses them."""
        for cache in self._layers:
            held = cache.device_slot[cache.device_slot >= 0]
            resident = held[held != cache.active]
            cache.pool.give_back(cache.group_layer, cache.active, resident)
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
                    self._swap.device, cache, top_k, slots, self._swap.config.capacity_blocks
                )
            except BaseException:
                pool.slots.give_back(slots)
                raise
            self._top_k_layers.append(layer)

    @contextmanager
    def _exclusive(self, what: str) -> Iterator[None]:
        with self._swap.lock:
            if self.closed:
                raise ClosedError("the sequence is closed; open a new one with swap.sequence()")
            if self._busy:
                raise ArgumentError(
                    f"{what} while {self._busy} of the same sequence is running; await it first"
                )
            if self._broken is not None:
                raise DeviceError(
                    f"an append of this sequence failed half-way ({self._broken}); close it"
                ) from self._broken
            self._busy = what
        try:
            yield
        finally:
            self._busy = ""
            if self._swap.closed:
                self._swap.prefetcher.pump_soon()  # close() waits for calls to end

    def _cache(self, layer: int) -> LayerCache:
        if not isinstance(layer, int) or not 0 <= layer < len(self._layers):
            raise ArgumentError(f"layer is {layer!r}; it must be 0 to {len(self._layers) - 1}")
        return self._layers[layer]

    def _check_rows(self, layer: int, keys: object, values: object) -> Rows:
        """Arguments of an append. Takes ids if more are needed."""
        cache = self._cache(layer)
        group = cache.pool.group
        count = _leading(keys, "keys")
        rows = Rows(
            cache,
            tensor_of(keys, "bf16", (count, group.kv_heads, group.head_dim), "keys"),
            tensor_of(values, "bf16", (count, group.kv_heads, group.value_dim), "values"),
        )
        cache.pool.check_reachable(rows.keys, "keys")
        cache.pool.check_reachable(rows.values, "values")
        needed = self._swap.config.dims.blocks_of(cache.length + count)
        if needed > len(self.ids):
            with self._swap.lock:
                more = self._swap.allocate_ids(needed - len(self.ids), self.ids)
            self.ids = np.append(self.ids, more)
            self._indices = self.ids & np.int64(0xFFFFFFFF)
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
                if self.top_k is not None and len(slots):
                    swap.device.encode(
                        stream,
                        swap.predictor_of(cache.layer).encode_work(
                            cache.group_layer,
                            cache.pool.blocks,
                            slots,
                            filled.indices.astype(np.int32),
                        ),
                    )
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

    def _check_query(
        self, layer: int, queries: object, out: object | None, stream: object | None
    ) -> Query:
        cache = self._cache(layer)
        group = cache.pool.group
        count = _leading(queries, "queries")
        if count > cache.length:
            raise ArgumentError(
                f"{count} query rows for layer {layer}, which has {cache.length} tokens; append "
                "the rows' keys and values first"
            )
        swap = self._swap
        taken = tensor_of(queries, "bf16", (count, group.q_heads, group.head_dim), "queries")
        shape = (count, group.q_heads, group.value_dim)
        if out is None:
            out = cache.pool.new_output(shape)
        taken_out = tensor_of(out, "bf16", shape, "out", written=True)
        cache.pool.check_reachable(taken, "queries")
        cache.pool.check_reachable(taken_out, "out")
        return Query(cache, self._indices, taken, taken_out, out, swap.stream_of(stream))

    def _uses_top_k(self, query: Query, exact: bool | None) -> bool:
        if self.top_k is None or exact:
            return False
        single = query.queries.shape[0] == 1
        if exact is False and not single:
            raise ArgumentError("top-k attends one query row at a time; pass exact=True for more")
        return single and self._top_k_layers[query.cache.layer].applies()

    def _ahead(self, query: Query) -> list[Blocks]:
        """What the rest of this attend and the next layer's will read, in that order."""
        cache = query.cache
        rows = query.queries.shape[0]
        with self._swap.lock:
            # The first tile's blocks are asked for as needed, at once.
            start = self._swap.config.tile_blocks
            ahead = [blocks_ahead(cache, self._indices, rows, start)]
            if self._swap.config.look_ahead and self.top_k is None:
                following = self._layers[(cache.layer + 1) % len(self._layers)]
                ahead.append(blocks_ahead(following, self._indices, rows))
        return [blocks for blocks in ahead if len(blocks.indices)]

    @contextmanager
    def _ordered(self, stream: Stream) -> Iterator[None]:
        """Work of this sequence runs in call order, also when its calls change streams."""
        if self._last is not None and self._last[0] is not stream:
            stream.wait_for(self._last[1])
        try:
            yield
        finally:
            self._unrecorded = stream
            self._last = (stream, stream.record())
            self._unrecorded = None

    def _plan(self, ahead: list[Blocks]) -> None:
        """On the loop. A closed sequence plans no more: its ids may be another's by now."""
        if not self._closed:
            self._swap.prefetcher.plan(self.number, ahead)


def _leading(array: object, what: str) -> int:
    """The number of rows of an argument. Raises ArgumentError when it has none."""
    shape = getattr(array, "shape", None)
    if not isinstance(shape, tuple):
        raise ArgumentError(
            f"{what} is a {type(array).__name__}; give an array [rows, heads, dim] of BF16 codes"
        )
    if len(shape) != 3 or shape[0] < 1:
        raise ArgumentError(f"{what} has shape {shape}; give [rows, heads, dim] with 1 row or more")
    return int(shape[0])
