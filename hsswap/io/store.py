"""BlockStore: blocks on disk, by layer and index, verified when they come back.

Plain functions on the loop's thread that never wait move all the state; the backend's threads move
the bytes and compute checksums. This store is temporary: it never syncs, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import itertools
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from hsswap.checksum import identity_seeds
from hsswap.config import ModelDims
from hsswap.errors import ArgumentError, ClosedError
from hsswap.io.backends import open_backend
from hsswap.io.base import BlockIO, IOFile, Operation, Priority
from hsswap.io.directory import StoreDirectory
from hsswap.io.ids import BlockIds
from hsswap.io.layout import SegmentLayout, plan_runs
from hsswap.io.mover import RunMover
from hsswap.io.runs import BlockRun, OnBlocksDone, compare_checksums, fill_checksums
from hsswap.io.waiting import to_the_end, until_done

_NO_FILE = IOFile(Path(), 0)  # until the segment's file is there


@dataclass(frozen=True)
class StoreStatistics:
    """What a store has done since it was opened."""

    bytes_read: int
    """Bytes of blocks that were read and verified."""
    bytes_written: int
    """Bytes of blocks that were written."""
    blocks_read: int
    """Blocks that were read and verified."""
    blocks_written: int
    """Blocks that were written."""
    read_calls: int
    """Runs handed to the backend for reading, repeated single blocks included."""
    write_calls: int
    """Runs handed to the backend for writing, repeated single blocks included."""
    errors: int
    """Blocks that ended with an error, and segment files that could not be removed."""
    checksum_failures: int
    """Blocks that came back as others than were written; counted in ``errors`` too."""
    in_flight: int
    """Blocks asked for and not done."""
    segment_files: int
    """Segment files that are there."""


class BlockStore:
    """Blocks of a model on disk. Open it with :meth:`open`; leaving ``async with`` closes it.

    ``ids`` gives out block ids, valid in every layer. ``path`` says which way the bytes take.
    ``directory`` is None for a backend that needs none.

    :meth:`read` and :meth:`write` take buffers by address and report by callback. Blocks that
    adjoin on disk are moved together; a run that fails is tried again block by block, so that
    exactly the blocks with a fault have an error. A block being written is not read before that is
    done, and the other way round.
    """

    def __init__(
        self, dims: ModelDims, ids: BlockIds, backend: BlockIO, directory: StoreDirectory | None
    ) -> None:
        """For :meth:`open`, which starts the backend and locks the directory."""
        self.dims = dims
        self.ids = ids
        self._io = backend
        self._directory = directory
        self._loop = asyncio.get_running_loop()
        self._layout = SegmentLayout(dims)
        place = None if directory is None else directory.path
        self._mover = RunMover(backend, self._layout, place, ids)
        ids.on_freed = self._mover.segments.freed
        self._closed: asyncio.Future[None] | None = None  # there once closing began

    @classmethod
    async def open(
        cls,
        dims: ModelDims,
        directory: Path | str | None,
        capacity_blocks: int,
        io: str | BlockIO = "auto",
        io_threads: int = 4,
    ) -> BlockStore:
        """Lock the directory, clean it, start the backend.

        ``directory``: made if missing; None: a new one in the system's temporary folder; not used
        by ``"memory"``. ``io``: a name that :func:`open_backend` knows, or a backend not started
        yet, which the store starts and closes. ``io_threads`` counts for posix alone. Raises
        StoreLocked, ConfigError, OutOfSpace or BlockIOError, leaving nothing behind.
        """
        ids = BlockIds(capacity_blocks)
        backend = open_backend(io, threads=io_threads) if isinstance(io, str) else io
        locked: StoreDirectory | None = None
        loop = asyncio.get_running_loop()
        try:
            if backend.needs_directory:
                opening = loop.run_in_executor(None, StoreDirectory.open, directory)
                try:
                    locked = await until_done(opening)
                except asyncio.CancelledError:
                    locked = None if opening.exception() else opening.result()
                    raise
            await backend.start(None if locked is None else locked.path)
            return cls(dims, ids, backend, locked)
        except BaseException:
            await to_the_end(backend.close, lambda: _close_directory(locked))
            raise

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
    def directory(self) -> Path | None:
        """Where the files are; None for a backend without files."""
        return None if self._directory is None else self._directory.path

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
    ) -> None:
        """Read blocks of a layer into memory. Returns at once; on the loop's thread only.

        ``indices``: int64 ``[n]``, what ``ids.check`` returned, in any order. ``addresses``: uint64
        ``[n]``, aligned to 4096, ``block_bytes(layer)`` bytes each, which belong to the read until
        reported; ``owner`` is kept alive as long. ``deadline``: ``time.monotonic()`` seconds after
        which a read that has not begun fails with ETIMEDOUT.

        ``on_done(positions, error)`` is called on the loop, later, for groups of positions in the
        arrays, every position exactly once: those that succeeded together (None), as many runs as
        ended in one go, each failed one alone. Its error names layer and id: CorruptBlock for bytes
        that differ from those written and for a block that was not written, StaleBlockId for an id
        freed meanwhile, else what the backend reports. What the buffer of a failed block holds is
        unknown.

        Raises ArgumentError or ClosedError, and then does nothing.
        """
        self._check_call(layer, indices, addresses, priority)
        unknown = self._mover.unreadable(layer, indices, self.ids.generations(indices))
        call = _Call(Operation.READ, layer, indices, addresses, priority, owner, on_done, deadline)
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
    ) -> None:
        """Write blocks of a layer from memory. Returns at once; on the loop's thread only.

        Arguments and reports as in :meth:`read`; the memory must not change until reported. A
        block whose write failed has no content until it is written again. Segment files are made
        on demand; OutOfSpace is the error of exactly the blocks that found no room.
        """
        self._check_call(layer, indices, addresses, priority)
        unknown = ~self.ids.used(indices)
        call = _Call(Operation.WRITE, layer, indices, addresses, priority, owner, on_done, None)
        self._begin(call, unknown)

    async def close(self) -> None:
        """Refuse new work, end what is under way, remove everything made. Twice is fine.

        What the backend has not been given yet ends with ClosedError, the rest runs to its end;
        every ``on_done`` is called. Goes on to the end when cancelled meanwhile.
        """
        if self._closed is not None:
            await until_done(self._closed)
            return
        self._closed = self._loop.create_future()
        self._mover.close()
        try:
            await to_the_end(
                self._io.close,
                lambda: _close_directory(self._directory),
                lambda: asyncio.sleep(0),  # reports that are due now come before the end
            )
        finally:
            self._closed.set_result(None)

    def _check_call(
        self,
        layer: int,
        indices: NDArray[np.int64],
        addresses: NDArray[np.uint64],
        priority: Priority,
    ) -> None:
        if self._closed is not None:
            raise ClosedError(f"{self!r}: open a new store")
        if not 0 <= layer < self.dims.layers:
            raise ArgumentError(f"layer {layer} is out of range; there are {self.dims.layers}")
        if not isinstance(priority, Priority):
            raise ArgumentError(
                f"priority {priority!r} is unknown; known: {', '.join(Priority.__members__)}"
            )
        for array, name, dtype in (
            (indices, "indices", np.dtype(np.int64)),
            (addresses, "addresses", np.dtype(np.uint64)),
        ):
            if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
                raise ArgumentError(f"{name} must be a one-dimensional {dtype} array")
        if len(indices) != len(addresses):
            raise ArgumentError(
                f"{len(indices)} indices were given with {len(addresses)} addresses"
            )
        if len(indices) == 0:
            return
        if indices.min() < 0 or indices.max() >= self.ids.capacity:
            raise ArgumentError(f"a block index is outside 0 to {self.ids.capacity - 1}")
        bits = int(np.bitwise_or.reduce(addresses))
        if bits & (self._io.alignment - 1) or not addresses.all():
            raise ArgumentError(f"addresses must be multiples of {self._io.alignment}, not null")

    def _begin(self, call: _Call, unknown: NDArray[np.bool_]) -> None:
        """Hand over runs of the known blocks, and report the others."""
        positions = np.arange(len(call.indices))
        if unknown.any():
            refused = positions[unknown]
            self._mover.refuse(call.layer, call.indices, refused, call.on_done)
            positions = positions[~unknown]
        self._mover.begin(*self._cut(call, positions))

    def _cut(
        self, call: _Call, positions: NDArray[np.int64]
    ) -> tuple[list[BlockRun], NDArray[np.int64]]:
        """Runs over these positions of the call's arrays, and the indices in their order."""
        block_bytes = self._layout.block_bytes[call.layer]
        order, bounds = plan_runs(call.indices[positions], block_bytes)
        positions = positions[order]
        indices, addresses = call.indices[positions], call.addresses[positions]
        generations = self.ids.generations(indices)
        seeds = identity_seeds(call.layer, indices, generations)
        writing = call.operation is Operation.WRITE
        runs = []
        for begin, end in itertools.pairwise(bounds.tolist()):
            first = int(indices[begin])
            run = BlockRun(
                call.operation,
                _NO_FILE,
                self._layout.offset(call.layer, first),
                addresses[begin:end],
                block_bytes,
                call.priority,
                self._mover.run_done,
                fill_checksums if writing else None,
                None if writing else compare_checksums,
                call.deadline,
                call.owner,
                True,
                layer=call.layer,
                first=first,
                positions=positions[begin:end],
                generations=generations[begin:end],
                seeds=seeds[begin:end],
                notify=call.on_done,
            )
            runs.append(run)
        return runs, indices


class _Call(NamedTuple):
    """The arguments of a read or write."""

    operation: Operation
    layer: int
    indices: NDArray[np.int64]
    addresses: NDArray[np.uint64]
    priority: Priority
    owner: object
    on_done: OnBlocksDone
    deadline: float | None


async def _close_directory(directory: StoreDirectory | None) -> None:
    """Off the loop, and to the end."""
    if directory is not None:
        loop = asyncio.get_running_loop()
        await until_done(loop.run_in_executor(None, directory.close))
