"""Between threads and the loop: messages, one wake-up for many, and waiting to the end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from threading import Lock
from typing import TypeVar

from hsswap.forked import awaited

QUIET_ATTEMPTS, QUIET_PAUSE_S = 200, 0.05
"""How often a full stream is asked for room for an event: 10 seconds."""

T = TypeVar("T")


class Mailbox:
    """Callables to run on a loop's thread, in order, from any thread.

    One ``call_soon_threadsafe`` carries everything posted until it runs: a wake-up costs 45 to 70
    us, a message in a batch 2 (measured, 2 cores). Posts are dropped after
    :meth:`close`, and once the loop is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = Lock()
        self._messages: deque[Callable[[], None]] = deque()
        self._closed = False

    def post(self, message: Callable[[], None]) -> None:
        """Run ``message()`` on the loop soon. Never waits."""
        with self._lock:
            if self._closed:
                return
            self._messages.append(message)
            if len(self._messages) > 1:
                return
            try:
                self._loop.call_soon_threadsafe(self._run)
            except RuntimeError:  # the loop was closed; a device's thread must not die of it
                self._closed = True

    def in_child(self) -> None:
        """In a fork: drop everything, it is the parent's work."""
        self._lock = Lock()
        self._closed = True
        self._messages.clear()

    def close(self) -> None:
        """Drop what is posted from now on; what was posted before still runs."""
        with self._lock:
            self._closed = True

    def _run(self) -> None:
        # The list is emptied before anything runs, so that a post from a message wakes again.
        with self._lock:
            messages = list(self._messages)
            self._messages.clear()
        for message in messages:
            try:
                message()
            except Exception as problem:  # the others must still be heard
                context = {"message": f"{message} raised", "exception": problem}
                self._loop.call_exception_handler(context)


async def insist(wait: Callable[[], Awaitable[object]]) -> None:
    """Await ``wait()`` to the end, again after every cancellation; that is raised then."""
    cancelled: asyncio.CancelledError | None = None
    while True:
        try:
            await wait()
            break
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


async def in_thread(
    work: Callable[[], T],
    undo: Callable[[T], object] | None = None,
    *,
    executor: Executor | None = None,
) -> T:
    """Run ``work`` in a thread (the loop's for None), to its end. ``undo`` takes a result that a
    cancellation lost.
    """
    loop = asyncio.get_running_loop()
    future = awaited(loop.run_in_executor(executor, work))
    try:
        await insist(lambda: asyncio.wait([future]))
    except asyncio.CancelledError:
        if not future.exception() and undo is not None:
            made = future.result()
            undoing = loop.run_in_executor(None, lambda: undo(made))
            await insist(lambda: asyncio.wait([undoing]))
        raise
    return future.result()
