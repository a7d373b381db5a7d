"""Threads that run the hooks of transfers: checksums too long for the loop's thread."""

from __future__ import annotations

import heapq
import threading
from collections import deque
from collections.abc import Callable

from hsswap.errors import HsswapError
from hsswap.io.base import Operation, Transfer
from hsswap.io.problems import unexpected


def run_hook(hook: Callable[..., None], *arguments: object) -> HsswapError | None:
    """Run ``prepare`` of a write or ``verify`` of a read. Returns its error."""
    try:
        hook(*arguments)
    except HsswapError as problem:
        return problem
    except Exception as problem:  # a fault of ours: whoever waits must hear of it
        return unexpected("a hook failed", problem)
    return None


class HookThreads:
    """Begins hooks in the order of their priority, and within one in the order given.

    ``done``: transfers with what :func:`run_hook` returned, for the loop to take out. ``wake()`` is
    called on a thread after the first one that the loop has not been woken for.
    """

    def __init__(self, count: int, wake: Callable[[], None]) -> None:
        self.done: deque[tuple[Transfer, HsswapError | None]] = deque()
        self._wake = wake
        self._condition = threading.Condition(threading.Lock())
        self._queue: list[tuple[int, int, Transfer]] = []
        self._sequence = 0
        self._stopping = False
        self._wake_pending = False
        self._threads = [
            threading.Thread(target=self._work, name=f"hsswap-hooks-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def push(self, transfers: list[Transfer]) -> None:
        """Queue the hooks of transfers."""
        with self._condition:
            for transfer in transfers:
                self._sequence += 1
                heapq.heappush(self._queue, (transfer.priority, self._sequence, transfer))
            self._condition.notify(len(transfers))

    def take(self) -> list[tuple[Transfer, HsswapError | None]]:
        """What has been done since the last call."""
        self._wake_pending = False
        taken = []
        while self.done:
            taken.append(self.done.popleft())
        return taken

    def stop(self) -> None:
        """End the threads, which must be idle."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._queue:
                    if self._stopping:
                        return
                    self._condition.wait()
                transfer = heapq.heappop(self._queue)[2]
            reading = transfer.operation is Operation.READ
            hook = transfer.verify if reading else transfer.prepare
            assert hook is not None
            self.done.append((transfer, run_hook(hook, transfer)))
            del transfer  # an idle thread must not keep a buffer alive
            if not self._wake_pending:
                # Two threads may both get here: one wake-up too many, which finds nothing to do.
                self._wake_pending = True
                self._wake()
