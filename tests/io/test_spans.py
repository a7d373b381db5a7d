"""Many short reads at once: the contract of SpanReads, and a store that reads that way."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.errors import (
    ArgumentError,
    BlockIOError,
    ClosedError,
    CorruptBlock,
    HsswapError,
    StaleBlockId,
)
from hsswap.io import BlockStore
from hsswap.io.base import BlockIO, IOFile, Operation, Priority, QueueFull, SpanReads
from hsswap.io.choose import AutoIO
from hsswap.io.counted import CountedIO
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from hsswap.io.posix import PosixIO
from hsswap.io.uring import UringIO
from hsswap.io.uring_limits import TURN_TRANSFERS
from tests.io.support import (
    BLOCK,
    DIMS,
    PAGE,
    Pages,
    Reading,
    begin_write,
    fresh,
    pattern,
    read,
    until,
    write,
)
from tests.io.transfers import Collector, ignore, run, transfer

LIMIT = 64


class Ends:
    """Takes on_done and verify of spans: errors by number, and what was verified."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.errors: dict[int, HsswapError | None] = {}
        self.verified: list[int] = []
        self._changed = asyncio.Event()

    def verify(self, reads: SpanReads, numbers: list[int]) -> None:
        self.verified += numbers

    def done(self, reads: SpanReads, numbers: list[int], error: HsswapError | None) -> None:
        for number in numbers:
            assert number not in self.errors, "told twice"
            self.errors[number] = error
        self._changed.set()

    async def all(self) -> dict[int, HsswapError | None]:
        while len(self.errors) < self.count:
            self._changed.clear()
            await self._changed.wait()
        return self.errors


def spans(
    files: list[IOFile], offsets: list[int], pages: Any, ends: Ends, **options: Any
) -> SpanReads:
    return SpanReads(
        files,
        offsets,
        pages.addresses.tolist(),
        pages.spans.shape[1],
        Priority.NEEDED,
        ends.done,
        ends.verify,
        owner=pages,
        **options,
    )


@pytest.fixture(params=[UringIO, PosixIO], ids=["uring", "posix"])
async def io(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[CountedIO]:
    backend: CountedIO = request.param(4, limit=LIMIT)
    await backend.start(tmp_path)
    yield backend
    await backend.close()


async def filled(io: CountedIO, path: Path, content: NDArray[np.uint8]) -> IOFile:
    file = await io.create_file(path, content.size)
    source = Pages(len(content))
    source.spans[:] = content
    assert await run(io, transfer(Operation.WRITE, file, source, ignore)) == [None]
    return file


async def test_spans_of_several_files_come_back(io: CountedIO, tmp_path: Path) -> None:
    contents = [pattern(32, PAGE, seed) for seed in (1, 2)]
    files = [await filled(io, tmp_path / str(n), content) for n, content in enumerate(contents)]
    count = 3 * TURN_TRANSFERS + 5  # more than a turn, and far more than the drive's queue
    rng = np.random.default_rng(3)
    whose, where = rng.integers(0, 2, count).tolist(), rng.integers(0, 32, count).tolist()
    pages, ends = Pages(count), Ends(count)
    io.submit_spans(spans([files[n] for n in whose], [PAGE * n for n in where], pages, ends))
    assert io.room == LIMIT - count
    assert set((await ends.all()).values()) == {None}
    assert sorted(ends.verified) == list(range(count))
    for number, (file, place) in enumerate(zip(whose, where, strict=True)):
        assert np.array_equal(pages.spans[number], contents[file][place])
    statistics = io.statistics()
    assert (statistics.read_calls, statistics.bytes_read) == (count, count * PAGE)
    assert io.room == LIMIT


async def test_an_error_is_of_the_span_that_it_hit(io: CountedIO, tmp_path: Path) -> None:
    file = await filled(io, tmp_path / "file", pattern(8, PAGE, 1))
    os.truncate(file.path, 6 * PAGE)
    pages, ends = Pages(4), Ends(4)
    reads = spans([file] * 4, [0, 7 * PAGE, PAGE, 2 * PAGE], pages, ends)
    reads.addresses[3] = PAGE  # nobody's memory
    io.submit_spans(reads)
    errors = await ends.all()
    assert errors[0] is errors[2] is None
    assert f"ended after 0 of {PAGE} bytes" in str(errors[1])
    assert isinstance(errors[3], BlockIOError)
    assert errors[3].errno == errno.EFAULT
    assert sorted(ends.verified) == [0, 2]
    assert (io.statistics().errors, io.statistics().in_flight) == (2, 0)


async def test_what_cannot_be_read_is_refused_as_a_whole(io: CountedIO, tmp_path: Path) -> None:
    file = await filled(io, tmp_path / "file", pattern(8, PAGE, 1))
    ends = Ends(0)
    for offset, message in ((8 * PAGE, "outside"), (-PAGE, "outside"), (512, "multiples of 4096")):
        with pytest.raises(ArgumentError, match=message):
            io.submit_spans(spans([file] * 2, [0, offset], Pages(2), ends))
    with pytest.raises(ArgumentError, match="no spans"):
        io.submit_spans(spans([], [], Pages(1), ends))
    crooked = spans([file] * 2, [0, PAGE], Pages(2), ends)
    crooked.addresses[1] += 8
    with pytest.raises(ArgumentError, match="multiples of 4096"):
        io.submit_spans(crooked)
    with pytest.raises(QueueFull):
        io.submit_spans(spans([file] * (LIMIT + 1), [0] * (LIMIT + 1), Pages(LIMIT + 1), ends))
    long = io.span_limit + PAGE
    with pytest.raises(ArgumentError, match="at most"):
        io.submit_spans(spans([file], [0], Pages(1, long), ends))
    assert (io.room, file.in_flight, ends.errors) == (LIMIT, 0, {})
    await io.remove_file(file)
    with pytest.raises(ArgumentError, match="not open"):
        io.submit_spans(spans([file], [0], Pages(1), ends))


def test_a_backend_that_is_not_started_takes_none() -> None:
    io = AutoIO()
    assert io.span_limit == 0
    with pytest.raises(ClosedError, match="not started"):
        io.submit_spans(spans([], [], Pages(1), Ends(0)))


async def test_a_deadline_that_has_passed(io: CountedIO, tmp_path: Path) -> None:
    file = await filled(io, tmp_path / "file", pattern(8, PAGE, 1))
    pages, ends = Pages(3), Ends(3)
    pages.spans[:] = 7
    io.submit_spans(spans([file] * 3, [0, PAGE, PAGE], pages, ends, deadline=0.0))
    assert ends.errors == {}  # never inside of it
    for error in (await ends.all()).values():
        assert isinstance(error, BlockIOError)
        assert error.errno == errno.ETIMEDOUT
    assert (pages.spans == 7).all()


async def test_close_drains_them_and_files_in_use_stay(io: CountedIO, tmp_path: Path) -> None:
    file = await filled(io, tmp_path / "file", pattern(8, PAGE, 1))
    ends, count = Ends(LIMIT), LIMIT
    reads = spans([file] * count, [0] * count, Pages(count), ends)
    io.submit_spans(reads)
    with pytest.raises(ArgumentError, match=f"{count} transfers in flight"):
        io.remove_file(file)
    await io.close()
    assert list(ends.errors.values()) == [None] * count
    with pytest.raises(ClosedError):
        io.submit_spans(reads)


async def test_the_owner_lives_until_the_end_and_not_longer(io: CountedIO, tmp_path: Path) -> None:
    file = await filled(io, tmp_path / "file", pattern(8, PAGE, 1))
    pages, ends = Pages(2), Ends(2)
    alive = weakref.ref(pages)
    io.submit_spans(spans([file] * 2, [0, PAGE], pages, ends))
    del pages
    await ends.all()
    await asyncio.sleep(0)
    gc.collect()
    assert alive() is None


async def test_transfers_and_spans_share_the_queue(io: CountedIO, tmp_path: Path) -> None:
    content = pattern(32, PAGE, 1)
    file = await filled(io, tmp_path / "file", content)
    ends, pages, collector = Ends(20), Pages(20), Collector()
    targets = [Pages(2) for _ in range(10)]
    io.submit([transfer(Operation.READ, file, one, collector, PAGE) for one in targets[:5]])
    io.submit_spans(spans([file] * 20, [PAGE * n for n in range(20)], pages, ends))
    io.submit([transfer(Operation.READ, file, one, collector, PAGE) for one in targets[5:]])
    await collector.all(10)
    await ends.all()
    assert np.array_equal(pages.spans, content[:20])
    assert all(np.array_equal(one.spans, content[1:3]) for one in targets)


async def test_a_hook_that_fails_is_the_error_of_its_spans(io: CountedIO, tmp_path: Path) -> None:
    file = await filled(io, tmp_path / "file", pattern(8, PAGE, 1))
    ends = Ends(3)

    def fail(reads: SpanReads, numbers: list[int]) -> None:
        raise BlockIOError("made up")

    ends.verify = fail  # type: ignore[method-assign]
    io.submit_spans(spans([file] * 3, [0, PAGE, 2 * PAGE], Pages(3), ends))
    assert {str(error) for error in (await ends.all()).values()} == {"made up"}


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
    if kind in (FaultKind.ERRNO, FaultKind.SHORT):
        assert errors == {}  # it went again, alone
    else:
        wrong = ClosedError if kind is FaultKind.NEVER else CorruptBlock
        assert {at: type(error) for at, error in errors.items()} == {4: wrong}
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


async def test_blocks_that_do_not_come_are_tried_again_as_runs(store: BlockStore) -> None:
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
    for chosen in ([1, 3, 5], [1, 2, 3, 7, 9], [4, 5, 6], [8]):
        assert not (await read(store, 0, indices[chosen]))[1].errors
    assert taken == [3, 2]  # neither neighbours nor one alone


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
