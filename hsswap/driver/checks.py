"""Checks of arguments that all devices share, on the caller's thread before anything is enqueued.

Each function takes a record and returns it with its index arrays copied, so that the caller may
reuse his; each raises ArgumentError, or ClosedError for memory that was closed. The cost is some
microseconds an array: no loop over elements.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import numpy as np

from hsswap.config import SPAN_TOKENS
from hsswap.driver.check_parts import (
    check_pages,
    check_pool,
    check_rows,
    check_state,
    check_tensor,
    checked_indices,
    frozen,
    held_counters,
    held_table,
    require,
    require_same_layout,
    shape_of_rank,
)
from hsswap.driver.choice_operations import FetchWork, TrimWork
from hsswap.driver.operations import (
    I32,
    I64,
    AppendAtWork,
    AppendWork,
    AttendWork,
    ChecksumWork,
    EncodeWork,
    FinalizeWork,
    GatherWork,
    PagePool,
    ProjectionCodes,
    ScatterWork,
    ScoreWork,
    SelectWork,
    UnitPool,
)
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError
from hsswap.halves import DTYPES

Move = TypeVar("Move", GatherWork, ScatterWork)


def append(work: AppendWork) -> AppendWork:
    """Check an AppendWork."""
    require_same_layout(work.units, work.blocks)
    group, size = work.units.group, work.units.block_size
    units, blocks = check_pool(work.units, "units"), check_pool(work.blocks, "blocks")
    rows = shape_of_rank(work.keys, 3, "keys")[0]
    check_rows(work, (rows, group.kv_heads))
    require(work.first_offset >= 0, f"first_offset is {work.first_offset}; 0 and more")
    count = -(-(work.first_offset + rows) // size)
    return replace(
        work,
        device_slots=checked_indices(
            work.device_slots, (count, group.kv_heads), units, "device_slots", lowest=-1
        ),
        host_slots=checked_indices(work.host_slots, (count,), blocks, "host_slots", lowest=-1),
    )


def move(work: Move) -> Move:
    """Check a GatherWork or a ScatterWork."""
    require_same_layout(work.units, work.blocks)
    units, blocks = check_pool(work.units, "units"), check_pool(work.blocks, "blocks")
    shape, kv_heads = (len(work.host_slots),), work.units.group.kv_heads
    heads = work.heads
    if heads is None:
        units //= kv_heads
    else:
        heads = checked_indices(heads, shape, kv_heads, "heads")
    return replace(
        work,
        host_slots=checked_indices(work.host_slots, shape, blocks, "host_slots"),
        heads=heads,
        device_slots=checked_indices(work.device_slots, shape, units, "device_slots"),
    )


def attend(work: AttendWork) -> AttendWork:
    """Check an AttendWork."""
    if isinstance(work.units, PagePool):
        units = check_pages(work.units)
    else:
        units = check_pool(work.units, "units")
    group, size = work.units.group, work.units.block_size
    sequences, rows, heads, _ = shape_of_rank(work.queries, 4, "queries")
    if heads != group.q_heads:
        raise ArgumentError(f"queries has {heads} heads; {group.q_heads} are needed")
    check_tensor(work.queries, group.dtype, (sequences, rows, heads, group.head_dim), "queries")
    check_state(work.state, (sequences, rows, heads), group.value_dim)
    span_tokens = work.span_blocks * size
    if work.span_blocks < 1 or span_tokens % SPAN_TOKENS:
        raise ArgumentError(
            f"span_blocks is {work.span_blocks}: {span_tokens} tokens; a multiple of {SPAN_TOKENS} "
            "is needed"
        )
    lengths = _lengths(work.lengths, sequences)
    if work.added_tokens < 0:
        raise ArgumentError(f"added_tokens is {work.added_tokens}; 0 and more")
    slots = work.slots
    shape = slots.shape if isinstance(slots, np.ndarray | Tensor) else ()
    if len(shape) != 3 or shape[:2] != (sequences, group.kv_heads):
        raise ArgumentError(
            f"slots must be an array {(sequences, group.kv_heads)} + (blocks,)",
        )
    positions = _positions(work, shape)
    if work.block_lse is not None:
        check_tensor(
            work.block_lse, "f32", (sequences, rows, heads, shape[2]), "block_lse", written=True
        )
    lowest = -1
    if work.blocks is not None:
        if isinstance(work.units, PagePool):
            raise ArgumentError("blocks go with a UnitPool; an engine's pages have no host slots")
        require_same_layout(work.units, work.blocks)
        lowest -= check_pool(work.blocks, "blocks") * group.kv_heads
    if isinstance(slots, Tensor):
        held_table(slots, shape, "slots")
    else:
        slots = checked_indices(slots, shape, units, "slots", lowest=lowest)
    if work.end is not None:
        require(work.end.state is work.state, "end has another state than the attention it ends")
        require(work.end.block_lse is work.block_lse, "end and attention have other block_lse")
        finalize(work.end)
    if work.fetch is not None:
        _fetched(work, work.fetch)
    if lengths is work.lengths and slots is work.slots and positions is work.positions:
        return work
    return replace(work, lengths=lengths, slots=slots, positions=positions)


def _fetched(work: AttendWork, brought: FetchWork) -> None:
    """Check what is fetched ahead of an attention."""
    fetch(brought)
    for given, listed, what in (
        (work.slots, brought.slots, "slots"),
        (work.positions, brought.positions, "positions"),
    ):
        require(
            isinstance(given, Tensor)
            and given.shape == (1, *listed.shape)
            and (given.address, given.strides[1:]) == (listed.address, listed.strides),
            f"{what} is not what fetch lists, for one sequence",
        )
    units, blocks = work.units, work.blocks
    require(
        isinstance(units, UnitPool)
        and blocks is not None
        and units.memory.address == brought.units.memory.address
        and blocks.memory.address == brought.blocks.memory.address,
        "fetch brings units between other pools than attention takes",
    )


def _positions(work: AttendWork, shape: tuple[int, ...]) -> I32 | Tensor | None:
    """Check where entries are; a copy of what the host holds."""
    positions = work.positions
    if positions is None:
        if work.first_block < 0 or work.first_block % work.span_blocks:
            raise ArgumentError(
                f"first_block is {work.first_block}; a multiple of span_blocks "
                f"({work.span_blocks}) is needed"
            )
        return None
    if isinstance(positions, Tensor):
        held_table(positions, shape, "positions")
        require(
            not isinstance(work.slots, Tensor) or work.slots.strides == positions.strides,
            "slots and positions, both held by the device, must have the same strides",
        )
        return positions
    return checked_indices(positions, shape, 1 << 31, "positions", lowest=-1)


def _lengths(given: I64 | Tensor, sequences: int) -> I64 | Tensor:
    """Check lengths or positions of sequences; a copy of those the host holds, unless nobody can
    change them.
    """
    if isinstance(given, Tensor):
        held_counters(given, sequences, "lengths")
        return given
    if not isinstance(given, np.ndarray) or given.dtype != np.int64:
        raise ArgumentError("lengths must be an int64 NumPy array")
    require(given.shape == (sequences,), f"lengths must have shape {(sequences,)}")
    least = given.item() if given.size == 1 else given.min(initial=0)
    require(least >= 0, "lengths cannot be negative")
    return frozen(given)


def append_at(work: AppendAtWork) -> AppendAtWork:
    """Check an AppendAtWork."""
    require_same_layout(work.units, work.blocks)
    group = work.units.group
    check_pool(work.units, "units")
    check_pool(work.blocks, "blocks")
    sequences, rows = shape_of_rank(work.keys, 4, "keys")[:2]
    check_rows(work, (sequences, rows, group.kv_heads))
    held_counters(work.positions, sequences, "positions")
    blocks = shape_of_rank(work.slots, 3, "slots")[2]
    held_table(work.slots, (sequences, group.kv_heads, blocks), "slots")
    if work.host_slots is not None:
        held_table(work.host_slots, (sequences, blocks), "host_slots")
    return work


def finalize(work: FinalizeWork) -> FinalizeWork:
    """Check a FinalizeWork."""
    shape = shape_of_rank(work.out, 4, "out")
    require(work.out.dtype in DTYPES, f"out has dtype {work.out.dtype}; known: bf16, f16")
    check_tensor(work.out, work.out.dtype, shape, "out", written=True)
    check_state(work.state, shape[:3], shape[3])
    if work.lse is not None:
        check_tensor(work.lse, "f32", shape[:3], "lse", written=True)
    if work.sinks is not None:
        check_tensor(work.sinks, "f32", shape[2:3], "sinks")
    if work.left_out is not None:
        given = work.left_out
        require(shape[:2] == (1, 1), f"left_out is of one row; out has {shape[:2]}")
        heads, entries = shape_of_rank(given.chosen, 2, "left_out.chosen")
        require(
            heads >= 1 and shape[2] % heads == 0,
            f"left_out.chosen has {heads} KV heads for {shape[2]} query heads",
        )
        blocks = shape_of_rank(given.predicted, 2, "left_out.predicted")[1]
        check_tensor(given.predicted, "f32", (shape[2], blocks), "left_out.predicted")
        check_tensor(given.chosen, "i32", (heads, entries), "left_out.chosen")
        check_tensor(given.scale, "f32", shape[2:3], "left_out.scale")
        check_tensor(given.value, "f32", shape[2:], "left_out.value")
    if work.block_mass is not None:
        if work.block_lse is None:
            raise ArgumentError("block_mass needs block_lse, which attend writes")
        heads, blocks = shape_of_rank(work.block_mass, 3, "block_mass")[1:]
        require(
            heads >= 1 and shape[2] % heads == 0,
            f"block_mass has {heads} KV heads for {shape[2]} query heads",
        )
        check_tensor(work.block_lse, "f32", (*shape[:3], blocks), "block_lse")
        check_tensor(work.block_mass, "f32", (shape[0], heads, blocks), "block_mass", written=True)
    return work


def _codes(codes: ProjectionCodes) -> tuple[int, int]:
    """Check codes; the number of ids and the tokens of a block."""
    group = codes.group
    ids, _, tokens, rank = shape_of_rank(codes.codes, 4, "codes")
    check_tensor(codes.codes, "bf16", (ids, group.kv_heads, tokens, rank), "codes", written=True)
    check_tensor(codes.matrix, "bf16", (group.head_dim, rank), "matrix")
    return ids, tokens


def encode(work: EncodeWork) -> EncodeWork:
    """Check an EncodeWork."""
    ids, tokens = _codes(work.into)
    require(
        work.into.group == work.blocks.group and tokens == work.blocks.block_size,
        "codes and blocks must have the same layer group and block size",
    )
    blocks = check_pool(work.blocks, "blocks")
    shape = (len(work.host_slots),)
    return replace(
        work,
        host_slots=checked_indices(work.host_slots, shape, blocks, "host_slots"),
        code_index=checked_indices(work.code_index, shape, ids, "code_index"),
    )


def score(work: ScoreWork) -> ScoreWork:
    """Check a ScoreWork."""
    ids, _ = _codes(work.codes)
    group = work.codes.group
    check_tensor(work.queries, group.dtype, (group.q_heads, group.head_dim), "queries")
    index = work.code_index
    shape = shape_of_rank(index, 1, "code_index") if isinstance(index, Tensor) else (len(index),)
    check_tensor(work.scores, "f32", (group.kv_heads, *shape), "scores", written=True)
    if isinstance(index, Tensor):
        held_table(index, shape, "code_index")
        return work
    return replace(work, code_index=checked_indices(index, shape, ids, "code_index"))


def select(work: SelectWork) -> SelectWork:
    """Check a SelectWork."""
    heads, blocks = shape_of_rank(work.scores, 2, "scores")
    check_tensor(work.scores, "f32", (heads, blocks), "scores")
    check_tensor(work.shares, "f32", (heads, blocks), "shares")
    pinned = work.pinned
    if isinstance(pinned, Tensor):
        pinned_count = shape_of_rank(pinned, 1, "pinned")[0]
        held_table(pinned, (pinned_count,), "pinned")
    else:
        pinned_count = len(pinned)
        pinned = checked_indices(pinned, (pinned_count,), blocks, "pinned")
        require(len(np.unique(pinned)) == pinned_count, "pinned names a block twice")
    if isinstance(work.step, Tensor):
        check_tensor(work.step, "i32", (heads,), "step", written=True)
    require(work.k >= 0, f"k is {work.k}; it cannot be negative")
    chosen = min(blocks, pinned_count + work.k)
    places = shape_of_rank(work.cache.slots, 2, "cache.slots")[1]
    require(places >= chosen, f"the cache has {places} slots a head; {chosen} are to be chosen")
    check_tensor(work.cache.slots, "i32", (heads, places), "cache.slots")
    check_tensor(work.cache.owner, "i32", (heads, places), "cache.owner", written=True)
    check_tensor(work.cache.mass, "f32", (heads, places), "cache.mass", written=True)
    check_tensor(work.cache.used, "i32", (heads, places), "cache.used", written=True)
    require(
        (work.last_chosen is None) == (work.last_mass is None),
        "last_chosen and last_mass come together",
    )
    if work.last_chosen is not None and work.last_mass is not None:
        shape = (heads, shape_of_rank(work.last_chosen, 2, "last_chosen")[1])
        check_tensor(work.last_chosen, "i32", shape, "last_chosen")
        check_tensor(work.last_mass, "f32", shape, "last_mass")
    check_tensor(work.chosen, "i32", (heads, chosen), "chosen", written=True)
    check_tensor(work.chosen_slots, "i32", (heads, chosen), "chosen_slots", written=True)
    check_tensor(work.missing, "u8", (heads, chosen), "missing", written=True)
    check_tensor(work.left_out, "f32", (heads,), "left_out", written=True)
    return replace(work, pinned=pinned)


def trim(work: TrimWork) -> TrimWork:
    """Check a TrimWork."""
    heads, blocks = shape_of_rank(work.scores, 2, "scores")
    check_tensor(work.scores, "f32", (heads, blocks), "scores")
    check_tensor(work.shares, "f32", (heads, blocks), "shares")
    pinned = checked_indices(work.pinned, (len(work.pinned),), blocks, "pinned")
    require(0 <= work.bound <= 1, f"bound is {work.bound}; a share is from 0 to 1")
    require(work.least >= 0, f"least is {work.least}; it cannot be negative")
    count = shape_of_rank(work.chosen, 2, "chosen")[1]
    places = shape_of_rank(work.cache.slots, 2, "cache.slots")[1]
    check_tensor(work.cache.slots, "i32", (heads, places), "cache.slots")
    check_tensor(work.cache.owner, "i32", (heads, places), "cache.owner", written=True)
    check_tensor(work.chosen, "i32", (heads, count), "chosen", written=True)
    check_tensor(work.chosen_slots, "i32", (heads, count), "chosen_slots", written=True)
    check_tensor(work.missing, "u8", (heads, count), "missing", written=True)
    check_tensor(work.left_out, "f32", (heads,), "left_out", written=True)
    return replace(work, pinned=pinned)


def fetch(work: FetchWork) -> FetchWork:
    """Check a FetchWork."""
    require_same_layout(work.units, work.blocks)
    check_pool(work.units, "units")
    check_pool(work.blocks, "blocks")
    heads = work.units.group.kv_heads
    count = shape_of_rank(work.chosen, 2, "chosen")[1]
    tail = shape_of_rank(work.tail_slots, 2, "tail_slots")[1]
    places = shape_of_rank(work.cache.slots, 2, "cache.slots")[1]
    check_tensor(work.missing, "u8", (heads, count), "missing")
    require(
        count <= 1 or work.missing.strides[1] == 1, "missing must be contiguous along its last axis"
    )
    known = [
        (work.chosen, (heads, count), "chosen"),
        (work.chosen_slots, (heads, count), "chosen_slots"),
        (work.cache.slots, (heads, places), "cache.slots"),
        (work.cache.owner, (heads, places), "cache.owner"),
        (work.host_slots, shape_of_rank(work.host_slots, 1, "host_slots"), "host_slots"),
        (work.tail_slots, (heads, tail), "tail_slots"),
        (work.tail_positions, (tail,), "tail_positions"),
        (work.slots, (heads, count + tail), "slots"),
        (work.positions, (heads, count + tail), "positions"),
        (work.absent, (heads, count), "absent"),
    ]
    for tensor, shape, what in known:
        held_table(tensor, shape, what)
    check_tensor(work.absent_count, "i32", (heads,), "absent_count", written=True)
    return work


def checksum(work: ChecksumWork) -> ChecksumWork:
    """Check a ChecksumWork."""
    slots = check_pool(work.blocks, "blocks")
    shape = (len(work.block_slots),)
    seeds = work.seeds
    if not isinstance(seeds, np.ndarray) or seeds.dtype != np.uint32 or seeds.shape != shape:
        raise ArgumentError(f"seeds must be a uint32 NumPy array {shape}")
    check_tensor(work.out, "u32", shape, "out", written=True)
    block_slots = checked_indices(work.block_slots, shape, slots, "block_slots")
    return replace(work, block_slots=block_slots, seeds=seeds.copy())
