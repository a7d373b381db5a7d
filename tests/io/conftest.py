"""A store on every backend that tests run on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from hsswap.io import BlockStore
from tests.io.support import DIMS


@pytest.fixture(params=["memory", "posix", "uring"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[BlockStore]:
    """An open store of 600 ids. It must end with nothing in flight, and leave no directory."""
    async with await BlockStore.open(DIMS, tmp_path / "store", 600, io=request.param) as opened:
        yield opened
        assert opened.statistics().in_flight == 0
    assert not (tmp_path / "store").exists()
