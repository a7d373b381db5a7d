"""``hsswap fsck``: it finds every bad block, and says nothing of good ones."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hsswap.commands import fsck
from hsswap.commands.interrupts import Interrupts
from hsswap.errors import BlockIOError, ConfigError, StoreLocked
from hsswap.io import BlockStore
from hsswap.io.checking import check_store
from hsswap.io.directory import segment_name
from hsswap.io.manifest import MANIFEST_NAME
from hsswap.io.records import RECORDS_NAME
from tests.io.persist_support import SMALL, open_store, tokens_of, write_ids

COUNT = 270  # two segments


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    fsck.add_arguments(parser)
    return fsck.main(parser.parse_args(arguments), Interrupts())


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A store of 270 ids in two layers, 5 of them with a key."""

    async def make() -> None:
        async with await open_store(tmp_path / "store") as store:
            ids = store.ids.allocate(COUNT)
            await write_ids(store, ids)
            store.commit_prefix(tokens_of(1, 5), ids[:5])

    asyncio.run(make())
    return tmp_path / "store"


def test_a_good_store(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path.name: path.read_bytes() for path in place.iterdir()}
    assert run(str(place)) == 0
    out = capsys.readouterr().out
    assert out == (
        f"ok    {place}: {2 * COUNT} blocks, 0 bad; {2 * COUNT * 4096} bytes read, 5 blocks with a "
        "prefix key\n"
    )
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before


def damage(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


def test_exactly_the_bad_blocks(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    damage(place / segment_name(0), 17 * 4096 + 5)
    damage(place / segment_name(0), (256 + 200) * 4096 + 4095)
    with (place / segment_name(1)).open("r+b") as file:
        file.truncate((256 + 3) * 4096 + 1)
    assert run(str(place), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    found = [(bad["layer"], bad["block_id"] & 0xFFFFFFFF) for bad in report["bad"]]
    assert found == [(0, 17), (1, 200), *((1, 256 + n) for n in range(3, 14))]
    assert "others than were written" in report["bad"][0]["problem"]
    assert "ends after 1 of" in report["bad"][2]["problem"]
    assert run(str(place)) == 1
    assert "bad   layer 0, block id" in capsys.readouterr().out


def test_missing_files_and_damaged_records(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / segment_name(1)).unlink()
    report = check_store(place)
    assert len(report.bad) == 2 * 14
    assert "No such file" in report.bad[0].problem
    damage(place / RECORDS_NAME, 4096 * 6 + 32 * 9 + 8)
    report = check_store(place)
    assert (report.damaged_records, report.blocks) == (1, 2 * COUNT - 1)
    (place / segment_name(7)).write_bytes(b"stray")
    assert run(str(place)) == 1
    out = capsys.readouterr().out
    assert "1 damaged records" in out
    assert f"{segment_name(7)}: nothing in it is known" in out


def test_a_store_that_somebody_has_open(place: Path) -> None:
    async def use() -> None:
        async with await open_store(place):
            with pytest.raises(StoreLocked):
                run(str(place))

    asyncio.run(use())
    assert run(str(place)) == 0


def test_what_is_no_store(place: Path, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", place / MANIFEST_NAME):
        with pytest.raises(ConfigError, match="no persistent store"):
            run(str(path))
    assert not (tmp_path / "none").exists()
    for path in place.iterdir():
        path.unlink()
    for content in (b"", bytes(4096)):
        (place / MANIFEST_NAME).write_bytes(content)
        with pytest.raises(ConfigError, match="never made in full"):
            run(str(place))


@pytest.mark.parametrize("nbytes", [0, 1, 4095])
@pytest.mark.parametrize("left", ["records", "segments"])
def test_a_manifest_that_was_cut_short(place: Path, left: str, nbytes: int) -> None:
    """The text is whole and the padding is not: an opening would not read it either."""
    os.truncate(place / MANIFEST_NAME, nbytes)
    for path in place.iterdir():
        if path.name != MANIFEST_NAME and path.name.startswith("segment") != (left == "segments"):
            path.unlink()
    with pytest.raises(ConfigError, match="damaged; restore it"):
        run(str(place))


def test_records_that_are_gone(place: Path) -> None:
    (place / RECORDS_NAME).unlink()
    with pytest.raises(ConfigError, match=f"{RECORDS_NAME} is missing; restore it"):
        run(str(place))


@pytest.mark.parametrize("nbytes", [0, 4096, None])
def test_records_of_zeros_are_not_those_of_a_new_store(place: Path, nbytes: int | None) -> None:
    length = (place / RECORDS_NAME).stat().st_size if nbytes is None else nbytes
    (place / RECORDS_NAME).write_bytes(bytes(length))
    report = check_store(place)
    assert (report.ok, report.damaged_records, report.blocks) == (False, 1, 0)


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_records_that_are_no_file(place: Path, make: Callable[[Path], None]) -> None:
    (place / RECORDS_NAME).unlink()
    make(place / RECORDS_NAME)
    with pytest.raises(BlockIOError):
        run(str(place))


@pytest.mark.parametrize("name", [MANIFEST_NAME, RECORDS_NAME])
def test_links_are_not_followed(place: Path, tmp_path: Path, name: str) -> None:
    (place / name).rename(tmp_path / "elsewhere")
    (place / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BlockIOError, match="symbolic links"):
        run(str(place))


def test_a_store_in_several_directories(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]

    async def make() -> None:
        async with await BlockStore.open(SMALL, places, 300, io="posix", persist=True) as store:
            await write_ids(store, store.ids.allocate(COUNT))

    asyncio.run(make())
    assert check_store(places[0]).blocks == 2 * COUNT
    damage(places[1] / segment_name(1), 4096)
    assert [bad.layer for bad in check_store(places[0]).bad] == [0]
    with pytest.raises(ConfigError, match="directory 2 of a store"):
        check_store(places[1])
    assert np.all([(place / MANIFEST_NAME).exists() for place in places])
