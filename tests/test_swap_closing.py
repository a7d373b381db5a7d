"""Closing a swap whatever is going on: slow streams, cancelled closers, threads under load."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest

import hsswap
from hsswap import HighSpeedSwap
from hsswap.driver import open_device
from hsswap.errors import ClosedError, HsswapError
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from hsswap.loop import Mailbox
from hsswap.sync import _LoopThread
from tests.swap_cases import SMALL, Case, config_for, random_case
from tests.swap_watch import Stuck, fill, turns, watched, within

TOKENS = 800


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(SMALL, TOKENS, seed=43)


async def test_closing_waits_for_work_on_the_callers_streams(case: Case) -> None:
    """An attend has enqueued tiles on a slow stream of the caller and waits for the disk when the
    swap is closed: its memory must outlive that work.
    """
    never = Fault(FaultKind.NEVER, at=1, count=None, only="read")
    device = open_device("host")
    swap = await HighSpeedSwap.create(
        config_for(case, extra_host=40), io=MemoryIO([never]), device=device
    )
    sequence = swap.sequence()
    await fill(sequence, case)
    await swap.flush()
    stuck = Stuck(swap)
    freed_early: list[bool] = []
    free = swap._free

    def watched_free() -> None:
        freed_early.append(not stuck.gone)
        free()

    swap._free = watched_free  # type: ignore[method-assign]
    attending = asyncio.ensure_future(sequence.attend(0, case.queries[0][-1:], stream=stuck.stream))
    await turns(50)
    assert not attending.done()
    closing = asyncio.ensure_future(swap.close())
    for _ in range(200):
        await asyncio.to_thread(bool)
    assert not closing.done()
    stuck.go()
    await within(lambda: closing)
    with pytest.raises(HsswapError):
        await within(lambda: attending)
    assert device.live_count == 0
    assert freed_early == [False]


async def test_a_cancelled_close_closes_all_the_same(case: Case) -> None:
    hold = Fault(FaultKind.HOLD, only="write")
    for steps in range(12):
        device = open_device("host")
        swap = await HighSpeedSwap.create(config_for(case), io=MemoryIO([hold]), device=device)
        sequence = swap.sequence()
        await sequence.append(0, case.keys[0][:64], case.values[0][:64])
        first, second = (asyncio.ensure_future(swap.close()) for _ in range(2))
        await turns(steps)
        first.cancel()
        hold.gate.opened.set()
        await within(lambda task=second: task)  # type: ignore[misc]
        assert device.live_count == 0  # the second, too, returns only when all is closed
        with suppress(asyncio.CancelledError):
            await within(lambda task=first: task)  # type: ignore[misc]
        assert device.live_count == 0


async def test_a_cancelled_create_leaves_nothing(case: Case) -> None:
    for steps in range(40):
        device = open_device("host")
        creating = asyncio.ensure_future(
            HighSpeedSwap.create(config_for(case), io=MemoryIO(), device=device)
        )
        for _ in range(steps):
            await asyncio.sleep(0)
            if steps % 3 == 0:
                await asyncio.to_thread(bool)
        creating.cancel()
        await asyncio.wait([creating], timeout=20)
        if not creating.cancelled():
            await creating.result().close()
        assert device.live_count == 0


def blocking_config(case: Case, sequences: int = 2) -> hsswap.SwapConfig:
    return config_for(case, sequences=sequences)


def test_blocking_calls_after_the_end_are_typed_errors(case: Case) -> None:
    with hsswap.blocking(blocking_config(case), io=MemoryIO()) as swap:
        sequence = swap.sequence()
    sequence.close()
    with pytest.raises(ClosedError):
        sequence.append(0, case.keys[0], case.values[0])
    with pytest.raises(ClosedError):
        sequence.attend(0, case.queries[0])
    with pytest.raises(ClosedError):
        swap.flush()
    with pytest.raises(ClosedError):
        swap.sequence()


def work(
    case: Case,
    sequence: hsswap.BlockingSequence,
    going: threading.Barrier,
    ends: list[BaseException | None],
) -> None:
    """A caller's thread: append and attend to the end; its error, or None, goes to ``ends``."""
    going.wait(10)
    try:
        for start in range(0, TOKENS, 40):
            part = slice(start, start + 40)
            for layer in range(3):
                sequence.append(layer, case.keys[layer][part], case.values[layer][part])
                sequence.attend(layer, case.queries[layer][part]).synchronize()
    except BaseException as error:
        ends.append(error)
    else:
        ends.append(None)


def test_leaving_the_block_under_load_ends_every_thread_with_a_typed_error(case: Case) -> None:
    for delay in range(0, 40, 8):
        ends: list[BaseException | None] = []
        going = threading.Barrier(5)
        with hsswap.blocking(blocking_config(case, 4), io=MemoryIO()) as swap:
            threads = [
                threading.Thread(
                    target=work, args=(case, swap.sequence(), going, ends), daemon=True
                )
                for _ in range(4)
            ]
            for thread in threads:
                thread.start()
            going.wait(10)
            for _ in range(delay):
                swap.flush()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        assert all(end is None or isinstance(end, HsswapError) for end in ends), ends


async def test_one_message_that_fails_does_not_silence_the_others() -> None:
    told: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))
    mailbox = Mailbox(loop)
    seen: list[int] = []

    def fails() -> None:
        raise ValueError("one of three")

    for message in (lambda: seen.append(1), fails, lambda: seen.append(2)):
        mailbox.post(message)
    await turns(3)
    assert seen == [1, 2]
    assert len(told) == 1


def test_the_loops_thread_ends_only_when_every_call_has() -> None:
    loop = _LoopThread()
    begun = threading.Event()
    ends: list[str] = []

    async def long() -> str:
        begun.set()
        await turns(500)
        return "done"

    caller = threading.Thread(target=lambda: ends.append(loop.run(long())), daemon=True)
    caller.start()
    assert begun.wait(10)
    loop.close()
    caller.join(10)
    assert ends == ["done"]
    with pytest.raises(ClosedError):
        loop.run(long())


def test_a_post_to_a_loop_that_is_closed_is_dropped() -> None:
    """It comes from a device's thread, which would die of an exception."""
    loop = asyncio.new_event_loop()
    mailbox = Mailbox(loop)
    loop.close()
    for _ in range(2):
        mailbox.post(lambda: None)


async def test_flush_waits_for_what_came_before_it_alone(case: Case) -> None:
    """Else it never returns while somebody goes on appending."""
    hold = Fault(FaultKind.HOLD, only="write")
    never = Fault(FaultKind.NEVER, at=1, count=None, only="write")
    async with watched(config_for(case), hold, never, close_sequences=False) as swap:
        sequence = swap.sequence()
        await sequence.append(0, case.keys[0][:64], case.values[0][:64])
        flushing = asyncio.ensure_future(swap.flush())
        await turns(2)
        await sequence.append(0, case.keys[0][64:96], case.values[0][64:96])
        hold.gate.opened.set()
        await within(lambda: flushing)
