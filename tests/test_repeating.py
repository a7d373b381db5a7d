"""A decode loop makes the layer's last call again; answers, refusals and counts are the same."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from hsswap import HighSpeedSwap, Sequence
from hsswap.driver.base import AttendAgain, Event, Stream
from hsswap.driver.host import HostDevice
from hsswap.driver.operations import AttendWork
from hsswap.driver.tensor import Tensor
from hsswap.errors import ArgumentError
from tests.swap_actors import roomy
from tests.swap_cases import MIXED, SMALL, U16, Case, config_for, feed, random_case
from tests.swap_watch import watched

TOKENS = 700


class Counting(HostDevice):
    """A device that counts calls made again; ``never`` makes none."""

    def __init__(self, *, never: bool = False) -> None:
        super().__init__()
        self.repeats = 0
        self.kept = 0
        self._never = never

    def attend_again(self, stream: Stream, work: AttendWork) -> AttendAgain | None:
        self.kept += 1
        again = super().attend_again(stream, work)
        return None if self._never or again is None else _Counted(self, again)


class _Counted(AttendAgain):
    def __init__(self, device: Counting, again: AttendAgain) -> None:
        self._device, self._again = device, again

    def __call__(self, queries: Tensor, out: Tensor, length: int) -> Event:
        self._device.repeats += 1
        return self._again(queries, out, length)


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(SMALL, TOKENS, seed=31)


async def attended(sequence: Sequence, layer: int, queries: U16, **more: object) -> U16:
    """The output of one call."""
    out = np.full((len(queries), *queries.shape[1:]), 0x7FC0, np.uint16)
    await (await sequence.attend(layer, queries, out, **more)).done()  # type: ignore[arg-type]
    return out


async def test_calls_that_wait_for_nothing_give_the_loop_a_turn_each(case: Case) -> None:
    """A token's layers, all of whose blocks are there, do not hold the loop together."""
    loop, turns = asyncio.get_running_loop(), 0

    def count() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(count)

    async with watched(roomy(case)) as swap, swap.sequence() as sequence:
        await feed(sequence, case, [TOKENS])
        query = case.queries[0][-1:]
        out = np.full_like(query, 0x7FC0)
        (await sequence.attend(0, query, out)).event.synchronize()
        loop.call_soon(count)
        before = turns
        results = [await sequence.attend(0, query, out) for _ in range(5)]  # one, four times again
        assert turns - before >= 5
        before = turns
        for _ in range(5):
            results += await swap.attend_batch(0, [sequence], query, out)
        assert turns - before >= 5
        for result in results:
            await result.done()


@pytest.mark.parametrize("dims", [SMALL, MIXED], ids=["small", "mixed"])
async def test_a_decode_loop_repeats_with_the_same_bits(dims: object) -> None:
    case = random_case(SMALL if dims is SMALL else MIXED, TOKENS, seed=32)
    chunks = [600, *[1] * 40, 20, *[1] * 40]
    layers = [case.dims.group(layer) for layer in range(case.dims.layers)]
    steady = sum(group.window is None for group in layers)
    outputs, counts = [], []
    for never in (True, False):
        device = Counting(never=never)
        async with watched(roomy(case), device=device) as swap:
            sequence = swap.sequence()
            outputs.append(await feed(sequence, case, chunks))
            counts.append((swap.statistics().attends, swap.statistics().device_hits))
            # All but the first of each block.
            least = steady * (80 - 2 * 40 // case.dims.block_size - 2)
            assert (device.repeats == 0) if never else (device.repeats >= least)
    assert counts[0] == counts[1]
    for mine, wanted in zip(*outputs, strict=True):
        assert mine.tobytes() == wanted.tobytes()


async def test_calls_that_are_unlike_the_last_are_made_anew(case: Case) -> None:
    device = Counting()
    async with watched(roomy(case), device=device) as swap:
        sequence = swap.sequence()
        await feed(sequence, case, [TOKENS])
        row, rows = case.queries[0][-1:], case.queries[0][-3:]
        wanted = await attended(sequence, 0, row)
        assert (await attended(sequence, 0, row) == wanted).all()
        assert device.repeats == 1
        lse = np.empty((1, 6), np.float32)
        assert (await attended(sequence, 0, row, lse_out=lse) == wanted).all()
        assert np.isfinite(lse).all()
        sinks = np.full(6, -np.inf, np.float32)
        assert (await attended(sequence, 0, row, sinks=sinks) == wanted).all()
        assert (await attended(sequence, 0, rows))[-1:].tobytes() == wanted.tobytes()
        apart = np.zeros((1, 12, 16), np.uint16)
        apart[:, ::2] = row
        assert (await attended(sequence, 0, apart[:, ::2]) == wanted).all()
        result = await sequence.attend(0, row)
        await result.done()
        assert (np.asarray(result.out) == wanted).all()
        assert device.repeats == 1
        assert (await attended(sequence, 0, row) == wanted).all()
        assert device.repeats == 2
        with swap.device.stream() as other:
            assert (await attended(sequence, 0, row, stream=other) == wanted).all()
            assert device.repeats == 2
            assert (await attended(sequence, 0, row, stream=other) == wanted).all()
            assert device.repeats == 3
        again = sequence.try_attend(0, row, out := np.zeros_like(wanted))
        assert again is not None
        again.synchronize()
        assert (out == wanted).all()
        await sequence.close()


async def test_what_changes_between_two_calls_is_seen(case: Case) -> None:
    device = Counting()
    async with watched(roomy(case, sequences=2), device=device) as swap:
        sequence = swap.sequence()
        truth = await feed(sequence, case, [TOKENS])
        for layer in range(SMALL.layers):
            await attended(sequence, layer, case.queries[layer][-1:])
        for length in (TOKENS - 1, TOKENS - 40, 33, 17, 16, 1):
            await sequence.truncate(length)
            for layer in range(SMALL.layers):
                row = case.queries[layer][length - 1 : length]
                wanted = truth[layer][length - 1 : length]
                for _ in range(2):
                    assert (await attended(sequence, layer, row) == wanted).all()
        other = sequence.fork()
        row = case.queries[0][:1]
        for held in (sequence, other, sequence, other):
            assert (await attended(held, 0, row) == truth[0][:1]).all()
        await sequence.append(0, case.keys[0][1:2], case.values[0][1:2])
        row = case.queries[0][1:2]
        assert (await attended(sequence, 0, row) == truth[0][1:2]).all()
        assert (await attended(other, 0, case.queries[0][:1]) == truth[0][:1]).all()
        await other.close()
        assert (await attended(sequence, 0, row) == truth[0][1:2]).all()
        await sequence.close()
    assert device.repeats > 3


async def test_wrong_arrays_are_refused_and_nothing_is_enqueued(case: Case) -> None:
    device = Counting()
    async with watched(roomy(case), device=device) as swap:
        sequence = swap.sequence()
        await feed(sequence, case, [TOKENS])
        row = case.queries[0][-1:]
        wanted = await attended(sequence, 0, row)
        out = np.zeros_like(wanted)
        read_only = out.copy()
        read_only.flags.writeable = False
        before = swap.statistics().attends
        for queries, target in (
            (row.astype(np.float32), out),
            (row, out.astype(np.float32)),
            (row, out[:, :3]),
            (row, read_only),
            ("row", out),
        ):
            with pytest.raises(ArgumentError):
                sequence.try_attend(0, queries, target)
        assert device.repeats == 0
        assert swap.statistics().attends == before
        assert not out.any()
        await sequence.close()


async def test_a_layer_behind_it_that_is_not_resident_is_read_ahead(case: Case) -> None:
    """A call made again plans nothing; so it is not made where there is something to plan."""
    blocks = -(-TOKENS // 16)
    config = replace(config_for(case, extra_device=blocks + 4))
    device = Counting()
    async with HighSpeedSwap.open(config, device=device) as swap, swap.sequence() as sequence:
        truth = await feed(sequence, case, [TOKENS])
        for _ in range(3):
            for layer in range(SMALL.layers):
                row = case.queries[layer][-1:]
                assert (await attended(sequence, layer, row) == truth[layer][-1:]).all()
        assert device.repeats == 0
