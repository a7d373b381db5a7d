"""Files of an open store that somebody removes, moves or replaces: nothing is said to be kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hsswap import HighSpeedSwap, SwapConfig
from hsswap.errors import BlockIOError
from hsswap.io.directory import LOCK_NAME, segment_name
from hsswap.io.manifest import MANIFEST_NAME
from hsswap.io.records import RECORDS_NAME
from tests.io.persist_support import SMALL, check_ids, open_store, write_ids

NAMES = (LOCK_NAME, MANIFEST_NAME, RECORDS_NAME, segment_name(0))


def in_its_place(path: Path) -> None:
    """Another file of the same bytes under the same name."""
    content = path.read_bytes()
    path.rename(path.with_name("aside"))
    path.write_bytes(content)


def made_anew(place: Path) -> None:
    shutil.rmtree(place)
    place.mkdir()


def a_file_in_its_place(place: Path) -> None:
    shutil.rmtree(place)
    place.write_text("mine")


def without(name: str, place: Path) -> None:
    (place / name).unlink()


def another(name: str, place: Path) -> None:
    in_its_place(place / name)


HURTS: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "moved": lambda place: place.rename(place.with_name("away")),
    "made anew": made_anew,
    "a file in its place": a_file_in_its_place,
    **{f"without {name}": partial(without, name) for name in NAMES},
    # Another manifest of the same bytes is as good.
    **{f"another {name}": partial(another, name) for name in NAMES if name != MANIFEST_NAME},
}


@pytest.mark.parametrize("hurt", HURTS)
@pytest.mark.parametrize("io", ["posix", "uring"])
async def test_what_would_not_be_found_is_not_said_to_be_kept(
    io: str, hurt: str, tmp_path: Path
) -> None:
    store = await open_store(tmp_path / "store", io=io)
    kept = store.ids.allocate(20)
    await write_ids(store, kept)
    await store.flush()
    HURTS[hurt](tmp_path / "store")
    more = store.ids.allocate(20)
    await write_ids(store, more)
    for _ in range(2):
        with pytest.raises(BlockIOError, match="removed or replaced under its open store"):
            await store.flush()
    await check_ids(store, kept)
    await check_ids(store, more)
    with suppress(BlockIOError):  # what it writes down last may be what is lost
        await store.close()


async def test_nothing_new_to_keep_in_a_directory_that_is_gone(tmp_path: Path) -> None:
    store = await open_store(tmp_path / "store")
    ids = store.ids.allocate(20)
    await write_ids(store, ids)
    await store.flush()
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(BlockIOError, match="removed or replaced"):
        await store.flush()
    with pytest.raises(BlockIOError, match="removed or replaced"):
        await store.stored(store.ids.check(ids))
    await store.close()
    assert list(tmp_path.iterdir()) == []


async def test_a_prefix_is_not_committed_to_a_directory_that_is_gone(tmp_path: Path) -> None:
    config = SwapConfig(
        SMALL, 2000, 40, 40, directory=tmp_path / "store", persist=True, tile_tokens=256
    )
    rows = np.full((100, 2, 16), 0x3F80, np.uint16)
    swap = await HighSpeedSwap.create(config)
    sequence = swap.sequence()
    for layer in range(2):
        await sequence.append(layer, rows, rows)
    await swap.flush()
    shutil.rmtree(tmp_path / "store")
    with pytest.raises(BlockIOError, match="removed or replaced"):
        await sequence.commit(list(range(100)))
    result = await sequence.attend(0, rows[:1])
    await result.done()
    assert (np.asarray(result.out) == 0x3F80).all()
    with pytest.raises(BlockIOError, match="removed or replaced"):
        await swap.close()
    assert list(tmp_path.iterdir()) == []
