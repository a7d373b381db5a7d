"""BlockStore: opening and closing, cancelled or interrupted anywhere."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hsswap.errors import (
    ClosedError,
    CorruptBlock,
)
from hsswap.io import BlockStore
from hsswap.io.memory import Fault, FaultKind
from tests.io.support import (
    BLOCK,
    DIMS,
    Outcome,
    Pages,
    Reading,
    begin_write,
    fresh,
    memory_store,
    pattern,
    until,
    write,
)


async def test_what_never_ends_ends_with_close() -> None:
    store = await memory_store(Fault(FaultKind.NEVER, only="read", count=None))
    indices = fresh(store, 40)
    await write(store, 0, indices, pattern(40, BLOCK, 1))
    first = Reading(store, 0, indices)
    behind = begin_write(store, 0, indices[3:5], pattern(2, BLOCK, 2))
    last = Reading(store, 0, indices[4:6])
    await store.close()
    for outcome in (first.outcome, behind, last.outcome):
        assert outcome.ended
        assert {type(error) for error in outcome.errors.values()} == {ClosedError}
    assert store.statistics().in_flight == 0


async def test_close_ends_everything_held_back() -> None:
    hold = Fault(FaultKind.HOLD, only="create")
    store = await memory_store(hold, limit=2)
    indices = fresh(store, 64)
    waiting_for_file = begin_write(store, 0, indices, pattern(64, BLOCK, 1))
    waiting_for_write = Reading(store, 0, indices[5:9])
    unknown = Reading(store, 1, indices[:1])
    closing = asyncio.ensure_future(store.close())
    await closing
    assert waiting_for_file.ended
    assert waiting_for_write.outcome.ended
    assert isinstance(unknown.outcome.errors[0], CorruptBlock)
    assert store.statistics().in_flight == 0
    assert "closed" in repr(store)
    with pytest.raises(ClosedError):
        Reading(store, 0, indices[:1])


@pytest.mark.parametrize("steps", range(12))
async def test_opening_may_be_cancelled_anywhere(tmp_path: Path, steps: int) -> None:
    opening = asyncio.ensure_future(BlockStore.open(DIMS, tmp_path / "store", 300, io="posix"))
    for _ in range(steps):
        await asyncio.sleep(0)
    opening.cancel()
    try:
        store = await opening
    except asyncio.CancelledError:
        assert not (tmp_path / "store").exists()
    else:
        await store.close()


async def test_a_cancelled_owner_closes_with_transfers_in_flight(tmp_path: Path) -> None:
    outcomes: list[Outcome] = []

    async def use() -> None:
        async with await BlockStore.open(DIMS, tmp_path / "store", 300, io="posix") as store:
            indices = fresh(store, 100)
            outcomes.append(begin_write(store, 0, indices, pattern(100, BLOCK, 1)))
            outcomes.append(Reading(store, 0, indices).outcome)
            await asyncio.get_running_loop().create_future()

    task = asyncio.ensure_future(use())
    await until(lambda: len(outcomes) == 2)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()  # again, while closing
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(outcome.ended for outcome in outcomes)
    assert not (tmp_path / "store").exists()


def test_closing_after_an_interrupted_loop(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    outcomes: list[Outcome] = []

    async def begin() -> BlockStore:
        store = await BlockStore.open(DIMS, tmp_path / "store", 300, io="posix")
        indices = fresh(store, 64)
        pages = Pages(64, BLOCK)

        def interrupt(positions: Any, error: object) -> None:
            raise KeyboardInterrupt

        store.write(0, indices, pages.addresses, owner=pages, on_done=interrupt)
        outcomes.append(begin_write(store, 1, indices, pattern(64, BLOCK, 1)))
        return store

    store = loop.run_until_complete(begin())
    with pytest.raises(KeyboardInterrupt):
        loop.run_forever()
    loop.run_until_complete(store.close())
    assert outcomes[0].ended
    assert not (tmp_path / "store").exists()
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


async def test_a_store_left_open_warns() -> None:
    kept: list[BlockStore] = [await memory_store()]
    io = kept[0]._io
    with pytest.warns(ResourceWarning, match="was not closed"):
        kept.clear()  # freed at once: nothing else may hold a store
    await io.close()
