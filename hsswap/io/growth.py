"""A persistent store opened with more blocks than before: its records move to a longer file.

The file's name says how many blocks it is for, but for the one that the store was made with. A new
one is written and synced in full before its header is, so that of several the longest with a valid
header counts, whenever the power goes; the others go at the next opening at the latest.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsswap.config import DISK_ALIGNMENT
from hsswap.errors import ConfigError
from hsswap.io.base import BlockIO, IOFile, Operation
from hsswap.io.recordfile import Pages, move, read_all, write_pages
from hsswap.io.records import RECORDS_NAME, RecordLayout, Records, header_is_valid

GROWN_NAME = re.compile(rf"{re.escape(RECORDS_NAME)}-(\d+)")


def record_files(names: Iterable[str], made_with: int) -> dict[int, str]:
    """Which of these are record files, by the number of blocks that they are for.

    ``made_with``: the blocks that the store was made with.
    """
    files = {}
    for name in names:
        if name == RECORDS_NAME:
            files[made_with] = name
        elif grown := GROWN_NAME.fullmatch(name):
            files[int(grown[1])] = name
    return files


def capacity_now(first_pages: Mapping[int, NDArray[np.uint8]]) -> int:
    """The number of blocks of the record file that counts, by the first page of each."""
    for capacity in sorted(first_pages, reverse=True):
        if header_is_valid(first_pages[capacity]):
            return capacity
    return min(first_pages)


@dataclass(frozen=True)
class RecordFile:
    """The record file of a store that is being opened. ``outgrown``: the one it takes over from."""

    file: IOFile
    outgrown: IOFile | None = None

    async def write_back(self, io: BlockIO, records: Records) -> None:
        """Write what is dirty, and sync. From then on this file counts; an outgrown one goes."""
        pages = np.flatnonzero(records.dirty)
        if self.outgrown is not None:
            behind, pages = pages[pages > 0], pages[pages == 0]
            if len(behind):
                await write_pages(io, self.file, records, behind)
            await io.sync(self.file)  # before the header
        await write_pages(io, self.file, records, pages)
        await io.sync(self.file)
        records.dirty[:] = False
        if self.outgrown is not None:
            await io.remove_file(self.outgrown)


async def find_records(
    io: BlockIO, place: Path, names: Iterable[str], layers: int, made_with: int, wanted: int
) -> tuple[Records, IOFile]:
    """Read the record file of a store, or make it if none of these files is one.

    Raises ConfigError when it has more than the ``wanted`` blocks.
    """
    files = record_files(names, made_with)
    if not files:
        layout = RecordLayout(layers, made_with)
        return Records(layout), await io.create_file(place / RECORDS_NAME, layout.file_bytes)
    capacity = next(iter(files))
    others: dict[int, IOFile] = {}
    if len(files) > 1:
        for number, name in files.items():
            others[number] = await io.open_file(place / name, DISK_ALIGNMENT)
        pages = {number: await _first_page(io, file) for number, file in others.items()}
        capacity = capacity_now(pages)
        del others[capacity]
    if wanted < capacity:
        raise ConfigError(
            f"the store in {place} has room for {capacity} blocks, not {wanted}: it can grow and "
            f"not shrink; open it with {capacity} or more, name another directory, or remove it"
        )
    for file in others.values():
        await io.remove_file(file)
    layout = RecordLayout(layers, capacity)
    records, file = Records(layout), await io.open_file(place / files[capacity], layout.file_bytes)
    await read_all(io, file, records.image)
    return records, file


async def grow_records(
    io: BlockIO, place: Path, records: Records, file: IOFile, wanted: int
) -> tuple[Records, RecordFile]:
    """The same records with room for the ``wanted`` blocks, in a new file if that is more.

    ``records``: without invalid ones. Nothing is written before :meth:`RecordFile.write_back`.
    """
    capacity = records.layout.capacity
    if wanted <= capacity:
        return records, RecordFile(file)
    layout = RecordLayout(records.layout.layers, wanted)
    grown = Records(layout)
    grown.header[:] = records.header
    grown.ids[:capacity] = records.ids
    grown.blocks[:, :capacity] = records.blocks[:, :capacity]
    grown.dirty[:] = grown.image.reshape(-1, DISK_ALIGNMENT).any(axis=1)
    made = await io.create_file(place / f"{RECORDS_NAME}-{wanted}", layout.file_bytes)
    return grown, RecordFile(made, file)


async def _first_page(io: BlockIO, file: IOFile) -> NDArray[np.uint8]:
    content = Pages(DISK_ALIGNMENT).content
    await move(io, Operation.READ, file, 0, content)
    return content
