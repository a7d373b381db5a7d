"""Launch code of the operations that are not attention: parameters, grids, shared memory.

Written against :class:`Launcher`. Each function takes a checked record; the structs are those at
the top of the kernels' files, eight-byte fields first.
"""

from __future__ import annotations

import struct
from functools import cache

import numpy as np

from hsswap.driver.base import Stream
from hsswap.driver.cuda_seam import Grid, Launcher
from hsswap.driver.operations import (
    AppendAtWork,
    AppendWork,
    BlockPool,
    ChecksumWork,
    EncodeWork,
    GatherWork,
    ScatterWork,
    ScoreWork,
    SelectWork,
    UnitPool,
)
from hsswap.driver.tensor import Tensor, contiguous_strides
from hsswap.errors import ArgumentError

WARP = 32
WARPS = 8  # of append, gather and scatter
THREADS = 256  # of encode, score and checksum
SELECT_THREADS = 1024
INLINE_PINNED = 32  # pinned blocks that travel with the parameters
SELECT_STATIC_BYTES = 6144  # shared memory of select.cu that has a fixed size, rounded up

IN_FLIGHT = 16  # loads of a lane in gather.cu
TILE_TOKENS = 16  # of encode.cu
COLUMNS = 8  # of a thread block in score.cu's project
CHECKSUM_ROW = 4096  # bytes of a thread block's step in checksum.cu

COUNTER_BYTES = 1 << 16
"""The start of a workspace, which belongs to kernels that need zeros."""

MOVE_BLOCKS = 48
"""Thread blocks of gather and scatter: enough for the link, few beside attention (gather.cu)."""

KEPT_KEYS = 24576
"""Blocks of which select keeps the keys in shared memory, 96 KiB."""

CODE_BLOCKS_AN_SM = 4
"""Thread blocks of encode and score that take turns: they hide each other's first loads."""

BY_16, BY_2 = {"CHUNK": 16}, {"CHUNK": 2}
"""Bytes of one access."""


def _chunk(*numbers: int) -> dict[str, int]:
    """Bytes of one access, for addresses and strides."""
    bits = 0
    for number in numbers:
        bits |= number
    return BY_2 if bits & 15 else BY_16


def _contiguous(tensor: Tensor, item_bytes: int, what: str) -> int:
    """The address of a tensor that must be contiguous on a GPU."""
    if tensor.strides != contiguous_strides(tensor.shape, item_bytes):
        raise ArgumentError(f"{what} has strides {tensor.strides}; it must be contiguous")
    return tensor.address


def _rows(tensor: Tensor, item_bytes: int, what: str) -> int:
    """Items between the rows of a matrix whose rows must be contiguous on a GPU."""
    if tensor.shape[1] > 1 and tensor.strides[1] != item_bytes:
        raise ArgumentError(f"{what} has strides {tensor.strides}; its rows must be contiguous")
    return tensor.strides[0] // item_bytes


def _matrix(device: Launcher, stream: Stream, matrix: Tensor) -> int:
    """The address of the predictor's matrix in device memory: every thread block reads it."""
    if matrix.on_device:
        return _contiguous(matrix, 2, "matrix")
    return device.keep(stream, f"matrix at {matrix.address}", matrix.array())


def _pools(units: UnitPool, blocks: BlockPool) -> tuple[int, ...]:
    """Addresses and sizes that decide about alignment."""
    return units.memory.address, blocks.memory.address, units.unit_bytes


def append(device: Launcher, stream: Stream, work: AppendWork) -> None:
    """One warp a row and head, into both tiers."""
    group = work.units.group
    keys, values = work.keys, work.values
    pairs = work.keys.shape[0] * group.kv_heads
    if not pairs:
        return
    chunk = _chunk(
        *_pools(work.units, work.blocks),
        keys.address,
        values.address,
        *keys.strides[:2],
        *values.strides[:2],
    )
    if keys.strides[2] != 2 or values.strides[2] != 2:
        chunk = BY_2
    params = struct.pack(
        "<QqqqQqqqQQQQqqqqiiii",
        work.keys.address,
        *work.keys.strides,
        work.values.address,
        *work.values.strides,
        work.units.memory.address,
        work.blocks.memory.address,
        device.upload(stream, work.device_slots, direct=True),
        device.upload(stream, work.host_slots, direct=True),
        work.units.unit_bytes,
        work.blocks.block_bytes,
        work.first_offset,
        pairs,
        group.kv_heads,
        work.units.block_size,
        2 * group.head_dim,
        2 * group.value_dim,
    )
    grid, block = Grid(-(-pairs // WARPS)), Grid(WARPS * WARP)
    device.launch(stream, "append", chunk, grid, block, 0, params)


def append_at(device: Launcher, stream: Stream, work: AppendAtWork) -> None:
    """One warp a sequence, row and head."""
    group, keys, values = work.units.group, work.keys, work.values
    sequences, rows = keys.shape[:2]
    chunk = _chunk(
        *_pools(work.units, work.blocks),
        keys.address,
        values.address,
        *keys.strides[:3],
        *values.strides[:3],
    )
    if keys.strides[3] != 2 or values.strides[3] != 2:
        chunk = BY_2
    host_slots = work.host_slots
    params = struct.pack(
        "<Q4qQ4q5Q5q8i",
        keys.address,
        *keys.strides[1:],
        keys.strides[0],
        values.address,
        *values.strides[1:],
        values.strides[0],
        work.units.memory.address,
        work.blocks.memory.address,
        work.slots.address,
        0 if host_slots is None else host_slots.address,
        work.positions.address,
        work.units.unit_bytes,
        work.blocks.block_bytes,
        work.slots.strides[1] // 4,
        0 if host_slots is None else host_slots.strides[0] // 4,
        sequences * rows * group.kv_heads,
        rows,
        work.slots.shape[2],
        work.positions.strides[0],
        4 if work.positions.dtype == "i32" else 8,
        group.kv_heads,
        work.units.block_size,
        2 * group.head_dim,
        2 * group.value_dim,
    )
    grid = Grid(-(-sequences * rows * group.kv_heads // WARPS))
    device.launch(stream, "append_at", chunk, grid, Grid(WARPS * WARP), 0, params)


def _move(device: Launcher, stream: Stream, kernel: str, work: GatherWork | ScatterWork) -> None:
    count = len(work.heads)
    if not count:
        return
    chunk = _chunk(*_pools(work.units, work.blocks))
    piece = WARP * IN_FLIGHT * chunk["CHUNK"]
    pieces_per_unit = -(-work.units.unit_bytes // piece)
    listed = np.concatenate((work.host_slots, work.heads, work.device_slots))
    params = struct.pack(
        "<QQQqqqii",
        work.blocks.memory.address,
        work.units.memory.address,
        device.upload(stream, listed, direct=True),
        work.units.unit_bytes,
        work.blocks.block_bytes,
        count * pieces_per_unit,
        count,
        pieces_per_unit,
    )
    grid = Grid(min(MOVE_BLOCKS, -(-count * pieces_per_unit // WARPS)))
    device.launch(stream, kernel, chunk, grid, Grid(WARPS * WARP), 0, params)


def gather(device: Launcher, stream: Stream, work: GatherWork) -> None:
    """Host slots to device slots."""
    _move(device, stream, "gather", work)


def scatter(device: Launcher, stream: Stream, work: ScatterWork) -> None:
    """Device slots to host slots."""
    _move(device, stream, "scatter", work)


def encode(device: Launcher, stream: Stream, work: EncodeWork) -> None:
    """Thread blocks take (block, head) pairs in turn."""
    into, blocks = work.into, work.blocks
    dim, rank = into.matrix.shape
    pairs = len(work.host_slots) * into.group.kv_heads
    if not pairs:
        return
    params = struct.pack(
        "<QQQQQqqiiiiii",
        blocks.memory.address,
        _matrix(device, stream, into.matrix),
        _contiguous(into.codes, 2, "codes"),
        device.upload(stream, work.host_slots, direct=True),
        device.upload(stream, work.code_index, direct=True),
        blocks.unit_bytes,
        blocks.block_bytes,
        pairs,
        into.group.kv_heads,
        blocks.block_size,
        dim,
        rank,
        0,
    )
    grid = Grid(min(pairs, CODE_BLOCKS_AN_SM * device.sm_count))
    shared_bytes = 2 * dim * (-(-rank // 4) * 4 + TILE_TOKENS)
    chunk = _chunk(blocks.memory.address, blocks.unit_bytes)
    device.launch(stream, "encode", chunk, grid, Grid(THREADS), shared_bytes, params)


def score(device: Launcher, stream: Stream, work: ScoreWork) -> None:
    """The query times the matrix, then that times the codes."""
    codes, group = work.codes, work.codes.group
    count, heads = len(work.code_index), group.kv_heads
    if not count:
        return
    _, _, tokens, rank = codes.codes.shape
    address = _contiguous(codes.codes, 2, "codes")
    matrix = _matrix(device, stream, codes.matrix)
    chunk = {"CHUNK": 8 if rank % 8 == 0 and (address | matrix) % 16 == 0 else 1}
    params = struct.pack(
        "<QqqQQQQQqiiiiiifi",
        work.queries.address,
        *work.queries.strides,
        matrix,
        device.workspace(stream, COUNTER_BYTES + 4 * group.q_heads * rank) + COUNTER_BYTES,
        address,
        # The same for all layers, and for as many steps as a block has tokens.
        device.keep(stream, "code index", work.code_index),
        work.scores.address,
        _rows(work.scores, 4, "scores"),
        count,
        heads,
        group.q_heads,
        tokens,
        rank,
        group.head_dim,
        group.logit_scale,
        0,
    )
    block = Grid(THREADS)
    device.launch(stream, "project", chunk, Grid(-(-rank // COLUMNS)), block, 0, params)
    in_turn = THREADS // WARP * (WARP // min(tokens, WARP))
    most = max(1, CODE_BLOCKS_AN_SM * device.sm_count // heads)
    grid = Grid(min(most, -(-count // in_turn)), heads)
    device.launch(stream, "score", chunk, grid, block, 0, params)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def select(device: Launcher, stream: Stream, work: SelectWork) -> None:
    """A thread block a KV head."""
    heads, blocks = work.scores.shape
    count, places = work.chosen.shape[1], work.cache.slots.shape[1]
    table, sort = _power_of_two(max(2, 2 * places)), _power_of_two(places)
    shared_bytes = 12 * sort + 8 * count + 16 * places + 4 * table + 4 * -(-blocks // 32)
    most = device.shared_bytes_limit - SELECT_STATIC_BYTES
    keep_keys = blocks <= KEPT_KEYS and shared_bytes + 4 * blocks <= most
    keys = 0
    if keep_keys:
        shared_bytes += 4 * blocks
    else:
        keys = device.workspace(stream, COUNTER_BYTES + 4 * heads * blocks) + COUNTER_BYTES
    if shared_bytes > most:
        raise ArgumentError(
            f"select: {blocks} blocks and {places} cache slots a head need {shared_bytes} bytes of "
            f"shared memory; this GPU has {most}: take fewer slots a head"
        )
    last = (work.last_chosen, work.last_mass)
    listed = [
        (work.scores, 4, "scores"),
        *((t, 4, "last") for t in last if t is not None),
        (work.cache.slots, 4, "cache.slots"),
        (work.cache.owner, 4, "cache.owner"),
        (work.cache.mass, 4, "cache.mass"),
        (work.cache.used, 4, "cache.used"),
        (work.chosen, 4, "chosen"),
        (work.chosen_slots, 4, "chosen_slots"),
        (work.missing, 1, "missing"),
    ]
    strides = [_rows(*item) for item in listed]
    if len(listed) == 8:  # nothing of an earlier step
        strides[1:1] = [0, 0]
    cache = work.cache
    params = struct.pack(
        f"<13Q11q8if{INLINE_PINNED}ii",
        *(t.address for t in (work.scores, cache.slots, cache.owner, cache.mass, cache.used)),
        0 if len(work.pinned) <= INLINE_PINNED else device.upload(stream, work.pinned, direct=True),
        *(0 if t is None else t.address for t in last),
        *(t.address for t in (work.chosen, work.chosen_slots, work.missing, work.left_out)),
        keys,
        *strides[:3],
        work.left_out.strides[0] // 4,
        *strides[3:],
        blocks,
        count,
        len(work.pinned),
        0 if work.last_chosen is None else work.last_chosen.shape[1],
        places,
        work.step,
        table,
        sort,
        work.decay,
        *work.pinned[:INLINE_PINNED].tolist(),
        *[0] * (INLINE_PINNED - len(work.pinned)),
        0,
    )
    device.launch(stream, "select", {}, Grid(heads), Grid(SELECT_THREADS), shared_bytes, params)


def _multiply(a: int, b: int) -> int:
    """Product modulo the CRC's polynomial, reflected: bit 31 is x^0."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = (b >> 1) ^ (0xEDB88320 if b & 1 else 0)
    return product


@cache
def power_of_x(exponent: int) -> int:
    """x to the ``exponent``, modulo the CRC's polynomial, reflected."""
    result, base = 1 << 31, 1 << 30
    while exponent:
        if exponent & 1:
            result = _multiply(result, base)
        base = _multiply(base, base)
        exponent >>= 1
    return result


def checksum(device: Launcher, stream: Stream, work: ChecksumWork) -> None:
    """Thread blocks take blocks in turn."""
    count, block_bytes = len(work.block_slots), work.blocks.block_bytes
    if not count:
        return
    if work.blocks.memory.address % 16:
        raise ArgumentError("blocks.memory must be aligned to 16 bytes")
    params = struct.pack(
        "<QQQQqqiIII",
        work.blocks.memory.address,
        device.upload(stream, work.block_slots, direct=True),
        device.upload(stream, work.seeds, direct=True),
        work.out.address,
        work.out.strides[0],
        block_bytes,
        count,
        power_of_x(8 * CHECKSUM_ROW),
        power_of_x(8 * block_bytes),
        power_of_x(8 * 16),
    )
    grid = Grid(min(count, 2 * device.sm_count))
    device.launch(stream, "checksum", {}, grid, Grid(THREADS), 0, params)
