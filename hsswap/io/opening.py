"""Opening a store: directories locked, backend started, what was stored before taken over."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from secrets import token_bytes

import numpy as np

from hsswap.checksum import identity_seeds
from hsswap.config import DISK_ALIGNMENT, ModelDims
from hsswap.errors import ArgumentError, ConfigError
from hsswap.io.backends import open_backend
from hsswap.io.base import BlockIO
from hsswap.io.contents import Contents
from hsswap.io.directory import StoreDirectory
from hsswap.io.ids import INDEX_BITS, BlockIds
from hsswap.io.journal import JOURNAL_TRANSFERS, Journal
from hsswap.io.keys import PrefixIndex, PrefixKeys
from hsswap.io.layout import SegmentLayout
from hsswap.io.manifest import Manifest
from hsswap.io.mover import RunMover
from hsswap.io.prefix import PrefixBlocks
from hsswap.io.recovery import Recovered, recover
from hsswap.io.segments import Segments
from hsswap.io.space import SpaceBudget, SpaceLimits
from hsswap.io.waiting import to_the_end, until_done

MAX_SALT_BYTES = 64
"""BLAKE2b takes no longer key."""

Places = Path | str | Sequence[Path | str] | None


@dataclass(frozen=True, kw_only=True)
class StoreSettings:
    """The arguments of :meth:`hsswap.io.store.BlockStore.open`, which explains them."""

    dims: ModelDims
    directories: Places
    capacity_blocks: int
    io: str | BlockIO
    io_threads: int
    persist: bool
    fingerprint: str
    salt: bytes | None
    rank: int
    limits: SpaceLimits

    def check(self) -> None:
        """Raise ConfigError for what cannot work."""
        if self.salt is not None and not 1 <= len(self.salt) <= MAX_SALT_BYTES:
            raise ConfigError(f"salt has {len(self.salt)} bytes; it must have 1 to 64")
        if self.rank < 0:
            raise ConfigError(f"rank is {self.rank}; it cannot be negative")
        if self.persist and self.directories is None and not self.in_memory:
            raise ConfigError("persist needs a directory; name one that stays")
        if not self.named():
            raise ConfigError("directories are empty; name one, or None for a temporary one")
        disk, floor = self.limits.disk_bytes, self.limits.free_bytes
        if (disk is not None and disk < 0) or floor < 0:
            raise ConfigError(f"disk_bytes {disk} and free_bytes {floor} cannot be negative")

    @property
    def in_memory(self) -> bool:
        """Whether the backend has no need of a directory."""
        return not (isinstance(self.io, str) or self.io.needs_directory) or self.io == "memory"

    def named(self) -> tuple[Path | str | None, ...]:
        """The directories, one a drive."""
        if self.directories is None or isinstance(self.directories, Path | str):
            return (self.directories,)
        return tuple(self.directories)


@dataclass(frozen=True)
class StoreParts:
    """What a store is made of, started and wired."""

    dims: ModelDims
    ids: BlockIds
    io: BlockIO
    directories: tuple[StoreDirectory, ...]
    layout: SegmentLayout
    contents: Contents
    mover: RunMover
    prefixes: PrefixBlocks
    journal: Journal | None


async def open_parts(settings: StoreSettings) -> StoreParts:
    """Lock, start, recover. Leaves nothing behind when it raises."""
    settings.check()
    least = JOURNAL_TRANSFERS + 1
    if settings.persist and not isinstance(settings.io, str) and settings.io.limit < least:
        raise ConfigError(f"a persistent store needs a backend that takes {least} transfers")
    ids = BlockIds(settings.capacity_blocks)
    io = settings.io
    backend = open_backend(io, threads=settings.io_threads) if isinstance(io, str) else io
    async with AsyncExitStack() as undo:
        directories: list[StoreDirectory] = []
        undo.push_async_callback(lambda: close_directories(directories))
        if backend.needs_directory:
            for path in settings.named():
                await _lock(path, keep=settings.persist, into=directories)
            places = [directory.path for directory in directories]
        else:
            count = len(settings.named())
            places = [Path() if count == 1 else Path(str(n)) for n in range(count)]
        await _start(backend, places[0] if backend.needs_directory else None)
        undo.push_async_callback(backend.close)
        recovered = None
        if settings.persist:
            wanted = _wanted(settings, places)
            recovered = await recover(backend, places, wanted, settings.salt)
        parts = _wire(settings, ids, backend, tuple(directories), places, recovered)
        undo.pop_all()
        return parts


async def close_directories(directories: Sequence[StoreDirectory]) -> None:
    """Off the loop, and to the end."""
    loop = asyncio.get_running_loop()

    async def close(directory: StoreDirectory) -> None:
        await until_done(loop.run_in_executor(None, directory.close))

    await to_the_end(*((lambda d=d: close(d)) for d in directories))


async def check_kept(directories: Sequence[StoreDirectory]) -> None:
    """:meth:`StoreDirectory.check_kept` of a persistent store's, off the loop."""
    loop = asyncio.get_running_loop()
    for directory in directories:
        if directory.keep:
            await loop.run_in_executor(None, directory.check_kept)


async def _lock(path: Path | str | None, *, keep: bool, into: list[StoreDirectory]) -> None:
    loop = asyncio.get_running_loop()
    opening = loop.run_in_executor(None, lambda: StoreDirectory.open(path, keep=keep))
    try:
        into.append(await until_done(opening))
    except asyncio.CancelledError:
        if opening.exception() is None:  # cancelled meanwhile: it was locked all the same
            into.append(opening.result())
        raise


async def _start(backend: BlockIO, place: Path | None) -> None:
    """Start it, or close it; but not one that another store has."""
    try:
        await backend.start(place)
    except ArgumentError:  # it was started before
        raise
    except BaseException:
        await backend.close()
        raise


def _wanted(settings: StoreSettings, places: Sequence[Path]) -> Manifest:
    return Manifest.new(
        settings.dims,
        settings.capacity_blocks,
        fingerprint=settings.fingerprint,
        salt=settings.salt,
        rank=settings.rank,
        directories=tuple(map(str, places)),
    )


def _wire(
    settings: StoreSettings,
    ids: BlockIds,
    io: BlockIO,
    directories: tuple[StoreDirectory, ...],
    places: Sequence[Path],
    recovered: Recovered | None,
) -> StoreParts:
    dims = settings.dims
    layout = SegmentLayout(dims)
    contents = Contents(dims.layers, ids.capacity)
    budget = SpaceBudget(settings.limits)
    budget.used_bytes = DISK_ALIGNMENT * len(directories)  # locks
    segments = Segments(io, layout, places, ids, budget)
    mover = RunMover(io, ids, contents, segments)
    salt = settings.salt or token_bytes(32)
    if recovered is not None:
        salt = bytes.fromhex(recovered.manifest.salt)
        budget.used_bytes = recovered.file_bytes
    keys = PrefixKeys(salt, settings.fingerprint, settings.rank, dims.block_size)
    prefixes = PrefixBlocks(keys, PrefixIndex(), ids, contents)
    journal = None
    if recovered is not None:
        _take_over(recovered, ids, contents, prefixes.index)
        records, file = recovered.records, recovered.record_file
        journal = Journal(io, file, records, contents, ids, segments, recovered.spare)
        prefixes.journal = journal
        mover.attach(journal)
        segments.clear = journal.clear_segment
        segments.adopt(recovered.segments)
    ids.on_freed = _Freed(prefixes.index, segments, journal)
    mover.on_corrupt = prefixes.drop_key
    if recovered is not None and recovered.segments:
        _check_room(settings.limits, recovered.file_bytes, layout.segment_bytes)
    segments.shrink()
    return StoreParts(dims, ids, io, directories, layout, contents, mover, prefixes, journal)


def _check_room(limits: SpaceLimits, file_bytes: int, segment_bytes: int) -> None:
    """Refuse a limit under which all that is stored would have to go, and nothing could come."""
    least = file_bytes + segment_bytes
    if limits.disk_bytes is not None and limits.disk_bytes < least:
        raise ConfigError(
            f"disk_bytes is {limits.disk_bytes}; a persistent store of this capacity needs "
            f"{least}: {file_bytes} for its tables and {segment_bytes} for each segment of blocks"
        )


def _take_over(recovered: Recovered, ids: BlockIds, contents: Contents, index: PrefixIndex) -> None:
    """What was found on disk, as kept blocks."""
    oldest_first, generations = recovered.oldest_first(), recovered.generations
    ids.restore(oldest_first, generations[oldest_first])
    ids.begin_generations(recovered.first_generation)
    layers, indices = np.nonzero(recovered.valid())
    rows = recovered.records.blocks[layers, indices]
    contents.checksums[layers, indices] = rows["checksum"]
    contents.lengths[layers, indices] = rows["length"]
    contents.codes_versions[layers, indices] = rows["codes_version"]
    contents.written[layers, indices] = rows["generation"]
    for layer in np.unique(layers).tolist():
        its = indices[layers == layer]
        contents.seeds[layer, its] = identity_seeds(layer, its, contents.written[layer, its])
    for place, depth, key in recovered.prefix_keys():
        index.put(key, place)
        ids.want(np.array([place]), np.array([depth]))


class _Freed:
    """Tells everybody of freed blocks. On any thread."""

    def __init__(self, index: PrefixIndex, segments: Segments, journal: Journal | None) -> None:
        self._index = index
        self._segments = segments
        self._journal = journal

    def __call__(self, indices: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        self._index.forget(indices)
        if self._journal is not None:
            self._journal.freed(indices)
        self._segments.freed(indices)


assert INDEX_BITS == 32
