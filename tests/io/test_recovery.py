"""Loss of power at every point of a workload, and every single fault: a store opens, has all that
was acknowledged, and nothing that is not whole.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.config import ModelDims
from hsswap.errors import BlockIOError, ConfigError, CorruptBlock, HsswapError
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from hsswap.io.powercut import PowerState
from tests.io.persist_support import open_store
from tests.io.support import begin_write, pattern, read

DIMS = ModelDims.uniform(layers=2, q_heads=1, kv_heads=1, head_dim=64)
CAPACITY = 258  # two segments, the second one of two ids
Block = tuple[int, int]  # id, layer


@dataclass(frozen=True)
class Known:
    """What is so at a moment. ``acknowledged``: the seed of each block's content. ``at_risk``: ids
    dropped since, and blocks that are being written again. ``prefix``: ids that must be found.
    ``given_out``: every id so far.
    """

    acknowledged: dict[Block, int] = field(default_factory=dict)
    at_risk: frozenset[int | Block] = frozenset()
    prefix: tuple[int, ...] = ()
    given_out: frozenset[int] = frozenset()


class Workload:
    """Calls on a store, each followed by what must be true from then on.

    ``moments``: what a loss of power could leave after every operation of the backend, and what was
    known then. With faults, calls may fail; what failed is not expected.
    """

    def __init__(self, faults: tuple[Fault, ...] = ()) -> None:
        self.io = MemoryIO(faults, power=True, after_each=self._moment)
        self.known = Known()
        self.moments: list[tuple[PowerState, Known]] = []
        self.seeds: dict[Block, set[int]] = {}  # every content that a block was ever given
        self.current: dict[Block, int] = {}  # written and reported
        self.errors: list[HsswapError] = []
        self.tokens = np.arange(3 * DIMS.block_size)
        self._next_seed = 1

    def _moment(self, io: MemoryIO) -> None:
        self.moments.append((io.power_state(), self.known))

    async def write(self, ids: list[int], layers: tuple[int, ...] = (0, 1)) -> None:
        risk = {(block_id, layer) for block_id in ids for layer in layers}
        self.known = replace(self.known, at_risk=self.known.at_risk | risk)
        for layer in layers:
            seeds = range(self._next_seed, self._next_seed + len(ids))
            self._next_seed += len(ids)
            for block_id, seed in zip(ids, seeds, strict=True):
                self.seeds.setdefault((block_id, layer), set()).add(seed)
                self.current.pop((block_id, layer), None)
            content = np.stack([content_of(seed) for seed in seeds])
            outcome = await begin_write(self.store, layer, self.indices(ids), content).end()
            for position, (block_id, seed) in enumerate(zip(ids, seeds, strict=True)):
                if position not in outcome.errors:
                    self.current[block_id, layer] = seed
            self.errors.extend(outcome.errors.values())

    async def flush(self) -> None:
        expected = dict(self.current)
        try:
            await self.store.flush()
        except BlockIOError as error:
            self.errors.append(error)
            return
        whole = {block_id for block_id, _ in expected}
        risk = frozenset(
            r
            for r in self.known.at_risk
            if (r not in whole if isinstance(r, int) else self.current.get(r) != expected.get(r))
        )
        prefix = tuple(i for i in self.prefix if (i, 0) in expected and (i, 1) in expected)
        self.known = replace(self.known, acknowledged=expected, at_risk=risk, prefix=prefix)

    def drop(self, ids: list[int]) -> None:
        self.known = replace(self.known, at_risk=self.known.at_risk | frozenset(ids))
        self.store.ids.drop_reference(ids)
        for block_id in ids:
            for layer in (0, 1):
                self.current.pop((block_id, layer), None)

    def indices(self, ids: list[int]) -> NDArray[np.int64]:
        return self.store.ids.check(ids)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        ids: list[int] = self.store.ids.allocate(count, after).tolist()
        self.known = replace(self.known, given_out=self.known.given_out | frozenset(ids))
        return ids

    async def run(self) -> None:
        """Write, acknowledge, write again, drop and use the place again, empty a segment."""
        self.prefix: list[int] = []
        self.store = store = await open_store(self.io, CAPACITY, DIMS)
        try:
            first = self.allocate(3)
            await self.write(first)
            await self.flush()
            second = self.allocate(3, first[-1])
            await self.write(second)
            await self.write(second[1:2])  # again, before it is acknowledged
            await self.flush()
            await self.write([first[1]], layers=(1,))  # again, after it was
            await self.flush()
            if all((i, layer) in self.current for i in first for layer in (0, 1)):
                store.commit_prefix(self.tokens, first)
                self.prefix = first
            await self.flush()
            self.drop(second)
            third = self.allocate(2, first[-1])  # the places of second
            await self.write(third)
            await self.flush()
            rest = self.allocate(store.ids.free_count - 2, third[-1])
            last = self.allocate(2)  # the second segment's
            await self.write(last, layers=(0,))
            await self.flush()
            self.drop(last)
            await asyncio.sleep(0)
            again = self.allocate(1)
            await self.write(again)
            self.drop(rest)
            await self.flush()
            await self.write(again)  # never acknowledged
        finally:
            try:
                await store.close()
            except BlockIOError as error:
                self.errors.append(error)


async def check(
    files: dict[Any, Any], workload: Workload, known: Known, *, lied_to: bool = False
) -> None:
    """Open what is left and look at every block. ``lied_to``: the drive said that it wrote bytes
    which it did not write; then something may be missing, and nothing may be wrong.
    """
    store = await open_store(MemoryIO(files=files), CAPACITY, DIMS)
    async with store:
        kept = store.ids.kept()
        prefix = store.find_prefix(workload.tokens).tolist()
        assert lied_to or prefix[: len(known.prefix)] == list(known.prefix)
        store.ids.add_reference(kept[~np.isin(kept, prefix)])
        seen: dict[Block, int] = {}
        indices = store.ids.check(kept)
        for layer in (0, 1):
            written = store.describe(layer, indices).written
            found, outcome = await read(store, layer, indices[written])
            assert not outcome.errors or lied_to  # whole, or not shown
            assert all(isinstance(error, CorruptBlock) for error in outcome.errors.values())
            for position, block_id in enumerate(kept[written].tolist()):
                if position not in outcome.errors:
                    seeds = workload.seeds[block_id, layer]
                    seen[block_id, layer] = seed_of(found[position], seeds)
        for block, seed in known.acknowledged.items():
            if block[0] in known.at_risk or lied_to:
                continue
            if block in known.at_risk:
                assert seen[block] in workload.seeds[block]  # the old content or a newer one
            else:
                assert seen[block] == seed
        new = store.ids.allocate(3)
        assert not set(new.tolist()) & known.given_out


@cache
def content_of(seed: int) -> NDArray[np.uint8]:
    """A block's bytes."""
    content: NDArray[np.uint8] = pattern(1, 4096, seed)[0]
    return content


def seed_of(content: NDArray[np.uint8], seeds: set[int]) -> int:
    """Which of these contents it is, whole."""
    found = [seed for seed in seeds if np.array_equal(content, content_of(seed))]
    assert len(found) == 1, "bytes that were never written like this"
    return found[0]


def choices(count: int, seed: int) -> Iterator[tuple[bool, ...]]:
    """Which of ``count`` pending things survive: every subset of up to 5 of them; of more: none,
    all, every second, some at random, each alone lost, each alone kept.
    """
    if count <= 5:
        yield from itertools.product((False, True), repeat=count)
        return
    for alive in (False, True):
        yield (alive,) * count
        yield tuple(number % 2 == alive for number in range(count))
        for one in range(count):
            yield tuple((number == one) == alive for number in range(count))
    for number in range(4):
        yield tuple(random.Random(100 * seed + number).choices((True, False), k=count))


def test_loss_of_power_at_every_point() -> None:
    async def run() -> int:
        workload = Workload()
        await workload.run()
        assert not workload.errors
        assert len(workload.known.prefix) == 3
        checked: set[tuple[Any, ...]] = set()
        for number, (state, known) in enumerate(workload.moments):
            for left in choices(len(state.pending), number):
                changes = tuple(c for c, alive in zip(state.pending, left, strict=True) if alive)
                key = (
                    *sorted((str(p), id(f.content)) for p, f in state.durable.items()),
                    changes,
                    id(known),
                )
                if key in checked:
                    continue  # the same files, and the same is known
                checked.add(key)
                await check(state.cut(left.__getitem__), workload, known)
        return len(checked)

    assert asyncio.run(run()) > 150


async def test_what_is_written_during_a_commit_is_not_in_it() -> None:
    hold = Fault(FaultKind.HOLD, only="sync", at=2)  # after manifest and records: the first data
    states: list[PowerState] = []
    io = MemoryIO([hold], power=True, after_each=lambda io: states.append(io.power_state()))
    store = await open_store(io, CAPACITY, DIMS)
    async with store:
        indices = store.ids.check(store.ids.allocate(2))
        old, new = pattern(2, 4096, 1), pattern(2, 4096, 2)
        await begin_write(store, 0, indices, old).end()
        flushing = asyncio.ensure_future(store.flush())
        await asyncio.get_running_loop().run_in_executor(None, hold.gate.reached.wait)
        writing = begin_write(store, 0, indices[:1], new[:1])
        hold.gate.opened.set()
        await flushing
        await writing.end()
        assert store.describe(0, indices).durable.tolist() == [False, True]
    for number, state in enumerate(states):
        for left in choices(len(state.pending), number):
            again = MemoryIO(files=state.cut(left.__getitem__))
            async with await open_store(again, CAPACITY, DIMS) as store:
                store.ids.add_reference(store.ids.kept())
                shown = np.flatnonzero(store.describe(0, indices).written)
                found, outcome = await read(store, 0, indices[shown])
                assert not outcome.errors
                for place, content in zip(shown.tolist(), found, strict=False):
                    assert any(np.array_equal(content, version[place]) for version in (old, new))


async def test_a_block_being_written_again_is_not_recorded() -> None:
    """By a commit that a write asked for, to have room for it: a flush would go first."""
    hold = Fault(FaultKind.HOLD, only="sync", at=2)
    # Of writes to the first page of a file: after manifest, records and the data. The records of a
    # commit are further behind, and may come before it or after it.
    never = Fault(FaultKind.NEVER, only="write", at=3, offsets=(0, 4096))
    async with await open_store(MemoryIO([hold, never]), CAPACITY, DIMS) as store:
        indices = store.ids.check(store.ids.allocate(2))
        await begin_write(store, 0, indices, pattern(2, 4096, 1)).end()
        assert store._journal is not None
        committing = asyncio.ensure_future(store._journal.commit())
        await asyncio.get_running_loop().run_in_executor(None, hold.gate.reached.wait)
        begin_write(store, 0, indices[:1], pattern(1, 4096, 2))
        hold.gate.opened.set()
        await committing
        assert store.describe(0, indices).durable.tolist() == [False, True]


FAULTS = [
    (FaultKind.ERRNO, errno.EIO),
    (FaultKind.ERRNO, errno.ENOSPC),
    (FaultKind.ERRNO, errno.EMFILE),
    (FaultKind.SHORT, errno.EIO),
    (FaultKind.TORN, 0),
    (FaultKind.FLIP, 0),
]


@pytest.mark.parametrize(("kind", "number"), FAULTS)
def test_every_fault_at_every_operation(kind: FaultKind, number: int) -> None:
    lies = kind in (FaultKind.TORN, FaultKind.FLIP)

    async def run() -> None:
        clean = Workload()
        await clean.run()
        for at in range(len(clean.io.operations)):
            workload = Workload((Fault(kind, at=at, errno=number, bit=8 * 2345 + 3),))
            failed_to_open = False
            try:
                await workload.run()
            except (BlockIOError, ConfigError):
                failed_to_open = not hasattr(workload, "store")
                assert failed_to_open
            assert workload.io.statistics().in_flight == 0
            state, known = workload.moments[-1]
            for survives in (lambda n: False, lambda n: True):
                try:
                    await check(state.cut(survives), workload, known, lied_to=lies)
                except ConfigError:  # a manifest with other bytes than were written
                    assert lies
                    assert workload.io.operations[at] == "write"

    asyncio.run(run())
