"""``auto``: what it picks, what it says, and that it leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hsswap.errors import ArgumentError, BlockIOError, ClosedError, ConfigError
from hsswap.io import choose, open_backend
from hsswap.io.base import Operation
from hsswap.io.choose import AutoIO
from hsswap.io.gds_driver import GdsUnavailable
from hsswap.io.uring_ring import RingRefused
from tests.conftest import missing_for_gpu
from tests.io.support import PAGE, Pages, pattern
from tests.io.transfers import ignore, run, transfer


async def test_it_picks_says_why_and_works(tmp_path: Path) -> None:
    io = open_backend("auto")
    assert isinstance(io, AutoIO)
    assert (io.name, io.path, io.room) == ("auto", "not started", io.limit)
    await io.start(tmp_path)
    assert io.name in ("posix", "uring")
    assert io.why.startswith(f"{io.name}: ")
    assert "ms of processor" in io.why
    assert list(tmp_path.iterdir()) == []
    told: list[int] = []
    io.after_deliveries = lambda: told.append(io.statistics().in_flight)
    file = await io.create_file(tmp_path / "file", 4 * PAGE)
    source, target = Pages(4), Pages(4)
    source.spans[:] = pattern(4, PAGE, 1)
    assert await run(io, transfer(Operation.WRITE, file, source, ignore)) == [None]
    assert await run(io, transfer(Operation.READ, file, target, ignore)) == [None]
    assert np.array_equal(target.spans, source.spans)
    assert told == [0, 0]
    assert await io.file_sizes(tmp_path) == {"file": 4 * PAGE}
    await io.sync(file)
    await io.remove_file(file)
    with pytest.raises(ArgumentError, match="before"):
        await io.start(tmp_path)
    await io.close()
    await io.close()


async def test_without_a_ring_it_is_posix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RingRefused(38, "this kernel has no io_uring")

    monkeypatch.setattr("hsswap.io.uring.Ring", refuse)
    io = AutoIO()
    await io.start(tmp_path)
    assert io.name == "posix"
    assert "this kernel has no io_uring" in io.why
    await io.close()


async def test_leftovers_of_a_killed_one_are_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / f"{choose.PROBE_NAME}-uring").write_bytes(b"")
    io = AutoIO()
    await io.start(tmp_path)
    await io.close()
    assert list(tmp_path.iterdir()) == []


async def test_misuse(tmp_path: Path) -> None:
    io = AutoIO()
    with pytest.raises(ClosedError, match="not started"):
        io.create_file(tmp_path / "file", PAGE)
    with pytest.raises(ConfigError, match="needs a directory"):
        await io.start(None)
    await io.close()
    with pytest.raises(ClosedError):
        await io.start(tmp_path)
    with pytest.raises(BlockIOError) as caught:
        await AutoIO().start(tmp_path / "missing")
    assert caught.value.errno == 2


@pytest.mark.skipif(missing_for_gpu() is None, reason="this machine has libcuda.so.1")
@pytest.mark.parametrize("name", ["gds", "gds-compat"])
async def test_without_a_driver_neither_path_of_kvikio_is_offered(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(GdsUnavailable) as caught:
        await open_backend(name).start(tmp_path)
    message = str(caught.value)
    assert message.startswith(f"io={name!r} cannot work here: ")
    assert message.endswith(". Otherwise choose io='auto', io='posix'")
