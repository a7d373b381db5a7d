"""Attention of many sequences in one call: one launch where everything they need is in memory.

Rows of equal count lie side by side in the caller's arrays, so sequences that adjoin there are one
strided batch. Neither the batch nor who is in it changes a bit (promise 1).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from collections.abc import Sequence as Several
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hsswap.arguments import Given, checked_choice, checked_layer, checked_query, leading
from hsswap.attending import (
    AttendResult,
    Query,
    attend_exact,
    attend_top_k,
    give_back_room,
)
from hsswap.batch_table import BatchTable, Row
from hsswap.driver.operations import AttendWork, FinalizeWork
from hsswap.driver.tensor import Tensor, tensor_of
from hsswap.errors import ArgumentError, shown
from hsswap.exact import NO_SLOTS, NOTHING
from hsswap.loop import insist
from hsswap.named_calls import NamedCalls
from hsswap.pools import GroupPool, state_bytes, state_in
from hsswap.resident_table import ResidentTable
from hsswap.ring import tile_tokens_for
from hsswap.tiers import I32

if TYPE_CHECKING:
    from hsswap.sequence import Sequence
    from hsswap.swap_state import SwapState


@dataclass(frozen=True, slots=True)
class Ready:
    """An exact query of which every block is in memory, from block ``start``, of a span, to
    ``stop``.

    ``table``: the sequence's own table, where it is whole. Else the blocks at ``missing`` behind
    ``start`` are in ``host_slots``, which nobody holds for it, and the others in device slots.
    """

    query: Query
    start: int
    stop: int
    span_tokens: int
    missing: NDArray[np.intp]
    host_slots: I32
    table: ResidentTable | None = None

    @property
    def kind(self) -> tuple[int, ...]:
        """What must be equal in one launch."""
        return self.query.queries.shape[0], self.start, self.span_tokens

    @property
    def in_host(self) -> int:
        """Blocks that are read in host slots."""
        return len(self.host_slots) if self.table is None else self.table.missing

    def unit_slots(self) -> I32:
        """Entries ``[H, stop - start]`` of its blocks."""
        if self.table is not None:
            return self.table.unit_slots(self.start, self.stop)
        cache = self.query.cache
        slots = cache.device_slot[self.start : self.stop]
        table: I32 = cache.pool.slots.mixed_table(slots, self.missing, self.host_slots)[0]
        return table


def row_counts(rows: ArrayLike | None, sequences: int, total: int) -> list[int]:
    """How many query rows each sequence has. Raises ArgumentError when they do not add up."""
    if rows is None:
        if not sequences or total % sequences:
            raise ArgumentError(
                f"{total} query rows for {sequences} sequences; give rows=[...], how many each has"
            )
        return [total // sequences] * sequences
    try:
        counts = np.asarray(rows)
    except ValueError as error:
        raise ArgumentError(f"rows is {shown(rows)}; give one number for each sequence") from error
    fits = counts.ndim == 1 and len(counts) == sequences and counts.dtype.kind in "iu"
    if not fits or (counts < 1).any() or int(counts.sum()) != total:
        raise ArgumentError(
            f"rows is {shown(rows)}; give one number of 1 or more for each of {sequences} "
            f"sequences, {total} in all"
        )
    return [int(count) for count in counts]


def find_ready(swap: SwapState, query: Query) -> Ready | None:
    """What a launch needs if nothing must be read or gathered first. Under the swap's lock."""
    cache, pool, rows = query.cache, query.cache.pool, query.queries.shape[0]
    span = swap.device.span_tokens(cache.length)
    tile_tokens = tile_tokens_for(span, swap.config.tile_tokens)
    size = pool.block_size
    start = cache.first_visible(rows) // tile_tokens * tile_tokens // size
    stop = -(-cache.length // size)
    in_place = swap.device.reads_in_place(rows)
    table = cache.settled(query.indices)
    if table is not None and in_place:
        # A window needs few of its blocks, and holds none.
        can_hold = pool.group.window is None and not swap.prefetcher.crowded
        if table.is_whole or (can_hold and table.hold(query.indices)):
            return Ready(query, start, stop, span, NOTHING, NO_SLOTS, table)
    missing = np.flatnonzero(cache.device_slot[start:stop] < 0)
    if not len(missing):
        return Ready(query, start, stop, span, missing, NO_SLOTS)
    if swap.prefetcher.crowded or not in_place:
        return None
    slots = pool.tier.lookup(cache.group_layer, query.indices[start + missing])
    if (slots < 0).any() or not pool.tier.is_loaded(slots):
        return None
    return Ready(query, start, stop, span, missing, slots)


def enqueue_ready(swap: SwapState, batch: list[Ready]) -> list[AttendResult]:
    """One launch for queries of one kind that adjoin in memory. Under the swap's lock."""
    first = batch[0].query
    stream, pool = first.stream, first.cache.pool
    rows, count = first.queries.shape[0], len(batch)
    kept = _kept_table(swap, batch)
    leasing = [ready for ready in batch if len(ready.host_slots)]
    for ready in leasing:  # one by one: forks of one sequence lease the same slots
        pool.tier.lease(ready.host_slots)
    released = False
    try:
        with swap.scratch(count * state_bytes(pool.group, rows), stream) as buffer:
            state = state_in(buffer, pool.group, rows, sequences=count)
            lse = None if first.lse is None else _stacked(first.lse, count)
            out = _stacked(first.out, count)
            work = AttendWork(
                queries=_stacked(first.queries, count),
                lengths=np.array([ready.query.cache.length for ready in batch], np.int64),
                units=pool.units,
                slots=_table_of(batch) if kept is None else kept,
                first_block=batch[0].start,
                positions=None,
                span_blocks=batch[0].span_tokens // pool.block_size,
                state=state,
                begin=True,
                blocks=pool.blocks,
                end=FinalizeWork(state, out, lse, sinks=first.sinks),
            )
            swap.device.attend(stream, work)
            event = stream.record()
            released = True
            for ready in batch:
                if ready.table is not None:
                    ready.table.reader = event
            for ready in leasing:
                swap.release_after(event, pool, ready.host_slots)
    finally:
        if not released:
            for ready in leasing:
                swap.release_now(pool, ready.host_slots)
    in_host = sum(ready.in_host for ready in batch)
    swap.counters.attends += count
    swap.counters.host_hits += in_host
    swap.counters.device_hits += sum(ready.stop - ready.start for ready in batch) - in_host
    nothing = np.zeros(pool.group.kv_heads, np.float32)
    return [AttendResult(ready.query.out_object, event, nothing) for ready in batch]


def _kept_table(swap: SwapState, batch: list[Ready]) -> Tensor | None:
    """The table ``[S, H, B]`` of a batch of sequences whose own tables are whole, kept from call to
    call; None for others, and where there is no room for it.
    """
    rows = [Row(r.table, r.start, r.stop) for r in batch if r.table is not None]
    first = batch[0].query.cache
    if len(rows) < len(batch):
        return None
    if first.batch is None:
        first.batch = BatchTable(first.pool.tables)
    units = first.batch.units(rows)
    give_back_room(swap, batch[0].query.stream, first.batch)
    for row in rows:
        give_back_room(swap, batch[0].query.stream, row.table)
    return units


def _table_of(batch: list[Ready]) -> I32:
    """The same, made for one call."""
    stop = max(ready.stop for ready in batch)
    heads = batch[0].query.cache.pool.group.kv_heads
    table = np.full((len(batch), heads, stop - batch[0].start), -1, np.int32)
    for row, ready in zip(table, batch, strict=True):
        row[:, : ready.stop - ready.start] = ready.unit_slots()
    return table


def _stacked(tensor: Tensor, count: int) -> Tensor:
    """``count`` tensors like this one, each right behind the one before: a leading axis more."""
    stride = tensor.shape[0] * tensor.strides[0]
    shape, strides = (count, *tensor.shape), (stride, *tensor.strides)
    return Tensor(tensor.address, shape, strides, tensor.dtype, tensor.on_device, tensor)


async def all_ended(calls: list[Coroutine[Any, Any, AttendResult]]) -> list[AttendResult]:
    """Run calls side by side until every one has ended, also when this is cancelled; the first
    error is raised then.
    """
    if len(calls) == 1:
        return [await calls[0]]
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        if tasks:
            await asyncio.wait(tasks)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        await insist(lambda: asyncio.wait(tasks))
        raise
    finally:
        errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    for error in errors:  # all were asked for, so that none is reported as never seen
        if error is not None:
            raise error
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True)
class Packed:
    """Rows of all sequences one behind the other: ``queries`` ``[rows, Q, dk]``, ``out``
    ``[rows, Q, dv]``, ``lse`` ``[rows, Q]`` or None.
    """

    queries: Tensor
    out: Tensor
    out_object: object
    lse: Tensor | None
    sinks: object | None

    @classmethod
    def of(
        cls,
        pool: GroupPool,
        queries: object,
        out: object,
        lse_out: object | None,
        sinks: object | None,
    ) -> Packed:
        """Checked. Raises ArgumentError."""
        group, total = pool.group, leading(queries, "queries")
        taken = tensor_of(queries, group.dtype, (total, group.q_heads, group.head_dim), "queries")
        shape = (total, group.q_heads, group.value_dim)
        taken_out = tensor_of(out, group.dtype, shape, "out", written=True)
        lse = None
        if lse_out is not None:
            lse = tensor_of(lse_out, "f32", (total, group.q_heads), "lse_out", written=True)
            pool.check_reachable(lse, "lse_out")
        pool.check_reachable(taken, "queries")
        pool.check_reachable(taken_out, "out")
        return cls(taken, taken_out, out, lse, sinks)

    def part(self, start: int, stop: int) -> Given:
        """The rows of one sequence."""
        out: object = self.out.rows(start, stop)
        if isinstance(self.out_object, np.ndarray):
            out = self.out_object[start:stop]
        lse = None if self.lse is None else self.lse.rows(start, stop)
        return Given(self.queries.rows(start, stop), out, lse, self.sinks)


class BatchCalls(NamedCalls):
    """The calls of :class:`hsswap.HighSpeedSwap` for many sequences at once."""

    async def attend_batch(
        self,
        layer: int,
        sequences: Several[Sequence],
        queries: object,
        out: object,
        *,
        rows: ArrayLike | None = None,
        exact: bool | None = None,
        lse_out: object | None = None,
        sinks: object | None = None,
        stream: object | None = None,
    ) -> list[AttendResult]:
        """:meth:`hsswap.Sequence.attend` of one layer for many sequences; returns when enqueued.

        ``queries`` ``[total, q_heads, head_dim]`` and ``out`` ``[total, q_heads, value_dim]`` hold
        the rows of the sequences in their order; ``rows``: how many each has (None: all alike), the
        last of its tokens: one to decode, a few to verify, a chunk of a prompt. Neighbours with
        equally many rows whose blocks are all in memory are one launch; for the others blocks come
        from disk side by side. ``lse_out`` ``[total, q_heads]`` float32, if given, receives the
        logsumexp of each row's logits. ``sinks`` as there, the same for all.

        Raises ArgumentError for wrong arrays or rows, and for a sequence that is given twice, busy
        or another swap's: nothing was enqueued then. Otherwise like :meth:`~hsswap.Sequence.attend`
        for the first that failed; the others' outputs are written.
        """
        self.check_loop()
        await asyncio.sleep(0)  # as in Sequence.attend
        pool = self.pool_of(checked_layer(layer, self.config.dims.layers))
        packed = Packed.of(pool, queries, out, lse_out, sinks)
        if not isinstance(sequences, list | tuple):
            kind = type(sequences).__name__
            raise ArgumentError(f"sequences is a {kind}; give a list of this swap's sequences")
        counts = row_counts(rows, len(sequences), packed.queries.shape[0])
        exact = checked_choice(exact, "exact")
        raw_stream = self.stream_of(stream)
        with ExitStack() as guards:
            for sequence in sequences:
                if getattr(sequence, "_swap", None) is not self:
                    raise ArgumentError(f"{sequence!r} belongs to another swap or to none")
                guards.enter_context(sequence._exclusive("attend"))
            asked: list[Query] = []
            start = 0
            for sequence, count in zip(sequences, counts, strict=True):
                part = packed.part(start, start + count)
                asked.append(
                    checked_query(sequence._cache(layer), sequence._indices, part, raw_stream)
                )
                start += count
            choosing = [s._uses_top_k(q, exact) for s, q in zip(sequences, asked, strict=True)]
            works = [guards.enter_context(s._ordered(raw_stream)) for s in sequences]
            for sequence, query in zip(sequences, asked, strict=True):
                sequence._show(query)
            done = self._enqueue_batch(asked, choosing)
            late = [at for at in range(len(asked)) if at not in done]
            for at, query in enumerate(asked):
                if not choosing[at]:
                    self.prefetcher.plan(sequences[at].number, sequences[at]._ahead(query))
            calls = [
                attend_top_k(self, asked[at], sequences[at]._top_k_layers[layer])
                if choosing[at]
                else attend_exact(self, asked[at])
                for at in late
            ]
            done.update(zip(late, await all_ended(calls), strict=True))
            for at, work in enumerate(works):
                work.event = done[at].event
            return [done[at] for at in range(len(asked))]

    def _enqueue_batch(self, asked: list[Query], choosing: list[bool]) -> dict[int, AttendResult]:
        """Launch what needs no reading; the results by place."""
        done: dict[int, AttendResult] = {}
        with self.lock:
            self.check_open()
            ready = [
                None if top_k else find_ready(self, query)
                for query, top_k in zip(asked, choosing, strict=True)
            ]
            for kind, group in groupby(
                range(len(asked)), key=lambda at: (each := ready[at]) and each.kind
            ):
                places = list(group)
                if kind is not None:
                    batch = [each for at in places if (each := ready[at]) is not None]
                    done.update(zip(places, enqueue_ready(self, batch), strict=True))
        return done
