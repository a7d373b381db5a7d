"""The segment files of a store: made when a block is first written, removed when no id is used."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import BlockIOError, HsswapError
from hsswap.io.base import BlockIO, IOFile
from hsswap.io.directory import segment_name
from hsswap.io.ids import BlockIds
from hsswap.io.layout import SEGMENT_IDS, SegmentLayout, segment_of
from hsswap.io.runs import BlockRun


@dataclass(eq=False, slots=True)
class Segment:
    """A segment that has or wants a file.

    ``changing``: its file is being made or removed. ``pending``: runs that wait for the file.
    ``users``: runs that wait for it or use it.
    """

    number: int
    file: IOFile | None = None
    changing: bool = False
    users: int = 0
    pending: list[BlockRun] = field(default_factory=list)


class Segments:
    """Makes and removes segment files through the backend, which does it off the loop.

    Lives on the loop's thread, except :meth:`freed`. ``on_ready(runs, error)`` is called with runs
    whose file has been made, or could not be; never inside :meth:`enter`.
    """

    def __init__(
        self,
        backend: BlockIO,
        layout: SegmentLayout,
        directory: Path | None,
        ids: BlockIds,
        on_ready: Callable[[list[BlockRun], HsswapError | None], None],
    ) -> None:
        self._io = backend
        self._layout = layout
        self._directory = directory or Path()
        self._ids = ids
        self._on_ready = on_ready
        self._loop = asyncio.get_running_loop()
        self._segments: dict[int, Segment] = {}
        self._freed: deque[int] = deque()  # filled by any thread
        self._empty: set[int] = set()
        self._closing = False
        self.errors = 0

    @property
    def file_count(self) -> int:
        """Segment files that are there."""
        return sum(segment.file is not None for segment in self._segments.values())

    def enter(self, run: BlockRun) -> bool:
        """Count a run as user of its segment. True: its file is set; False: it waits for it."""
        number = segment_of(run.first)
        segment = self._segments.get(number)
        if segment is None:
            segment = self._segments[number] = Segment(number)
        segment.users += 1
        if segment.file is not None and not segment.changing:
            run.file = segment.file
            return True
        segment.pending.append(run)
        self._change(segment)
        return False

    def leave(self, run: BlockRun) -> None:
        """A run is done with its segment."""
        segment = self._segments[segment_of(run.first)]
        segment.users -= 1
        if segment.users == 0 and self._empty:
            self._remove_empty()

    def freed(self, indices: NDArray[np.int64]) -> None:
        """Blocks were freed; their segments go when nothing is left in them. On any thread."""
        self._freed.extend(np.unique(indices // SEGMENT_IDS).tolist())
        with suppress(RuntimeError):  # the loop was closed: there is nobody to remove files
            self._loop.call_soon_threadsafe(self._remove_empty)

    def close(self) -> list[BlockRun]:
        """Make and remove no more files. Returns the runs that waited for one."""
        self._closing = True
        pending: list[BlockRun] = []
        for segment in self._segments.values():
            pending.extend(segment.pending)
            segment.pending = []
        return pending

    def _change(self, segment: Segment) -> None:
        """Make the file if runs wait for it and nothing else is under way."""
        if segment.changing or not segment.pending or self._closing:
            return
        path = self._directory / segment_name(segment.number)
        try:
            making = self._io.create_file(path, self._layout.segment_bytes)
        except HsswapError as error:  # the backend was closed by somebody else
            self._loop.call_soon(self._settle, segment, error)
        else:
            making.add_done_callback(partial(self._made, segment))
        segment.changing = True

    def _made(self, segment: Segment, making: asyncio.Future[IOFile]) -> None:
        error = _error_of(making)
        if error is None:
            segment.file = making.result()
        self._settle(segment, error)

    def _settle(self, segment: Segment, error: HsswapError | None) -> None:
        segment.changing = False
        pending, segment.pending = segment.pending, []
        if error is None:
            for run in pending:
                assert segment.file is not None
                run.file = segment.file
        if pending:
            self._on_ready(pending, error)

    def _remove_empty(self) -> None:
        while self._freed:
            self._empty.add(self._freed.popleft())
        for number in sorted(self._empty):
            segment = self._segments.get(number)
            if segment is not None and (segment.users or segment.changing) and not self._closing:
                continue  # looked at again when its last user leaves
            self._empty.discard(number)
            first = number * SEGMENT_IDS
            if segment is None or segment.file is None or self._closing:
                continue
            if self._ids.any_used(first, first + SEGMENT_IDS):
                continue
            self._remove(segment, segment.file)

    def _remove(self, segment: Segment, file: IOFile) -> None:
        try:
            removing = self._io.remove_file(file)
        except HsswapError:  # the backend was closed by somebody else
            return
        segment.changing = True
        removing.add_done_callback(partial(self._removed, segment))

    def _removed(self, segment: Segment, removing: asyncio.Future[None]) -> None:
        if _error_of(removing) is None:
            segment.file = None
            segment.changing = False
            self._change(segment)
        else:  # it stays in use; what freed blocks held is known to be stale
            self.errors += 1
            self._settle(segment, None)


def _error_of(future: asyncio.Future[IOFile] | asyncio.Future[None]) -> HsswapError | None:
    """What a future of a backend failed with."""
    if future.cancelled():
        return BlockIOError("the backend gave up the operation")
    error = future.exception()
    if error is None or isinstance(error, HsswapError):
        return error
    raise error
