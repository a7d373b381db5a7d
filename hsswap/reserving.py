"""Host slots that a sequence holds for blocks it is going to fill."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from hsswap.errors import OutOfSlots
from hsswap.loads import Blocks
from hsswap.pools import GroupPool, Promise
from hsswap.tiers import I32

if TYPE_CHECKING:
    from hsswap.swap_state import SwapState


class Reservation:
    """Dirty, unfilled host slots of one sequence, in each layer for the blocks it fills next.

    Slots are held without anything on its way to free them, so all reservations of a group leave
    two tiles of it alone: others can go on.
    """

    def __init__(self, swap: SwapState, layers: int) -> None:
        self._swap = swap
        self._slots: list[I32] = [np.empty(0, np.int32)] * layers

    def missing(self, layer: int, blocks: int) -> int:
        """How many of the next ``blocks`` blocks to be filled have no slot yet."""
        return max(0, blocks - len(self._slots[layer]))

    async def add(self, wanted: list[Blocks]) -> None:
        """Hold slots for blocks behind those held already, all or as many as came before it failed.

        Raises OutOfSlots, with the number needed, when a group cannot spare that many more, and
        what waiting for slots raises.
        """
        counts: dict[GroupPool, int] = {}
        for blocks in wanted:
            counts[blocks.pool] = counts.get(blocks.pool, 0) + len(blocks.indices)
        with self._swap.lock:
            for pool, count in counts.items():
                most = pool.spare_host_slots(self._swap.config.tile_blocks)
                if count > most:
                    raise OutOfSlots(
                        f"{count} host slots are to be reserved and {max(0, most)} can be; raise "
                        f"host_slots by {count - max(0, most)} or reserve for fewer tokens"
                    )
            promise = Promise(counts)
        try:
            for blocks in wanted:
                await self._add(blocks, promise)
        finally:
            with self._swap.lock:
                promise.end()

    async def _add(self, blocks: Blocks, promise: Promise) -> None:
        """Those of one layer."""
        step = self._swap.config.tile_blocks
        for start in range(0, len(blocks.indices), step):
            part = Blocks(blocks.pool, blocks.layer, blocks.indices[start : start + step])
            slots = await self._swap.prefetcher.reserve(part)
            with self._swap.lock:
                self._slots[blocks.layer] = np.append(self._slots[blocks.layer], slots)
                blocks.pool.reserved_slots += len(slots)
                promise.keep(blocks.pool, len(slots))

    def held(self, layer: int, count: int) -> I32:
        """The slots of the next ``count`` blocks to be filled, which stay held."""
        return self._slots[layer][:count].copy()

    def take(self, layer: int, pool: GroupPool, count: int) -> I32:
        """The slots of the next blocks to be filled, at most ``count``. Under the swap's lock."""
        slots = self._slots[layer][:count]
        self._slots[layer] = self._slots[layer][count:]
        pool.reserved_slots -= len(slots)
        return slots

    def counts(self) -> list[int]:
        """How many slots are held in each layer."""
        return [len(slots) for slots in self._slots]

    def detach(self, but: list[int] | None = None) -> list[Callable[[], None]]:
        """Hold no slot any more, or only those of the next ``but`` blocks of each layer.

        Returns what gives the others back, to be called when nothing fills them. Under the swap's
        lock, here and there.
        """
        calls: list[Callable[[], None]] = []
        for layer, slots in enumerate(self._slots):
            kept = 0 if but is None else but[layer]
            if len(slots) > kept:
                pool = self._swap.pool_of(layer)
                self._slots[layer] = slots[:kept]
                pool.reserved_slots -= len(slots) - kept
                calls.append(partial(pool.tier.discard, slots[kept:]))
        return calls

    def abandon(self, but: list[int] | None = None) -> None:
        """Give every slot back, or all ``but`` so many of each layer: nothing was told to fill
        them. Under the swap's lock.
        """
        for give_back in self.detach(but):
            give_back()
        self._swap.mailbox.post(self._swap.prefetcher.pump_soon)
