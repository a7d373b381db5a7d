"""Storms: many actors, each with a seeded script of its own, while the disk is slow at times.

Bounded by operations, never by time.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence as Several
from contextlib import suppress
from typing import Protocol

import numpy as np

from hsswap.errors import BlockIOError, OutOfBlocks, OutOfSlots
from hsswap.io.memory import Gate
from tests.swap_watch import turns, within

CALM = (BlockIOError, OutOfBlocks, OutOfSlots)
"""What a call may raise when the disk fails or room is short; anything else is a fault of ours."""


class Raging(ABC):
    """One task of a storm. ``done`` counts operations."""

    seed: int
    done: int

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def pick(self, below: int) -> int:
        return int(self.random.integers(below))

    async def run(self, operations: int) -> None:
        """So many operations, then give everything back."""
        try:
            for _ in range(operations):
                with suppress(*CALM):
                    await self.act()
                self.done += 1
                await turns(self.pick(4))
        finally:
            await self.end()

    @abstractmethod
    async def act(self) -> None:
        """One operation."""

    @abstractmethod
    async def end(self) -> None:
        """Give everything back, whatever fails meanwhile."""


class Runs(Protocol):
    """An actor."""

    async def run(self, count: int, /) -> None:
        """So many operations, or whatever it counts."""


async def storm(
    actors: Several[Runs], count: int, limit_s: float, gates: Several[Gate] = ()
) -> None:
    """All actors at once. The first one's error is raised when all have ended."""
    ended = asyncio.Event()
    keeper = asyncio.ensure_future(_keep(list(gates), ended))
    runs = [actor.run(count) for actor in actors]
    try:
        ends = await within(lambda: asyncio.gather(*runs, return_exceptions=True), limit_s)
    finally:
        ended.set()
        await keeper
    for end in ends:
        if isinstance(end, BaseException):
            raise end


async def _keep(closed: list[Gate], ended: asyncio.Event) -> None:
    """Let held operations go a while after they were reached: a slow disk."""
    while closed:
        await turns(20)
        for gate in list(closed):
            if gate.reached.is_set() or ended.is_set():
                await turns(40)
                gate.opened.set()
                closed.remove(gate)
