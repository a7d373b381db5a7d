"""What the device holds, on the host: read and checked when the operation runs.

A GPU trusts such numbers. Here a wrong one would index other memory of this process, so it fails
the operation, and with it the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.operations import I32, I64, AttendWork, BlockPool, PagePool, UnitPool
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class HeldAttend:
    """Index arrays of an :class:`AttendWork`, whoever held them; ``lengths`` with what is added."""

    lengths: I64
    slots: I32
    positions: I32 | None


def held_attend(work: AttendWork) -> HeldAttend:
    """Read what the device holds. Raises ArgumentError for slots outside the pools."""
    lengths, slots, positions = work.lengths, work.slots, work.positions
    if isinstance(lengths, Tensor):
        lengths = lengths.array().astype(np.int64)
    if isinstance(slots, Tensor):
        slots = held_slots(slots, work.units, work.blocks)
        if work.is_full and slots.size and int(slots.min()) < 0:
            raise ArgumentError(
                "slots is said to be full; it holds an entry that is no device slot"
            )
    if isinstance(positions, Tensor):
        positions = positions.array().copy()
    return HeldAttend(lengths + work.added_tokens, slots, positions)


def held_slots(table: Tensor, units: UnitPool | PagePool, blocks: BlockPool | None) -> I32:
    """A copy of a table of units, in device slots and, where there are ``blocks``, in host slots.

    Raises ArgumentError for an entry outside the pools.
    """
    lowest = -1
    if blocks is not None:
        lowest -= blocks.memory.shape[0] * units.group.kv_heads
    return held_indices(table, lowest, units.slot_count, "slots")


def held_indices(table: Tensor, lowest: int, below: int, what: str) -> NDArray[Any]:
    """A copy of indices from ``lowest`` to ``below - 1``; raises ArgumentError for others."""
    indices: NDArray[Any] = table.array().copy()
    if indices.size and (int(indices.min()) < lowest or int(indices.max()) >= below):
        raise ArgumentError(
            f"{what}, held by the device, holds {indices.min()} to {indices.max()}; {lowest} to "
            f"{below - 1} is possible"
        )
    return indices
