"""Deadlines of what waits to be started."""

from __future__ import annotations

import asyncio
import errno
import time
from collections import deque
from collections.abc import Callable, Iterable

from hsswap.errors import BlockIOError
from hsswap.io.base import SpanReads, Transfer
from hsswap.io.problems import io_error

Waiting = Transfer | SpanReads

LONGEST_S = 3600.0


def has_passed(waiting: Waiting, now: float) -> bool:
    """Whether it may not begin any more. ``now``: ``time.monotonic()``."""
    return waiting.deadline is not None and now > waiting.deadline


def too_late(waiting: Waiting) -> BlockIOError:
    """The error of what had not begun by its deadline."""
    if isinstance(waiting, SpanReads):
        return io_error(errno.ETIMEDOUT, f"read of {waiting.files[0].path}")
    return io_error(errno.ETIMEDOUT, f"{waiting.operation.value} of {waiting.file.path}")


class DeadlineTimer:
    """Calls ``expire(now)``, on the loop, at the first deadline that it was told of; what that
    returns are the deadlines of what waits on. A stuck drive ends nothing, so nobody else would.
    """

    def __init__(self, expire: Callable[[float], list[float]]) -> None:
        self._expire = expire
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, deadline: float) -> None:
        """Something waits with this deadline. On the loop's thread."""
        loop = asyncio.get_running_loop()
        # Not every loop knows delays of years.
        due = loop.time() + min(max(0.0, deadline - time.monotonic()), LONGEST_S)
        if self._timer is not None:
            if self._timer.when() <= due:
                return
            self._timer.cancel()
        self._timer = loop.call_at(due, self._ring)

    def _ring(self) -> None:
        self._timer = None
        if left := self._expire(time.monotonic()):
            self.watch(min(left))

    def cancel(self) -> None:
        """Nothing waits any more."""
        if self._timer is not None:
            self._timer.cancel()


def take_late(lines: Iterable[deque[Waiting]], now: float) -> tuple[list[Waiting], list[float]]:
    """Take out what is too late; with the deadlines of what waits on."""
    late: list[Waiting] = []
    left: list[float] = []
    for line in lines:
        for one in [one for one in line if one.deadline is not None]:
            if has_passed(one, now):
                line.remove(one)
                late.append(one)
            elif one.deadline is not None:
                left.append(one.deadline)
    return late, left
