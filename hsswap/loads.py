"""Reads on their way, and leases of host slots that wait for some of them."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field

from hsswap.errors import ClosedError, HsswapError
from hsswap.forked import REFUSED, watch
from hsswap.pools import GroupPool
from hsswap.tiers import I32


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
