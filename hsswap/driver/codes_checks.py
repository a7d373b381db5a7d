"""Checks of the arguments of encode, score and learn, of the predictor ``codes``."""

from __future__ import annotations

from dataclasses import replace

from hsswap.codec import PAGE_BLOCKS
from hsswap.driver.check_parts import (
    check_pool,
    check_state,
    check_tensor,
    checked_indices,
    held_table,
    require,
    shape_of_rank,
)
from hsswap.driver.choice_operations import LearnWork
from hsswap.driver.codes_operations import (
    TABLE_ALIGNMENT,
    Attended,
    EncodeCodesWork,
    LayerCodes,
    Resident,
    ScoreCodesWork,
)
from hsswap.driver.tensor import Tensor, contiguous_strides
from hsswap.halves import DTYPES


def _codes(codes: LayerCodes) -> int:
    """Check a layer's codes; the number of code indices."""
    group = codes.group
    if codes.tables is None:
        require(not codes.codecs and not codes.pages, "codecs and pages come with their tables")
        return 0
    require(
        len(codes.codecs) == group.kv_heads
        and all(codec.centre.shape == (group.head_dim,) for codec in codes.codecs),
        f"codecs must be {group.kv_heads}, for heads of {group.head_dim}",
    )
    check_tensor(codes.tables, "u8", shape_of_rank(codes.tables, 1, "tables"), "tables")
    require(
        codes.tables.address % TABLE_ALIGNMENT == 0,
        f"tables are at {codes.tables.address:#x}, which is no multiple of {TABLE_ALIGNMENT}",
    )
    shape = (PAGE_BLOCKS, codes.row_bytes)
    for page in codes.pages:
        check_tensor(page, "u8", shape, "pages", written=True)
        require(page.strides == contiguous_strides(shape, 1), "pages must be contiguous")
    return len(codes.pages) * PAGE_BLOCKS


def encode(work: EncodeCodesWork) -> EncodeCodesWork:
    """Check an EncodeCodesWork."""
    into = work.into
    ids = _codes(into)
    require(
        into.group == work.blocks.group and into.block_size == work.blocks.block_size,
        "codes and blocks must have the same layer group and block size",
    )
    blocks = check_pool(work.blocks, "blocks")
    shape = (len(work.host_slots),)
    return replace(
        work,
        host_slots=checked_indices(work.host_slots, shape, blocks, "host_slots"),
        code_index=checked_indices(work.code_index, shape, ids, "code_index"),
    )


def score(work: ScoreCodesWork) -> ScoreCodesWork:
    """Check a ScoreCodesWork."""
    ids = _codes(work.codes)
    group = work.codes.group
    check_tensor(work.queries, group.dtype, (group.q_heads, group.head_dim), "queries")
    index = work.code_index
    blocks = shape_of_rank(index, 1, "code_index")[0] if isinstance(index, Tensor) else len(index)
    for what in ("scores", "uncorrected"):
        tensor = getattr(work, what)
        check_tensor(tensor, "f32", (group.kv_heads, blocks), what, written=True)
    places = shape_of_rank(work.memory.predicted, 2, "memory.predicted")[1]
    require(places >= blocks, f"memory has room for {places} blocks; there are {blocks}")
    for what in ("predicted", "correction"):
        tensor = getattr(work.memory, what)
        check_tensor(tensor, "f32", (group.q_heads, places), f"memory.{what}", written=True)
    if work.last is not None:
        _attended(work.last, work)
    if isinstance(index, Tensor):
        held_table(index, (blocks,), "code_index")
    else:
        index = checked_indices(index, (blocks,), ids, "code_index", lowest=-1)
    return replace(work, code_index=index, resident=_resident(work.resident, work, blocks))


def _attended(last: Attended, work: ScoreCodesWork) -> None:
    group = work.codes.group
    count = shape_of_rank(last.chosen, 2, "last.chosen")[1]
    check_tensor(last.chosen, "i32", (group.kv_heads, count), "last.chosen")
    check_tensor(last.lse, "f32", (group.q_heads, count), "last.lse")


def _resident(resident: Resident, work: ScoreCodesWork, blocks: int) -> Resident:
    codes = work.codes
    require(
        resident.units.group == codes.group and resident.units.block_size == codes.block_size,
        "resident.units and codes must have the same layer group and block size",
    )
    units, heads = check_pool(resident.units, "resident.units"), codes.group.kv_heads
    if resident.cache is not None:
        shape = (heads, shape_of_rank(resident.cache.slots, 2, "resident.cache.slots")[1])
        check_tensor(resident.cache.slots, "i32", shape, "resident.cache.slots")
        check_tensor(resident.cache.owner, "i32", shape, "resident.cache.owner")
    require(
        0 <= resident.active_tokens <= codes.block_size,
        f"active_tokens is {resident.active_tokens}; a block has {codes.block_size}",
    )
    pinned = resident.pinned
    if isinstance(pinned, Tensor):
        held_table(pinned, shape_of_rank(pinned, 1, "resident.pinned"), "resident.pinned")
    else:
        pinned = checked_indices(pinned, (len(pinned),), blocks, "resident.pinned")
    return replace(
        resident,
        pinned=pinned,
        active=checked_indices(resident.active, (heads,), units, "resident.active"),
    )


def learn(work: LearnWork) -> LearnWork:
    """Check a LearnWork."""
    rows, heads, dims = shape_of_rank(work.full, 3, "full")
    require(work.full.dtype in DTYPES, f"full has dtype {work.full.dtype}; known: bf16, f16")
    check_tensor(work.full, work.full.dtype, (rows, heads, dims), "full")
    require(dims <= 1 or work.full.strides[2] == 2, "full must be contiguous along the dims")
    check_state(work.state, (rows, 1, heads), dims)
    check_tensor(work.full_lse, "f32", (rows, heads), "full_lse")
    require(heads <= 1 or work.full_lse.strides[1] == 4, "full_lse must be contiguous along Q")
    check_tensor(work.sums, "f32", (heads, 2 * dims + 3), "sums", written=True)
    check_tensor(work.scale, "f32", (heads,), "scale", written=True)
    check_tensor(work.value, "f32", (heads, dims), "value", written=True)
    return work
