"""Opening a persistent store: what is there, whether it is the right one, and what of it holds.

Order of making one, so that a loss of power at any instant leaves something that opens: manifests
of the other directories, manifest of the first, records. Order of opening one: manifest, records,
drop what cannot be true, write that down and sync, and only then remove files that nothing speaks
of.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsswap.config import DISK_ALIGNMENT
from hsswap.errors import ConfigError
from hsswap.io.base import BlockIO, IOFile, Operation
from hsswap.io.directory import SEGMENT_NAME, segment_name
from hsswap.io.growth import find_records, grow_records, record_files
from hsswap.io.ids import LAST_GENERATION
from hsswap.io.journal import GENERATION_STEP
from hsswap.io.layout import SEGMENT_IDS, SegmentLayout, segment_count
from hsswap.io.manifest import MANIFEST_BYTES_LIMIT, MANIFEST_NAME, Manifest
from hsswap.io.recordfile import Pages, move, write_all
from hsswap.io.records import CLEARED, RECORDS_NAME, VALID, Records
from hsswap.io.replaced import restore_replaced
from hsswap.io.spare import Spare, slot_bytes_of, spare_bytes


@dataclass(frozen=True)
class Recovered:
    """A persistent store as found. ``generations``: of each index, 0 where nothing is.
    ``segments``: numbers of those with a file. ``first_generation``: for ids given out from now on.
    ``file_bytes``: of everything but segments. ``dropped``: records that were damaged, or whose
    blocks are gone.
    """

    manifest: Manifest
    records: Records
    record_file: IOFile
    generations: NDArray[np.int64]
    segments: list[int]
    first_generation: int
    file_bytes: int
    dropped: int
    spare: Spare

    def valid(self) -> NDArray[np.bool_]:
        """``[layers, capacity]``: blocks that an id speaks for."""
        return _valid(self.records, self.generations)

    def oldest_first(self) -> NDArray[np.int64]:
        """The indices with content, those committed first in front."""
        indices = np.flatnonzero(self.generations)
        serials = np.where(self.valid(), self.records.blocks["serial"][:, : self.capacity], 0)
        ages: NDArray[np.int64] = indices[np.argsort(serials.max(axis=0)[indices], kind="stable")]
        return ages

    @property
    def capacity(self) -> int:
        """Block ids."""
        return len(self.generations)

    def prefix_keys(self) -> list[tuple[int, int, bytes]]:
        """Index, depth and key of the blocks with a prefix key."""
        rows = self.records.ids
        return [
            (index, int(rows["depth"][index]), rows["key"][index].tobytes())
            for index in np.flatnonzero(rows["state"] == VALID).tolist()
        ]


async def recover(
    io: BlockIO, places: Sequence[Path], wanted: Manifest, salt: bytes | None
) -> Recovered:
    """Find the store in these directories, or make it. The backend is started and idle.

    Raises ConfigError when there is another store, or this one with other settings, or damaged in
    a way that leaves open what it was; OutOfSpace or BlockIOError. Good data stay then.
    """
    sizes = [await io.file_sizes(place) for place in places]
    manifest = await _manifest(io, places, sizes, wanted, salt)
    layout = SegmentLayout(manifest.dims)
    capacity = wanted.capacity_blocks
    records, found_file = await _records(io, places, sizes, manifest, capacity)
    loop = asyncio.get_running_loop()
    dropped = await loop.run_in_executor(None, records.drop_invalid)
    if dropped:
        records.dirty[:] = True
    records, record_file = await grow_records(io, places[0], records, found_file, capacity)
    file = record_file.file
    found = _segment_sizes(sizes, capacity)
    spare = await restore_replaced(io, places, sizes[0], records, layout, found)
    dropped += _drop_lost(records, layout, found, capacity)
    blocks = records.blocks[:, :capacity]
    generations = np.where(blocks["state"] == VALID, blocks["generation"], 0).max(axis=0)
    generations = generations.astype(np.int64)
    _drop_keys(records, generations)
    first = _set_generations_aside(records, generations)
    await record_file.write_back(io, records)
    used = set((np.flatnonzero(generations) // SEGMENT_IDS).tolist())
    await _remove_strays(io, places, sizes, used, capacity)
    metadata = len(places) * (len(manifest.to_bytes()) + DISK_ALIGNMENT) + file.nbytes
    metadata += spare_bytes(slot_bytes_of(layout.block_bytes))
    return Recovered(
        manifest, records, file, generations, sorted(used), first, metadata, dropped, spare
    )


def _valid(records: Records, generations: NDArray[np.int64]) -> NDArray[np.bool_]:
    blocks = records.blocks[:, : len(generations)]
    valid: NDArray[np.bool_] = (blocks["state"] == VALID) & (blocks["generation"] == generations)
    return valid


def _drop_keys(records: Records, generations: NDArray[np.int64]) -> None:
    """Clear the keys of blocks that are not whole in every layer, and keys given twice.

    Both come from a loss of power soon after blocks were freed. They must go from the disk now:
    these blocks may be written again, and would then have the key of other tokens.
    """
    rows = records.ids
    named = (rows["state"] == VALID) & (rows["generation"] == generations)
    named &= _valid(records, generations).all(axis=0) & (generations > 0)
    _, firsts = np.unique(rows["key"][named], axis=0, return_index=True)
    keep = np.flatnonzero(named)[firsts]
    drop = np.setdiff1d(np.flatnonzero(rows["state"] == VALID), keep)
    rows["state"][drop] = CLEARED
    records.touch_ids(drop)


def _set_generations_aside(records: Records, generations: NDArray[np.int64]) -> int:
    """The first generation for new owners, above all that were ever given out."""
    header = records.header
    highest = int(generations.max(initial=0))
    if int(header["state"][0]) == VALID:
        first = max(int(header["generation_limit"][0]), highest + 1)
    else:  # new, or the header is damaged
        first = highest + GENERATION_STEP if highest else 1
    if first + GENERATION_STEP > LAST_GENERATION:
        raise ConfigError("the store has used up its generations of ids; remove it, make a new one")
    header["state"] = VALID
    header["generation_limit"] = first + GENERATION_STEP
    header["serial"] = max(int(header["serial"][0]), int(records.blocks["serial"].max())) + 1
    records.touch_header()
    return first


async def _manifest(
    io: BlockIO,
    places: Sequence[Path],
    sizes: list[dict[str, int]],
    wanted: Manifest,
    salt: bytes | None,
) -> Manifest:
    found = [await _read_manifest(io, p, s) for p, s in zip(places, sizes, strict=True)]
    home = found[0]
    if home is None:
        if record_files(sizes[0], wanted.capacity_blocks):
            raise ConfigError(
                f"{places[0]} has {RECORDS_NAME} and no {MANIFEST_NAME}; restore it or remove "
                "what is left of the store"
            )
        for place, names, manifest in zip(places, sizes, found, strict=True):
            if manifest is not None and any(map(SEGMENT_NAME.fullmatch, names)):
                raise ConfigError(f"{place} belongs to another store; name another directory")
        for part in reversed(range(len(places))):
            await _write_manifest(io, places[part], sizes[part], wanted.of_part(part))
        return wanted
    home.require(wanted, str(places[0]), salt=salt)
    for part, (place, manifest) in enumerate(zip(places, found, strict=True)):
        if manifest != home.of_part(part):
            raise ConfigError(
                f"{place} is not directory {part + 1} of {len(places)} of the store in "
                f"{places[0]}; name its directories in the order in which it was made"
            )
    return home


async def _read_manifest(io: BlockIO, place: Path, sizes: dict[str, int]) -> Manifest | None:
    nbytes = sizes.get(MANIFEST_NAME, 0) // DISK_ALIGNMENT * DISK_ALIGNMENT
    if nbytes == 0:
        return None
    path = place / MANIFEST_NAME
    if nbytes > MANIFEST_BYTES_LIMIT:
        raise ConfigError(f"{path} is damaged; restore it or remove the store")
    pages = Pages(nbytes)
    file = await io.open_file(path, nbytes)
    await move(io, Operation.READ, file, 0, pages.content)
    alone = not record_files(sizes, 0) and not any(map(SEGMENT_NAME.fullmatch, sizes))
    return Manifest.from_bytes(pages.content.tobytes(), str(path), alone=alone)


async def _write_manifest(
    io: BlockIO, place: Path, sizes: dict[str, int], manifest: Manifest
) -> None:
    """Into a new file; one that was made and not written, or of a store never finished, goes."""
    for name in sizes:
        if name == MANIFEST_NAME or SEGMENT_NAME.fullmatch(name):
            await io.remove_file(await io.open_file(place / name, 0))
    content = manifest.to_bytes()
    file = await io.create_file(place / MANIFEST_NAME, len(content))
    await write_all(io, file, content)
    await io.sync(file)
    sizes.clear()


async def _records(
    io: BlockIO,
    places: Sequence[Path],
    sizes: list[dict[str, int]],
    manifest: Manifest,
    wanted: int,
) -> tuple[Records, IOFile]:
    made_with = manifest.capacity_blocks
    segments = any(SEGMENT_NAME.fullmatch(name) for names in sizes for name in names)
    if segments and not record_files(sizes[0], made_with):
        raise ConfigError(
            f"{places[0] / RECORDS_NAME} is missing; restore it or remove what is left of the store"
        )
    layers = manifest.dims.layers
    return await find_records(io, places[0], sizes[0], layers, made_with, wanted)


def _segment_sizes(sizes: list[dict[str, int]], capacity: int) -> list[int]:
    """Bytes of every segment's file, 0 without one."""
    count = segment_count(capacity)
    return [sizes[n % len(sizes)].get(segment_name(n), 0) for n in range(count)]


def _drop_lost(records: Records, layout: SegmentLayout, found: list[int], capacity: int) -> int:
    """Forget blocks whose file is missing or ends before them; how many."""
    lost = 0
    for number, nbytes in enumerate(found):
        if nbytes >= layout.segment_bytes:
            continue
        first, end = number * SEGMENT_IDS, min((number + 1) * SEGMENT_IDS, capacity)
        for layer, block_bytes in enumerate(layout.block_bytes):
            rows = records.blocks[layer, first:end]
            ends = layout.offset(layer, first) + np.arange(1, end - first + 1) * block_bytes
            gone = np.flatnonzero((rows["state"] == VALID) & (ends > nbytes))
            rows[gone] = np.zeros((), rows.dtype)
            records.touch_blocks(np.full(len(gone), layer), first + gone)
            lost += len(gone)
    return lost


async def _remove_strays(
    io: BlockIO,
    places: Sequence[Path],
    sizes: list[dict[str, int]],
    used: set[int],
    capacity: int,
) -> None:
    """Remove segment files that no record speaks of."""
    expected = {(n % len(places), segment_name(n)) for n in used if n < segment_count(capacity)}
    for part, names in enumerate(sizes):
        for name in names:
            if SEGMENT_NAME.fullmatch(name) and (part, name) not in expected:
                await io.remove_file(await io.open_file(places[part] / name, 0))
