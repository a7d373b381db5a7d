"""Recovery of blocks that were being replaced when the power went: from the spare file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hsswap.checksum import crc32_of_blocks, identity_seeds
from hsswap.io.base import BlockIO, IOFile, Operation
from hsswap.io.directory import segment_name
from hsswap.io.layout import SegmentLayout, segment_of
from hsswap.io.recordfile import Pages, move
from hsswap.io.records import CLEARED, REPLACED, VALID, Records
from hsswap.io.spare import SPARE_NAME, SPARE_SLOTS, Spare, slot_bytes_of, spare_bytes


async def restore_replaced(
    io: BlockIO,
    places: Sequence[Path],
    names: dict[str, int],
    records: Records,
    layout: SegmentLayout,
    segment_sizes: Sequence[int],
) -> Spare:
    """Put the newer content into its place, sync, and make the record valid in memory.

    ``names``: files of the first directory. ``segment_sizes``: bytes of every segment's file, 0
    without one. Doing it twice does no harm: the records on disk change later.
    """
    slot_bytes = slot_bytes_of(layout.block_bytes)
    path = places[0] / SPARE_NAME
    file = None
    if SPARE_NAME in names:
        file = await io.open_file(path, spare_bytes(slot_bytes))
    segments: dict[int, IOFile] = {}
    for layer, index in np.argwhere(records.blocks["state"] == REPLACED).tolist():
        row = records.blocks[layer, index]
        records.touch_blocks(np.array([layer]), np.array([index]))
        number, nbytes = segment_of(index), layout.block_bytes[layer]
        slot, row["spare"], row["state"] = int(row["spare"]) - 1, 0, CLEARED
        there = number < len(segment_sizes) and segment_sizes[number] >= layout.segment_bytes
        if file is None or not 0 <= slot < SPARE_SLOTS or not there:
            continue
        content = Pages(nbytes).content
        await move(io, Operation.READ, file, slot * slot_bytes, content)
        if not is_content(content, layer, index, row):
            continue
        if number not in segments:
            place = places[number % len(places)] / segment_name(number)
            segments[number] = await io.open_file(place, layout.segment_bytes)
        await move(io, Operation.WRITE, segments[number], layout.offset(layer, index), content)
        row["state"] = VALID
    for segment in segments.values():
        await io.sync(segment)
    return Spare(io, path, slot_bytes, file)


def is_content(
    content: np.ndarray[tuple[int], np.dtype[np.uint8]], layer: int, index: int, row: np.void
) -> bool:
    """Whether these are the bytes that a record speaks of."""
    generation = np.array([int(row["generation"])], np.int64)
    seeds = identity_seeds(layer, np.array([index]), generation)
    return bool(crc32_of_blocks([content], seeds.tolist())[0] == row["checksum"])
