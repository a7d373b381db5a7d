"""HighSpeedSwap end to end: promise 1 whatever the pools, tiles, tiers, order and chunks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence as Batch
from dataclasses import replace

import numpy as np
import pytest

import hsswap
from hsswap import HighSpeedSwap, PredictorConfig, SwapConfig
from hsswap.driver import open_device
from hsswap.driver.host import HostDevice
from hsswap.driver.preparing import PrepareWork
from hsswap.errors import ClosedError, DeviceError
from hsswap.io.base import Transfer
from hsswap.io.memory import MemoryIO
from tests.swap_cases import (
    MIXED,
    SMALL,
    Case,
    check_against_oracle,
    chunks_of,
    config_for,
    feed,
    random_case,
    run,
)


class ShuffledIO(MemoryIO):
    """Reads of a batch arrive in another order than they were asked for."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = np.random.default_rng(seed)

    def submit(self, batch: Batch[Transfer]) -> None:
        super().submit([batch[i] for i in self._random.permutation(len(batch))])


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(SMALL, 1500, seed=1)


@pytest.fixture(scope="module")
def mixed() -> Case:
    return random_case(MIXED, 1100, seed=2)


ROWS = [0, 1, 14, 15, 16, 255, 256, 700, 1023, 1024, 1499]
CHUNKS = [300, 212, 1, 1, 15, 16, 17, 400, 255, 256, 1, 1, 25]


async def test_exact_attention_is_within_promise_1(case: Case) -> None:
    outputs = await run(case, config_for(case), CHUNKS)
    check_against_oracle(case, outputs, ROWS)


async def test_layer_groups_windows_and_caps(mixed: Case) -> None:
    outputs = await run(mixed, config_for(mixed), chunks_of(1100, 275))
    check_against_oracle(mixed, outputs, [0, 31, 32, 299, 300, 301, 700, 1099])


async def test_bit_for_bit_whatever_the_pools_tiles_order_and_chunks(case: Case) -> None:
    wanted = await run(case, config_for(case), CHUNKS)
    everything = 4 * case.tokens // 16
    variants: list[tuple[SwapConfig, list[int], MemoryIO | None]] = [
        (config_for(case, extra_device=everything, extra_host=everything), CHUNKS, None),
        (config_for(case, extra_device=40, look_ahead=False), CHUNKS, None),
        (config_for(case, tile_tokens=512, extra_host=100), CHUNKS, None),
        (config_for(case, tile_tokens=2048, extra_host=17), chunks_of(1500, 500), None),
        (config_for(case, extra_host=64), CHUNKS, ShuffledIO(3)),
        (config_for(case, extra_device=7, extra_host=9), chunks_of(1500, 111), ShuffledIO(4)),
        (config_for(case), chunks_of(1500, 1500), None),
    ]
    for config, chunks, io in variants:
        for got, same in zip(await run(case, config, chunks, io=io), wanted, strict=True):
            assert (got == same).all(), config


async def test_bit_for_bit_through_files(case: Case) -> None:
    wanted = await run(case, config_for(case), CHUNKS)
    config = config_for(case, extra_host=20)
    async with HighSpeedSwap.open(config) as swap, swap.sequence() as sequence:
        got = await feed(sequence, case, CHUNKS)
        await swap.flush()
        statistics = swap.statistics()
    assert all((a == b).all() for a, b in zip(got, wanted, strict=True))
    assert statistics.bytes_read > 0
    assert statistics.bytes_written == 3 * (1500 // 16) * 4096


async def test_sequences_side_by_side_do_not_see_each_other() -> None:
    cases = [random_case(SMALL, tokens, seed=tokens) for tokens in (700, 1, 333, 64, 911)]
    alone = [await run(c, config_for(c), chunks_of(c.tokens, 97)) for c in cases]
    config = config_for(cases[0], sequences=5, capacity=2300, extra_host=40)
    async with HighSpeedSwap.open(config, io=ShuffledIO(5)) as swap:
        sequences = [swap.sequence() for _ in cases]
        together = await asyncio.gather(
            *(
                feed(sequence, c, chunks_of(c.tokens, 97))
                for sequence, c in zip(sequences, cases, strict=True)
            )
        )
        for sequence in sequences:
            await sequence.close()
        statistics = swap.statistics()
        assert statistics.free_blocks == config.capacity_blocks
        assert statistics.host_slots_used == 0
    for got, wanted in zip(together, alone, strict=True):
        assert all((a == b).all() for a, b in zip(got, wanted, strict=True))


async def test_freed_ids_carry_nothing_over(case: Case) -> None:
    other = random_case(SMALL, 1500, seed=9)
    config = config_for(case, extra_host=30, extra_device=30)
    wanted = await run(other, config, chunks_of(1500, 250))
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap:
        async with swap.sequence() as sequence:
            await feed(sequence, case, chunks_of(1500, 250))
        async with swap.sequence() as sequence:
            got = await feed(sequence, other, chunks_of(1500, 250))
    assert all((a == b).all() for a, b in zip(got, wanted, strict=True))


async def test_nothing_stays_open() -> None:
    case = random_case(SMALL, 600, seed=6)
    device = open_device("host")
    await run(case, config_for(case), chunks_of(600, 100), device=device)
    assert device.live_count == 0


async def _next_layer(swap: HighSpeedSwap) -> None:
    """A model's layer takes longer than slots take to come back, and than a read."""

    def is_unleased() -> bool:
        return not any(swap.pool_of(layer).tier.leases.any() for layer in range(3))

    await swap.prefetcher.until(is_unleased)
    swap.prefetcher.pump()
    await swap.prefetcher.settle()


async def test_look_ahead_saves_waiting_and_costs_no_reads(case: Case) -> None:
    waited = []
    for look_ahead in (True, False):
        config = config_for(case, extra_host=150, look_ahead=look_ahead)
        async with (
            HighSpeedSwap.open(config, io=MemoryIO()) as swap,
            swap.sequence() as sequence,
        ):
            await feed(sequence, case, [1490])
            for token in range(1490, 1500):
                part = slice(token, token + 1)
                for layer in range(3):
                    await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
                    await (await sequence.attend(layer, case.queries[layer][part])).done()
                    await _next_layer(swap)
            waited.append(swap.statistics().misses)
    assert waited[0] < waited[1] / 2


async def test_reads_what_a_scan_must_read_and_no_more(case: Case) -> None:
    """A fixed part stays, the rest is read once a token: no thrashing, no reading twice."""
    config = config_for(case, extra_device=30, extra_host=64)
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap, swap.sequence() as sequence:
        await feed(sequence, case, [1480])
        await swap.flush()
        before = swap.statistics()
        for token in range(1480, 1490):
            part = slice(token, token + 1)
            for layer in range(3):
                await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
                await (await sequence.attend(layer, case.queries[layer][part])).done()
        after = swap.statistics()
    read = after.blocks_read - before.blocks_read
    full = 3 * (1480 // 16)
    slots = config.device_slots + config.host_slots
    assert 10 * (full - slots) <= read <= 10 * (full - 30)


def test_blocking_gives_the_same_bits(case: Case) -> None:
    config = config_for(case, extra_host=64)
    wanted = asyncio.run(run(case, config, chunks_of(1500, 250)))
    with hsswap.blocking(config, io=MemoryIO()) as swap, swap.sequence() as sequence:
        for start in range(0, 1500, 250):
            part = slice(start, start + 250)
            for layer in range(3):
                sequence.append(layer, case.keys[layer][part], case.values[layer][part])
                result = sequence.attend(layer, case.queries[layer][part])
                result.synchronize()
                assert isinstance(result.out, np.ndarray)
                assert (result.out == wanted[layer][part]).all()
        swap.flush()
        assert swap.statistics().appended_tokens == 3 * 1500
        assert sequence.length == 1500


async def test_try_attend_needs_no_loop_when_everything_is_in_memory(case: Case) -> None:
    everything = 3 * (case.tokens // 16 + 1)
    config = config_for(case, extra_device=everything)
    wanted = await run(case, config, chunks_of(1500, 500))
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap, swap.sequence() as sequence:
        for layer in range(3):
            await sequence.append(layer, case.keys[layer], case.values[layer])
            result = sequence.try_attend(layer, case.queries[layer])
            assert result is not None
            result.synchronize()
            assert isinstance(result.out, np.ndarray)
            assert (result.out == wanted[layer]).all()


async def test_try_attend_says_when_blocks_must_come_from_disk(case: Case) -> None:
    async with (
        HighSpeedSwap.open(config_for(case), io=MemoryIO()) as swap,
        swap.sequence() as sequence,
    ):
        await feed(sequence, case, [1500])
        assert sequence.try_attend(0, case.queries[0][-1:]) is None


async def test_kernels_are_there_before_the_first_call_and_never_made_on_the_loop() -> None:
    """Promise 4: a device that compiles does so in a thread, told of all that may come."""
    told: list[tuple[PrepareWork, bool]] = []
    loop_thread = threading.get_ident()

    class Telling(HostDevice):
        def prepare(self, work: PrepareWork) -> None:
            told.append((work, threading.get_ident() == loop_thread))

    case = random_case(MIXED, 70, seed=3)
    config = replace(config_for(case, sequences=3), predictor=PredictorConfig(rank=8))
    async with HighSpeedSwap.open(config, io=MemoryIO(), device=Telling()):
        assert told == [
            (PrepareWork(MIXED.groups, 32, 32 * config.capacity_blocks, 3, config.predictor), False)
        ]


async def test_a_device_that_cannot_compile_is_closed() -> None:
    class Failing(HostDevice):
        def prepare(self, work: PrepareWork) -> None:
            raise DeviceError("no compiler")

    device = Failing()
    config = config_for(random_case(MIXED, 70, seed=3))
    with pytest.raises(DeviceError, match="no compiler"):
        await HighSpeedSwap.create(config, io=MemoryIO(), device=device)
    with pytest.raises(ClosedError):
        device.allocate(1)
