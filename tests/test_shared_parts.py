"""A device, or a backend, that two swaps are given, or that is closed under one: it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from hsswap import ArgumentError, ClosedError, HighSpeedSwap, Sequence
from hsswap.driver import open_device
from hsswap.driver.base import Device
from hsswap.io.memory import MemoryIO
from tests.branches import alone
from tests.swap_cases import SMALL, config_for, random_case
from tests.swap_watch import fill

CASE = random_case(SMALL, 300, seed=29)
CONFIG = config_for(CASE)


@asynccontextmanager
async def working(device: Device, io: MemoryIO) -> AsyncIterator[HighSpeedSwap]:
    """A swap that holds the case, and still answers at the end."""
    async with HighSpeedSwap.open(CONFIG, io=io, device=device) as swap, swap.sequence() as one:
        await fill(one, CASE)
        yield swap
        await swap.flush()
        await check(one)
    assert device.live_count == 0


async def check(sequence: Sequence) -> None:
    wanted = await alone(CASE, list(range(CASE.tokens)))
    for layer in range(SMALL.layers):
        result = await sequence.attend(layer, CASE.queries[layer][-9:])
        await result.done()
        assert (np.asarray(result.out) == wanted[layer][-9:]).all()


async def test_a_device_serves_one_swap() -> None:
    device = open_device("host")
    async with working(device, MemoryIO()):
        with pytest.raises(ArgumentError, match="belongs to an open swap, which closes it"):
            await HighSpeedSwap.create(CONFIG, io=MemoryIO(), device=device)
        with pytest.raises(ArgumentError, match="belongs to an open swap"):
            await HighSpeedSwap.new(cfg=CONFIG, ctx=device)
    with pytest.raises(ClosedError):
        await HighSpeedSwap.create(CONFIG, io=MemoryIO(), device=device)


async def test_a_device_is_not_closed_under_its_swap() -> None:
    device = open_device("host")
    async with working(device, MemoryIO()):
        with pytest.raises(ArgumentError, match="close the swap"):
            await asyncio.to_thread(device.close)
    device.close()


async def test_a_swap_that_does_not_open_closes_its_device() -> None:
    device, io = open_device("host"), MemoryIO()
    await io.close()
    with pytest.raises(ClosedError):
        await HighSpeedSwap.create(CONFIG, io=io, device=device)
    with pytest.raises(ClosedError):
        device.allocate(4096)
    device.close()


async def test_a_backend_serves_one_swap() -> None:
    io = MemoryIO()
    async with working(open_device("host"), io):
        with pytest.raises(ArgumentError, match="started before; make a new one"):
            await HighSpeedSwap.create(CONFIG, io=io)
