"""Ctrl-C, SIGTERM and SIGHUP that never leave work half undone.

A signal raises :class:`Interrupted` at once, wherever the main thread is, except inside
``with interrupts.held()``: there it is kept until ``interrupts.check()``, which stands where
everything is in order. So the opening and closing of stores, threads and locks is never cut in two.
A second signal while the first is still held is raised all the same, for a disk that never answers.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A signal asked for the end. ``exit_code`` is what shells report: 129, 130 or 143."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Interrupts:
    """Handlers of the signals for the duration of a ``with`` block.

    ``to_the_end``: the process ends after the block, so signals after it are of no use to anyone
    and are ignored. SIGHUP stays ignored where it is (nohup). Outside the main thread, where Python
    allows no handlers, it does nothing.
    """

    def __init__(self, *, to_the_end: bool = False) -> None:
        self._to_the_end = to_the_end
        self._is_held = False
        self._number = 0
        self._is_raised = False
        self._tell: Callable[[], object] | None = None  # that a signal came, while held
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_IGN if self._to_the_end else handler)
        self._before.clear()

    @property
    def came(self) -> Interrupted | None:
        """The first signal that came, whether or not its exception arrived anywhere."""
        return Interrupted(self._number) if self._number else None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep signals until :meth:`check`, or until the end of the block."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        self.check()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """``asyncio.run(work)``, which a signal cancels; it is raised once everything is closed.

        Raised at once it would come between any two lines of the loop's callbacks, and what waits
        for those would never end.
        """
        import asyncio

        async def cancellable() -> T:
            loop, task = asyncio.get_running_loop(), asyncio.current_task()
            assert task is not None
            self._tell = lambda: loop.call_soon_threadsafe(task.cancel)
            try:
                return await work
            finally:
                self._tell = None

        with self.held():
            try:
                return asyncio.run(cancellable())
            except asyncio.CancelledError:
                self.check()
                raise

    def check(self) -> None:
        """Raise the signal that came, if there is one.

        Again, if need be: an exception raised in a callback of C code or a finalizer is lost.
        """
        if self._number:
            self._is_raised = True
            raise Interrupted(self._number)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_raised:
            return  # everything is being closed already
        first, self._number = self._number, self._number or number
        if self._is_held and not first:
            if self._tell is not None:
                self._tell()
            return
        self._is_raised = True
        raise Interrupted(self._number)
