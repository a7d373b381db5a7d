"""Stores on a full, a read-only, a tmpfs and an overlay file system: clear behaviour.

Small file systems are mounted in a mount namespace of a child process, which needs root.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hsswap.errors import ConfigError, OutOfSpace
from hsswap.io import BlockStore
from hsswap.io.checking import check_store
from tests.io.persist_support import SMALL, check_ids, content_of, open_store, write_ids
from tests.io.support import until, write

ROOT = Path(__file__).parents[2]
SEGMENT = 256 * SMALL.id_bytes
SHM = Path("/dev/shm")


@cache
def missing_for_mounts() -> str | None:
    """What keeps this process from mounting in a namespace of its own, or None."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return "unshare and mount (util-linux) are needed"
    attempt = subprocess.run(
        ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return None if attempt.returncode == 0 else f"mounting needs root: {attempt.stderr.strip()}"


def in_namespace(script: str, case: str, place: Path) -> None:
    """Run a shell script, then a case of this file, where only they see what the script mounts."""
    if reason := missing_for_mounts():
        pytest.skip(reason)
    command = f'set -e; {script}; exec "$0" -m tests.io.test_filesystems {case} "$PLACE"'
    child = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, sys.executable],
        cwd=ROOT,
        env={**os.environ, "PLACE": str(place)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    assert child.stdout.split()[-1] == "done"


# Cases; each runs in a child process.


async def full(place: Path) -> None:
    """Room for two segments and a half: the third one is OutOfSpace, the store goes on."""
    for persist in (False, True):
        store = await BlockStore.open(SMALL, place / "store", 1024, io="posix", persist=persist)
        async with store:
            ids = store.ids.allocate(1024)
            indices = store.ids.check(ids)
            for part in range(4):  # in turn: which get the room is open when all ask at once
                some = slice(256 * part, 256 * part + 256)
                outcome = await write(store, 0, indices[some], content_of(store, ids[some], 0))
                assert len(outcome.errors) == (0 if part < 2 else 256), part
                for error in outcome.errors.values():
                    assert isinstance(error, OutOfSpace)
                    assert "free some space" in str(error)
            await write_ids(store, ids[:512])
            await store.flush()
            await check_ids(store, ids[:512])
            store.ids.drop_reference(ids)
            await until(lambda store=store: store.statistics().segment_files == 0)  # type: ignore[misc]
        assert (place / "store").exists() is persist
    async with await open_store(place / "store", 1024, salt=None) as store:
        assert store.statistics().segment_files == store.ids.kept_count == 0
        ids = store.ids.allocate(256)
        await write_ids(store, ids)
    assert check_store(place / "store").blocks == 512


async def too_small(place: Path) -> None:
    """Not even the records fit: opening says so, and leaves nothing behind."""
    for _ in range(2):
        with pytest.raises(OutOfSpace, match="free some space"):
            await open_store(place / "store", 1_000_000)
    async with await BlockStore.open(SMALL, place / "other", 300, io="posix"):
        pass


async def read_only(place: Path) -> None:
    """No store can be opened; fsck can look at one, and says what it finds."""
    for persist in (False, True):
        for name in ("store", "none"):
            with pytest.raises(ConfigError, match="read-only file system; name another"):
                await BlockStore.open(SMALL, place / name, 300, io="posix", persist=persist)
    report = check_store(place / "store")
    assert report.ok
    assert report.blocks == 2 * 5


async def overlay(place: Path) -> None:
    """A store on an overlay keeps its promises, whatever way its bytes take."""
    async with await open_store(place / "store") as store:
        assert store.path == "O_DIRECT" or "page cache" in store.path
        ids = store.ids.allocate(20)
        await write_ids(store, ids)
        await check_ids(store, ids)
    async with await open_store(place / "store") as store:
        store.ids.add_reference(ids)
        await check_ids(store, ids)
    assert check_store(place / "store").ok


# The tests.


def test_a_full_file_system(tmp_path: Path) -> None:
    size = 2 * SEGMENT + SEGMENT // 2
    in_namespace(f'mount -t tmpfs -o size={size} none "$PLACE"', "full", tmp_path)


def test_a_file_system_that_is_too_small(tmp_path: Path) -> None:
    in_namespace('mount -t tmpfs -o size=1m none "$PLACE"', "too_small", tmp_path)


def test_a_full_disk_file_system(tmp_path: Path) -> None:
    if shutil.which("mkfs.ext4") is None:
        pytest.skip("mkfs.ext4 is needed")
    image = tmp_path / "image"
    place = tmp_path / "place"
    place.mkdir()
    size = 2 * SEGMENT + SEGMENT // 2 + (1 << 18)
    script = (
        f'truncate -s {size} "{image}" && mkfs.ext4 -q -m 0 -O ^has_journal "{image}" && '
        f'mount -o loop "{image}" "$PLACE"'
    )
    in_namespace(script, "full", place)


def test_a_read_only_file_system(tmp_path: Path) -> None:
    async def make() -> None:
        async with await open_store(tmp_path / "store", salt=None) as store:
            await write_ids(store, store.ids.allocate(5))

    asyncio.run(make())
    script = 'mount --bind "$PLACE" "$PLACE" && mount -o remount,ro,bind "$PLACE"'
    in_namespace(script, "read_only", tmp_path)


@pytest.mark.parametrize("lower", ["tmpfs", "disk"])
def test_an_overlay(tmp_path: Path, lower: str) -> None:
    base = tmp_path / "base"
    place = tmp_path / "place"
    place.mkdir()
    script = f'mkdir "{base}"; '
    if lower == "tmpfs":
        script += f'mount -t tmpfs none "{base}"; '
    script += (
        f'mkdir "{base}/lower" "{base}/upper" "{base}/work"; mount -t overlay overlay -o '
        f'"lowerdir={base}/lower,upperdir={base}/upper,workdir={base}/work" "$PLACE"'
    )
    in_namespace(script, "overlay", place)


async def test_tmpfs_goes_by_the_page_cache() -> None:
    if not SHM.is_dir() or not os.access(SHM, os.W_OK):
        pytest.skip("/dev/shm cannot be written to")
    place = SHM / f"hsswap-test-{os.getpid()}"
    try:
        async with await open_store(place) as store:
            assert store.path == "page cache (tmpfs)"
            ids = store.ids.allocate(20)
            await write_ids(store, ids)
            await check_ids(store, ids)
            await store.flush()
            assert store.describe(1, np.arange(20)).durable.all()
        async with await open_store(place) as store:
            store.ids.add_reference(ids)
            await check_ids(store, ids)
    finally:
        shutil.rmtree(place, ignore_errors=True)


CASES = {"full": full, "too_small": too_small, "read_only": read_only, "overlay": overlay}

if __name__ == "__main__":
    asyncio.run(CASES[sys.argv[1]](Path(sys.argv[2])))
    print("done")
