"""Truncate, fork and reserve: every branch answers, bit for bit, as one that has its rows alone."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hsswap
from hsswap import ArgumentError, BlockIOError, OutOfSlots
from hsswap.arguments import Given
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from tests.branches import MOST_BRANCHES, TOP_K, Branch, alone, config_of
from tests.swap_cases import MIXED, SMALL, Case, config_for, random_case
from tests.swap_watch import Linked, Stuck, turns, until, watched, within

CASE = random_case(SMALL, 900, seed=21)
OTHER = random_case(MIXED, 900, seed=22)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("append", "append", "truncate", "fork", "close", "check", "flush")),
        st.integers(0, MOST_BRANCHES - 1),
        st.integers(0, 400) | st.integers(0, 18),
    ),
    min_size=4,
    max_size=14,
)


async def play(case: Case, steps: list[tuple[str, int, int]], *, linked: bool, extra: int) -> None:
    """Run a script on a family of branches; every branch is checked at the end."""
    config = config_of(case, extra_device=extra, extra_host=extra // 2)
    random = np.random.default_rng(len(steps))
    async with watched(config, device=Linked() if linked else None) as swap:
        branches = [Branch(swap.sequence(), case)]
        for what, which, size in steps:
            branch = branches[which % len(branches)]
            if what == "append" and 0 < size <= 900 - len(branch.rows):
                await branch.append(random.integers(0, case.tokens, size).tolist())
            elif what == "truncate":
                await branch.truncate(max(0, len(branch.rows) - size), wait=size % 2 == 0)
            elif what == "fork" and len(branches) < MOST_BRANCHES:
                branches.append(branch.fork())
            elif what == "close" and len(branches) > 1:
                branches.remove(branch)
                await branch.sequence.close()
            elif what == "check":
                await branch.check(1 + size % 30)
            elif what == "flush":
                await swap.flush()
        await swap.flush()
        for branch in branches:
            await branch.check()


@settings(max_examples=60)
@given(steps=STEPS, linked=st.booleans(), mixed=st.booleans(), extra=st.sampled_from((0, 30, 600)))
def test_any_family_of_branches(
    steps: list[tuple[str, int, int]], linked: bool, mixed: bool, extra: int
) -> None:
    asyncio.run(play(OTHER if mixed else CASE, steps, linked=linked, extra=extra))


@pytest.mark.parametrize("extra", [0, 400])
@pytest.mark.parametrize("length", [0, 1, 255, 256, 511, 512, 513, 527, 528, 529])
async def test_rejected_speculation_leaves_no_trace(length: int, extra: int) -> None:
    async with watched(config_of(CASE, extra_device=extra)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(530)])
        await branch.truncate(length)
        await branch.append([*range(600, 640)])
        await branch.check(40)


async def test_a_fork_outlives_its_parent_and_shares_its_blocks() -> None:
    async with watched(config_of(CASE)) as swap:
        parent = Branch(swap.sequence(), CASE)
        await parent.append([*range(500)])
        free = swap.statistics().free_blocks
        fork = parent.fork()
        assert swap.statistics().free_blocks == free
        await fork.append([*range(700, 720)])
        await parent.append([*range(800, 830)])
        await parent.check()
        await parent.sequence.close()
        await fork.check()
        written = swap.statistics().blocks_written
        await swap.flush()
        again = fork.fork()
        await fork.sequence.close()
        await again.check()
        assert swap.statistics().blocks_written == written


@pytest.mark.parametrize("extra", [0, 300])
async def test_a_fork_cut_inside_a_shared_block_writes_another(extra: int) -> None:
    async with watched(config_of(CASE, extra_host=extra)) as swap:
        parent = Branch(swap.sequence(), CASE)
        await parent.append([*range(500)])
        await swap.flush()
        fork = parent.fork()
        await fork.truncate(409)
        await fork.append([*range(700, 740)])
        await parent.truncate(405)
        await parent.append([*range(800, 840)])
        await swap.flush()
        await parent.check()
        await fork.check()
        await parent.truncate(400)
        await parent.check()
        await fork.check()


async def test_blocks_that_were_never_written_are_shared_too() -> None:
    """A full disk: forks of dirty blocks answer, and are written once there is room."""
    full = Fault(FaultKind.ERRNO, only="write", at=0, count=400, errno=errno.ENOSPC)
    async with watched(config_of(CASE, extra_host=200), full) as swap:
        parent = Branch(swap.sequence(), CASE)
        await parent.append([*range(400)])
        fork = parent.fork()
        await parent.truncate(200)
        await fork.check()
        with pytest.raises(BlockIOError):
            await swap.flush()
        for _ in range(40):
            try:
                await swap.flush()
            except BlockIOError:
                continue
            break
        await fork.check()
        await parent.check()


async def test_top_k_branches_choose_from_their_own_blocks() -> None:
    config = config_of(CASE, extra_device=4 * 3 * TOP_K.cache_blocks(16))
    async with watched(config) as swap:
        whole = Branch(swap.sequence(top_k=TOP_K), CASE)
        await whole.append([*range(600)])
        other = whole.fork()
        answers = []
        for branch in (whole, other):
            await branch.append([*range(640, 641)])
            await branch.sequence.attend(0, CASE.queries[0][640:641])
            await branch.truncate(300)
            await branch.append([*range(700, 800)])
            result = await branch.sequence.attend(0, CASE.queries[0][799:800])
            await result.done()
            answers.append(np.asarray(result.out))
        fresh = Branch(swap.sequence(top_k=TOP_K), CASE)
        await fresh.append([*range(300), *range(700, 800)])
        result = await fresh.sequence.attend(0, CASE.queries[0][799:800])
        await result.done()
        assert all((answer == np.asarray(result.out)).all() for answer in answers)


async def test_a_truncate_that_fails_before_the_first_layer_changed_has_changed_nothing() -> None:
    never = Fault(FaultKind.ERRNO, only="read", at=0, count=3)
    async with watched(config_of(CASE), never) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(500)])
        await swap.flush()
        with pytest.raises(BlockIOError):
            await branch.sequence.truncate(300)
        await branch.append([*range(600, 700)])
        await branch.check()


async def test_an_interrupted_truncate_goes_on_or_is_closed() -> None:
    # A layer's one read before it. How many follow at once is not known: until the drive is well.
    io = MemoryIO([Fault(FaultKind.ERRNO, only="read", at=1, count=None)])
    async with watched(config_of(CASE), io=io) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(500)])
        await swap.flush()
        with pytest.raises(BlockIOError):
            await branch.sequence.truncate(300)
        await swap.prefetcher.settle()
        io._faults = ()
        with pytest.raises(ArgumentError, match="truncate again"):
            await branch.sequence.append(0, CASE.keys[0][:1], CASE.values[0][:1])
        with pytest.raises(ArgumentError, match="from 0 to 300"):
            await branch.sequence.truncate(301)
        await branch.truncate(299)
        await branch.append([*range(600, 700)])
        await branch.check()


async def test_a_cancelled_truncate_goes_on() -> None:
    async with watched(config_of(CASE)) as swap:
        for moment in range(6):
            branch = Branch(swap.sequence(), CASE)
            await branch.append([*range(500)])
            await swap.flush()
            call = asyncio.ensure_future(branch.sequence.truncate(300))
            await turns(moment)
            call.cancel()
            await asyncio.wait([call])
            await branch.truncate(min(300, branch.sequence.length))
            await branch.append([*range(600, 650)])
            await branch.check()
            await branch.sequence.close()


@pytest.mark.parametrize("extra", [0, 90])
async def test_what_is_cut_away_is_not_filled_again_under_its_reader(extra: int) -> None:
    """A question hangs in its stream while its blocks are cut away and others want the slots."""
    wanted = await alone(CASE, [*range(520)])
    async with watched(config_of(CASE, extra_device=extra, extra_host=60)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(520)])
        await swap.flush()
        stuck = Stuck(swap)
        out = np.full((1, 6, 16), 0x7FC0, np.uint16)
        asking = asyncio.ensure_future(
            branch.sequence.attend(0, CASE.queries[0][519:520], out, stream=stuck.stream)
        )
        await turns(100)
        if not asking.done():  # it waits for the stream, as deep as a queue may be
            stuck.go()
        result = await asking
        cutting = asyncio.ensure_future(branch.sequence.truncate(3, stream=stuck.stream))
        await turns(50)
        others = [Branch(swap.sequence(), CASE) for _ in range(2)]
        growing = [asyncio.ensure_future(b.append([*range(300, 640)])) for b in others]
        await turns(300)
        stuck.go()
        await asyncio.gather(cutting, *growing)
        branch.rows = branch.rows[:3]
        await result.done()
        assert (out == wanted[0][519]).all()
        for each in (branch, *others):
            await each.check()
        await asyncio.to_thread(stuck.stream.close)


async def test_bad_lengths_and_forks_in_the_middle_of_a_step() -> None:
    async with watched(config_of(CASE)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(40)])
        for wrong in (-1, 41, True, 1.0, None):
            with pytest.raises(ArgumentError, match="length is"):
                await branch.sequence.truncate(wrong)  # type: ignore[arg-type]
        await branch.sequence.append(0, CASE.keys[0][:20], CASE.values[0][:20])
        used = swap.statistics().device_slots_used
        with pytest.raises(ArgumentError, match="full blocks"):
            branch.sequence.fork()
        assert swap.statistics().device_slots_used == used
        await branch.truncate(40)
        for _ in range(MOST_BRANCHES - 1):
            branch.fork()
        with pytest.raises(OutOfSlots, match="max_sequences"):
            branch.fork()
        await branch.check()


async def test_ids_on_their_way_back_are_waited_for() -> None:
    """A store with room for one branch: what is cut away is taken again at once."""
    config = replace(config_of(CASE, branches=1), capacity_tokens=512)
    async with watched(config) as swap:
        branch = Branch(swap.sequence(), CASE)
        for start in (0, 100, 300):
            await branch.append([*range(start, start + 512 - len(branch.rows))])
            await branch.check()
            await branch.truncate(33)
        await within(lambda: until(lambda: swap.statistics().free_blocks == 30))


def test_blocking_callers_have_the_same_calls() -> None:
    wanted = asyncio.run(alone(CASE, [*range(333), *range(500, 520)]))
    with hsswap.blocking(config_of(CASE), io=MemoryIO()) as swap:
        sequence = swap.sequence()
        sequence.reserve(15)
        for layer in range(3):
            sequence.append(layer, CASE.keys[layer][:400], CASE.values[layer][:400])
        fork = sequence.fork()
        sequence.close()
        fork.truncate(333)
        for layer in range(3):
            part = slice(500, 520)
            fork.append(layer, CASE.keys[layer][part], CASE.values[layer][part])
            result = fork.attend(layer, CASE.queries[layer][part])
            result.synchronize()
            assert (np.asarray(result.out) == wanted[layer][-20:]).all()


async def test_a_plan_made_before_a_cut_reads_nothing_of_its_new_owner() -> None:
    """A question's look-ahead is told to the loop late; by then its blocks are another's."""
    config = config_of(CASE, branches=2, extra_host=8)
    async with watched(config) as swap:
        branch, other = (Branch(swap.sequence(), CASE) for _ in range(2))
        await branch.append([*range(800)])
        await swap.flush()
        swap.mailbox.post(lambda: branch.sequence._plan(ahead))
        query = CASE.queries[0][799:800]
        ahead = branch.sequence._ahead(
            branch.sequence._check_query(0, Given(query, None, None), None)
        )
        await branch.truncate(0)
        await other.append([*range(300, 830)])
        await other.check()
        await other.sequence.close()
        await swap.retiring.settle(branch.sequence.number)
        assert swap.statistics().host_slots_used == 0


async def test_what_others_let_go_is_not_waited_for() -> None:
    """A close, and an append for want of ids: behind what came back, not behind a stream that runs
    nothing, nor behind whatever others let go meanwhile.
    """
    async with watched(config_for(CASE, sequences=3, capacity=1440, extra_host=150)) as swap:
        branches = [Branch(swap.sequence(), CASE) for _ in range(3)]
        for branch, rows in zip(branches, (600, 100, 600), strict=True):
            await branch.append([*range(rows)])
        await swap.flush()
        stuck = Stuck(swap)
        await branches[0].sequence.truncate(500, stream=stuck.stream)
        try:
            await within(branches[1].sequence.close)
            await branches[2].append([*range(600, 800)])
            await branches[2].truncate(300)
            assert swap.statistics().free_blocks == 2
            await within(lambda: branches[2].append([*range(500, 900)]))
            await branches[2].check()
            assert swap.retiring.on_their_way
        finally:
            stuck.go()
        await within(branches[0].sequence.close)
        await asyncio.to_thread(stuck.stream.close)
