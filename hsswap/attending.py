"""One attend, from checked arguments to enqueued launches, in each mode.

The functions here run under the sequence's guard against overlapping calls. State is touched under
the swap's lock, which is never held across an await.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hsswap.batch_table import BatchTable
from hsswap.coding import code_blocks
from hsswap.driver.base import Event, Stream
from hsswap.driver.operations import AttentionState, FinalizeWork
from hsswap.driver.tensor import Tensor
from hsswap.exact import ExactPass, LayerCache, Ready
from hsswap.loads import Blocks, Leased
from hsswap.pools import state_bytes, state_in
from hsswap.repeating import remember
from hsswap.resident_table import ResidentTable
from hsswap.tiers import I64
from hsswap.topk import Choice, TopKLayer

if TYPE_CHECKING:
    from hsswap.lessons import Lessons
    from hsswap.swap_state import SwapState


@dataclass(frozen=True, slots=True)
class AttendResult:
    """Attention that has been enqueued.

    ``out`` is the array given, or the one made: ``[rows, q_heads, value_dim]``, BF16; its bytes are
    there once :meth:`done` or :meth:`synchronize` returned, and for whatever is enqueued behind it
    on the same stream. ``left_out_mass`` ``[kv_heads]``: the
    share of the attention to full blocks that top-k left out, as the predictor has it: an estimate,
    right on average (see :class:`TopK`); 0 in exact mode. ``chosen``
    ``[kv_heads, n]``: the full blocks attended in top-k mode (-1: none, with a bound on the share
    left out or with ``late_mass``), None for all.
    """

    out: object
    event: Event
    left_out_mass: NDArray[np.float32]
    chosen: NDArray[np.int32] | None = None

    async def done(self) -> None:
        """Wait, without blocking the loop, until the output is written. Raises DeviceError."""
        await self.event.wait()

    def synchronize(self) -> None:
        """Block the calling thread (not the loop's) until the output is written."""
        self.event.synchronize()


@dataclass(frozen=True, slots=True)
class Query:
    """Checked arguments of an attend: ``queries`` ``[rows, Q, dk]``, ``out`` ``[rows, Q, dv]``,
    ``lse`` ``[rows, Q]`` float32 and ``sinks`` ``[Q]`` float32, or None.
    """

    cache: LayerCache
    indices: I64
    queries: Tensor
    out: Tensor
    out_object: object
    stream: Stream
    lse: Tensor | None = None
    sinks: Tensor | None = None


async def attend_exact(swap: SwapState, query: Query) -> AttendResult:
    """Attend every block; each tile is launched as soon as its blocks are in memory."""
    launched: deque[Event] = deque()
    with swap.lock:
        swap.check_open()
        work = _exact_pass(swap, query)
    with _scratch(swap, query, work):
        while True:
            with swap.lock:
                swap.check_open()  # after every await: what follows touches memory
                arriving = _arriving(swap, work)
                while (
                    arriving is None
                    and not work.finished
                    and len(launched) < swap.max_tiles_ahead
                    and (not swap.prefetcher.crowded or work.all_on_device())
                ):
                    ready = work.lease_next(swap.max_tiles_ahead - len(launched))
                    if ready is None:
                        break
                    swap.counters.host_hits += len(ready.slots)
                    launched += work.enqueue(ready) or [query.stream.record()]
                if work.finished:
                    return _finish(swap, query, work)
                work.give_back()
                blocks = work.needs()
            if arriving is not None:
                loaded = await swap.prefetcher.arrived(arriving)
            elif len(launched) >= swap.max_tiles_ahead:
                await launched.popleft().wait()
                continue
            else:
                loaded = await swap.prefetcher.load(blocks)
            with swap.lock:
                swap.check_open()
                swap.counters.misses += loaded.missed
                swap.counters.host_hits += len(loaded.slots) - loaded.missed
                ready = Ready(loaded.slots, 1 if arriving is None else work.tiles_left)
                launched += work.enqueue(ready) or [query.stream.record()]


def _arriving(swap: SwapState, work: ExactPass) -> Leased | None:
    """Everything left of a pass, if the last of it is on its way: then it is one launch, which
    costs the caller's thread as much as a launch of what is there would before.
    """
    blocks = None if work.finished else work.in_one()
    return None if blocks is None else swap.prefetcher.join(blocks, swap.config.tile_blocks)


def try_attend_exact(swap: SwapState, query: Query) -> AttendResult | None:
    """Attend every block if the host tier has all that is missing; under the swap's lock."""
    work = _exact_pass(swap, query)
    if work.tile_count > swap.max_tiles_ahead or not work.all_in_host_tier():
        return None
    if swap.prefetcher.crowded and not work.all_on_device():
        return None
    with _scratch(swap, query, work):
        while not work.finished:
            ready = work.lease_next(swap.max_tiles_ahead)
            assert ready is not None  # all_in_host_tier, under the same lock
            swap.counters.host_hits += len(ready.slots)
            work.enqueue(ready)
        return _finish(swap, query, work)


async def attend_top_k(swap: SwapState, query: Query, layer: TopKLayer) -> AttendResult:
    """Attend what the predictor chooses; blocks that are only on disk are waited for, but those
    of little mass (``late_mass``).
    """
    cache, device, stream = query.cache, swap.device, query.stream
    full = query.indices[: cache.length // cache.pool.block_size]
    await code_blocks(swap, stream, cache, full, layer=layer)
    assert swap.predictor is not None
    group = cache.pool.group
    try:
        lessons, before = cache.lessons, np.zeros(2, np.int64)
        while lessons is not None and (lesson := lessons.due) is not None:
            choice, *came = await _brought(swap, query, layer, lesson.queries.row(0))
            before += came
            with swap.lock, swap.scratch(state_bytes(group, 1), stream) as buffer:
                state = state_in(buffer, group, 1)
                layer.enqueue_lesson(device, stream, choice, lesson, state)
        choice, wanted, missed = await _brought(swap, query, layer, query.queries.row(0))
    except BaseException:
        layer.reset()
        raise
    chosen = choice.chosen.array().copy()
    left_out = choice.left_out.array().copy()
    with swap.lock, swap.scratch(state_bytes(group, 1), stream) as buffer:
        layer.enqueue_attend(
            device,
            stream,
            swap.predictor,
            choice,
            query.queries.as_batch(),
            state_in(buffer, group, 1),
            query.out.as_batch(),
            None if query.lse is None else query.lse.as_batch(),
            query.sinks,
        )
        counters = swap.counters
        counters.attends += 1
        counters.top_k_attends += 1
        counters.left_out_mass += float(left_out.mean())
        counters.misses += missed + int(before[1])
        counters.host_hits += wanted - missed + int(before[0] - before[1])
        counters.device_hits += len(np.unique(chosen[chosen >= 0])) - wanted
        return AttendResult(query.out_object, stream.record(), left_out, chosen)


async def _brought(
    swap: SwapState, query: Query, layer: TopKLayer, row: Tensor
) -> tuple[Choice, int, int]:
    """What the predictor chooses for a row ``[Q, dk]``, its units on their way into their slots;
    how many blocks had to come, and how many of them from disk.
    """
    cache, device, stream = query.cache, swap.device, query.stream
    full = query.indices[: cache.length // cache.pool.block_size]
    assert swap.predictor is not None
    with swap.lock:
        swap.check_open()
        choice = layer.enqueue_choice(device, stream, swap.predictor, row, full)
        chosen_event = stream.record()
    await chosen_event.wait()
    swap.check_open()  # the choice's memory goes when the swap is closed
    if layer.late is not None:
        with swap.lock:
            layer.late.leave_out(
                swap.prefetcher, choice, cache, query.indices, layer.pinned(len(full))
            )
    wanted = choice.blocks_to_load()
    missed = 0
    step = swap.config.tile_blocks
    for start in range(0, len(wanted), step):
        part = wanted[start : start + step]
        blocks = Blocks(cache.pool, cache.layer, query.indices[part])
        loaded = await swap.prefetcher.load(blocks)
        missed += loaded.missed
        with swap.lock:
            swap.check_open()
            try:
                layer.enqueue_gather(device, stream, choice, part, loaded.slots)
                gathered = stream.record()
            except BaseException:
                swap.release_now(cache.pool, loaded.slots)
                raise
            swap.release_after(gathered, cache.pool, loaded.slots, scan=False)
    swap.check_open()
    if layer.late is not None:
        layer.late.came(choice)
    return choice, len(wanted), missed


def _teaches(query: Query) -> Lessons | None:
    """What learns from an exact attend, if anything does."""
    lessons = query.cache.lessons
    if lessons is None or query.sinks is not None or not lessons.takes(query.queries.shape[0]):
        return None
    return lessons


def _exact_pass(swap: SwapState, query: Query) -> ExactPass:
    lse, lessons = None if query.lse is None else query.lse.as_batch(), _teaches(query)

    def end(state: AttentionState) -> FinalizeWork:
        wanted = lse if lessons is None else lessons.logsumexp(state, lse)
        return FinalizeWork(state, query.out.as_batch(), wanted, sinks=query.sinks)

    work = ExactPass(
        swap.device,
        query.stream,
        query.cache,
        query.indices,
        query.queries.as_batch(),
        end,
        swap.config.tile_tokens,
        swap.release_after,
    )
    if query.cache.residents is not None:
        give_back_room(swap, query.stream, query.cache.residents)
    return work


def give_back_room(swap: SwapState, stream: Stream, table: ResidentTable | BatchTable) -> None:
    """Give room that a table has left back, once nothing reads it. Under the swap's lock."""
    left, table.left = table.left, []
    if not left:
        return

    def give_back() -> None:
        with swap.lock:
            table.give_back(left)

    # All that reads it was enqueued before, perhaps elsewhere; this stream waits for it.
    stream.record().call_when_done(lambda: swap.mailbox.post(give_back))


@contextmanager
def _scratch(swap: SwapState, query: Query, work: ExactPass) -> Iterator[None]:
    """Device memory for one exact attend, which returns after its last launch."""
    with swap.scratch(work.scratch_bytes, query.stream) as buffer:
        try:
            work.use(buffer)
            yield
        finally:
            work.give_back()
            if work.unread is not None:
                swap.release_now(query.cache.pool, work.unread)


def _finish(swap: SwapState, query: Query, work: ExactPass) -> AttendResult:
    swap.counters.attends += 1
    swap.counters.device_hits += work.device_hits
    swap.counters.host_hits += work.held_hits
    if work.whole is not None:
        remember(swap, query, work.whole)
    behind, lessons = work.behind, _teaches(query)
    if lessons is not None:
        lessons.keep(swap.device, query.stream, query.cache.length, query.queries, query.out)
        behind = None
    nothing = np.zeros(query.cache.pool.group.kv_heads, np.float32)
    return AttendResult(query.out_object, behind or query.stream.record(), nothing)
