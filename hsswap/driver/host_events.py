"""Events of the host device: points in a stream's queue that threads and loops wait for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hsswap.driver.base import Event
from hsswap.errors import DeviceError
from hsswap.forked import awaited, check_forks, forks


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a stream stopped. Every waiter raises an error of its own: tracebacks are not shared."""

    message: str
    cause: BaseException

    def error(self) -> DeviceError:
        """A new error to raise."""
        error = DeviceError(self.message)
        error.__cause__ = self.cause
        return error


class HostEvent(Event):
    """A point in a stream's queue. Made by :meth:`HostStream.record`."""

    __slots__ = ("_callbacks", "_done", "_failure", "_forks", "_lock")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._done = False
        self._forks = forks()
        self._failure: Failure | None = None
        self._callbacks: list[Callable[[], None]] = []

    def finish(self, failure: Failure | None) -> None:
        """Mark the point as reached and call who waits. Only the stream's worker calls this."""
        with self._lock:
            self._failure = failure
            self._done = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def is_done(self) -> bool:
        """Whether all work before the point has run; raises DeviceError when it failed."""
        if not self._done:
            return False
        if self._failure is not None:
            raise self._failure.error()
        return True

    def call_when_done(self, callback: Callable[[], None]) -> None:
        """Call ``callback()`` on the worker, or here and now if the point was reached."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback()

    def synchronize(self) -> None:
        """Block the calling thread until the point is reached; raises DeviceError on failure."""
        if not self._done:
            check_forks(self._forks)
            reached = threading.Lock()
            reached.acquire()
            self.call_when_done(reached.release)
            reached.acquire()
        self.is_done()

    async def wait(self) -> None:
        """Wait on the running loop; raises DeviceError on failure. Cancelling changes nothing."""
        if not self._done:
            check_forks(self._forks)
            loop = asyncio.get_running_loop()
            reached: asyncio.Future[None] = awaited(loop.create_future())

            def wake() -> None:
                if not reached.done():  # else the wait was cancelled
                    reached.set_result(None)

            def hand_over() -> None:
                with suppress(RuntimeError):  # the loop of a cancelled wait may be closed by now
                    loop.call_soon_threadsafe(wake)

            self.call_when_done(hand_over)
            await reached
        self.is_done()
