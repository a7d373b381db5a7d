"""The parameters of the attention kernels: sizes, constants, packed structs, tensor maps."""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from hsswap.config import LayerGroup, ModelDims
from hsswap.driver.base import Stream
from hsswap.driver.cuda_seam import Launcher, unit_constants
from hsswap.driver.operations import (
    I32,
    AttendWork,
    AttentionState,
    FinalizeWork,
    PagePool,
    UnitPool,
)
from hsswap.driver.tensor import Tensor, contiguous_strides
from hsswap.errors import ArgumentError, DeviceError

LEAF_TOKENS = 128
MOST_LENGTH = (1 << 31) - 1  # that travels with the parameters
WIDE_PAIRS = 128
RESERVED_BYTES = 1 << 16
"""The first bytes of a stream's workspace are other operations' counters."""

_ATTEND = struct.Struct("<17Q11qQ6q12i2f2Q6q")
ATTEND_BYTES = _ATTEND.size
QUERIES_AT, OUT_AT, LENGTH_AT = 0, 8 * 14, 8 * (17 + 11 + 1 + 6) + 4 * 11
"""Where the addresses of queries and output are, and a length that travels with the parameters."""


@dataclass(frozen=True, slots=True)
class Shape:
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
    def of(cls, work: AttendWork) -> Shape:
        """The sizes of a call."""
        sequences, rows = work.queries.shape[:2]
        sizes = (sequences, rows, int(work.slots.shape[2]))
        return cls.of_sizes(work.units.group, work.units.block_size, work.span_blocks, sizes)

    @classmethod
    def of_sizes(
        cls, group: LayerGroup, block_size: int, span_blocks: int, sizes: tuple[int, int, int]
    ) -> Shape:
        """``sizes``: sequences, rows of each, entries of each list."""
        sequences, rows, entries = sizes
        return cls(
            sequences,
            rows,
            entries,
            sequences * group.kv_heads,
            -(-entries // span_blocks),
            -(-entries * block_size // LEAF_TOKENS),
            span_blocks * block_size // LEAF_TOKENS,
            sequences * rows * group.q_heads,
        )


def attend_params(
    device: Launcher,
    stream: Stream,
    work: AttendWork,
    shape: Shape,
    parts: int,
    end: FinalizeWork | None = None,
    *,
    partial: bool = True,
    wide: bool = False,
) -> bytes:
    """Upload the index arrays and pack ``AttendParams`` of attention.cuh."""
    group = work.units.group
    done = part_sums = part_rows = 0
    if wide:
        tiles = -(-shape.rows * group.group_size // WIDE_PAIRS)
        done = device.workspace(stream, RESERVED_BYTES + 4 * shape.pairs * tiles) + RESERVED_BYTES
    elif partial and parts:
        sums_bytes = -(-shape.rows_in_state * parts * 8 // 256) * 256
        rows_bytes = shape.rows_in_state * parts * group.value_dim * 4
        start = device.workspace(stream, RESERVED_BYTES + sums_bytes + rows_bytes)
        part_sums = start + RESERVED_BYTES
        part_rows = part_sums + sums_bytes
    slots, positions, list_stride = _tables(device, stream, work, shape)
    lengths = _lengths(device, stream, work)
    return _ATTEND.pack(
        work.queries.address,
        _first_unit(work.units),
        0 if work.blocks is None else work.blocks.memory.address,
        slots,
        positions,
        lengths.address,
        work.state.maximum.address,
        work.state.total.address,
        work.state.weighted.address,
        address_of(work.block_lse),
        0 if end is None else address_of(end.block_mass),
        part_rows,
        part_sums,
        done,
        0 if end is None else end.out.address,
        0 if end is None else address_of(end.lse),
        0 if end is None else address_of(end.sinks),
        *element_strides(work.queries),
        *((0, 0, 0, 0) if end is None else element_strides(end.out)),
        _unit_bytes(work.units),
        0 if work.blocks is None else work.blocks.block_bytes,
        list_stride,
        *_pages(work.units),
        shape.sequences,
        shape.rows,
        shape.entries,
        work.first_block,
        work.span_blocks,
        int(work.begin),
        group.window or 0,
        parts,
        int(wide),
        *lengths[1:],
        group.logit_scale,
        group.soft_cap or 1.0,
        *_page_scales(work.units),
    )


def _tables(
    device: Launcher, stream: Stream, work: AttendWork, shape: Shape
) -> tuple[int, int, int]:
    """Addresses of slots and positions, and elements from list to list, the same for both."""
    tables = [t for t in (work.slots, work.positions) if isinstance(t, Tensor)]
    list_stride = tables[0].strides[-2] // 4 if tables else shape.entries
    slots, positions = (
        0 if table is None else _address(device, stream, table, shape.entries, list_stride)
        for table in (work.slots, work.positions)
    )
    return slots, positions, list_stride


def _address(
    device: Launcher, stream: Stream, table: I32 | Tensor, entries: int, list_stride: int
) -> int:
    if isinstance(table, Tensor):
        return table.address
    if list_stride != entries:  # as far apart as those of the other table
        apart = np.full((*table.shape[:2], list_stride), -1, np.int32)
        apart[..., :entries] = table
        table = apart
    return device.upload(stream, np.ascontiguousarray(table))


class _Lengths(NamedTuple):
    """Address, bytes of one (0: ``more`` is the length), bytes to the next, and what is added."""

    address: int
    nbytes: int
    stride: int
    more: int


def _lengths(device: Launcher, stream: Stream, work: AttendWork) -> _Lengths:
    lengths, more = work.lengths, work.added_tokens
    if isinstance(lengths, Tensor):
        nbytes = 4 if lengths.dtype == "i32" else 8
        return _Lengths(lengths.address, nbytes, lengths.strides[0], more)
    if len(lengths) == 1 and int(lengths[0]) + more <= MOST_LENGTH:
        return _Lengths(0, 0, 0, int(lengths[0]) + more)
    return _Lengths(device.upload(stream, lengths), 8, 8, more)


def dim_constants(group: LayerGroup, block_size: int) -> dict[str, int | str]:
    """The -D constants that every kernel of a model's dims takes."""
    return {
        "HEAD_DIM": group.head_dim,
        "VALUE_DIM": group.value_dim,
        "GROUP": group.group_size,
        "KV_HEADS": group.kv_heads,
        "BLOCK": block_size,
        **unit_constants(group),
    }


def span_constants(group: LayerGroup, block_size: int) -> dict[str, int | str]:
    """The same, and what is done to logits."""
    return dim_constants(group, block_size) | {"TRANSFORM": transform_of(group)}


def page_constants(work: AttendWork) -> dict[str, int | str]:
    """What kernels that take an engine's pages are given for them."""
    return {"PAGES": 1} if isinstance(work.units, PagePool) else {}


def transform_of(group: LayerGroup) -> int:
    """What is done to logits before their maximum is taken: attend_tile.cu, TRANSFORM."""
    if group.soft_cap is not None:
        return 2
    return 0 if group.logit_scale > 0 and math.isfinite(group.logit_scale) else 1


def _first_unit(units: UnitPool | PagePool) -> int:
    return units.keys.address if isinstance(units, PagePool) else units.memory.address


def unit_bytes_of(group: LayerGroup, block_size: int) -> int:
    """Bytes of a unit."""
    return ModelDims((group,), block_size).unit_bytes(group)


def _unit_bytes(units: UnitPool | PagePool) -> int:
    return 0 if isinstance(units, PagePool) else units.unit_bytes


def _pages(units: UnitPool | PagePool) -> tuple[int, ...]:
    """The address of an engine's values, and the strides of page, head and token of keys and of
    values; all 0 for units.
    """
    if not isinstance(units, PagePool):
        return (0,) * 7
    strides = ((t.strides[0], t.strides[2], t.strides[1]) for t in (units.keys, units.values))
    return (units.values.address, *(stride for three in strides for stride in three))


def _page_scales(units: UnitPool | PagePool) -> tuple[int, ...]:
    """The same of the scales of an engine's pages: both addresses, and the strides."""
    if not isinstance(units, PagePool) or units.key_scales is None or units.value_scales is None:
        return (0,) * 8
    both = (units.key_scales, units.value_scales)
    strides = ((t.strides[0], t.strides[2], t.strides[1]) for t in both)
    return (*(t.address for t in both), *(stride for three in strides for stride in three))


def is_wide(work: AttendWork) -> bool:
    """Whether every unit, or every row of an engine's pages, lies on 16 bytes; of E4M3, on 8."""
    if isinstance(work.units, PagePool):
        keys, values = work.units.keys, work.units.values
        numbers = (keys.address, values.address, *keys.strides[:3], *values.strides[:3])
        return not any(x % (8 * work.units.group.item_bytes) for x in numbers)
    if work.units.group.is_e4m3:
        return True
    pools = [work.units.memory.address, work.units.unit_bytes]
    if work.blocks is not None:
        pools.append(work.blocks.memory.address)
    return not any(x % 16 for x in pools)


def address_of(tensor: Tensor | None) -> int:
    """The address of a tensor, 0 for none."""
    return 0 if tensor is None else tensor.address


def element_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides in 16-bit elements. Raises ArgumentError when they are not whole."""
    halves = _half_of(tensor.strides)
    if halves is None:
        raise ArgumentError(f"strides {tensor.strides} are not whole 16-bit elements")
    return halves


@lru_cache(maxsize=4096)
def _half_of(strides: tuple[int, ...]) -> tuple[int, ...] | None:
    return None if any(s % 2 for s in strides) else tuple(s // 2 for s in strides)


def require_contiguous(tensor: Tensor, what: str) -> None:
    """Raise ArgumentError unless a float32 tensor is contiguous; ``what`` names it."""
    if not _is_contiguous(tensor.shape, tensor.strides):
        raise ArgumentError(f"{what} has strides {tensor.strides}; it must be contiguous")


@lru_cache(maxsize=4096)
def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Of float32. The stride of an axis of one element is never used."""
    wanted = zip(strides, contiguous_strides(shape, 4), shape, strict=True)
    return 0 in shape or all(have == want or n == 1 for have, want, n in wanted)


def require_contiguous_state(state: AttentionState) -> None:
    """The same for each tensor of carried state."""
    for name in ("maximum", "total", "weighted"):
        require_contiguous(getattr(state, name), f"state.{name}")


@lru_cache(maxsize=64)
def tensor_map(address: int, rows: int, halves: int) -> bytes:
    """A pool of units of d 128 as [2 halves of d][rows of K and V][64], in boxes of 16 rows.

    128 bytes, as cuTensorMapEncodeTiled makes them: rows in shared memory swizzled over 128 bytes.
    """
    from cuda.bindings import driver

    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,  # any of 16 bits
        3,
        address,
        [driver.cuuint64_t(n) for n in (64, rows, 2)],
        [driver.cuuint64_t(n) for n in (256, 128)],
        [driver.cuuint32_t(n) for n in (64, 16, halves)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(status):
        raise DeviceError(f"cuTensorMapEncodeTiled failed: {status}; report this")
    return ctypes.string_at(encoded.getPtr(), 128)
