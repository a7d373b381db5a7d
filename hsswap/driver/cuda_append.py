"""Launch code of append and append_at: 16-bit rows are copied, rows of E4M3 may be rounded."""

from __future__ import annotations

import struct

from hsswap.driver.base import Stream
from hsswap.driver.cuda_operations import BY_2, WARP, WARPS, chunk_of, pool_numbers
from hsswap.driver.cuda_seam import Grid, Launcher, format_constants
from hsswap.driver.operations import AppendAtWork, AppendWork
from hsswap.driver.tensor import Tensor

BLOCK = Grid(WARPS * WARP)


def append(device: Launcher, stream: Stream, work: AppendWork) -> None:
    """One warp a row and head, into both tiers."""
    group = work.units.group
    pairs = work.keys.shape[0] * group.kv_heads
    if not pairs:
        return
    where = (
        work.units.memory.address,
        work.blocks.memory.address,
        device.upload(stream, work.device_slots, direct=True),
        device.upload(stream, work.host_slots, direct=True),
        work.units.unit_bytes,
        work.blocks.block_bytes,
        work.first_offset,
        pairs,
    )
    grid = Grid(-(-pairs // WARPS))
    if group.is_e4m3:
        params = _e4m3_sources(work, 0) + struct.pack("<QQQQqqqq", *where) + _sizes(work)
        device.launch(stream, "append_e4m3", format_constants(group.dtype), grid, BLOCK, 0, params)
        return
    params = struct.pack(
        "<QqqqQqqqQQQQqqqq",
        work.keys.address,
        *work.keys.strides,
        work.values.address,
        *work.values.strides,
        *where,
    )
    device.launch(stream, "append", _chunk(work), grid, BLOCK, 0, params + _sizes(work))


def append_at(device: Launcher, stream: Stream, work: AppendAtWork) -> None:
    """One warp a sequence, row and head."""
    group, keys, values, host_slots = work.units.group, work.keys, work.values, work.host_slots
    sequences, rows = keys.shape[:2]
    pairs = sequences * rows * group.kv_heads
    where = struct.pack(
        "<5Q5q4i",
        work.units.memory.address,
        work.blocks.memory.address,
        work.slots.address,
        0 if host_slots is None else host_slots.address,
        work.positions.address,
        work.units.unit_bytes,
        work.blocks.block_bytes,
        work.slots.strides[1] // 4,
        0 if host_slots is None else host_slots.strides[0] // 4,
        pairs,
        rows,
        work.slots.shape[2],
        work.positions.strides[0],
        4 if work.positions.dtype == "i32" else 8,
    )
    grid = Grid(-(-pairs // WARPS))
    if group.is_e4m3:
        tensors = (keys, values, work.key_scales, work.value_scales)
        apart = struct.pack("<4q", *(0 if t is None else t.strides[0] for t in tensors))
        params = _e4m3_sources(work, 1) + apart + where + _sizes(work)
        constants = format_constants(group.dtype)
        device.launch(stream, "append_at_e4m3", constants, grid, BLOCK, 0, params)
        return
    params = struct.pack(
        "<Q4qQ4q",
        keys.address,
        *keys.strides[1:],
        keys.strides[0],
        values.address,
        *values.strides[1:],
        values.strides[0],
    )
    params += where + _sizes(work)
    device.launch(stream, "append_at", _chunk(work), grid, BLOCK, 0, params)


def _sizes(work: AppendWork | AppendAtWork) -> bytes:
    """Heads, tokens of a block, and bytes of a row of K and of V in a unit."""
    group = work.units.group
    rows = (group.head_dim * group.item_bytes, group.value_dim * group.item_bytes)
    return struct.pack("<4i", group.kv_heads, work.units.block_size, *rows)


def _chunk(work: AppendWork | AppendAtWork) -> dict[str, int]:
    """Bytes of one access."""
    keys, values = work.keys, work.values
    if keys.strides[-1] != 2 or values.strides[-1] != 2:
        return BY_2
    return chunk_of(
        *pool_numbers(work.units, work.blocks),
        keys.address,
        values.address,
        *keys.strides[:-1],
        *values.strides[:-1],
    )


def _e4m3_sources(work: AppendWork | AppendAtWork, first: int) -> bytes:
    """The struct ``Sources`` of append_e4m3.cu; ``first``: the axis of rows."""

    def scales(tensor: Tensor | None) -> tuple[int, ...]:
        return (0, 0, 0) if tensor is None else (tensor.address, *tensor.strides[first:])

    return struct.pack(
        "<QqqqQqqqQqqQqq",
        work.keys.address,
        *work.keys.strides[first:],
        work.values.address,
        *work.values.strides[first:],
        *scales(work.key_scales),
        *scales(work.value_scales),
    )
