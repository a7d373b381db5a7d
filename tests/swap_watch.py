"""A swap whose every misstep is noticed: poisoned slots, a recording loop, counts at the end."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap import HighSpeedSwap, Sequence, SwapConfig
from hsswap.driver import open_device
from hsswap.driver.base import Buffer, Device, Stream
from hsswap.driver.host import HostDevice
from hsswap.io.base import BlockIO
from hsswap.io.memory import Fault, MemoryIO
from hsswap.pools import GroupPool
from hsswap.tiers import I32
from tests.swap_cases import Case

POISON = 0xFF
"""Every BF16 of these bytes is NaN, and so is every float32: whoever reads one shows it."""


def poison(swap: HighSpeedSwap) -> None:
    """Fill slots and scratch with NaN when they are given up: a reader in flight is found out."""
    for pool in pools_of(swap):
        _poison_host_slots(pool)
        if not pool.device_memory.on_device:  # which the CPU cannot write to
            _poison_device_slots(pool)
    if swap.pool[0].device_memory.on_device:
        return
    give_back = swap._scratch.give_back

    def poisoned(buffer: Buffer) -> None:
        ctypes.memset(buffer.address, POISON, buffer.nbytes)
        give_back(buffer)

    swap._scratch.give_back = poisoned  # type: ignore[method-assign]


def _poison_host_slots(pool: GroupPool) -> None:
    drop = pool.tier._drop

    def poisoned(slots: NDArray[np.integer]) -> None:
        for address in pool.addresses(slots.astype(np.int32)).tolist():
            ctypes.memset(address, POISON, pool.block_bytes)
        drop(slots)

    pool.tier._drop = poisoned  # type: ignore[method-assign]


def _poison_device_slots(pool: GroupPool) -> None:
    give_back = pool.slots.give_back
    nbytes = pool.group.kv_heads * pool.units.memory.strides[0]

    def poisoned(slots: I32) -> None:
        for slot in slots.tolist():
            ctypes.memset(pool.device_memory.address + slot * nbytes, POISON, nbytes)
        give_back(slots)

    pool.slots.give_back = poisoned  # type: ignore[method-assign]


def pools_of(swap: HighSpeedSwap) -> list[GroupPool]:
    """The pools of all layer groups, each once."""
    return list({id(p): p for p in map(swap.pool_of, range(swap.config.dims.layers))}.values())


class Linked(HostDevice):
    """A host device that behaves as one behind a link: blocks of more than four query rows are
    gathered into a ring of device slots first.
    """

    def reads_in_place(self, rows: int) -> bool:
        return rows <= 4


class Stuck:
    """A stream of the device that runs nothing until :meth:`go`."""

    def __init__(self, swap: HighSpeedSwap) -> None:
        self.stream: Stream = swap.device.stream()
        self._go = threading.Event()
        self.stream.enqueue("hold", lambda _work, _scratch: self._go.wait(), None)  # type: ignore[attr-defined]

    @property
    def gone(self) -> bool:
        return self._go.is_set()

    def go(self) -> None:
        self._go.set()


@asynccontextmanager
async def watched(
    config: SwapConfig,
    *faults: Fault,
    io: BlockIO | None = None,
    device: Device | None = None,
    close_sequences: bool = True,
) -> AsyncIterator[HighSpeedSwap]:
    """A poisoned swap. At the end sequences are closed, and nothing may be left of anything."""
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    device = device or open_device("host")
    try:
        async with HighSpeedSwap.open(config, io=io or MemoryIO(faults), device=device) as swap:
            poison(swap)
            yield swap
            if close_sequences and not swap.closed:
                for sequence in list(swap._sequences.values()):
                    await within(sequence.close)
                check_empty(swap)
        assert device.live_count == 0
        assert not told, told
    finally:
        loop.set_exception_handler(None)


def check_empty(swap: HighSpeedSwap) -> None:
    """Nothing is held by anyone: slots, leases, ids, plans, waiters."""
    statistics = swap.statistics()
    assert statistics.host_slots_used == 0, repr(swap.prefetcher)
    assert statistics.free_blocks == swap.config.capacity_blocks
    assert "waiting=0 reading=0 planned=0" in repr(swap.prefetcher)
    assert swap.writes.pending == 0
    for pool in pools_of(swap):
        pool.tier.check()
        assert not pool.tier.leases.any()
        assert pool.slots.used_count == len(pool.slots.ring)
        assert len(set(pool.slots._free)) == pool.slots.free_count
        assert not any(pool._resident_in_layer)


async def within(call: Callable[[], Any], seconds: float = 20.0) -> Any:
    """A call that must not hang."""
    async with asyncio.timeout(seconds):
        return await call()


async def turns(count: int) -> None:
    """Let the loop run ``count`` times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until ``condition()``; an error when it never does."""
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never came")


async def fill(sequence: Sequence, case: Case, *, stream: object | None = None) -> None:
    """Append all of a case's K and V."""
    for layer in range(case.dims.layers):
        await sequence.append(layer, case.keys[layer], case.values[layer], stream=stream)
