"""Sequences that were appended in turns, read back beside one that was appended alone.

Ids come from the store as sequences ask for them: each block behind the last of its sequence. All
are in one store, and every turn measures both, a short slice each; a sequence is read tile by tile,
two in flight.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.bench.figures import Interval
from hsswap.bench.io_arms import BenchError, Memory, Slice, dims_of, transfer
from hsswap.io import BlockIds, BlockStore
from hsswap.io.base import Operation

SEQUENCES = 6
TILE_BLOCKS = 64
"""1,024 tokens in blocks of 16: what a sequence asks for at once."""


def append_in_turns(ids: BlockIds, sequences: int, blocks: int) -> list[NDArray[np.int64]]:
    """Indices of new sequences, each of which got a block in every turn."""
    taken: list[list[int]] = [[] for _ in range(sequences)]
    for _ in range(blocks):
        for mine in taken:
            mine += ids.allocate(1, mine[-1] if mine else None).tolist()
    return [ids.check(mine) for mine in taken]


class SequenceArm:
    """Reads sequences of equal length from their beginning, one after the other, over and over."""

    def __init__(self, store: BlockStore, sequences: list[NDArray[np.int64]]) -> None:
        self._store = store
        self._tiles = np.concatenate(sequences).reshape(-1, TILE_BLOCKS)
        self._next = 0
        block_bytes = store.block_bytes(0)
        self._memory = deque(Memory(TILE_BLOCKS, block_bytes) for _ in range(2))

    async def each(self, operation: Operation) -> None:
        """Write every block with its index in front, or read all and look for that."""
        memory = self._memory[0]
        for tile in self._tiles:
            expected = tile[:, None].view(np.uint8)
            memory.blocks[:, :8] = expected if operation is Operation.WRITE else 0
            await transfer(self._store, operation, tile, memory)
            if not np.array_equal(memory.blocks[:, :8], expected):
                raise BenchError(f"{self._store.path}: blocks came back wrong; report it")

    async def slice(self, seconds: float) -> Slice:
        """Read that long."""
        wall, processor = time.perf_counter(), time.process_time()
        deadline, tiles = wall + seconds, 0
        reads: deque[asyncio.Future[None]] = deque()
        while time.perf_counter() < deadline:
            if len(reads) == len(self._memory):
                await reads.popleft()
            tile = self._tiles[self._next]
            self._next = (self._next + 1) % len(self._tiles)
            memory = self._memory[0]
            self._memory.rotate(1)
            reads.append(asyncio.ensure_future(transfer(self._store, Operation.READ, tile, memory)))
            tiles += 1
        await asyncio.gather(*reads)
        used = time.process_time() - processor
        return Slice(tiles * TILE_BLOCKS, time.perf_counter() - wall, used)


async def compare_turns(
    name: str, place: Path, block_bytes: int, data_bytes: int, slices: int, slice_s: float
) -> dict[str, Any]:
    """One backend and size: the row of the report."""
    tiles = max(2, data_bytes // block_bytes // TILE_BLOCKS // (SEQUENCES + 1))
    blocks = tiles * TILE_BLOCKS
    dims, capacity = dims_of(block_bytes), (SEQUENCES + 1) * blocks
    async with await BlockStore.open(dims, place, capacity, io=name) as store:
        together = SequenceArm(store, append_in_turns(store.ids, SEQUENCES, blocks))
        alone = SequenceArm(store, append_in_turns(store.ids, 1, blocks))
        for operation in (Operation.WRITE, Operation.READ):
            for arm in (together, alone):
                await arm.each(operation)
        found: dict[SequenceArm, list[Slice]] = {together: [], alone: []}
        for turn in range(slices):
            for arm in (together, alone) if turn % 2 else (alone, together):
                found[arm].append(await arm.slice(slice_s))
    rates = {
        arm: [block_bytes * one.operations / one.wall_s / 1e6 for one in taken]
        for arm, taken in found.items()
    }
    ratios = [ours / theirs for ours, theirs in zip(rates[together], rates[alone], strict=True)]
    return {
        "arm": name,
        "block_kib": block_bytes >> 10,
        "sequences": SEQUENCES,
        "blocks_each": blocks,
        "mb_per_s": round(Interval.of(rates[together]).median, 1),
        "alone_mb_per_s": round(Interval.of(rates[alone]).median, 1),
        "of_one_alone": [round(value, 3) for value in Interval.of(ratios)],
    }
