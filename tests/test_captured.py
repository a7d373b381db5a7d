"""Steps that an engine captures: the same bits, no look back, and the sequence goes on after."""

from __future__ import annotations

import asyncio
from functools import partial

import numpy as np
import pytest

from hsswap import ArgumentError, BlockIOError, HighSpeedSwap, OutOfBlocks, OutOfSlots
from hsswap.errors import CaptureError, ClosedError, DeviceError
from hsswap.io.memory import Fault, FaultKind
from hsswap.tiers import SlotState
from tests.branches import Branch, alone
from tests.captured_engine import check_row, config_of, decoding, engine_of
from tests.swap_cases import MIXED, SMALL, Case, random_case
from tests.swap_watch import Linked, Stuck, pools_of, turns, until, watched, within

CASE = random_case(SMALL, 900, seed=41)
OTHER = random_case(MIXED, 900, seed=42)


@pytest.mark.parametrize(("resident", "linked"), [(0, False), (7, True), (400, False)])
@pytest.mark.parametrize(("case", "start"), [(CASE, 0), (CASE, 300), (OTHER, 288), (CASE, 303)])
async def test_captured_decode(case: Case, start: int, resident: int, linked: bool) -> None:
    """Token by token through several blocks, and on from there, as if nothing had been captured."""
    tokens = 36
    device = Linked() if linked else None
    async with watched(config_of(case, 640, resident=resident), device=device) as swap:
        branch = Branch(swap.sequence(), case)
        if start:
            await branch.append([*range(start)])
            await swap.flush()
        wanted = await alone(case, [*range(start + tokens)])
        async with decoding(swap, branch.sequence, case, tokens) as (steps, step):
            for row in range(start, start + tokens):
                check_row(step(row), wanted, row)
            assert steps.length.array().tolist() == [start + tokens]
            steps.finish(start + tokens)
        branch.rows = [*range(start + tokens)]
        await branch.check(40)
        await swap.flush()
        await branch.append([*range(700, 740)])
        await branch.check(50)
        await branch.truncate(start + 20)
        await branch.check(10)


@pytest.mark.parametrize("kept", [0, 9, 16, 17, 40])
@pytest.mark.parametrize(("resident", "start"), [(0, 256), (0, 263), (400, 263)])
async def test_what_is_not_finished_is_forgotten(start: int, resident: int, kept: int) -> None:
    async with watched(config_of(CASE, 640, resident=resident)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(start)])
        async with decoding(swap, branch.sequence, CASE, 40) as (steps, step):
            for row in range(start, start + 40):
                step(row)
            if kept:
                steps.finish(start + kept)
        branch.rows = [*range(start + kept)]
        await branch.check()
        await branch.append([*range(800, 830)])
        await branch.check(40)


@pytest.mark.parametrize("resident", [0, 7, 400])
@pytest.mark.parametrize(("case", "start"), [(CASE, 0), (CASE, 303), (OTHER, 288)])
async def test_final_blocks_are_written_while_steps_go_on(
    case: Case, start: int, resident: int
) -> None:
    """Each once, before the steps end, which changes no answer. Without a length to finish at the
    sequence goes on at what was final.
    """
    tokens, final, size = 60, start + 55, case.dims.block_size
    async with watched(config_of(case, 640, resident=resident)) as swap:
        branch = Branch(swap.sequence(), case)
        if start:
            await branch.append([*range(start)])
        await swap.flush()
        before = swap.statistics().blocks_written
        full = case.dims.layers * (final // size - start // size)
        wanted = await alone(case, [*range(start + tokens)])
        async with decoding(swap, branch.sequence, case, tokens) as (steps, step):
            for row in range(start, start + tokens):
                check_row(step(row), wanted, row)
                if row % 9 == 0 and row < final:
                    steps.settle(row + 1)
                    await turns(row % 5)
            steps.settle(final)
            assert steps.least_length == final // size * size
            with pytest.raises(ArgumentError, match="final"):
                steps.finish(steps.least_length - 1)
            await swap.flush()
            assert swap.statistics().blocks_written - before == full
        branch.rows = [*range(final)]
        await branch.check(40)
        await swap.flush()
        assert swap.statistics().blocks_written - before == full
        await branch.append([*range(700, 740)])
        await branch.check(50)
        await branch.truncate(start + 20)
        await branch.check(10)


@pytest.mark.parametrize("reserved", [0, 20, 100])
@pytest.mark.parametrize("kept", [0, 9, 17, 48])
async def test_what_was_taken_for_the_steps_and_not_used_comes_back(
    kept: int, reserved: int
) -> None:
    """What the caller had reserved before stays, but for what the steps filled."""
    async with watched(config_of(CASE, 640, resident=20)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(263)])
        await branch.sequence.reserve(reserved)
        await swap.flush()
        before = swap.statistics()
        held = branch.sequence._reservation.counts()
        async with decoding(swap, branch.sequence, CASE, 48) as (steps, step):
            for row in range(263, 263 + kept):
                step(row)
            assert swap.statistics().free_blocks < before.free_blocks or reserved == 100
            steps.finish(263 + kept)
        await swap.retiring.settle(branch.sequence.number)
        filled = (263 + kept) // 16 - 263 // 16
        left = [max(0, count - filled) for count in held]
        assert branch.sequence._reservation.counts() == left
        ids = max(-(-(263 + kept) // 16), -(-(263 + reserved) // 16))
        assert len(branch.sequence.ids) == ids
        await swap.flush()
        tier = swap.pool_of(0).tier
        dirty = int((tier.state == SlotState.DIRTY).sum())
        assert dirty == sum(left) == swap.pool_of(0).reserved_slots
        branch.rows = [*range(263 + kept)]
        await branch.check(20)
        await branch.append([*range(800, 830)])
        await branch.check(40)


async def test_rounds_with_rejected_rows() -> None:
    """The engine's kernels move the counter; rows that were rejected are written over."""
    random = np.random.default_rng(5)
    start, rows = 297, 5
    async with watched(config_of(CASE, 640)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(start)])
        async with (
            engine_of(swap, CASE, rows) as engine,
            branch.sequence.captured(40, rows=rows, stream=engine.stream) as steps,
        ):
            with engine.capture(steps, advance=0) as graph:
                while len(branch.rows) <= start + 40 - rows:
                    tried = [int(row) for row in random.integers(0, 900, rows)]
                    got = engine.run(graph, tried)
                    wanted = await alone(CASE, branch.rows + tried)
                    for layer, out in enumerate(got):
                        assert (out == wanted[layer][-rows:]).all()
                    accepted = int(random.integers(1, rows + 1))
                    branch.rows = branch.rows + tried[:accepted]
                    steps.length.array()[...] = len(branch.rows)
            steps.finish(len(branch.rows))
        await branch.check(60)


async def test_a_fork_shares_what_is_captured() -> None:
    async with watched(config_of(CASE, 1000)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(300)])
        other = branch.fork()
        async with (
            engine_of(swap, CASE, 1) as engine,
            branch.sequence.captured(30, stream=engine.stream) as steps,
            other.sequence.captured(30, stream=engine.stream) as more,
        ):
            with engine.capture(steps, 1) as graph, engine.capture(more, 1) as second:
                for row in range(30):
                    engine.run(graph, [600 + row])
                    engine.run(second, [700 + row])
            steps.finish(330)
            more.finish(320)
        branch.rows += [*range(600, 630)]
        other.rows += [*range(700, 720)]
        for one in (branch, other):
            await one.check(40)


@pytest.mark.parametrize("extra", [0, 1000])
async def test_a_counter_set_back_writes_into_no_full_block(extra: int) -> None:
    """Whatever the engine counts: a fork holds them, too."""
    async with watched(config_of(CASE, extra)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(300)])
        other = branch.fork()
        async with (
            engine_of(swap, CASE, 1) as engine,
            branch.sequence.captured(30, stream=engine.stream) as steps,
        ):
            steps.advance(-200, stream=engine.stream)
            with engine.capture(steps, 1) as graph:
                for row in range(200):
                    engine.run(graph, [600 + row])
                # Those of the block being filled are the sequence's alone; it writes them again.
                engine.stream.synchronize()
                steps.advance(-12, stream=engine.stream)
                for row in range(288, 300):
                    engine.run(graph, [row])
            steps.finish(300)
        for one in (branch, other):
            await one.check(40)


async def test_others_go_on_beside_captured_steps() -> None:
    """What is held does not count as coming back: others evict what is idle, and get a reason."""
    async with watched(config_of(CASE, 600, spare=4)) as swap:
        branch, other = (Branch(swap.sequence(), CASE) for _ in range(2))
        await branch.append([*range(500)])
        async with branch.sequence.captured(16):
            for first in range(0, 800, 100):
                rows = [*range(first, first + 100)]
                await within(partial(other.append, rows))
            await other.check(30)
            with pytest.raises(OutOfSlots, match=r"raise host_slots by|can be held"):
                await within(lambda: other.sequence.captured(16).__aenter__())
        await branch.check()


@pytest.mark.parametrize("cancelled", [False, True])
async def test_the_end_of_steps_is_a_call_that_closing_waits_for(cancelled: bool) -> None:
    """It frees memory, behind work that runs; the swap frees all of it, and closed the device."""
    async with watched(config_of(CASE, 640), close_sequences=False) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(100)])
        stuck = Stuck(swap)
        freed: list[bool] = []

        async def decode() -> None:
            async with branch.sequence.captured(4) as steps:
                free = steps.free

                def watched_free() -> None:
                    freed.append(not swap._resources)
                    free()

                steps.free = watched_free  # type: ignore[method-assign]
                await begun.wait()
                steps.stream.wait_for(stuck.stream.record())

        begun = asyncio.Event()
        decoding = asyncio.ensure_future(decode())
        await until(lambda: branch.sequence._steps is not None)
        begun.set()
        await turns(20)
        try:
            with pytest.raises(ArgumentError, match="the end of captured steps"):
                await branch.append([1])
            closing = asyncio.ensure_future(swap.close())
            await turns(5)
            if cancelled:
                decoding.cancel()
                await turns(5)
            assert not swap._no_call()
        finally:
            stuck.go()
        await within(lambda: asyncio.wait([closing, decoding]))
        assert decoding.cancelled() == cancelled
        assert freed
        assert not any(freed)


async def test_what_cannot_be_captured() -> None:
    async with watched(config_of(CASE, 640)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(100)])
        sequence = branch.sequence
        with pytest.raises(ArgumentError, match="rows"):
            await sequence.captured(4, rows=17).__aenter__()
        with pytest.raises(OutOfBlocks):
            await sequence.captured(3999).__aenter__()
        await sequence.append(0, CASE.keys[0][:1], CASE.values[0][:1])
        with pytest.raises(ArgumentError, match="100 to 101 tokens"):
            await sequence.captured(4).__aenter__()
        await sequence.truncate(100)
        async with engine_of(swap, CASE, 2) as engine:
            async with sequence.captured(4, stream=engine.stream) as steps:
                for call in (
                    lambda: sequence.append(0, CASE.keys[0][:1], CASE.values[0][:1]),
                    lambda: sequence.truncate(5),
                    lambda: sequence.captured(4).__aenter__(),
                    sequence.close,
                ):
                    with pytest.raises(ArgumentError, match="captured steps"):
                        await call()
                with pytest.raises(ArgumentError, match="opened for 1"):
                    engine.enqueue(steps, 0)
                with pytest.raises(ArgumentError, match="layer is 3"):
                    steps.append(3, engine.keys[0], engine.values[0])
                for length in (99, 105):
                    with pytest.raises(ArgumentError, match="length is"):
                        steps.finish(length)
                assert steps.left_out_mass(0) is None
            for ended in (
                lambda: steps.append(0, engine.keys[0], engine.values[0]),
                lambda: steps.attend(0, engine.queries[0], engine.out[0]),
                lambda: steps.advance(1),
                lambda: steps.finish(100),
                lambda: steps.length,
            ):
                with pytest.raises(ClosedError):
                    ended()
        await branch.check()


async def test_an_end_inside_a_capture_is_refused() -> None:
    """Nothing can be handed over while the stream is captured; the sequence says why it stopped."""
    async with watched(config_of(CASE, 640)) as swap, engine_of(swap, CASE, 1) as engine:
        sequence = swap.sequence()
        await sequence.append(0, CASE.keys[0][:1], CASE.values[0][:1])
        await sequence.truncate(0)
        with pytest.raises(CaptureError), engine.stream.capture():
            async with sequence.captured(4, stream=engine.stream):
                pass


def held_by(swap: HighSpeedSwap) -> tuple[int, ...]:
    """Buffers of the device, ids, device slots, and slots that are kept for what is to come."""
    statistics = swap.statistics()
    kept = [pool.reserved_slots + pool.tier.pinned_count for pool in pools_of(swap)]
    counts = swap.device.live_count, statistics.free_blocks, statistics.device_slots_used
    return *counts, *kept


async def test_a_block_that_cannot_be_read() -> None:
    bad = Fault(FaultKind.ERRNO, count=None, only="read")
    async with watched(config_of(CASE, 640), bad) as swap:
        other, sequence = swap.sequence(), swap.sequence()
        await Branch(other, CASE).append([*range(900)])  # keeps what the host tier keeps
        await Branch(sequence, CASE).append([*range(600)])
        await swap.flush()
        before = held_by(swap)
        with pytest.raises(BlockIOError):
            await sequence.captured(80).__aenter__()
        assert held_by(swap) == before


@pytest.mark.parametrize("steps", range(8))
async def test_an_opening_cancelled_anywhere_holds_nothing(steps: int) -> None:
    async with watched(config_of(CASE, 640)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(600)])
        await swap.flush()
        before = held_by(swap)
        captured = branch.sequence.captured(80)
        opening = asyncio.ensure_future(captured.__aenter__())
        await turns(steps)
        opening.cancel()
        await asyncio.wait([opening])
        if opening.cancelled():
            assert held_by(swap) == before
        else:
            await captured.__aexit__(None, None, None)
            assert swap.device.live_count == before[0]


async def test_a_cancelled_opening_holds_nothing() -> None:
    gate = Fault(FaultKind.HOLD, only="read")
    async with watched(config_of(CASE, 640), gate) as swap:
        other, branch = (Branch(swap.sequence(), CASE) for _ in range(2))
        await other.append([*range(900)])
        await branch.append([*range(600)])
        await swap.flush()
        task = asyncio.ensure_future(branch.sequence.captured(8).__aenter__())
        await until(lambda: "reading=0" not in repr(swap.prefetcher))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.gate.opened.set()
        await other.sequence.close()
        async with branch.sequence.captured(8):
            pass
        await branch.check()


async def test_a_swap_that_closes_under_captured_steps() -> None:
    async with watched(config_of(CASE, 640), close_sequences=False) as swap:
        sequence = swap.sequence()
        await Branch(sequence, CASE).append([*range(300)])
        async with sequence.captured(8) as steps:
            await swap.close()
            with pytest.raises(ClosedError):
                steps.advance(1)


async def test_a_graph_of_steps_that_are_over_is_an_error_on_its_stream_alone() -> None:
    """What it reads is gone: it would be a segmentation fault."""
    async with watched(config_of(CASE, 400)) as swap:
        branch = Branch(swap.sequence(), CASE)
        await branch.append([*range(300)])
        async with engine_of(swap, CASE, 1) as engine:
            async with branch.sequence.captured(20) as steps:
                length = steps.length
                graph = engine.capture(steps, 1)
                engine.run(graph, [300])
                steps.finish(301)
            branch.rows.append(300)
            with pytest.raises(DeviceError, match="a graph over captured steps"):
                engine.run(graph, [301])
            with pytest.raises(ClosedError, match="buffer that was closed"):
                length.array()
            graph.close()
        await branch.check()
