"""A row over a layer that is all in memory, attended again: what a decode loop does.

Of one token and the next only the arrays and the length are new, until a block more begins. So the
call is kept as the device prepared it, in place of being checked, packed and planned each time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hsswap.driver.base import AttendAgain, Stream
from hsswap.driver.operations import AttendWork, FinalizeWork
from hsswap.driver.tensor import Tensor, tensor_of
from hsswap.pools import state_bytes, state_in
from hsswap.tiers import I64

if TYPE_CHECKING:
    from hsswap.arguments import Given
    from hsswap.attending import Query
    from hsswap.exact import LayerCache
    from hsswap.swap_state import SwapState


@dataclass(frozen=True, slots=True)
class Repeated:
    """A call kept. ``entries``: the table it reads; ``queries`` and ``out``: what the next must be
    like.
    """

    stream: Stream
    blocks: int
    entries: Tensor
    queries: Tensor
    out: Tensor
    again: AttendAgain

    def is_on(self, swap: SwapState, given: object) -> bool:
        """Whether a caller's stream is the one of the call."""
        if type(given) is int:
            return given == self.stream.handle and not getattr(self.stream, "closed", False)
        return swap.stream_of(given) is self.stream

    def suits(self, cache: LayerCache, indices: I64) -> bool:
        """Whether the layer is as it was then, but for tokens in its last block."""
        if -(-cache.length // cache.pool.block_size) != self.blocks:
            return False
        table = cache.settled(indices)
        return (
            table is not None
            and table.is_whole
            and table.entries is self.entries
            and not table.left
        )

    def taken(self, cache: LayerCache, given: Given) -> tuple[Tensor, Tensor] | None:
        """Queries and output if they are like those kept. Raises ArgumentError for wrong arrays."""
        if given.out is None or given.lse_out is not None or given.sinks is not None:
            return None
        queries, out, dtype = self.queries, self.out, cache.pool.group.dtype
        if getattr(given.queries, "shape", None) != queries.shape:
            return None
        taken = tensor_of(given.queries, dtype, queries.shape, "queries")
        taken_out = tensor_of(given.out, dtype, out.shape, "out", written=True)
        return (taken, taken_out) if _alike(taken, queries) and _alike(taken_out, out) else None


def _alike(one: Tensor, other: Tensor) -> bool:
    """In all but the address, and in that as to alignment."""
    same = one.strides == other.strides and one.on_device == other.on_device
    return same and not (one.address ^ other.address) & 15


def remember(swap: SwapState, query: Query, work: AttendWork) -> None:
    """Keep a call that attended a whole layer by one launch. Under the lock."""
    cache = query.cache
    known, table = cache.repeated, cache.residents
    if query.lse is not None or query.sinks is not None or table is None or table.entries is None:
        return
    if not query.queries.on_device == query.out.on_device == cache.pool.device_memory.on_device:
        return
    if known is not None and known.stream is query.stream and known.suits(cache, query.indices):
        return
    group = cache.pool.group
    buffer = swap.scratch_of(query.stream, state_bytes(group, 1))
    state = state_in(buffer, group, 1)
    end = FinalizeWork(state, query.out.as_batch())
    again = swap.device.attend_again(query.stream, replace(work, state=state, end=end))
    cache.repeated = None
    if again is not None:
        blocks = int(work.slots.shape[2])
        arrays = query.queries, query.out
        cache.repeated = Repeated(query.stream, blocks, table.entries, *arrays, again)
