"""The parts that checks of arguments are made of.

Each raises ArgumentError, or ClosedError for memory that was closed. The cost is some microseconds
an array: no loop over elements.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.config import LayerGroup
from hsswap.dims import MAX_BLOCK_SIZE
from hsswap.driver.choice_operations import FetchWork
from hsswap.driver.codes_operations import Attended, LayerCodes, Resident, ScoreMemory
from hsswap.driver.operations import (
    I32,
    AppendAtWork,
    AppendWork,
    AttentionState,
    BlockPool,
    FinalizeWork,
    LeftOut,
    PagePool,
    ProjectionCodes,
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
from hsswap.driver.sampling_operations import Sampling
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError, ClosedError

FEW_INDICES = 64

_RECORDS = frozenset(
    (
        *(UnitPool, PagePool, BlockPool, AttentionState, FinalizeWork, LeftOut, FetchWork),
        *(ProjectionCodes, UnitCache),
        *(RoundRules, AcceptWork, SeedWork, RollbackWork, CommitWork, AdaptWork, Sampling),
        *(LayerCodes, Resident, ScoreMemory, Attended),
    )
)


def named_tensors(work: object) -> list[tuple[str, Tensor]]:
    """Every tensor of a record, those of its pools and states too, with names for errors."""
    found: list[tuple[str, Tensor]] = []
    names: dict[str, Any] = work.__dataclass_fields__  # type: ignore[attr-defined]
    for name in names:
        value = getattr(work, name)
        kind = type(value)
        if kind is Tensor:
            found.append((name, value))
        elif kind in _RECORDS:
            found += [(f"{name}.{inner}", tensor) for inner, tensor in named_tensors(value)]
        elif kind is tuple:
            found += [(name, item) for item in value if type(item) is Tensor]
    return found


def tensors_of(work: object, found: list[Tensor]) -> list[Tensor]:
    """The same tensors without names, added to ``found``: every call of an operation needs them."""
    for name in work.__dataclass_fields__:  # type: ignore[attr-defined]
        value = getattr(work, name)
        kind = type(value)
        if kind is Tensor:
            found.append(value)
        elif kind in _RECORDS:
            tensors_of(value, found)
        elif kind is tuple:
            found += [item for item in value if type(item) is Tensor]
    return found


def root_owner(tensor: Tensor) -> object:
    """What owns the memory that a tensor, or the tensor it is a part of, was made over."""
    owner = tensor.owner
    while isinstance(owner, Tensor):
        owner = owner.owner
    return owner


def refuse_gpu_memory(work: object) -> None:
    """Raise ArgumentError where a record names memory that the host cannot reach."""
    if any(tensor.on_device for tensor in tensors_of(work, [])):
        what = next(what for what, tensor in named_tensors(work) if tensor.on_device)
        raise ArgumentError(f"{what} is in a GPU's memory; the host device cannot reach it")


def require(ok: bool, message: str) -> None:
    """Raise ArgumentError with the message unless ok."""
    if not ok:
        raise ArgumentError(message)


def check_tensor(
    tensor: Tensor, dtype: str, shape: tuple[int, ...], what: str, *, written: bool = False
) -> None:
    """Check kind, shape and, if ``written``, that the memory may be written."""
    check_memory(tensor, dtype, what)
    if tensor.shape != shape:
        raise ArgumentError(f"{what} has shape {tensor.shape}; {shape} is needed")
    if written:
        owner = tensor.owner
        if isinstance(owner, np.ndarray) and not owner.flags.writeable:
            raise ArgumentError(f"{what} is a read-only array; it is written to")


def check_state(state: AttentionState, rows: tuple[int, ...], value_dim: int | None = None) -> None:
    """Check carried state; ``value_dim`` None: whatever it has."""
    shape = shape_of_rank(state.weighted, 4, "state.weighted")
    value_dim = shape[-1] if value_dim is None else value_dim
    check_tensor(state.weighted, "f32", (*rows, value_dim), "state.weighted", written=True)
    check_tensor(state.maximum, "f32", rows, "state.maximum", written=True)
    check_tensor(state.total, "f32", rows, "state.total", written=True)


def check_memory(tensor: Tensor, dtype: str, what: str) -> None:
    """Check kind and dtype, and that a buffer under it is open."""
    if type(tensor) is not Tensor:
        raise ArgumentError(f"{what} is a {type(tensor).__name__}; a Tensor is needed")
    if tensor.dtype != dtype:
        raise ArgumentError(f"{what} has dtype {tensor.dtype}; {dtype} is needed")
    owner = tensor.owner
    while type(owner) is Tensor:
        owner = owner.owner
    # A closed Buffer, without an isinstance of its ABC, which takes longer than all the rest.
    if getattr(owner, "closed", False) is True:
        raise ClosedError(f"the buffer of {what} is closed")


def shape_of_rank(tensor: Tensor, rank: int, what: str) -> tuple[int, ...]:
    """The shape of what must be a tensor with so many axes."""
    if not isinstance(tensor, Tensor) or len(tensor.shape) != rank:
        raise ArgumentError(f"{what} must be a Tensor with {rank} axes")
    return tensor.shape


def frozen(array: NDArray[Any]) -> NDArray[Any]:
    """A copy, or the array itself if nobody can change it."""
    return array if array.base is None and not array.flags.writeable else array.copy()


def checked_indices(
    given: NDArray[Any], shape: tuple[int, ...], below: int, what: str, *, lowest: int = 0
) -> I32:
    """A copy of an int32 index array with every entry from ``lowest`` to ``below - 1``; the array
    itself if nobody can change it.
    """
    if not isinstance(given, np.ndarray) or given.dtype != np.int32:
        raise ArgumentError(f"{what} must be an int32 NumPy array")
    if given.shape != shape:
        raise ArgumentError(f"{what} has shape {given.shape}; {shape} is needed")
    if given.size <= FEW_INDICES:  # a call of NumPy costs as much as 50 numbers in Python
        numbers = given.ravel().tolist()
        if not numbers or (min(numbers) >= lowest and max(numbers) < below):
            return frozen(given)
    # As unsigned numbers negative ones are the largest: one pass instead of two.
    elif lowest == 0 and int(given.view(np.uint32).max()) < below:
        return frozen(given)
    if int(given.min()) < lowest or int(given.max()) >= below:
        raise ArgumentError(
            f"{what} holds {given.min()} to {given.max()}; {lowest} to {below - 1} is possible"
        )
    return frozen(given)


def check_pool(pool: UnitPool | BlockPool, what: str) -> int:
    """Check a pool; the number of its slots."""
    memory = pool.memory
    nbytes = pool.unit_bytes if isinstance(pool, UnitPool) else pool.block_bytes
    check_memory(memory, "u8", f"{what}.memory")
    shape = memory.shape
    if len(shape) != 2 or shape[1] != nbytes:
        raise ArgumentError(f"{what}.memory has shape {shape}; [slots, {nbytes}] is needed")
    whole = 8 if pool.group.is_e4m3 else 2
    if memory.strides != (nbytes, 1) or memory.address % whole:
        raise ArgumentError(f"{what}.memory must be contiguous, at a multiple of {whole} bytes")
    owner = memory.owner
    if isinstance(owner, np.ndarray) and not owner.flags.writeable:
        raise ArgumentError(f"{what}.memory is a read-only array; it is written to")
    return shape[0]


def check_rows(work: AppendWork | AppendAtWork, shape: tuple[int, ...]) -> None:
    """Check rows of K and V, ``shape`` without their dims: of the group's dtype, or E4M3 with
    scales where units are.
    """
    group = work.units.group
    # Both are as the keys are.
    is_e4m3 = group.is_e4m3 and isinstance(work.keys, Tensor) and work.keys.dtype == "e4m3"
    dtype = "e4m3" if is_e4m3 else group.dtype
    check_tensor(work.keys, dtype, (*shape, group.head_dim), "keys")
    check_tensor(work.values, dtype, (*shape, group.value_dim), "values")
    check_scales(work, shape, is_e4m3, "")


def check_scales(
    given: AppendWork | AppendAtWork | PagePool, shape: tuple[int, ...], needed: bool, of: str
) -> None:
    """Check that scales are there if, and only if, they are needed."""
    for what, scales in (
        (f"{of}key_scales", given.key_scales),
        (f"{of}value_scales", given.value_scales),
    ):
        if needed and scales is None:
            raise ArgumentError(f"{what} is None; E4M3 comes with its scales, float32 {shape}")
        if not needed and scales is not None:
            raise ArgumentError(f"{what} is given; scales go with E4M3 keys and values alone")
        if scales is not None:
            check_tensor(scales, "f32", shape, what)


def check_pages(pool: PagePool) -> int:
    """Check an engine's pages; the number of them."""
    group = pool.group
    if type(group) is not LayerGroup:
        raise ArgumentError(f"units.group is a {type(group).__name__}; a LayerGroup is needed")
    pages, size = shape_of_rank(pool.keys, 4, "units.keys")[:2]
    shape = (pages, size, group.kv_heads)
    check_tensor(pool.keys, group.kv_dtype, (*shape, group.head_dim), "units.keys")
    check_tensor(pool.values, group.kv_dtype, (*shape, group.value_dim), "units.values")
    check_scales(pool, shape, group.is_e4m3, "units.")
    require(
        1 <= size <= MAX_BLOCK_SIZE and size & (size - 1) == 0,
        f"pages have {size} tokens; a power of two from 1 to {MAX_BLOCK_SIZE} is needed",
    )
    require(
        pool.keys.strides[3] == pool.values.strides[3] == group.item_bytes,
        "units.keys and units.values must be contiguous along the dims",
    )
    return pages


def require_same_layout(units: UnitPool, blocks: BlockPool) -> None:
    """Raise ArgumentError unless two pools hold the same kind of units."""
    same = units.group is blocks.group or units.group == blocks.group
    require(
        same and units.block_size == blocks.block_size,
        "units and blocks must have the same layer group and block size",
    )


def held_counters(tensor: Tensor, sequences: int, what: str) -> None:
    """Check a counter a sequence that the device holds."""
    if tensor.dtype not in ("i32", "i64"):
        raise ArgumentError(f"{what} has dtype {tensor.dtype}; i32 or i64")
    check_tensor(tensor, tensor.dtype, (sequences,), what)


def held_table(tensor: Tensor, shape: tuple[int, ...], what: str) -> None:
    """Check a table that the device holds: ``[..., H, B]``, one stride for all lists."""
    check_tensor(tensor, "i32", shape, what)
    strides = tensor.strides
    if shape[-1] > 1 and strides[-1] != 4:
        raise ArgumentError(f"{what} must be contiguous along its last axis")
    if len(shape) == 3 and shape[0] > 1 and strides[0] != shape[1] * strides[1]:
        raise ArgumentError(
            f"{what} has strides {strides}; sequences must be {shape[1]} lists apart"
        )
