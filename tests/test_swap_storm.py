"""A seeded storm: many sequences at once, cancelled, failed and closed at random, few slots.

Every answer is bit for bit the one computed alone with everything resident, or a typed error. Slots
are poisoned with NaN when given up, so a slot refilled under its reader would show.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import replace

import numpy as np
import pytest

import hsswap
from hsswap import HsswapError, SwapConfig, TopK
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from tests.soaking import loop_name, note
from tests.storming import storm
from tests.swap_actors import Actor, Truth, is_typed, truth_of
from tests.swap_cases import MIXED, SMALL, config_for
from tests.swap_watch import Linked, turns, watched, within

TOP_K = TopK(3)
SIZES = ((700, 31), (420, 32), (930, 33))
LIMIT_S = 100.0


@pytest.fixture(scope="module")
def small() -> list[Truth]:
    async def make() -> list[Truth]:
        return [await truth_of(SMALL, tokens, seed, TOP_K, 12) for tokens, seed in SIZES]

    return asyncio.run(make())


@pytest.fixture(scope="module")
def mixed() -> list[Truth]:
    async def make() -> list[Truth]:
        return [await truth_of(MIXED, tokens, seed, TOP_K, 10) for tokens, seed in SIZES[:2]]

    return asyncio.run(make())


def tight(truths: list[Truth], sequences: int, *, caches: int = 1, more: int = 0) -> SwapConfig:
    """The smallest host tier; device slots for that many unit caches beside the actives."""
    dims = truths[0].case.dims
    blocks = TOP_K.cache_blocks(dims.block_size) * dims.layers * len(dims.groups)
    capacity = sequences * max(t.case.tokens for t in truths) * 3 // 4
    return config_for(
        truths[0].case,
        sequences=sequences,
        capacity=capacity,
        extra_device=caches * blocks,
        extra_host=more,
    )


def faults_of(seed: int, count: int) -> list[Fault]:
    """Reads that fail or flip, writes that find the disk full for a while; all of them pass."""
    random = np.random.default_rng(seed)
    faults = []
    for _ in range(count):
        kind = [FaultKind.ERRNO, FaultKind.FLIP, FaultKind.SHORT][int(random.integers(3))]
        at = int(random.integers(200))
        faults.append(Fault(kind, at=at, count=int(random.integers(1, 4)), only="read", bit=at))
    at = int(random.integers(60))
    faults.append(Fault(FaultKind.ERRNO, at=at, count=8, only="write", errno=errno.ENOSPC))
    faults.append(Fault(FaultKind.FLIP, at=at + 40, count=2, only="write", bit=5 * at))
    return faults


async def rage(
    truths: list[Truth],
    config: SwapConfig,
    seed: int,
    actors: int,
    lives: int,
    faults: int = 0,
    linked: bool = False,
) -> int:
    """One storm on a swap of its own; how many answers were compared."""
    io = MemoryIO(faults_of(seed, faults) if faults else ())
    async with watched(config, io=io, device=Linked() if linked else None) as swap:
        streams = [swap.device.stream() for _ in range(2)]
        handed = (None, streams[0], streams[1].handle)
        cast = [Actor(swap, truths, TOP_K, seed * 1000 + n, handed) for n in range(actors)]
        await storm(cast, lives, LIMIT_S)
        for stream in streams:
            await asyncio.to_thread(stream.close)
        return sum(actor.calls for actor in cast)


@pytest.mark.parametrize("seed", range(2))
async def test_a_storm_on_the_least_slots(small: list[Truth], seed: int) -> None:
    assert await rage(small, tight(small, 6), seed, actors=9, lives=3) > 50


async def test_a_storm_over_layer_groups_and_windows(mixed: list[Truth]) -> None:
    assert await rage(mixed, tight(mixed, 4), 7, actors=5, lives=2) > 10


@pytest.mark.parametrize("seed", range(2))
async def test_a_storm_through_the_ring(small: list[Truth], seed: int) -> None:
    assert await rage(small, tight(small, 5), 40 + seed, actors=7, lives=2, linked=True) > 30


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_while_the_disk_fails(small: list[Truth], seed: int) -> None:
    assert await rage(small, tight(small, 5), 20 + seed, actors=6, lives=3, faults=6) > 10


@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_in_a_store_too_small_on_a_disk_that_stays_full(
    small: list[Truth], seed: int
) -> None:
    full = Fault(FaultKind.ERRNO, at=seed * 20, count=None, only="write", errno=errno.ENOSPC)
    config = replace(tight(small, 8), capacity_tokens=1400)
    async with watched(config, full) as swap:
        cast = [Actor(swap, small, TOP_K, 50 + 10 * seed + n) for n in range(10)]
        await storm(cast, 2, LIMIT_S)


@pytest.mark.parametrize("seed", range(6))
async def test_closing_a_swap_whose_disk_does_not_answer(small: list[Truth], seed: int) -> None:
    never = Fault(FaultKind.NEVER, at=7 * seed, only=("read", "write")[seed % 2])
    async with watched(tight(small, 6), never, close_sequences=False) as swap:
        cast = [Actor(swap, small, TOP_K, 60 + 10 * seed + n) for n in range(6)]
        tasks = [asyncio.ensure_future(actor.run(3)) for actor in cast]
        await turns(400)
        closers = [asyncio.ensure_future(swap.close()) for _ in range(2)]
        await turns(seed)
        closers[seed % 2].cancel()
        await within(lambda: asyncio.wait(closers))
        ends = await within(lambda: asyncio.gather(*tasks, return_exceptions=True))
        assert all(is_typed(end) for end in ends), ends


@pytest.mark.parametrize("moment", [0, 3, 40, 300])
async def test_closing_the_swap_in_a_storm(small: list[Truth], moment: int) -> None:
    """Every call ends with the right answer or a typed error, and nothing stays."""
    async with watched(tight(small, 6), close_sequences=False) as swap:
        cast = [Actor(swap, small, TOP_K, 70 + n) for n in range(6)]
        tasks = [asyncio.ensure_future(actor.run(3)) for actor in cast]
        await turns(moment)
        await within(swap.close)
        ends = await within(lambda: asyncio.gather(*tasks, return_exceptions=True))
        assert all(is_typed(end) for end in ends), ends


def blocking_caller(swap: hsswap.BlockingSwap, truth: Truth, seed: int, ends: list[object]) -> None:
    """A thread with a sequence of its own; what it ends with goes to ``ends``."""
    random = np.random.default_rng(seed)
    case = truth.case
    try:
        with swap.sequence() as sequence:
            while sequence.length < case.tokens:
                part = slice(sequence.length, sequence.length + 1 + int(random.integers(90)))
                for layer in range(case.dims.layers):
                    sequence.append(layer, case.keys[layer][part], case.values[layer][part])
                    result = sequence.attend(layer, case.queries[layer][part])
                    result.synchronize()
                    assert (np.asarray(result.out) == truth.exact[layer][part]).all()
        ends.append(None)
    except BaseException as error:
        ends.append(error)


def test_blocking_callers_in_threads_of_their_own(small: list[Truth]) -> None:
    config = config_for(small[0].case, sequences=4, capacity=4096)
    ends: list[object] = []
    with hsswap.blocking(config, io=MemoryIO()) as swap:
        threads = [
            threading.Thread(
                target=blocking_caller, args=(swap, small[n % 3], n, ends), daemon=True
            )
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive()
        assert ends == [None] * 4
        assert swap.statistics().host_slots_used == 0
        assert swap.statistics().free_blocks == config.capacity_blocks


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(24))
async def test_long_storms(small: list[Truth], mixed: list[Truth], seed: int) -> None:
    truths = (small, small, mixed)[seed % 3]
    config = tight(truths, 6 + seed % 20, caches=seed % 4, more=(0, 0, 1, 37)[seed // 3 % 4])
    calls = await rage(
        truths,
        config,
        100 + seed,
        actors=8 + seed,
        lives=6,
        faults=(0, 10)[seed % 2],
        linked=seed % 5 == 0,
    )
    what = f"storm, {8 + seed} sequences, seed {seed}, {loop_name()}"
    note("swap", **{what: {"calls": calls}})


def test_errors_of_a_storm_are_all_ours() -> None:
    assert is_typed(None)
    assert is_typed(HsswapError("x"))
    assert not is_typed(ValueError("x"))
