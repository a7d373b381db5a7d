"""Blocks on their way: read some layers ahead, and attended in one launch once they are there."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hsswap import ModelDims
from hsswap.driver.base import Stream
from hsswap.driver.host import HostDevice
from hsswap.driver.operations import AttendWork
from hsswap.io.memory import Fault, FaultKind
from tests.branches import alone
from tests.swap_cases import config_for, random_case
from tests.swap_watch import fill, turns, watched, within

TOKENS, TILE_BLOCKS = 768, 16
CASE = random_case(ModelDims.uniform(layers=2, q_heads=2, kv_heads=1, head_dim=16), TOKENS, 5)


class Counting(HostDevice):
    """Remembers launches of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: list[AttendWork] = []

    def attend(self, stream: Stream, work: AttendWork) -> None:
        self.launches.append(work)
        super().attend(stream, work)


async def test_the_rest_is_one_launch() -> None:
    wanted = await alone(CASE, list(range(TOKENS)))
    # Of 48 blocks a layer 16 stay in device slots and 24 in the cache; 8 are read at each step.
    config = config_for(CASE, extra_host=64)
    gate = Fault(FaultKind.HOLD, only="read", at=1)
    device = Counting()
    async with watched(config, gate, device=device) as swap:
        sequence = swap.sequence()
        await fill(sequence, CASE)
        await swap.flush()
        first = await within(lambda: sequence.attend(0, CASE.queries[0][-1:]))
        await first.done()
        missed = swap.statistics().misses
        await asyncio.to_thread(gate.gate.reached.wait)  # the next layer's
        device.launches.clear()
        asking = asyncio.ensure_future(sequence.attend(1, CASE.queries[1][-1:]))
        await turns(20)
        assert not asking.done()
        assert not device.launches
        gate.gate.opened.set()
        result = await within(lambda: asking)
        await result.done()
        assert len(device.launches) == 1
        assert (np.asarray(result.out)[0] == wanted[1][-1]).all()
        assert swap.statistics().misses == missed + 8


@pytest.mark.parametrize(("extra", "ahead"), [(286, 3), (60, 1)])
async def test_layers_ahead_are_read_as_long_as_they_lack_few_blocks(
    extra: int, ahead: int
) -> None:
    """Of 42 blocks a layer outside device slots 4 are in no tier, or more than a tile."""
    case = random_case(ModelDims.uniform(layers=5, q_heads=2, kv_heads=1, head_dim=16), TOKENS, 6)
    wanted = await alone(case, list(range(TOKENS)))
    async with watched(config_for(case, extra_host=extra)) as swap:
        sequence = swap.sequence()
        await fill(sequence, case)
        await swap.flush()
        tier, indices = swap.pool_of(0).tier, np.arange(TOKENS // 16)
        outside = [np.flatnonzero(c.device_slot[:48] < 0) for c in sequence._layers]

        def absent(layer: int) -> int:
            blocks = sequence._indices[indices[outside[layer]]]
            return int((tier.lookup(layer, blocks) < 0).sum())

        before = [absent(layer) for layer in range(5)]
        result = await within(lambda: sequence.attend(0, case.queries[0][-1:]))
        await result.done()
        await swap.prefetcher.settle()
        assert all(before)
        assert (before[1] > TILE_BLOCKS) == (ahead == 1)
        for layer in range(1, 5):
            assert (absent(layer) < before[layer]) == (layer <= ahead)
        for layer in range(1, 5):
            result = await within(lambda n=layer: sequence.attend(n, case.queries[n][-1:]))  # type: ignore[misc]
            await result.done()
            assert (np.asarray(result.out)[0] == wanted[layer][-1]).all()
