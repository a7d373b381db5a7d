"""What the I/O tests share: page-aligned memory, one-call reads and writes, small dims."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.config import LayerGroup, ModelDims
from hsswap.errors import HsswapError
from hsswap.io import BlockStore
from hsswap.io.base import Priority
from hsswap.io.memory import Fault, MemoryIO

PAGE = 4096

# Two layer groups with blocks of 4 KiB (layers 0, 1) and 8 KiB (layer 2).
DIMS = ModelDims((LayerGroup(2, 2, 2, 16), LayerGroup(1, 4, 4, 24)), block_size=16)
BLOCK = DIMS.block_bytes(DIMS.groups[0])


class Pages:
    """Page-aligned zeroed memory, as spans of equal length."""

    def __init__(self, count: int, span_bytes: int = PAGE) -> None:
        self._map = mmap.mmap(-1, count * span_bytes)
        self.spans = np.frombuffer(self._map, np.uint8).reshape(count, span_bytes)
        first = self.spans.ctypes.data
        self.addresses = np.arange(count, dtype=np.uint64) * np.uint64(span_bytes) + np.uint64(
            first
        )


def pattern(count: int, span_bytes: int, seed: int) -> NDArray[np.uint8]:
    """Random bytes, different for every seed and span."""
    return np.random.default_rng(seed).integers(0, 256, (count, span_bytes), np.uint8)


class Outcome:
    """Collects what a read or a write reports; awaits its end."""

    def __init__(self, count: int) -> None:
        self.reports: list[tuple[list[int], HsswapError | None]] = []
        self.errors: dict[int, HsswapError] = {}
        self.succeeded: set[int] = set()
        self._missing = count
        self._end = asyncio.get_running_loop().create_future()
        if not count:
            self._end.set_result(None)

    def __call__(self, positions: NDArray[np.int64], error: HsswapError | None) -> None:
        listed = positions.tolist()
        self.reports.append((listed, error))
        for position in listed:
            assert position not in self.errors, "reported twice"
            assert position not in self.succeeded, "reported twice"
            if error is None:
                self.succeeded.add(position)
            else:
                self.errors[position] = error
        self._missing -= len(listed)
        assert self._missing >= 0
        if self._missing == 0:
            self._end.set_result(None)

    @property
    def ended(self) -> bool:
        """Whether every position was reported."""
        return self._missing == 0

    async def end(self) -> Outcome:
        """Wait until every position was reported."""
        await self._end
        return self


def begin_write(
    store: BlockStore, layer: int, indices: NDArray[np.int64], content: NDArray[np.uint8]
) -> Outcome:
    """Write a copy of ``content`` ``[blocks, block_bytes]``."""
    pages = Pages(len(content), content.shape[1])
    pages.spans[:] = content
    outcome = Outcome(len(indices))
    store.write(layer, indices, pages.addresses, owner=pages, on_done=outcome)
    return outcome


async def write(
    store: BlockStore, layer: int, indices: NDArray[np.int64], content: NDArray[np.uint8]
) -> Outcome:
    """Write a copy of ``content`` and wait."""
    return await begin_write(store, layer, indices, content).end()


class Reading:
    """A read under way into memory of its own."""

    def __init__(
        self, store: BlockStore, layer: int, indices: NDArray[np.int64], **options: Any
    ) -> None:
        self.pages = Pages(max(1, len(indices)), store.block_bytes(layer))
        self.outcome = Outcome(len(indices))
        store.read(
            layer,
            indices,
            self.pages.addresses[: len(indices)],
            owner=self.pages,
            on_done=self.outcome,
            **options,
        )


async def read(
    store: BlockStore,
    layer: int,
    indices: NDArray[np.int64],
    priority: Priority = Priority.NEEDED,
) -> tuple[NDArray[np.uint8], Outcome]:
    """Read blocks and wait: their bytes, and what was reported."""
    reading = Reading(store, layer, indices, priority=priority)
    await reading.outcome.end()
    return reading.pages.spans, reading.outcome


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something holds; a bound on turns, not on time, ends a hang."""
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not happen")


async def memory_store(*faults: Fault, capacity: int = 600, **options: Any) -> BlockStore:
    """An open store in memory, with these faults."""
    return await BlockStore.open(DIMS, None, capacity, io=MemoryIO(faults, **options))


def fresh(store: BlockStore, count: int) -> NDArray[np.int64]:
    """Indices of new ids."""
    return store.ids.check(store.ids.allocate(count))
