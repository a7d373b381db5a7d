"""Top-k steps that do not wait for the disk: blocks of little mass come for a later step.

A unit that is left out keeps the place in the cache that ``select`` gave it, and the device counts
it as held from then on. So the host remembers which units are *owed*: when one is chosen again it
is missing still, and its place is filled then. A place that went to another block meanwhile is no
matter: the block is announced as missing when it is chosen again.

The blocks that are always chosen are always waited for: the score reads their units.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hsswap.carving import first_of, words_of
from hsswap.driver.base import Device, Stream
from hsswap.driver.host_select import numbers_of, shares_of
from hsswap.driver.round_operations import CopyWork
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.exact import LayerCache
from hsswap.loads import Blocks
from hsswap.prefetch import Prefetcher
from hsswap.tiers import I32, I64, SlotState

if TYPE_CHECKING:
    from hsswap.topk import Choice


class Late:
    """What one (sequence, layer) did not wait for. ``mass``: the share up to which it does not."""

    def __init__(self, device: Device, mass: float, heads: int, max_blocks: int) -> None:
        self._mass = mass
        self._memory = device.allocate_host(4 * heads * max(1, max_blocks))
        self._room = tensor_in(self._memory, "f32", (heads, max(1, max_blocks)))
        self._shares = self._room
        self._owed = np.zeros((heads, max_blocks), np.bool_)

    @property
    def owes(self) -> bool:
        """Whether the cache has a place for a unit that did not come."""
        return bool(self._owed.any())

    def enqueue(self, device: Device, stream: Stream, shares: Tensor) -> None:
        """Copy the logs of shares ``[H, B]``, of which select took the share left out, here."""
        self._shares = first_of(self._room, shares.shape)
        device.copy_words(stream, CopyWork(words_of(shares), words_of(self._shares)))

    def leave_out(
        self, prefetcher: Prefetcher, choice: Choice, cache: LayerCache, indices: I64, pinned: I32
    ) -> None:
        """Take out of the choice what is not worth waiting for, and begin to read it.

        Behind the copy, and under the swap's lock. ``indices``: of the sequence's blocks;
        ``pinned``: those that are always chosen.
        """
        chosen, missing = choice.chosen.array(), choice.missing.array()
        head = np.arange(len(chosen))[:, None]
        missing |= self._owed[head, chosen] & (chosen >= 0)
        wanted = choice.blocks_to_load()
        tier, layer = cache.pool.tier, cache.group_layer
        slots = tier.lookup(layer, indices[wanted])
        is_there = (slots >= 0) & (tier.state[slots] != SlotState.READING)
        absent = wanted[~is_there & ~np.isin(wanted, pinned)]
        if not len(absent):
            return
        shares = shares_of(numbers_of(self._shares))
        worth = np.where(missing != 0, shares[head, chosen], 0)
        heavy = chosen[(worth > self._mass) & (chosen >= 0)]
        late = absent[~np.isin(absent, heavy)]
        given_up = (missing != 0) & np.isin(chosen, late)
        choice.left_out.array()[...] += np.where(given_up, worth, 0).sum(1)
        at, entry = np.nonzero(given_up)
        self._owed[at, chosen[at, entry]] = True
        chosen[given_up] = choice.slots.array()[given_up] = -1
        missing[given_up] = 0
        prefetcher.begin(Blocks(cache.pool, cache.layer, indices[late]), slots[is_there])

    def came(self, choice: Choice) -> None:
        """What is missing in the choice was gathered."""
        at, entry = np.nonzero(choice.missing.array())
        self._owed[at, choice.chosen.array()[at, entry]] = False

    def forget(self) -> None:
        """The cache is empty."""
        self._owed[...] = False

    def close(self) -> None:
        """Free the memory; no enqueued work may use it."""
        self._memory.close()
