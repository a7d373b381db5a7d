"""The memory of one layer group: device slots, host slots, and their state side by side."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.config import LayerGroup, SwapConfig
from hsswap.driver.base import Buffer, Device, Event, Stream
from hsswap.driver.operations import AttentionState, BlockPool, UnitPool
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.errors import ArgumentError, CaptureError, ClosedError, ConfigError, DeviceError
from hsswap.halves import DTYPES
from hsswap.resident_table import Holders, TableMemory
from hsswap.tiers import I32, DeviceSlots, HostTier

RING_REGIONS = 2
"""Tiles of the ring: one is attended while the next is gathered."""

ANY_ROWS = 1 << 30
"""More query rows than any attend has."""


@dataclass(slots=True)
class RingRegion:
    """Device slots one tile streams through, and the event behind its last reader."""

    slots: I32
    last_read: Event | None = None


class GroupPool:
    """Device and host slots of one layer group. Made and closed by the swap.

    ``first_layer`` is the number of the group's first layer in the model.
    """

    def __init__(self, config: SwapConfig, index: int, first_layer: int, device: Device) -> None:
        dims = config.dims
        group = dims.groups[index]
        self.group = group
        self.first_layer = first_layer
        self.block_size = dims.block_size
        self.block_bytes = dims.block_bytes(group)
        unit_bytes = dims.unit_bytes(group)
        device_count = config.device_slots_of(index)
        host_count = config.host_slots_of(index)
        tile = config.tile_blocks
        regions = 0 if device.reads_in_place(ANY_ROWS) else RING_REGIONS
        with ExitStack() as undo:
            # Gathers into the ring run beside the caller's compute, in a stream of their own, and
            # urgent: attention of a prompt leaves no multiprocessor to who comes behind it.
            self.copies = undo.enter_context(device.stream(urgent=True)) if regions else None
            # Memory before tables: for sizes that are far too large the device has an error.
            self.device_memory: Buffer = undo.enter_context(
                device.allocate(device_count * group.kv_heads * unit_bytes)
            )
            self.host_memory: Buffer = undo.enter_context(
                device.allocate_host(host_count * self.block_bytes)
            )
            # Slots that stay out of the cache, for scans to stream through: half of them up to
            # eight tiles, so that one layer can be read while the one before is attended.
            window = max(2 * tile, min(8 * tile, host_count // 2))
            blocks = config.capacity_blocks
            try:
                self.tier = HostTier(group.layers, blocks, host_count, window=window)
            except MemoryError as error:
                raise ConfigError(
                    f"a table for {group.layers} layers of {blocks} blocks cannot be had "
                    f"({error}); lower capacity_tokens"
                ) from error
            undo.pop_all()
        self.slots = DeviceSlots(device_count, regions * tile, group.kv_heads)
        self._kept_for_active = config.max_sequences * group.layers
        self._resident_quota = (self.slots.free_count - self._kept_for_active) // group.layers
        self._resident_in_layer = [0] * group.layers
        self.ring = [RingRegion(self.slots.ring[r * tile : (r + 1) * tile]) for r in range(regions)]
        self._next_region = 0
        self.tables = TableMemory(device, device_count + host_count, group.kv_heads)
        self.holders = Holders()
        self.reserved_slots = 0
        """Dirty host slots held for blocks that are being filled or will be."""
        self.promised_slots = 0
        """Host slots that calls under way are going to hold."""
        shape = (device_count * group.kv_heads, unit_bytes)
        self.units = UnitPool(tensor_in(self.device_memory, "u8", shape), group, dims.block_size)
        shape = (host_count, self.block_bytes)
        self.blocks = BlockPool(tensor_in(self.host_memory, "u8", shape), group, dims.block_size)

    def addresses(self, host_slots: I32) -> NDArray[np.uint64]:
        """Where the bytes of host slots are."""
        offsets = host_slots.astype(np.uint64) * np.uint64(self.block_bytes)
        return offsets + np.uint64(self.host_memory.address)

    def check_reachable(self, tensor: Tensor, what: str) -> None:
        """Raise ArgumentError for memory of a GPU when the device is the host."""
        if tensor.on_device and not self.device_memory.on_device:
            raise ArgumentError(f"{what} is in a GPU's memory and the swap's device is the host")

    def new_output(self, shape: tuple[int, ...]) -> NDArray[Any]:
        """An array for an attend's output. Raises ArgumentError on a GPU, where the caller has to
        give one.
        """
        if self.device_memory.on_device:
            raise ArgumentError("out is None; on a GPU give an array in its memory")
        return np.empty(shape, DTYPES[self.group.dtype])

    def take_active(self, purpose: str) -> I32:
        """One slot a layer for the blocks being filled. Raises OutOfSlots."""
        slots = self.slots.take(self.group.layers, purpose)
        self._kept_for_active -= len(slots)
        return slots

    def take_resident(self, group_layer: int) -> int | None:
        """A slot for a block that stays on the device, None past the layer's quota.

        Which blocks stay is first come, first served: for a scan any fixed part is as good.
        """
        if self._resident_in_layer[group_layer] >= self._resident_quota:
            return None
        if self.slots.free_count <= self._kept_for_active:
            return None
        self._resident_in_layer[group_layer] += 1
        return int(self.slots.take(1, "a resident block")[0])

    def give_back(self, group_layer: int, active: int, resident: I32) -> None:
        """Slots of a closed sequence's layer, once nothing reads them."""
        self.give_back_resident(group_layer, resident)
        self._kept_for_active += 1
        self.slots.give_back(np.array([active], np.int32))

    def give_back_resident(self, group_layer: int, slots: I32) -> None:
        """Slots of blocks that stayed on the device and are gone, once nothing reads them."""
        self._resident_in_layer[group_layer] -= len(slots)
        self.slots.give_back(slots)

    def next_region(self, stream: Stream) -> RingRegion:
        """The ring region whose turn it is; ``stream`` waits for its last reader."""
        region = self.ring[self._next_region]
        self._next_region = (self._next_region + 1) % len(self.ring)
        if region.last_read is not None:
            stream.wait_for(region.last_read)
        return region

    def coming_regions(self) -> Iterator[RingRegion]:
        """The regions that :meth:`next_region` is going to give, in order, without an end."""
        count, first = len(self.ring), self._next_region
        return (self.ring[(first + turn) % count] for turn in itertools.count())

    def spare_host_slots(self, tile_blocks: int) -> int:
        """Host slots that may be held while nothing is on its way to free them: others need two
        tiles.
        """
        held = self.reserved_slots + self.promised_slots + self.tier.pinned_count
        return self.tier.slot_count - 2 * tile_blocks - held

    def close(self) -> None:
        """Free the memory; nothing may be in flight."""
        if self.copies is not None:
            self.copies.close()
        self.host_memory.close()
        self.device_memory.close()


class Promise:
    """Host slots that a call is going to hold, one by one as they come free: counted from the
    beginning, so that calls that wait side by side do not count on the same ones. Under the lock.
    """

    def __init__(self, wanted: dict[GroupPool, int]) -> None:
        self._left = wanted
        for pool, count in wanted.items():
            pool.promised_slots += count

    def keep(self, pool: GroupPool, count: int) -> None:
        """So many are held."""
        self._left[pool] -= count
        pool.promised_slots -= count

    def end(self) -> None:
        """The call holds no more."""
        for pool, count in self._left.items():
            self.keep(pool, count)


class ScratchPool:
    """Device memory of one attend each (its carried state), kept for the next of the same size.

    Work of one stream runs in order, so a buffer is good for the stream's next attend at once, and
    for another stream's when the event behind its last use is done. At most ``KEPT`` buffers that
    are used by nothing wait for reuse; more are freed.
    """

    KEPT = 8

    def __init__(self, device: Device) -> None:
        self._device = device
        self._idle: list[Buffer] = []
        self._behind: list[_Behind] = []

    def take(self, nbytes: int, stream: Stream) -> Buffer:
        """A buffer of at least ``nbytes`` for work of this stream."""
        for position, behind in enumerate(self._behind):
            if behind.stream is stream and _suits(behind.buffer, nbytes):
                del self._behind[position]
                return behind.buffer
        self._reap()
        for position, buffer in enumerate(self._idle):
            if _suits(buffer, nbytes):
                return self._idle.pop(position)
        return self._device.allocate(nbytes)

    def give_back_behind(self, buffer: Buffer, stream: Stream) -> None:
        """The buffer is used by what is enqueued on ``stream`` now, and by nothing else."""
        self._behind.append(_Behind(buffer, stream))

    def _reap(self) -> None:
        """Take back what other streams are done with. An event is recorded here and not when the
        buffer came back: most are taken again by their own stream.
        """
        for behind in list(self._behind):
            if behind.is_over():
                self._behind.remove(behind)
                self.give_back(behind.buffer)

    def give_back(self, buffer: Buffer) -> None:
        """The buffer is no longer used."""
        if len(self._idle) < self.KEPT:
            self._idle.append(buffer)
        else:
            buffer.close()

    def close(self) -> None:
        """Free the buffers; nothing may be in flight."""
        self._idle += [behind.buffer for behind in self._behind]
        self._behind.clear()
        while self._idle:
            self._idle.pop().close()


def _suits(buffer: Buffer, nbytes: int) -> bool:
    """Not one far too large, or a single long prefill would pin its memory for good."""
    return nbytes <= buffer.nbytes <= 4 * nbytes + 65536


@dataclass(eq=False, slots=True)
class _Behind:
    """A buffer in use by work that is enqueued on a stream."""

    buffer: Buffer
    stream: Stream
    event: Event | None = None

    def is_over(self) -> bool:
        """Whether all of it has run, or failed. Never waits."""
        try:
            if self.event is None:
                self.event = self.stream.record()
            return self.event.is_done()
        except ClosedError:  # a stream that is closed has waited for its work
            return True
        except CaptureError:  # ask again when the capture is over
            return False
        except DeviceError:  # told to whoever waits for that work
            return self.event is not None


def state_bytes(group: LayerGroup, rows: int) -> int:
    """Bytes of the carried state of ``rows`` query rows, and of a logsumexp of each."""
    return 4 * rows * group.q_heads * (group.value_dim + 3)


@lru_cache(maxsize=64)  # a buffer is taken again and again for the same state
def state_in(buffer: Buffer, group: LayerGroup, rows: int, *, sequences: int = 1) -> AttentionState:
    """The carried state of ``rows`` query rows of each sequence, laid out in a buffer."""
    heads = group.q_heads
    step = 4 * sequences * rows * heads
    return AttentionState(
        tensor_in(buffer, "f32", (sequences, rows, heads)),
        tensor_in(buffer, "f32", (sequences, rows, heads), offset_bytes=step),
        tensor_in(buffer, "f32", (sequences, rows, heads, group.value_dim), offset_bytes=2 * step),
    )


def lse_behind(state: AttentionState) -> Tensor:
    """A logsumexp ``[S, R, Q]``, for which :func:`state_bytes` has room behind carried state."""
    memory, like = state.weighted, state.total
    address = memory.address + memory.shape[0] * memory.strides[0]
    return Tensor(address, like.shape, like.strides, "f32", memory.on_device, memory)
