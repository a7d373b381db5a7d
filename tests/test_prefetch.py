"""The prefetcher alone: admission, joining, order, plans, cancellation. No device."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from threading import RLock
from typing import cast

import numpy as np
import pytest

from hsswap import plans
from hsswap.config import ModelDims
from hsswap.errors import BlockIOError, ClosedError, HsswapError, OutOfSlots
from hsswap.io.base import Priority
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from hsswap.io.store import BlockStore
from hsswap.loads import Blocks
from hsswap.metrics import Counters
from hsswap.pools import GroupPool
from hsswap.prefetch import Prefetcher
from hsswap.resident_table import Holders
from hsswap.tiers import I32, HostTier, SlotState

DIMS = ModelDims.uniform(layers=2, q_heads=2, kv_heads=2, head_dim=16)
BLOCK = 4096
IDS = 64


class Memory:
    """Page-aligned memory with the address and the size that pools have."""

    def __init__(self, nbytes: int) -> None:
        self._map = mmap.mmap(-1, nbytes)
        self.array = np.frombuffer(self._map, np.uint8)
        self.address = self.array.ctypes.data


class Pool:
    """What the prefetcher needs of a GroupPool, without device memory."""

    first_layer = 0
    block_bytes = BLOCK

    def __init__(self, slots: int) -> None:
        self.tier = HostTier(2, IDS, slots, window=slots)
        self.holders = Holders()
        self.host_memory = Memory(slots * BLOCK)

    def addresses(self, slots: I32) -> np.ndarray:
        return slots.astype(np.uint64) * np.uint64(BLOCK) + np.uint64(self.host_memory.address)

    def bytes_of(self, slots: I32) -> np.ndarray:
        return self.host_memory.array.reshape(-1, BLOCK)[slots]


@dataclass
class Rig:
    """A store that holds IDS blocks of layer 0, each filled with its index."""

    store: BlockStore
    io: MemoryIO
    pool: Pool
    prefetcher: Prefetcher
    counters: Counters

    def blocks(self, *indices: int) -> Blocks:
        return Blocks(cast(GroupPool, self.pool), 0, np.array(indices, np.int64))

    def reads(self) -> int:
        return self.io.operations.count("read")

    def check(self, slots: I32, *indices: int) -> None:
        assert (self.pool.bytes_of(slots) == np.array(indices, np.uint8)[:, None]).all()

    def release(self, slots: I32) -> None:
        self.pool.tier.release(slots, scan=True)
        self.prefetcher.pump()


@asynccontextmanager
async def rigged(slots: int, *faults: Fault) -> AsyncIterator[Rig]:
    io = MemoryIO(faults)
    counters = Counters()
    async with await BlockStore.open(DIMS, None, IDS, io) as store:
        store.ids.allocate(IDS)
        content = Memory(IDS * BLOCK)
        content.array.reshape(IDS, BLOCK)[:] = np.arange(IDS, dtype=np.uint8)[:, None]
        written = asyncio.get_running_loop().create_future()
        left = [IDS]

        def on_done(positions: np.ndarray, error: HsswapError | None) -> None:
            assert error is None
            left[0] -= len(positions)
            if not left[0]:
                written.set_result(None)

        addresses = np.arange(IDS, dtype=np.uint64) * np.uint64(BLOCK)
        addresses += np.uint64(content.address)
        store.write(0, np.arange(IDS), addresses, on_done=on_done)
        await written
        pool = Pool(slots)

        def starved() -> HsswapError | None:
            return None if (pool.tier.leases > 0).any() else OutOfSlots("none will be free")

        prefetcher = Prefetcher(store, RLock(), counters, starved)
        yield Rig(store, io, pool, prefetcher, counters)
        prefetcher.close()
        await prefetcher.settle()
        pool.tier.check()


async def test_a_load_brings_the_bytes_and_counts_what_it_waited_for() -> None:
    async with rigged(8) as rig:
        loaded = await rig.prefetcher.load(rig.blocks(5, 6, 40))
        rig.check(loaded.slots, 5, 6, 40)
        assert loaded.missed == 3
        again = await rig.prefetcher.load(rig.blocks(6, 5))
        assert again.missed == 0
        rig.check(again.slots, 6, 5)
        assert rig.reads() == 2  # a run of two, and one alone
        assert rig.counters.read_wait_s > 0
        assert rig.counters.read_busy_s > 0


async def test_askers_of_the_same_block_join_one_read() -> None:
    gate = Fault(FaultKind.HOLD, only="read")
    async with rigged(8, gate) as rig:
        first = asyncio.ensure_future(rig.prefetcher.load(rig.blocks(3, 4)))
        second = asyncio.ensure_future(rig.prefetcher.load(rig.blocks(4, 3)))
        await asyncio.to_thread(gate.gate.reached.wait)
        gate.gate.opened.set()
        one, two = await first, await second
        assert (one.slots == two.slots[::-1]).all()
        assert rig.reads() == 1
        assert (rig.pool.tier.leases[one.slots] == 2).all()


async def test_who_joins_leases_everything_that_is_there_or_on_its_way() -> None:
    gate = Fault(FaultKind.HOLD, only="read", at=1)
    async with rigged(8, gate) as rig:
        there = await rig.prefetcher.load(rig.blocks(0, 1, 2))
        assert rig.prefetcher.join(rig.blocks(0, 1, 2), 8) is None  # nothing to wait for
        rig.prefetcher.plan("a", [rig.blocks(20, 21)])
        await asyncio.to_thread(gate.gate.reached.wait)
        for blocks in (rig.blocks(0, 20, 33), rig.blocks(33)):  # one that nobody reads
            assert rig.prefetcher.join(blocks, 8) is None
        assert rig.prefetcher.join(rig.blocks(0, 20, 21), 1) is None  # too many to wait for
        assert (rig.pool.tier.leases[there.slots] == 1).all()
        leased = rig.prefetcher.join(rig.blocks(2, 20, 0, 21), 2)
        assert leased is not None
        assert (rig.pool.tier.leases[leased.slots] > 0).all()
        gate.gate.opened.set()
        loaded = await rig.prefetcher.arrived(leased)
        assert loaded.missed == 2
        rig.check(loaded.slots, 2, 20, 0, 21)
        assert rig.reads() == 2
        rig.release(loaded.slots)
        rig.release(there.slots)
        assert not rig.pool.tier.leases.any()


@pytest.mark.parametrize("fails", [True, False])
async def test_who_joins_in_vain_gives_leases_back(fails: bool) -> None:
    gate = Fault(FaultKind.HOLD, only="read", at=1)
    bad = Fault(FaultKind.ERRNO, at=2, count=1, only="read")
    async with rigged(8, gate, *[bad] * fails) as rig:
        there = await rig.prefetcher.load(rig.blocks(0, 1))
        rig.prefetcher.plan("a", [rig.blocks(20, 22)])
        await asyncio.to_thread(gate.gate.reached.wait)
        leased = rig.prefetcher.join(rig.blocks(0, 1, 20, 22), 2)
        assert leased is not None
        waiting = asyncio.ensure_future(rig.prefetcher.arrived(leased))
        await asyncio.sleep(0)
        if not fails:
            waiting.cancel()
            await asyncio.wait([waiting])
        gate.gate.opened.set()
        with pytest.raises(BlockIOError if fails else asyncio.CancelledError):
            await waiting
        await rig.prefetcher.settle()
        assert (rig.pool.tier.leases[there.slots] == 1).all()
        rig.release(there.slots)
        assert not rig.pool.tier.leases.any()


async def test_read_ahead_takes_free_slots_in_order_and_no_more() -> None:
    async with rigged(6) as rig:
        held = await rig.prefetcher.load(rig.blocks(60, 61))
        rig.prefetcher.plan("a", [rig.blocks(0, 1, 2, 3)])
        await rig.prefetcher.settle()
        assert (rig.pool.tier.lookup(0, np.arange(4)) >= 0).all()
        rig.prefetcher.plan("a", [rig.blocks(0, 1, 2, 3, 4, 5)])
        await rig.prefetcher.settle()
        assert (rig.pool.tier.lookup(0, np.array([4, 5])) < 0).all()
        rig.release(held.slots)  # a scan's blocks go, and room comes for the rest of the plan
        await rig.prefetcher.settle()
        assert (rig.pool.tier.lookup(0, np.arange(6)) >= 0).all()
        used = await rig.prefetcher.load(rig.blocks(0, 1))
        assert used.missed == 0


async def test_a_long_plan_is_begun_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody attends meanwhile; what somebody needs comes before the parts that are left."""
    monkeypatch.setattr(plans, "AHEAD_BLOCKS", 4)
    monkeypatch.setattr(plans, "READ_AHEAD_BYTES", 4 * BLOCK)
    async with rigged(48) as rig:
        begun = []
        submit = rig.prefetcher._submit

        def noted(blocks: Blocks, slots: I32, priority: Priority) -> None:
            begun.append((priority, blocks.indices.tolist()))
            submit(blocks, slots, priority)

        rig.prefetcher._submit = noted  # type: ignore[method-assign]
        rig.prefetcher.plan("a", [rig.blocks(*range(10)), rig.blocks(*range(20, 30))])
        assert begun == [(Priority.PREFETCH, [0, 1, 2, 3])]
        needed = asyncio.ensure_future(rig.prefetcher.load(rig.blocks(28, 60)))
        for _ in range(200):
            await asyncio.sleep(0)
        loaded = await needed
        rig.check(loaded.slots, 28, 60)
        await rig.prefetcher.settle()
        assert [blocks for priority, blocks in begun if priority is Priority.PREFETCH] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9],
            [20, 21, 22, 23],
            [24, 25, 26, 27],
            [29],
        ]
        assert begun.index((Priority.NEEDED, [28, 60])) <= 2
        assert "planned=0" in repr(rig.prefetcher)


@pytest.mark.parametrize("end", ["close", "forget", "replace"])
async def test_a_plan_that_ends_between_two_turns(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(plans, "AHEAD_BLOCKS", 4)
    monkeypatch.setattr(plans, "READ_AHEAD_BYTES", 4 * BLOCK)
    async with rigged(48) as rig:
        rig.prefetcher.plan("a", [rig.blocks(*range(12))])
        if end == "close":
            rig.prefetcher.close()
        elif end == "forget":
            rig.prefetcher.forget(np.arange(4, 12))
        else:
            rig.prefetcher.plan("a", [])
        for _ in range(50):
            await asyncio.sleep(0)
        await rig.prefetcher.settle()
        held = rig.pool.tier.lookup(0, np.arange(12)) >= 0
        assert held[:4].all()
        assert not held[4:].any()


async def test_what_is_needed_pushes_read_ahead_out() -> None:
    async with rigged(4) as rig:
        rig.prefetcher.plan("a", [rig.blocks(0, 1, 2, 3)])
        await rig.prefetcher.settle()
        loaded = await rig.prefetcher.load(rig.blocks(50, 51))
        rig.check(loaded.slots, 50, 51)
        assert rig.pool.tier.evictions == 2


async def test_admission_is_all_or_nothing_and_in_order() -> None:
    """Loads that each need more than half of the slots take turns; none holds a part."""
    async with rigged(6) as rig:
        tasks = [
            asyncio.ensure_future(rig.prefetcher.load(rig.blocks(*range(n, n + 4))))
            for n in (0, 10, 20)
        ]
        order = []
        for n, task in zip((0, 10, 20), tasks, strict=True):
            loaded = await task
            order.append(n)
            rig.check(loaded.slots, *range(n, n + 4))
            assert (rig.pool.tier.leases > 0).sum() == 4
            rig.release(loaded.slots)
        assert order == [0, 10, 20]


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancelled_load_gives_everything_back(turns: int) -> None:
    async with rigged(6) as rig:
        held = await rig.prefetcher.load(rig.blocks(0, 1, 2, 3))
        waiting = asyncio.ensure_future(rig.prefetcher.load(rig.blocks(10, 11, 12)))
        behind = asyncio.ensure_future(rig.prefetcher.load(rig.blocks(20, 21)))
        await asyncio.sleep(0)
        rig.release(held.slots)
        for _ in range(turns):
            await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            rig.release(waiting.result().slots)
        loaded = await behind
        rig.check(loaded.slots, 20, 21)
        rig.release(loaded.slots)
        await rig.prefetcher.settle()
        assert (rig.pool.tier.leases == 0).all()


async def test_an_error_reaches_who_asked_and_frees_the_slots() -> None:
    bad = Fault(FaultKind.ERRNO, count=2, only="read")
    async with rigged(6, bad) as rig:
        with pytest.raises(BlockIOError):
            await rig.prefetcher.load(rig.blocks(7))
        with pytest.raises(BlockIOError):
            await rig.prefetcher.load(rig.blocks(7))
        loaded = await rig.prefetcher.load(rig.blocks(7))
        rig.check(loaded.slots, 7)
        rig.release(loaded.slots)
        assert rig.pool.tier.free_count == 6


async def test_a_failed_read_ahead_is_silent_until_someone_needs_the_block() -> None:
    bad = Fault(FaultKind.ERRNO, count=1, only="read")
    async with rigged(6, bad) as rig:
        rig.prefetcher.plan("a", [rig.blocks(7)])
        await rig.prefetcher.settle()
        assert rig.pool.tier.free_count == 6
        loaded = await rig.prefetcher.load(rig.blocks(7))
        rig.check(loaded.slots, 7)


async def test_who_can_never_be_served_is_told() -> None:
    async with rigged(4) as rig:
        dirty = rig.pool.tier.take(1, np.arange(4), SlotState.DIRTY, needed=True)
        assert dirty is not None
        with pytest.raises(OutOfSlots, match="none will be free"):
            await rig.prefetcher.load(rig.blocks(1))


async def test_reserved_slots_can_be_abandoned() -> None:
    async with rigged(4) as rig:
        slots = await rig.prefetcher.reserve(rig.blocks(1, 2))
        assert (rig.pool.tier.state[slots] == SlotState.DIRTY).all()
        rig.prefetcher.abandon(cast(GroupPool, rig.pool), slots)
        assert rig.pool.tier.free_count == 4


async def test_closing_refuses_those_who_wait_and_those_who_come() -> None:
    async with rigged(4) as rig:
        await rig.prefetcher.load(rig.blocks(0, 1, 2))
        waiting = asyncio.ensure_future(rig.prefetcher.load(rig.blocks(10, 11)))
        await asyncio.sleep(0)
        rig.prefetcher.close()
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await rig.prefetcher.load(rig.blocks(1))
        rig.prefetcher.plan("a", [rig.blocks(9)])
        assert "planned=0" in repr(rig.prefetcher)
