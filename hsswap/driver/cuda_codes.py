"""Launch code of encode and score for the predictor ``codes``. See ``cuda_operations``."""

from __future__ import annotations

import struct

import numpy as np

from hsswap.codec import PLANE_BITS
from hsswap.driver.base import Stream
from hsswap.driver.codes_operations import (
    EncodeCodesWork,
    LayerCodes,
    ScoreCodesWork,
    table_offsets,
)
from hsswap.driver.cuda_operations import chunk_of, contiguous_address, row_items
from hsswap.driver.cuda_seam import (
    Grid,
    Launcher,
    key_scales_at,
    unit_constants,
)
from hsswap.driver.cuda_top_k import COUNTER_BYTES
from hsswap.driver.operations import I32
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError

ENCODE_THREADS = 128
ENCODE_TILE = 16  # tokens
ENCODE_BLOCKS_AN_SM = 4
MASS_THREADS = 512
RANK_THREADS = 128
RANKS_AN_SM = 2  # thread blocks of codes_rank that a multiprocessor has room for, at least
RESERVED_BYTES = 1024  # of shared memory, of each thread block on a multiprocessor
QUERIES = 4  # of a thread block of codes_mass
MOST_SPAN = MASS_THREADS  # blocks that a thread block of codes_mass takes at a time
FEW_PAGES = 64  # whose addresses travel with the parameters
FEW_HEADS = 64  # whose units of the block being filled do, too
TOGETHER = 8  # blocks that a warp of codes_mass takes at a time
ROW_TOKENS = 16  # of two mma
ROUND_PLANES, ROUND_BYTES = 8, 2176  # planes multiplied at a time; their weights in shared memory
RING_BYTES = 2 * 68 * MASS_THREADS  # codes on their way in codes_mass
ALIGNMENT = 256


def _tables(codes: LayerCodes) -> bytes:
    """The struct ``Tables`` of codes.cuh, 96 bytes."""
    heads, dim = codes.group.kv_heads, codes.group.head_dim
    if codes.tables is None:
        return struct.pack("<10Q4i", *[0] * 10, heads, dim, 0, 0)
    most = max(len(codec.bits) for codec in codes.codecs)
    planes = max(codec.planes for codec in codes.codecs)
    base = contiguous_address(codes.tables, 1, "tables")
    parts = [base + offset for offset in table_offsets(heads, dim, most, planes)]
    return struct.pack("<10Q4i", *parts, heads, dim, most, planes)


def _pages(device: Launcher, stream: Stream, codes: LayerCodes) -> int:
    """The address of the list of pages."""
    addresses = np.array([page.address for page in codes.pages] or [0], np.uint64)
    name = 0 if codes.tables is None else codes.tables.address
    return device.keep(stream, f"code pages of {name}", addresses)


def encode(device: Launcher, stream: Stream, work: EncodeCodesWork) -> None:
    """Thread blocks take (block, head) pairs in turn."""
    into, blocks, count = work.into, work.blocks, len(work.host_slots)
    pairs = count * into.group.kv_heads
    if not pairs:
        return
    params = struct.pack(
        "<Q96sQQQqqqqii",
        blocks.memory.address,
        _tables(into),
        _pages(device, stream, into),
        device.upload(stream, work.host_slots, direct=True),
        device.upload(stream, work.code_index, direct=True),
        blocks.unit_bytes,
        blocks.block_bytes,
        into.row_bytes,
        key_scales_at(into.group, blocks.block_size),
        count,
        blocks.block_size,
    )
    most = max(len(codec.bits) for codec in into.codecs)
    shared_bytes = ENCODE_TILE * (4 * into.group.head_dim + most + 4)
    grid = Grid(min(pairs, ENCODE_BLOCKS_AN_SM * device.sm_count))
    # A row of keys is a whole number of 16 bytes: dims are multiples of 8.
    chunk = chunk_of(blocks.memory.address, blocks.unit_bytes)
    block, kind = Grid(ENCODE_THREADS), chunk | unit_constants(into.group)
    device.launch(stream, "codes_encode", kind, grid, block, shared_bytes, params)


class _Workspace:
    """Places of the arrays that the kernels of one score hand on, float32."""

    def __init__(self, device: Launcher, stream: Stream, sizes: dict[str, int]) -> None:
        offset = COUNTER_BYTES
        self._offsets = {}
        for name, floats in sizes.items():
            self._offsets[name] = offset
            offset += -(-4 * max(1, floats) // ALIGNMENT) * ALIGNMENT
        self._address = device.workspace(stream, offset)

    def __getitem__(self, name: str) -> int:
        return self._address + self._offsets[name]


def score(device: Launcher, stream: Stream, work: ScoreCodesWork) -> None:
    """Two kernels: the blocks' masses and exact logits of what is resident; scores."""
    codes, group = work.codes, work.codes.group
    queries = group.q_heads
    blocks = work.code_index.shape[0]
    if not blocks:
        return
    span, grid = _spans(device, codes, blocks)
    sizes = {"mass": queries * blocks, "partial": 4 * queries * grid.x}
    space = _Workspace(device, stream, sizes)
    _mass(device, stream, work, space, span, grid)
    params = struct.pack(
        "<5Q3q3i4x",
        space["mass"],
        work.memory.correction.address,
        space["partial"],
        work.scores.address,
        work.uncorrected.address,
        row_items(work.memory.correction, 4, "memory.correction"),
        row_items(work.scores, 4, "scores"),
        row_items(work.uncorrected, 4, "uncorrected"),
        blocks,
        group.group_size,
        grid.x,
    )
    grid = Grid(-(-blocks // RANK_THREADS), group.kv_heads)
    shared_bytes = max(8 * group.group_size, _spreading_bytes(device, grid.x * grid.y))
    device.launch(
        stream, "codes_rank", {}, grid, Grid(RANK_THREADS), shared_bytes, params, follows=True
    )


def _spreading_bytes(device: Launcher, thread_blocks: int) -> int:
    """Shared memory by which a multiprocessor has no room for more than its share of them.

    Those of codes_rank begin while codes_mass runs on all multiprocessors but few: without this
    they crowd on these few, and take 2.5 us longer.
    """
    share = max(RANKS_AN_SM, -(-thread_blocks // device.sm_count))
    return (device.shared_bytes_limit + RESERVED_BYTES) // share - RESERVED_BYTES


def _spans(device: Launcher, codes: LayerCodes, blocks: int) -> tuple[int, Grid]:
    """Blocks that a thread block of codes_mass takes at a time, and its grid."""
    heads = codes.group.kv_heads
    query_groups = -(-codes.group.group_size // QUERIES)
    most = max(1, device.sm_count // (heads * query_groups))
    step = TOGETHER if is_tiled(codes.block_size) else 1
    span = min(MOST_SPAN, step * -(-blocks // (step * most)))
    return span, Grid(min(-(-blocks // span), most), heads, query_groups)


def _mass(
    device: Launcher,
    stream: Stream,
    work: ScoreCodesWork,
    space: _Workspace,
    span: int,
    grid: Grid,
) -> None:
    codes, last, resident, cache = work.codes, work.last, work.resident, work.resident.cache
    few_pages = [page.address for page in codes.pages] if len(codes.pages) <= FEW_PAGES else None
    few_active = resident.active if codes.group.kv_heads <= FEW_HEADS else None
    params = struct.pack(
        f"<96sQqq13Q7q11i2f4x{8 * FEW_PAGES}s{4 * FEW_HEADS}s",
        _tables(codes),
        work.queries.address,
        *work.queries.strides,
        _pages(device, stream, codes) if few_pages is None else 0,
        _list(device, stream, "code index", work.code_index),
        _list(device, stream, "pinned blocks", resident.pinned),
        0 if last is None else last.chosen.address,
        0 if last is None else last.lse.address,
        work.memory.predicted.address,
        work.memory.correction.address,
        space["mass"],
        space["partial"],
        resident.units.memory.address,
        0 if cache is None else cache.owner.address,
        0 if cache is None else cache.slots.address,
        device.upload(stream, resident.active, direct=True) if few_active is None else 0,
        codes.row_bytes,
        0 if last is None else row_items(last.chosen, 4, "last.chosen"),
        0 if last is None else row_items(last.lse, 4, "last.lse"),
        resident.units.unit_bytes,
        key_scales_at(codes.group, codes.block_size),
        0 if cache is None else row_items(cache.owner, 4, "resident.cache.owner"),
        0 if cache is None else row_items(cache.slots, 4, "resident.cache.slots"),
        work.code_index.shape[0],
        codes.group.group_size,
        codes.block_size,
        resident.pinned.shape[0],
        0 if last is None else last.chosen.shape[1],
        int(work.first),
        work.memory.predicted.shape[1],
        row_items(work.memory.predicted, 4, "memory.predicted"),
        span,
        0 if cache is None else cache.slots.shape[1],
        resident.active_tokens,
        codes.group.logit_scale,
        codes.group.soft_cap or 0.0,
        np.array(few_pages or [], np.uint64).tobytes(),
        b"" if few_active is None else few_active.tobytes(),
    )
    kernel = "codes_mass" if is_tiled(codes.block_size) else "codes_mass_any"
    kind = chunk_of(resident.units.memory.address, resident.units.unit_bytes)
    device.launch(
        stream,
        kernel,
        kind | unit_constants(codes.group),
        grid,
        Grid(MASS_THREADS),
        _shared_bytes(device, codes),
        params,
        follows=True,
    )


def _shared_bytes(device: Launcher, codes: LayerCodes) -> int:
    """Of codes_mass or codes_mass_any. Raises ArgumentError."""
    planes = max((codec.planes for codec in codes.codecs), default=0)
    dims = max((len(codec.bits) for codec in codes.codecs), default=0)
    nbytes = 4 * QUERIES * (dims + 1)  # a float a query and dim, and:
    if is_tiled(codes.block_size):
        nbytes += RING_BYTES + ROUND_BYTES * -(-planes // ROUND_PLANES)
    else:  # four floats a bit
        nbytes += PLANE_BITS * planes * 16
    if nbytes > device.shared_bytes_limit:
        raise ArgumentError(f"codes of {planes} planes need {nbytes} bytes of shared memory")
    return nbytes


def is_tiled(block_size: int) -> bool:
    """Whether a block's tokens are whole rows of two mma."""
    return block_size % ROW_TOKENS == 0


def _list(device: Launcher, stream: Stream, name: str, given: I32 | Tensor) -> int:
    """The address of a list that the caller gave, or that the device holds."""
    return given.address if isinstance(given, Tensor) else device.keep(stream, name, given)
