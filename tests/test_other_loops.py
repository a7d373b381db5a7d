"""Calls on another event loop than the swap's: an error that says so, and nothing has changed."""

from __future__ import annotations

import asyncio
import gc
import inspect
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import uvloop

from hsswap import ArgumentError, ClosedError, HighSpeedSwap, Sequence
from hsswap.io.memory import MemoryIO
from tests.branches import alone
from tests.swap_cases import SMALL, config_for, random_case
from tests.swap_watch import fill, watched, within

CASE = random_case(SMALL, 300, seed=23)
ROW = CASE.queries[0][:1]
LOOPS = [asyncio.new_event_loop, uvloop.new_event_loop]


async def enter(opened: Any) -> None:
    async with opened:
        pass


OF_SEQUENCE: dict[str, Callable[[Sequence], Awaitable[object]]] = {
    "append": lambda s: s.append(0, CASE.keys[0][:9], CASE.values[0][:9]),
    "attend": lambda s: s.attend(0, ROW),
    "truncate": lambda s: s.truncate(100),
    "reserve": lambda s: s.reserve(1),
    "commit": lambda s: s.commit(range(300)),
    "captured": lambda s: enter(s.captured(8)),
    "look_ahead": lambda s: s.look_ahead(0, ROW),
    "close": lambda s: s.close(),
}
BLOCK: dict[str, Any] = {
    "layer": 0,
    "k_block_host": CASE.keys[0][:16],
    "v_block_host": CASE.values[0][:16],
}
ATTENDED: dict[str, Any] = {"layer": 0, "q_dev": ROW[0], "output_dev": ROW[0].copy()}
OF_SWAP: dict[str, Callable[[HighSpeedSwap, Sequence, int], Awaitable[object]]] = {
    "attend_batch": lambda w, s, _: w.attend_batch(0, [s], ROW, ROW.copy()),
    "open_prefix": lambda w, _s, _b: w.open_prefix(range(300)),
    "flush": lambda w, _s, _b: w.flush(),
    "offload_block": lambda w, _, b: w.offload_block(block=b, **BLOCK),
    "offload_block_on_stream": lambda w, _, b: w.offload_block_on_stream(
        stream=None, block=b, **BLOCK
    ),
    "offload_block_no_predict_on_stream": lambda w, _, b: w.offload_block_no_predict_on_stream(
        stream=None, block=b, **BLOCK
    ),
    "attend_layer": lambda w, _, b: w.attend_layer(seq_block_ids=[b], **ATTENDED),
    "attend_layer_on_stream": lambda w, _, b: w.attend_layer_on_stream(
        stream=None, seq_block_ids=[b], **ATTENDED
    ),
    "attend_layer_on_stream_with_q_pos": lambda w, _, b: w.attend_layer_on_stream_with_q_pos(
        stream=None, seq_block_ids=[b], last_block_valid_slots=16, **ATTENDED
    ),
    "inc_disk_ref": lambda w, _, b: w.inc_disk_ref(block=b),
    "dec_disk_ref": lambda w, _, b: w.dec_disk_ref(block=b),
    "close": lambda w, _s, _b: w.close(),
}
WAITS_FOR_NOTHING = {"alloc_disk_block_id"}


def awaited_calls(kind: type) -> set[str]:
    """Names of what an object of the class is awaited for."""
    return {
        name
        for name, call in inspect.getmembers(kind, inspect.isfunction)
        if name[0] != "_" and inspect.iscoroutinefunction(inspect.unwrap(call))
    }


def test_every_awaited_call_is_here() -> None:
    inside = {"adopt", "launched", "quiet"}
    assert awaited_calls(Sequence) - inside == OF_SEQUENCE.keys() - {"captured"}
    inside = {"commit_ids", "release_sequence"}
    assert awaited_calls(HighSpeedSwap) - inside - WAITS_FOR_NOTHING == OF_SWAP.keys()


@pytest.mark.parametrize("new_loop", LOOPS)
async def test_calls_from_the_loop_of_another_thread(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    config = config_for(CASE, sequences=2)
    async with watched(config) as swap, swap.sequence() as sequence:
        await fill(sequence, CASE)
        block = await swap.alloc_disk_block_id()
        await swap.offload_block(block=block, **BLOCK)
        await swap.flush()
        before = swap.statistics()

        async def elsewhere() -> None:
            calls = [call(sequence) for call in OF_SEQUENCE.values()]
            calls += [call(swap, sequence, block) for call in OF_SWAP.values()]
            for call in calls:
                with pytest.raises(ArgumentError, match="opened on another event loop; open, use"):
                    await call

        def run() -> None:
            with asyncio.Runner(loop_factory=new_loop) as runner:
                runner.run(elsewhere())

        await within(lambda: asyncio.to_thread(run))
        assert swap.statistics() == before
        wanted = await alone(CASE, list(range(CASE.tokens)))
        for layer in range(SMALL.layers):
            result = await sequence.attend(layer, CASE.queries[layer][-9:])
            await result.done()
            assert (np.asarray(result.out) == wanted[layer][-9:]).all()
        await swap.dec_disk_ref(block=block)


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize(
    ("io", "persist"),
    [(io, persist) for io in ("posix", "uring", "auto") for persist in (False, True)]
    + [("memory", False)],
)
def test_a_swap_whose_loop_is_closed_is_closed_from_another(
    new_loop: Callable[[], asyncio.AbstractEventLoop], io: str, persist: bool, tmp_path: Path
) -> None:
    place = tmp_path / "store"
    directory = None if io == "memory" else place
    config = replace(config_for(CASE), io=io, persist=persist, directory=directory)

    async def fill_and_leave() -> tuple[HighSpeedSwap, Sequence]:
        swap = await HighSpeedSwap.create(config)
        sequence = swap.sequence()
        await fill(sequence, CASE)
        await sequence.commit(range(300))
        await sequence.attend(0, ROW)
        return swap, sequence

    with asyncio.Runner(loop_factory=new_loop) as runner:
        swap, sequence = runner.run(fill_and_leave())
    for _ in range(2):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(swap.close())
    with pytest.raises(ClosedError):
        sequence.try_attend(0, ROW)
    assert place.exists() == persist

    async def found() -> int:
        async with HighSpeedSwap.open(config) as again:
            return (await again.open_prefix(range(300))).length

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(found()) == (288 if persist else 0)


@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("io", ["posix", "uring"])
@pytest.mark.parametrize("here", [True, False], ids=["here", "another thread"])
def test_work_that_is_under_way_when_the_loop_closes_ends_first(
    new_loop: Callable[[], asyncio.AbstractEventLoop], here: bool, io: str, tmp_path: Path
) -> None:
    config = replace(config_for(CASE, sequences=2), io=io, directory=tmp_path / "store")
    gate = Event()

    async def begin() -> tuple[HighSpeedSwap, list[asyncio.Task[Any]]]:
        swap = await HighSpeedSwap.create(config)
        sequence, other = swap.sequence(), swap.sequence()
        await fill(sequence, CASE)
        await swap.flush()
        stream: Any = swap.stream_of(None)
        stream.enqueue("waits", lambda work, scratch: gate.wait(), None)
        await other.append(0, CASE.keys[0][:64], CASE.values[0][:64])
        calls: list[Any] = [sequence.attend(0, ROW), swap.flush(), other.close()]
        tasks = [asyncio.ensure_future(call) for call in calls]
        for _ in range(9):
            await asyncio.sleep(0)
        return swap, tasks

    own = new_loop()
    swap, tasks = own.run_until_complete(begin())
    own.close()
    assert not all(task.done() for task in tasks)

    def close() -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            closing = runner.get_loop().create_task(swap.close())
            runner.run(asyncio.sleep(0))
            assert not closing.done()
            gate.set()
            runner.run(asyncio.wait_for(closing, 60))

    if here:
        close()
    else:
        with ThreadPoolExecutor(1) as threads:
            threads.submit(close).result()
    for task in tasks:
        task._log_destroy_pending = False  # type: ignore[attr-defined]


# What asyncio says of tasks that had no turn before their loop was closed.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("new_loop", LOOPS)
@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize("io", ["posix", "uring"])
def test_a_close_is_given_up_with_its_loop_anywhere(
    new_loop: Callable[[], asyncio.AbstractEventLoop], io: str, persist: bool, tmp_path: Path
) -> None:
    """Another one does it anew, and what is left of the first is no hindrance, whenever it goes."""
    config = replace(config_for(CASE), io=io, persist=persist, directory=tmp_path / "store")

    async def begin(turns: int) -> tuple[HighSpeedSwap, asyncio.Task[None]]:
        swap = await HighSpeedSwap.create(config)
        sequence = swap.sequence()
        await fill(sequence, CASE)  # some of it is on its way to the disk
        await sequence.commit(range(300))
        closing = asyncio.ensure_future(swap.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        return swap, closing

    async def end(swap: HighSpeedSwap, given_up: list[asyncio.Task[None]], turns: int) -> None:
        closing = asyncio.ensure_future(swap.close())
        for _ in range(turns):
            await asyncio.sleep(0)
        given_up.clear()
        gc.collect()
        await asyncio.wait_for(closing, 60)

    async def found() -> int:
        async with HighSpeedSwap.open(config) as again:
            return (await again.open_prefix(range(300))).length

    for turns in (0, 1, 2, 3, 5, 8, 13, 21, 34):
        own = new_loop()
        swap, task = own.run_until_complete(begin(turns))
        own.close()
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        given_up = [task]
        del task
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(end(swap, given_up, turns % 7))
        with asyncio.Runner(loop_factory=new_loop) as runner:
            assert runner.run(found()) == (288 if persist else 0)


@pytest.mark.parametrize("new_loop", LOOPS)
def test_an_asyncio_run_for_each_call(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """What a newcomer writes."""
    own = new_loop()
    swap = own.run_until_complete(HighSpeedSwap.create(config_for(CASE), io=MemoryIO()))
    sequence = swap.sequence()
    for call in (fill(sequence, CASE), sequence.close(), swap.close()):
        with (
            asyncio.Runner(loop_factory=new_loop) as runner,
            pytest.raises(ArgumentError, match=r"inside one asyncio\.run"),
        ):
            runner.run(call)
    with pytest.raises(ArgumentError, match="another event loop"):  # nor a loop of asyncio at all
        sequence.attend(0, ROW).send(None)
    own.run_until_complete(fill(sequence, CASE))
    own.run_until_complete(swap.close())
    own.close()
