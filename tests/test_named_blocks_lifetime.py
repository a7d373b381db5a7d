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
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from tests.branches import alone
from tests.named_cases import CASE, attend, block_of, config_of, give_back, offload
from tests.swap_cases import config_for
from tests.swap_watch import turns, watched


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
