"""BlockStore under random overlapping calls: every read sees the last write called before it."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.errors import CorruptBlock
from hsswap.io import BlockStore
from hsswap.io.base import Priority
from tests.io.support import DIMS, Outcome, Reading, begin_write, pattern

OWNERS = 12
CALLS = 400


@dataclass
class Owner:
    """A sequence: its ids, and by (layer, position) the seed its block was last written with."""

    ids: list[int]
    seeds: dict[tuple[int, int], int]


@dataclass
class Expected:
    """A read under way, and what it must give: a seed for each position, None for no content."""

    reading: Reading
    seeds: list[int | None]

    async def check(self, block_bytes: int) -> None:
        outcome = await self.reading.outcome.end()
        for position, seed in enumerate(self.seeds):
            if seed is None:
                assert isinstance(outcome.errors[position], CorruptBlock)
            else:
                assert position not in outcome.errors
                found = self.reading.pages.spans[position]
                assert np.array_equal(found, pattern(1, block_bytes, seed)[0])


class Traffic:
    """Calls a store without waiting, and remembers what each call must give."""

    def __init__(self, store: BlockStore, seed: int) -> None:
        self.store = store
        self.random = random.Random(seed)
        self.owners = [Owner([], {}) for _ in range(OWNERS)]
        self.next_seed = 1
        self.writes: list[Outcome] = []
        self.reads: list[tuple[int, Expected]] = []

    def some(self, owner: Owner) -> tuple[list[int], NDArray[np.int64]]:
        """Positions in an owner's list, in any order, and their indices."""
        count = self.random.randint(1, len(owner.ids))
        positions = self.random.sample(range(len(owner.ids)), count)
        return positions, self.store.ids.check([owner.ids[position] for position in positions])

    def grow(self, owner: Owner) -> None:
        count = self.random.randint(1, 12)
        if count <= self.store.ids.free_count:
            after = owner.ids[-1] if owner.ids else None
            owner.ids.extend(self.store.ids.allocate(count, after).tolist())

    def write(self, owner: Owner) -> None:
        layer = self.random.randrange(DIMS.layers)
        positions, indices = self.some(owner)
        seeds = range(self.next_seed, self.next_seed + len(positions))
        self.next_seed += len(positions)
        size = self.store.block_bytes(layer)
        content = np.concatenate([pattern(1, size, seed) for seed in seeds])
        self.writes.append(begin_write(self.store, layer, indices, content))
        owner.seeds.update(zip(((layer, p) for p in positions), seeds, strict=True))

    def read(self, owner: Owner) -> None:
        layer = self.random.randrange(DIMS.layers)
        positions, indices = self.some(owner)
        priority = self.random.choice([Priority.NEEDED, Priority.PREFETCH])
        reading = Reading(self.store, layer, indices, priority=priority)
        seeds = [owner.seeds.get((layer, position)) for position in positions]
        self.reads.append((layer, Expected(reading, seeds)))

    def free(self, owner: Owner) -> None:
        self.store.ids.drop_reference(owner.ids)
        owner.ids, owner.seeds = [], {}

    def step(self) -> None:
        owner = self.random.choice(self.owners)
        if not owner.ids:
            self.grow(owner)
            return
        calls = [self.grow, self.write, self.read, self.free]
        self.random.choices(calls, weights=[3, 4, 8, 1])[0](owner)

    async def settle(self) -> None:
        for writing in self.writes:
            assert not (await writing.end()).errors
        for layer, expected in self.reads:
            await expected.check(self.store.block_bytes(layer))
        self.writes, self.reads = [], []


@pytest.mark.parametrize("seed", range(3))
async def test_random_traffic(store: BlockStore, seed: int) -> None:
    traffic = Traffic(store, seed)
    for _ in range(CALLS):
        traffic.step()
        if traffic.random.random() < 0.03:
            await traffic.settle()
    await traffic.settle()
    for owner in traffic.owners:
        if owner.ids:
            traffic.free(owner)
    assert store.ids.free_count == store.ids.capacity
    statistics = store.statistics()
    assert statistics.checksum_failures == 0
    assert statistics.in_flight == 0
