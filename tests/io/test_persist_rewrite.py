"""Stored blocks that are written again: the old content or the new one is there at any instant."""

from __future__ import annotations

import asyncio
import errno
import itertools
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.errors import BlockIOError, ClosedError, OutOfSpace
from hsswap.io import BlockStore
from hsswap.io.checking import check_store
from hsswap.io.ids import INDEX_MASK
from hsswap.io.memory import Fault, FaultKind, Gate, MemoryIO
from hsswap.io.spare import SPARE_NAME, SPARE_SLOTS
from tests.io.persist_support import check_ids, content_of, memory, open_store, write_ids
from tests.io.support import begin_write, pattern, read, until, write
from tests.swap_watch import turns

COUNT = 250  # several times the slots


def all_slots_are_free(store: BlockStore) -> bool:
    assert store._journal is not None
    return len(store._journal._spare._free) == SPARE_SLOTS


async def test_more_blocks_than_slots() -> None:
    async with await open_store(memory()) as store:
        ids = store.ids.allocate(COUNT)
        await write_ids(store, ids)
        await store.flush()
        for _ in range(2):
            indices = store.ids.check(ids)
            new = [pattern(COUNT, 4096, seed) for seed in (1, 2)]
            outcomes = [begin_write(store, layer, indices, new[layer]) for layer in (0, 1)]
            for layer, outcome in enumerate(outcomes):
                assert not (await outcome.end()).errors
                found, _ = await read(store, layer, indices)
                assert np.array_equal(found, new[layer])
            await store.flush()
            assert store.describe(1, indices).durable.all()
            assert all_slots_are_free(store)


async def reopened(io: MemoryIO, indices: NDArray[np.int64], layer: int) -> NDArray[np.uint8]:
    async with await open_store(io) as store:
        store.ids.add_reference(store.ids.kept())
        found, outcome = await read(store, layer, indices)
        assert not outcome.errors
        return found


@pytest.mark.parametrize("at", [("write", 4), ("sync", 2)], ids=["a write", "the sync"])
@pytest.mark.parametrize("closes", [False, True])
async def test_a_write_behind_a_flush_that_waits(at: tuple[str, int], closes: bool) -> None:
    """What was there when flush() was called is acknowledged by it: it is not overwritten before
    that is on disk, whatever the flush waits for. Manifest and records are written first.
    """
    gate = Gate()
    io = memory(Fault(FaultKind.HOLD, only=at[0], at=at[1], gate=gate))
    store = await open_store(io)
    ids, other = store.ids.allocate(1), store.ids.allocate(1)
    await write_ids(store, ids)
    held = begin_write(store, 0, store.ids.check(other), content_of(store, other, 0))
    flush = asyncio.ensure_future(store.flush())
    assert await asyncio.to_thread(gate.reached.wait, 30)
    await turns(20)
    new = pattern(1, 4096, 1)
    writing = begin_write(store, 0, store.ids.check(ids), new)
    await turns(20)
    assert not flush.done()
    closing = asyncio.ensure_future(store.close()) if closes else None
    await turns(20)
    gate.opened.set()
    await flush
    moments = [io.power_state()]
    await held.end()
    await writing.end()
    assert [type(error) for error in writing.errors.values()] == [ClosedError][:closes]
    moments.append(io.power_state())
    await (closing or store.close())
    for state, survives in itertools.product(moments, (False, True)):
        after = MemoryIO(files=state.cut(([survives] * len(state.pending)).__getitem__), power=True)
        found = await reopened(after, ids & INDEX_MASK, 0)
        assert any(np.array_equal(found, each) for each in (content_of(store, ids, 0), new))


async def test_closing_while_blocks_are_replaced() -> None:
    io = memory()
    store = await open_store(io)
    ids = store.ids.allocate(COUNT)
    await write_ids(store, ids)
    await store.flush()
    indices = store.ids.check(ids)
    new = pattern(COUNT, 4096, 1)
    outcome = begin_write(store, 0, indices, new)
    await until(lambda: len(outcome.succeeded) > 20)
    await store.close()
    assert outcome.ended
    assert {type(error) for error in outcome.errors.values()} <= {ClosedError}
    old = content_of(store, ids, 0)
    for survives in (True, False):
        found = await reopened(io.power_cut(lambda n, alive=survives: alive), indices, 0)  # type: ignore[misc]
        for position in range(COUNT):
            is_new = np.array_equal(found[position], new[position])
            assert is_new or np.array_equal(found[position], old[position])
            assert is_new or position not in outcome.succeeded


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
async def test_a_write_that_fails_in_its_place(number: int) -> None:
    """The block has no content until it is written again; the next process finds the new one."""
    spot = (3 * 4096, 3 * 4096 + 1)  # of the segment: layer 0, block 3; of the spare file: slot 3
    faults = [Fault(FaultKind.ERRNO, only="write", at=at, errno=number, offsets=spot)
              for at in (2, 3)]  # fmt: skip
    io = memory(*faults)
    async with await open_store(io) as store:
        ids = store.ids.allocate(6)
        await write_ids(store, ids)
        await store.flush()
        indices = store.ids.check(ids)
        new = pattern(6, 4096, 1)
        outcome = await write(store, 0, indices, new)
        failed = set(outcome.errors)
        _, reading = await read(store, 0, indices)
        assert set(reading.errors) == failed
        left = io.power_cut()
        again = await write(store, 0, indices, new)
        assert not again.errors
        await store.flush()
        assert all_slots_are_free(store)
    found = await reopened(left, indices, 0)
    old = content_of(store, ids, 0)
    for position in range(6):
        is_new = np.array_equal(found[position], new[position])
        assert is_new or np.array_equal(found[position], old[position])


async def test_failed_blocks_do_not_hold_the_slots_for_ever() -> None:
    broken = Fault(FaultKind.ERRNO, only="write", at=1, count=None, offsets=(0, 20 * 4096))
    io = memory()
    async with await open_store(io) as store:
        ids = store.ids.allocate(COUNT)
        await write_ids(store, ids)
        await store.flush()
        indices = store.ids.check(ids)
        io._faults, io._seen = (broken,), [1]  # from now on a bad spot: blocks 0 to 19
        outcome = await write(store, 0, indices, pattern(COUNT, 4096, 1))
        assert set(range(20)) & set(outcome.errors)
        assert all(isinstance(error, BlockIOError) for error in outcome.errors.values())
        second = await write(store, 1, indices, pattern(COUNT, 4096, 2))
        assert len(second.succeeded) + len(second.errors) == COUNT


async def test_no_room_for_the_spare_file() -> None:
    full = Fault(FaultKind.ERRNO, only="create", at=3, errno=errno.ENOSPC)
    async with await open_store(memory(full)) as store:
        ids = store.ids.allocate(3)
        await write_ids(store, ids)
        await store.flush()
        indices = store.ids.check(ids)
        outcome = await write(store, 0, indices, pattern(3, 4096, 1))
        assert {type(error) for error in outcome.errors.values()} == {OutOfSpace}
        await check_ids(store, ids)  # as they were
        assert not (await write(store, 0, indices, pattern(3, 4096, 1))).errors


async def test_fsck_looks_at_what_is_set_aside(tmp_path: Path) -> None:
    io = memory()
    async with await open_store(io) as store:
        ids = store.ids.allocate(5)
        await write_ids(store, ids)
        await store.flush()
        await write(store, 0, store.ids.check(ids), pattern(5, 4096, 1))
        left = io.power_state().cut(lambda number: False)
    for path, content in left.items():
        (tmp_path / path.name).write_bytes(content.tobytes())
    assert (tmp_path / SPARE_NAME).exists()
    report = check_store(tmp_path)
    assert report.ok
    assert report.blocks == 10
    with (tmp_path / SPARE_NAME).open("r+b") as file:
        file.seek(2 * 4096)
        file.write(b"??")
    assert [(bad.layer, bad.block_id) for bad in check_store(tmp_path).bad] == [(0, int(ids[2]))]
    async with await open_store(tmp_path) as store:
        known = store.describe(0, np.arange(5)).written
        assert known.tolist() == [True, True, False, True, True]
    assert check_store(tmp_path).ok


async def test_a_slot_is_not_used_again_while_a_record_names_it() -> None:
    io = memory()
    count = SPARE_SLOTS + 8
    async with await open_store(io) as store:
        ids = store.ids.allocate(count)
        await write_ids(store, ids)
        await store.flush()
        indices = store.ids.check(ids)
        new = pattern(count, 4096, 1)
        for position in range(count):
            assert not (
                await write(store, 0, indices[position : position + 1], new[position:][:1])
            ).errors
        left = io.power_cut()
    found = await reopened(left, indices, 0)
    assert np.array_equal(found, new)


async def test_closing_that_is_cancelled_again_and_again_stores_all() -> None:
    gate = Gate()
    io = memory(Fault(FaultKind.HOLD, only="sync", at=2, gate=gate))  # manifest, records, then data
    store = await open_store(io)
    ids = store.ids.allocate(3)
    await write_ids(store, ids)
    closing = asyncio.ensure_future(store.close())
    assert await asyncio.to_thread(gate.reached.wait, 30)
    for _ in range(4):
        closing.cancel()
        await turns(5)
        assert not closing.done()
    gate.opened.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    async with await open_store(io.power_cut(lambda number: False)) as store:
        store.ids.add_reference(ids)
        await check_ids(store, ids)
