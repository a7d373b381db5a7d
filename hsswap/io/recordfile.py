"""Reading and writing whole pages of a file through a backend: manifests and records."""

from __future__ import annotations

import asyncio
import itertools
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.config import DISK_ALIGNMENT
from hsswap.errors import HsswapError
from hsswap.io.base import BlockIO, IOFile, Operation, Priority, Transfer
from hsswap.io.records import Records, seal

PAGES_A_TRANSFER = 256
"""1 MiB; one transfer is in flight at a time."""


class Pages:
    """Page-aligned memory of whole pages, zeroed. ``content`` is its bytes."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.content: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)


async def move(
    io: BlockIO,
    operation: Operation,
    file: IOFile,
    offset: int,
    content: NDArray[np.uint8],
    prepare: Callable[[Any], None] | None = None,
) -> None:
    """Read or write bytes in one transfer: page-aligned in memory and in the file.

    Goes before write-behind. The caller sees to it that the backend has room for one transfer. When
    cancelled, the transfer runs on, and keeps the memory alive.
    """
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_done(transfer: Transfer, error: HsswapError | None) -> None:
        if done.cancelled():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    first = content.__array_interface__["data"][0]
    addresses = np.arange(first, first + len(content), DISK_ALIGNMENT, dtype=np.uint64)
    transfer = Transfer(
        operation,
        file,
        offset,
        addresses,
        DISK_ALIGNMENT,
        Priority.NEEDED,
        on_done,
        prepare,
        owner=content,
    )
    io.submit([transfer])
    await done


async def read_all(io: BlockIO, file: IOFile, content: NDArray[np.uint8]) -> None:
    """Read a file from its beginning into page-aligned memory."""
    step = PAGES_A_TRANSFER * DISK_ALIGNMENT
    for offset in range(0, len(content), step):
        await move(io, Operation.READ, file, offset, content[offset : offset + step])


async def write_all(io: BlockIO, file: IOFile, content: bytes) -> None:
    """Write a file from its beginning; a multiple of 4096 bytes."""
    pages = Pages(len(content))
    pages.content[:] = np.frombuffer(content, np.uint8)
    await move(io, Operation.WRITE, file, 0, pages.content)


async def write_pages(io: BlockIO, file: IOFile, records: Records, pages: NDArray[np.int64]) -> int:
    """Write pages of the record file, as they are now; neighbours together. Returns the bytes.

    Records are sealed on the backend's thread, in a copy.
    """
    copy = Pages(len(pages) * DISK_ALIGNMENT).content.reshape(-1, DISK_ALIGNMENT)
    copy[:] = records.image.reshape(-1, DISK_ALIGNMENT)[pages]
    layout = records.layout
    breaks = np.flatnonzero(np.diff(pages) != 1) + 1
    bounds = [0, *breaks.tolist(), len(pages)]
    for begin, stop in itertools.pairwise(bounds):
        for at in range(begin, stop, PAGES_A_TRANSFER):
            end = min(at + PAGES_A_TRANSFER, stop)
            part, first = copy[at:end].reshape(-1), int(pages[at])

            def prepare(
                transfer: Transfer, part: NDArray[np.uint8] = part, first: int = first
            ) -> None:
                seal(layout, part, first)

            offset = first * DISK_ALIGNMENT
            await move(io, Operation.WRITE, file, offset, part, prepare)
    return copy.nbytes
