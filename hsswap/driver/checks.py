"""Checks of arguments that all devices share, on the caller's thread before anything is enqueued.

Each function takes a record and returns it with its index arrays copied, so that the caller may
reuse his; each raises ArgumentError, or ClosedError for memory that was closed. The cost is some
microseconds an array: no loop over elements.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hsswap.config import SPAN_TOKENS
from hsswap.driver.operations import (
    I32,
    I64,
    AppendAtWork,
    AppendWork,
    AttendWork,
    AttentionState,
    BlockPool,
    ChecksumWork,
    EncodeWork,
    FinalizeWork,
    GatherWork,
    ProjectionCodes,
    ScatterWork,
    ScoreWork,
    SelectWork,
    UnitCache,
    UnitPool,
)
from hsswap.driver.round_operations import (
    AcceptWork,
    AdaptWork,
    CommitWork,
    RollbackWork,
    RoundRules,
    SeedWork,
)
from hsswap.driver.tensor import Tensor, contiguous_strides
from hsswap.errors import ArgumentError, ClosedError

Move = TypeVar("Move", GatherWork, ScatterWork)


FEW_INDICES = 64

_RECORDS = (
    *(UnitPool, BlockPool, AttentionState, ProjectionCodes, UnitCache),
    *(RoundRules, AcceptWork, SeedWork, RollbackWork, CommitWork, AdaptWork),
)


def named_tensors(work: object) -> list[tuple[str, Tensor]]:
    """Every tensor of a record, those of its pools and states too, with names for errors."""
    found: list[tuple[str, Tensor]] = []
    for name in work.__dataclass_fields__:  # type: ignore[attr-defined]
        value = getattr(work, name)
        kind = type(value)
        if kind is Tensor:
            found.append((name, value))
        elif kind in _RECORDS:
            found += [(f"{name}.{inner}", tensor) for inner, tensor in named_tensors(value)]
    return found


def root_owner(tensor: Tensor) -> object:
    """What owns the memory that a tensor, or the tensor it is a part of, was made over."""
    owner = tensor.owner
    while isinstance(owner, Tensor):
        owner = owner.owner
    return owner


def refuse_gpu_memory(work: object) -> None:
    """Raise ArgumentError where a record names memory that the host cannot reach."""
    for what, tensor in named_tensors(work):
        if tensor.on_device:
            raise ArgumentError(f"{what} is in a GPU's memory; the host device cannot reach it")


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ArgumentError(message)


def _tensor(
    tensor: Tensor, dtype: str, shape: tuple[int, ...], what: str, *, written: bool = False
) -> None:
    """Check kind, shape and, if ``written``, that the memory may be written."""
    _memory(tensor, dtype, what)
    if tensor.shape != shape:
        raise ArgumentError(f"{what} has shape {tensor.shape}; {shape} is needed")
    owner = tensor.owner
    if written and isinstance(owner, np.ndarray) and not owner.flags.writeable:
        raise ArgumentError(f"{what} is a read-only array; it is written to")


def _memory(tensor: Tensor, dtype: str, what: str) -> None:
    if not isinstance(tensor, Tensor):
        raise ArgumentError(f"{what} is a {type(tensor).__name__}; a Tensor is needed")
    if tensor.dtype != dtype:
        raise ArgumentError(f"{what} has dtype {tensor.dtype}; {dtype} is needed")
    # A closed Buffer, without an isinstance of its ABC, which takes longer than all the rest.
    if getattr(root_owner(tensor), "closed", False) is True:
        raise ClosedError(f"the buffer of {what} is closed")


def _rank(tensor: Tensor, rank: int, what: str) -> tuple[int, ...]:
    if not isinstance(tensor, Tensor) or len(tensor.shape) != rank:
        raise ArgumentError(f"{what} must be a Tensor with {rank} axes")
    return tensor.shape


def _indices(
    given: NDArray[Any], shape: tuple[int, ...], below: int, what: str, *, lowest: int = 0
) -> I32:
    """A copy of an int32 index array with every entry from ``lowest`` to ``below - 1``."""
    if not isinstance(given, np.ndarray) or given.dtype != np.int32:
        raise ArgumentError(f"{what} must be an int32 NumPy array")
    if given.shape != shape:
        raise ArgumentError(f"{what} has shape {given.shape}; {shape} is needed")
    if given.size <= FEW_INDICES:  # a call of NumPy costs as much as 50 numbers in Python
        numbers = given.ravel().tolist()
        if not numbers or (min(numbers) >= lowest and max(numbers) < below):
            return given.copy()
    # As unsigned numbers negative ones are the largest: one pass instead of two.
    elif lowest == 0 and int(given.view(np.uint32).max()) < below:
        return given.copy()
    if int(given.min()) < lowest or int(given.max()) >= below:
        raise ArgumentError(
            f"{what} holds {given.min()} to {given.max()}; {lowest} to {below - 1} is possible"
        )
    return given.copy()


def _pool(pool: UnitPool | BlockPool, what: str) -> int:
    """Check a pool; the number of its slots."""
    slots, _ = _rank(pool.memory, 2, f"{what}.memory")
    nbytes = pool.unit_bytes if isinstance(pool, UnitPool) else pool.block_bytes
    _tensor(pool.memory, "u8", (slots, nbytes), f"{what}.memory", written=True)
    _require(
        pool.memory.strides == contiguous_strides((slots, nbytes), 1)
        and pool.memory.address % 2 == 0,
        f"{what}.memory must be contiguous, at an even address",
    )
    return slots


def _same_layout(units: UnitPool, blocks: BlockPool) -> None:
    _require(
        units.block_size == blocks.block_size and units.group == blocks.group,
        "units and blocks must have the same layer group and block size",
    )


def append(work: AppendWork) -> AppendWork:
    """Check an AppendWork."""
    _same_layout(work.units, work.blocks)
    group, size = work.units.group, work.units.block_size
    units, blocks = _pool(work.units, "units"), _pool(work.blocks, "blocks")
    rows = _rank(work.keys, 3, "keys")[0]
    _tensor(work.keys, "bf16", (rows, group.kv_heads, group.head_dim), "keys")
    _tensor(work.values, "bf16", (rows, group.kv_heads, group.value_dim), "values")
    _require(work.first_offset >= 0, f"first_offset is {work.first_offset}; 0 and more")
    count = -(-(work.first_offset + rows) // size)
    return replace(
        work,
        device_slots=_indices(
            work.device_slots, (count, group.kv_heads), units, "device_slots", lowest=-1
        ),
        host_slots=_indices(work.host_slots, (count,), blocks, "host_slots", lowest=-1),
    )


def move(work: Move) -> Move:
    """Check a GatherWork or a ScatterWork."""
    _same_layout(work.units, work.blocks)
    units, blocks = _pool(work.units, "units"), _pool(work.blocks, "blocks")
    shape = (len(work.host_slots),)
    return replace(
        work,
        host_slots=_indices(work.host_slots, shape, blocks, "host_slots"),
        heads=_indices(work.heads, shape, work.units.group.kv_heads, "heads"),
        device_slots=_indices(work.device_slots, shape, units, "device_slots"),
    )


def _state(state: AttentionState, rows: tuple[int, ...], value_dim: int | None = None) -> None:
    shape = _rank(state.weighted, 4, "state.weighted")
    value_dim = shape[-1] if value_dim is None else value_dim
    _tensor(state.weighted, "f32", (*rows, value_dim), "state.weighted", written=True)
    _tensor(state.maximum, "f32", rows, "state.maximum", written=True)
    _tensor(state.total, "f32", rows, "state.total", written=True)


def attend(work: AttendWork) -> AttendWork:
    """Check an AttendWork."""
    group, size = work.units.group, work.units.block_size
    units = _pool(work.units, "units")
    sequences, rows, heads, _ = _rank(work.queries, 4, "queries")
    _require(heads == group.q_heads, f"queries has {heads} heads; {group.q_heads} are needed")
    _tensor(work.queries, "bf16", (sequences, rows, heads, group.head_dim), "queries")
    _state(work.state, (sequences, rows, heads), group.value_dim)
    span_tokens = work.span_blocks * size
    _require(
        work.span_blocks >= 1 and span_tokens % SPAN_TOKENS == 0,
        f"span_blocks is {work.span_blocks}: {span_tokens} tokens; a multiple of {SPAN_TOKENS} "
        "is needed",
    )
    lengths = _lengths(work.lengths, sequences)
    _require(work.added_tokens >= 0, f"added_tokens is {work.added_tokens}; 0 and more")
    shape = work.slots.shape if isinstance(work.slots, np.ndarray | Tensor) else ()
    _require(
        len(shape) == 3 and shape[:2] == (sequences, group.kv_heads),
        f"slots must be an array {(sequences, group.kv_heads)} + (blocks,)",
    )
    positions = work.positions
    if positions is None:
        _require(
            work.first_block >= 0 and work.first_block % work.span_blocks == 0,
            f"first_block is {work.first_block}; a multiple of span_blocks ({work.span_blocks}) is "
            "needed",
        )
    elif isinstance(positions, Tensor):
        held_table(positions, shape, "positions")
        _require(
            not isinstance(work.slots, Tensor) or work.slots.strides == positions.strides,
            "slots and positions, both held by the device, must have the same strides",
        )
    else:
        positions = _indices(positions, shape, 1 << 31, "positions", lowest=-1)
    if work.block_lse is not None:
        _tensor(
            work.block_lse, "f32", (sequences, rows, heads, shape[2]), "block_lse", written=True
        )
    lowest = -1
    if work.blocks is not None:
        _same_layout(work.units, work.blocks)
        lowest -= _pool(work.blocks, "blocks") * group.kv_heads
    slots = work.slots
    if isinstance(slots, Tensor):
        held_table(slots, shape, "slots")
    else:
        slots = _indices(slots, shape, units, "slots", lowest=lowest)
    return replace(work, lengths=lengths, slots=slots, positions=positions)


def _lengths(given: I64 | Tensor, sequences: int) -> I64 | Tensor:
    """Check lengths or positions of sequences; a copy of those the host holds."""
    if isinstance(given, Tensor):
        held_counters(given, sequences, "lengths")
        return given
    if not isinstance(given, np.ndarray) or given.dtype != np.int64:
        raise ArgumentError("lengths must be an int64 NumPy array")
    _require(given.shape == (sequences,), f"lengths must have shape {(sequences,)}")
    _require(not given.size or int(given.min()) >= 0, "lengths cannot be negative")
    return given.copy()


def held_counters(tensor: Tensor, sequences: int, what: str) -> None:
    """Check a counter a sequence that the device holds."""
    _require(tensor.dtype in ("i32", "i64"), f"{what} has dtype {tensor.dtype}; i32 or i64")
    _tensor(tensor, tensor.dtype, (sequences,), what)


def held_table(tensor: Tensor, shape: tuple[int, ...], what: str) -> None:
    """Check a table that the device holds: ``[..., H, B]``, one stride for all lists."""
    _tensor(tensor, "i32", shape, what)
    *outer, last = tensor.strides
    _require(shape[-1] <= 1 or last == 4, f"{what} must be contiguous along its last axis")
    if len(shape) == 3 and shape[0] > 1:
        _require(
            outer[0] == shape[1] * outer[1],
            f"{what} has strides {tensor.strides}; sequences must be {shape[1]} lists apart",
        )


def append_at(work: AppendAtWork) -> AppendAtWork:
    """Check an AppendAtWork."""
    _same_layout(work.units, work.blocks)
    group = work.units.group
    _pool(work.units, "units")
    _pool(work.blocks, "blocks")
    sequences, rows = _rank(work.keys, 4, "keys")[:2]
    shape = (sequences, rows, group.kv_heads)
    _tensor(work.keys, "bf16", (*shape, group.head_dim), "keys")
    _tensor(work.values, "bf16", (*shape, group.value_dim), "values")
    held_counters(work.positions, sequences, "positions")
    blocks = _rank(work.slots, 3, "slots")[2]
    held_table(work.slots, (sequences, group.kv_heads, blocks), "slots")
    if work.host_slots is not None:
        held_table(work.host_slots, (sequences, blocks), "host_slots")
    return work


def finalize(work: FinalizeWork) -> FinalizeWork:
    """Check a FinalizeWork."""
    shape = _rank(work.out, 4, "out")
    _tensor(work.out, "bf16", shape, "out", written=True)
    _state(work.state, shape[:3], shape[3])
    if work.lse is not None:
        _tensor(work.lse, "f32", shape[:3], "lse", written=True)
    if work.block_mass is not None:
        if work.block_lse is None:
            raise ArgumentError("block_mass needs block_lse, which attend writes")
        heads, blocks = _rank(work.block_mass, 3, "block_mass")[1:]
        _require(
            heads >= 1 and shape[2] % heads == 0,
            f"block_mass has {heads} KV heads for {shape[2]} query heads",
        )
        _tensor(work.block_lse, "f32", (*shape[:3], blocks), "block_lse")
        _tensor(work.block_mass, "f32", (shape[0], heads, blocks), "block_mass", written=True)
    return work


def _codes(codes: ProjectionCodes) -> tuple[int, int]:
    """Check codes; the number of ids and the tokens of a block."""
    group = codes.group
    ids, _, tokens, rank = _rank(codes.codes, 4, "codes")
    _tensor(codes.codes, "bf16", (ids, group.kv_heads, tokens, rank), "codes", written=True)
    _tensor(codes.matrix, "bf16", (group.head_dim, rank), "matrix")
    return ids, tokens


def encode(work: EncodeWork) -> EncodeWork:
    """Check an EncodeWork."""
    ids, tokens = _codes(work.into)
    _require(
        work.into.group == work.blocks.group and tokens == work.blocks.block_size,
        "codes and blocks must have the same layer group and block size",
    )
    blocks = _pool(work.blocks, "blocks")
    shape = (len(work.host_slots),)
    return replace(
        work,
        host_slots=_indices(work.host_slots, shape, blocks, "host_slots"),
        code_index=_indices(work.code_index, shape, ids, "code_index"),
    )


def score(work: ScoreWork) -> ScoreWork:
    """Check a ScoreWork."""
    ids, _ = _codes(work.codes)
    group = work.codes.group
    _tensor(work.queries, "bf16", (group.q_heads, group.head_dim), "queries")
    shape = (len(work.code_index),)
    _tensor(work.scores, "f32", (group.kv_heads, *shape), "scores", written=True)
    return replace(work, code_index=_indices(work.code_index, shape, ids, "code_index"))


def select(work: SelectWork) -> SelectWork:
    """Check a SelectWork."""
    heads, blocks = _rank(work.scores, 2, "scores")
    _tensor(work.scores, "f32", (heads, blocks), "scores")
    pinned = _indices(work.pinned, (len(work.pinned),), blocks, "pinned")
    _require(len(np.unique(pinned)) == len(pinned), "pinned names a block twice")
    _require(work.k >= 0, f"k is {work.k}; it cannot be negative")
    chosen = min(blocks, len(pinned) + work.k)
    places = _rank(work.cache.slots, 2, "cache.slots")[1]
    _require(places >= chosen, f"the cache has {places} slots a head; {chosen} are to be chosen")
    _tensor(work.cache.slots, "i32", (heads, places), "cache.slots")
    _tensor(work.cache.owner, "i32", (heads, places), "cache.owner", written=True)
    _tensor(work.cache.mass, "f32", (heads, places), "cache.mass", written=True)
    _tensor(work.cache.used, "i32", (heads, places), "cache.used", written=True)
    _require(
        (work.last_chosen is None) == (work.last_mass is None),
        "last_chosen and last_mass come together",
    )
    if work.last_chosen is not None and work.last_mass is not None:
        shape = (heads, _rank(work.last_chosen, 2, "last_chosen")[1])
        _tensor(work.last_chosen, "i32", shape, "last_chosen")
        _tensor(work.last_mass, "f32", shape, "last_mass")
    _tensor(work.chosen, "i32", (heads, chosen), "chosen", written=True)
    _tensor(work.chosen_slots, "i32", (heads, chosen), "chosen_slots", written=True)
    _tensor(work.missing, "u8", (heads, chosen), "missing", written=True)
    _tensor(work.left_out, "f32", (heads,), "left_out", written=True)
    return replace(work, pinned=pinned)


def checksum(work: ChecksumWork) -> ChecksumWork:
    """Check a ChecksumWork."""
    slots = _pool(work.blocks, "blocks")
    shape = (len(work.block_slots),)
    seeds = work.seeds
    if not isinstance(seeds, np.ndarray) or seeds.dtype != np.uint32 or seeds.shape != shape:
        raise ArgumentError(f"seeds must be a uint32 NumPy array {shape}")
    _tensor(work.out, "u32", shape, "out", written=True)
    block_slots = _indices(work.block_slots, shape, slots, "block_slots")
    return replace(work, block_slots=block_slots, seeds=seeds.copy())
