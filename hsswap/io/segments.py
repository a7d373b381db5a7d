"""The segment files of a store: made when a block is first written, removed when no id is used.

With several directories, segment n is in the (n modulo their number)-th.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import BlockIOError, HsswapError, OutOfSpace
from hsswap.io.base import BlockIO, IOFile
from hsswap.io.directory import segment_name
from hsswap.io.ids import INDEX_MASK, BlockIds
from hsswap.io.layout import SEGMENT_IDS, SegmentLayout, segment_of
from hsswap.io.runs import BlockRun
from hsswap.io.space import SpaceBudget
from hsswap.io.waiting import until_done


@dataclass(eq=False, slots=True)
class Segment:
    """A segment that has or wants a file.

    ``on_disk``: it has one that was found when the store was opened, and is opened on demand.
    ``changing``: its file is being made, opened or removed. ``pending``: runs that wait for it.
    ``leaving``: given up to make room. ``users``: runs that wait for it or use it.
    """

    number: int
    file: IOFile | None = None
    on_disk: bool = False
    leaving: bool = False
    changing: bool = False
    users: int = 0
    pending: list[BlockRun] = field(default_factory=list)


class ClearSegment(Protocol):
    """See :meth:`hsswap.io.journal.Journal.clear_segment`."""

    def __call__(self, number: int, resume: Callable[[HsswapError | None], None], /) -> bool: ...


def _nothing_to_clear(number: int, resume: Callable[[HsswapError | None], None], /) -> bool:
    return False


class Segments:
    """Makes and removes segment files through the backend, which does it off the loop.

    Lives on the loop's thread, except :meth:`freed`. ``on_ready(runs, error)`` is called with runs
    whose file has been made, or could not be; never inside :meth:`enter`.

    At the limit of space, segments in which all blocks are kept and none is held are given up, and
    what waits for room is tried again when they are gone. ``clear`` is asked before a file goes.
    """

    def __init__(
        self,
        backend: BlockIO,
        layout: SegmentLayout,
        places: Sequence[Path],
        ids: BlockIds,
        budget: SpaceBudget,
    ) -> None:
        self._io = backend
        self._layout = layout
        self._places = places
        self.budget = budget
        self.clear: ClearSegment = _nothing_to_clear
        self._ids = ids
        self.on_ready: Callable[[list[BlockRun], HsswapError | None], None] = lambda runs, error: (
            None
        )
        self._loop = asyncio.get_running_loop()
        self._segments: dict[int, Segment] = {}
        self._freed: deque[int] = deque()  # filled by any thread
        self._empty: set[int] = set()
        self._starving: list[Segment] = []  # wait for room
        self._tasks: set[asyncio.Future[IOFile]] = set()
        self._closing = False
        self.errors = 0

    @property
    def file_count(self) -> int:
        """Segment files that are there."""
        return sum(s.file is not None or s.on_disk for s in self._segments.values())

    def path(self, number: int) -> Path:
        """Where a segment's file is."""
        return self._places[number % len(self._places)] / segment_name(number)

    def adopt(self, numbers: Iterable[int]) -> None:
        """These segments have a file already."""
        for number in numbers:
            self._segments[number] = Segment(number, on_disk=True)
            self.budget.used_bytes += self._layout.segment_bytes

    def hold(self, number: int) -> IOFile | None:
        """Keep a segment's file, if there is one, until :meth:`let_go`."""
        segment = self._segment(number)
        segment.users += 1
        return segment.file

    def _segment(self, number: int) -> Segment:
        segment = self._segments.get(number)
        if segment is None:
            segment = self._segments[number] = Segment(number)
        return segment

    def let_go(self, number: int) -> None:
        """The end of :meth:`hold`."""
        self.leave([self._segments[number]])

    def enter(self, runs: Sequence[BlockRun]) -> list[BlockRun]:
        """Count runs as users of their segments. Returns those whose file is there, and now set;
        the others wait for theirs.
        """
        ready = []
        for run in runs:
            segment = self._segment(segment_of(run.first))
            segment.users += 1
            if segment.file is not None and not segment.changing:
                run.file = segment.file
                ready.append(run)
            else:
                segment.pending.append(run)
                self._change(segment)
        return ready

    def with_files(self, indices: list[int]) -> list[Segment] | None:
        """The segment of each block, if all have files that stay; count their users then."""
        found = []
        for index in indices:
            segment = self._segments.get(index // SEGMENT_IDS)
            if segment is None or segment.file is None or segment.changing:
                return None
            found.append(segment)
        return found

    def leave_of(self, runs: Sequence[BlockRun]) -> None:
        """Runs are done with their segments."""
        self.leave([self._segments[segment_of(run.first)] for run in runs])

    def leave(self, segments: Sequence[Segment]) -> None:
        """A user each is done with these segments."""
        for segment in segments:
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

    async def closed(self) -> None:
        """Wait until nothing of this is under way, also when cancelled. After the backend was
        closed.
        """
        await until_done(asyncio.ensure_future(self._idle()))

    async def _idle(self) -> None:
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _change(self, segment: Segment) -> None:
        """Make or open the file if runs wait for it and nothing else is under way."""
        if segment.changing or not segment.pending or self._closing:
            return
        path, nbytes = self.path(segment.number), self._layout.segment_bytes
        making: asyncio.Future[IOFile]
        try:
            if segment.on_disk:
                making = self._io.open_file(path, nbytes)
            elif self.budget.limits.any:
                excess = self.budget.excess(nbytes)
                if excess:
                    self._wait_for_room(segment, excess)
                    return
                making = asyncio.ensure_future(self._make_within_limits(path, nbytes))
                self._tasks.add(making)
            else:
                making = self._io.create_file(path, nbytes)
        except HsswapError as error:  # the backend was closed by somebody else
            self._loop.call_soon(self._settle, segment, error)
        else:
            if not segment.on_disk:
                self.budget.used_bytes += nbytes
            making.add_done_callback(partial(self._made, segment))
        segment.changing = True

    async def _make_within_limits(self, path: Path, nbytes: int) -> IOFile:
        await self.budget.check_floor(path.parent, nbytes)
        return await self._io.create_file(path, nbytes)

    def shrink(self) -> None:
        """Give up segments that nobody holds as long as the store takes more than it may."""
        excess = -(-self.budget.excess(0) // self._layout.segment_bytes)
        for victim in self._unheld()[:excess]:
            self._give_up(victim)

    def _give_up(self, victim: Segment) -> None:
        """Free the kept blocks of a segment; its file goes by way of :meth:`freed`."""
        victim.leaving = True
        first = victim.number * SEGMENT_IDS
        self._ids.free_kept(np.arange(first, min(first + SEGMENT_IDS, self._ids.capacity)))

    def _wait_for_room(self, segment: Segment, excess: int) -> None:
        """Give up segments that nobody holds, oldest first; without any there is no room."""
        self._starving.append(segment)
        leaving = sum(s.leaving for s in self._segments.values())
        missing = -(-excess // self._layout.segment_bytes) - leaving
        for victim in self._unheld()[: max(0, missing)]:
            self._give_up(victim)
            leaving += 1
        if not leaving:
            self._starving.remove(segment)
            error = self.budget.out_of_space(self._layout.segment_bytes)
            segment.changing = True
            self._loop.call_soon(self._settle, segment, error)

    def _unheld(self) -> list[Segment]:
        """Segments with a file and kept blocks alone, those to go first in front."""
        kept = (self._ids.kept() & INDEX_MASK) // SEGMENT_IDS
        numbers = dict.fromkeys(kept[::-1].tolist())  # by their youngest block, youngest first
        found = []
        for number in reversed(numbers):
            segment, first = self._segments.get(number), number * SEGMENT_IDS
            if segment is None or segment.leaving or not (segment.file or segment.on_disk):
                continue
            if not self._ids.any_held(first, first + SEGMENT_IDS):
                found.append(segment)
        return found

    def _room_again(self) -> None:
        starving, self._starving = self._starving, []
        for segment in starving:
            self._change(segment)

    def _made(self, segment: Segment, making: asyncio.Future[IOFile]) -> None:
        self._tasks.discard(making)
        error = _error_of(making)
        if error is None:
            segment.file = making.result()
        elif not segment.on_disk:
            self.budget.used_bytes -= self._layout.segment_bytes
            if isinstance(error, OutOfSpace) and segment.pending and self._unheld():
                segment.changing = False
                self._wait_for_room(segment, self._layout.segment_bytes)
                return
        self._settle(segment, error)

    def _settle(self, segment: Segment, error: HsswapError | None) -> None:
        segment.changing = False
        pending, segment.pending = segment.pending, []
        if error is None:
            for run in pending:
                assert segment.file is not None
                run.file = segment.file
        if pending:
            self.on_ready(pending, error)

    def _remove_empty(self) -> None:
        while self._freed:
            self._empty.add(self._freed.popleft())
        for number in sorted(self._empty):
            segment = self._segments.get(number)
            if segment is not None and (segment.users or segment.changing) and not self._closing:
                continue  # looked at again when its last user leaves
            self._empty.discard(number)
            first = number * SEGMENT_IDS
            if segment is None or self._closing or not (segment.file or segment.on_disk):
                continue
            if self._ids.any_used(first, first + SEGMENT_IDS):
                if segment.leaving:  # given out again before it could go: who waits looks elsewhere
                    segment.leaving = False
                    self._room_again()
                continue
            segment.changing = True
            if not self.clear(number, partial(self._cleared, segment)):
                self._remove(segment)

    def _cleared(self, segment: Segment, error: HsswapError | None) -> None:
        """No record speaks of the segment any more: its file may go, if it is still unused."""
        first = segment.number * SEGMENT_IDS
        if error is not None:
            self.errors += 1
        wanted = segment.users or self._ids.any_used(first, first + SEGMENT_IDS)
        if error or wanted or self._closing:
            self._keep(segment)
        else:
            self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        if segment.file is None:  # found on disk, and not opened since
            self._open_to_remove(segment)
            return
        try:
            removing = self._io.remove_file(segment.file)
        except HsswapError:  # the backend was closed by somebody else
            segment.changing = False
            return
        removing.add_done_callback(partial(self._removed, segment))

    def _open_to_remove(self, segment: Segment) -> None:
        try:
            opening = self._io.open_file(self.path(segment.number), 0)
        except HsswapError:
            segment.changing = False
            return

        def opened(opening: asyncio.Future[IOFile]) -> None:
            if _error_of(opening) is None:
                segment.file = opening.result()
                self._remove(segment)
            else:
                self.errors += 1
                self._keep(segment)

        opening.add_done_callback(opened)

    def _removed(self, segment: Segment, removing: asyncio.Future[None]) -> None:
        if _error_of(removing) is None:
            segment.file = None
            segment.on_disk = segment.changing = segment.leaving = False
            self.budget.used_bytes -= self._layout.segment_bytes
            self._change(segment)
            self._room_again()
        else:  # it stays in use; what freed blocks held is known to be stale
            self.errors += 1
            self._keep(segment)

    def _keep(self, segment: Segment) -> None:
        """A file that was to go stays."""
        segment.leaving = False
        segment.changing = False
        if segment.file is None and segment.on_disk:
            self._change(segment)
        else:
            self._settle(segment, None)
        self._room_again()


def _error_of(future: asyncio.Future[IOFile] | asyncio.Future[None]) -> HsswapError | None:
    """What a future of a backend failed with."""
    if future.cancelled():
        return BlockIOError("the backend gave up the operation")
    error = future.exception()
    if error is None or isinstance(error, HsswapError):
        return error
    raise error
