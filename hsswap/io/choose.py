"""``auto``: measures which backend suits a directory and this host, and says what and why."""

from __future__ import annotations

import asyncio
import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from hsswap.errors import ArgumentError, ClosedError, ConfigError, HsswapError
from hsswap.io.base import (
    BlockIO,
    IOFile,
    IOStatistics,
    Operation,
    Priority,
    SpanReads,
    Transfer,
)
from hsswap.io.posix import PosixIO
from hsswap.io.uring import UringIO
from hsswap.io.waiting import to_the_end

PROBE_NAME = "hsswap.choose"
MEASURE_S = 0.25
"""All measuring, at most; with setting up and clearing away under half a second."""
ROUNDS = 24
RUN_SPANS, SPAN_BYTES, RUNS = 20, 12 * 1024, 4
"""One round reads so many runs together: the tile of a small model, about 1 MiB."""
SLOWER_LIMIT = 1.25
"""uring is taken up to this share of posix's time, because it takes a processor from nobody."""


class AutoIO(BlockIO):
    """posix or uring, whichever :meth:`start` finds better here; ``name`` and ``why`` tell.

    On hosts of few cores a decode loop loses more to woken threads than to the drive, so uring is
    preferred unless it reads clearly slower.
    """

    name = "auto"  # until started, then that of the backend chosen
    needs_directory = True

    def __init__(self, threads: int = 4) -> None:
        self._posix = PosixIO(threads)
        self._chosen: BlockIO | None = None
        self._closed = False
        self._started = False
        self.limit = self._posix.limit

    def __repr__(self) -> str:
        return f"<AutoIO {self._chosen!r}>" if self._chosen else "<AutoIO new>"

    @property
    def after_deliveries(self) -> Callable[[], None] | None:
        """As in BlockIO."""
        return None if self._chosen is None else self._chosen.after_deliveries

    @after_deliveries.setter
    def after_deliveries(self, call: Callable[[], None] | None) -> None:
        self._backend().after_deliveries = call

    @property
    def path(self) -> str:
        return "not started" if self._chosen is None else self._chosen.path

    @property
    def room(self) -> int:
        return self.limit if self._chosen is None else self._chosen.room

    async def start(self, directory: Path | None) -> None:
        if self._closed:
            raise ClosedError(f"{self!r} takes no more work; open a new one")
        if self._started:
            raise ArgumentError(f"{self!r} was started before; make a new one")
        if directory is None:
            raise ConfigError("a backend that keeps files needs a directory")
        self._started = True
        await self._posix.start(directory)
        uring = UringIO()
        chosen: BlockIO = self._posix
        try:
            try:
                await uring.start(directory)
            except HsswapError as error:
                self.why = f"posix: {error}"
            else:
                chosen, self.why = await _better(uring, self._posix, directory)
        except BaseException:
            await to_the_end(uring.close, self._posix.close)
            raise
        self._chosen, self.name, self.limit = chosen, chosen.name, chosen.limit
        self.spans_on_threads = chosen.spans_on_threads
        loser: BlockIO = uring if chosen is self._posix else self._posix
        await loser.close()

    def create_file(self, path: Path, nbytes: int) -> asyncio.Future[IOFile]:
        return self._backend().create_file(path, nbytes)

    def open_file(self, path: Path, nbytes: int) -> asyncio.Future[IOFile]:
        return self._backend().open_file(path, nbytes)

    def file_sizes(self, directory: Path) -> asyncio.Future[dict[str, int]]:
        return self._backend().file_sizes(directory)

    def remove_file(self, file: IOFile) -> asyncio.Future[None]:
        return self._backend().remove_file(file)

    def sync(self, file: IOFile) -> asyncio.Future[None]:
        return self._backend().sync(file)

    def submit(self, batch: Sequence[Transfer]) -> None:
        self._backend().submit(batch)

    @property
    def span_limit(self) -> int:
        return 0 if self._chosen is None else self._chosen.span_limit

    def submit_spans(self, reads: SpanReads) -> None:
        self._backend().submit_spans(reads)

    def statistics(self) -> IOStatistics:
        return self._backend().statistics() if self._chosen else self._posix.statistics()

    async def close(self) -> None:
        self._closed = True
        await (self._chosen or self._posix).close()

    def _backend(self) -> BlockIO:
        if self._chosen is None:
            raise ClosedError(f"{self!r} was not started; await start() first")
        return self._chosen


class _Memory:
    """What is read into, as spans."""

    def __init__(self, nbytes: int) -> None:
        # As the host tier has it: private, on a huge page where allowed.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, max(nbytes, 2 << 20), flags=flags)
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes = np.frombuffer(memory, np.uint8)
        self._bytes[:] = 0
        begins = np.arange(0, nbytes, SPAN_BYTES, dtype=np.uint64)
        self.addresses = np.uint64(self._bytes.ctypes.data) + begins


@dataclass
class _Arm:
    """A backend under measurement: seconds of each round, on the clock and of the processor."""

    io: BlockIO
    file: IOFile
    wall: list[float] = field(default_factory=list)
    processor: list[float] = field(default_factory=list)

    async def round(self, memory: _Memory) -> None:
        """Read all runs of the file together, as somebody who waits for them."""
        wall, processor = time.perf_counter(), time.process_time()
        await _move(self.io, self.file, Operation.READ, memory)
        self.wall.append(time.perf_counter() - wall)
        self.processor.append(time.process_time() - processor)

    def __str__(self) -> str:
        wall, processor = statistics.median(self.wall), statistics.median(self.processor)
        return f"{self.io.name} {1e3 * wall:.2f} ms and {1e3 * processor:.2f} ms of processor"


async def _better(uring: UringIO, posix: PosixIO, directory: Path) -> tuple[BlockIO, str]:
    """The backend to take, and why."""
    try:
        arms = await _measure([uring, posix], directory)
    except HsswapError as error:
        return posix, f"posix: nothing could be measured ({error})"
    found = [statistics.median(arm.wall) for arm in arms]
    mebibytes = RUNS * RUN_SPANS * SPAN_BYTES / (1 << 20)
    measured = f"{mebibytes:.1f} MiB in {RUNS} runs took " + ", ".join(map(str, arms))
    if found[0] <= SLOWER_LIMIT * found[1]:
        return uring, f"uring: {measured}; no thread of Python is woken"
    return posix, f"posix: {measured}"


async def _measure(backends: list[BlockIO], directory: Path) -> list[_Arm]:
    """Read a small file by each in turn, so that what else happens meets all alike."""
    loop = asyncio.get_running_loop()
    nbytes = RUNS * RUN_SPANS * SPAN_BYTES
    memory = _Memory(nbytes)
    arms: list[_Arm] = []
    try:
        for io in backends:
            path = directory / f"{PROBE_NAME}-{io.name}"
            await loop.run_in_executor(None, partial(path.unlink, missing_ok=True))
            file = await io.create_file(path, nbytes)
            arms.append(_Arm(io, file))
            # Without a name it goes by itself, whatever happens from here on.
            await loop.run_in_executor(None, path.unlink)
            # Space never written is not read from the drive.
            await _move(io, file, Operation.WRITE, memory)
        end = time.monotonic() + MEASURE_S
        for number in range(ROUNDS):
            for arm in arms if number % 2 else arms[::-1]:
                await arm.round(memory)
            if time.monotonic() > end:
                break
    finally:
        for arm in arms:
            with suppress(HsswapError):
                await arm.io.remove_file(arm.file)
    return arms


async def _move(
    io: BlockIO,
    file: IOFile,
    operation: Operation,
    memory: _Memory,
) -> None:
    """Move all runs together and wait. Raises the first error."""
    end = asyncio.get_running_loop().create_future()
    errors: list[HsswapError | None] = []

    def done(transfer: Transfer, error: HsswapError | None) -> None:
        errors.append(error)
        if len(errors) == RUNS and not end.done():
            end.set_result(None)

    run_bytes = RUN_SPANS * SPAN_BYTES
    io.submit(
        [
            Transfer(
                operation,
                file,
                number * run_bytes,
                memory.addresses[number * RUN_SPANS : (number + 1) * RUN_SPANS],
                SPAN_BYTES,
                Priority.NEEDED,
                done,
                owner=memory,
            )
            for number in range(RUNS)
        ]
    )
    await asyncio.shield(end)
    for error in errors:
        if error is not None:
            raise error
