"""Calls that Ctrl-C does not cut in two."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.signal makes enums for 5 us
import threading
from signal import SIGINT
from types import FrameType, TracebackType
from typing import Any


class Whole:
    """``with Whole():`` around a plain call that changes state: the main thread's handler of SIGINT
    is called at the end of the block, not in the middle; a second one at once.

    Otherwise KeyboardInterrupt comes between any two lines, such as one that takes a slot and one
    that says who has it. Costs 1 us. Without effect in other threads, where Python raises nothing,
    and where the handler is none of Python's.
    """

    __slots__ = ("_before", "_came")

    def __enter__(self) -> None:
        self._before: Any = None
        self._came: tuple[int, FrameType | None] | None = None
        if threading.current_thread() is threading.main_thread():
            before = _signal.getsignal(SIGINT)
            if callable(before):
                self._before = before
                _signal.signal(SIGINT, self._note)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._before is not None:
            _signal.signal(SIGINT, self._before)
            if self._came is not None:
                self._before(*self._came)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came is None:
            self._came = number, frame
        else:
            self._before(number, frame)
