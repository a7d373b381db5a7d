"""A store whose reads of single blocks go as spans."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsswap.errors import (
    BlockIOError,
    ClosedError,
    CorruptBlock,
    StaleBlockId,
)
from hsswap.io import BlockStore
from hsswap.io.base import BlockIO, SpanReads
from hsswap.io.layout import SEGMENT_IDS
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from hsswap.io.spans import WORTH_IT, alone_and_joined
from hsswap.io.tables import FEW
from hsswap.io.uring import UringIO
from tests.io.support import (
    BLOCK,
    DIMS,
    PAGE,
    Reading,
    begin_write,
    fresh,
    pattern,
    read,
    until,
    write,
)

# A store: every second block, so that none has a neighbour.


@pytest.fixture(params=["uring", "posix"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BlockStore]:
    async with await BlockStore.open(DIMS, tmp_path / "store", 600, io=request.param) as opened:
        yield opened
        assert opened.statistics().in_flight == 0


@pytest.mark.parametrize("kind", [kind for kind in FaultKind if kind is not FaultKind.HOLD])
async def test_a_fault_of_one_read_is_of_its_block(kind: FaultKind) -> None:
    io = MemoryIO([Fault(kind, at=4, only="read")])
    store = await BlockStore.open(DIMS, None, 64, io=io)
    indices, content = fresh(store, 20), pattern(20, BLOCK, 1)
    assert not (await write(store, 0, indices, content)).errors
    reading = Reading(store, 0, indices[::2])
    if kind is FaultKind.NEVER:
        await until(lambda: len(reading.outcome.succeeded) == 9)
    else:
        await reading.outcome.end()
    await store.close()
    errors = reading.outcome.errors
    wrong = {FaultKind.TORN: CorruptBlock, FaultKind.FLIP: CorruptBlock}
    expected = wrong.get(kind, ClosedError if kind is FaultKind.NEVER else BlockIOError)
    assert {at: type(error) for at, error in errors.items()} == {4: expected}
    good = sorted(reading.outcome.succeeded)
    assert np.array_equal(reading.pages.spans[good], content[::2][good])


async def test_a_corrupt_block_among_many(store: BlockStore) -> None:
    indices, content = fresh(store, 60), pattern(60, BLOCK, 1)
    assert not (await write(store, 0, indices, content)).errors
    assert store.directory is not None
    [segment] = store.directory.glob("segment-*")
    with segment.open("r+b") as file:
        for index in (8, 30):
            file.seek(index * BLOCK + 100)
            file.write(bytes([content[index, 100] ^ 4]))
    lost: list[int] = []
    store._mover.on_corrupt = lost.append
    found, outcome = await read(store, 0, indices[::2])
    assert {at: type(error) for at, error in outcome.errors.items()} == {
        4: CorruptBlock,
        15: CorruptBlock,
    }
    assert sorted(lost) == [8, 30]
    good = sorted(outcome.succeeded)
    assert np.array_equal(found[good], content[::2][good])
    statistics = store.statistics()
    assert (statistics.checksum_failures, statistics.blocks_read) == (2, 28)
    assert statistics.read_calls == 30


async def test_blocks_that_come_short_are_tried_again_as_runs(store: BlockStore) -> None:
    indices, content = fresh(store, 40), pattern(40, BLOCK, 1)
    assert not (await write(store, 0, indices, content)).errors
    assert store.directory is not None
    [segment] = store.directory.glob("segment-*")
    os.truncate(segment, 20 * BLOCK + PAGE // 2)
    found, outcome = await read(store, 0, indices[::2])
    assert sorted(outcome.errors) == list(range(10, 20))
    assert all("ended after" in str(error) for error in outcome.errors.values())
    assert np.array_equal(found[:10], content[:20:2])
    statistics = store.statistics()
    assert (statistics.read_calls, statistics.errors) == (30, 10)  # those ten twice


async def test_which_blocks_go_as_spans(store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
    indices = fresh(store, 60)
    assert not (await write(store, 0, indices, pattern(60, BLOCK, 1))).errors
    taken: list[int] = []
    backend = type(store._io)
    submit = backend.submit_spans

    def note(io: BlockIO, reads: SpanReads) -> None:
        taken.append(len(reads.files))
        submit(io, reads)

    monkeypatch.setattr(backend, "submit_spans", note)
    alone = list(range(11, 11 + 2 * WORTH_IT, 2))
    for chosen in ([1, 3, 5], [1, 2, 3, *alone], [1, 2, 3, *alone[1:]], [4, 5, 6], [8]):
        assert not (await read(store, 0, indices[chosen]))[1].errors
    assert taken == [3, WORTH_IT, 1]  # not neighbours, nor few blocks beside them


@given(st.lists(st.integers(0, SEGMENT_IDS - 1), min_size=1, max_size=FEW), st.integers(12, 18))
def test_few_blocks_are_told_apart_as_many_are(chosen: list[int], log2_bytes: int) -> None:
    indices, block_bytes = np.array(chosen), 1 << log2_bytes
    alone, joined = alone_and_joined(indices, block_bytes)
    assert sorted([*alone.tolist(), *joined.tolist()]) == list(range(len(chosen)))
    many = np.concatenate((indices, SEGMENT_IDS * 2 + np.arange(FEW) * 2))  # all of them alone
    expected = alone_and_joined(many, block_bytes)[0]
    assert set(alone.tolist()) == set(expected[expected < len(chosen)].tolist())


async def test_with_neighbours_between(store: BlockStore) -> None:
    indices, content = fresh(store, 500), pattern(500, BLOCK, 1)
    assert not (await write(store, 1, indices, content)).errors
    chosen = np.random.default_rng(1).permutation(500)[:200]
    found, outcome = await read(store, 1, indices[chosen])
    assert not outcome.errors
    assert np.array_equal(found, content[chosen])
    assert store.statistics().read_calls < 200


async def test_blocks_that_were_not_written(store: BlockStore) -> None:
    indices, content = fresh(store, 60), pattern(60, BLOCK, 1)
    assert not (await write(store, 0, indices[:40], content[:40])).errors
    found, outcome = await read(store, 0, indices[::2])
    assert {at: type(error) for at, error in outcome.errors.items()} == dict.fromkeys(
        range(20, 30), CorruptBlock
    )
    assert np.array_equal(found[:20], content[:40:2])


async def test_a_block_given_twice_comes_twice(store: BlockStore) -> None:
    indices, content = fresh(store, 20), pattern(20, BLOCK, 1)
    assert not (await write(store, 0, indices, content)).errors
    twice = np.repeat(indices[::4], 2)
    found, outcome = await read(store, 0, twice)
    assert not outcome.errors
    assert np.array_equal(found, np.repeat(content[::4], 2, axis=0))
    assert not (await write(store, 0, indices, content)).errors  # all of them were let go


async def test_writes_wait_for_them_and_they_for_writes(store: BlockStore) -> None:
    indices, old, new = fresh(store, 40), pattern(40, BLOCK, 1), pattern(40, BLOCK, 2)
    assert not (await write(store, 0, indices, old)).errors
    before = Reading(store, 0, indices[::2])
    writing = begin_write(store, 0, indices[:20], new[:20])
    after = Reading(store, 0, indices[::2])
    for outcome in (before.outcome, writing, after.outcome):
        assert not (await outcome.end()).errors
    assert np.array_equal(before.pages.spans, old[::2])
    assert np.array_equal(after.pages.spans, np.concatenate([new[:20:2], old[20::2]]))


async def test_a_closing_store_tells_of_every_block(tmp_path: Path) -> None:
    store = await BlockStore.open(DIMS, tmp_path / "store", 600, io=UringIO(4, limit=32))
    indices, content = fresh(store, 400), pattern(400, BLOCK, 1)
    assert not (await write(store, 0, indices, content)).errors
    readings = [Reading(store, 0, indices[n::20]) for n in range(20)]
    await store.close()
    for number, reading in enumerate(readings):
        assert reading.outcome.ended
        good = sorted(reading.outcome.succeeded)
        assert np.array_equal(reading.pages.spans[good], content[number::20][good])
        for error in reading.outcome.errors.values():
            assert isinstance(error, ClosedError)


async def test_a_freed_block_is_stale(store: BlockStore) -> None:
    ids = store.ids.allocate(20)
    indices, content = store.ids.check(ids), pattern(20, BLOCK, 1)
    assert not (await write(store, 0, indices, content)).errors
    store.ids.drop_reference(ids[4:5])
    found, outcome = await read(store, 0, indices[::2])
    assert {at: type(error) for at, error in outcome.errors.items()} == {2: StaleBlockId}
    assert np.array_equal(np.delete(found, 2, axis=0), np.delete(content[::2], 2, axis=0))
