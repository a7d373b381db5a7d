"""Copy-on-write: the content of a block under a new id."""

from __future__ import annotations

import asyncio
import mmap
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import HsswapError
from hsswap.io.base import Priority
from hsswap.io.contents import StoredBlocks
from hsswap.io.runs import OnBlocksDone


class CopyingStore(Protocol):
    """What :func:`copy_content` needs of a store."""

    def block_bytes(self, layer: int) -> int:
        """Bytes of a block of that layer."""

    def describe(self, layer: int, indices: NDArray[np.int64]) -> StoredBlocks:
        """What is known of blocks."""

    def read(
        self,
        layer: int,
        indices: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        *,
        priority: Priority = ...,
        owner: object = ...,
        on_done: OnBlocksDone,
    ) -> None:
        """Read blocks."""

    def write(
        self,
        layer: int,
        indices: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        *,
        priority: Priority = ...,
        owner: object = ...,
        on_done: OnBlocksDone,
        lengths: NDArray[np.uint16] | None = ...,
        codes_version: int = ...,
    ) -> None:
        """Write blocks."""


async def copy_content(store: CopyingStore, layer: int, source: int, target: int) -> None:
    """Copy one layer's block to another index, if it has content. Raises the error of the read or
    of the write.
    """
    old, new = np.array([source]), np.array([target])
    known = store.describe(layer, old)
    if not known.written[0]:
        return
    memory = mmap.mmap(-1, store.block_bytes(layer))
    content = np.frombuffer(memory, np.uint8)  # keeps the map; goes when both transfers ended
    addresses = np.array([content.__array_interface__["data"][0]], np.uint64)
    done = _Done()
    store.read(layer, old, addresses, owner=content, on_done=done)
    await done.future
    done = _Done()
    store.write(
        layer,
        new,
        addresses,
        priority=Priority.NEEDED,
        owner=content,
        on_done=done,
        lengths=known.lengths,
        codes_version=int(known.codes_versions[0]),
    )
    await done.future


class _Done:
    """``on_done`` of one block as a future."""

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self, positions: NDArray[np.int64], error: HsswapError | None) -> None:
        if self.future.done():  # who waited was cancelled
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)
