"""Blocks to read, reads on their way, and leases of host slots that wait for some of them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from hsswap.errors import ClosedError, HsswapError
from hsswap.forked import REFUSED, watch
from hsswap.pools import GroupPool
from hsswap.tiers import I32, I64


@dataclass(frozen=True, slots=True)
class Blocks:
    """Distinct blocks of one layer: ``layer`` in the model, ``indices`` of their ids."""

    pool: GroupPool
    layer: int
    indices: I64

    @property
    def group_layer(self) -> int:
        """The layer's number inside its group."""
        return self.layer - self.pool.first_layer

    def last(self, count: int) -> Blocks:
        """The last ``count`` of the blocks."""
        return Blocks(self.pool, self.layer, self.indices[len(self.indices) - count :])

    def loaded(self) -> I32 | None:
        """Their host slots if the tier has them all, to be leased under the same lock."""
        slots = self.pool.tier.lookup(self.group_layer, self.indices)
        there = not (slots < 0).any() and self.pool.tier.is_loaded(slots)
        return slots if there else None


@dataclass(eq=False, slots=True, weakref_slot=True)
class Load:
    """One read on its way: ``failed`` maps slots that did not come to the reason."""

    pool: GroupPool
    slots: I32
    remaining: int
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    failed: dict[int, HsswapError] = field(default_factory=dict)

    def __post_init__(self) -> None:
        watch(self, Load._in_child)

    def _in_child(self) -> None:
        self.failed.update(dict.fromkeys(self.slots.tolist(), ClosedError(REFUSED)))
        with suppress(RuntimeError):  # its loop is closed, and nobody waits
            self.finished.set()


@dataclass(frozen=True, slots=True)
class Loaded:
    """Leased host slots of the blocks asked for; ``missed``: how many had to be waited for."""

    slots: I32
    missed: int


@dataclass(frozen=True, slots=True)
class Leased:
    """Leased host slots; ``loads``: the reads that some of them wait for, and which."""

    pool: GroupPool
    slots: I32
    loads: dict[Load, list[int]]
