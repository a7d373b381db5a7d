"""Persistent stores: what was acknowledged is there again, for whom it was meant."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsswap.config import LayerGroup, ModelDims
from hsswap.errors import (
    ArgumentError,
    ConfigError,
    CorruptBlock,
    StaleBlockId,
    StoreLocked,
)
from hsswap.io import BlockStore
from hsswap.io.directory import segment_name
from hsswap.io.manifest import MANIFEST_NAME
from hsswap.io.records import RECORDS_NAME
from tests.io.persist_support import (
    SMALL,
    check_ids,
    content_of,
    memory,
    open_store,
    tokens_of,
    write_ids,
)
from tests.io.support import Outcome, Pages, read, until, write


@pytest.mark.parametrize("io", ["posix", "uring", "auto"])
async def test_blocks_are_there_after_closing(tmp_path: Path, io: str) -> None:
    async with await open_store(tmp_path / "store", io=io) as store:
        assert store.persistent
        ids = store.ids.allocate(40)
        await write_ids(store, ids)
        names = sorted(path.name for path in (tmp_path / "store").iterdir())
        assert names == ["hsswap.lock", MANIFEST_NAME, RECORDS_NAME, segment_name(0)]
        for path in (tmp_path / "store").iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with await open_store(tmp_path / "store") as store:
        assert store.ids.kept().tolist() == ids.tolist()
        assert store.ids.free_count == 300
        with pytest.raises(StaleBlockId):
            store.ids.check(ids)  # nobody holds them yet
        store.ids.add_reference(ids)
        await check_ids(store, ids)
        new = store.ids.allocate(10)
        assert not set(new.tolist()) & set(ids.tolist())
        await write_ids(store, new)
        store.ids.drop_reference(ids[:7])
    async with await open_store(tmp_path / "store") as store:
        kept = store.ids.kept()
        assert sorted(kept.tolist()) == sorted([*ids[7:].tolist(), *new.tolist()])
        store.ids.add_reference(kept)
        await check_ids(store, kept)


async def test_lengths_and_versions_are_there_again() -> None:
    io = memory()
    async with await open_store(io) as store:
        ids = store.ids.allocate(3)
        indices = store.ids.check(ids)
        assert not (await write(store, 0, indices, content_of(store, ids, 0))).errors
        known = store.describe(0, indices)
        assert known.lengths.tolist() == [16, 16, 16]
        assert known.written.all()
        assert not known.durable.any()
        memory_pages = Pages(3)
        memory_pages.spans[:] = content_of(store, ids, 1)
        outcome = Outcome(3)
        store.write(
            1, indices, memory_pages.addresses, owner=memory_pages, on_done=outcome,
            lengths=[16, 16, 5], codes_version=77,
        )  # fmt: skip
        await outcome.end()
        await store.stored(indices)
        assert store.describe(1, indices).durable.all()
    async with await open_store(io.power_cut()) as store:
        known = store.describe(1, indices)
        assert known.lengths.tolist() == [16, 16, 5]
        assert known.codes_versions.tolist() == [77, 77, 77]
        assert known.durable.all()
        with pytest.raises(ArgumentError, match="0 to 16"):
            store.write(0, indices, memory_pages.addresses, on_done=outcome, lengths=[0, 1, 17])
        with pytest.raises(ArgumentError, match="3 integers"):
            store.write(0, indices, memory_pages.addresses, on_done=outcome, lengths=[1])
        with pytest.raises(ArgumentError, match="codes_version"):
            store.write(0, indices, memory_pages.addresses, on_done=outcome, codes_version=-1)


OTHER = [
    ({"capacity": 299}, "has room for 300 blocks, not 299: it can grow and not shrink; open it"),
    ({"fingerprint": "b"}, "fingerprint '', not 'b'"),
    ({"rank": 1}, "rank 0, not 1"),
    ({"salt": b"other"}, "another salt"),
    ({"dims": ModelDims(SMALL.groups, 32)}, "block_size 16, not 32"),
    (
        {"dims": ModelDims((LayerGroup(2, 2, 2, 24),))},
        "layer group 0 with head_dim 16, not 24; layer group 0 with value_dim 16, not 24",
    ),
    ({"dims": ModelDims((*SMALL.groups, *SMALL.groups))}, "1 layer groups, not 2"),
]


@pytest.mark.parametrize(("change", "message"), OTHER, ids=lambda value: str(value)[:24])
async def test_another_store_is_refused(change: dict[str, Any], message: str) -> None:
    io = memory()
    async with await open_store(io) as store:
        ids = store.ids.allocate(4)
        await write_ids(store, ids)
    io = io.power_cut(lambda number: True)
    files = io.power_state().cut(lambda number: True)
    with pytest.raises(ConfigError, match=message):
        await open_store(io, **change)
    after = io.power_state()
    assert not after.pending
    for path, content in after.cut(lambda number: True).items():
        assert np.array_equal(content, files[path])


async def test_any_salt_will_do_when_none_is_named(tmp_path: Path) -> None:
    async with await open_store(tmp_path, salt=None) as store:
        ids, tokens = store.ids.allocate(2), tokens_of(1, 2)
        await write_ids(store, ids)
        store.commit_prefix(tokens, ids)
        await store.flush()
    async with await open_store(tmp_path, salt=None) as store:
        assert len(store.find_prefix(tokens)) == 2
    manifest = json.loads((tmp_path / MANIFEST_NAME).read_text())
    assert manifest["version"] == 1
    assert len(bytes.fromhex(manifest["salt"])) == 32


async def test_a_damaged_or_newer_manifest_is_refused(tmp_path: Path) -> None:
    async with await open_store(tmp_path):
        pass
    path = tmp_path / MANIFEST_NAME
    good = path.read_bytes()
    for bad in (good.replace(b'"rank": 0', b'"rank": 1'), b"x" * len(good)):
        path.write_bytes(bad)
        with pytest.raises(ConfigError, match="damaged"):
            await open_store(tmp_path)
    path.write_bytes(good.replace(b'"version": 1', b'"version": 9'))
    with pytest.raises(ConfigError, match="format version 9"):
        await open_store(tmp_path)
    path.unlink()
    with pytest.raises(ConfigError, match=f"{RECORDS_NAME} and no {MANIFEST_NAME}"):
        await open_store(tmp_path)
    path.write_bytes(good)
    async with await open_store(tmp_path):
        pass


async def test_a_temporary_store_leaves_a_persistent_one_alone(tmp_path: Path) -> None:
    async with await open_store(tmp_path) as store:
        ids = store.ids.allocate(4)
        await write_ids(store, ids)
        with pytest.raises(StoreLocked):
            await open_store(tmp_path)
    with pytest.raises(ConfigError, match="persist=True"):
        await BlockStore.open(SMALL, tmp_path, 300, io="posix")
    async with await open_store(tmp_path) as store:
        store.ids.add_reference(ids)
        await check_ids(store, ids)


async def test_leftovers_of_a_temporary_store_go(tmp_path: Path) -> None:
    (tmp_path / segment_name(0)).write_bytes(b"old" * 5000)
    async with await open_store(tmp_path) as store:
        assert store.ids.kept_count == 0
        assert store.statistics().segment_files == 0
        assert not (tmp_path / segment_name(0)).exists()


async def test_a_backend_of_few_transfers() -> None:
    with pytest.raises(ConfigError, match="3 transfers"):
        await open_store(memory(limit=2))
    async with await open_store(memory(limit=3)) as store:
        ids = store.ids.allocate(40)
        for _ in range(2):
            await write_ids(store, ids[::2])
            await store.flush()
        await check_ids(store, ids[::2])


async def test_arguments_of_open(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name one that stays"):
        await BlockStore.open(SMALL, None, 300, io="posix", persist=True)
    with pytest.raises(ConfigError, match="salt"):
        await open_store(tmp_path / "a", salt=b"")
    with pytest.raises(ConfigError, match="rank"):
        await open_store(tmp_path / "a", rank=-1)
    with pytest.raises(ConfigError, match="negative"):
        await open_store(tmp_path / "a", disk_bytes=-1)
    with pytest.raises(ConfigError, match="directories are empty"):
        await BlockStore.open(SMALL, [], 300, io="posix")
    assert list(tmp_path.iterdir()) == []


# Missing and damaged files.


async def stored_in(place: Path, count: int = 300) -> np.ndarray[Any, np.dtype[np.int64]]:
    async with await open_store(place) as store:
        ids = store.ids.allocate(count)
        await write_ids(store, ids)
    return ids


async def test_a_segment_that_is_gone_takes_its_blocks_alone(tmp_path: Path) -> None:
    ids = await stored_in(tmp_path)
    (tmp_path / segment_name(1)).unlink()
    async with await open_store(tmp_path) as store:
        left = ids[:256]
        assert sorted(store.ids.kept().tolist()) == left.tolist()
        store.ids.add_reference(left)
        await check_ids(store, left)
        new = store.ids.allocate(44)
        assert not set(new.tolist()) & set(ids.tolist())
        await write_ids(store, new)
    async with await open_store(tmp_path) as store:
        assert store.ids.kept_count == 300


async def test_a_limit_that_leaves_room_for_no_segment_is_refused_before_anything_goes(
    tmp_path: Path,
) -> None:
    ids = await stored_in(tmp_path / "a")
    async with await open_store(tmp_path / "a") as store:
        both = store.statistics().disk_bytes
    least = both - 256 * SMALL.id_bytes  # it has two segments
    for limit in (0, 4096, least - 1):
        with pytest.raises(ConfigError, match=f"needs {least}"):
            await open_store(tmp_path / "a", disk_bytes=limit)
    async with await open_store(tmp_path / "a", disk_bytes=both) as store:
        store.ids.add_reference(ids)
        await check_ids(store, ids)
    async with await open_store(tmp_path / "a", disk_bytes=least) as store:
        await until(lambda: store.statistics().segment_files == 1)
        assert store.ids.kept_count > 0


async def test_a_segment_that_was_cut_short(tmp_path: Path) -> None:
    ids = await stored_in(tmp_path)
    with (tmp_path / segment_name(0)).open("r+b") as file:
        file.truncate(256 * 4096 + 100 * 4096 + 5)
    async with await open_store(tmp_path) as store:
        indices = np.arange(256)
        assert store.describe(0, indices).written.all()
        assert np.flatnonzero(store.describe(1, indices).written).tolist() == list(range(100))
        store.ids.add_reference(ids)
        _, outcome = await read(store, 1, indices)
        assert {type(error) for error in outcome.errors.values()} == {CorruptBlock}
        assert set(outcome.errors) == set(range(100, 256))
        await check_ids(store, ids[[*range(100), *range(256, 300)]])


async def test_damaged_records_take_their_blocks_alone(tmp_path: Path) -> None:
    ids = await stored_in(tmp_path, 20)
    path = tmp_path / RECORDS_NAME
    content = bytearray(path.read_bytes())
    offset = 4096 + 5 * 4096 + 7 * 32 + 9  # header, ids of 300 blocks, layer 0, record 7
    content[offset] ^= 1
    path.write_bytes(content)
    async with await open_store(tmp_path) as store:
        known = store.describe(0, np.arange(20))
        assert np.flatnonzero(~known.written).tolist() == [7]
        store.ids.add_reference(ids)
        await check_ids(store, np.delete(ids, 7))


async def test_missing_records_are_refused(tmp_path: Path) -> None:
    await stored_in(tmp_path, 3)
    (tmp_path / RECORDS_NAME).unlink()
    with pytest.raises(ConfigError, match="is missing"):
        await open_store(tmp_path)
    assert (tmp_path / segment_name(0)).exists()


# Several directories.


async def test_segments_go_to_the_directories_in_turn(tmp_path: Path) -> None:
    places = [tmp_path / name for name in ("a", "b", "c")]

    async def open_places(order: list[Path]) -> BlockStore:
        return await BlockStore.open(SMALL, order, 1000, io="posix", persist=True)

    async with await open_places(places) as store:
        ids = store.ids.allocate(1000)
        await write_ids(store, ids)
    for number in range(4):
        assert (places[number % 3] / segment_name(number)).exists()
    for wrong in ([places[0], places[2], places[1]], places[:2]):
        with pytest.raises(ConfigError, match=r"directory 2 of 3|3 directories, not 2"):
            await open_places(wrong)
    with pytest.raises(ConfigError, match="another store"):
        await open_places([tmp_path / "new", places[1]])
    async with await open_places(places) as store:
        store.ids.add_reference(ids)
        await check_ids(store, ids)
        store.ids.drop_reference(ids)
        await until(lambda: store.statistics().segment_files == 0)


async def test_a_temporary_store_in_several_directories(tmp_path: Path) -> None:
    places = [tmp_path / "a", tmp_path / "b"]
    async with await BlockStore.open(SMALL, places, 600, io="posix") as store:
        ids = store.ids.allocate(600)
        await write_ids(store, ids)
        await check_ids(store, ids)
        with pytest.raises(StoreLocked):
            await BlockStore.open(SMALL, places[1], 300, io="posix")
    assert list(tmp_path.iterdir()) == []


async def test_write_accounting() -> None:
    async with await open_store(memory()) as store:
        assert store.statistics().bytes_written_per_byte_read == 0
        ids = store.ids.allocate(10)
        await write_ids(store, ids)
        await store.flush()
        assert store.statistics().bytes_written_per_byte_read == float("inf")
        for _ in range(4):
            await check_ids(store, ids)
        statistics = store.statistics()
        assert statistics.bytes_written == 20 * 4096
        assert statistics.record_bytes_written == 2 * 4096  # a page of each layer
        assert statistics.commits == 1
        assert statistics.bytes_written_per_byte_read == pytest.approx(22 / 80)
