"""Blocks whose checksums somebody else computes: memory that the processor cannot read."""

from __future__ import annotations

import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.errors import BlockIOError, CorruptBlock, DeviceError
from hsswap.io import BlockStore
from tests.io.support import BLOCK, DIMS, Outcome, Pages, fresh, pattern, read, write


class Elsewhere:
    """CRC-32 of pages by zlib; on what thread; a device that fails at blocks of some addresses."""

    def __init__(self, pages: Pages, failing: tuple[int, ...] = ()) -> None:
        self._pages = pages
        self._failing = {int(pages.addresses[slot]) for slot in failing}
        self.threads: set[int] = set()

    def __call__(
        self, addresses: NDArray[np.uint64], nbytes: int, seeds: NDArray[np.uint32]
    ) -> NDArray[np.uint32]:
        self.threads.add(threading.get_ident())
        if self._failing & set(addresses.tolist()):
            raise DeviceError("the device is gone")
        slots = np.searchsorted(self._pages.addresses, addresses)
        found = [
            zlib.crc32(self._pages.spans[slot, :nbytes].tobytes(), seed)
            for slot, seed in zip(slots, seeds.tolist(), strict=True)
        ]
        return np.array(found, np.uint32)


@pytest.fixture(params=["memory", "posix", "uring"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlockStore:
    place = None if request.param == "memory" else tmp_path / "store"
    return await BlockStore.open(DIMS, place, 64, io=request.param)


async def test_written_and_read_by_checksums_from_elsewhere(store: BlockStore) -> None:
    async with store:
        indices, pages = fresh(store, 9)[::-1].copy(), Pages(9, BLOCK)
        pages.spans[:] = pattern(9, BLOCK, 1)
        elsewhere, outcome = Elsewhere(pages), Outcome(9)
        store.write(0, indices, pages.addresses, on_done=outcome, checksums=elsewhere)
        assert not (await outcome.end()).errors
        found, outcome = await read(store, 0, indices)  # the processor agrees
        assert not outcome.errors
        assert np.array_equal(found, pages.spans)
        content = pages.spans.copy()
        pages.spans[:] = 0
        outcome = Outcome(9)
        store.read(0, indices, pages.addresses, on_done=outcome, checksums=elsewhere)
        assert not (await outcome.end()).errors
        assert np.array_equal(pages.spans, content)
        assert threading.get_ident() not in elsewhere.threads  # it may wait


async def test_what_is_wrong_is_found_elsewhere_too(store: BlockStore) -> None:
    async with store:
        indices, pages = fresh(store, 6), Pages(6, BLOCK)
        assert not (await write(store, 0, indices, pattern(6, BLOCK, 1))).errors

        def wrong(
            addresses: NDArray[np.uint64], nbytes: int, seeds: NDArray[np.uint32]
        ) -> NDArray[np.uint32]:
            found = Elsewhere(pages)(addresses, nbytes, seeds)
            found[addresses == pages.addresses[4]] ^= np.uint32(1)
            return found

        outcome = Outcome(6)
        store.read(0, indices, pages.addresses, on_done=outcome, checksums=wrong)
        errors = (await outcome.end()).errors
        assert {at: type(error) for at, error in errors.items()} == {4: CorruptBlock}
        assert store.statistics().checksum_failures == 1


async def test_a_device_that_fails_is_the_error_of_its_blocks(store: BlockStore) -> None:
    async with store:
        indices, pages = fresh(store, 6), Pages(6, BLOCK)
        assert not (await write(store, 0, indices, pattern(6, BLOCK, 1))).errors
        outcome = Outcome(6)
        gone = Elsewhere(pages, failing=(1, 2))
        store.read(0, indices, pages.addresses, on_done=outcome, checksums=gone)
        errors = (await outcome.end()).errors
        assert errors.keys() == {1, 2}
        assert all(isinstance(error, BlockIOError) for error in errors.values())
        assert "the device is gone" in str(errors[1])
