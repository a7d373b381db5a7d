"""Checks of the arguments of encode and score for the predictor ``codes``; see ``checks``."""

from __future__ import annotations

from dataclasses import replace

from hsswap.driver.check_parts import (
    check_pool,
    check_tensor,
    checked_indices,
    require,
    shape_of_rank,
)
from hsswap.driver.codes_operations import (
    PAGE_BLOCKS,
    Attended,
    EncodeCodesWork,
    LayerCodes,
    Resident,
    ScoreCodesWork,
)
from hsswap.driver.tensor import contiguous_strides


def _codes(codes: LayerCodes) -> int:
    """Check a layer's codes; the number of code indices."""
    group = codes.group
    require(
        len(codes.codecs) == group.kv_heads
        and all(codec.centre.shape == (group.head_dim,) for codec in codes.codecs),
        f"codecs must be {group.kv_heads}, for heads of {group.head_dim}",
    )
    check_tensor(codes.tables, "u8", shape_of_rank(codes.tables, 1, "tables"), "tables")
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
    check_tensor(work.queries, "bf16", (group.q_heads, group.head_dim), "queries")
    blocks = len(work.code_index)
    check_tensor(work.scores, "f32", (group.kv_heads, blocks), "scores", written=True)
    places = shape_of_rank(work.memory.predicted, 2, "memory.predicted")[1]
    require(places >= blocks, f"memory has room for {places} blocks; there are {blocks}")
    for what in ("predicted", "correction"):
        tensor = getattr(work.memory, what)
        check_tensor(tensor, "f32", (group.q_heads, places), f"memory.{what}", written=True)
    if work.last is not None:
        _attended(work.last, work)
    return replace(
        work,
        code_index=checked_indices(work.code_index, (blocks,), ids, "code_index", lowest=-1),
        resident=_resident(work.resident, work),
    )


def _attended(last: Attended, work: ScoreCodesWork) -> None:
    group = work.codes.group
    count = shape_of_rank(last.chosen, 2, "last.chosen")[1]
    check_tensor(last.chosen, "i32", (group.kv_heads, count), "last.chosen")
    check_tensor(last.lse, "f32", (group.q_heads, count), "last.lse")


def _resident(resident: Resident, work: ScoreCodesWork) -> Resident:
    codes = work.codes
    require(
        resident.units.group == codes.group and resident.units.block_size == codes.block_size,
        "resident.units and codes must have the same layer group and block size",
    )
    units = check_pool(resident.units, "resident.units")
    require(
        0 <= resident.tokens_filled <= codes.block_size,
        f"tokens_filled is {resident.tokens_filled}; a block has {codes.block_size}",
    )
    count = len(resident.blocks)
    return replace(
        resident,
        slots=checked_indices(
            resident.slots, (codes.group.kv_heads, count), units, "resident.slots"
        ),
        blocks=checked_indices(
            resident.blocks, (count,), len(work.code_index) + 1, "resident.blocks"
        ),
    )
