"""Attention on the host: partials over fixed spans, in BLAS products of one shape, folded in order.

For each span s of 256 or more tokens and each query row::

    m_s = max of the logits      P = exp(logit - m_s)      l_s = sum of P      o_s = P V

and then, in span order (FlashAttention-2, arXiv 2307.08691, section 3.1, over spans)::

    m' = max(m, m_s)    a = exp(m - m')    b = exp(m_s - m')    l' = l a + l_s b    o' = o a + o_s b

P stays in float32: it is the more exact, and no slower here. Folding a span of which a row sees
nothing changes no bit of that row's state (m_s = -inf, P = 0; and o is kept free of -0.0), so spans
may be left out or put in for the sake of other rows. :mod:`hsswap.driver.host_rows` says how rows
go through BLAS. Shape letters: those of :mod:`hsswap.driver.operations`, and W tokens of a span, N
spans of a call, n spans worked on at a time, t row tiles worked on at a time, M rows of a product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.host_blas import multiply
from hsswap.driver.host_finalize import finalize
from hsswap.driver.host_held import HeldAttend, held_attend
from hsswap.driver.host_memory import Scratch
from hsswap.driver.host_rows import F32, I64, RowTiles
from hsswap.driver.host_units import wide_units
from hsswap.driver.operations import AttendWork
from hsswap.halves import widen

# Elements of K and V widened at a time (4 MiB) and of logits (1 MiB). The second-level cache holds
# 1 MiB a core and the third 32 MiB; half and double are within 5 %.
KV_ELEMENTS = 1 << 20
LOGIT_ELEMENTS = 1 << 18

# Columns behind the products with V: the sum of the weights, and a row stays aligned to 32 bytes.
PARTIAL_PAD = 8

# Later than every token: where an entry without a unit is said to be.
NOWHERE = np.int64(1 << 62)


@dataclass(frozen=True, slots=True)
class _Spans:
    """The entries of a call in spans: ``slots`` and ``start`` ``[S, H, N, span_blocks]``.

    ``start`` is an entry's first token, ``NOWHERE`` for entries that are skipped; its first two
    axes may be 1. ``block_size`` is T.
    """

    slots: NDArray[np.int32]
    start: I64
    block_size: int

    @classmethod
    def plan(cls, work: AttendWork, held: HeldAttend) -> _Spans:
        """Cut the entries into spans, the last one filled up with entries that are skipped."""
        slots = held.slots
        sequences, heads, entries = slots.shape
        count = -(-entries // work.span_blocks)
        shape = (sequences, heads, count, work.span_blocks)
        size = work.units.block_size
        if count * work.span_blocks != entries:
            slots = np.full((sequences, heads, count * work.span_blocks), -1, np.int32)
            slots[..., :entries] = held.slots
        if held.positions is None:
            first = np.int64(work.first_block)
            start = (first + np.arange(count * work.span_blocks)) * size
            start = start.reshape(1, 1, *shape[2:])
        else:
            start = np.full((sequences, heads, count * work.span_blocks), NOWHERE)
            np.multiply(held.positions, size, out=start[..., :entries], dtype=np.int64)
            start = start.reshape(shape)
        slots = slots.reshape(shape)
        skipped = slots == -1
        if skipped.any():
            start = np.where(skipped, NOWHERE, start)
        return cls(slots, start, size)

    def is_seen(self, start: I64, end: I64) -> NDArray[np.bool_]:
        """``[N]``: whether some token of a span is in ``start`` to ``end`` (each ``[S]``)."""
        start, end = start[:, None, None, None], end[:, None, None, None]
        seen = (self.start < end) & (self.start + self.block_size > start)
        return np.asarray(seen.any((0, 1, 3)))

    def is_whole(self, start: I64, end: I64) -> NDArray[np.bool_]:
        """``[N]``: whether every token of a span is in ``start`` to ``end`` (each ``[S]``)."""
        start, end = start[:, None, None, None], end[:, None, None, None]
        inside = (self.start + self.block_size <= end) & (self.start >= start)
        return np.asarray(inside.all((0, 1, 3)))

    def tokens(self, spans: I64) -> I64:
        """Positions of the tokens of some spans, ``[S or 1, H or 1, n, W]``."""
        tokens = self.start[:, :, spans, :, None] + np.arange(self.block_size)
        return tokens.reshape(*tokens.shape[:3], -1)


@dataclass(frozen=True, slots=True)
class _Limits:
    """Positions of tokens ``[S or 1, H or 1, n, W]`` and what each row sees, ``[S, t, places]``."""

    tokens: I64
    start: I64
    end: I64


@dataclass(frozen=True, slots=True)
class _State:
    """Carried state in row tiles, ``[S, H, tiles, rows, dv + 2]``: weighted, total, maximum.

    Rows are the worked rows. One array, so that a fold is one addition.
    """

    carried: F32

    @classmethod
    def load(cls, work: AttendWork, rows: RowTiles, value_dim: int) -> _State:
        """Take the state out of the caller's tensors, or begin anew."""
        worked = rows.worked_rows
        shape = (rows.sequences, rows.heads, rows.tiles, worked.stop - worked.start)
        state = cls(np.zeros((*shape, value_dim + 2), np.float32))
        if work.begin:
            state.maximum[...] = -np.inf
        else:
            given = work.state
            joined = np.empty((*given.total.shape, value_dim + 2), np.float32)
            joined[..., :-2] = given.weighted.array()
            joined[..., -2] = given.total.array()
            joined[..., -1] = given.maximum.array()
            rows.spread(joined, state.carried)
        return state

    @property
    def maximum(self) -> F32:
        """Running maximum of the logits."""
        return self.carried[..., -1]

    @property
    def sums(self) -> F32:
        """What is added up: weighted, then total."""
        return self.carried[..., :-1]

    def part(self, tile: slice) -> _State:
        """Views of some row tiles."""
        return _State(self.carried[:, :, tile])

    def store(self, work: AttendWork, rows: RowTiles) -> None:
        """Write the state back."""
        joined = rows.collect(self.carried)
        work.state.weighted.array()[...] = joined[..., :-2]
        work.state.total.array()[...] = joined[..., -2]
        work.state.maximum.array()[...] = joined[..., -1]


@dataclass(frozen=True, slots=True)
class _Call:
    """What the steps of one attend share. ``queries`` ``[S, H, tiles, M, dk]``, times the scale.
    ``lse`` ``[S, H, tiles, rows, N, span_blocks]`` or None.
    """

    work: AttendWork
    scratch: Scratch
    rows: RowTiles
    spans: _Spans
    state: _State
    queries: F32
    lse: F32 | None


def attend(work: AttendWork, scratch: Scratch) -> None:
    """Fold the attention over a tile of units into the carried state."""
    group = work.units.group
    sequences, count = work.queries.shape[:2]
    held = held_attend(work)
    entries = held.slots.shape[2]
    if sequences == 0 or count == 0:
        return
    rows = RowTiles.plan(held.lengths, count, group.kv_heads, group.group_size, group.window)
    spans = _Spans.plan(work, held)
    state = _State.load(work, rows, group.value_dim)
    lse = None
    if work.block_lse is not None:
        lse = np.full((*state.carried.shape[:4], *spans.slots.shape[2:]), -np.inf, np.float32)
    call = _Call(work, scratch, rows, spans, state, _tile_queries(work, scratch, rows), lse)
    seen_start, seen_end = rows.seen_start.min((1, 2)), rows.seen_end.max((1, 2))
    active = np.flatnonzero(spans.is_seen(seen_start, seen_end))
    whole = spans.is_whole(seen_start, seen_end)
    width = spans.slots.shape[3] * spans.block_size
    lanes = sequences * group.kv_heads * width
    at_once = max(1, KV_ELEMENTS // (lanes * (group.head_dim + group.value_dim)))
    tiles = min(rows.tiles, max(1, LOGIT_ELEMENTS // (lanes * rows.tile_rows)))
    at_once = min(at_once, max(1, LOGIT_ELEMENTS // (lanes * rows.tile_rows * tiles)))
    for first in range(0, len(active), at_once):
        numbers = active[first : first + at_once]
        keys, values = _widen(call, numbers, whole[numbers], seen_start, seen_end)
        for tile in range(0, rows.tiles, tiles):
            _fold(call, slice(tile, min(tile + tiles, rows.tiles)), numbers, keys, values)
    state.store(work, rows)
    if work.block_lse is not None and lse is not None:
        flat = rows.collect(lse.reshape(*lse.shape[:4], -1))
        work.block_lse.array()[...] = flat[..., :entries]
    if work.end is not None:
        finalize(work.end, scratch)


def _tile_queries(work: AttendWork, scratch: Scratch, rows: RowTiles) -> F32:
    group = work.units.group
    shape = (rows.sequences, rows.heads, rows.tiles, rows.tile_rows, group.head_dim)
    tiled: F32 = scratch.array("queries", shape, np.float32)
    tiled[...] = 0
    scaled = widen(work.queries.array(), group.dtype)
    scaled *= np.float32(group.logit_scale)
    rows.spread(scaled, tiled[..., rows.worked_rows, :])
    return tiled


def _widen(
    call: _Call, numbers: I64, whole: NDArray[np.bool_], seen_start: I64, seen_end: I64
) -> tuple[F32, F32]:
    """K ``[S, H, n, W, dk]`` and V ``[S, H, n, W, dv]`` of some spans in float32.

    Tokens that no row of the call sees are zero: a NaN there would pass through a weight of 0.
    """
    slots = call.spans.slots[:, :, numbers]
    parts = wide_units(call.work, slots, call.scratch)
    if not whole.all():
        partial = np.flatnonzero(~whole)
        tokens = call.spans.tokens(numbers[partial])
        unseen = tokens >= seen_end[:, None, None, None]
        unseen |= tokens < seen_start[:, None, None, None]
        shape = (*slots.shape[:2], *unseen.shape[2:])
        s, h, span, token = np.nonzero(np.broadcast_to(unseen, shape))
        for part in parts:
            part[s, h, partial[span], token] = 0
    return parts


def _fold(call: _Call, tile: slice, numbers: I64, keys: F32, values: F32) -> None:
    """Partials of some spans for some row tiles, folded into the state."""
    rows, group = call.rows, call.work.units.group
    start, end = rows.seen_start[:, tile], rows.seen_end[:, tile]
    if end.shape[1] < rows.tiles:  # else some row sees each of the spans
        seen = call.spans.is_seen(start.min((1, 2)), end.max((1, 2)))
        if not seen[numbers].any():
            return
    worked = rows.worked_rows
    # [S, H, 1, t, M, dk] @ [S, H, n, 1, dk, W]
    queries = call.queries[:, :, None, tile]
    shape = (*keys.shape[:3], *queries.shape[3:5], keys.shape[3])
    products: F32 = call.scratch.array("logits", shape, np.float32)
    multiply(queries, keys[:, :, :, None].swapaxes(-1, -2), products)
    logits = products[..., worked, :]
    if group.soft_cap is not None:
        cap = np.float32(group.soft_cap)
        logits /= cap
        np.tanh(logits, out=logits)
        logits *= cap
    whole = call.spans.is_whole(start.max((1, 2)), end.min((1, 2)))
    first, last = _ends(np.flatnonzero(~whole[numbers]))
    if last:
        _mask(call, logits[:, :, first:last], numbers[first:last], start, end)
    maximum = logits.max(-1)
    if call.lse is not None:
        _block_lse(call.lse, logits, tile, numbers)
    logits -= np.where(maximum == -np.inf, np.float32(0), maximum)[..., None]
    np.exp(logits, out=logits)
    # [S, H, n, t, M, W] @ [S, H, n, 1, W, dv], beside the sums of the weights
    value_dim = group.value_dim
    joined: F32 = call.scratch.array("partial", (*shape[:5], value_dim + PARTIAL_PAD), np.float32)
    partial = joined[..., :value_dim]
    multiply(products, values[:, :, :, None], partial)
    sums = joined[..., worked, : value_dim + 1]
    logits.sum(-1, out=sums[..., -1])
    if last and rows.rows > 1:
        part = slice(first, last)
        limits = _Limits(call.spans.tokens(numbers[part]), start, end)
        _mend(rows, limits, products[:, :, part], values[:, :, part], partial[:, :, part])
    _accumulate(call.state.part(tile), maximum, sums)


def _mask(call: _Call, logits: F32, numbers: I64, start: I64, end: I64) -> None:
    """Set the logits of tokens that a row does not see to -inf.

    ``logits`` ``[S, H, n, t, rows, W]``; ``start`` and ``end`` ``[S, t, places]``.
    """
    tokens = call.spans.tokens(numbers)[:, :, :, None, None, None]
    by_place = logits.reshape(*logits.shape[:4], -1, call.rows.group_size, logits.shape[5])
    unseen = tokens >= end[:, None, None, :, :, None, None]
    if call.work.units.group.window is not None:
        unseen |= tokens < start[:, None, None, :, :, None, None]
    np.copyto(by_place, np.float32(-np.inf), where=unseen)


def _block_lse(lse: F32, logits: F32, tile: slice, numbers: I64) -> None:
    """Logsumexp of each entry, each with a maximum of its own: far ones must not underflow."""
    blocks = lse.shape[5]
    by_block = logits.reshape(*logits.shape[:5], blocks, -1)  # [S, H, n, t, rows, blocks, T]
    maximum = by_block.max(-1)
    reference = np.where(maximum == -np.inf, np.float32(0), maximum)
    found = reference + np.log(np.exp(by_block - reference[..., None]).sum(-1))
    lse[:, :, tile, :, numbers] = found.transpose(0, 1, 3, 4, 2, 5)


def _mend(rows: RowTiles, limits: _Limits, weights: F32, values: F32, partial: F32) -> None:
    """Undo what NaN or infinite V of tokens that only *other* rows see did to a row.

    0 times infinity is NaN. Rows with a partial that is not finite are multiplied again, in the
    same shape, with V of the tokens they do not see zeroed. Such V are faults of the engine's, so
    the loop over (sequence, span, tile, place) hardly ever runs.
    """
    found = partial[..., rows.worked_rows, :]
    if np.isfinite(found).all():
        return
    group_size = rows.group_size
    by_place = found.reshape(*found.shape[:4], -1, group_size, found.shape[5])
    bad = ~np.isfinite(by_place).all((1, 5, 6))  # [S, n, t, places]
    tokens = np.broadcast_to(limits.tokens, values.shape[:4])
    for s, n, t, place in zip(*np.nonzero(bad), strict=True):
        position = tokens[s, :, n, :, None]
        seen = (position < limits.end[s, t, place]) & (position >= limits.start[s, t, place])
        own = np.where(seen, values[s, :, n], np.float32(0))  # [H, W, dv]
        first = (rows.low + place) * group_size
        again = np.empty((*own.shape[:1], *partial.shape[4:]), np.float32)
        multiply(weights[s, :, n, t], own, again)
        partial[s, :, n, t, first : first + group_size] = again[:, first : first + group_size]


def _accumulate(state: _State, maximum: F32, sums: F32) -> None:
    """Fold partials, ``[S, H, n, t, rows]`` and ``[..., dv + 1]``, into the state in span order."""
    running = np.concatenate((state.maximum[:, :, None], maximum), axis=2)
    np.maximum.accumulate(running, axis=2, out=running)
    reference = np.where(running == -np.inf, np.float32(0), running)[:, :, 1:]
    keep = np.exp(running[:, :, :-1] - reference)
    sums *= np.exp(maximum - reference)[..., None]
    # A BLAS may give -0.0 where products underflow. 0.0 stays what it is when nothing is added.
    sums += np.float32(0)
    rescaled = (keep != 1).any((0, 1, 3, 4))
    total = state.sums
    for span in range(maximum.shape[2]):
        if rescaled[span]:  # else times 1 for every row
            total *= keep[:, :, span, ..., None]
        total += sums[:, :, span]
    state.maximum[...] = running[:, :, -1]


def _ends(indices: NDArray[np.intp]) -> tuple[int, int]:
    """The least range that holds all indices, which ascend; 0, 0 if there are none."""
    return (int(indices[0]), int(indices[-1]) + 1) if len(indices) else (0, 0)
