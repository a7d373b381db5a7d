"""The part of the contract that persistent stores need: files that are there already."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from hsswap.errors import BlockIOError
from hsswap.io.base import BlockIO, Operation
from hsswap.io.memory import MemoryIO
from hsswap.io.posix import PosixIO
from hsswap.io.uring import UringIO
from tests.io.support import PAGE, Pages
from tests.io.transfers import ignore, run, transfer

BACKENDS: dict[str, Callable[[], BlockIO]] = {
    "posix": lambda: PosixIO(1),
    "uring": UringIO,
    "memory": lambda: MemoryIO(files={Path("place/old"): np.full(2 * PAGE, 7, np.uint8)}),
}


@pytest.fixture(params=BACKENDS)
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BlockIO]:
    """A started backend; ``old``, two pages of sevens, is in the directory of :func:`place_of`."""
    io = BACKENDS[request.param]()
    if io.needs_directory:
        (tmp_path / "old").write_bytes(b"\7" * 2 * PAGE)
    await io.start(tmp_path if io.needs_directory else None)
    yield io
    await io.close()


def place_of(io: BlockIO, tmp_path: Path) -> Path:
    return tmp_path if io.needs_directory else Path("place")


async def test_files_are_listed_with_their_sizes(backend: BlockIO, tmp_path: Path) -> None:
    place = place_of(backend, tmp_path)
    await backend.create_file(place / "new", 3 * PAGE)
    assert await backend.file_sizes(place) == {"old": 2 * PAGE, "new": 3 * PAGE}
    await backend.remove_file(await backend.open_file(place / "old", 0))
    assert await backend.file_sizes(place) == {"new": 3 * PAGE}


async def test_an_old_file_is_read_written_and_synced(backend: BlockIO, tmp_path: Path) -> None:
    file = await backend.open_file(place_of(backend, tmp_path) / "old", 2 * PAGE)
    pages = Pages(2)
    assert await run(backend, transfer(Operation.READ, file, pages, ignore)) == [None]
    assert (pages.spans == 7).all()
    pages.spans[:] = 9
    assert await run(backend, transfer(Operation.WRITE, file, pages, ignore)) == [None]
    await backend.sync(file)
    pages.spans[:] = 0
    assert await run(backend, transfer(Operation.READ, file, pages, ignore)) == [None]
    assert (pages.spans == 9).all()


async def test_a_short_file_is_made_longer_with_zeros(backend: BlockIO, tmp_path: Path) -> None:
    place = place_of(backend, tmp_path)
    file = await backend.open_file(place / "old", 4 * PAGE)
    pages = Pages(4)
    assert await run(backend, transfer(Operation.READ, file, pages, ignore)) == [None]
    assert pages.spans[:, 0].tolist() == [7, 7, 0, 0]
    assert (await backend.file_sizes(place))["old"] == 4 * PAGE


async def test_a_missing_file_is_an_error(backend: BlockIO, tmp_path: Path) -> None:
    place = place_of(backend, tmp_path)
    with pytest.raises(BlockIOError) as caught:
        await backend.open_file(place / "none", PAGE)
    assert caught.value.errno == errno.ENOENT
    assert "none" not in await backend.file_sizes(place)
