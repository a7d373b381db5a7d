"""Launch code of what ranks and chooses: score, select and fetch. See ``cuda_operations``."""

from __future__ import annotations

import struct

from hsswap.config import LayerGroup
from hsswap.driver.base import Stream
from hsswap.driver.choice_operations import FetchWork, TrimWork
from hsswap.driver.cuda_operations import (
    CODE_BLOCKS_AN_SM,
    THREADS,
    WARP,
    chunk_of,
    contiguous_address,
    matrix_address,
    pool_numbers,
    row_items,
)
from hsswap.driver.cuda_seam import Grid, Launch, Launcher, format_constants
from hsswap.driver.operations import ScoreWork, SelectWork
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError

STATIC_BYTES = 48 << 10  # of shared memory that need not be asked for
SELECT_THREADS = 1024
FEW_SHAPES = ((512, 4), (512, 8), (512, 16))
"""Threads of select_few.cu, and blocks of each: the first that has room is taken."""

RANKING = ("codes_rank", "score", "score_tiled")
"""Kernels that end a score. Each waits for what is ahead before it lets the next one begin, and
writes scores and shares alone: select, if it follows, reads the cache while they run.
"""

MOST_LISTED = 1024  # candidates of select_few.cu
MOST_FEW_PLACES = 65535  # of a head in select_few.cu
CHOSEN_AT = 8 * 10  # of the parameters of select: addresses of `chosen`, `chosen_slots`, `missing`
INLINE_PINNED = 32  # pinned blocks that travel with the parameters
SELECT_STATIC_BYTES = 14336  # shared memory of select.cu that has a fixed size, rounded up
COLUMNS = 8  # of a thread block in score.cu's project
TILED_BLOCKS_AN_SM = 2  # thread blocks of score_tiled.cu that take turns
FETCH_WARPS = 4
FETCH_ENTRIES = 8  # chosen units that a warp of fetch.cu looks at

COUNTER_BYTES = 1 << 16
"""The start of a workspace, which belongs to kernels that need zeros."""

KEPT_KEYS = 24576
"""Blocks of which select keeps the keys in shared memory, 96 KiB."""


def code_chunk(rank: int, *addresses: int) -> dict[str, int]:
    """Of project and score. ``addresses``: of codes and matrix, multiples of 16 if not given."""
    return {"CHUNK": 1 if rank % 8 or any(address % 16 for address in addresses) else 8}


def score(device: Launcher, stream: Stream, work: ScoreWork) -> None:
    """The query times the matrix, then that times the codes."""
    codes, group = work.codes, work.codes.group
    index, heads = work.code_index, group.kv_heads
    count = index.shape[0]
    if not count:
        return
    _, _, tokens, rank = codes.codes.shape
    address = contiguous_address(codes.codes, 2, "codes")
    matrix = matrix_address(device, stream, codes.matrix)
    chunk = code_chunk(rank, address, matrix)
    params = struct.pack(
        "<QqqQQQQQqiiiiiifi",
        work.queries.address,
        *work.queries.strides,
        matrix,
        device.workspace(stream, COUNTER_BYTES + 4 * group.q_heads * rank) + COUNTER_BYTES,
        address,
        # The same for all layers, and for as many steps as a block has tokens.
        index.address if isinstance(index, Tensor) else device.keep(stream, "code index", index),
        work.scores.address,
        row_items(work.scores, 4, "scores"),
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
    if chunk["CHUNK"] == 8 and fits_tiles(group, tokens, rank):
        in_turn = max(1, 128 // rank) * (THREADS // WARP)
        most = max(1, TILED_BLOCKS_AN_SM * device.sm_count // heads)
        grid = Grid(min(most, -(-count // in_turn)), heads)
        dims = {"RANK": rank, "DIM": group.head_dim}
        device.launch(stream, "score_tiled", dims, grid, block, 0, params, follows=True)
        return
    kind = chunk | format_constants(group.dtype)
    device.launch(
        stream, "project", kind, Grid(-(-rank // COLUMNS)), block, 0, params, follows=True
    )
    in_turn = THREADS // WARP * (WARP // min(tokens, WARP))
    most = max(1, CODE_BLOCKS_AN_SM * device.sm_count // heads)
    grid = Grid(min(most, -(-count // in_turn)), heads)
    device.launch(stream, "score", chunk, grid, block, 0, params, follows=True)


def fits_tiles(group: LayerGroup, tokens: int, rank: int) -> bool:
    """Whether score_tiled.cu takes blocks of so many tokens: its first lines say which."""
    dim = group.head_dim
    shared_bytes = 2 * (16 * (dim + 8) + dim * (rank + 8)) + 32 * rank
    return (
        (tokens % 16, rank % 32, dim % 16) == (0, 0, 0)
        and group.group_size <= 8
        and group.dtype == "bf16"
        and shared_bytes <= STATIC_BYTES
    )


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def few_constants(blocks: int) -> dict[str, int] | None:
    """Constants of select_few for so many blocks; None for more than it takes."""
    for threads, keys in FEW_SHAPES:
        if blocks <= threads * keys:
            return {"THREADS": threads, "KEYS": keys}
    return None


def few_bytes(blocks: int, count: int, places: int) -> int:
    """Dynamic shared memory of select_few: a block's place and marks, two lists, keys or what
    missing blocks take, the cache's columns.
    """
    of_blocks = 3 * (-(-blocks // 16) * 16)
    lists = 4 * (-(-max(MOST_LISTED, places) // 4) * 4 + MOST_LISTED)
    return of_blocks + lists + 4 * max(blocks, count) + 16 * places


def select(device: Launcher, stream: Stream, work: SelectWork) -> None:
    """A thread block a KV head."""
    heads, blocks = work.scores.shape
    count, places = work.chosen.shape[1], work.cache.slots.shape[1]
    table, sort = _power_of_two(max(2, 2 * places)), _power_of_two(places)
    words = -(-blocks // 32)
    shared_bytes = 12 * sort + 8 * count + 16 * places + 4 * table + 4 * words
    most = device.shared_bytes_limit - SELECT_STATIC_BYTES
    keys = 0
    of_few = few_bytes(blocks, count, places)
    fits = count <= MOST_LISTED and places <= MOST_FEW_PLACES and of_few <= most
    few = few_constants(blocks) if fits else None
    if few is not None:
        shared_bytes = of_few
    elif blocks <= KEPT_KEYS and shared_bytes + 4 * blocks <= most:
        shared_bytes += 4 * blocks
    else:
        keys = device.workspace(stream, COUNTER_BYTES + 4 * heads * blocks) + COUNTER_BYTES
    if shared_bytes > most:
        raise ArgumentError(
            f"select: {blocks} blocks and {places} cache slots a head need {shared_bytes} bytes of "
            f"shared memory; this GPU has {most}: take fewer slots a head"
        )
    ranked, last = (work.scores, work.shares), (work.last_chosen, work.last_mass)
    columns = (work.cache.slots, work.cache.owner, work.cache.mass, work.cache.used)
    listed = [
        *((t, 4, "scores and shares") for t in ranked),
        *((t, 4, "last") for t in last if t is not None),
        *((t, 4, "a column of the cache") for t in columns),
        (work.chosen, 4, "chosen"),
        (work.chosen_slots, 4, "chosen_slots"),
        (work.missing, 1, "missing"),
    ]
    strides = [row_items(*item) for item in listed]
    if len(listed) == 9:  # nothing of an earlier step
        strides[2:2] = [0, 0]
    before = device.last_launch(stream)
    ahead = int(before is not None and before.kernel in RANKING)
    few_pinned = [] if isinstance(work.pinned, Tensor) else work.pinned[:INLINE_PINNED].tolist()
    params = struct.pack(
        f"<15Q12q8if{INLINE_PINNED}ii",
        *(t.address for t in (*ranked, *columns)),
        *_pinned_and_step(device, stream, work),
        *(0 if t is None else t.address for t in last),
        *(t.address for t in (work.chosen, work.chosen_slots, work.missing, work.left_out)),
        keys,
        *strides[:4],
        work.left_out.strides[0] // 4,
        *strides[4:],
        blocks,
        count,
        work.pinned.shape[0],
        0 if work.last_chosen is None else work.last_chosen.shape[1],
        places,
        0 if isinstance(work.step, Tensor) else work.step,
        table,
        sort,
        work.decay,
        *few_pinned,
        *[0] * (INLINE_PINNED - len(few_pinned)),
        ahead,
    )
    kernel, block = "select", Grid(SELECT_THREADS)
    constants: dict[str, int] = {}
    if few is not None:
        kernel, constants, block = "select_few", few, Grid(few["THREADS"])
    device.launch(stream, kernel, constants, Grid(heads), block, shared_bytes, params, follows=True)


def _pinned_and_step(device: Launcher, stream: Stream, work: SelectWork) -> tuple[int, int]:
    """Addresses of pinned blocks, 0 where they travel with the parameters, and of steps."""
    pinned, step = work.pinned, work.step
    if isinstance(pinned, Tensor):
        address = pinned.address
    else:
        few = len(pinned) <= INLINE_PINNED
        address = 0 if few else device.upload(stream, pinned, direct=True)
    return address, contiguous_address(step, 4, "step") if isinstance(step, Tensor) else 0


def trim(device: Launcher, stream: Stream, work: TrimWork) -> None:
    """A thread block a KV head."""
    heads, blocks = work.scores.shape
    count = work.chosen.shape[1]
    if not count:
        return
    rows = (work.scores, work.cache.slots, work.cache.owner, work.chosen, work.chosen_slots)
    params = struct.pack(
        "<9Q8q5if",
        work.scores.address,
        work.shares.address,
        device.upload(stream, work.pinned, direct=True),
        *(t.address for t in (work.cache.slots, work.cache.owner, work.chosen, work.chosen_slots)),
        work.missing.address,
        work.left_out.address,
        *(row_items(tensor, 4, "a table of trim") for tensor in rows),
        row_items(work.missing, 1, "missing"),
        row_items(work.shares, 4, "shares"),
        work.left_out.strides[0] // 4,
        blocks,
        count,
        work.cache.slots.shape[1],
        len(work.pinned),
        work.least,
        work.bound,
    )
    block = Grid(THREADS)
    device.launch(stream, "trim", {}, Grid(heads), block, 8 * count, params, follows=True)


def fetch(device: Launcher, stream: Stream, work: FetchWork) -> None:
    """Thread blocks that list, one a head, then thread blocks whose warps copy units."""
    heads, count = work.chosen.shape
    if not heads:
        return
    chunk = chunk_of(*pool_numbers(work.units, work.blocks))
    params = fetch_lists(work) + struct.pack(
        "<4Q4q2i",
        work.units.memory.address,
        work.blocks.memory.address,
        work.slots.address,
        work.positions.address,
        work.slots.strides[0] // 4,
        work.positions.strides[0] // 4,
        work.units.unit_bytes,
        work.blocks.block_bytes,
        heads,
        0,
    )
    copying = -(-heads * count // (FETCH_WARPS * FETCH_ENTRIES))
    block = Grid(FETCH_WARPS * WARP)
    device.launch(stream, "fetch", chunk, Grid(heads + copying), block, 0, params, follows=True)


def fetch_lists(work: FetchWork, *, early: bool = False) -> bytes:
    """FetchLists of fetch_lists.cuh. ``early``: see :func:`tells`."""
    tables = (
        *(work.chosen, work.chosen_slots, work.missing, work.cache.slots, work.cache.owner),
        *(work.tail_slots, work.absent),
    )
    return struct.pack(
        "<10Q7q6i",
        *(table.address for table in tables),
        work.host_slots.address,
        work.tail_positions.address,
        contiguous_address(work.absent_count, 4, "absent_count"),
        *(table.strides[0] // (1 if table is work.missing else 4) for table in tables),
        work.chosen.shape[1],
        work.tail_slots.shape[1],
        work.cache.slots.shape[1],
        work.host_slots.shape[0],
        0,
        int(early),
    )


def tells(launch: Launch | None, work: FetchWork) -> bool:
    """Whether a launch is a select that tells of each chosen unit when it is known, so that who
    fetches need not wait for its end.
    """
    if launch is None or launch.kernel != "select_few" or work.chosen.shape[1] > launch.block.x:
        return False
    told = tuple(t.address for t in (work.chosen, work.chosen_slots, work.missing))
    return struct.unpack_from("<3Q", launch.params, CHOSEN_AT) == told
