"""Hazards that were found by breaking the swap, one test each: hangs, leaks, untyped errors."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from hsswap import TopK
from hsswap.driver import open_device
from hsswap.driver.base import Stream
from hsswap.errors import (
    ArgumentError,
    DeviceError,
    HsswapError,
    OutOfSpace,
)
from hsswap.io.memory import Fault, FaultKind
from hsswap.loads import Blocks
from tests.swap_cases import SMALL, Case, config_for, random_case, run
from tests.swap_watch import Linked, Stuck, fill, turns, until, watched, within

TOKENS = 800


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(SMALL, TOKENS, seed=41)


async def test_a_slot_of_a_failed_read_that_another_block_got_is_no_failure(case: Case) -> None:
    """Blocks a and b are read ahead; a fails, its slot goes to c; who asks for b and c gets them,
    and no lease stays behind.
    """
    bad = Fault(FaultKind.ERRNO, count=2, only="read", offsets=(0, 4096))  # in the run, and alone
    hold = Fault(FaultKind.HOLD, at=1, only="read", offsets=(4096, 8192))  # b alone
    async with watched(config_for(case), bad, hold) as swap:
        sequence = swap.sequence()
        await fill(sequence, case)
        await swap.flush()
        pool = swap.pool_of(0)
        room = pool.tier.slot_count - 2
        others = Blocks(pool, 0, sequence._indices[4 : 4 + room])
        held = await within(lambda: swap.prefetcher.load(others))
        swap.prefetcher.plan("test", [Blocks(pool, 0, sequence._indices[:2])])
        assert await asyncio.to_thread(hold.gate.reached.wait, 10)
        await until(lambda: pool.tier.free_count > 0)  # a's failure is known
        asking = asyncio.ensure_future(
            swap.prefetcher.load(Blocks(pool, 0, sequence._indices[[1, 2]]))
        )
        await turns(3)
        hold.gate.opened.set()
        got = await within(lambda: asking)
        with swap.lock:
            pool.tier.release(got.slots, scan=True)
            pool.tier.release(held.slots, scan=True)
        swap.prefetcher.pump()


async def test_all_who_starve_are_told(case: Case) -> None:
    """A disk that stays full, and several sequences in the queue for slots: each gets its error."""
    full = Fault(FaultKind.ERRNO, count=None, errno=errno.ENOSPC, only="write")
    async with watched(config_for(case, sequences=4), full) as swap:
        tasks = [asyncio.ensure_future(fill(swap.sequence(), case)) for _ in range(4)]
        ends = await within(lambda: asyncio.gather(*tasks, return_exceptions=True))
        assert all(isinstance(end, OutOfSpace) for end in ends)


async def test_a_plan_of_a_sequence_that_was_closed_meanwhile_is_dropped(case: Case) -> None:
    """try_attend leaves its plan to the loop; by then the ids may be someone else's."""
    wanted = await run(case, config_for(case), [TOKENS])
    async with watched(config_for(case)) as swap:
        sequence = swap.sequence()
        await sequence.append(0, case.keys[0][:60], case.values[0][:60])
        await sequence.append(1, case.keys[1], case.values[1])
        await swap.flush()
        result = sequence.try_attend(0, case.queries[0][59:60])  # from device slots alone
        assert result is not None
        result.synchronize()
        await within(sequence.close)
        other = swap.sequence()  # gets the same ids
        await within(lambda: fill(other, case))
        for layer in range(3):
            result = await within(lambda n=layer: other.attend(n, case.queries[n]))  # type: ignore[misc]
            await result.done()
            assert (np.asarray(result.out) == wanted[layer]).all()


BAD_STREAMS: list[Callable[[Stream], Any]] = [
    lambda foreign: foreign,
    lambda foreign: foreign.handle,
    lambda foreign: 3,
    lambda foreign: [],
    lambda foreign: "default",
]


@pytest.mark.parametrize("make", BAD_STREAMS)
async def test_a_stream_of_nobody_is_refused_before_anything_changes(
    case: Case, make: Callable[[Stream], Any]
) -> None:
    device = open_device("host")
    foreign = device.stream()
    async with watched(config_for(case)) as swap:
        sequence = swap.sequence()
        before = swap.statistics()
        bad = make(foreign)
        with pytest.raises(ArgumentError):
            await sequence.append(0, case.keys[0], case.values[0], stream=bad)
        with pytest.raises(ArgumentError):
            sequence.try_append(0, case.keys[0][:90], case.values[0][:90], stream=bad)
        assert swap.statistics() == before
        await fill(sequence, case)
        with pytest.raises(ArgumentError):
            await sequence.attend(0, case.queries[0], stream=bad)
        with pytest.raises(ArgumentError):
            sequence.try_attend(0, case.queries[0][-1:], stream=bad)
    device.close()


async def test_a_closed_stream_is_refused_and_the_sequence_goes_on(case: Case) -> None:
    wanted = await run(case, config_for(case), [TOKENS])
    async with watched(config_for(case)) as swap:
        sequence = swap.sequence()
        stream = swap.device.stream()
        await fill(sequence, case, stream=stream.handle)
        await asyncio.to_thread(stream.close)
        for bad in (stream, stream.handle):
            with pytest.raises(HsswapError):
                await sequence.append(0, case.keys[0], case.values[0], stream=bad)
            with pytest.raises(HsswapError):
                await sequence.attend(0, case.queries[0], stream=bad)
        for layer in range(3):
            result = await within(lambda n=layer: sequence.attend(n, case.queries[n]))  # type: ignore[misc]
            await result.done()
            assert (np.asarray(result.out) == wanted[layer]).all()


async def test_a_stream_object_that_is_gone_does_not_name_another(case: Case) -> None:
    """Objects with __cuda_stream__ are known by their handle, not by where they lie in memory."""

    class Handle:
        def __init__(self, stream: Stream) -> None:
            self.number = stream.handle

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.number

    async with watched(config_for(case)) as swap:
        streams = [swap.device.stream() for _ in range(50)]
        for stream in streams:
            assert swap.stream_of(Handle(stream)).handle == stream.handle
        for stream in streams[1:]:
            stream.close()
        assert swap.stream_of(streams[0]) is swap.stream_of(streams[0])
        last = swap.device.stream()
        swap.stream_of(last)
        assert set(swap._streams) == {streams[0].handle, last.handle}  # the closed ones are gone
        streams[0].close()
        last.close()


async def test_an_output_that_cannot_be_written_is_refused(case: Case) -> None:
    """It would fail on the stream, and with it everything that comes later there."""
    async with watched(config_for(case)) as swap:
        sequence = swap.sequence()
        await fill(sequence, case)
        out = np.zeros((1, 6, 16), np.uint16)
        out.flags.writeable = False
        with pytest.raises(ArgumentError, match="read-only"):
            await sequence.attend(0, case.queries[0][-1:], out)
        await (await sequence.attend(0, case.queries[0][-1:])).done()


@pytest.mark.parametrize("top_k", [None, TopK(2)])
@pytest.mark.parametrize("at", range(4))
async def test_an_append_that_fails_half_way_breaks_its_sequence_alone(
    case: Case, monkeypatch: pytest.MonkeyPatch, at: int, top_k: TopK | None
) -> None:
    """A launch is refused (a full queue): slots come back at close, nothing unfilled is written."""
    wanted = await run(case, config_for(case), [TOKENS])
    async with watched(config_for(case, sequences=2, extra_device=100, capacity=2000)) as swap:
        broken, other = swap.sequence(top_k=top_k), swap.sequence()
        await broken.append(0, case.keys[0][:24], case.values[0][:24])
        calls = [0]

        def failing(name: str) -> None:
            launch = getattr(swap.device, name)

            def call(*arguments: Any) -> None:
                calls[0] += 1
                if calls[0] > at:
                    raise DeviceError("the queue is full")
                launch(*arguments)

            monkeypatch.setattr(swap.device, name, call)

        for name in ("append", "scatter", "encode"):
            failing(name)
        with suppress(DeviceError):
            await broken.append(0, case.keys[0][24:60], case.values[0][24:60])
        monkeypatch.undo()
        if calls[0] > at:
            with pytest.raises(DeviceError, match="half-way"):
                await broken.append(0, case.keys[0][24:60], case.values[0][24:60])
            with pytest.raises(DeviceError):
                await within(swap.flush)
        await within(broken.close)
        await within(swap.flush)
        await fill(other, case)
        result = await other.attend(2, case.queries[2])
        await result.done()
        assert (np.asarray(result.out) == wanted[2]).all()


async def test_a_block_that_the_device_did_not_fill_never_reaches_the_disk(case: Case) -> None:
    async with watched(config_for(case)) as swap:
        sequence, stream = swap.sequence(), swap.device.stream()

        def fails(_work: object, _scratch: object) -> None:
            raise ValueError("broken")

        stream.enqueue("fails", fails, None)  # type: ignore[attr-defined]
        await sequence.append(0, case.keys[0][:64], case.values[0][:64], stream=stream)
        for _ in range(3):
            with pytest.raises(DeviceError):
                await within(swap.flush)
        assert swap.statistics().blocks_written == 0
        await within(sequence.close)
        await asyncio.to_thread(stream.close)


async def test_an_attend_whose_launch_is_refused_holds_nothing(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = await run(case, config_for(case), [TOKENS])
    async with watched(config_for(case)) as swap:
        sequence = swap.sequence()
        await fill(sequence, case)

        def refused(*_: object) -> None:
            raise DeviceError("the queue is full")

        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(swap.device, "attend", refused)
                with pytest.raises(DeviceError):
                    await within(lambda: sequence.attend(0, case.queries[0]))
        result = await within(lambda: sequence.attend(0, case.queries[0]))
        await result.done()
        assert (np.asarray(result.out) == wanted[0]).all()


@pytest.mark.parametrize("top_k", [None, TopK(2)])
async def test_no_slot_is_refilled_under_a_slow_reader(case: Case, top_k: TopK | None) -> None:
    """A stream stands still with tiles enqueued while others want their slots and the sequence is
    closed: its answer comes out right when it goes on.
    """
    wanted = await run(case, config_for(case), [TOKENS])
    config = config_for(case, sequences=3, extra_device=40)
    async with watched(config) as swap:
        slow, others = swap.sequence(), [swap.sequence(top_k=top_k), swap.sequence()]
        for sequence in (slow, *others):
            await fill(sequence, case)
        await swap.flush()
        stuck = Stuck(swap)
        out = np.zeros((1, 6, 16), np.uint16)
        first = asyncio.ensure_future(
            slow.attend(0, case.queries[0][-1:], out, stream=stuck.stream.handle)
        )
        await turns(100)
        asking = [
            asyncio.ensure_future(sequence.attend(1, case.queries[1][-7:])) for sequence in others
        ]
        await turns(100)
        stuck.go()
        await within(lambda: asyncio.gather(first, *asking))
        await within(slow.close)
        await first.result().done()
        assert (out == wanted[0][-1:]).all()
        for call in asking:
            await call.result().done()
            assert (np.asarray(call.result().out) == wanted[1][-7:]).all()
        await asyncio.to_thread(stuck.stream.close)


async def test_who_waits_for_slots_is_not_starved_by_those_who_need_none(case: Case) -> None:
    """Two sequences whose blocks are in the host tier attend in turn, so that some lease is always
    held; a third, which needs room, comes to its turn all the same.
    """
    config = config_for(case, sequences=3, extra_device=100, extra_host=40)
    async with watched(config) as swap:
        hungry, busy, other = swap.sequence(), *(swap.sequence(top_k=TopK(2)) for _ in range(2))
        await fill(hungry, case)
        for sequence in (busy, other):
            await sequence.append(0, case.keys[0][:500], case.values[0][:500])
        await swap.flush()
        row = case.queries[0][499:500]
        stuck = Stuck(swap)
        result = busy.try_attend(0, row, exact=True, stream=stuck.stream)
        assert result is not None  # all in the host tier, and leased until the stream goes on
        asking = asyncio.ensure_future(hungry.attend(2, case.queries[2][-1:]))
        await until(lambda: swap.prefetcher.crowded)
        assert other.try_attend(0, row, exact=True) is None
        behind = asyncio.ensure_future(other.attend(0, row, exact=True))
        await turns(20)
        assert not behind.done()
        stuck.go()
        for call in (asking, behind):
            await (await within(lambda task=call: task)).done()  # type: ignore[misc]
        await asyncio.to_thread(stuck.stream.close)


async def test_a_ring_region_knows_of_a_gather_whose_attend_was_refused(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next user of the region, on whatever stream, must come after that gather."""
    async with watched(config_for(case), device=Linked()) as swap:
        sequence = swap.sequence()
        await fill(sequence, case)

        def refused(*_: object) -> None:
            raise DeviceError("the queue is full")

        with monkeypatch.context() as patch:
            patch.setattr(swap.device, "attend", refused)
            with pytest.raises(DeviceError):
                await within(lambda: sequence.attend(0, case.queries[0]))
        assert [region.last_read is not None for region in swap.pool_of(0).ring] == [True, False]


async def test_a_gather_waits_for_the_append_that_fills_its_host_slots(case: Case) -> None:
    """Gathers run in a stream of their own, beside what the caller has enqueued."""
    wanted = await run(case, config_for(case), [TOKENS])
    async with watched(config_for(case, extra_host=50), device=Linked()) as swap:
        stuck, sequence = Stuck(swap), swap.sequence()
        await sequence.append(0, case.keys[0], case.values[0], stream=stuck.stream)
        result = await within(lambda: sequence.attend(0, case.queries[0][-8:], stream=stuck.stream))
        copies = swap.pool_of(0).copies
        assert copies is not None
        assert not copies.record().is_done()
        stuck.go()
        await result.done()
        assert (np.asarray(result.out) == wanted[0][-8:]).all()
        stuck.stream.close()


async def test_a_gather_from_clean_slots_does_not_wait_for_the_caller(case: Case) -> None:
    async with watched(config_for(case, extra_host=50), device=Linked()) as swap:
        sequence = swap.sequence()
        await sequence.append(0, case.keys[0][:500], case.values[0][:500])  # the ring's two tiles
        await swap.flush()
        stuck = Stuck(swap)
        result = await within(lambda: sequence.attend(0, case.queries[0][:8], stream=stuck.stream))
        copies = swap.pool_of(0).copies
        assert copies is not None
        await within(copies.record().wait)
        assert not result.event.is_done()
        stuck.go()
        await result.done()
        stuck.stream.close()


@pytest.mark.parametrize("limit", range(3, 40, 3))
async def test_a_full_queue_is_a_typed_error_and_leaves_nothing(
    case: Case, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """The caller's stream stands still and its queue fills up, at any point of a call."""
    wanted = await run(case, config_for(case), [TOKENS])
    async with watched(config_for(case, sequences=2, capacity=2000)) as swap:
        stuck, sequence, other = Stuck(swap), swap.sequence(), swap.sequence()
        with monkeypatch.context() as patch:
            patch.setattr("hsswap.driver.host_stream.QUEUE_LIMIT", limit)
            refused = 0
            for start in range(0, 200, 10):
                part = slice(start, start + 10)
                try:
                    await sequence.append(
                        0, case.keys[0][part], case.values[0][part], stream=stuck.stream
                    )
                    await sequence.attend(0, case.queries[0][part], stream=stuck.stream)
                except DeviceError:
                    refused += 1
            assert refused
            closing = asyncio.ensure_future(sequence.close())
            await turns(20)
            assert not closing.done()
            stuck.go()
            await within(lambda: closing)
        await fill(other, case)
        result = await other.attend(0, case.queries[0])
        await result.done()
        assert (np.asarray(result.out) == wanted[0]).all()
        await asyncio.to_thread(stuck.stream.close)
