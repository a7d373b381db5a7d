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
SELECT_STATIC_BYTES = 6144  # shared memory of select.cu that has a fixed size, rounded up

IN_FLIGHT = 4  # loads of a lane in gather.cu
TILE_TOKENS = 16  # of encode.cu
COLUMNS = 8  # of a thread block in score.cu's project
CHECKSUM_ROW = 4096  # bytes of a thread block's step in checksum.cu

COUNTER_BYTES = 1 << 16
"""The start of a workspace, which belongs to kernels that need zeros."""

MOVE_BLOCKS = 64
"""Thread blocks of gather and scatter: enough for the link, few beside attention (gather.cu)."""

KEPT_KEYS = 24576
"""Blocks of which select keeps the keys in shared memory, 96 KiB."""

CODE_BLOCKS_AN_SM = 4
"""Thread blocks of encode and score that take turns: they hide each other's first loads."""

BY_16, BY_2 = {"CHUNK": 16}, {"CHUNK": 2}
"""Bytes of one access."""

DIRECT_INDEX_BYTES = 4096
"""Index lists that every KV head reads: longer ones are worth a copy to the device."""


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
        _contiguous(into.matrix, 2, "matrix"),
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
    # Every thread block reads the matrix: over the link that costs more than fewer of them.
    most = device.sm_count * CODE_BLOCKS_AN_SM if into.matrix.on_device else device.sm_count // 4
    grid = Grid(min(pairs, most))
    shared_bytes = 2 * dim * (rank + TILE_TOKENS)
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
    matrix = _contiguous(codes.matrix, 2, "matrix")
    chunk = {"CHUNK": 8 if rank % 8 == 0 and (address | matrix) % 16 == 0 else 1}
    direct = work.code_index.nbytes <= DIRECT_INDEX_BYTES
    params = struct.pack(
        "<QqqQQQQQqiiiiiifi",
        work.queries.address,
        *work.queries.strides,
        matrix,
        device.workspace(stream, COUNTER_BYTES + 4 * group.q_heads * rank) + COUNTER_BYTES,
        address,
        device.upload(stream, work.code_index, direct=direct),
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
    shared_bytes = 12 * sort + 8 * count + 16 * places + 4 * table + 8 * -(-blocks // 32)
    most = device.shared_bytes_limit - SELECT_STATIC_BYTES
    keep_keys = blocks <= KEPT_KEYS and shared_bytes + 4 * blocks <= most
    shared_bytes += 4 * blocks * keep_keys
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
        "<12Q11q8ifi",
        *(t.address for t in (work.scores, cache.slots, cache.owner, cache.mass, cache.used)),
        device.upload(stream, work.pinned, direct=True),
        *(0 if t is None else t.address for t in last),
        *(t.address for t in (work.chosen, work.chosen_slots, work.missing, work.left_out)),
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
        keep_keys,
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
