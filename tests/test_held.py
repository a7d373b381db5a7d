"""Host slots that a decoding sequence holds over its steps: given back to who needs the room."""

from __future__ import annotations

import asyncio
import errno

import numpy as np
import pytest

from hsswap import HighSpeedSwap, LayerGroup, ModelDims, OutOfSpace, Sequence, SwapConfig
from hsswap.io.memory import Fault, FaultKind
from hsswap.prefetch import Prefetcher
from tests.branches import Branch, alone
from tests.swap_cases import SMALL, U16, Case, config_for, random_case
from tests.swap_watch import Linked, Stuck, fill, pools_of, turns, watched, within

CASE = random_case(SMALL, 700, seed=71)


def config_of(sequences: int) -> SwapConfig:
    """No device slots to stay in; host slots for two sequences, of which one can be held."""
    return config_for(CASE, sequences=sequences, extra_host=240)


async def held(swap: HighSpeedSwap) -> int:
    """Slots with a lease, once what has run has been heard of."""
    await turns(5)
    return sum(int((pool.tier.leases > 0).sum()) for pool in pools_of(swap))


def in_no_device_slot(sequence: Sequence) -> int:
    """Full blocks of all layers that are not in device slots."""
    count = 0
    for cache in sequence._layers:
        full = cache.length // cache.pool.block_size
        count += int((cache.device_slot[:full] < 0).sum())
    return count


async def ask(sequence: Sequence, wanted: list[U16], rows: int = 1) -> None:
    """The last rows of every layer, which must be right."""
    for layer in range(SMALL.layers):
        end = sequence.layer_length(layer)
        part = slice(end - rows, end)
        result = sequence.try_attend(layer, CASE.queries[layer][part])
        if result is None:
            result = await within(lambda n=layer, p=part: sequence.attend(n, CASE.queries[n][p]))  # type: ignore[misc]
        await result.done()
        assert (np.asarray(result.out) == wanted[layer][part]).all()


@pytest.fixture(scope="module")
def wanted() -> list[U16]:
    return asyncio.run(alone(CASE, list(range(700))))


@pytest.mark.parametrize("linked", [False, True])
async def test_what_is_held_goes_to_who_needs_it(wanted: list[U16], linked: bool) -> None:
    """Three sequences in turn: all answer, and the last one holds its blocks when it is alone."""
    device = Linked() if linked else None
    async with watched(config_of(3), device=device) as swap:
        first, second, third = (swap.sequence() for _ in range(3))
        await fill(first, CASE)
        await swap.flush()
        for _ in range(3):
            await ask(first, wanted)
        assert await held(swap) == in_no_device_slot(first) > 50
        for other in (second, third):
            await within(lambda filled=other: fill(filled, CASE))  # type: ignore[misc]
        for _ in range(3):
            for sequence in (first, second, third):
                await ask(sequence, wanted)
        await within(first.close)
        await within(third.close)
        for _ in range(3):
            await ask(second, wanted)
        assert await held(swap) == in_no_device_slot(second) > 50


async def test_what_is_held_is_not_leased_again_while_somebody_waits(
    wanted: list[U16], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a lease was never given back, and who waited for room waited for ever."""
    async with watched(config_of(3)) as swap:
        sequence = swap.sequence()
        await fill(sequence, CASE)
        await swap.flush()
        for _ in range(2):
            await ask(sequence, wanted)
        monkeypatch.setattr(Prefetcher, "crowded", True)
        queries = CASE.queries[0][699:700]
        result = await within(lambda: sequence.attend(0, queries))
        await result.done()
        assert (np.asarray(result.out) == wanted[0][699:700]).all()
        assert await held(swap) == in_no_device_slot(sequence) > 50
        assert all(pool.tier.leases.max() == 1 for pool in pools_of(swap))


async def test_nothing_is_taken_from_under_a_reader(wanted: list[U16]) -> None:
    async with watched(config_of(3)) as swap:
        first, second, third = (swap.sequence() for _ in range(3))
        await fill(first, CASE)
        await swap.flush()
        for _ in range(2):
            await ask(first, wanted)
        await second.reserve(640)
        stuck = Stuck(swap)
        outs = [np.zeros((1, 6, 16), np.uint16) for _ in range(SMALL.layers)]
        for layer, out in enumerate(outs):
            queries = CASE.queries[layer][699:700]
            assert first.try_attend(layer, queries, out, stream=stuck.stream) is not None
        reserving = asyncio.ensure_future(third.reserve(600))  # for which all must go
        await turns(300)
        waits, leased = not reserving.done(), await held(swap)
        stuck.go()
        assert waits
        assert leased == in_no_device_slot(first) > 50
        await within(lambda: reserving)
        for layer, out in enumerate(outs):
            assert (out[0] == wanted[layer][699]).all()
        await asyncio.to_thread(stuck.stream.close)


@pytest.mark.parametrize("length", [0, 5, 320, 333, 690, 699])
async def test_a_cut_lets_go_of_what_is_cut_away(length: int) -> None:
    async with watched(config_of(3)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(700)])
        await swap.flush()
        await branch.check(1)
        await branch.check(1)
        assert await held(swap) == in_no_device_slot(branch.sequence) > 50
        other = branch.fork()
        for _ in range(3):
            await other.check(1)
        await branch.truncate(length)
        await swap.retiring.settle(branch.sequence.number)
        assert await held(swap) == in_no_device_slot(other.sequence) > 50
        await branch.append([*range(100, 140)])
        await branch.check(1)
        await other.check(1)
        await other.sequence.close()
        for _ in range(3):
            await branch.check(1)
        assert await held(swap) == in_no_device_slot(branch.sequence)


async def test_who_starves_is_told_though_others_hold_slots() -> None:
    """The second group's slots are all dirty and the disk is full; the first group's are held."""
    dims = ModelDims((LayerGroup(1, 2, 1, 8), LayerGroup(1, 2, 1, 16)))
    case = random_case(dims, 700, seed=72)
    full = Fault(FaultKind.ERRNO, at=6, count=None, only="write", errno=errno.ENOSPC)
    config = config_for(case, sequences=3, extra_host=60, capacity=6000)
    async with watched(config, full, device=Linked()) as swap:
        first, second = swap.sequence(), swap.sequence()
        await first.append(0, case.keys[0][:400], case.values[0][:400])
        await swap.flush()
        for _ in range(2):
            result = await first.attend(0, case.queries[0][399:400])
            await result.done()
        assert await held(swap) == 25
        again = [case.keys[1]] * 4, [case.values[1]] * 4
        with pytest.raises(OutOfSpace):
            await within(lambda: second.append(1, *map(np.concatenate, again)))


async def test_windows_and_short_tiers_hold_nothing() -> None:
    dims = ModelDims.uniform(layers=2, q_heads=2, kv_heads=1, head_dim=8)
    windowed = ModelDims((LayerGroup(2, 2, 1, 8, window=300),))
    for shape, more in ((dims, 0), (windowed, 200)):
        case: Case = random_case(shape, 600, seed=73)
        async with watched(config_for(case, extra_host=more)) as swap:
            sequence = swap.sequence()
            await fill(sequence, case)
            await swap.flush()
            for _ in range(3):
                result = await sequence.attend(0, case.queries[0][599:])
                await result.done()
            await turns(5)
            assert await held(swap) == 0
