"""Checking a persistent store that nobody has open: every record, and every block's bytes.

Blocking system calls and no backend. Nothing is changed but the lock file, which comes and goes.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsswap.config import DISK_ALIGNMENT
from hsswap.errors import ConfigError
from hsswap.io.directory import SEGMENT_NAME, StoreDirectory, segment_name
from hsswap.io.growth import capacity_now, record_files
from hsswap.io.ids import id_of
from hsswap.io.layout import SEGMENT_IDS, SegmentLayout, segment_count
from hsswap.io.manifest import MANIFEST_BYTES_LIMIT, MANIFEST_NAME, Manifest
from hsswap.io.problems import from_os_error
from hsswap.io.records import RECORDS_NAME, REPLACED, VALID, RecordLayout, Records
from hsswap.io.replaced import is_content
from hsswap.io.spare import SPARE_NAME, slot_bytes_of
from hsswap.plain_file import read_plain


@dataclass(frozen=True)
class BadBlock:
    """A block that a record speaks of and that cannot be read as it was written."""

    layer: int
    block_id: int
    problem: str


@dataclass
class Report:
    """What a check found. ``blocks``: that records speak of. ``damaged_records``: whose CRC is
    wrong, or the header that is gone; what they said is lost. ``prefixes``: blocks with a key.
    ``stray_files``: segments that no record speaks of; the next open removes them.
    """

    directory: str
    blocks: int = 0
    bytes_checked: int = 0
    damaged_records: int = 0
    prefixes: int = 0
    stray_files: list[str] = field(default_factory=list)
    bad: list[BadBlock] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether all that was stored is there."""
        return not self.bad and not self.damaged_records


def check_store(path: Path) -> Report:
    """Check the store in a directory, its first one if it has several.

    Raises ConfigError when there is none or it cannot be read, StoreLocked while somebody has it
    open, BlockIOError when the drive fails in another place than a block.
    """
    try:
        is_there = (path / MANIFEST_NAME).is_file()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be looked into ({error.strerror}); name a store you may read"
        ) from error
    if not is_there:
        raise ConfigError(f"{path} holds no persistent store: it has no {MANIFEST_NAME}")
    with _locked(path), _mapped(f"checking {path}"):
        manifest = _manifest(path)
        if manifest.part:
            raise ConfigError(
                f"{path} is directory {manifest.part + 1} of a store; check its first one: "
                f"{manifest.directories[0]}"
            )
        places = [path, *map(Path, manifest.directories[1:])]
        report = Report(str(path))
        records = _records(places, manifest, report)
        layout, capacity = SegmentLayout(manifest.dims), records.layout.capacity
        _check_replaced(path, layout, records, report)
        for number in range(segment_count(capacity)):
            place = places[number % len(places)] / segment_name(number)
            _check_segment(place, number, capacity, layout, records, report)
        _find_strays(places, manifest, records, report)
    return report


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock; on a read-only file system there is nobody to keep out."""
    try:
        directory = StoreDirectory.open(path, keep=True)
    except ConfigError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError) or cause.errno != errno.EROFS:
            raise
        yield
        return
    try:
        yield
    finally:
        directory.close()


@contextmanager
def _mapped(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise from_os_error(error, what) from error


def _manifest(path: Path) -> Manifest:
    place = path / MANIFEST_NAME
    content = read_plain(place, MANIFEST_BYTES_LIMIT)
    whole = content[: len(content) // DISK_ALIGNMENT * DISK_ALIGNMENT]  # as an opening reads it
    manifest = Manifest.from_bytes(whole, str(place), alone=False)
    if manifest is None:
        if record_files(os.listdir(path), 0) or _segments(path):
            raise ConfigError(f"{place} is damaged; restore it or remove the store")
        raise ConfigError(f"{path} holds no persistent store: it was never made in full")
    return manifest


def _records(places: list[Path], manifest: Manifest, report: Report) -> Records:
    path = places[0]
    files = record_files(os.listdir(path), manifest.capacity_blocks)
    segments = any(map(_segments, places))
    if not files:
        if segments:
            raise ConfigError(
                f"{path / RECORDS_NAME} is missing; restore it or remove what is left of the store"
            )
        return Records(RecordLayout(manifest.dims.layers, manifest.capacity_blocks))
    capacity = capacity_now({number: _first_page(path / name) for number, name in files.items()})
    layout = RecordLayout(manifest.dims.layers, capacity)
    records = Records(layout)
    content = read_plain(path / files[capacity], layout.file_bytes)
    records.image[: len(content)] = np.frombuffer(content, np.uint8)
    report.damaged_records = records.drop_invalid()
    if segments and not report.damaged_records and records.header["state"][0] != VALID:
        report.damaged_records = 1  # the first opening writes the header, and then blocks come
    report.prefixes = int((records.ids["state"] == VALID).sum())
    return records


def _first_page(path: Path) -> NDArray[np.uint8]:
    return np.frombuffer(read_plain(path, DISK_ALIGNMENT).ljust(DISK_ALIGNMENT, b"\0"), np.uint8)


def _segments(place: Path) -> list[str]:
    """Names of the segment files in a directory, which may be gone."""
    names = os.listdir(place) if place.is_dir() else ()
    return sorted(filter(SEGMENT_NAME.fullmatch, names))


def _check_segment(
    place: Path,
    number: int,
    capacity: int,
    layout: SegmentLayout,
    records: Records,
    report: Report,
) -> None:
    first, end = number * SEGMENT_IDS, min((number + 1) * SEGMENT_IDS, capacity)
    rows = records.blocks[:, first:end]
    if not (rows["state"] == VALID).any():
        return
    try:
        descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        descriptor, reason = -1, f"{place}: {error.strerror}"
    try:
        for layer, block_bytes in enumerate(layout.block_bytes):
            for place_in in np.flatnonzero(rows["state"][layer] == VALID).tolist():
                index, row = first + place_in, rows[layer, place_in]
                report.blocks += 1
                if descriptor >= 0:
                    offset = layout.offset(layer, index)
                    reason = _check_block(descriptor, offset, block_bytes, layer, index, row)
                    report.bytes_checked += block_bytes
                if reason:
                    block_id = id_of(index, int(row["generation"]))
                    report.bad.append(BadBlock(layer, block_id, reason))
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _check_block(
    descriptor: int, offset: int, nbytes: int, layer: int, index: int, row: np.void
) -> str:
    """What is wrong with a block, or nothing."""
    try:
        content = os.pread(descriptor, nbytes, offset)
    except OSError as error:
        return f"reading failed: {error.strerror}"
    if len(content) < nbytes:
        return f"the file ends after {len(content)} of its {nbytes} bytes"
    view: NDArray[np.uint8] = np.frombuffer(content, np.uint8)
    if not is_content(view, layer, index, row):
        return "its bytes are others than were written"
    return ""


def _check_replaced(path: Path, layout: SegmentLayout, records: Records, report: Report) -> None:
    """Blocks that were being replaced when the power went: the next open takes them from here."""
    slot_bytes = slot_bytes_of(layout.block_bytes)
    for layer, index in np.argwhere(records.blocks["state"] == REPLACED).tolist():
        row, nbytes = records.blocks[layer, index], layout.block_bytes[layer]
        report.blocks += 1
        report.bytes_checked += nbytes
        try:
            descriptor = os.open(path / SPARE_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            reason = f"{path / SPARE_NAME}: {error.strerror}"
        else:
            offset = (int(row["spare"]) - 1) * slot_bytes
            reason = _check_block(descriptor, offset, nbytes, layer, index, row)
            os.close(descriptor)
        if reason:
            report.bad.append(BadBlock(layer, id_of(index, int(row["generation"])), reason))


def _find_strays(places: list[Path], manifest: Manifest, records: Records, report: Report) -> None:
    states = records.blocks["state"][:, : records.layout.capacity]
    known = ((states == VALID) | (states == REPLACED)).any(axis=0)
    numbers = set((np.flatnonzero(known) // SEGMENT_IDS).tolist())
    for part, place in enumerate(places):
        expected = {segment_name(n) for n in numbers if n % len(places) == part}
        strays = [name for name in _segments(place) if name not in expected]
        report.stray_files.extend(str(place / name) for name in strays)
