"""How attend, finalize and learn are launched on a CUDA device: which kernels, constants, grids.

Which kernel runs and how work is shared out may depend on everything: every kernel computes the
same bits (hsswap/ptx/attention.cuh). Only the tree of a row's result is fixed: leaves of 128
tokens, spans as the caller says, :data:`SPAN_TOKENS` by this device's own wish.

The carried ``maximum`` is in units of log 2 on this device.
"""

from __future__ import annotations

import struct

from hsswap.config import CUDA_SPAN_TOKENS, LayerGroup
from hsswap.driver.base import Stream
from hsswap.driver.check_parts import require
from hsswap.driver.choice_operations import LearnWork
from hsswap.driver.cuda_attention_decode import launch_decode, plan_decode
from hsswap.driver.cuda_attention_e4m3 import launch_e4m3, uses_e4m3
from hsswap.driver.cuda_attention_params import (
    LEAF_TOKENS,
    WIDE_PAIRS,
    Shape,
    address_of,
    attend_params,
    dim_constants,
    element_strides,
    is_wide,
    page_constants,
    require_contiguous,
    require_contiguous_state,
    span_constants,
    tensor_map,
    transform_of,
)
from hsswap.driver.cuda_seam import Chip, Grid, Launcher, format_constants
from hsswap.driver.cuda_top_k import fetch
from hsswap.driver.operations import AttendWork, FinalizeWork, LeftOut, PagePool, UnitPool
from hsswap.driver.tensor import Tensor

SPAN_TOKENS = CUDA_SPAN_TOKENS
"""Tokens of a span. Constant, so that rows of one call may lie on both sides of any length."""

TILE_PAIRS = 64
TILE_THREADS = 128
WIDE_THREADS = 384
WIDE_SHARED_BYTES = 224 << 10

MOST_PARTIAL_BYTES = 1 << 28
"""Parts take this much at most (256 MiB): beyond, spans are folded as they come."""

IN_PLACE_ROWS = 16
"""Query rows up to which units are read over the link rather than gathered first."""

_WARPS_A_BLOCK = 4
_FINALIZE = struct.Struct("<8Q4q6i")
_MAKE_UP = struct.Struct("<9Q3q4i")
_LEARN = struct.Struct("<8Q3q4i")


def span_tokens(length: int) -> int:
    """Tokens of a span for a row that sees ``length`` tokens."""
    del length
    return SPAN_TOKENS


def reads_in_place(rows: int) -> bool:
    """Whether so many rows read a unit once: the tile of one KV head holds them all."""
    return rows <= IN_PLACE_ROWS


def enqueue_attend(
    device: Launcher, stream: Stream, work: AttendWork, end: FinalizeWork | None = None
) -> None:
    """Fold a tile into the carried state.

    ``end``: what finalize would be given next, if this is the last tile: then it is done too, in
    the same launch where that can be, and what ``work.state`` holds behind it is undefined.
    """
    shape = Shape.of(work)
    decode = plan_decode(device, work, shape) if shape.rows_in_state else None
    if work.fetch is not None and (decode is None or not decode.fetches):
        fetch(device, stream, work.fetch)
    if shape.rows_in_state == 0:
        return
    require_contiguous_state(work.state)
    if work.block_lse is not None:
        require_contiguous(work.block_lse, "block_lse")
    if end is not None:
        _require_contiguous_end(end)
    plain = end is not None and end.left_out is None  # which finalize alone knows
    fused = end is not None and plain and end.block_mass is None
    if decode is not None:
        fused = fused or (plain and decode.leaf_parts)
        launch_decode(device, stream, work, shape, decode, end if fused else None)
    elif uses_e4m3(device, work, shape):
        launch_e4m3(device, stream, work, shape, end if fused else None)
    else:
        wide = uses_wide(device, work, shape)
        fused = fused and wide
        if wide:
            _launch_wide(device, stream, work, shape, end if fused else None)
        else:
            _launch_tiles(device, stream, work, shape)
    if work.block_lse is not None and shape.entries and decode is None:
        grid = Grid(-(-shape.entries // _WARPS_A_BLOCK), min(shape.rows_in_state, 65535))
        params = attend_params(device, stream, work, shape, parts=0)
        constants = span_constants(work.units.group, work.units.block_size) | page_constants(work)
        block = Grid(32 * _WARPS_A_BLOCK)
        device.launch(stream, "block_logsumexp", constants, grid, block, 0, params)
    if end is not None and not fused:
        enqueue_finalize(device, stream, end)


def _require_contiguous_end(end: FinalizeWork) -> None:
    for tensor, what in ((end.lse, "lse"), (end.sinks, "sinks")):
        if tensor is not None:
            require_contiguous(tensor, what)
    if end.left_out is not None:
        require_contiguous(end.left_out.chosen, "left_out.chosen")
        require_contiguous(end.left_out.scale, "left_out.scale")
        require_contiguous(end.left_out.value, "left_out.value")


def enqueue_finalize(device: Launcher, stream: Stream, work: FinalizeWork) -> None:
    """Output, logsumexp and block masses from carried state."""
    require_contiguous_state(work.state)
    sequences, rows, q_heads, value_dim = work.out.shape
    if sequences * rows * q_heads == 0:
        return
    _require_contiguous_end(work)
    if work.block_lse is not None:
        require_contiguous(work.block_lse, "block_lse")
    kv_heads, entries = (1, 0)
    if work.block_mass is not None:
        require_contiguous(work.block_mass, "block_mass")
        kv_heads, entries = work.block_mass.shape[1:]
    params = _FINALIZE.pack(
        work.state.maximum.address,
        work.state.total.address,
        work.state.weighted.address,
        work.out.address,
        address_of(work.lse),
        address_of(work.block_lse),
        address_of(work.block_mass),
        address_of(work.sinks),
        *element_strides(work.out),
        sequences,
        rows,
        q_heads,
        value_dim,
        kv_heads,
        entries,
    )
    constants = format_constants(work.out.dtype)
    block = Grid(32 * _WARPS_A_BLOCK)
    grid = Grid(-(-sequences * rows * q_heads // _WARPS_A_BLOCK))
    device.launch(stream, "finalize", constants, grid, block, 0, params)
    if work.block_mass is not None and entries:
        grid = Grid(-(-sequences * kv_heads * entries // _WARPS_A_BLOCK))
        device.launch(stream, "block_masses", constants, grid, block, 0, params)
    if work.left_out is not None:
        _make_up(device, stream, work, work.left_out)


def _make_up(device: Launcher, stream: Stream, work: FinalizeWork, left_out: LeftOut) -> None:
    """Outputs again, with what stands in for the blocks that were not chosen."""
    q_heads, value_dim = work.out.shape[2:]
    heads, chosen_count = left_out.chosen.shape
    row_bytes, block_bytes = left_out.predicted.strides
    require(block_bytes == 4, "left_out.predicted is not contiguous along blocks")
    params = _MAKE_UP.pack(
        work.state.maximum.address,
        work.state.total.address,
        work.state.weighted.address,
        work.out.address,
        address_of(work.sinks),
        left_out.predicted.address,
        left_out.chosen.address,
        left_out.scale.address,
        left_out.value.address,
        *element_strides(work.out)[2:],
        row_bytes // 4,
        left_out.predicted.shape[1],
        chosen_count,
        q_heads // heads,
        value_dim,
    )
    constants = format_constants(work.out.dtype)
    device.launch(stream, "make_up", constants, Grid(q_heads), Grid(256), 0, params)


def learn(device: Launcher, stream: Stream, work: LearnWork) -> None:
    """A thread block for each query head, a thread for each dim."""
    rows, q_heads, value_dim = work.full.shape
    require_contiguous_state(work.state)
    for name in ("sums", "scale", "value"):
        require_contiguous(getattr(work, name), name)
    if not q_heads:
        return
    params = _LEARN.pack(
        work.state.maximum.address,
        work.state.total.address,
        work.state.weighted.address,
        work.full.address,
        work.full_lse.address,
        work.sums.address,
        work.scale.address,
        work.value.address,
        *element_strides(work.full)[:2],
        work.full_lse.strides[0] // 4,
        rows,
        q_heads,
        value_dim,
        work.begin,
    )
    constants = format_constants(work.full.dtype)
    device.launch(stream, "learn", constants, Grid(q_heads), Grid(256), 0, params)


def wide_takes(chip: Chip, group: LayerGroup, block_size: int) -> bool:
    """Whether attend_wide takes calls of such units."""
    return (
        chip.compute_capability == (9, 0)
        and (group.head_dim, group.value_dim) == (128, 128)
        and (block_size, group.aux_bytes, group.window) == (16, 0, None)
        and not group.is_e4m3
    )


def uses_wide(device: Launcher, work: AttendWork, shape: Shape) -> bool:
    """Whether attend_wide takes a call, and attend_tile what it leaves."""
    if (
        isinstance(work.units, PagePool)
        or not wide_takes(device, work.units.group, work.units.block_size)
        or shape.rows * work.units.group.group_size <= TILE_PAIRS
        or work.positions is not None
        or not is_wide(work)
        or work.queries.address % 16
        or work.queries.strides[3] != 2
        or any(stride % 16 for stride in work.queries.strides[:3])
    ):
        return False
    # Units in host slots, and gaps, are the other kernel's; of a table that the device holds it is
    # not known whether it has any, but by who asks.
    full = work.is_full if isinstance(work.slots, Tensor) else bool((work.slots >= 0).all())
    if isinstance(work.lengths, Tensor):
        return full
    return full and int(work.lengths.max()) + work.added_tokens > 16 * work.first_block


def _launch_wide(
    device: Launcher, stream: Stream, work: AttendWork, shape: Shape, end: FinalizeWork | None
) -> None:
    assert isinstance(work.units, UnitPool)
    group, pool = work.units.group, work.units.memory
    rows = pool.shape[0] * 32
    maps = tensor_map(pool.address, rows, 1) + tensor_map(pool.address, rows, 2)
    params = attend_params(device, stream, work, shape, shape.spans, end, partial=False, wide=True)
    maps += params + bytes(-len(params) % 64)
    tiles = -(-shape.rows * group.group_size // WIDE_PAIRS)
    grid, block = Grid(tiles, shape.pairs), Grid(WIDE_THREADS)
    constants = span_constants(group, 16)
    device.launch(stream, "attend_wide", constants, grid, block, WIDE_SHARED_BYTES, maps)
    if not _all_seen(work, shape):  # what it leaves, of the same parameters
        _launch_tile(device, stream, work, shape, 1, params)


def _all_seen(work: AttendWork, shape: Shape) -> bool:
    """Whether every row is known to see every token: then attend_wide leaves nothing."""
    if isinstance(work.lengths, Tensor):
        return False
    first_row_sees = int(work.lengths.min()) + work.added_tokens - (shape.rows - 1)
    return 16 * (work.first_block + shape.entries) <= first_row_sees


def _tile_bytes(group: LayerGroup) -> tuple[int, int]:
    """Shared memory of attend_tile with APART 1 and 0: K and V of a leaf apart, and in one place;
    of E4M3, in one place with codes that are on their way, and without.
    """
    pads = [-(-dim // 16) * 16 for dim in (group.head_dim, group.value_dim)]
    key_row, value_row = (2 * (pad + 8) for pad in pads)
    fixed = TILE_PAIRS * key_row + 2 * LEAF_TOKENS * 12
    together = fixed + LEAF_TOKENS * max(key_row, value_row)
    if group.is_e4m3:
        together += 4 * (4 * LEAF_TOKENS + TILE_PAIRS)
        return together + LEAF_TOKENS * sum(pads), together
    return fixed + LEAF_TOKENS * (key_row + value_row), together


def tile_constants(
    chip: Chip, group: LayerGroup, block_size: int, is_wide: bool
) -> dict[str, int | str]:
    """Of attend_tile. ``is_wide``: every unit lies on 16 bytes."""
    return dim_constants(group, block_size) | {
        "WIDE": int(is_wide),
        "APART": int(_tile_bytes(group)[0] <= chip.shared_bytes_limit),
        "TRANSFORM": transform_of(group),
    }


def _launch_tiles(device: Launcher, stream: Stream, work: AttendWork, shape: Shape) -> None:
    group = work.units.group
    tiles = -(-shape.rows * group.group_size // TILE_PAIRS)
    splits = max(1, min(shape.spans, -(-2 * device.sm_count // (tiles * shape.pairs))))
    if shape.rows_in_state * shape.spans * (group.value_dim + 2) * 4 > MOST_PARTIAL_BYTES:
        splits = 1
    params = attend_params(device, stream, work, shape, shape.spans, partial=splits > 1)
    _launch_tile(device, stream, work, shape, splits, params)
    if splits > 1:
        _launch_merge(device, stream, group, work.units.block_size, shape, params)


def _launch_tile(
    device: Launcher, stream: Stream, work: AttendWork, shape: Shape, splits: int, params: bytes
) -> None:
    group, size = work.units.group, work.units.block_size
    constants = tile_constants(device, group, size, is_wide(work)) | page_constants(work)
    tiles = -(-shape.rows * group.group_size // TILE_PAIRS)
    grid = Grid(tiles, shape.pairs, splits)
    apart, together = _tile_bytes(group)
    shared = apart if constants["APART"] else together
    device.launch(stream, "attend_tile", constants, grid, Grid(TILE_THREADS), shared, params)


def _launch_merge(
    device: Launcher, stream: Stream, group: LayerGroup, size: int, shape: Shape, params: bytes
) -> None:
    constants = span_constants(group, size)
    block = Grid(-(-group.value_dim // 32) * 32)
    device.launch(stream, "merge_spans", constants, Grid(shape.rows_in_state), block, 0, params)
