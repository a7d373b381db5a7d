"""Launch code of encode and score for the predictor ``codes``. See ``cuda_operations``."""

from __future__ import annotations

import struct

import numpy as np

from hsswap.codec import PLANE_BITS
from hsswap.driver.base import Stream
from hsswap.driver.codes_operations import EncodeCodesWork, LayerCodes, ScoreCodesWork
from hsswap.driver.cuda_operations import WARP, chunk_of, contiguous_address, row_items
from hsswap.driver.cuda_seam import Grid, Launcher, key_scales_at, unit_constants
from hsswap.driver.cuda_top_k import COUNTER_BYTES
from hsswap.driver.operations import I32
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError

ENCODE_THREADS = 128
ENCODE_TILE = 16  # tokens
ENCODE_BLOCKS_AN_SM = 4
THREADS = 256  # of the kernels of score
QUERIES = 4  # of a thread block of codes_mass
MASS_BLOCKS_AN_SM = 2
TOGETHER = 8  # blocks that a warp of codes_mass takes at a time
ROW_TOKENS = 16  # of an mma
WEIGHT_DIMS = 32  # code dims of a thread block of codes_prepare
ALIGNMENT = 256


def _tables(codes: LayerCodes) -> bytes:
    """The struct ``Tables`` of codes.cuh, 24 bytes."""
    if codes.tables is None:
        return struct.pack("<Qiiii", 0, codes.group.kv_heads, codes.group.head_dim, 0, 0)
    return struct.pack(
        "<Qiiii",
        contiguous_address(codes.tables, 1, "tables"),
        codes.group.kv_heads,
        codes.group.head_dim,
        max(len(codec.bits) for codec in codes.codecs),
        max(codec.planes for codec in codes.codecs),
    )


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
        "<Q24sQQQqqqqii",
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
    """Three kernels: what the query needs, the blocks' masses, their scores."""
    codes, group = work.codes, work.codes.group
    heads, queries = group.kv_heads, group.q_heads
    blocks = work.code_index.shape[0]
    if not blocks:
        return
    most = MASS_BLOCKS_AN_SM * device.sm_count
    query_groups = -(-group.group_size // QUERIES)
    in_turn = THREADS // WARP * (TOGETHER if is_tiled(codes.block_size) else 1)
    grid = Grid(
        min(-(-blocks // in_turn), max(1, most // (heads * query_groups))),
        heads,
        query_groups,
    )
    columns = work.resident.pinned.shape[0] + 1
    planes = max((codec.planes for codec in codes.codecs), default=0)
    space = _Workspace(
        device,
        stream,
        {
            "weights": queries * PLANE_BITS * planes,
            "constant": queries,
            "exact": queries * columns,
            "mass": queries * blocks,
            "partial": 4 * queries * grid.x,
            "rows": 2 * blocks,
        },
    )
    pinned = _list(device, stream, "pinned blocks", work.resident.pinned)
    _prepare(device, stream, work, space, pinned)
    _mass(device, stream, work, space, pinned, grid)
    params = struct.pack(
        "<6Q3q4i",
        space["mass"],
        work.memory.correction.address,
        space["partial"],
        space["exact"],
        work.scores.address,
        work.uncorrected.address,
        row_items(work.memory.correction, 4, "memory.correction"),
        row_items(work.scores, 4, "scores"),
        row_items(work.uncorrected, 4, "uncorrected"),
        blocks,
        group.group_size,
        grid.x,
        columns,
    )
    grid = Grid(min(-(-blocks // THREADS), most), heads)
    shared_bytes = 8 * group.group_size
    device.launch(stream, "codes_rank", {}, grid, Grid(THREADS), shared_bytes, params)


def _mass(
    device: Launcher,
    stream: Stream,
    work: ScoreCodesWork,
    space: _Workspace,
    pinned: int,
    grid: Grid,
) -> None:
    codes, last = work.codes, work.last
    planes = max((codec.planes for codec in codes.codecs), default=0)
    params = struct.pack(
        "<24s11Q3q6i",
        _tables(codes),
        *(space[name] for name in ("rows", "weights", "constant", "exact")),
        pinned,
        0 if last is None else last.chosen.address,
        0 if last is None else last.lse.address,
        work.memory.predicted.address,
        work.memory.correction.address,
        space["mass"],
        space["partial"],
        row_items(work.memory.predicted, 4, "memory.predicted"),
        0 if last is None else row_items(last.chosen, 4, "last.chosen"),
        0 if last is None else row_items(last.lse, 4, "last.lse"),
        work.code_index.shape[0],
        codes.group.group_size,
        codes.block_size,
        work.resident.pinned.shape[0],
        0 if last is None else last.chosen.shape[1],
        int(work.first),
    )
    tiled = is_tiled(codes.block_size)
    # Four floats a bit; and two registers of B a lane for each step of two bits.
    shared_bytes = PLANE_BITS * planes * 16 + (-(-planes // 8) * 8 * WARP * 8 if tiled else 0)
    if shared_bytes > device.shared_bytes_limit:
        raise ArgumentError(f"codes of {planes} planes need {shared_bytes} bytes of shared memory")
    kernel = "codes_mass" if tiled else "codes_mass_any"
    device.launch(stream, kernel, {}, grid, Grid(THREADS), shared_bytes, params)


def is_tiled(block_size: int) -> bool:
    """Whether a block's tokens are whole rows of an mma."""
    return block_size % ROW_TOKENS == 0


def _list(device: Launcher, stream: Stream, name: str, given: I32 | Tensor) -> int:
    """The address of a list that the caller gave, or that the device holds."""
    return given.address if isinstance(given, Tensor) else device.keep(stream, name, given)


def _prepare(
    device: Launcher, stream: Stream, work: ScoreCodesWork, space: _Workspace, pinned: int
) -> None:
    codes, group, resident, last = work.codes, work.codes.group, work.resident, work.last
    cache, memory = resident.cache, work.memory
    blocks = work.code_index.shape[0]
    dims = max((len(codec.bits) for codec in codes.codecs), default=-1)
    slices = -(-(dims + 1) // WEIGHT_DIMS)
    params = struct.pack(
        "<Qqq24sQqq14Q6q10iff",
        work.queries.address,
        *work.queries.strides,
        _tables(codes),
        resident.units.memory.address,
        resident.units.unit_bytes,
        key_scales_at(group, codes.block_size),
        0 if cache is None else cache.owner.address,
        0 if cache is None else cache.slots.address,
        pinned,
        device.upload(stream, resident.active, direct=True),
        memory.predicted.address,
        memory.correction.address,
        0 if last is None else last.chosen.address,
        0 if last is None else last.lse.address,
        *(space[name] for name in ("weights", "constant", "exact", "rows")),
        _pages(device, stream, codes),
        _list(device, stream, "code index", work.code_index),
        0 if cache is None else row_items(cache.owner, 4, "resident.cache.owner"),
        0 if cache is None else row_items(cache.slots, 4, "resident.cache.slots"),
        row_items(memory.correction, 4, "memory.correction"),
        0 if last is None else row_items(last.chosen, 4, "last.chosen"),
        0 if last is None else row_items(last.lse, 4, "last.lse"),
        codes.row_bytes,
        group.group_size,
        codes.block_size,
        0 if cache is None else cache.slots.shape[1],
        resident.pinned.shape[0],
        resident.active_tokens,
        0 if last is None else last.chosen.shape[1],
        blocks,
        memory.predicted.shape[1],
        int(work.first),
        slices,
        group.logit_scale,
        group.soft_cap or 0.0,
    )
    jobs = resident.pinned.shape[0] + 2 + group.group_size * slices
    jobs += -(-blocks // (THREADS * group.kv_heads))
    chunk = chunk_of(resident.units.memory.address, resident.units.unit_bytes)
    kind, grid = chunk | unit_constants(group), Grid(jobs, group.kv_heads)
    device.launch(stream, "codes_prepare", kind, grid, Grid(THREADS), 0, params)
