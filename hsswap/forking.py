"""Shorter sequences and copies of them: what happens to one layer's tables and active block.

Full blocks are shared by their ids, which the store counts. The block being filled never is: a fork
copies it on the device, and a sequence cut inside a full block takes that block's tokens back into
its active slot, under a new id, so that nobody else's bytes change (copy on write).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from hsswap.dims import SCALE_BYTES
from hsswap.driver.base import Device, Stream
from hsswap.driver.operations import AppendWork, GatherWork
from hsswap.driver.tensor import Tensor
from hsswap.exact import LayerCache
from hsswap.loads import Blocks
from hsswap.tiers import I32, I64


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a layer ends once it is cut to ``length`` tokens.

    ``reopened``: the number of the full block that is cut inside, None without one. ``lost_full``:
    whether any full block is gone or reopened.
    """

    cache: LayerCache
    length: int

    @property
    def block(self) -> int:
        """The block that the next token belongs to."""
        return self.length // self.cache.pool.block_size

    @property
    def lost_full(self) -> bool:
        """Whether a full block is gone, or is the one being filled again."""
        return self.block < self.cache.length // self.cache.pool.block_size

    @property
    def reopens(self) -> bool:
        """Whether a full block is cut inside, so that its first tokens must be active again."""
        return self.lost_full and self.length % self.cache.pool.block_size > 0

    def to_restore(self, indices: I64) -> Blocks | None:
        """The reopened block if its bytes are not in a device slot and must be gathered."""
        cache = self.cache
        if not self.reopens or cache.device_slot[self.block] >= 0:
            return None
        return Blocks(cache.pool, cache.layer, indices[self.block : self.block + 1])

    def apply(self) -> I32:
        """Move the layer's tables; returns the device slots that are no longer used.

        The bytes of a block :meth:`to_restore` named are to be in the active slot.
        """
        cache = self.cache
        end = cache.length // cache.pool.block_size + 1
        slots = cache.device_slot[self.block : end].copy()
        cache.device_slot[self.block : end] = -1
        cache.cut(self.block)
        cache.length = self.length
        unused: I32 = slots[(slots >= 0) & (slots != cache.active)]
        if self.length % cache.pool.block_size:
            if slots[0] >= 0 and slots[0] != cache.active:  # a block that had stayed
                unused = np.append(unused[1:], np.int32(cache.active))
                cache.active = int(slots[0])
            cache.device_slot[self.block] = cache.active
        return unused


def enqueue_restore(device: Device, stream: Stream, cache: LayerCache, host_slots: I32) -> None:
    """Launch the copy of one block out of its host slot ``[1]`` into the active slot."""
    heads = np.arange(cache.pool.group.kv_heads, dtype=np.int32)
    active = cache.pool.slots.units(np.array([cache.active], np.int32)).ravel()
    device.gather(
        stream,
        GatherWork(
            cache.pool.blocks, cache.pool.units, np.repeat(host_slots, len(heads)), heads, active
        ),
    )


def enqueue_copy(device: Device, stream: Stream, source: LayerCache, target: LayerCache) -> None:
    """Make ``target``, which is empty, as long as ``source``; launch the copy of what is active.

    Full blocks are to be shared by id; those that stay in device slots stay the source's alone.
    """
    size = source.pool.block_size
    full, tail = divmod(source.length, size)
    target.grow(full + 1)
    target.length = source.length
    if not tail:
        return
    target.device_slot[full] = target.active
    units = target.pool.slots.units(np.array([target.active], np.int32)).T
    none = np.full(1, -1, np.int32)
    pool = target.pool
    device.append(
        stream,
        AppendWork(
            **_active_rows(source, tail),
            first_offset=0,
            units=pool.units,
            device_slots=units,
            blocks=pool.blocks,
            host_slots=none,
        ),
    )


def _active_rows(cache: LayerCache, rows: int) -> dict[str, Tensor]:
    """The first rows of the active block where they lie, as :class:`AppendWork` takes them.

    A block slot's units adjoin, so a head is one unit further.
    """
    pool = cache.pool
    group, memory, size = pool.group, pool.units.memory, pool.block_size
    heads, unit_bytes = group.kv_heads, pool.units.unit_bytes
    parts: dict[str, tuple[str, int, tuple[int, ...]]] = {
        "keys": (group.kv_dtype, group.item_bytes, (group.head_dim,)),
        "values": (group.kv_dtype, group.item_bytes, (group.value_dim,)),
    }
    if group.is_e4m3:
        parts["key_scales"] = parts["value_scales"] = ("f32", SCALE_BYTES, ())
    found: dict[str, Tensor] = {}
    at = memory.address + cache.active * heads * unit_bytes
    for name, (dtype, item_bytes, dims) in parts.items():
        row_bytes = item_bytes * prod(dims)
        strides = (row_bytes, unit_bytes, *(item_bytes for _ in dims))
        shape = (rows, heads, *dims)
        found[name] = Tensor(at, shape, strides, dtype, memory.on_device, memory)
        at += size * row_bytes
    return found
