"""Waiting for the writes that began before a moment, however many begin after it."""

from __future__ import annotations

import asyncio


class Tickets:
    """Numbers for writes in the order they begin. On the loop's thread."""

    def __init__(self) -> None:
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
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((self._last, future))
            await future
