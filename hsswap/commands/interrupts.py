"""Ctrl-C and SIGTERM that never leave work half undone.

A signal raises :class:`Interrupted` at once, wherever the main thread is, except inside
``with interrupts.held()``: there it is kept until ``interrupts.check()``, which stands where
everything is in order. So the opening and closing of stores, threads and locks is never cut in two.
A second signal while the first is still held is raised all the same, for a disk that never answers.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """A signal asked for the end. ``exit_code`` is what shells report for it: 130 or 143."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number


class Interrupts:
    """Handlers of SIGINT and SIGTERM for the duration of a ``with`` block.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self._is_held = False
        self._pending = 0
        self._is_raised = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep signals until :meth:`check`, or until the end of the block."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        self.check()

    def check(self) -> None:
        """Raise the signal that was kept, if there is one."""
        if self._pending and not self._is_raised:
            self._is_raised = True
            raise Interrupted(self._pending)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_raised:
            return  # everything is being closed already
        if self._is_held and not self._pending:
            self._pending = number
            return
        self._is_raised = True
        raise Interrupted(number)
