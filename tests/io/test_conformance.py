"""The BlockIO contract, checked on every backend. Rules: the docstring of hsswap/io/base.py."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsswap.errors import ArgumentError, BlockIOError, ClosedError, ConfigError, HsswapError
from hsswap.io import open_backend
from hsswap.io.base import BlockIO, IOFile, Operation, Priority, QueueFull, Transfer
from hsswap.io.memory import MemoryIO
from hsswap.io.posix import PosixIO
from hsswap.io.uring import UringIO
from tests.io.support import PAGE, Pages, pattern
from tests.io.transfers import Collector, ignore, run, transfer

LIMIT = 24
MAKERS: dict[str, Callable[[int], BlockIO]] = {
    "memory": lambda threads: MemoryIO(limit=LIMIT),
    "posix": lambda threads: PosixIO(threads, limit=LIMIT),
    "uring": lambda threads: UringIO(threads, limit=LIMIT),
}


@pytest.fixture(params=MAKERS)
def make(request: pytest.FixtureRequest) -> Callable[[int], BlockIO]:
    maker: Callable[[int], BlockIO] = MAKERS[request.param]
    return maker


def place_for(io: BlockIO, tmp_path: Path) -> Path | None:
    return tmp_path if io.needs_directory else None


@pytest.fixture
async def io(make: Callable[[int], BlockIO], tmp_path: Path) -> AsyncIterator[BlockIO]:
    backend = make(3)
    await backend.start(place_for(backend, tmp_path))
    yield backend
    await backend.close()


@pytest.fixture
async def file(io: BlockIO, tmp_path: Path) -> IOFile:
    return await io.create_file(tmp_path / "file", 64 * PAGE)


async def test_scattered_spans_come_back(io: BlockIO, file: IOFile) -> None:
    content = pattern(16, PAGE, 1)
    source, target = Pages(16), Pages(16)
    order = np.random.default_rng(2).permutation(16)
    source.spans[order] = content
    source.addresses = source.addresses[order]
    target.addresses = target.addresses[::-1].copy()
    assert await run(io, transfer(Operation.WRITE, file, source, ignore, 8 * PAGE)) == [None]
    assert await run(io, transfer(Operation.READ, file, target, ignore, 8 * PAGE)) == [None]
    assert np.array_equal(target.spans[::-1], content)


@pytest.mark.parametrize("span_pages", [1, 3])
async def test_spans_of_any_length(io: BlockIO, file: IOFile, span_pages: int) -> None:
    source, target = Pages(5, span_pages * PAGE), Pages(5, span_pages * PAGE)
    source.spans[:] = pattern(5, span_pages * PAGE, 3)
    assert await run(io, transfer(Operation.WRITE, file, source, ignore)) == [None]
    assert await run(io, transfer(Operation.READ, file, target, ignore)) == [None]
    assert np.array_equal(target.spans, source.spans)


async def test_more_spans_than_one_system_call_takes(io: BlockIO, tmp_path: Path) -> None:
    count = 1500
    file = await io.create_file(tmp_path / "long", count * PAGE)
    source, target = Pages(count), Pages(count)
    source.spans[:] = pattern(count, PAGE, 4)
    assert await run(io, transfer(Operation.WRITE, file, source, ignore)) == [None]
    assert await run(io, transfer(Operation.READ, file, target, ignore)) == [None]
    assert np.array_equal(target.spans, source.spans)


async def test_new_files_are_zero_and_have_their_length(io: BlockIO, file: IOFile) -> None:
    target = Pages(64)
    target.spans[:] = 7
    assert await run(io, transfer(Operation.READ, file, target, ignore)) == [None]
    assert not target.spans.any()
    assert file.nbytes == 64 * PAGE


async def test_every_end_is_told_once_on_the_loop_and_not_inside_submit(
    io: BlockIO, file: IOFile
) -> None:
    collector = Collector()
    pages = [Pages(1) for _ in range(LIMIT)]
    batch = [
        transfer(Operation.READ, file, one, collector, number * PAGE)
        for number, one in enumerate(pages)
    ]
    io.submit(batch)
    assert collector.ended == []
    assert io.room == 0
    assert io.statistics().in_flight == LIMIT
    await collector.all(LIMIT)
    assert collector.threads == {threading.get_ident()}
    assert {id(one) for one, _ in collector.ended} == {id(one) for one in batch}
    assert collector.errors == [None] * LIMIT
    assert io.room == LIMIT
    assert file.in_flight == 0


async def test_a_batch_beyond_the_limit_is_refused_whole(io: BlockIO, file: IOFile) -> None:
    collector = Collector()
    pages = Pages(1)
    batch = [transfer(Operation.READ, file, pages, collector) for _ in range(LIMIT + 1)]
    with pytest.raises(QueueFull, match=f"{LIMIT + 1} transfers"):
        io.submit(batch)
    assert io.room == LIMIT
    io.submit(batch[:1])
    await collector.all(1)


@pytest.mark.parametrize(
    "change",
    [
        {"offset": -PAGE},
        {"offset": 63 * PAGE},
        {"offset": 512},
        {"span_bytes": 1000},
        {"span_bytes": 0},
        {"addresses": np.zeros(2, np.uint64)},
        {"addresses": np.empty(0, np.uint64)},
        {"addresses": np.full(2, PAGE + 8, np.uint64)},
        {"addresses": np.full(2, PAGE, np.int64)},
        {"addresses": np.full((1, 2), PAGE, np.uint64)},
    ],
    ids=lambda change: "-".join(change),
)
async def test_a_wrong_transfer_is_refused_with_its_batch(
    io: BlockIO, file: IOFile, change: dict[str, Any]
) -> None:
    good = transfer(Operation.READ, file, Pages(2), ignore)
    wrong = transfer(Operation.READ, file, Pages(2), ignore)
    for name, value in change.items():
        setattr(wrong, name, value)
    with pytest.raises(ArgumentError):
        io.submit([good, wrong])
    assert io.statistics().in_flight == 0


async def test_hooks_run_off_the_loop_and_in_order(io: BlockIO, file: IOFile) -> None:
    seen: list[tuple[str, int, int]] = []
    source, target = Pages(2), Pages(2)

    def prepare(one: Transfer) -> None:
        source.spans[:] = 9  # before the bytes leave
        seen.append(("prepare", len(one.addresses), threading.get_ident()))

    def verify(one: Transfer) -> None:
        seen.append(("verify", int(target.spans.sum()), threading.get_ident()))

    await run(io, transfer(Operation.WRITE, file, source, ignore, prepare=prepare, verify=verify))
    await run(io, transfer(Operation.READ, file, target, ignore, prepare=prepare, verify=verify))
    assert [entry[:2] for entry in seen] == [("prepare", 2), ("verify", 9 * 2 * PAGE)]
    assert threading.get_ident() not in {entry[2] for entry in seen}


async def test_errors_of_hooks_are_errors_of_the_transfer(io: BlockIO, file: IOFile) -> None:
    def fail(one: Transfer) -> None:
        raise BlockIOError("made up")

    def break_down(one: Transfer) -> None:
        raise ZeroDivisionError("made up")

    pages = Pages(1)
    errors = await run(
        io,
        transfer(Operation.READ, file, pages, ignore, verify=fail),
        transfer(Operation.WRITE, file, pages, ignore, prepare=break_down),
        transfer(Operation.READ, file, pages, ignore, 8 * PAGE),
    )
    assert [str(error) for error in errors[:1]] == ["made up"]
    assert isinstance(errors[1], BlockIOError)
    assert isinstance(errors[1].__cause__, ZeroDivisionError)
    assert errors[2] is None
    statistics = io.statistics()
    assert (statistics.read_calls, statistics.write_calls, statistics.errors) == (2, 1, 2)
    assert (statistics.bytes_read, statistics.bytes_written) == (PAGE, 0)


async def test_an_on_done_that_raises_does_not_stop_the_others(io: BlockIO, file: IOFile) -> None:
    reported: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: reported.append(context))

    def bad(one: Transfer, error: HsswapError | None) -> None:
        raise ZeroDivisionError

    collector = Collector()
    pages = Pages(1)
    io.submit([transfer(Operation.READ, file, pages, done) for done in (bad, bad, collector)])
    await collector.all(1)
    await io.close()
    loop.set_exception_handler(None)
    assert [type(context["exception"]) for context in reported] == [ZeroDivisionError] * 2


async def test_after_deliveries_comes_last(io: BlockIO, file: IOFile) -> None:
    told: list[str] = []
    io.after_deliveries = lambda: told.append("after")
    collector = Collector()

    def done(one: Transfer, error: HsswapError | None) -> None:
        told.append("done")
        collector(one, error)

    pages = [Pages(1) for _ in range(8)]
    io.submit([transfer(Operation.READ, file, one, done, 0) for one in pages])
    await collector.all(8)
    assert told.count("done") == 8
    assert told[-1] == "after"
    assert told.count("after") <= 8


async def test_needed_reads_overtake_prefetch_and_writes(
    make: Callable[[int], BlockIO], tmp_path: Path
) -> None:
    io = make(1)
    await io.start(place_for(io, tmp_path))
    file = await io.create_file(tmp_path / "file", 16 * PAGE)
    gate, reached = threading.Event(), threading.Event()
    order: list[str] = []

    def hold(one: Transfer) -> None:
        reached.set()
        gate.wait()

    def note(name: str) -> Callable[[Transfer], None]:
        return lambda one: order.append(name)

    collector, pages = Collector(), Pages(1)
    io.submit([transfer(Operation.READ, file, pages, collector, verify=hold)])
    await asyncio.get_running_loop().run_in_executor(None, reached.wait)
    for name, operation, priority in [
        ("write 1", Operation.WRITE, Priority.WRITE),
        ("prefetch 1", Operation.READ, Priority.PREFETCH),
        ("write 2", Operation.WRITE, Priority.WRITE),
        ("needed 1", Operation.READ, Priority.NEEDED),
        ("prefetch 2", Operation.READ, Priority.PREFETCH),
        ("needed 2", Operation.READ, Priority.NEEDED),
    ]:
        hooks = {"verify" if operation is Operation.READ else "prepare": note(name)}
        io.submit([transfer(operation, file, pages, collector, 0, priority, **hooks)])
    gate.set()
    await collector.all(7)
    assert order == ["needed 1", "needed 2", "prefetch 1", "prefetch 2", "write 1", "write 2"]
    await io.close()


async def test_a_deadline_that_has_passed(io: BlockIO, file: IOFile) -> None:
    pages = Pages(1)
    pages.spans[:] = 3
    errors = await run(
        io,
        transfer(Operation.READ, file, pages, ignore, deadline=0.0),
        transfer(Operation.READ, file, Pages(1), ignore, deadline=1e18),
    )
    assert isinstance(errors[0], BlockIOError)
    assert errors[0].errno == errno.ETIMEDOUT
    assert errors[1] is None
    assert (pages.spans == 3).all()  # it was not begun


async def test_the_owner_lives_until_the_end_and_not_longer(io: BlockIO, file: IOFile) -> None:
    collector, pages = Collector(), Pages(1)
    alive = weakref.ref(pages)
    io.submit([transfer(Operation.READ, file, pages, collector)])
    del pages
    await collector.all(1)
    assert alive() is not None
    collector.ended.clear()
    await asyncio.sleep(0)
    gc.collect()
    assert alive() is None


async def test_close_drains_refuses_and_may_be_called_again(
    make: Callable[[int], BlockIO], tmp_path: Path
) -> None:
    io = make(2)
    await io.start(place_for(io, tmp_path))
    file = await io.create_file(tmp_path / "file", 16 * PAGE)
    collector = Collector()
    batch = [transfer(Operation.READ, file, Pages(16), collector) for _ in range(LIMIT)]
    io.submit(batch)
    await asyncio.gather(io.close(), io.close())
    assert collector.errors == [None] * LIMIT
    await io.close()
    for call in (
        lambda: io.submit(batch[:1]),
        lambda: io.create_file(tmp_path / "other", PAGE),
        lambda: io.sync(file),
    ):
        with pytest.raises(ClosedError):
            call()


def test_writes_that_had_no_turn_before_their_loop_was_closed_are_made(
    make: Callable[[int], BlockIO], tmp_path: Path
) -> None:
    io = make(2)

    async def begin() -> None:
        await io.start(place_for(io, tmp_path))
        file = await io.create_file(tmp_path / "file", LIMIT * PAGE)
        places = [at * PAGE for at in range(LIMIT)]
        told = lambda one, error: None  # noqa: E731
        io.submit(
            [transfer(Operation.WRITE, file, Pages(1), told, at, quick=True) for at in places]
        )

    own = asyncio.new_event_loop()
    own.run_until_complete(begin())
    own.close()
    asyncio.run(asyncio.wait_for(io.close(), 60))
    counts = io.statistics()
    assert (counts.in_flight, counts.bytes_written, counts.errors) == (0, LIMIT * PAGE, 0)


async def test_close_goes_on_when_cancelled(make: Callable[[int], BlockIO], tmp_path: Path) -> None:
    io = make(1)
    await io.start(place_for(io, tmp_path))
    file = await io.create_file(tmp_path / "file", PAGE)
    gate, reached = threading.Event(), threading.Event()

    def hold(one: Transfer) -> None:
        reached.set()
        gate.wait()

    collector = Collector()
    io.submit([transfer(Operation.READ, file, Pages(1), collector, verify=hold)])
    await asyncio.get_running_loop().run_in_executor(None, reached.wait)
    closing = asyncio.ensure_future(io.close())
    await asyncio.sleep(0)
    for _ in range(3):
        closing.cancel()
        await asyncio.sleep(0)
    assert not closing.done()
    assert collector.ended == []  # the buffer is still the transfer's
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert collector.errors == [None]
    assert "closed" in repr(io)


async def test_files_are_made_once_and_removed(io: BlockIO, file: IOFile, tmp_path: Path) -> None:
    with pytest.raises(BlockIOError, match="exists") as caught:
        await io.create_file(file.path, PAGE)
    assert caught.value.errno == errno.EEXIST
    await io.sync(file)
    await io.remove_file(file)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArgumentError, match="not open"):
        io.submit([transfer(Operation.READ, file, Pages(1), ignore)])
    with pytest.raises(ArgumentError, match="not open"):
        io.remove_file(file)
    again = await io.create_file(file.path, PAGE)
    assert again.nbytes == PAGE


async def test_a_file_in_use_is_not_removed(io: BlockIO, file: IOFile) -> None:
    collector = Collector()
    io.submit([transfer(Operation.READ, file, Pages(1), collector)])
    with pytest.raises(ArgumentError, match="1 transfers in flight"):
        io.remove_file(file)
    await collector.all(1)
    await io.remove_file(file)


async def test_start_is_once_and_first(make: Callable[[int], BlockIO], tmp_path: Path) -> None:
    io = make(1)
    with pytest.raises(ClosedError, match="not started"):
        io.create_file(tmp_path / "file", PAGE)
    await io.start(place_for(io, tmp_path))
    assert io.path != "not started"
    with pytest.raises(ArgumentError, match="before"):
        await io.start(place_for(io, tmp_path))
    await io.close()


async def test_closing_what_was_not_started(make: Callable[[int], BlockIO]) -> None:
    io = make(1)
    await io.close()
    await io.close()


def test_names() -> None:
    assert open_backend("auto").name == "auto"
    assert open_backend("uring").name == "uring"
    assert open_backend("posix", threads=2).name == "posix"
    assert open_backend("memory").name == "memory"
    with pytest.raises(
        ConfigError, match=r"'floppy' is unknown; known: auto, posix, uring, memory"
    ):
        open_backend("floppy")
    with pytest.raises(ConfigError, match="io_threads is 0"):
        open_backend("posix", threads=0)
