"""Many short reads at once: the contract of SpanReads."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import threading
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
    HsswapError,
)
from hsswap.io.base import IOFile, Operation, Priority, QueueFull, SpanReads
from hsswap.io.choose import AutoIO
from hsswap.io.counted import CountedIO
from hsswap.io.posix import PosixIO
from hsswap.io.uring import UringIO
from hsswap.io.uring_limits import TURN_TRANSFERS
from tests.io.support import (
    PAGE,
    Pages,
    pattern,
)
from tests.io.transfers import Collector, ignore, run, transfer

LIMIT = 64


class Ends:
    """Takes on_done and verify of spans: errors by number, and what was verified."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.errors: dict[int, HsswapError | None] = {}
        self.verified: list[int] = []
        self.threads: set[int] = set()
        self._changed = asyncio.Event()

    def verify(self, reads: SpanReads, numbers: list[int]) -> None:
        self.verified += numbers
        self.threads.add(threading.get_ident())

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


@pytest.mark.parametrize("quick", [False, True])
async def test_spans_of_several_files_come_back(io: CountedIO, quick: bool, tmp_path: Path) -> None:
    contents = [pattern(32, PAGE, seed) for seed in (1, 2)]
    files = [await filled(io, tmp_path / str(n), content) for n, content in enumerate(contents)]
    count = 3 * TURN_TRANSFERS + 5  # more than a turn, and far more than the drive's queue
    rng = np.random.default_rng(3)
    whose, where = rng.integers(0, 2, count).tolist(), rng.integers(0, 32, count).tolist()
    pages, ends = Pages(count), Ends(count)
    places = [PAGE * n for n in where]
    io.submit_spans(spans([files[n] for n in whose], places, pages, ends, quick=quick))
    assert io.room == LIMIT - count
    assert set((await ends.all()).values()) == {None}
    assert sorted(ends.verified) == list(range(count))
    here = threading.get_ident()
    assert ends.threads == {here} if quick or not io.spans_on_threads else here not in ends.threads
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


@pytest.mark.parametrize("quick", [False, True])
async def test_a_hook_that_fails_is_the_error_of_its_spans(
    io: CountedIO, quick: bool, tmp_path: Path
) -> None:
    file = await filled(io, tmp_path / "file", pattern(8, PAGE, 1))
    ends = Ends(3)

    def fail(reads: SpanReads, numbers: list[int]) -> None:
        raise BlockIOError("made up")

    ends.verify = fail  # type: ignore[method-assign]
    io.submit_spans(spans([file] * 3, [0, PAGE, 2 * PAGE], Pages(3), ends, quick=quick))
    assert {str(error) for error in (await ends.all()).values()} == {"made up"}
