"""How attend and finalize are launched on a CUDA device: which kernel, its constants and grid.

Which kernel runs and how work is shared out may depend on everything: every kernel computes the
same bits (hsswap/ptx/attention.cuh). Only the tree of a row's result is fixed: leaves of 128
tokens, spans as the caller says, :data:`SPAN_TOKENS` by this device's own wish.

The carried ``maximum`` is in units of log 2 on this device.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

import numpy as np

from hsswap.config import LayerGroup
from hsswap.driver.base import Stream
from hsswap.driver.cuda_seam import Grid, Launcher
from hsswap.driver.operations import AttendWork, AttentionState, FinalizeWork
from hsswap.driver.tensor import Tensor, contiguous_strides
from hsswap.errors import ArgumentError

SPAN_TOKENS = 1024
"""Tokens of a span. Constant, so that rows of one call may lie on both sides of any length."""

LEAF_TOKENS = 128
TILE_PAIRS = 64
TILE_THREADS = 128
COUNTER_BYTES = 1 << 16
MOST_COUNTERS = COUNTER_BYTES // 4
MOST_MERGED_PARTS = 256
MOST_PARTIAL_BYTES = 1 << 28
"""Parts take this much at most (256 MiB): beyond, spans are folded as they come."""

IN_PLACE_ROWS = 16
"""Query rows up to which units are read over the link rather than gathered first."""

_WARPS_A_BLOCK = 4
_ATTEND = struct.Struct("<15Q10q8i2f")
_FINALIZE = struct.Struct("<7Q4q6i")


def span_tokens(length: int) -> int:
    """Tokens of a span for a row that sees ``length`` tokens."""
    del length
    return SPAN_TOKENS


def reads_in_place(rows: int) -> bool:
    """Whether so many rows read a unit once: the tile of one KV head holds them all."""
    return rows <= IN_PLACE_ROWS


@dataclass(frozen=True, slots=True)
class _Shape:
    """Sizes of a call. ``pairs``: S * H; ``rows_in_state``: S * R * Q."""

    sequences: int
    rows: int
    entries: int
    pairs: int
    spans: int
    leaves: int
    leaves_a_span: int
    rows_in_state: int

    @classmethod
    def of(cls, work: AttendWork) -> _Shape:
        sequences, rows, q_heads, _ = work.queries.shape
        entries = work.slots.shape[2]
        size = work.units.block_size
        return cls(
            sequences,
            rows,
            entries,
            sequences * work.units.group.kv_heads,
            -(-entries // work.span_blocks),
            -(-entries * size // LEAF_TOKENS),
            work.span_blocks * size // LEAF_TOKENS,
            sequences * rows * q_heads,
        )


@dataclass(frozen=True, slots=True)
class _Decode:
    """How attend_decode shares a list out; the constants are described in attention.cu."""

    warps: int
    stages: int
    whole_spans: bool
    fold_leaves: bool
    shares: int
    parts: int


def enqueue_attend(
    device: Launcher, stream: Stream, work: AttendWork, end: FinalizeWork | None = None
) -> None:
    """Fold a tile into the carried state.

    ``end``: what finalize would be given next, if this is the last tile: then it is done too, in
    the same launch where that can be, and what ``work.state`` holds behind it is undefined.
    """
    shape = _Shape.of(work)
    if shape.rows_in_state == 0:
        return
    _require_contiguous_state(work.state)
    if work.block_lse is not None:
        _require_contiguous(work.block_lse, "block_lse")
    fused = end is not None and end.block_mass is None
    decode = plan_decode(device, work, shape)
    if decode is not None:
        fused = fused and decode.parts <= MOST_MERGED_PARTS
        _launch_decode(device, stream, work, shape, decode, end if fused else None)
    else:
        fused = False
        _launch_tiles(device, stream, work, shape)
    if work.block_lse is not None and shape.entries:
        grid = Grid(-(-shape.entries // _WARPS_A_BLOCK), min(shape.rows_in_state, 65535))
        params = _params(device, stream, work, shape, parts=0)
        constants = _span_constants(work.units.group, work.units.block_size)
        block = Grid(32 * _WARPS_A_BLOCK)
        device.launch(stream, "block_logsumexp", constants, grid, block, 0, params)
    if end is not None and not fused:
        enqueue_finalize(device, stream, end)


def enqueue_finalize(device: Launcher, stream: Stream, work: FinalizeWork) -> None:
    """Output, logsumexp and block masses from carried state."""
    _require_contiguous_state(work.state)
    sequences, rows, q_heads, value_dim = work.out.shape
    if sequences * rows * q_heads == 0:
        return
    for tensor, what in ((work.lse, "lse"), (work.block_lse, "block_lse")):
        if tensor is not None:
            _require_contiguous(tensor, what)
    kv_heads, entries = (1, 0)
    if work.block_mass is not None:
        _require_contiguous(work.block_mass, "block_mass")
        kv_heads, entries = work.block_mass.shape[1:]
    params = _FINALIZE.pack(
        work.state.maximum.address,
        work.state.total.address,
        work.state.weighted.address,
        work.out.address,
        _address(work.lse),
        _address(work.block_lse),
        _address(work.block_mass),
        *_element_strides(work.out),
        sequences,
        rows,
        q_heads,
        value_dim,
        kv_heads,
        entries,
    )
    block = Grid(32 * _WARPS_A_BLOCK)
    grid = Grid(-(-sequences * rows * q_heads // _WARPS_A_BLOCK))
    device.launch(stream, "finalize", {}, grid, block, 0, params)
    if work.block_mass is not None and entries:
        grid = Grid(-(-sequences * kv_heads * entries // _WARPS_A_BLOCK))
        device.launch(stream, "block_masses", {}, grid, block, 0, params)


def plan_decode(device: Launcher, work: AttendWork, shape: _Shape) -> _Decode | None:
    """How attend_decode takes a call, None for those it cannot take."""
    group = work.units.group
    contiguous = contiguous_strides(work.queries.shape, 2)
    wide = _is_wide(work) and work.queries.address % 8 == 0 and shape.entries > 0
    if (
        device.compute_capability < (9, 0)
        or shape.rows != 1
        or group.head_dim not in (64, 128)
        or group.value_dim != group.head_dim
        or group.group_size > 8
        or work.units.block_size != 16
        or _transform(group)
        or not wide
        or work.queries.strides[3] != 2
        or any(s % 8 for s in work.queries.strides[:3])
        or shape.pairs > MOST_COUNTERS
        or (work.queries.strides != contiguous and work.queries.strides[2] % 8)
    ):
        return None
    spans, pairs, multiprocessors = shape.spans, shape.pairs, device.sm_count
    foldable = shape.leaves_a_span in (1, 2, 4, 8)
    if 3 * spans * pairs <= multiprocessors and shape.leaves <= MOST_MERGED_PARTS:
        # So few spans that leaves are shared out: one a block, or two where that fills the chip.
        warps = 1 if shape.leaves * pairs <= 2 * multiprocessors else 2
        return _Decode(warps, 16, False, False, -(-shape.leaves // warps), shape.leaves)
    if foldable and spans * pairs <= 2 * multiprocessors:
        stages = 4 if spans * pairs <= multiprocessors else 2
        return _Decode(shape.leaves_a_span, stages, False, True, spans, spans)
    warps = min(8, 1 << (spans - 1).bit_length())
    blocks = multiprocessors * (8 // warps)
    shares = min(-(-spans // warps), max(1, blocks // pairs))
    stages = 8 if warps <= 4 and shares * pairs <= multiprocessors else 4
    return _Decode(warps, stages, True, False, shares, spans)


def _launch_decode(
    device: Launcher,
    stream: Stream,
    work: AttendWork,
    shape: _Shape,
    plan: _Decode,
    end: FinalizeWork | None,
) -> None:
    group, size = work.units.group, work.units.block_size
    constants = _dim_constants(group, size)
    constants |= {
        "WARPS": plan.warps,
        "STAGES": plan.stages,
        "WHOLE_SPANS": int(plan.whole_spans),
        "FOLD_LEAVES": int(plan.fold_leaves),
        "BLOCKS_A_SM": 1 if plan.whole_spans and plan.warps == 8 else 2,
    }
    ring = plan.warps * (plan.stages * size * group.head_dim * 2 + 64)
    # decode_merge.cuh, merge
    merge = group.group_size * (16 * shape.spans + 8 * plan.parts + 8)
    if plan.parts > MOST_MERGED_PARTS:
        merge = 0
    params = _params(device, stream, work, shape, plan.parts, end)
    grid = Grid(plan.shares, shape.pairs)
    block = Grid(32 * plan.warps)
    device.launch(stream, "attend_decode", constants, grid, block, max(ring, merge), params)
    if plan.parts > MOST_MERGED_PARTS:
        _launch_merge(device, stream, group, size, shape, params)


def _launch_tiles(device: Launcher, stream: Stream, work: AttendWork, shape: _Shape) -> None:
    group, size = work.units.group, work.units.block_size
    key_row, value_row = (2 * (-(-dim // 16) * 16 + 8) for dim in (group.head_dim, group.value_dim))
    apart, together = (
        TILE_PAIRS * key_row + LEAF_TOKENS * both + 2 * LEAF_TOKENS * 12
        for both in (key_row + value_row, max(key_row, value_row))
    )
    is_apart = apart <= device.shared_bytes_limit
    constants = _dim_constants(group, size) | {
        "WIDE": int(_is_wide(work)),
        "APART": int(is_apart),
        "TRANSFORM": _transform(group),
    }
    tiles = -(-shape.rows * group.group_size // TILE_PAIRS)
    blocks = tiles * shape.pairs
    splits = min(shape.spans, -(-2 * device.sm_count // blocks))
    if shape.rows_in_state * shape.spans * (group.value_dim + 2) * 4 > MOST_PARTIAL_BYTES:
        splits = 1
    splits = max(1, splits)
    params = _params(device, stream, work, shape, shape.spans, partial=splits > 1)
    grid = Grid(tiles, shape.pairs, splits)
    shared = apart if is_apart else together
    device.launch(stream, "attend_tile", constants, grid, Grid(TILE_THREADS), shared, params)
    if splits > 1:
        _launch_merge(device, stream, group, size, shape, params)


def _launch_merge(
    device: Launcher, stream: Stream, group: LayerGroup, size: int, shape: _Shape, params: bytes
) -> None:
    constants = _span_constants(group, size)
    block = Grid(-(-group.value_dim // 32) * 32)
    device.launch(stream, "merge_spans", constants, Grid(shape.rows_in_state), block, 0, params)


def _params(
    device: Launcher,
    stream: Stream,
    work: AttendWork,
    shape: _Shape,
    parts: int,
    end: FinalizeWork | None = None,
    *,
    partial: bool = True,
) -> bytes:
    """Upload the index arrays and pack ``AttendParams`` of attention.cuh."""
    group = work.units.group
    counters = part_sums = part_rows = 0
    if partial and parts:
        sums_bytes = -(-shape.rows_in_state * parts * 8 // 256) * 256
        rows_bytes = shape.rows_in_state * parts * group.value_dim * 4
        counters = device.workspace(stream, COUNTER_BYTES + sums_bytes + rows_bytes)
        part_sums = counters + COUNTER_BYTES
        part_rows = part_sums + sums_bytes
    positions = 0
    if work.positions is not None:
        positions = device.upload(stream, np.ascontiguousarray(work.positions))
    return _ATTEND.pack(
        work.queries.address,
        work.units.memory.address,
        0 if work.blocks is None else work.blocks.memory.address,
        device.upload(stream, np.ascontiguousarray(work.slots)),
        positions,
        device.upload(stream, work.lengths),
        work.state.maximum.address,
        work.state.total.address,
        work.state.weighted.address,
        _address(work.block_lse),
        part_rows,
        part_sums,
        counters,
        0 if end is None else end.out.address,
        0 if end is None else _address(end.lse),
        *_element_strides(work.queries),
        *((0, 0, 0, 0) if end is None else _element_strides(end.out)),
        work.units.unit_bytes,
        0 if work.blocks is None else work.blocks.block_bytes,
        shape.sequences,
        shape.rows,
        shape.entries,
        work.first_block,
        work.span_blocks,
        int(work.begin),
        group.window or 0,
        parts,
        group.logit_scale,
        group.soft_cap or 1.0,
    )


def _dim_constants(group: LayerGroup, block_size: int) -> dict[str, int | str]:
    return {
        "HEAD_DIM": group.head_dim,
        "VALUE_DIM": group.value_dim,
        "GROUP": group.group_size,
        "KV_HEADS": group.kv_heads,
        "BLOCK": block_size,
    }


def _span_constants(group: LayerGroup, block_size: int) -> dict[str, int | str]:
    return _dim_constants(group, block_size) | {"TRANSFORM": _transform(group)}


def _transform(group: LayerGroup) -> int:
    """What is done to logits before their maximum is taken: attend_tile.cu, TRANSFORM."""
    if group.soft_cap is not None:
        return 2
    return 0 if group.logit_scale > 0 and math.isfinite(group.logit_scale) else 1


def _is_wide(work: AttendWork) -> bool:
    """Whether every unit lies on 16 bytes."""
    pools = [work.units.memory.address, work.units.unit_bytes]
    if work.blocks is not None:
        pools.append(work.blocks.memory.address)
    return not any(x % 16 for x in pools)


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.address


def _element_strides(tensor: Tensor) -> tuple[int, ...]:
    if any(s % 2 for s in tensor.strides):
        raise ArgumentError(f"strides {tensor.strides} are not whole BF16 elements")
    return tuple(s // 2 for s in tensor.strides)


def _require_contiguous(tensor: Tensor, what: str) -> None:
    wanted = contiguous_strides(tensor.shape, 4)
    off = any(
        have != want
        for have, want, n in zip(tensor.strides, wanted, tensor.shape, strict=True)
        if n > 1
    )
    if off and 0 not in tensor.shape:
        raise ArgumentError(f"{what} has strides {tensor.strides}; it must be contiguous")


def _require_contiguous_state(state: AttentionState) -> None:
    for name in ("maximum", "total", "weighted"):
        _require_contiguous(getattr(state, name), f"state.{name}")
