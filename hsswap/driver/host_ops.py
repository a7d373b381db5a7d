"""Host operations that move and compress: append, gather, scatter, encode, score, checksum."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap import bf16, e4m3
from hsswap.bf16 import F32
from hsswap.checksum import crc32_of_blocks
from hsswap.config import LayerGroup
from hsswap.driver.host_blas import multiply
from hsswap.driver.host_held import held_indices, held_slots
from hsswap.driver.host_memory import Scratch
from hsswap.driver.operations import (
    AppendAtWork,
    AppendWork,
    BlockPool,
    ChecksumWork,
    EncodeWork,
    GatherWork,
    ScatterWork,
    ScoreWork,
    UnitPool,
)
from hsswap.driver.tensor import Tensor
from hsswap.halves import widen

# Bytes copied at a time. NumPy copies scattered units through an array between source and
# destination, which should stay in the second-level cache (1 to 2 MiB a core).
MOVE_BYTES = 1 << 20

# Tokens in one product of score and encode. Fixed, the last one padded: the rounding of BLAS
# depends on the shape, and scores should not depend on how many blocks are ranked at once.
CODE_TOKENS = 2048

# Rows of one product of encode: CODE_ROWS times the largest head_dim is 2**12, see host_blas.
CODE_ROWS = 16

Parts = tuple[NDArray[Any], ...]


def unit_views(pool: UnitPool) -> Parts:
    """The parts of a pool of units: K ``[slots, T, dk]`` and V ``[slots, T, dv]``, in E4M3 then
    their scales ``[slots, T]``.
    """
    return _parts(pool, pool.memory.array())


def units_of_blocks(pool: BlockPool) -> NDArray[np.uint8]:
    """The units of a pool of blocks, ``[slots, H, unit_bytes]``."""
    heads = pool.group.kv_heads
    return pool.memory.array()[:, : heads * pool.unit_bytes].reshape(-1, heads, pool.unit_bytes)


def block_views(pool: BlockPool) -> Parts:
    """The parts of a pool of blocks: K ``[slots, H, T, dk]`` and V ``[slots, H, T, dv]``, in E4M3
    then their scales ``[slots, H, T]``.
    """
    return _parts(pool, units_of_blocks(pool))


def _parts(pool: UnitPool | BlockPool, units: NDArray[np.uint8]) -> Parts:
    """The parts of units ``[..., unit_bytes]``, each in its own type."""
    group, size = pool.group, pool.block_size
    item: np.dtype[Any] = np.dtype(np.uint8 if group.is_e4m3 else np.uint16)
    kinds: list[tuple[np.dtype[Any], tuple[int, ...]]] = [
        (item, (size, group.head_dim)),
        (item, (size, group.value_dim)),
    ]
    if group.is_e4m3:
        kinds += [(np.dtype(np.float32), (size,))] * 2
    parts: list[NDArray[Any]] = []
    start = 0
    for dtype, shape in kinds:
        stop = start + dtype.itemsize * prod(shape)
        parts.append(units[..., start:stop].view(dtype).reshape(*units.shape[:-1], *shape))
        start = stop
    return tuple(parts)


def wide_keys(group: LayerGroup, parts: Parts, index: Any) -> F32:
    """Float32 of the keys at an index of :func:`unit_views` or :func:`block_views`."""
    if group.is_e4m3:
        return e4m3.to_float32(parts[0][index], parts[2][index])
    return widen(parts[0][index], group.dtype)


def wide_values(group: LayerGroup, parts: Parts, index: Any) -> F32:
    """The same of the values."""
    if group.is_e4m3:
        return e4m3.to_float32(parts[1][index], parts[3][index])
    return widen(parts[1][index], group.dtype)


def _sources(work: AppendWork | AppendAtWork) -> Parts:
    """Rows as the parts of a unit hold them: K and V, in E4M3 then their scales."""
    group = work.units.group
    keys, values = work.keys.array(), work.values.array()
    if not group.is_e4m3:
        return keys.view(np.uint16), values.view(np.uint16)
    if work.key_scales is not None and work.value_scales is not None:
        return keys, values, work.key_scales.array(), work.value_scales.array()
    pairs = [e4m3.from_float32(widen(rows, group.dtype)) for rows in (keys, values)]
    return pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1]


def append(work: AppendWork, scratch: Scratch) -> None:
    """Copy rows of K and V into units of device slots and of host slots."""
    sources = _sources(work)
    token = work.first_offset + np.arange(work.keys.shape[0])
    block, place = np.divmod(token, work.units.block_size)
    slots = work.device_slots[block]  # [rows, H]
    row, head = np.nonzero(slots >= 0)
    if len(row):
        slot = slots[row, head]
        for units, source in zip(unit_views(work.units), sources, strict=True):
            units[slot, place[row]] = source[row, head]
    row = np.flatnonzero(work.host_slots[block] >= 0)
    if len(row):
        slot = work.host_slots[block[row]]
        for blocks, source in zip(block_views(work.blocks), sources, strict=True):
            # [slots, H, T, d] at (slot, all heads, token) is [n, H, d]
            blocks[slot, :, place[row]] = source[row]


def append_at(work: AppendAtWork, scratch: Scratch) -> None:
    """The same, where positions and tables are held by the device."""
    size, heads = work.units.block_size, work.units.group.kv_heads
    slots = held_slots(work.slots, work.units, work.blocks)  # [S, H, B]
    rows = work.keys.shape[1]
    token = work.positions.array().astype(np.int64)[:, None] + np.arange(rows)
    block, place = np.divmod(token, size)  # [S, R]
    inside = (block >= 0) & (block < slots.shape[2])
    s, row = np.nonzero(inside)
    block, place = block[s, row], place[s, row]
    sources = _sources(work)
    unit = slots[s, :, block]  # [n, H]
    n, head = np.nonzero(unit >= 0)
    for units, source in zip(unit_views(work.units), sources, strict=True):
        units[unit[n, head], place[n]] = source[s[n], row[n], head]
    away, head = np.nonzero(unit < -1)
    host_slot, head = np.divmod(-2 - unit[away, head], heads)
    _put_in_blocks(work, sources, (s[away], row[away], head), host_slot, place[away])
    if work.host_slots is not None:
        count = work.blocks.memory.shape[0]
        host_slots = held_indices(work.host_slots, -1, count, "host_slots")[s, block]
        n, head = np.nonzero(np.broadcast_to(host_slots[:, None] >= 0, (len(s), heads)))
        _put_in_blocks(work, sources, (s[n], row[n], head), host_slots[n], place[n])


def _put_in_blocks(
    work: AppendAtWork,
    sources: Parts,
    taken: tuple[NDArray[np.intp], ...],
    host_slot: NDArray[np.integer],
    place: NDArray[np.int64],
) -> None:
    """Rows ``taken`` (sequence, row, head) into token ``place`` of their units of host slots."""
    for blocks, source in zip(block_views(work.blocks), sources, strict=True):
        blocks[host_slot, taken[2], place] = source[taken]


def gather(work: GatherWork, scratch: Scratch) -> None:
    """Copy units out of host slots into device slots."""
    work = work.by_unit()
    assert work.heads is not None
    source, target = units_of_blocks(work.blocks), work.units.memory.array()
    step = max(1, MOVE_BYTES // work.units.unit_bytes)
    for first in range(0, len(work.heads), step):
        part = slice(first, first + step)
        target[work.device_slots[part]] = source[work.host_slots[part], work.heads[part]]


def scatter(work: ScatterWork, scratch: Scratch) -> None:
    """Copy units of device slots into host slots."""
    source, target = work.units.memory.array(), units_of_blocks(work.blocks)
    step = max(1, MOVE_BYTES // work.units.unit_bytes)
    for first in range(0, len(work.heads), step):
        part = slice(first, first + step)
        target[work.host_slots[part], work.heads[part]] = source[work.device_slots[part]]


def encode(work: EncodeWork, scratch: Scratch) -> None:
    """Keys of blocks times the matrix, accumulated in float32, rounded to BF16."""
    group, views = work.blocks.group, block_views(work.blocks)
    matrix = bf16.to_float32(work.into.matrix.array())
    codes = work.into.codes.array()
    _, heads, tokens, dim = views[0].shape
    rank = matrix.shape[1]
    tall = min(tokens, CODE_ROWS)
    step = max(1, CODE_TOKENS // (tokens * heads))
    for first in range(0, len(work.host_slots), step):
        part = slice(first, first + step)
        taken = wide_keys(group, views, work.host_slots[part])
        # [n, H, T / tall, tall, dk] @ [dk, rank]: one shape, however many blocks
        product = np.empty((*taken.shape[:2], tokens // tall, tall, rank), np.float32)
        multiply(taken.reshape(*product.shape[:4], dim), matrix, product)
        rounded = bf16.from_float32(product)
        codes[work.code_index[part]] = rounded.reshape(-1, heads, tokens, rank)


def score(work: ScoreWork, scratch: Scratch) -> None:
    """The best projected logit of each block and KV head."""
    group = work.codes.group
    codes, scores = work.codes.codes.array(), work.scores.array()
    _, heads, tokens, rank = codes.shape
    projected = np.empty((group.q_heads, rank), np.float32)
    matrix = bf16.to_float32(work.codes.matrix.array())
    multiply(widen(work.queries.array(), group.dtype), matrix, projected)
    projected *= np.float32(group.logit_scale)
    queries = projected.reshape(heads, group.group_size, rank)
    wanted = work.code_index
    if isinstance(wanted, Tensor):
        wanted = held_indices(wanted, -1, codes.shape[0], "code_index")
    step = max(1, CODE_TOKENS // tokens)
    taken = scratch.array("codes", (heads, step, tokens, rank), np.float32)
    logits = scratch.array("code logits", (*queries.shape[:2], step * tokens), np.float32)
    head = np.arange(heads)[:, None]
    for first in range(0, len(wanted), step):
        index = wanted[first : first + step]
        taken[:, : len(index)] = bf16.to_float32(codes[index, head])
        taken[:, len(index) :] = 0
        # [H, G, rank] @ [H, rank, step * T]
        multiply(queries, taken.reshape(heads, step * tokens, rank).swapaxes(1, 2), logits)
        best = logits.reshape(heads, -1, step, tokens).max((1, 3))
        scores[:, first : first + step] = best[:, : len(index)]
    scores[:, wanted < 0] = -np.inf


def checksum(work: ChecksumWork, scratch: Scratch) -> None:
    """CRC-32 of whole blocks."""
    blocks = work.blocks.memory.array()
    work.out.array()[...] = crc32_of_blocks(
        map(blocks.__getitem__, work.block_slots.tolist()), work.seeds.tolist()
    )
