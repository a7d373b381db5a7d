"""New rows of K and V: into the block being filled, and full blocks on to the host tier."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hsswap.driver.base import Device, Stream
from hsswap.driver.operations import AppendWork, ScatterWork
from hsswap.driver.tensor import Tensor
from hsswap.exact import LayerCache
from hsswap.tiers import I32


@dataclass(frozen=True, slots=True)
class Rows:
    """Checked rows for the end of a layer: ``keys`` ``[rows, H, dk]``, ``values``
    ``[rows, H, dv]``, of E4M3 their scales ``[rows, H]``, and how many blocks they fill.

    ::

        tokens   | length ...                                   length + rows |
        rows     | head: ends the active block | whole blocks ... | tail       |
        goes to  | active slot, then host slot | host slots       | active slot|
    """

    cache: LayerCache
    keys: Tensor
    values: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def part(self, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop`` (exclusive)."""
        return Rows(
            self.cache,
            self.keys.rows(start, stop),
            self.values.rows(start, stop),
            self.key_scales and self.key_scales.rows(start, stop),
            self.value_scales and self.value_scales.rows(start, stop),
        )

    @property
    def count(self) -> int:
        """Rows."""
        return self.keys.shape[0]

    @property
    def first_block(self) -> int:
        """The logical block of the first row."""
        return self.cache.length // self.cache.pool.block_size

    @property
    def filled(self) -> int:
        """Blocks that are full afterwards and were not before."""
        return (self.cache.length + self.count) // self.cache.pool.block_size - self.first_block

    def parts(self, most_blocks: int) -> Iterator[Rows]:
        """The rows in parts that fill at most ``most_blocks`` blocks each, in order.

        To be appended one after the other: a part's blocks depend on the layer's length by then.
        """
        start = 0
        while start < self.count:
            size = self.cache.pool.block_size
            room = (most_blocks + 1) * size - 1 - self.cache.length % size
            stop = min(self.count, start + room)
            yield self.part(start, stop)
            start = stop


def enqueue_rows(
    device: Device, stream: Stream, rows: Rows, host_slots: I32, *, may_stay: bool
) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Launch the copies and move the layer's state.

    ``host_slots`` ``[filled]`` take the full blocks. ``may_stay``: full blocks may keep a device
    slot within the layer's quota. Returns which of the filled blocks did ``[filled]``.
    """
    cache = rows.cache
    size = cache.pool.block_size
    cache.grow(rows.first_block + rows.filled + 1)
    cache.changed(rows.first_block)
    stays = np.zeros(rows.filled, np.bool_)
    offset = cache.length % size
    head = min(rows.count, size - offset) if offset else 0
    if head:
        active = np.array([cache.active], np.int32)
        _launch(device, stream, rows, (0, head), offset, active, np.array([-1], np.int32))
        if offset + head == size:
            heads = np.arange(cache.pool.group.kv_heads, dtype=np.int32)
            device.scatter(
                stream,
                ScatterWork(
                    cache.pool.blocks,
                    cache.pool.units,
                    np.repeat(host_slots[:1], len(heads)),
                    heads,
                    cache.pool.slots.units(active).ravel(),
                ),
            )
            stays[0] = _retire_active(cache, rows.first_block, may_stay)
    if head < rows.count:
        done = 1 if head else 0
        whole = rows.filled - done
        tail = 1 if (rows.count - head) % size else 0
        at = rows.first_block + done
        for block in range(whole):
            slot = cache.pool.take_resident(cache.group_layer) if may_stay else None
            if slot is None:
                break
            cache.device_slot[at + block] = slot
            stays[done + block] = True
        if tail:
            cache.device_slot[at + whole] = cache.active
        none = np.full(tail, -1, np.int32)
        _launch(
            device,
            stream,
            rows,
            (head, rows.count),
            0,
            cache.device_slot[at : at + whole + tail],
            np.concatenate((host_slots[done:], none)),
        )
    cache.length += rows.count
    return stays


def _retire_active(cache: LayerCache, block: int, may_stay: bool) -> bool:
    """The active block is full: it keeps its slot and a new one is taken, or it is left."""
    spare = cache.pool.take_resident(cache.group_layer) if may_stay else None
    if spare is None:
        cache.device_slot[block] = -1
        return False
    cache.active = spare
    return True


def _launch(
    device: Device,
    stream: Stream,
    rows: Rows,
    part: tuple[int, int],
    first_offset: int,
    device_slots: I32,
    host_slots: I32,
) -> None:
    pool = rows.cache.pool
    units = pool.slots.units(device_slots).T
    some = rows.part(*part)
    device.append(
        stream,
        AppendWork(
            keys=some.keys,
            values=some.values,
            first_offset=first_offset,
            units=pool.units,
            device_slots=np.where(device_slots[:, None] < 0, np.int32(-1), units),
            blocks=pool.blocks,
            host_slots=host_slots,
            key_scales=some.key_scales,
            value_scales=some.value_scales,
        ),
    )
