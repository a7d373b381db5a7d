"""Units of attention's tiles in float32, from wherever they lie."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hsswap import e4m3
from hsswap.bf16 import F32
from hsswap.dims import SCALE_BYTES
from hsswap.driver.host_memory import Scratch
from hsswap.driver.host_ops import units_of_blocks
from hsswap.driver.operations import AttendWork, PagePool
from hsswap.halves import widen

U8 = NDArray[np.uint8]


def wide_units(work: AttendWork, slots: NDArray[np.int32], scratch: Scratch) -> tuple[F32, F32]:
    """K ``[S, H, n, W, dk]`` and V ``[S, H, n, W, dv]`` of slots ``[S, H, n, blocks]``, W their
    tokens; undefined where a slot is -1.
    """
    group, size = work.units.group, work.units.block_size
    taken = _take(work, slots, scratch)
    values_at = size * group.head_dim * group.item_bytes
    scales_at = values_at + size * group.value_dim * group.item_bytes
    parts: list[F32] = []
    for name, start, stop, dim in (
        ("keys", 0, values_at, group.head_dim),
        ("values", values_at, scales_at, group.value_dim),
    ):
        wide = scratch.array(name, (*slots.shape, size, dim), np.float32)
        codes = taken[..., start:stop]
        if group.is_e4m3:
            scales = taken[..., scales_at : scales_at + size * SCALE_BYTES].view(np.float32)
            e4m3.to_float32(codes.reshape(wide.shape), scales, wide)
            scales_at += size * SCALE_BYTES
        else:
            widen(codes.view(np.uint16).reshape(wide.shape), group.dtype, wide)
        parts.append(wide.reshape(*slots.shape[:3], -1, dim))
    return parts[0], parts[1]


def _take(work: AttendWork, slots: NDArray[np.int32], scratch: Scratch) -> U8:
    """The units of some slots ``[..., unit_bytes]``; undefined where the slot is -1."""
    if isinstance(work.units, PagePool):
        return _take_pages(work.units, slots)
    memory = work.units.memory.array()
    taken: U8 = scratch.array("units", (*slots.shape, memory.shape[1]), np.uint8)
    in_place = slots < -1
    if work.blocks is None or not in_place.any():
        # -1 is clipped to slot 0.
        np.take(memory, slots, axis=0, out=taken, mode="clip")
        return taken
    # The larger part is taken into place at once, the smaller one copied over it.
    flat = taken.reshape(-1, memory.shape[1])
    entries = slots.ravel()
    held, away = entries >= 0, entries < -1
    blocks = work.blocks.memory.array()
    packed = blocks.shape[1] == work.units.group.kv_heads * memory.shape[1]
    if packed and away.sum() > held.sum():
        rows = blocks.reshape(-1, memory.shape[1])
        np.take(rows, -2 - entries, axis=0, out=flat, mode="clip")
        at = np.flatnonzero(held)
        flat[at] = memory[entries[at]]
        return taken
    np.take(memory, slots, axis=0, out=taken, mode="clip")
    at = np.flatnonzero(away)
    host_slot, head = np.divmod(-2 - entries[at], work.units.group.kv_heads)
    flat[at] = units_of_blocks(work.blocks)[host_slot, head]
    return taken


def _take_pages(pool: PagePool, slots: NDArray[np.int32]) -> U8:
    """The same out of an engine's pages, of the head of the second axis, bytes as in a unit."""
    head = np.arange(slots.shape[1])[:, None, None]
    parts = []
    for tensor in (pool.keys, pool.values, pool.key_scales, pool.value_scales):
        if tensor is not None:
            pages = tensor.array().swapaxes(1, 2)  # [pages, H, T, dim] or [pages, H, T]
            # -1 is page 0, and not looked at.
            taken = pages[np.maximum(slots, 0), head].reshape(*slots.shape, -1)
            parts.append(taken.view(np.uint8))
    return np.concatenate(parts, axis=-1)
