"""What a loss of power leaves of files in RAM: the model behind :class:`hsswap.io.memory.MemoryIO`.

What was synced stays. Of the rest, in the order it was done, each thing survives or is lost on its
own: that a file was made, each page of 4 KiB that was written (so a longer write may be torn), that
a file was removed. A write to a file whose making is lost is lost with it. Syncing a file makes its
pages and its name durable, and nothing of other files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PAGE_BYTES = 4096
"""What a drive writes as a whole."""

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class Change:
    """Something done and not synced: a file made (``made`` bytes long), one removed (-1), or a
    page of it written. ``file``: which of the files that had this path, by number.
    """

    path: Path
    file: int
    made: int = 0
    offset: int = 0
    page: Bytes | None = None


@dataclass(frozen=True)
class DurableFile:
    """A file as it would be found after a loss of power. Its bytes are never changed in place."""

    number: int
    content: Bytes


@dataclass(frozen=True)
class PowerState:
    """A moment: what is durable, and what is not yet, in the order it was done."""

    durable: Mapping[Path, DurableFile]
    pending: tuple[Change, ...]

    def cut(self, survives: Callable[[int], bool]) -> dict[Path, Bytes]:
        """The files after the power is cut now; ``survives(n)`` says so of the n-th pending thing.

        The arrays are new ones.
        """
        files = {path: (file.number, file.content.copy()) for path, file in self.durable.items()}
        for number, change in enumerate(self.pending):
            if not survives(number):
                continue
            present = files.get(change.path)
            if change.made > 0:
                files[change.path] = change.file, np.zeros(change.made, np.uint8)
            elif present is not None and present[0] == change.file:
                _apply(files, change, present[1])
        return {path: content for path, (_, content) in files.items()}


def _apply(files: dict[Path, tuple[int, Bytes]], change: Change, content: Bytes) -> None:
    if change.page is None:
        del files[change.path]
        return
    end = change.offset + len(change.page)
    if end > len(content):  # a file that was made longer
        longer = np.zeros(end, np.uint8)
        longer[: len(content)] = content
        content = longer
        files[change.path] = change.file, content
    content[change.offset : end] = change.page


class PowerModel:
    """Follows what is done to files. On the backend's thread alone."""

    def __init__(self, files: Mapping[Path, Bytes]) -> None:
        self._numbers = 0
        self._current: dict[Path, int] = {}
        self._durable: dict[Path, DurableFile] = {}
        self._pending: list[Change] = []
        for path, content in files.items():
            number = self._number(path)
            self._durable[path] = DurableFile(number, content.copy())

    def _number(self, path: Path) -> int:
        self._numbers += 1
        self._current[path] = self._numbers
        return self._numbers

    def state(self) -> PowerState:
        """This moment."""
        return PowerState(dict(self._durable), tuple(self._pending))

    def created(self, path: Path, nbytes: int) -> None:
        """A file was made."""
        self._pending.append(Change(path, self._number(path), made=nbytes))

    def removed(self, path: Path) -> None:
        """A file was removed."""
        self._pending.append(Change(path, self._current.pop(path), made=-1))

    def written(self, path: Path, content: Bytes, begin: int, end: int) -> None:
        """These bytes of a file were changed."""
        number = self._current[path]
        first = begin - begin % PAGE_BYTES
        for offset in range(first, end, PAGE_BYTES):
            page = content[offset : offset + PAGE_BYTES].copy()
            self._pending.append(Change(path, number, offset=offset, page=page))

    def synced(self, path: Path) -> None:
        """A file was synced."""
        number = self._current[path]
        mine = [change for change in self._pending if change.file == number]
        if not mine:
            return
        # That its path was free again is durable with it.
        self._pending = [change for change in self._pending if change.path != path]
        durable = self._durable.get(path)
        base = {} if durable is None or durable.number != number else {path: durable}
        content = PowerState(base, tuple(mine)).cut(lambda _: True)[path]
        self._durable[path] = DurableFile(number, content)
