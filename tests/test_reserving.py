"""Reserved room: it is there when it is needed, refused with the number where it cannot be."""

from __future__ import annotations

import asyncio

import pytest

from hsswap import OutOfBlocks, OutOfSlots
from hsswap.io.ids import INDEX_MASK
from hsswap.io.memory import Fault, FaultKind
from hsswap.loads import Blocks
from tests.branches import Branch, config_of, rows_of
from tests.swap_cases import SMALL, random_case
from tests.swap_watch import pools_of, turns, until, watched, within
from tests.ways import evict

CASE = random_case(SMALL, 900, seed=21)


async def test_reserved_room_is_there_while_others_take_the_rest() -> None:
    config = config_of(CASE, branches=2, extra_host=60)
    async with watched(config) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(100)])
        await branch.sequence.reserve(150)
        other = Branch(swap.sequence(), CASE)
        await other.append([*range(700)])
        part = rows_of(CASE, [*range(200, 350)])
        for layer in range(3):
            for start in range(0, 150, 50):
                rows = slice(start, start + 50)
                keys, values = part.keys[layer][rows], part.values[layer][rows]
                assert branch.sequence.try_append(layer, keys, values)
        branch.rows += [*range(200, 350)]
        await branch.check()
        await other.check()
        await branch.sequence.reserve(30)
        await branch.truncate(90)
        await branch.append([*range(90, 130)])
        await branch.check()
        await branch.sequence.reserve(90)
    # watched() has seen that nothing of a reservation is left


async def test_reservations_that_cannot_be_are_refused_with_the_number() -> None:
    async with watched(config_of(CASE, branches=2)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(100)])
        held = branch.sequence.ids.tolist()
        with pytest.raises(OutOfSlots, match="raise host_slots by 27"):
            await branch.sequence.reserve(150)
        with pytest.raises(OutOfBlocks):
            await branch.sequence.reserve(1950)
        assert branch.sequence.ids.tolist() == held
        assert swap.statistics().free_blocks == swap.config.capacity_blocks - len(held)
        await branch.append([*range(100, 130)])
        await branch.check()
        assert not any(pool.reserved_slots for pool in pools_of(swap))


@pytest.mark.parametrize("captures", [False, True])
async def test_callers_that_wait_side_by_side_do_not_count_on_the_same_room(captures: bool) -> None:
    """Who holds slots for long leaves two tiles for the others, also when room is short just now;
    the second one was let in, and who attended beside them could find no room for ever.
    """
    async with watched(config_of(CASE, branches=3, extra_host=24)) as swap:
        pool, tile = swap.pool[0], swap.config.tile_blocks
        branches = [Branch(swap.sequence(), CASE) for _ in range(3)]
        await branches[2].append([*range(700)])  # first: what may stay in device slots is its
        for branch in branches[:2]:
            await branch.append([*range(80)])
        await swap.flush()
        await evict(swap)
        others = swap._store.ids.allocate(pool.tier.free_count)
        taken = await swap.prefetcher.reserve(Blocks(pool, 0, others & INDEX_MASK))

        async def hold(branch: Branch) -> None:
            if not captures:
                return await branch.sequence.reserve(100)
            async with branch.sequence.captured(1):
                await held.wait()

        held = asyncio.Event()
        calls = [asyncio.ensure_future(hold(branch)) for branch in branches[:2]]
        await turns(20)
        swap.prefetcher.abandon(pool, taken)
        swap._store.ids.drop_reference(others)
        await until(calls[1].done)
        assert pool.spare_host_slots(tile) == 6
        await branches[2].check()
        held.set()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert ends[0] is None
        assert isinstance(ends[1], OutOfSlots)
        await branches[2].check()


async def test_a_cancelled_reservation_leaves_an_earlier_one() -> None:
    gate = Fault(FaultKind.HOLD, only="write")
    async with watched(config_of(CASE, branches=2, extra_host=40), gate) as swap:
        branch, other = (Branch(swap.sequence(), CASE) for _ in range(2))
        await branch.sequence.reserve(33)
        before = branch.sequence.ids.tolist(), [pool.reserved_slots for pool in pools_of(swap)]
        assert any(before[1])
        filling = asyncio.ensure_future(other.append([*range(600)]))  # until no slot is free
        await until(gate.gate.reached.is_set)
        await turns(5)
        more = asyncio.ensure_future(branch.sequence.reserve(80))
        await turns(5)
        assert not more.done()
        more.cancel()
        await asyncio.wait([more])
        assert before == (
            branch.sequence.ids.tolist(),
            [pool.reserved_slots for pool in pools_of(swap)],
        )
        gate.gate.opened.set()
        await within(lambda: asyncio.wait([filling]))
        await branch.append([*range(33)])
        await branch.check()
