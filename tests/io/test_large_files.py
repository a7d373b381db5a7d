"""Files beyond 2 and 4 GiB, where 32 bits end: sparse ones, so that they take no room."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsswap.errors import HsswapError
from hsswap.io.base import BlockIO, Operation, Priority, SpanReads
from hsswap.io.posix import PosixIO
from hsswap.io.uring import UringIO
from tests.io.support import PAGE, Pages, pattern
from tests.io.transfers import ignore, run, transfer

NBYTES = 6 << 30
OFFSETS = [
    0,
    (1 << 31) - PAGE,
    1 << 31,
    (1 << 32) - PAGE,
    1 << 32,
    NBYTES - PAGE,
]


@pytest.mark.parametrize("make", [PosixIO, UringIO])
async def test_offsets_beyond_32_bits(make: Callable[[int], BlockIO], tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch(0o600)
    os.truncate(path, NBYTES)
    io = make(2)
    await io.start(tmp_path)
    try:
        file = await io.open_file(path, NBYTES)
        content = pattern(len(OFFSETS), PAGE, 5)
        for offset, row in zip(OFFSETS, content, strict=True):
            source = Pages(1)
            source.spans[:] = row
            assert await run(io, transfer(Operation.WRITE, file, source, ignore, offset)) == [None]
        for offset, row in zip(OFFSETS, content, strict=True):
            target = Pages(1)
            assert await run(io, transfer(Operation.READ, file, target, ignore, offset)) == [None]
            assert (target.spans == row).all()
        across = Pages(2)  # the last page below 4 GiB and the first above it
        assert await run(io, transfer(Operation.READ, file, across, ignore, OFFSETS[3])) == [None]
        assert (across.spans == content[3:5]).all()
        assert (await spans(io, file, OFFSETS) == content).all()
        await io.sync(file)
    finally:
        await io.close()
    descriptor = os.open(path, os.O_RDONLY)
    for offset, row in zip(OFFSETS, content, strict=True):
        assert os.pread(descriptor, PAGE, offset) == row.tobytes()
    os.close(descriptor)


async def spans(io: BlockIO, file: Any, offsets: list[int]) -> np.ndarray:
    """Pages read as spans, each by itself."""
    target, count = Pages(len(offsets)), len(offsets)
    ended: list[HsswapError | None] = []
    all_of_them = asyncio.Event()

    def on_done(_: SpanReads, numbers: list[int], error: HsswapError | None) -> None:
        ended.extend([error] * len(numbers))
        if len(ended) == count:
            all_of_them.set()

    io.submit_spans(
        SpanReads(
            [file] * count,
            offsets,
            target.addresses.tolist(),
            PAGE,
            Priority.NEEDED,
            on_done,
            lambda reads, numbers: None,
            owner=target,
        )
    )
    await all_of_them.wait()
    assert ended == [None] * count
    return target.spans
