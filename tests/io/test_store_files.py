"""BlockStore: its directory, lock and segment files."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest

from hsswap.errors import (
    ArgumentError,
    BlockIOError,
    ClosedError,
    ConfigError,
    StoreLocked,
)
from hsswap.io import BlockStore
from hsswap.io.directory import LOCK_NAME, StoreDirectory, segment_name
from hsswap.io.memory import Fault, FaultKind
from hsswap.io.posix import PosixIO
from tests.io.support import (
    BLOCK,
    DIMS,
    Reading,
    memory_store,
    pattern,
    read,
    until,
    write,
)


async def test_segment_files_come_and_go(tmp_path: Path) -> None:
    async with await BlockStore.open(DIMS, tmp_path, 600, io="posix") as store:
        assert [path.name for path in tmp_path.iterdir()] == [LOCK_NAME]
        ids = store.ids.allocate(600)
        indices = store.ids.check(ids)
        await write(store, 0, indices[[0, 300, 599]], pattern(3, BLOCK, 1))
        names = {segment_name(number) for number in range(3)}
        assert {path.name for path in tmp_path.iterdir()} == {LOCK_NAME, *names}
        for path in tmp_path.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert (tmp_path / segment_name(0)).stat().st_size == 256 * DIMS.id_bytes
        store.ids.drop_reference(ids[256:512])
        await until(lambda: store.statistics().segment_files == 2)
        again = store.ids.check(store.ids.allocate(2))
        assert 256 <= again[0] < 512
        content = pattern(2, BLOCK, 2)
        await write(store, 0, again, content)  # behind the removal
        found, _ = await read(store, 0, again)
        assert np.array_equal(found, content)
        found, _ = await read(store, 0, indices[[0]])
        assert np.array_equal(found, pattern(3, BLOCK, 1)[:1])
    assert list(tmp_path.iterdir()) == []


async def test_a_segment_is_removed_when_its_last_transfer_ended() -> None:
    hold = Fault(FaultKind.HOLD, only="read")
    async with await memory_store(hold) as store:
        ids = store.ids.allocate(4)
        await write(store, 0, store.ids.check(ids), pattern(4, BLOCK, 1))
        reading = Reading(store, 0, store.ids.check(ids))
        store.ids.drop_reference(ids)
        await asyncio.sleep(0)
        assert store.statistics().segment_files == 1
        hold.gate.opened.set()
        await reading.outcome.end()
        assert np.array_equal(reading.pages.spans, pattern(4, BLOCK, 1))
        await until(lambda: store.statistics().segment_files == 0)


async def test_a_segment_that_cannot_be_removed_stays_in_use() -> None:
    async with await memory_store(Fault(FaultKind.ERRNO, only="remove")) as store:
        ids = store.ids.allocate(4)
        await write(store, 0, store.ids.check(ids), pattern(4, BLOCK, 1))
        store.ids.drop_reference(ids)
        await until(lambda: store.statistics().errors == 1)
        again = store.ids.allocate(4)
        content = pattern(4, BLOCK, 2)
        await write(store, 0, store.ids.check(again), content)
        found, _ = await read(store, 0, store.ids.check(again))
        assert np.array_equal(found, content)
        store.ids.drop_reference(again)
        await until(lambda: store.statistics().segment_files == 0)


async def test_ids_may_be_freed_on_another_thread(tmp_path: Path) -> None:
    async with await BlockStore.open(DIMS, tmp_path, 600, io="posix") as store:
        ids = store.ids.allocate(4)
        await write(store, 0, store.ids.check(ids), pattern(4, BLOCK, 1))
        thread = threading.Thread(target=store.ids.drop_reference, args=(ids,))
        thread.start()
        thread.join()
        await until(lambda: store.statistics().segment_files == 0)


async def test_a_directory_is_made_and_removed_with_its_parents(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    async with await BlockStore.open(DIMS, place, 300) as store:
        assert stat.S_IMODE(place.stat().st_mode) == 0o700
        assert store.directory == place
        assert store.path
    assert list(tmp_path.iterdir()) == []


async def test_foreign_files_are_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "store"
    async with await BlockStore.open(DIMS, place, 300):
        (place / "notes.txt").write_text("mine")
        (place / "segment-1.kv").write_text("not one of ours")
    assert sorted(path.name for path in place.iterdir()) == ["notes.txt", "segment-1.kv"]


async def test_without_a_directory_a_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "hsswap-killed"
    left.mkdir()
    (left / LOCK_NAME).write_text("1 made\n")
    (left / segment_name(3)).write_text("old")
    (tmp_path / "hsswap-other").mkdir()  # without a lock file it is not a store
    async with await BlockStore.open(DIMS, None, 300) as first:
        async with await BlockStore.open(DIMS, None, 300) as second:
            assert first.directory is not None
            assert second.directory not in (None, first.directory)
            assert first.directory.exists()  # not swept by the second
        assert first.directory.parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["hsswap-other"]


def test_many_temporary_stores_begin_and_end_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sweeps what killed ones left, and takes nobody else's for that."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    begin, problems = threading.Barrier(8), []

    def open_and_close() -> None:
        begin.wait()
        for number in range(25):
            try:
                directory = StoreDirectory.open(None)
                (directory.path / segment_name(number)).write_bytes(b"x")
                assert (directory.path / segment_name(number)).read_bytes() == b"x"
                directory.close()
            except BaseException as problem:
                problems.append(problem)

    threads = [threading.Thread(target=open_and_close) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert list(tmp_path.iterdir()) == []


OWNER = """
import asyncio, sys
from hsswap.io import BlockStore
from tests.io.support import DIMS, pattern, write
async def main():
    store = await BlockStore.open(DIMS, sys.argv[1], 300, io="posix")
    await write(store, 0, store.ids.check(store.ids.allocate(3)), pattern(3, 4096, 1))
    print("open", flush=True)
    sys.stdin.readline()
    await store.close()
asyncio.run(main())
"""


def start_owner(place: Path) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(place)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    return child


def test_a_second_opener_and_a_killed_owner(tmp_path: Path) -> None:
    place = tmp_path / "store"

    async def attempt() -> None:
        async with await BlockStore.open(DIMS, place, 300):
            assert [path.name for path in place.iterdir()] == [LOCK_NAME]

    with start_owner(place) as child:
        with pytest.raises(StoreLocked, match=f"process {child.pid};"):
            asyncio.run(attempt())
        assert (place / segment_name(0)).exists()
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert {path.name for path in place.iterdir()} == {LOCK_NAME, segment_name(0)}
    asyncio.run(attempt())
    assert not place.exists()  # made by the killed one, so removed for it


async def test_a_second_opener_in_the_same_process(tmp_path: Path) -> None:
    async with await BlockStore.open(DIMS, tmp_path, 300):
        with pytest.raises(StoreLocked, match=f"process {os.getpid()};"):
            await BlockStore.open(DIMS, tmp_path, 300)
    async with await BlockStore.open(DIMS, tmp_path, 300):
        pass


def test_the_lock_is_a_file_of_ours(tmp_path: Path) -> None:
    directory = StoreDirectory.open(tmp_path)
    assert stat.S_IMODE((tmp_path / LOCK_NAME).stat().st_mode) == 0o600
    assert (tmp_path / LOCK_NAME).read_text() == f"{os.getpid()} found\n"
    directory.close()
    directory.close()
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="symbolic link"):
        StoreDirectory.open(tmp_path)
    assert not (tmp_path / "victim").exists()


def held(path: Path) -> StoreDirectory:
    """A directory that is locked, with a segment in it."""
    directory = StoreDirectory.open(path)
    (path / segment_name(0)).write_bytes(b"of " + str(path).encode())
    return directory


def test_a_directory_that_went_away_is_let_go(tmp_path: Path) -> None:
    first = held(tmp_path / "made" / "store")
    shutil.rmtree(tmp_path / "made")
    first.close()
    assert list(tmp_path.iterdir()) == []
    second = held(tmp_path / "store")
    shutil.rmtree(tmp_path / "store")
    (tmp_path / "store").write_text("mine")
    second.close()
    assert (tmp_path / "store").read_text() == "mine"


def test_what_another_store_has_in_its_place_stays(tmp_path: Path) -> None:
    place = tmp_path / "store"
    first = held(place)
    shutil.rmtree(place)
    second = held(place)
    first.close()
    with pytest.raises(StoreLocked):
        StoreDirectory.open(place)
    assert {path.name for path in place.iterdir()} == {LOCK_NAME, segment_name(0)}
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lost_lock_file_does_not_keep_the_rest(tmp_path: Path) -> None:
    directory = held(tmp_path / "store")
    (tmp_path / "store" / LOCK_NAME).unlink()
    directory.close()
    assert list(tmp_path.iterdir()) == []


async def test_places_where_no_store_can_be(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"is not a directory; name another"):
        await BlockStore.open(DIMS, file, 300)
    with pytest.raises(ConfigError, match=r"is not a directory; name another"):
        await BlockStore.open(DIMS, file / "below", 300)
    with pytest.raises(
        ConfigError, match=r"/proc/self cannot be made|/proc/self cannot be written"
    ):
        await BlockStore.open(DIMS, Path("/proc/self"), 300)
    with pytest.raises(ConfigError):
        await BlockStore.open(DIMS, Path("/proc/none"), 300)
    with pytest.raises(ConfigError, match="too long"):
        await BlockStore.open(DIMS, tmp_path / ("x" * 300), 300)
    assert file.read_text() == "mine"
    assert list(tmp_path.iterdir()) == [file]


async def test_a_backend_of_another_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    used = PosixIO(1)
    async with await BlockStore.open(DIMS, tmp_path / "first", 300, io=used) as store:
        with pytest.raises(ArgumentError, match="before"):
            await BlockStore.open(DIMS, tmp_path / "second", 300, io=used)
        assert [place.name for place in tmp_path.iterdir()] == ["first"]
        indices = store.ids.check(store.ids.allocate(3))
        content = pattern(3, BLOCK, 7)
        assert not (await write(store, 0, indices, content)).errors
        found, outcome = await read(store, 0, indices)
        assert not outcome.errors
        assert np.array_equal(found, content)
    with pytest.raises(ClosedError):
        await BlockStore.open(DIMS, tmp_path / "third", 300, io=used)
    assert list(tmp_path.iterdir()) == []


async def test_a_backend_that_does_not_start_is_closed(tmp_path: Path) -> None:
    class Failing(PosixIO):
        async def start(self, directory: Path | None) -> None:
            await super().start(directory)
            raise BlockIOError("no")

    failing = Failing(2)
    with pytest.raises(BlockIOError, match="no"):
        await BlockStore.open(DIMS, tmp_path / "store", 300, io=failing)
    with pytest.raises(ClosedError):
        failing.create_file(tmp_path / "file", 4096)
    assert list(tmp_path.iterdir()) == []


async def test_names_and_sizes_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="known: auto, posix, uring, memory"):
        await BlockStore.open(DIMS, tmp_path / "store", 300, io="floppy")
    with pytest.raises(ConfigError, match="capacity"):
        await BlockStore.open(DIMS, tmp_path / "store", 0)
    assert not (tmp_path / "store").exists()
