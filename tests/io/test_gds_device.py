"""What gds does beyond the contract: device memory, kvikio's settings, both paths told apart.

It needs kvikio and the stand-ins of libcuda and libcufile; test_gds.py runs this file on them.
"""

from __future__ import annotations

import asyncio
import errno
import importlib
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.errors import ArgumentError, BlockIOError, CorruptBlock
from hsswap.io import BlockStore
from hsswap.io.base import Operation
from hsswap.io.gds import GdsIO
from hsswap.io.gds_kvikio import Kvikio
from tests.io.gds_support import (
    DevicePages,
    Drivers,
    all_given_back,
    compatible,
    device_transfer,
    gpudirect,
    missing_here,
    settings,
    stand_in,
)
from tests.io.support import BLOCK, DIMS, PAGE, Outcome, Pages, fresh, pattern, read, write
from tests.io.test_spans import Ends, spans
from tests.io.transfers import ignore, run, transfer

if missing := missing_here():
    pytest.skip(missing, allow_module_level=True)

# Not marked gds: on a GPU host these are not to run.
pytestmark = pytest.mark.skipif(stand_in() is None, reason="it needs the stand-ins for a driver")

COPY = "cuMemcpyBatchAsync_v2"  # kvikio's copy on the driver of CUDA 13
CUDA_ERROR_LAUNCH_FAILED = 719


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drivers]:
    with all_given_back(monkeypatch) as found:
        yield found


@pytest.fixture(params=[compatible, gpudirect])
def backend(request: pytest.FixtureRequest, drivers: Drivers) -> GdsIO:
    made: GdsIO = request.param()
    return made


async def test_an_error_is_the_error_of_its_transfer(drivers: Drivers, tmp_path: Path) -> None:
    io = compatible()
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 8 * PAGE)
    pages = [DevicePages(1) for _ in range(4)]
    drivers.fail(COPY, 3, CUDA_ERROR_LAUNCH_FAILED)
    errors = await run(
        io, *(device_transfer(Operation.READ, file, one, ignore, i * PAGE) for i, one in
              enumerate(pages))
    )  # fmt: skip
    assert [error is None for error in errors] == [True, True, False, True]
    assert isinstance(errors[2], BlockIOError)
    assert f"reading {PAGE} bytes at {2 * PAGE}" in str(errors[2])
    assert io.statistics().errors == 1
    await io.close()


async def test_one_of_many_pieces_fails_and_the_rest_have_ended(
    drivers: Drivers, tmp_path: Path
) -> None:
    io = compatible()
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 8 * PAGE)
    scattered, other = (
        device_transfer(Operation.READ, file, DevicePages(count), ignore) for count in (8, 2)
    )
    for one in (scattered, other):
        one.addresses = one.addresses[::-1].copy()
    before = drivers.count(COPY)
    drivers.fail(COPY, 2, CUDA_ERROR_LAUNCH_FAILED)
    errors = await run(io, scattered, other)
    assert isinstance(errors[0], BlockIOError)
    assert errors[1] is None
    assert drivers.count(COPY) == before + 8 + 2  # nothing was left running
    await io.close()


async def test_a_file_that_was_cut_short(backend: GdsIO, tmp_path: Path) -> None:
    await backend.start(tmp_path)
    file = await backend.create_file(tmp_path / "file", 8 * PAGE)
    os.truncate(file.path, 2 * PAGE)
    reads = [device_transfer(Operation.READ, file, DevicePages(2), ignore, at * PAGE)
             for at in (0, 1, 4)]  # fmt: skip
    errors = await run(backend, *reads)
    assert errors[0] is None
    assert [type(error) for error in errors[1:]] == [BlockIOError, BlockIOError]
    await backend.close()


async def test_spans_in_several_allocations_and_neighbours_in_one_call(
    drivers: Drivers, tmp_path: Path
) -> None:
    io = gpudirect()
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 16 * PAGE)
    first, second = DevicePages(8), DevicePages(8)
    first.spans[:], second.spans[:] = pattern(8, PAGE, 1), pattern(8, PAGE, 2)
    second.upload()
    sent = device_transfer(Operation.WRITE, file, first, ignore)
    sent.addresses = np.concatenate([first.addresses, second.addresses])
    writes, reads = drivers.cufile("writes"), drivers.cufile("reads")
    assert await run(io, sent) == [None]
    assert drivers.cufile("writes") == writes + 2
    host = Pages(16)
    assert await run(io, transfer(Operation.READ, file, host, ignore)) == [None]
    assert np.array_equal(host.spans, np.concatenate([first.spans, second.spans]))
    assert drivers.cufile("reads") == reads  # host memory takes no detour
    await io.close()


async def test_short_reads_into_the_device(backend: GdsIO, tmp_path: Path) -> None:
    await backend.start(tmp_path)
    file = await backend.create_file(tmp_path / "file", 16 * PAGE)
    content, source = pattern(16, PAGE, 1), Pages(16)
    source.spans[:] = content
    assert await run(backend, transfer(Operation.WRITE, file, source, ignore)) == [None]
    there, where = DevicePages(8), [3, 15, 0, 7, 8, 2, 2, 9]
    ends = Ends(8)
    backend.submit_spans(spans([file] * 8, [PAGE * n for n in where], there, ends))
    assert set((await ends.all()).values()) == {None}
    there.download()
    assert np.array_equal(there.spans, content[where])
    await backend.close()


async def test_short_reads_fail_each_alone(backend: GdsIO, tmp_path: Path) -> None:
    await backend.start(tmp_path)
    file = await backend.create_file(tmp_path / "file", 16 * PAGE)
    content, source = pattern(16, PAGE, 1), Pages(16)
    source.spans[:] = content
    assert await run(backend, transfer(Operation.WRITE, file, source, ignore)) == [None]
    os.truncate(file.path, 8 * PAGE)
    there, ends = DevicePages(4), Ends(4)
    reads = spans([file] * 4, [0, PAGE, 9 * PAGE, 2 * PAGE], there, ends)
    reads.addresses[1] = int(source.addresses[0])  # not of the device, as the first is
    backend.submit_spans(reads)
    errors = await ends.all()
    assert isinstance(errors[1], ArgumentError)
    assert isinstance(errors[2], BlockIOError)
    assert errors[0] is errors[3] is None
    assert sorted(ends.verified) == [0, 3]
    there.download()
    assert np.array_equal(there.spans[[0, 3]], content[[0, 2]])
    await backend.close()


async def test_a_copy_that_fails_is_the_error_of_its_span(drivers: Drivers, tmp_path: Path) -> None:
    io = compatible()
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 8 * PAGE)
    drivers.fail(COPY, 3, CUDA_ERROR_LAUNCH_FAILED)
    before, ends = drivers.count(COPY), Ends(6)
    io.submit_spans(spans([file] * 6, [PAGE * n for n in range(6)], DevicePages(6), ends))
    errors = [error for error in (await ends.all()).values() if error is not None]
    assert [type(error) for error in errors] == [BlockIOError]
    assert drivers.count(COPY) == before + 6  # nothing was left running
    await io.close()


async def test_memory_that_belongs_to_no_context(
    backend: GdsIO, drivers: Drivers, tmp_path: Path
) -> None:
    memory = DevicePages.memory
    await backend.start(tmp_path)
    file = await backend.create_file(tmp_path / "file", 4 * PAGE)
    address = memory.allocate_pooled(4 * PAGE)
    host = Pages(4)
    host.spans[:] = pattern(4, PAGE, 5)
    assert await run(backend, transfer(Operation.WRITE, file, host, ignore)) == [None]
    pooled = transfer(Operation.READ, file, host, ignore)
    pooled.addresses = np.arange(4, dtype=np.uint64) * np.uint64(PAGE) + np.uint64(address)
    assert await run(backend, pooled) == [None]
    found = np.empty((4, PAGE), np.uint8)
    memory.on_device(memory.driver.download, found.ctypes.data, address, found.nbytes)
    assert np.array_equal(found, host.spans)
    memory.free_pooled(address)
    released = drivers.count("cuDevicePrimaryCtxRelease")
    await backend.close()
    assert drivers.count("cuDevicePrimaryCtxRelease") == released  # kvikio's streams are in it


async def test_mixed_memory_and_spans_that_stick_out(backend: GdsIO, tmp_path: Path) -> None:
    await backend.start(tmp_path)
    file = await backend.create_file(tmp_path / "file", 8 * PAGE)
    host, device = Pages(2), DevicePages(2)
    mixed = transfer(Operation.READ, file, host, ignore)
    mixed.addresses = np.array([device.addresses[0], host.addresses[0]], np.uint64)
    other = transfer(Operation.READ, file, host, ignore)
    other.addresses = np.array([host.addresses[0], device.addresses[0]], np.uint64)
    beyond = transfer(Operation.READ, file, host, ignore)
    beyond.addresses = device.addresses[1:]
    beyond.span_bytes = 3 * PAGE
    errors = await run(backend, mixed, other, beyond)
    assert isinstance(errors[0], ArgumentError)
    assert "one transfer to each kind" in str(errors[0])
    assert isinstance(errors[1], BlockIOError)
    assert errors[1].errno == errno.EFAULT
    assert isinstance(errors[2], ArgumentError)
    assert "ends behind its allocation" in str(errors[2])
    await backend.close()


async def test_kvikios_settings_are_put_back_with_the_last_backend(
    drivers: Drivers, tmp_path: Path
) -> None:
    original = settings()
    first, second = compatible(), gpudirect()
    await first.start(tmp_path)
    await second.start(tmp_path)
    assert settings() == {
        "num_threads": 8,
        "task_size": 4 << 20,
        "gds_threshold": 0,
        "auto_direct_io_read": True,
        "compat_mode": original["compat_mode"],  # set only while a file is opened
    }
    assert first.path.startswith("compatibility path (kvikio 26.")
    assert second.path.startswith("GPUDirect Storage (kvikio 26.")
    assert (first.true_path, second.true_path) == (False, True)
    await first.close()
    assert settings()["gds_threshold"] == 0
    await second.close()
    assert settings() == original


async def test_memory_is_registered_once(drivers: Drivers, tmp_path: Path) -> None:
    io = gpudirect(2)
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 8 * PAGE)
    arena, other = DevicePages(8), DevicePages(1)
    counted = drivers.cufile("registrations")
    await io.register_memory(int(arena.addresses[3]), owner=arena)
    with pytest.raises(ArgumentError, match="registered already"):
        await io.register_memory(int(arena.addresses[0]))
    with pytest.raises(ArgumentError, match="not device memory"):
        await io.register_memory(int(Pages(1).addresses[0]))
    for _ in range(20):
        batch = [device_transfer(Operation.READ, file, arena, ignore) for _ in range(10)]
        assert await run(io, *batch) == [None] * 10
    assert drivers.cufile("registrations") == counted + 1
    assert io.registered == 1
    await io.unregister_memory(int(arena.addresses[7]))
    with pytest.raises(ArgumentError, match="not in registered memory"):
        await io.unregister_memory(int(arena.addresses[0]))
    await io.register_memory(int(other.addresses[0]))  # closing undoes it
    await io.close()


async def test_a_read_goes_on_when_its_waiter_is_cancelled(backend: GdsIO, tmp_path: Path) -> None:
    await backend.start(tmp_path)
    file = await backend.create_file(tmp_path / "file", 8 * PAGE)
    source = DevicePages(8)
    source.spans[:] = pattern(8, PAGE, 3)
    assert await run(backend, device_transfer(Operation.WRITE, file, source, ignore)) == [None]
    target = DevicePages(8)
    scattered = device_transfer(Operation.READ, file, target, ignore)
    scattered.addresses = target.addresses[::-1].copy()
    waiter = asyncio.ensure_future(run(backend, scattered))
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    await backend.close()
    assert np.array_equal(target.spans[::-1], source.spans)


async def test_no_call_of_kvikio_on_the_loops_thread(
    backend: GdsIO, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: dict[str, set[int]] = {}

    def note(target: type, name: str) -> None:
        original = getattr(target, name)

        def noting(self: Any, *arguments: Any) -> Any:
            called.setdefault(name, set()).add(threading.get_ident())
            return original(self, *arguments)

        monkeypatch.setattr(target, name, noting)

    cufile = importlib.import_module("kvikio").CuFile
    for name in ("raw_read", "raw_write", "pread", "pwrite", "close"):
        note(cufile, name)
    for name in ("open", "register", "unregister"):
        note(Kvikio, name)
    await backend.start(tmp_path)
    files = [await backend.create_file(tmp_path / name, 4 * PAGE) for name in "ab"]
    pages, scattered = DevicePages(4), DevicePages(4)
    scattered.addresses = scattered.addresses[::-1].copy()
    await backend.register_memory(pages.base)
    for operation in Operation:
        batch = [device_transfer(operation, files[0], one, ignore) for one in (pages, scattered)]
        assert await run(backend, *batch) == [None, None]
    await backend.remove_file(files[0])
    await backend.close()
    expected = {"open", "register", "unregister", "raw_read", "raw_write", "close"}
    assert called.keys() == expected | (set() if backend.true_path else {"pread", "pwrite"})
    assert threading.get_ident() not in set().union(*called.values())


async def test_a_store_on_gds(drivers: Drivers, tmp_path: Path) -> None:
    io = compatible()
    async with await BlockStore.open(DIMS, tmp_path / "store", 64, io=io) as store:
        indices = fresh(store, 8)
        content = pattern(8, BLOCK, 4)
        assert not (await write(store, 0, indices, content)).errors
        found, outcome = await read(store, 0, indices)
        assert not outcome.errors
        assert np.array_equal(found, content)
        assert "compatibility path" in store.path


class OnDevice:
    """CRC-32 where the blocks are, as a device's kernel would give it: of a copy, by zlib."""

    def __init__(self, pages: DevicePages) -> None:
        self._pages = pages
        self.blocks = 0

    def __call__(
        self, addresses: NDArray[np.uint64], nbytes: int, seeds: NDArray[np.uint32]
    ) -> NDArray[np.uint32]:
        self._pages.download()
        self.blocks += len(addresses)
        slots = ((addresses - np.uint64(self._pages.base)) // np.uint64(nbytes)).tolist()
        found = [
            zlib.crc32(self._pages.spans[slot].tobytes(), seed)
            for slot, seed in zip(slots, seeds.tolist(), strict=True)
        ]
        return np.array(found, np.uint32)


async def test_a_store_reads_into_the_device_and_is_verified_there(
    backend: GdsIO, tmp_path: Path
) -> None:
    async with await BlockStore.open(DIMS, tmp_path / "store", 64, io=backend) as store:
        indices, content = fresh(store, 8), pattern(8, BLOCK, 4)
        assert not (await write(store, 0, indices, content)).errors
        pages, order = DevicePages(8, BLOCK), np.random.default_rng(1).permutation(8)
        verified = OnDevice(pages)

        async def read_all() -> Outcome:
            outcome = Outcome(8)
            store.read(0, indices, pages.addresses[order], on_done=outcome, checksums=verified)
            return await outcome.end()

        assert not (await read_all()).errors
        assert verified.blocks == 8
        assert np.array_equal(pages.spans[order], content)
        (segment,) = (tmp_path / "store").glob("segment-*")
        with segment.open("r+b") as stream:
            stream.seek(5 * BLOCK + 7)
            stream.write(bytes([content[5, 7] ^ 1]))
            os.fsync(stream.fileno())
        errors = (await read_all()).errors
        assert {at: type(error) for at, error in errors.items()} == {5: CorruptBlock}
        outcome, scattered = Outcome(4), indices[1::2]  # none has a neighbour
        store.read(0, scattered, pages.addresses[:4], on_done=outcome, checksums=verified)
        errors = (await outcome.end()).errors
        assert {at: type(error) for at, error in errors.items()} == {2: CorruptBlock}
        assert np.array_equal(pages.spans[[0, 1, 3]], content[[1, 3, 7]])


async def test_a_store_writes_from_the_device(backend: GdsIO, tmp_path: Path) -> None:
    async with await BlockStore.open(DIMS, tmp_path / "store", 64, io=backend) as store:
        indices, pages, outcome = fresh(store, 8), DevicePages(8, BLOCK), Outcome(8)
        pages.spans[:] = pattern(8, BLOCK, 4)
        pages.upload()
        verified = OnDevice(pages)
        store.write(0, indices, pages.addresses, on_done=outcome, checksums=verified)
        assert not (await outcome.end()).errors
        found, outcome = await read(store, 0, indices)  # into host memory, by the processor
        assert not outcome.errors
        assert np.array_equal(found, pages.spans)
