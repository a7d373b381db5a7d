"""BlockStore: blocks on disk, by layer and index, verified when they come back.

Plain functions on the loop's thread that never wait move all the state; the backend's threads move
the bytes and compute checksums. A temporary store never syncs, and leaves nothing behind; one with
``persist`` stays, and what it acknowledged survives a loss of power (:mod:`hsswap.io.journal`).
"""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hsswap.config import ModelDims
from hsswap.errors import BlockIOError, ClosedError
from hsswap.io.base import BlockChecksums, BlockIO, Operation, Priority
from hsswap.io.calls import Call, check_codes_version, check_lengths
from hsswap.io.contents import StoredBlocks
from hsswap.io.copying import copy_content
from hsswap.io.ids import index_of
from hsswap.io.opening import (
    Places,
    StoreParts,
    StoreSettings,
    check_kept,
    close_directories,
    open_parts,
)
from hsswap.io.runs import OnBlocksDone
from hsswap.io.space import SpaceLimits
from hsswap.io.statistics import StoreStatistics
from hsswap.io.waiting import goes_on, is_own, to_the_end, until_done


class BlockStore:
    """Blocks of a model on disk. Open it with :meth:`open`; leaving ``async with`` closes it.

    ``ids`` gives out block ids, valid in every layer. ``path`` says which way the bytes take.
    ``directory`` is None for a backend that needs none.

    :meth:`read` and :meth:`write` take buffers by address and report by callback. Blocks that
    adjoin on disk are moved together; a run that fails is tried again block by block, so that
    exactly the blocks with a fault have an error. A block being written is not read before that is
    done, and the other way round.
    """

    def __init__(self, parts: StoreParts) -> None:
        """For :meth:`open`."""
        self.dims = parts.dims
        self.ids = parts.ids
        self._io = parts.io
        self._directories = parts.directories
        self._loop = asyncio.get_running_loop()
        self._layout = parts.layout
        self._contents = parts.contents
        self._mover = parts.mover
        self._prefixes = parts.prefixes
        self._journal = parts.journal
        self._closed: asyncio.Future[None] | None = None  # there once closing began

    @classmethod
    async def open(
        cls,
        dims: ModelDims,
        directory: Places,
        capacity_blocks: int,
        io: str | BlockIO = "auto",
        io_threads: int = 4,
        *,
        persist: bool = False,
        fingerprint: str = "",
        salt: bytes | None = None,
        rank: int = 0,
        disk_bytes: int | None = None,
        free_bytes: int = 0,
    ) -> BlockStore:
        """Lock the directory, clean it or take over what is in it, start the backend.

        ``directory``: made if missing; several, one a drive: segments go to them in turn; None: a
        new one in the system's temporary folder; not used by ``"memory"``. ``io``: a name that
        :func:`open_backend` knows, or a backend not started yet, which the store starts and closes.
        ``io_threads`` counts for posix alone.

        ``persist``: the store outlives its closing, a crash and a loss of power, and is opened
        again with the same settings. What :meth:`flush` or :meth:`stored` returned for is there
        then, as kept ids (``ids.kept``). ``fingerprint`` names the model and its weights, ``rank``
        the part of it; ``salt``, the key of prefix keys, is drawn when the store is made, or given.

        ``disk_bytes``: what all files together may take; segments that nobody holds go first, then
        OutOfSpace. ``free_bytes``: what stays free in the file system.

        Raises StoreLocked, ConfigError (also for a store made with other settings), OutOfSpace or
        BlockIOError, leaving nothing behind and what was stored untouched.
        """
        settings = StoreSettings(
            dims=dims,
            directories=directory,
            capacity_blocks=capacity_blocks,
            io=io,
            io_threads=io_threads,
            persist=persist,
            fingerprint=fingerprint,
            salt=salt,
            rank=rank,
            limits=SpaceLimits(disk_bytes, free_bytes),
        )
        return cls(await open_parts(settings))

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        in_flight = self._mover.counters.in_flight
        return f"<BlockStore {state}, {self.path}, {self.ids}, {in_flight} in flight>"

    def __del__(self) -> None:
        if getattr(self, "_loop", None) is not None and self._closed is None:
            warnings.warn(f"{self!r} was not closed", ResourceWarning, source=self, stacklevel=2)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def path(self) -> str:
        """The way the bytes take, in plain words."""
        return self._io.path

    @property
    def why(self) -> str:
        """Why ``auto`` chose this backend, with what it measured; "" for one that was named."""
        return self._io.why

    @property
    def directory(self) -> Path | None:
        """Where the files are, the first of several; None for a backend without files."""
        return self._directories[0].path if self._directories else None

    @property
    def persistent(self) -> bool:
        """Whether it is there again after it was closed."""
        return self._journal is not None

    def block_bytes(self, layer: int) -> int:
        """Bytes of a block of that layer. Raises ConfigError for a layer out of range."""
        return self.dims.block_bytes(self.dims.group(layer))

    def statistics(self) -> StoreStatistics:
        """Counts since the store was opened."""
        counters = self._mover.counters
        return StoreStatistics(
            bytes_read=counters.nbytes[Operation.READ],
            bytes_written=counters.nbytes[Operation.WRITE],
            blocks_read=counters.blocks[Operation.READ],
            blocks_written=counters.blocks[Operation.WRITE],
            read_calls=counters.calls[Operation.READ],
            write_calls=counters.calls[Operation.WRITE],
            errors=counters.errors + self._mover.segments.errors,
            checksum_failures=counters.checksum_failures,
            in_flight=counters.in_flight,
            segment_files=self._mover.segments.file_count,
            disk_bytes=self._mover.segments.budget.used_bytes,
            record_bytes_written=self._journal.total_written if self._journal else 0,
            commits=self._journal.commits if self._journal else 0,
            kept_blocks=self.ids.kept_count,
            prefix_blocks=len(self._prefixes.index),
        )

    def read(
        self,
        layer: int,
        indices: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        *,
        priority: Priority = Priority.NEEDED,
        owner: object = None,
        on_done: OnBlocksDone,
        deadline: float | None = None,
        checksums: BlockChecksums | None = None,
    ) -> None:
        """Read blocks of a layer into memory. Returns at once; on the loop's thread only.

        ``indices``: int64 ``[n]``, what ``ids.check`` returned, in any order. ``addresses``: uint64
        ``[n]``, aligned to 4096, ``block_bytes(layer)`` bytes each, which belong to the read until
        reported; ``owner`` is kept alive as long. ``deadline``: ``time.monotonic()`` seconds after
        which a read that has not begun fails with ETIMEDOUT. ``checksums``: for device memory, on a
        backend that moves to it; without it the processor reads the blocks to check them.

        ``on_done(positions, error)`` is called on the loop, later, for groups of positions in the
        arrays, every position exactly once: those that succeeded together (None), as many runs as
        ended in one go, each failed one alone. Its error names layer and id: CorruptBlock for bytes
        that differ from those written and for a block that was not written, StaleBlockId for an id
        freed meanwhile, else what the backend reports. What the buffer of a failed block holds is
        unknown.

        Raises ArgumentError or ClosedError, and then does nothing.
        """
        self._require_open()
        call = Call(
            Operation.READ, layer, indices, addresses, priority, owner, on_done, deadline, checksums
        )
        call.check(self._layout, self.ids.capacity, self._io.alignment)
        unknown = self._mover.unreadable(layer, indices, self.ids.generations(indices))
        self._begin(call, unknown)

    def write(
        self,
        layer: int,
        indices: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        *,
        priority: Priority = Priority.WRITE,
        owner: object = None,
        on_done: OnBlocksDone,
        checksums: BlockChecksums | None = None,
        lengths: ArrayLike | None = None,
        codes_version: int = 0,
        was_alone: bool = False,
    ) -> None:
        """Write blocks of a layer from memory. Returns at once; on the loop's thread only.

        Arguments and reports as in :meth:`read`; the memory must not change until reported. A
        block whose write failed has no content until it is written again. Segment files are made
        on demand; OutOfSpace is the error of exactly the blocks that found no room. SharedBlock is
        the error of blocks with content that several hold, or that have a prefix key.

        ``was_alone``: the content was taken when the blocks had one holder; those who came later
        hold it, so it is written. ``lengths``: valid tokens of each block, all by default.
        ``codes_version``: of the codes in the blocks. Both are given back by :meth:`describe`, also
        by a later process.
        """
        self._require_open()
        call = Call(Operation.WRITE, layer, indices, addresses, priority, owner, on_done)
        call.check(self._layout, self.ids.capacity, self._io.alignment)
        check_codes_version(codes_version)
        valid = check_lengths(lengths, len(indices), self.dims.block_size)
        call = call._replace(checksums=checksums, lengths=valid, codes_version=codes_version)
        written = self._contents.written[layer, indices] == self.ids.generations(indices)
        refused = ~self.ids.used(indices)
        if not was_alone:
            refused |= self.ids.shared(indices) & written
        self._begin(call, refused)

    def is_fixed(self, layer: int, index: int) -> bool:
        """Whether a block cannot be written: it has content, and others or a prefix key hold it."""
        one = np.array([index])
        written = self._contents.written[layer, one] == self.ids.generations(one)
        return bool((self.ids.shared(one) & written)[0])

    def describe(self, layer: int, indices: NDArray[np.int64]) -> StoredBlocks:
        """What is known of blocks of a layer, by index: of ids in use or kept."""
        contents, layers = self._contents, np.full(len(indices), layer)
        written: NDArray[np.bool_] = contents.written[layer, indices] == self.ids.generations(
            indices
        )
        durable = np.zeros_like(written)
        if self._journal is not None:
            durable = written & self._journal.durable(layers, indices)
        lengths = contents.lengths[layer, indices]
        return StoredBlocks(written, durable, lengths, contents.codes_versions[layer, indices])

    async def flush(self) -> None:
        """Wait until every block written so far is stored: in a persistent store it is there after
        a loss of power, and a write that is called meanwhile overwrites nothing of it before.

        Blocks whose write failed are not among them; ``on_done`` told of those. Raises BlockIOError
        or OutOfSpace when syncing fails; then nothing more than before is known to be stored, and
        the next call tries again. Calls that overlap share their work. BlockIOError too when files
        of a persistent store were removed or replaced: it would not be found again.
        """
        await self._commit()
        await check_kept(self._directories)

    async def stored(self, indices: NDArray[np.int64]) -> None:
        """:meth:`flush` for the blocks of these ids, in every layer: others' faults are not told.

        Raises the error when one of them is not stored.
        """
        try:
            await self._commit()
        except BlockIOError:
            for layer in range(self.dims.layers):
                known = self.describe(layer, indices)
                if (known.written & ~known.durable).any():
                    raise
        await check_kept(self._directories)

    async def copy_block(self, block_id: int) -> int:
        """A new id with the content of another in every layer: what may be written in place of a
        shared block. The caller goes on holding both.

        Raises StaleBlockId, OutOfBlocks, or the error of a read or write; no id is taken then.
        """
        self._require_open()
        source = int(self.ids.check([block_id])[0])
        copied = int(self.ids.allocate(1)[0])
        self.ids.add_reference([block_id])  # it must not go meanwhile
        try:
            await self._mover.tickets.until_now()  # what is being written is copied too
            for layer in range(self.dims.layers):
                await copy_content(self, layer, source, index_of(copied))
        except BaseException:
            self.ids.drop_reference([copied])
            raise
        finally:
            self.ids.drop_reference([block_id])
        return copied

    def commit_prefix(self, tokens: ArrayLike, ids: ArrayLike) -> int:
        """Give the blocks of a prefix their keys, so that :meth:`find_prefix` finds them.

        ``ids``: of the prefix's blocks from the first on, written in full in every layer and held.
        From now on they do not change, and when nobody holds them they are kept until room is
        needed. A key, or a block, that was given already stays as it is. In a persistent store the
        keys are stored by the next :meth:`flush`. Returns how many blocks got a key.

        Raises StaleBlockId, or ArgumentError for a block that is not written in full.
        """
        self._require_open()
        return self._prefixes.commit(tokens, ids, self.dims.block_size)

    def find_prefix(self, tokens: ArrayLike) -> NDArray[np.int64]:
        """Ids of the blocks of the longest known prefix of these tokens, a reference taken on each.

        The caller drops the references. A block found may still turn out to be corrupt when read.
        """
        self._require_open()
        return self._prefixes.find(tokens)

    async def close(self) -> None:
        """Refuse new work, end what is under way, remove everything made. Twice is fine.

        When its loop is closed, another one's task may call it; of a persistent store what
        :meth:`flush` or :meth:`stored` returned for is there then.

        A persistent store stays, with what has been written; the error of that is raised at the
        end.

        What the backend has not been given yet ends with ClosedError, the rest runs to its end;
        every ``on_done`` is called. Goes on to the end when cancelled meanwhile.
        """
        if self._closed is not None and goes_on(self._closed):
            await until_done(self._closed)
            return
        closing = self._closed = asyncio.get_running_loop().create_future()
        if not (is_orphan := self._loop.is_closed()):  # its tasks, and who is to hear, are gone
            self._mover.close()
        try:
            await to_the_end(
                *(() if is_orphan else (self._last_commit,)),
                self._io.close,
                *(() if is_orphan else (self._mover.segments.closed,)),
                lambda: close_directories(self._directories),
                lambda: asyncio.sleep(0),  # reports that are due now come before the end
            )
        finally:
            if is_own(closing, self._closed):
                closing.set_result(None)

    async def _commit(self) -> None:
        self._require_open()
        with self._mover.tickets.flush():
            await self._mover.tickets.until_now()
            if self._journal is not None:
                await self._journal.commit()

    async def _last_commit(self) -> None:
        if self._journal is not None:
            # In a task of its own: cancelled again and again, no half of it may be left out.
            ending = to_the_end(self._journal.commit, self._journal.close)
            await until_done(asyncio.ensure_future(ending))

    def _require_open(self) -> None:
        if self._closed is not None:
            raise ClosedError(f"{self!r}: open a new store")

    def _begin(self, call: Call, unknown: NDArray[np.bool_] | None) -> None:
        """Hand over runs of the known blocks, and report the others; None: all are known."""
        positions = None
        if unknown is not None and np.logical_or.reduce(unknown):
            positions = np.arange(len(call.indices))
            writing = call.operation is Operation.WRITE
            refused = positions[unknown]
            self._mover.refuse(call.layer, call.indices, refused, call.on_done, writing=writing)
            positions = positions[~unknown]
        self._mover.begin(call, positions, self._layout)
