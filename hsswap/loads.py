"""Reads on their way, and leases of host slots that wait for some of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from hsswap.errors import HsswapError
from hsswap.pools import GroupPool
from hsswap.tiers import I32


@dataclass(eq=False, slots=True)
class Load:
    """One read on its way: ``failed`` maps slots that did not come to the reason."""

    pool: GroupPool
    slots: I32
    remaining: int
    finished: asyncio.Event = field(default_factory=asyncio.Event)
    failed: dict[int, HsswapError] = field(default_factory=dict)


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
