"""How late an event loop comes to what is due: a timer of the kernel, watched by the loop.

asyncio's own timers are no measure: the loop rounds its waiting up to whole milliseconds, so that a
loop with nothing to do but a completion now and then is up to one late. A timerfd is ready when it
is due, and what the loop was late for is counted for every period, also for those it slept through.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from functools import cache
from types import TracebackType
from typing import Any, Self

PERIOD_S = 0.001
TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
TFD_ABSTIME = 1


@cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


class LoopLag:
    """Within ``with``, on a running loop: ``lags``, seconds, one for each millisecond."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self._due = 0.0
        self._timer = -1

    def __enter__(self) -> Self:
        self._timer = _libc().timerfd_create(time.CLOCK_MONOTONIC, TFD_FLAGS)
        if self._timer < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create")
        self._due = time.monotonic() + PERIOD_S
        period, due = round(1e9 * PERIOD_S), round(1e9 * self._due)
        seconds, rest = divmod(due, 10**9)
        setting = (ctypes.c_long * 4)(0, period, seconds, rest)  # struct itimerspec
        if _libc().timerfd_settime(self._timer, TFD_ABSTIME, setting, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        asyncio.get_running_loop().add_reader(self._timer, self._ring)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        asyncio.get_running_loop().remove_reader(self._timer)
        os.close(self._timer)

    def _ring(self) -> None:
        now = time.monotonic()
        count = int.from_bytes(os.read(self._timer, 8), "little")
        self.lags.extend(now - self._due - n * PERIOD_S for n in range(count))
        self._due += count * PERIOD_S
