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
from hsswap.driver.cuda_operations import WARP, chunk_of, contiguous_address, row_items
from hsswap.driver.cuda_seam import (
    Grid,
    Launcher,
    format_constants,
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
RANK_THREADS = 256
EXACT_THREADS = 64  # little, so that all thread blocks fit beside codes_mass
QUERIES = 4  # of a thread block of codes_mass
MOST_SPAN = MASS_THREADS  # blocks that a thread block of codes_mass takes at a time
FEW_PAGES = 64  # whose addresses travel with the parameters
TOGETHER = 8  # blocks that a warp of codes_mass takes at a time
ROW_TOKENS = 16  # of two mma
ROUND_PLANES, ROUND_BYTES = 8, 2176  # planes multiplied at a time; their weights in shared memory
RING_BYTES = 3 * 68 * MASS_THREADS  # codes on their way in codes_mass
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
    """Three kernels: the blocks' masses, beside them exact logits of what is resident; scores."""
    codes, group = work.codes, work.codes.group
    queries = group.q_heads
    blocks = work.code_index.shape[0]
    if not blocks:
        return
    span, grid = _spans(device, codes, blocks)
    pinned_count = work.resident.pinned.shape[0]
    space = _Workspace(
        device,
        stream,
        {
            "exact": queries * (pinned_count + 1),
            "mass": queries * blocks,
            "partial": 4 * queries * grid.x,
        },
    )
    # Before the first of the launches, which follow each other with nothing between.
    lists = {
        "pinned": _list(device, stream, "pinned blocks", work.resident.pinned),
        "code_index": _list(device, stream, "code index", work.code_index),
        "pages": 0 if len(codes.pages) <= FEW_PAGES else _pages(device, stream, codes),
        "active": device.upload(stream, work.resident.active, direct=True),
    }
    _mass(device, stream, work, space, lists, span, grid)
    _exact(device, stream, work, space, lists)
    params = struct.pack(
        "<7Q3q4i",
        space["mass"],
        work.memory.correction.address,
        space["partial"],
        space["exact"],
        lists["pinned"],
        work.scores.address,
        work.uncorrected.address,
        row_items(work.memory.correction, 4, "memory.correction"),
        row_items(work.scores, 4, "scores"),
        row_items(work.uncorrected, 4, "uncorrected"),
        blocks,
        group.group_size,
        grid.x,
        pinned_count,
    )
    grid = Grid(-(-blocks // RANK_THREADS), group.kv_heads)
    shared_bytes = 8 * group.group_size
    device.launch(
        stream, "codes_rank", {}, grid, Grid(RANK_THREADS), shared_bytes, params, follows=True
    )


def _spans(device: Launcher, codes: LayerCodes, blocks: int) -> tuple[int, Grid]:
    """Blocks that a thread block of codes_mass takes at a time, and its grid."""
    heads = codes.group.kv_heads
    query_groups = -(-codes.group.group_size // QUERIES)
    most = max(1, device.sm_count // (heads * query_groups))
    turn = MASS_THREADS // WARP * (TOGETHER if is_tiled(codes.block_size) else 1)
    span = min(MOST_SPAN, turn * -(-blocks // (turn * most)))
    return span, Grid(min(-(-blocks // span), most), heads, query_groups)


def _mass(
    device: Launcher,
    stream: Stream,
    work: ScoreCodesWork,
    space: _Workspace,
    lists: dict[str, int],
    span: int,
    grid: Grid,
) -> None:
    codes, last = work.codes, work.last
    planes = max((codec.planes for codec in codes.codecs), default=0)
    dims = max((len(codec.bits) for codec in codes.codecs), default=0)
    few_pages = [] if lists["pages"] else [page.address for page in codes.pages]
    params = struct.pack(
        f"<96sQqq9Q4q8i{8 * FEW_PAGES}s",
        _tables(codes),
        work.queries.address,
        *work.queries.strides,
        *(lists[name] for name in ("pages", "code_index", "pinned")),
        0 if last is None else last.chosen.address,
        0 if last is None else last.lse.address,
        work.memory.predicted.address,
        work.memory.correction.address,
        space["mass"],
        space["partial"],
        codes.row_bytes,
        row_items(work.memory.predicted, 4, "memory.predicted"),
        0 if last is None else row_items(last.chosen, 4, "last.chosen"),
        0 if last is None else row_items(last.lse, 4, "last.lse"),
        work.code_index.shape[0],
        codes.group.group_size,
        codes.block_size,
        work.resident.pinned.shape[0],
        0 if last is None else last.chosen.shape[1],
        int(work.first),
        work.memory.predicted.shape[1],
        span,
        struct.pack(f"<{len(few_pages)}Q", *few_pages),
    )
    shared_bytes = 4 * QUERIES * (dims + 1)  # a float a query and dim, and:
    if is_tiled(codes.block_size):  # weights, and four bytes a field of a byte
        shared_bytes += RING_BYTES + ROUND_BYTES * -(-planes // ROUND_PLANES) + 2 * planes * 8 * 4
    else:  # four floats a bit
        shared_bytes += PLANE_BITS * planes * 16
    if shared_bytes > device.shared_bytes_limit:
        raise ArgumentError(f"codes of {planes} planes need {shared_bytes} bytes of shared memory")
    kernel = "codes_mass" if is_tiled(codes.block_size) else "codes_mass_any"
    kind = format_constants(codes.group.dtype)
    device.launch(
        stream, kernel, kind, grid, Grid(MASS_THREADS), shared_bytes, params, follows=True
    )


def is_tiled(block_size: int) -> bool:
    """Whether a block's tokens are whole rows of two mma."""
    return block_size % ROW_TOKENS == 0


def _list(device: Launcher, stream: Stream, name: str, given: I32 | Tensor) -> int:
    """The address of a list that the caller gave, or that the device holds."""
    return given.address if isinstance(given, Tensor) else device.keep(stream, name, given)


def _exact(
    device: Launcher,
    stream: Stream,
    work: ScoreCodesWork,
    space: _Workspace,
    lists: dict[str, int],
) -> None:
    group, resident = work.codes.group, work.resident
    cache = resident.cache
    params = struct.pack(
        "<QqqQqq5Qqq6iff",
        work.queries.address,
        *work.queries.strides,
        resident.units.memory.address,
        resident.units.unit_bytes,
        key_scales_at(group, work.codes.block_size),
        0 if cache is None else cache.owner.address,
        0 if cache is None else cache.slots.address,
        lists["pinned"],
        lists["active"],
        space["exact"],
        0 if cache is None else row_items(cache.owner, 4, "resident.cache.owner"),
        0 if cache is None else row_items(cache.slots, 4, "resident.cache.slots"),
        group.group_size,
        group.head_dim,
        work.codes.block_size,
        0 if cache is None else cache.slots.shape[1],
        resident.pinned.shape[0],
        resident.active_tokens,
        group.logit_scale,
        group.soft_cap or 0.0,
    )
    chunk = chunk_of(resident.units.memory.address, resident.units.unit_bytes)
    kind = chunk | unit_constants(group)
    grid = Grid(resident.pinned.shape[0] + 1, group.kv_heads)
    shared_bytes = 4 * group.group_size * group.head_dim
    block = Grid(EXACT_THREADS)
    device.launch(stream, "codes_exact", kind, grid, block, shared_bytes, params, follows=True)
