"""A step whose last blocks are on their way is one launch, once they are there."""

from __future__ import annotations

import asyncio

import numpy as np

from hsswap import ModelDims
from hsswap.driver.base import Stream
from hsswap.driver.host import HostDevice
from hsswap.driver.operations import AttendWork
from hsswap.io.memory import Fault, FaultKind
from tests.branches import alone
from tests.swap_cases import config_for, random_case
from tests.swap_watch import fill, turns, watched, within

TOKENS = 768
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
        assert swap.statistics().misses == 16
