"""BlockStore: bytes come back, in the order of the calls; arguments are checked."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from hsswap.config import ModelDims
from hsswap.errors import (
    ArgumentError,
    CorruptBlock,
)
from hsswap.io import BlockStore
from hsswap.io.base import Priority
from hsswap.io.layout import MAX_READ_RUN_BYTES, MAX_RUN_BYTES
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
    read,
    write,
)

RUN_BLOCKS = MAX_RUN_BYTES // BLOCK


async def test_every_layer_in_random_order(store: BlockStore) -> None:
    indices = fresh(store, 300)  # two segments
    content = [pattern(300, store.block_bytes(layer), layer) for layer in range(DIMS.layers)]
    random = np.random.default_rng(7)
    for layer in range(DIMS.layers):
        order = random.permutation(300)
        outcome = await write(store, layer, indices[order], content[layer][order])
        assert not outcome.errors
    for layer in range(DIMS.layers):
        order = random.permutation(300)[:120]
        found, outcome = await read(store, layer, indices[order])
        assert not outcome.errors
        assert np.array_equal(found, content[layer][order])
    statistics = store.statistics()
    assert statistics.blocks_written == 900
    assert statistics.blocks_read == 360
    assert statistics.bytes_read == 120 * DIMS.id_bytes
    assert (statistics.errors, statistics.segment_files) == (0, 2)


async def test_neighbours_travel_together(store: BlockStore) -> None:
    indices = fresh(store, 130)
    await write(store, 0, indices, pattern(130, BLOCK, 1))
    assert store.statistics().write_calls == -(-130 // RUN_BLOCKS)
    _, outcome = await read(store, 0, indices[[3, 1, 2, 100, 7, 99, 40]])
    assert store.statistics().read_calls == 4  # 1-3, 7, 40, 99-100
    assert sorted(position for listed, _ in outcome.reports for position in listed) == [*range(7)]
    assert len(outcome.reports) <= 4  # runs that end together are reported together
    before = store.statistics().read_calls
    await read(store, 0, indices)
    assert store.statistics().read_calls - before == -(-130 // (MAX_READ_RUN_BYTES // BLOCK))


async def test_the_same_block_twice_in_a_call(store: BlockStore) -> None:
    indices = fresh(store, 2)[[0, 1, 0]]
    content = pattern(3, BLOCK, 1)
    await write(store, 0, indices, content)  # the later one wins
    found, _ = await read(store, 0, indices)
    assert np.array_equal(found, content[[2, 1, 2]])


async def test_nothing_asked_nothing_done(store: BlockStore) -> None:
    empty = np.empty(0, np.int64)
    _, outcome = await read(store, 0, empty)
    await asyncio.sleep(0)
    assert outcome.reports == []
    assert store.statistics().read_calls == 0


async def test_more_runs_than_the_backend_takes() -> None:
    async with await memory_store(limit=3) as store:
        indices = fresh(store, 64)
        content = pattern(64, BLOCK, 1)
        await write(store, 0, indices, content)
        scattered = indices[::2]
        found, outcome = await read(store, 0, scattered)
        assert not outcome.errors
        assert np.array_equal(found, content[::2])
        assert store.statistics().read_calls == 32


async def test_a_needed_read_overtakes_the_backlog() -> None:
    hold = Fault(FaultKind.HOLD, only="read")
    async with await memory_store(hold, limit=2) as store:
        indices = fresh(store, 64)
        await write(store, 0, indices, pattern(64, BLOCK, 1))
        order: list[str] = []
        pages = Pages(33, BLOCK)

        def note(name: str) -> Any:
            return lambda positions, error: order.append(name)

        first = Reading(store, 0, indices[:1])
        await asyncio.get_running_loop().run_in_executor(None, hold.gate.reached.wait)
        prefetch = Outcome(16)
        store.read(
            0, indices[1:33:2], pages.addresses[:16], priority=Priority.PREFETCH, on_done=prefetch
        )
        needed = Outcome(1)
        store.read(0, indices[40:41], pages.addresses[32:], on_done=needed)
        hold.gate.opened.set()
        await needed.end()
        # The one read that the backend already had may go before it, and one may end with it.
        assert len(prefetch.succeeded) <= 2
        await prefetch.end()
        await first.outcome.end()


# Order of reads and writes of a block.


async def test_a_read_waits_for_the_write_before_it_and_sees_it_whole() -> None:
    hold = Fault(FaultKind.HOLD, at=2, count=1)  # create, write, write (held)
    async with await memory_store(hold) as store:
        indices = fresh(store, 8)
        old, new, newest = (pattern(8, BLOCK, seed) for seed in (1, 2, 3))
        await write(store, 0, indices, old)
        second = begin_write(store, 0, indices[2:5], new[2:5])
        reading = Reading(store, 0, indices)
        third = begin_write(store, 0, indices[:1], newest[:1])
        await asyncio.get_running_loop().run_in_executor(None, hold.gate.reached.wait)
        assert not reading.outcome.ended
        hold.gate.opened.set()
        await asyncio.gather(second.end(), reading.outcome.end(), third.end())
        expected = old.copy()
        expected[2:5] = new[2:5]
        assert np.array_equal(reading.pages.spans, expected)
        found, _ = await read(store, 0, indices[:1])
        assert np.array_equal(found, newest[:1])


async def test_a_write_waits_for_the_read_before_it() -> None:
    hold = Fault(FaultKind.HOLD, only="read")
    async with await memory_store(hold) as store:
        indices = fresh(store, 2)
        old = pattern(2, BLOCK, 1)
        await write(store, 0, indices, old)
        reading = Reading(store, 0, indices)
        writing = begin_write(store, 0, indices[1:], pattern(1, BLOCK, 2))
        other = begin_write(store, 1, indices, pattern(2, BLOCK, 3))
        await asyncio.get_running_loop().run_in_executor(None, hold.gate.reached.wait)
        assert not writing.ended
        hold.gate.opened.set()
        await asyncio.gather(reading.outcome.end(), writing.end(), other.end())
        assert np.array_equal(reading.pages.spans, old)


async def test_reading_what_is_first_being_written() -> None:
    async with await memory_store() as store:
        indices = fresh(store, 4)
        content = pattern(4, BLOCK, 1)
        writing = begin_write(store, 0, indices[:3], content[:3])
        reading = Reading(store, 0, indices)  # the last is not written at all
        await asyncio.gather(writing.end(), reading.outcome.end())
        assert np.array_equal(reading.pages.spans[:3], content[:3])
        assert reading.outcome.succeeded == {0, 1, 2}
        assert isinstance(reading.outcome.errors[3], CorruptBlock)


async def test_a_read_behind_a_write_that_fails() -> None:
    faults = [Fault(FaultKind.ERRNO, only="write", count=None, offsets=(BLOCK, BLOCK + 1))]
    async with await memory_store(*faults) as store:
        indices = fresh(store, 3)
        content = pattern(3, BLOCK, 1)
        writing = begin_write(store, 0, indices, content)
        reading = Reading(store, 0, indices)
        await asyncio.gather(writing.end(), reading.outcome.end())
        assert set(writing.errors) == set(reading.outcome.errors) == {1}
        assert np.array_equal(reading.pages.spans[[0, 2]], content[[0, 2]])


async def test_blocks_longer_than_a_run() -> None:
    dims = ModelDims.uniform(layers=1, q_heads=8, kv_heads=8, head_dim=256, block_size=64)
    size = dims.block_bytes(dims.groups[0])
    assert size > MAX_RUN_BYTES
    async with await BlockStore.open(dims, None, 256, io="memory") as store:
        indices = fresh(store, 2)
        content = pattern(2, size, 1)
        await write(store, 0, indices, content)
        found, _ = await read(store, 0, indices)
        assert np.array_equal(found, content)
        assert store.statistics().read_calls == 2


async def test_a_report_that_raises_stops_nobody_else() -> None:
    seen: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: seen.append(context))

    def bad(positions: Any, error: object) -> None:
        raise ZeroDivisionError

    async with await memory_store() as store:
        indices = fresh(store, 4)
        pages = Pages(4, BLOCK)
        store.write(0, indices, pages.addresses, owner=pages, on_done=bad)
        _, outcome = await read(store, 0, indices)
        assert not outcome.errors
        assert store.statistics().in_flight == 0
    loop.set_exception_handler(None)
    assert len(seen) == 1


async def test_reports_may_call_the_store() -> None:
    async with await memory_store() as store:
        indices = fresh(store, 2)
        pages = Pages(2, BLOCK)
        pages.spans[:] = 5
        outcome = Outcome(2)

        def then_read(positions: Any, error: object) -> None:
            pages.spans[:] = 0
            store.read(0, indices, pages.addresses, on_done=outcome)

        store.write(0, indices, pages.addresses, on_done=then_read)
        await outcome.end()
        assert (pages.spans == 5).all()


# Arguments.


@pytest.mark.parametrize(
    "change",
    [
        {"layer": -1},
        {"layer": 3},
        {"indices": np.array([0, 600])},
        {"indices": np.array([-1, 0])},
        {"indices": np.array([0])},
        {"indices": np.array([0, 1], np.int32)},
        {"indices": np.array([[0, 1]])},
        {"indices": [0, 1]},
        {"addresses": np.zeros(2, np.uint64)},
        {"addresses": np.full(2, 4097, np.uint64)},
        {"addresses": np.full(2, 4096, np.int64)},
        {"priority": 0},
    ],
    ids=lambda change: "-".join(map(str, change)),
)
@pytest.mark.parametrize("method", ["read", "write"])
async def test_bad_arguments_change_nothing(
    store: BlockStore, method: str, change: dict[str, Any]
) -> None:
    indices = fresh(store, 2)
    pages = Pages(2, BLOCK)
    arguments: dict[str, Any] = {"layer": 0, "indices": indices, "addresses": pages.addresses}
    with pytest.raises(ArgumentError):
        getattr(store, method)(**{**arguments, **change}, on_done=Outcome(2))
    assert store.statistics().in_flight == 0
    assert not (await write(store, 0, indices, pattern(2, BLOCK, 1))).errors


async def test_six_sequences_appended_in_turns_are_read_in_long_runs(store: BlockStore) -> None:
    """Each appends a block at a time; reading one back takes runs of 16 blocks and more."""
    sequences: list[list[int]] = [[] for _ in range(6)]
    for _ in range(96):
        for ids in sequences:
            ids.extend(store.ids.allocate(1, ids[-1] if ids else None).tolist())
    for number, ids in enumerate(sequences):
        indices = store.ids.check(ids)
        content = pattern(96, BLOCK, number)
        await write(store, 0, indices, content)
        before = store.statistics().read_calls
        found, outcome = await read(store, 0, indices)
        assert not outcome.errors
        assert np.array_equal(found, content)
        calls = store.statistics().read_calls - before
        assert calls <= 96 // 16  # one alone takes 96 * 4 KiB / 256 KiB, rounded up: 2
