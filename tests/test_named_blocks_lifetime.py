"""The calls on blocks named by id: failures, closing, and what can be looked at."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace

import numpy as np
import pytest

import hsswap
from hsswap import (
    ArgumentError,
    BlockIOError,
    ClosedError,
    HighSpeedSwap,
)
from hsswap.driver import open_device
from hsswap.io.ids import INDEX_MASK
from hsswap.io.memory import Fault, FaultKind, Gate, MemoryIO
from hsswap.loads import Blocks
from tests.branches import alone, rows_of
from tests.named_cases import CASE, attend, block_of, config_of, give_back, offload
from tests.swap_cases import config_for
from tests.swap_watch import fill, turns, watched
from tests.ways import evict


async def test_many_callers_and_a_disk_that_fails() -> None:
    """Lists of blocks attended at once, some calls cancelled; writes fail for a while."""
    full = Fault(FaultKind.ERRNO, only="write", at=5, count=30, errno=errno.ENOSPC)
    wanted = await alone(CASE, [*range(640)])
    async with watched(config_of(CASE, extra_host=130), full) as swap:
        ids: list[int] = []
        await offload(swap, CASE, 640, ids)
        random = np.random.default_rng(4)

        async def ask(layer: int, row: int) -> None:
            got = await attend(
                swap, CASE, layer, ids[: row // 16 + 1], row, last_block_valid_slots=row % 16 + 1
            )
            assert (got == wanted[layer][row]).all()

        calls = [
            asyncio.ensure_future(ask(int(random.integers(3)), int(random.integers(640))))
            for _ in range(24)
        ]
        await turns(9)
        for call in calls[::5]:
            call.cancel()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends), ends
        for _ in range(30):
            try:
                await swap.flush()
            except BlockIOError:
                continue
            break
        await offload(swap, CASE, 640, ids, 30)
        await ask(0, 639)
        await give_back(swap, ids)


@pytest.mark.parametrize("moment", [0, 1, 5, 40])
async def test_closing_ends_every_call(moment: int) -> None:
    async with watched(config_of(CASE), close_sequences=False) as swap:
        ids: list[int] = []
        await offload(swap, CASE, 400, ids)
        calls = [
            asyncio.ensure_future(call)
            for n in range(4)
            for call in (
                attend(swap, CASE, n % 3, ids, 399),
                swap.offload_block(layer=0, block=ids[n], **block_of(CASE, 0, n, 16)),  # type: ignore[arg-type]
                swap.dec_disk_ref(block=ids[10 + n]),
            )
        ]
        await turns(moment)
        await swap.close()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        for end in ends:
            assert not isinstance(end, BaseException) or isinstance(end, hsswap.HsswapError), end
        with pytest.raises(ClosedError):
            await swap.alloc_disk_block_id()


async def test_constructors_and_what_can_be_looked_at() -> None:
    device = open_device("host")
    stream = device.stream()
    config = replace(config_of(CASE), io="memory")
    swap = await HighSpeedSwap.new_on_stream(stream=stream, cfg=config, ctx=device)
    try:
        assert swap.config is config
        assert len(swap.pool) == 1
        assert swap.predictor is not None
        ids: list[int] = []
        await offload(swap, CASE, 100, ids)
        await attend(swap, CASE, 0, ids, 99)
        await swap.flush()
        summary = swap.diagnostic_summary()
        assert (summary.num_layers, summary.active_disk_blocks) == (3, 7)
        assert summary.disk_block_capacity == 100
        assert summary.scratch_pool_resident + summary.scratch_pool_free == config.device_slots
        assert summary.host_slots["dirty"] == 0
        assert sum(summary.host_slots.values()) == config.host_slots
        assert summary.statistics.attends == 1
        assert summary.left_out_mass_mean is None
        assert (summary.device, summary.path) == ("host", "memory")
        assert (summary.io_errors, summary.checksum_failures, summary.callers_waiting) == (0, 0, 0)
    finally:
        await swap.close()
    with pytest.raises(ArgumentError, match="stream"):
        await HighSpeedSwap.new_on_stream(stream="x", cfg=config)
    other = await HighSpeedSwap.new(cfg=config)
    await other.close()


async def test_top_k_says_how_good_its_predictions_are() -> None:
    config = config_for(CASE, extra_device=3 * hsswap.TopK(2).cache_blocks(16))
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap:
        sequence = swap.sequence(top_k=hsswap.TopK(2))
        await sequence.append(0, CASE.keys[0], CASE.values[0])
        result = await sequence.attend(0, CASE.queries[0][-1:])
        await result.done()
        summary = swap.diagnostic_summary()
        assert summary.left_out_mass_mean == pytest.approx(float(result.left_out_mass.mean()))
        assert summary.sequences == 1


async def test_an_offload_and_an_attend_of_the_same_block_take_turns() -> None:
    """Both wait for a host slot, which comes free: it held the block twice, and the answer was what
    the slot held before.
    """
    old, new = await alone(CASE, [*range(5)]), await alone(CASE, [*range(9)])
    async with watched(config_of(CASE, extra_host=10)) as swap:
        pool, ids = swap.pool[0], [await swap.alloc_disk_block_id()]
        await swap.offload_block(layer=0, block=ids[0], **block_of(CASE, 0, 0, 5))  # type: ignore[arg-type]
        await swap.flush()
        await evict(swap)
        more = swap._store.ids.allocate(pool.tier.free_count)
        taken = await swap.prefetcher.reserve(Blocks(pool, 0, more & INDEX_MASK))
        asked = [asyncio.ensure_future(attend(swap, CASE, 0, ids, 4, last_block_valid_slots=5))]
        await turns(20)
        grown = swap.offload_block(layer=0, block=ids[0], **block_of(CASE, 0, 0, 9))  # type: ignore[arg-type]
        filling = asyncio.ensure_future(grown)
        await turns(20)
        asked.append(asyncio.ensure_future(attend(swap, CASE, 0, ids, 8)))
        await turns(20)
        swap.prefetcher.abandon(pool, taken)
        await filling
        before, after = await asyncio.gather(*asked)
        assert (before == old[0][4]).all()
        assert (after == new[0][8]).all()
        pool.tier.check()
        await give_back(swap, ids)
        swap._store.ids.drop_reference(more)


async def test_an_id_is_freed_behind_a_call_that_is_going_to_read_it() -> None:
    gate = Gate()
    held = Fault(FaultKind.HOLD, only="read", gate=gate)
    wanted = await alone(CASE, [*range(640)])
    config = replace(config_of(CASE), look_ahead=False)
    async with watched(config, held) as swap:
        ids: list[int] = []
        await offload(swap, CASE, 640, ids)
        await swap.flush()
        await evict(swap)
        asked = asyncio.ensure_future(attend(swap, CASE, 0, ids, 639))
        assert await asyncio.to_thread(gate.reached.wait, 30)
        freed = asyncio.ensure_future(give_back(swap, ids[-1:]))
        await turns(50)
        assert not freed.done()
        gate.opened.set()
        assert (await asked == wanted[0][639]).all()
        await freed
        await give_back(swap, ids[:-1])


async def test_a_sequences_blocks_are_not_the_id_calls_to_change() -> None:
    """They may be held by id, which makes them shared, and let go again; no more."""
    wanted = await alone(CASE, [*range(500)])
    async with watched(config_of(CASE, extra_host=60)) as swap:
        sequence = swap.sequence()
        await fill(sequence, rows_of(CASE, [*range(500)]))
        await swap.flush()
        block = int(sequence.ids[20])
        for held in (False, True):
            if held:
                await swap.inc_disk_ref(block=block)
            with pytest.raises(ArgumentError, match="is a sequence's"):
                await swap.offload_block(layer=0, block=block, **block_of(CASE, 0, 3, 16))  # type: ignore[arg-type]
        assert await swap.dec_disk_ref(block=block) == 1
        with pytest.raises(ArgumentError, match="is a sequence's"):
            await swap.dec_disk_ref(block=block)
        assert swap.disk_refcount(block=block) == 1
        result = await sequence.attend(0, CASE.queries[0][480:500])
        await result.done()
        assert (np.asarray(result.out) == wanted[0][480:]).all()
        # Held by id when the sequence goes, it is the holder's alone, who may fill it anew.
        await swap.inc_disk_ref(block=block)
        await sequence.close()
        await swap.offload_block(layer=0, block=block, **block_of(CASE, 0, 0, 16))  # type: ignore[arg-type]
        got = await attend(swap, CASE, 0, [block], 9, last_block_valid_slots=10)
        assert (got == wanted[0][9]).all()
        await give_back(swap, [block])
