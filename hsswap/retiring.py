"""Giving ids and slots back, once no enqueued work and no I/O uses them any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hsswap.driver.base import Event
from hsswap.errors import DeviceError
from hsswap.io.ids import INDEX_MASK
from hsswap.io.store import BlockStore
from hsswap.pools import GroupPool
from hsswap.tiers import I32, I64, SlotState

if TYPE_CHECKING:
    from hsswap.sequence import Sequence
    from hsswap.swap_state import SwapState


@dataclass(frozen=True, slots=True)
class Resident:
    """Device slots of one layer that a sequence no longer uses."""

    pool: GroupPool
    group_layer: int
    slots: I32

    def give_back(self) -> None:
        """No enqueued work reads them any more. Under the swap's lock."""
        self.pool.give_back_resident(self.group_layer, self.slots)


class Retiring:
    """What sequences let go of. Runs on the loop; :meth:`later` may be called from any thread.

    An id that others hold loses a reference at once. Of one that nobody else holds the host slots
    are given up first, in every layer, which waits for reads, writes and leases.
    """

    def __init__(self, swap: SwapState, store: BlockStore, pools: list[GroupPool]) -> None:
        self._swap = swap
        self._ids = store.ids
        self._pools = pools
        self._tasks: set[asyncio.Task[None]] = set()
        self._last = 0
        self._on_their_way: dict[int, Hashable] = {}  # who let go, by number

    @property
    def on_their_way(self) -> frozenset[int]:
        """What is on its way back now: a number for each call of :meth:`later`."""
        return frozenset(self._on_their_way)

    def later(self, owner: Hashable, ids: I64, slots: list[Resident], last_use: Event) -> None:
        """Give these back behind ``last_use``, without waiting for it. Under the swap's lock."""
        number = self._last = self._last + 1
        self._on_their_way[number] = owner
        self._swap.mailbox.post(lambda: self.keep(self._retire(number, ids, slots, last_use)))

    async def now(self, ids: I64, free: Callable[[], None]) -> None:
        """Wait until nothing uses the ids, drop them and call ``free()`` under the lock.

        Device work must have ended. Once the swap is closed, which gives everything back by itself,
        nothing is done.
        """
        swap = self._swap
        await swap.prefetcher.until(lambda: swap.closed or self._is_quiet(ids))
        with swap.lock:
            if swap.closed:
                return
            indices = self._alone(ids)
            swap.prefetcher.forget(indices)
            swap.writes.forget(indices)
            for pool in self._pools:
                pool.tier.forget(indices)
            self._ids.drop_reference(ids)
            free()
        swap.prefetcher.pump()

    async def one_of(self, numbers: frozenset[int]) -> None:
        """Wait until one of these has arrived, whatever else is on its way."""
        swap = self._swap
        await swap.prefetcher.until(lambda: swap.closed or not numbers <= self._on_their_way.keys())

    async def settle(self, owner: Hashable) -> None:
        """Wait until all has arrived that its owner let go; others' may take for ever."""
        swap = self._swap
        await swap.prefetcher.until(lambda: swap.closed or owner not in self._on_their_way.values())

    async def ended(self) -> None:
        """Wait for the tasks of a swap that is being closed."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def close_soon(self, sequence: Sequence) -> None:
        """Close a sequence that nobody will hold."""
        self.keep(sequence.close())

    def keep(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work beside everything else; the swap waits for its end when it is closed."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _retire(self, number: int, ids: I64, slots: list[Resident], last_use: Event) -> None:
        with suppress(DeviceError):  # told to whoever awaited the result; the work has ended
            await last_use.wait()

        def free() -> None:
            for unused in slots:
                unused.give_back()

        try:
            await self.now(ids, free)
        finally:
            del self._on_their_way[number]
        self._swap.prefetcher.pump()  # tells who waits for it

    def _alone(self, ids: I64) -> I64:
        """The indices of those ids that nobody else holds."""
        indices = ids & np.int64(INDEX_MASK)
        return indices[self._ids.held_once(indices)]

    def _is_quiet(self, ids: I64) -> bool:
        indices = self._alone(ids)
        for pool in self._pools:
            slots = pool.tier.slot_of[:, indices].ravel()
            slots = slots[slots >= 0]
            state = pool.tier.state[slots]
            moving = (state == SlotState.READING) | (state == SlotState.WRITING)
            if moving.any() or (pool.tier.leases[slots] > 0).any():
                return False
            dirty = slots[state == SlotState.DIRTY]
            if len(dirty) and not self._swap.writes.all_failed(pool, dirty):
                return False
        return True
