"""Tasks that write the same blocks while others flush, and the power goes at any operation: what a
flush acknowledged is there, or what was written over it later.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import pytest

from hsswap.config import ModelDims
from hsswap.errors import HsswapError
from hsswap.io import BlockStore
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from hsswap.io.powercut import PowerState
from tests.io.persist_support import open_store
from tests.io.support import begin_write, read
from tests.swap_watch import turns

DIMS = ModelDims.uniform(layers=2, q_heads=1, kv_heads=1, head_dim=64)
CAPACITY, BLOCKS, MOMENTS = 40, 24, 6
Block = tuple[int, int]  # id, layer


@dataclass
class Known:
    """What is so of one block. ``written``: the seed of the last write that ended well, 0 without
    one. ``lost``: the last seed when a write failed. ``called``: the seeds of all writes, in order.
    ``acknowledged``: the seeds of which one must be there, if any.
    """

    written: int = 0
    lost: int = 0
    called: list[int] = field(default_factory=list)
    acknowledged: set[int] = field(default_factory=set)


class Storm:
    """Writers and flushers of one store. ``moments``: what a loss of power could leave at some of
    the backend's operations, and which seeds of which blocks are right then.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._choose = random.Random(seed + 1)  # on the backend's thread
        self.known: dict[Block, Known] = {}
        self.moments: list[tuple[PowerState, dict[Block, set[int]]]] = []
        self._last = 0
        faults = [
            Fault(FaultKind.ERRNO, at=self.random.randrange(8, 300), only=only)
            for only in self.random.choice([(), ("write", "sync"), ("write", "write", "sync")])
        ]
        self.io = MemoryIO(faults, power=True, after_each=self._moment)

    def _moment(self, io: MemoryIO) -> None:
        if self._choose.random() < 0.03:
            known = list(self.known.items())
            right = {block: set(k.acknowledged) for block, k in known if k.acknowledged}
            self.moments.append((io.power_state(), right))

    async def write(self, store: BlockStore, ids: list[int], count: int) -> None:
        for _ in range(count):
            some, layer = self.random.sample(ids, self.random.randint(1, 5)), self._pick(2)
            blocks = [self.known.setdefault((each, layer), Known()) for each in some]
            seeds = list(range(self._last + 1, self._last + 1 + len(some)))
            self._last = seeds[-1]
            for block, seed in zip(blocks, seeds, strict=True):
                block.called.append(seed)
                if block.acknowledged:
                    block.acknowledged.add(seed)
            words = np.repeat(np.array(seeds)[:, None], store.block_bytes(layer) // 8, axis=1)
            outcome = begin_write(store, layer, store.ids.check(some), words.view(np.uint8))
            await outcome.end()
            for position, (block, seed) in enumerate(zip(blocks, seeds, strict=True)):
                if position in outcome.errors:
                    block.acknowledged.clear()
                    block.lost = block.called[-1]
                elif seed > max(block.lost, block.written):
                    block.written = seed
            await turns(self._pick(4))

    async def flush(self, store: BlockStore, count: int) -> None:
        for _ in range(count):
            before = [(block, block.written) for block in self.known.values() if block.written]
            try:
                await store.flush()
            except HsswapError:
                continue
            for block, seed in before:
                newest = min(block.acknowledged, default=0)
                if seed > max(block.lost, newest):
                    block.acknowledged = {each for each in block.called if each >= seed}
            await turns(self._pick(6))

    def _pick(self, below: int) -> int:
        return self.random.randrange(below)


@pytest.mark.parametrize("seed", range(6))
async def test_what_a_flush_acknowledged_is_there(seed: int) -> None:
    storm = Storm(seed)
    store = await open_store(storm.io, CAPACITY, DIMS)
    ids = store.ids.allocate(BLOCKS).tolist()
    await asyncio.gather(
        *(storm.write(store, ids, 30) for _ in range(1 + seed % 4)),
        *(storm.flush(store, 15) for _ in range(1 + seed % 3)),
    )
    with suppress(HsswapError):  # of the last commit
        await store.close()
    assert any(right for _, right in storm.moments)
    for state, right in storm.random.sample(storm.moments, min(MOMENTS, len(storm.moments))):
        left = [storm.random.random() < 0.5 for _ in state.pending]
        again = MemoryIO(files=state.cut(left.__getitem__), power=True)
        async with await open_store(again, CAPACITY, DIMS) as store:
            store.ids.add_reference(store.ids.kept())
            for (block_id, layer), seeds in right.items():
                found, outcome = await read(store, layer, store.ids.check([block_id]))
                assert not outcome.errors
                assert int(found[0].view(np.int64)[0]) in seeds
