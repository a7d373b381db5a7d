"""What a captured step of one layer reads: tables of where its blocks are, and the launches.

::

    blocks   | 0 ...                     first-1 | first | first+1 ...        end-1 |
    tokens   | full before the first step        | being filled, then room          |
    units    | device slots, or host slots in    | active | device slots as far as   |
             | place, held by leases             | slot   | there are, then host     |
             |                                   |        | slots in place           |
    written  |               never               | there  | there, and in the host   |
             |                                   |        | slot that will keep it   |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hsswap.appending import Rows
from hsswap.driver.base import Buffer, Device, Stream
from hsswap.driver.operations import (
    I32,
    AppendAtWork,
    AttendWork,
    AttentionState,
    FinalizeWork,
    host_unit,
)
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.exact import LayerCache

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class Held:
    """Slots that a layer's captured steps hold: ``leased`` ``[first]`` host slots of full blocks
    (-1 where the block is in a device slot), ``spare`` block slots on the device for the blocks
    behind the one being filled, ``reserved`` ``[end - first]`` host slots of blocks to be filled.
    """

    leased: I32
    spare: I32
    reserved: I32

    @property
    def first(self) -> int:
        """The block being filled when the steps begin."""
        return len(self.leased)

    @property
    def end(self) -> int:
        """Blocks of the tables."""
        return len(self.leased) + len(self.reserved)

    def leased_with(self, written: int) -> I32:
        """Host slots with a pinned lease, once so many of the blocks being filled are written."""
        return np.append(self.leased[self.leased >= 0], self.reserved[:written])


def unit_table(cache: LayerCache, held: Held) -> I32:
    """Entries ``[H, end]`` as :class:`AttendWork` takes them."""
    pool = cache.pool
    kv_heads = pool.group.kv_heads
    heads = np.arange(kv_heads, dtype=np.int32)[:, None]
    first = held.first
    table = np.empty((kv_heads, held.end), np.int32)
    on_device = cache.device_slot[:first]
    table[:, :first] = np.where(
        held.leased < 0, pool.slots.units(on_device), host_unit(held.leased, heads, kv_heads)
    )
    behind = np.append(np.int32(cache.active), held.spare).astype(np.int32)
    table[:, first : first + len(behind)] = pool.slots.units(behind)
    rest = held.reserved[len(behind) :]
    table[:, first + len(behind) :] = host_unit(rest, heads, kv_heads)
    return table


def place_table(table: I32, held: Held) -> I32:
    """Where new rows go: of :func:`unit_table`, nowhere in blocks that were full before the first
    step. Others may hold those, too, and an engine's counter may be anything.
    """
    places = table.copy()
    places[:, : held.first] = -1
    return places


def copy_table(held: Held) -> I32:
    """Host slots ``[end]`` that get new rows beside the unit, -1: none.

    The block being filled has older rows in its device slot only, so that one is copied whole when
    it is full; of blocks in place the unit is the copy.
    """
    table = np.full(held.end, -1, np.int32)
    table[held.first + 1 : held.first + 1 + len(held.spare)] = held.reserved[
        1 : 1 + len(held.spare)
    ]
    return table


class TableMemory:
    """Device memory with a content to begin with, which one launch brings there."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[str, tuple[int, ...], int]] = {}
        self._content: list[NDArray[np.int32]] = []
        self._words = 0
        self._device: Buffer | None = None
        self._staging: Buffer | None = None

    def add(self, name: str, dtype: str, content: NDArray[np.generic]) -> None:
        """A tensor of this name, aligned to 64 bytes."""
        raw = np.ascontiguousarray(content).tobytes()
        raw += bytes(-len(raw) % 64)
        self._parts[name] = (dtype, content.shape, self._words * WORD_BYTES)
        self._content.append(np.frombuffer(raw, np.int32))
        self._words += len(raw) // WORD_BYTES

    def allocate(self, device: Device) -> None:
        """Take the memory; blocks. Raises DeviceError when there is none."""
        nbytes = max(1, self._words) * WORD_BYTES
        self._staging = device.allocate_host(nbytes)
        try:
            self._device = device.allocate(nbytes)
        except BaseException:
            self._staging.close()
            raise
        if self._words:
            tensor_in(self._staging, "i32", (self._words,)).array()[...] = np.concatenate(
                self._content
            )

    def whole(self) -> tuple[Tensor, Tensor]:
        """All words, where they come from and where they go."""
        assert self._staging is not None
        assert self._device is not None
        shape = (max(1, self._words),)
        return tensor_in(self._staging, "i32", shape), tensor_in(self._device, "i32", shape)

    def tensor(self, name: str) -> Tensor:
        """One of the tensors."""
        assert self._device is not None
        dtype, shape, offset = self._parts[name]
        return tensor_in(self._device, dtype, shape, offset_bytes=offset)

    def close(self) -> None:
        """Free both. Nothing may use them."""
        for buffer in (self._device, self._staging):
            if buffer is not None:
                buffer.close()


class CapturedLayer:
    """Launches of one layer over what the device holds."""

    def __init__(self, device: Device, cache: LayerCache, held: Held, memory: TableMemory) -> None:
        """Adds its tables to ``memory``, which is allocated later."""
        self.device = device
        self.cache = cache
        self.held = held
        self.memory = memory
        self._name = f"layer {cache.layer} "
        table = unit_table(cache, held)
        memory.add(self._name + "slots", "i32", table[None])
        memory.add(self._name + "places", "i32", place_table(table, held)[None])
        memory.add(self._name + "copies", "i32", copy_table(held)[None])

    def append(self, stream: Stream, counter: Tensor, rows: Rows) -> None:
        """Rows at the counter."""
        pool = self.cache.pool
        self.device.append_at(
            stream,
            AppendAtWork(
                keys=rows.keys.as_batch(),
                values=rows.values.as_batch(),
                positions=counter,
                units=pool.units,
                slots=self.memory.tensor(self._name + "places"),
                blocks=pool.blocks,
                host_slots=self.memory.tensor(self._name + "copies"),
                key_scales=rows.key_scales and rows.key_scales.as_batch(),
                value_scales=rows.value_scales and rows.value_scales.as_batch(),
            ),
        )

    def attend(
        self, stream: Stream, counter: Tensor, queries: Tensor, state: AttentionState, out: Tensor
    ) -> None:
        """Rows ``[R, Q, dk]``, which are appended and not yet counted, over all blocks."""
        pool = self.cache.pool
        span = self.device.span_tokens(self.held.end * pool.block_size)
        self.device.attend(
            stream,
            AttendWork(
                queries=queries.as_batch(),
                lengths=counter,
                units=pool.units,
                slots=self.memory.tensor(self._name + "slots"),
                first_block=0,
                positions=None,
                span_blocks=span // pool.block_size,
                state=state,
                begin=True,
                blocks=pool.blocks,
                added_tokens=queries.shape[0],
                end=FinalizeWork(state, out.as_batch()),
            ),
        )


@dataclass(frozen=True, slots=True)
class Handover:
    """Where the blocks of a layer go when its steps are over, at ``length`` tokens.

    ``filled`` blocks are full now. ``stays`` ``[filled]``: which of them keep a device slot.
    ``unused``: block slots to be given back.
    """

    length: int
    filled: int
    stays: NDArray[np.bool_]
    unused: I32
    restore: int | None
    """A block to be copied from its host slot into the active slot, in which the next rows go."""


def hand_over(cache: LayerCache, held: Held, length: int, *, may_stay: bool) -> Handover:
    """Move the layer's tables to ``length`` tokens; no launch is made."""
    size = cache.pool.block_size
    first = held.first
    filled = length // size - first
    partial = length % size != 0
    cache.grow(held.end + 1)
    slot_of = np.full(len(held.reserved), -1, np.int32)  # of blocks from first on
    slot_of[0] = cache.active
    slot_of[1 : 1 + len(held.spare)] = held.spare
    following = int(slot_of[filled]) if filled < len(slot_of) else -1
    restore = None
    if following < 0:  # then the first one's slot is free: it is full, and in its host slot
        following = cache.active
        restore = first + filled if partial else None
    stays = (slot_of[:filled] >= 0) & (slot_of[:filled] != following) & may_stay
    cache.changed(first)
    cache.device_slot[first : first + filled] = np.where(stays, slot_of[:filled], -1)
    cache.device_slot[first + filled :] = -1
    if partial:
        cache.device_slot[first + filled] = following
    kept = np.append(slot_of[:filled][stays], np.int32(following))
    unused = slot_of[(slot_of >= 0) & ~np.isin(slot_of, kept)]
    cache.active = following
    cache.length = length
    return Handover(length, filled, stays, unused, restore)
