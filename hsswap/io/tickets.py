"""Waiting for the writes that began before a moment, however many begin after it.

A flush speaks of what is stored when it is called. So a write that is called later does not begin
to overwrite any of it before the flush is over: then neither the old content nor the new one would
be there after a loss of power.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hsswap.forked import awaited
from hsswap.io.runs import BlockRun


class Tickets:
    """Numbers for writes in the order they are called. On the loop's thread.

    ``on_flushed()`` is called at the end of a flush: :meth:`held_back` has what waited for it.
    """

    def __init__(self, on_flushed: Callable[[], None]) -> None:
        self._on_flushed = on_flushed
        self._flushes: list[int] = []  # the last ticket before each one under way
        self._held_back: list[BlockRun] = []
        self._last = 0
        self._open: dict[int, int] = {}  # blocks that have not ended, by ticket; oldest first
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def take(self, count: int) -> int:
        """A ticket for a write of ``count`` blocks."""
        self._last += 1
        self._open[self._last] = count
        return self._last

    def give_back(self, ticket: int, count: int) -> None:
        """Blocks of that write have ended."""
        self._open[ticket] -= count
        if self._open[ticket]:
            return
        del self._open[ticket]
        if not self._waiting:
            return
        oldest = next(iter(self._open), self._last + 1)
        waiting, self._waiting = self._waiting, []
        for last, future in waiting:
            if last >= oldest:
                self._waiting.append((last, future))
            elif not future.done():
                future.set_result(None)

    async def until_now(self) -> None:
        """Wait for the end of every write that has begun."""
        if self._open:
            future = awaited(asyncio.get_running_loop().create_future())
            self._waiting.append((self._last, future))
            await future

    @contextmanager
    def flush(self) -> Iterator[None]:
        """A flush is under way, of every write so far, until the end of the block."""
        last = self._last
        self._flushes.append(last)
        try:
            yield
        finally:
            self._flushes.remove(last)
            self._on_flushed()

    def holds_back(self, run: BlockRun) -> bool:
        """Whether this write, of blocks with content, must wait for a flush; it is kept then."""
        behind = any(last < run.ticket for last in self._flushes)
        if behind:
            self._held_back.append(run)
        return behind

    def held_back(self) -> list[BlockRun]:
        """Take out the writes that wait for a flush, in their order."""
        held_back, self._held_back = self._held_back, []
        return held_back
