"""What only the posix backend does: direct I/O or not, short counts, interrupted calls, modes."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsswap.errors import BlockIOError, ConfigError, OutOfSpace
from hsswap.io import linux
from hsswap.io.base import IOFile, Operation, Priority, Transfer
from hsswap.io.posix import PosixIO, VectoredCalls
from tests.io.support import PAGE, Pages, pattern

SHM = Path("/dev/shm")


class FakeDisk:
    """preadv on a bytes object, moving at most so many bytes a call, or failing, by a script."""

    def __init__(self, content: bytes, script: list[int]) -> None:
        self.content = content
        self.script = list(script)
        self.calls: list[tuple[int, int]] = []

    def preadv(self, descriptor: int, iovecs: int, count: int, offset: int) -> int:
        assert count <= linux.IOV_MAX
        self.calls.append((offset, count))
        limit = self.script.pop(0) if self.script else 1 << 60
        if limit < 0:
            return limit
        table = np.ctypeslib.as_array((ctypes.c_uint64 * (2 * count)).from_address(iovecs))
        moved = 0
        for address, length in table.reshape(count, 2).tolist():
            piece = self.content[offset + moved : offset + moved + length][: limit - moved]
            ctypes.memmove(address, piece, len(piece))
            moved += len(piece)
        return moved


SCRIPTS = st.lists(st.sampled_from([-errno.EINTR, 1, 7, 500, 4096, 4097, 8192, 9000]), max_size=12)


@given(st.integers(1, 6), st.sampled_from([1, 3]), SCRIPTS, st.integers(0, 3))
def test_short_counts_go_on_at_the_right_place(
    spans: int, span_pages: int, script: list[int], offset: int
) -> None:
    content = pattern(offset + spans * span_pages, PAGE, 1)
    for alignment in (1, PAGE):
        disk = FakeDisk(content.tobytes(), script)
        pages = Pages(spans, span_pages * PAGE)
        moved = linux.move_all(
            disk.preadv, 0, pages.addresses, span_pages * PAGE, offset * PAGE, alignment
        )
        assert moved.error == 0
        if moved.nbytes == spans * span_pages * PAGE:
            assert pages.spans.tobytes() == content[offset:].tobytes()
        else:
            assert alignment == PAGE  # a call made less than an aligned step
            assert any(0 < step < PAGE for step in script)
        assert all((place - offset * PAGE) % alignment == 0 for place, _ in disk.calls)


def test_long_runs_are_cut_into_calls() -> None:
    content = pattern(2500, 16, 1)
    disk = FakeDisk(content.tobytes(), [])
    target = np.zeros((2500, 16), np.uint8)
    addresses = np.uint64(target.ctypes.data) + np.arange(2500, dtype=np.uint64) * np.uint64(16)
    assert linux.move_all(disk.preadv, 0, addresses, 16, 0, 1) == (2500 * 16, 0)
    assert disk.calls == [(0, 1024), (1024 * 16, 1024), (2048 * 16, 452)]
    assert np.array_equal(target, content)


async def read_file(io: PosixIO, file: IOFile, pages: Pages) -> object:
    future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    reading = Transfer(
        Operation.READ,
        file,
        0,
        pages.addresses,
        PAGE,
        Priority.NEEDED,
        lambda transfer, error: future.set_result(error),
        owner=pages,
    )
    io.submit([reading])
    return await future


async def test_a_truncated_file_is_an_error(tmp_path: Path) -> None:
    io = PosixIO(1)
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 8 * PAGE)
    os.truncate(file.path, 3 * PAGE)
    error = await read_file(io, file, Pages(8))
    await io.close()
    assert isinstance(error, BlockIOError)
    assert f"ended after {3 * PAGE} of {8 * PAGE} bytes" in str(error)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EBADF])
async def test_an_error_number_becomes_ours(tmp_path: Path, number: int) -> None:
    io = PosixIO(1, calls=VectoredCalls(read=lambda *_: -number))
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", PAGE)
    error = await read_file(io, file, Pages(1))
    await io.close()
    assert type(error) is (OutOfSpace if number == errno.ENOSPC else BlockIOError)
    assert error.errno == number
    assert os.strerror(number) in str(error)
    assert f"reading {PAGE} bytes at 0 of {file.path}" in str(error)


async def test_a_vanished_directory(tmp_path: Path) -> None:
    io = PosixIO(1)
    with pytest.raises(BlockIOError) as caught:
        await io.start(tmp_path / "missing")
    assert caught.value.errno == errno.ENOENT
    await io.close()
    with pytest.raises(ConfigError):
        await PosixIO(1).start(None)


async def test_too_large_a_file_leaves_nothing_behind(tmp_path: Path) -> None:
    io = PosixIO(1)
    await io.start(tmp_path)
    for _ in range(2):
        with pytest.raises(OutOfSpace, match=r"free some space|choose another"):
            await io.create_file(tmp_path / "file", 1 << 50)
        assert list(tmp_path.iterdir()) == []
    await io.close()


async def test_mode_and_length_of_files(tmp_path: Path) -> None:
    old = os.umask(0)
    io = PosixIO(1)
    try:
        await io.start(tmp_path)
        file = await io.create_file(tmp_path / "file", 5 * PAGE)
    finally:
        os.umask(old)
    found = file.path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_size == 5 * PAGE
    assert found.st_blocks * 512 >= 5 * PAGE  # allocated, no holes
    await io.close()


async def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").symlink_to(tmp_path / "elsewhere")
    io = PosixIO(1)
    await io.start(tmp_path)
    with pytest.raises(BlockIOError):
        await io.create_file(tmp_path / "file", PAGE)
    await io.close()
    assert not (tmp_path / "elsewhere").exists()


def open_flags(path: Path) -> int:
    """The flags under which this process has a file open."""
    for number in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{number}") == str(path.resolve()):
            info = Path(f"/proc/self/fdinfo/{number}").read_text()
            return int(info.split("flags:")[1].split()[0], 8)
    raise AssertionError(f"{path} is not open")


async def test_the_path_told_is_the_path_taken(tmp_path: Path) -> None:
    io = PosixIO(1)
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", PAGE)
    direct = bool(open_flags(file.path) & os.O_DIRECT)
    path = io.path
    await io.close()
    assert direct == (path == "O_DIRECT")
    assert direct or path.startswith("page cache (")


@pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="/dev/shm, a tmpfs, cannot be written to")
async def test_tmpfs_goes_through_the_page_cache_and_says_so() -> None:
    place = SHM / f"hsswap-test-{os.getpid()}"
    place.mkdir()
    io = PosixIO(1)
    try:
        await io.start(place)
        assert io.path == "page cache (tmpfs)"
        file = await io.create_file(place / "file", PAGE)
        assert not open_flags(file.path) & os.O_DIRECT
        await io.remove_file(file)
    finally:
        await io.close()
        place.rmdir()


async def test_threads_have_names(tmp_path: Path) -> None:
    io = PosixIO(2)
    await io.start(tmp_path)
    names = sorted(thread.name for thread in io._threads)
    await io.close()
    assert names == ["hsswap-io-0", "hsswap-io-1"]
