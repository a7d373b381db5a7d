"""Limits of space hold, count what files really take, and cost exactly the blocks they hit."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hsswap.errors import BlockIOError, OutOfSpace
from hsswap.io import BlockStore
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from tests.io.persist_support import (
    SMALL,
    check_ids,
    content_of,
    memory,
    open_store,
    write_ids,
)
from tests.io.support import begin_write, read, until, write

SEGMENT = 256 * SMALL.id_bytes


def du(place: Path) -> int:
    """Bytes that the files in a directory take."""
    return sum(512 * path.stat().st_blocks for path in place.iterdir())


@pytest.mark.parametrize("persist", [False, True])
async def test_the_limit_counts_what_files_take(tmp_path: Path, persist: bool) -> None:
    limit = 3 * SEGMENT  # room for two, beside the records and the lock
    async with await BlockStore.open(
        SMALL, tmp_path, 1024, io="posix", persist=persist, disk_bytes=limit
    ) as store:
        ids = store.ids.allocate(1024)
        indices = store.ids.check(ids)
        outcome = await write(store, 0, indices, content_of(store, ids, 0))
        fits = 3 if not persist and limit >= 3 * SEGMENT + 4096 else 2
        assert set(outcome.errors) == set(range(256 * fits, 1024))
        assert {type(error) for error in outcome.errors.values()} == {OutOfSpace}
        assert "raise disk_bytes" in str(outcome.errors[1023])
        assert du(tmp_path) <= store.statistics().disk_bytes <= limit
        found, outcome = await read(store, 0, indices[: 256 * fits])
        assert not outcome.errors
        assert np.array_equal(found, content_of(store, ids[: 256 * fits], 0))
        store.ids.drop_reference(ids[:256])  # makes room
        await until(lambda: store.statistics().segment_files == fits - 1)
        last = indices[-3:]
        assert not (await write(store, 0, last, content_of(store, ids[-3:], 0))).errors
        assert du(tmp_path) <= limit


async def test_what_nobody_holds_goes_first_at_the_limit() -> None:
    io = memory()
    options: dict[str, Any] = {"capacity": 1024, "disk_bytes": 3 * SEGMENT}
    async with await open_store(io, **options) as store:
        first = store.ids.allocate(256)
        await write_ids(store, first)
        await store.flush()
        second = store.ids.allocate(256)
        await write_ids(store, second)
    io = io.power_cut(lambda number: True)
    async with await open_store(io, **options) as store:
        assert store.ids.kept_count == 512
        store.ids.add_reference(second[:1])
        third = store.ids.allocate(512)
        assert store.ids.kept_count == 511
        outcome = await write(store, 0, store.ids.check(third), content_of(store, third, 0))
        assert set(outcome.errors) == set(range(256, 512))  # the second one is held, in part
        assert {type(error) for error in outcome.errors.values()} == {OutOfSpace}
        assert store.ids.kept().tolist() == second[1:].tolist()
        store.ids.add_reference(second[1:])
        await check_ids(store, second)
        assert store.statistics().segment_files == 2
    io = io.power_cut(lambda number: True)
    async with await open_store(io, **{**options, "disk_bytes": 2 * SEGMENT}) as store:
        # A lower limit than what is there: the oldest goes at once.
        await until(lambda: store.statistics().segment_files == 1)
        assert store.ids.kept().tolist() == third[:256].tolist()


async def test_a_full_disk_takes_what_nobody_holds_too() -> None:
    io = memory()
    async with await open_store(io, capacity=768) as store:
        await write_ids(store, store.ids.allocate(256))
    full = Fault(FaultKind.ERRNO, errno=errno.ENOSPC, only="create")
    files = io.power_state().cut(lambda number: True)
    async with await open_store(MemoryIO([full], files=files), capacity=768) as store:
        ids = store.ids.allocate(256)
        await write_ids(store, ids)
        await check_ids(store, ids)
        assert store.ids.kept_count == 0
        assert store.statistics().segment_files == 1


async def test_the_floor_of_free_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = [10 * SEGMENT]
    monkeypatch.setattr(
        os, "statvfs", lambda path: SimpleNamespace(f_bavail=free[0] // 4096, f_frsize=4096)
    )
    async with await BlockStore.open(
        SMALL, tmp_path, 600, io="posix", free_bytes=5 * SEGMENT
    ) as store:
        ids = store.ids.allocate(600)
        await write_ids(store, ids[:3])
        free[0] = 6 * SEGMENT - 4096
        outcome = await write(store, 0, np.array([1, 256]), content_of(store, ids[:2], 0))
        assert {n: type(error) for n, error in outcome.errors.items()} == {1: OutOfSpace}
        assert "must stay so" in str(outcome.errors[1])
        free[0] = 6 * SEGMENT
        await write_ids(store, ids[256:258])
        await check_ids(store, ids[[0, 2, 256, 257]])


async def test_a_store_closes_while_a_segment_is_being_admitted(tmp_path: Path) -> None:
    store = await BlockStore.open(SMALL, tmp_path / "a", 600, io="posix", free_bytes=1)
    ids = store.ids.allocate(3)
    outcome = begin_write(store, 0, store.ids.check(ids), content_of(store, ids, 0))
    await store.close()
    assert outcome.ended
    assert not (tmp_path / "a").exists()


async def test_closing_waits_for_a_segment_being_admitted_however_often_it_is_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def statvfs(path: object) -> SimpleNamespace:
        asked.set()
        answered.wait()
        return SimpleNamespace(f_bavail=1 << 40, f_frsize=4096)

    monkeypatch.setattr(os, "statvfs", statvfs)
    store = await open_store(memory(), 600, persist=False, free_bytes=1)
    ids = store.ids.allocate(3)
    outcome = begin_write(store, 0, store.ids.check(ids), content_of(store, ids, 0))
    await asyncio.to_thread(asked.wait)
    closing = asyncio.ensure_future(store.close())
    try:
        for _ in range(200):
            await asyncio.sleep(0)
            closing.cancel()
        assert not closing.done()
    finally:
        answered.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert outcome.ended


@pytest.mark.parametrize(
    "number", [errno.EIO, errno.EMFILE, errno.EINTR, errno.ENOSPC, errno.EDQUOT]
)
async def test_a_fault_of_opening_a_segment_deletes_nothing(number: int) -> None:
    io = memory()
    async with await open_store(io) as store:
        ids = store.ids.allocate(4)
        await write_ids(store, ids)
    files = io.power_state().cut(lambda n: True)
    fault = Fault(FaultKind.ERRNO, errno=number, only="open", at=2)  # manifest, records, segment
    again = MemoryIO([fault], files=files, power=True)
    async with await open_store(again) as store:
        store.ids.add_reference(ids)
        _, outcome = await read(store, 0, store.ids.check(ids))
        assert {error.errno for error in outcome.errors.values()} == {number}  # type: ignore[attr-defined]
        await check_ids(store, ids)  # it went by


async def test_a_fault_of_syncing_is_told_and_tried_again() -> None:
    fault = Fault(FaultKind.ERRNO, errno=errno.EIO, only="sync", at=2)
    io = memory(fault)
    async with await open_store(io) as store:
        ids = store.ids.allocate(4)
        await write_ids(store, ids)
        with pytest.raises(BlockIOError):
            await store.stored(store.ids.check(ids))
        assert not store.describe(0, np.arange(4)).durable.any()
        await store.stored(store.ids.check(ids))
        state = io.power_state()
    async with await open_store(MemoryIO(files=state.cut(lambda n: False))) as store:
        store.ids.add_reference(ids)
        await check_ids(store, ids)


async def test_a_segment_given_up_and_used_again_makes_no_room() -> None:
    """Who waited for its room waited for ever; now it is told, or finds another to give up."""
    for segments in (2, 3):
        io = memory()
        options: dict[str, Any] = {
            "capacity": 256 * segments,
            "disk_bytes": segments * SEGMENT,
        }
        async with await open_store(io, **options) as store:
            await write_ids(store, store.ids.allocate(256 * (segments - 1)))
        async with await open_store(io.power_cut(lambda number: True), **options) as store:
            ids = store.ids.allocate(1)
            outcome = begin_write(store, 0, store.ids.check(ids), content_of(store, ids, 0))
            again = store.ids.allocate(256)  # before the file of the first segment could go
            assert store.ids.check(again).min() == 0
            await asyncio.wait_for(outcome.end(), 30)
            assert [type(error) for error in outcome.errors.values()] == [OutOfSpace][
                segments - 2 :
            ]
            await write_ids(store, again[:2])
            await check_ids(store, again[:2])


async def test_others_faults_are_not_told() -> None:
    fault = Fault(FaultKind.ERRNO, only="sync", at=4)  # manifest, records, first commit, segment 0
    async with await open_store(memory(fault), capacity=512) as store:
        first = store.ids.allocate(2)
        await write_ids(store, first)
        await store.flush()
        more = store.ids.allocate(300, int(first[-1]))
        other, mine = more[:1], more[-1:]
        await write_ids(store, other)
        await write_ids(store, mine)
        await store.stored(store.ids.check(mine))
        assert not store.describe(0, store.ids.check(other)).durable.any()
        await store.stored(store.ids.check(other))
        assert store.describe(0, store.ids.check(other)).durable.all()


async def test_a_block_whose_record_cannot_be_cleared_stays_as_it_is() -> None:
    fault = Fault(FaultKind.ERRNO, only="write", at=4)  # manifest, records, data, records
    io = memory(fault)
    async with await open_store(io) as store:
        ids = store.ids.allocate(1)
        indices = store.ids.check(ids)
        assert not (await write(store, 0, indices, content_of(store, ids, 0))).errors
        await store.flush()
        outcome = await write(store, 0, indices, content_of(store, ids, 1))
        assert set(outcome.errors) == {0}
        found, _ = await read(store, 0, indices)
        assert np.array_equal(found, content_of(store, ids, 0))
        await store.flush()
        await store.flush()
        assert store.describe(0, indices).durable.all()
        state = io.power_state()
    async with await open_store(MemoryIO(files=state.cut(lambda n: False))) as store:
        store.ids.add_reference(ids)
        found, _ = await read(store, 0, indices)
        assert np.array_equal(found, content_of(store, ids, 0))
