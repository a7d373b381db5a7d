"""Persistent stores opened with room for more blocks: all is there, whenever the power goes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.errors import ConfigError
from hsswap.io.checking import check_store
from hsswap.io.memory import MemoryIO
from hsswap.io.powercut import PowerState
from hsswap.io.records import RECORDS_NAME
from tests.io.persist_support import SMALL, check_ids, memory, open_store, tokens_of, write_ids

OLD, NEW = 300, 700


async def filled(where: Any, **options: Any) -> NDArray[np.int64]:
    """Make a store with blocks in both segments and a prefix; the ids of the blocks."""
    async with await open_store(where, OLD, **options) as store:
        ids = store.ids.allocate(OLD - 20)
        kept = np.concatenate([ids[:4], ids[-4:]])
        await write_ids(store, kept)
        store.commit_prefix(tokens_of(1, 3), kept[:3])
        await store.flush()
    return kept


async def check(where: Any, kept: NDArray[np.int64], capacity: int, **options: Any) -> None:
    """All of it is there, and the new room can be used."""
    async with await open_store(where, capacity, **options) as store:
        assert store.ids.capacity == capacity
        assert set(store.ids.kept()) == set(kept)
        assert np.array_equal(store.find_prefix(tokens_of(1, 3)), kept[:3])
        store.ids.add_reference(kept)
        await check_ids(store, kept)
        more = store.ids.allocate(capacity - len(kept))
        assert not np.isin(more, kept).any()
        await write_ids(store, more[-2:])
        await check_ids(store, more[-2:])
        store.ids.drop_reference(more)


@pytest.mark.parametrize("directories", [1, 2])
async def test_a_store_grows_and_does_not_shrink(directories: int, tmp_path: Path) -> None:
    places = [tmp_path / str(number) for number in range(directories)]
    kept = await filled(places)
    await check(places, kept, NEW)
    with pytest.raises(ConfigError, match=f"room for {NEW} blocks, not {OLD}: it can grow"):
        await open_store(places, OLD)
    names = {path.name for path in places[0].iterdir()}
    assert {name for name in names if name.startswith(RECORDS_NAME)} == {f"{RECORDS_NAME}-{NEW}"}
    report = check_store(places[0])
    assert report.ok
    assert report.blocks == SMALL.layers * len(kept)
    assert report.prefixes == 3
    await check(places, kept, NEW + 1)  # and once more


async def test_what_a_growth_left_behind_is_told_apart(tmp_path: Path) -> None:
    place = tmp_path / "store"
    kept = await filled(place)
    records = place / RECORDS_NAME
    outgrown = records.read_bytes()
    unfinished = place / f"{RECORDS_NAME}-{NEW}"
    unfinished.write_bytes(bytes(4096) + b"x" * 8192)
    assert check_store(place).ok
    await check(place, kept, OLD)
    assert not unfinished.exists()
    shutil.rmtree(place)
    kept = await filled(place)
    await check(place, kept, NEW)
    records.write_bytes(outgrown)  # its removal was lost
    assert check_store(place).blocks == SMALL.layers * len(kept)
    await check(place, kept, NEW)
    assert not records.exists()


async def test_power_may_go_at_any_moment() -> None:
    first = memory()
    kept = await filled(first)
    files = first.power_state().cut(lambda number: True)
    moments: list[PowerState] = []

    def note(io: MemoryIO) -> None:
        moments.append(io.power_state())

    async with await open_store(MemoryIO(files=files, power=True, after_each=note), NEW):
        pass
    assert len(moments) > 8
    rng = random.Random(1)
    some = [lambda number: rng.random() < 0.5] * 3
    for state in moments:
        for survives in (lambda number: False, lambda number: True, *some):
            await check(MemoryIO(files=state.cut(survives), power=True), kept, NEW)
