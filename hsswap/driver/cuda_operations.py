"""Launch code of what moves and compresses units: parameters, grids, shared memory.

Written against :class:`Launcher`. Each function takes a checked record; the structs are those at
the top of the kernels' files, eight-byte fields first.
"""

from __future__ import annotations

import struct
from functools import cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

import numpy as np

from hsswap.driver.base import Stream
from hsswap.driver.cuda_seam import Grid, Launcher, key_scales_at, unit_constants
from hsswap.driver.operations import (
    BlockPool,
    ChecksumWork,
    EncodeWork,
    GatherWork,
    ScatterWork,
    UnitPool,
)
from hsswap.driver.round_operations import CopyWork
from hsswap.driver.tensor import Tensor, contiguous_strides
from hsswap.errors import ArgumentError

WARP = 32
WARPS = 8  # of append, gather and scatter
THREADS = 256  # of encode, score and checksum

IN_FLIGHT = 16  # loads of a lane in gather.cu
TILE_TOKENS = 16  # of encode.cu
CHECKSUM_ROW = 4096  # bytes of a thread block's step in checksum.cu

MOVE_BLOCKS = 48
"""Thread blocks of gather and scatter: enough for the link, few beside attention (gather.cu)."""

COPY_BYTES = 1 << 19
"""Mean bytes of a run from which the copy engine takes a gather. A copy takes the processor longer
than a launch, but no multiprocessor from attention.
"""

CODE_BLOCKS_AN_SM = 4
"""Thread blocks of encode and score that take turns: they hide each other's first loads."""

BY_16, BY_2 = {"CHUNK": 16}, {"CHUNK": 2}
"""Bytes of one access."""


def chunk_of(*numbers: int) -> dict[str, int]:
    """Bytes of one access, for addresses and strides."""
    bits = 0
    for number in numbers:
        bits |= number
    return BY_2 if bits & 15 else BY_16


def contiguous_address(tensor: Tensor, item_bytes: int, what: str) -> int:
    """The address of a tensor that must be contiguous on a GPU."""
    if tensor.strides != contiguous_strides(tensor.shape, item_bytes):
        raise ArgumentError(f"{what} has strides {tensor.strides}; it must be contiguous")
    return tensor.address


def row_items(tensor: Tensor, item_bytes: int, what: str) -> int:
    """Items between the rows of a matrix whose rows must be contiguous on a GPU."""
    if tensor.shape[1] > 1 and tensor.strides[1] != item_bytes:
        raise ArgumentError(f"{what} has strides {tensor.strides}; its rows must be contiguous")
    return tensor.strides[0] // item_bytes


def matrix_address(device: Launcher, stream: Stream, matrix: Tensor) -> int:
    """The address of the predictor's matrix in device memory: every thread block reads it."""
    if matrix.on_device:
        return contiguous_address(matrix, 2, "matrix")
    return device.keep(stream, f"matrix at {matrix.address}", matrix.array())


def pool_numbers(units: UnitPool, blocks: BlockPool) -> tuple[int, ...]:
    """Addresses and sizes that decide about alignment."""
    return units.memory.address, blocks.memory.address, units.unit_bytes


def _move(device: Launcher, stream: Stream, kernel: str, work: GatherWork | ScatterWork) -> None:
    assert work.heads is not None
    count = len(work.heads)
    if not count:
        return
    chunk = chunk_of(*pool_numbers(work.units, work.blocks))
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
    """Host slots to device slots: by the copy engine where runs of whole blocks are long."""
    runs = block_runs(work, COPY_BYTES)
    if not runs:
        _move(device, stream, "gather", work.by_unit())
        return
    block_bytes = work.blocks.block_bytes
    for run in runs:
        target = work.units.memory.address + run.device_slot * block_bytes
        source = work.blocks.memory.address + run.host_slot * block_bytes
        device.copy(stream, target, source, run.blocks * block_bytes)


class BlockRun(NamedTuple):
    """Neighbouring blocks in both tiers: the first host slot, the first block slot, how many."""

    host_slot: int
    device_slot: int
    blocks: int


def block_runs(work: GatherWork, mean_bytes: int) -> list[BlockRun]:
    """What a gather of whole blocks moves; nothing for units, for blocks with padding, and where
    the runs have fewer bytes on an average.
    """
    padded = work.blocks.block_bytes != work.units.group.kv_heads * work.units.unit_bytes
    if work.heads is not None or padded or not len(work.host_slots):
        return []
    hosts, slots = work.host_slots, work.device_slots
    goes_on = (hosts[1:] - hosts[:-1] == 1) & (slots[1:] - slots[:-1] == 1)
    breaks = np.flatnonzero(~goes_on) + 1
    if len(hosts) * work.blocks.block_bytes < mean_bytes * (len(breaks) + 1):
        return []  # before each is looked at: most gathers end here
    return [
        BlockRun(int(hosts[start]), int(slots[start]), stop - start)
        for start, stop in pairwise([0, *breaks.tolist(), len(hosts)])
    ]


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
        "<QQQQQqqqiiiiii",
        blocks.memory.address,
        matrix_address(device, stream, into.matrix),
        contiguous_address(into.codes, 2, "codes"),
        device.upload(stream, work.host_slots, direct=True),
        device.upload(stream, work.code_index, direct=True),
        blocks.unit_bytes,
        blocks.block_bytes,
        key_scales_at(blocks.group, blocks.block_size),
        pairs,
        into.group.kv_heads,
        blocks.block_size,
        dim,
        rank,
        0,
    )
    grid = Grid(min(pairs, CODE_BLOCKS_AN_SM * device.sm_count))
    shared_bytes = 2 * dim * (-(-rank // 4) * 4 + TILE_TOKENS)
    chunk = chunk_of(blocks.memory.address, blocks.unit_bytes)
    kind = chunk | unit_constants(blocks.group)
    device.launch(stream, "encode", kind, grid, Grid(THREADS), shared_bytes, params)


def copy_words(device: Launcher, stream: Stream, work: CopyWork) -> None:
    """One thread a word, at most a few thread blocks a multiprocessor."""
    words = prod(work.source.shape)
    plus = work.plus & 0xFFFFFFFF
    params = struct.pack("<QQqIi", work.source.address, work.target.address, words, plus, 0)
    grid = Grid(min(-(-words // THREADS), CODE_BLOCKS_AN_SM * device.sm_count))
    device.launch(stream, "copy_words", {}, grid, Grid(THREADS), 0, params, follows=True)


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
