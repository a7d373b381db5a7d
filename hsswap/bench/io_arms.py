"""What ``hsswap bench io`` lets run in turn: stores, the reader in C, fio, kvikio."""

from __future__ import annotations

import asyncio
import json
import mmap
import shutil
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hsswap.bench.lag import LoopLag
from hsswap.config import LayerGroup, ModelDims
from hsswap.errors import HsswapError
from hsswap.io import BlockStore
from hsswap.io.base import BlockChecksums, Operation, Priority

READER_SOURCE = Path(__file__).resolve().parents[2] / "bench" / "reader.c"
BLOCK_TOKENS = 16
FIO_LIMIT_S = 20
DRAWN = 1 << 16
"""Places drawn before they are used."""


class BenchError(HsswapError):
    """Something that the bench needs is not there, or its result was wrong."""


@dataclass
class Slice:
    """What one arm did in one turn."""

    operations: int
    wall_s: float
    processor_s: float


def dims_of(block_bytes: int) -> ModelDims:
    """Dims of one layer whose blocks have that many bytes: K and V in BF16, 16 tokens."""
    for head_dim in (128, 64):
        heads, rest = divmod(block_bytes, BLOCK_TOKENS * head_dim * 2 * 2)
        if heads and not rest:
            return ModelDims((LayerGroup(1, heads, heads, head_dim),), block_size=BLOCK_TOKENS)
    raise BenchError(f"blocks of {block_bytes} bytes cannot be made; use a multiple of 4096")


class Memory:
    """Page-aligned blocks, on huge pages where allowed."""

    checksums: BlockChecksums | None = None

    def __init__(self, count: int, block_bytes: int) -> None:
        # Private: shared memory has no huge pages by default, and then each block is a list of
        # 4 KiB pieces to the drive (seen: 1.2 GB/s in place of 3.0, twice the processor time).
        nbytes = max(2 << 20, count * block_bytes)
        whole = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole.madvise(mmap.MADV_HUGEPAGE)
        self.blocks = np.frombuffer(whole, np.uint8, count * block_bytes).reshape(count, -1)
        self.blocks[:] = 1
        begins = np.arange(count, dtype=np.uint64) * np.uint64(block_bytes)
        self.addresses = np.uint64(self.blocks.ctypes.data) + begins


class FilledStore:
    """An open store full of known bytes, read back and compared once."""

    def __init__(self, name: str, store: BlockStore, indices: NDArray[np.int64]) -> None:
        self.name = name
        self.store = store
        self.indices = indices

    @classmethod
    async def make(cls, name: str, place: Path, block_bytes: int, count: int) -> FilledStore:
        """Write ``count`` blocks and verify every one. Raises BenchError when one is wrong."""
        store = await BlockStore.open(dims_of(block_bytes), place, count, io=name)
        try:
            filled = cls(name, store, store.ids.check(store.ids.allocate(count)))
            at_once = min(count, max(1, (8 << 20) // block_bytes))
            memory = Memory(at_once, block_bytes)
            rng = np.random.default_rng(1)
            content = rng.integers(0, 256, memory.blocks.shape, np.uint8)
            await filled._each(Operation.WRITE, memory, content)
            await filled._each(Operation.READ, memory, content)
        except BaseException:
            await store.close()
            raise
        return filled

    async def _each(self, operation: Operation, memory: Memory, content: NDArray[np.uint8]) -> None:
        """Write all blocks, or read and compare them. Each begins with its number."""
        for begin in range(0, len(self.indices), len(content)):
            indices = self.indices[begin : begin + len(content)]
            count = len(indices)
            content[:count, :8] = np.arange(begin, begin + count)[:, None].view(np.uint8)
            memory.blocks[:count] = content[:count] if operation is Operation.WRITE else 0
            await transfer(self.store, operation, indices, memory)
            if not np.array_equal(memory.blocks[:count], content[:count]):
                raise BenchError(f"{self.name}: blocks came back wrong; report it, with the drive")

    def files(self) -> list[Path]:
        """The segment files."""
        place = self.store.directory
        return sorted(place.glob("segment-*.kv")) if place is not None else []


class Slots(Protocol):
    """Memory for blocks. ``checksums``: the device's, where the processor cannot read it."""

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """``[slots]``."""

    @property
    def checksums(self) -> BlockChecksums | None:
        """For the store's calls."""


async def transfer(
    store: BlockStore, operation: Operation, indices: NDArray[np.int64], memory: Slots
) -> None:
    """Move blocks and wait. Raises the first error."""
    end = asyncio.get_running_loop().create_future()
    left = len(indices)

    def done(positions: NDArray[np.int64], error: HsswapError | None) -> None:
        nonlocal left
        left -= len(positions)
        if error is not None and not end.done():
            end.set_exception(error)
        elif left == 0 and not end.done():
            end.set_result(None)

    call = store.read if operation is Operation.READ else store.write
    addresses, checksums = memory.addresses[: len(indices)], memory.checksums
    call(0, indices, addresses, owner=memory, on_done=done, checksums=checksums)
    await end


class StoreArm:
    """Random blocks through ``BlockStore.read`` or ``write``, always ``asked`` of them asked for.

    As many as came in one turn of the loop are asked for again in one call, as a scheduler does.
    ``depth``: how many of them the drive has at most.
    """

    destination = "host"

    def __init__(
        self,
        filled: FilledStore,
        operation: Operation,
        depth: int,
        memory: Slots | None = None,
        *,
        ahead: bool = False,
        memory_bytes: int = 0,
    ) -> None:
        """``ahead``: ask for twice ``depth``, of which the store gives the drive ``depth`` at most.
        ``memory``: with as many slots as are asked for, and more; by default the arm's own, of
        ``memory_bytes`` if that is more, but with two blocks for each slot.
        """
        self.name = f"{filled.name}-ahead" if ahead else filled.name
        self.path = filled.store.path
        self._filled = filled
        self._asked = 2 * depth if ahead else depth
        self._call = filled.store.read if operation is Operation.READ else filled.store.write
        block_bytes, count = filled.store.block_bytes(0), len(filled.indices)
        slots = max(self._asked, min(memory_bytes // block_bytes, count // 2))
        self._memory = memory or Memory(slots, block_bytes)
        # Of n slots the s-th moves blocks s, s + n ...: none is in flight twice, nor written twice.
        self.slots = len(self._memory.addresses)
        self._free = np.arange(self.slots)  # first the one that is used next
        rows = count // self.slots
        if not rows:
            raise BenchError(f"{self.slots} slots need more blocks of data than {count}")
        # Drawn before, because a reader in C spends nothing on it; taken in turn.
        drawn = np.random.default_rng(2).integers(0, rows, max(DRAWN, self.slots))
        self._drawn = drawn * self.slots
        self._next = 0
        self._operations = self._in_flight = 0
        self._deadline = 0.0
        self._idle: list[NDArray[np.int64]] = []
        self._end: asyncio.Future[None] | None = None

    async def slice(self, seconds: float) -> Slice:
        """Work that long, then let what is in flight end."""
        self._end = asyncio.get_running_loop().create_future()
        self._operations, self._in_flight = 0, self._asked
        wall, processor = time.perf_counter(), time.process_time()
        self._deadline = wall + seconds
        self._ask(self._take(self._asked))
        try:
            await self._end
        finally:  # nothing is asked for behind an error or a cancellation
            self._deadline = 0.0
        wall, processor = time.perf_counter() - wall, time.process_time() - processor
        return Slice(self._operations, wall, processor)

    async def lags(self, seconds: float) -> list[float]:
        """Work that long, watched: seconds that the loop came late, each millisecond. Apart from
        the slices, because watching is work for the loop that no reader in C has.
        """
        with LoopLag() as watch:
            await self.slice(seconds)
        return watch.lags

    def _take(self, count: int) -> NDArray[np.int64]:
        """So many slots, which have been free for the longest time."""
        slots, self._free = self._free[:count], self._free[count:]
        return slots

    def _ask(self, slots: NDArray[np.int64]) -> None:
        if self._next + len(slots) > len(self._drawn):
            self._next = 0
        begins = self._drawn[self._next : self._next + len(slots)]
        self._next += len(slots)
        self._call(
            0,
            self._filled.indices[begins + slots],
            self._memory.addresses[slots],
            priority=Priority.NEEDED,
            owner=self._memory,
            on_done=partial(self._done, slots),
            checksums=self._memory.checksums,
        )

    def _done(
        self, slots: NDArray[np.int64], positions: NDArray[np.int64], error: HsswapError | None
    ) -> None:
        assert self._end is not None
        self._operations += len(positions)
        if error is not None and not self._end.done():
            self._end.set_exception(error)
        if not self._idle:
            asyncio.get_running_loop().call_soon(self._refill)
        self._idle.append(slots[positions])

    def _refill(self) -> None:
        """Ask again for as many blocks as have come."""
        assert self._end is not None
        slots = self._idle[0] if len(self._idle) == 1 else np.concatenate(self._idle)
        self._idle.clear()
        self._free = np.concatenate((self._free, slots))
        if time.perf_counter() < self._deadline:
            self._ask(self._take(len(slots)))
        else:
            self._in_flight -= len(slots)
            if self._in_flight == 0 and not self._end.done():
                self._end.set_result(None)

    async def close(self) -> None:
        """Nothing to give back."""


def compile_reader(folder: Path) -> Path:
    """Compile ``bench/reader.c`` into a folder. Raises BenchError without source or compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise BenchError("no C compiler (cc) is there for bench/reader.c; install gcc")
    if not READER_SOURCE.is_file():
        raise BenchError(f"{READER_SOURCE} is not there; run the bench from a checkout of hsswap")
    program = folder / "reader"
    command = [compiler, "-O3", "-pthread", "-o", str(program), str(READER_SOURCE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise BenchError(f"compiling {READER_SOURCE} failed: {done.stderr.strip()[:500]}")
    return program


class ReaderArm:
    """The reader in C, a process that is told when to run and for how long."""

    path = "O_DIRECT"
    destination = "host"

    def __init__(
        self,
        program: Path,
        engine: str,
        operation: Operation,
        block_bytes: int,
        depth: int,
        blocks: int,
        files: Sequence[Path],
        name: str = "",
    ) -> None:
        """``blocks``: of memory, which come to be used in turn; rounded down to whole ``depth``."""
        self.name = name or f"c-{engine}"
        numbers = block_bytes, depth, blocks - blocks % depth
        self._process = subprocess.Popen(
            [program, engine, operation.value, *map(str, numbers), *files],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    async def slice(self, seconds: float) -> Slice:
        """Let it run. Raises BenchError with what it said when it ended instead."""
        line = await asyncio.get_running_loop().run_in_executor(None, self._run, seconds)
        count, wall, processor = line.split()
        return Slice(int(count), float(wall), float(processor))

    def _run(self, seconds: float) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{max(1, round(1e3 * seconds))}\n")
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(f"{self.name}: {self._process.stderr.read().strip()}")
        return line

    async def close(self) -> None:
        """End the process."""
        await asyncio.get_running_loop().run_in_executor(None, self._process.communicate)


class Fio:
    """How fio's figures are named."""

    name, path, destination = "fio", "O_DIRECT", "host"


def run_fio(
    files: Sequence[Path], operation: Operation, block_bytes: int, depth: int, seconds: int
) -> Slice | None:
    """The same by fio's io_uring engine in one go, or None where fio is not or does not do it."""
    program = shutil.which("fio")
    if program is None:
        return None
    command = [
        program, "--name=hsswap", f"--filename={':'.join(map(str, files))}", "--direct=1",
        "--ioengine=io_uring", f"--rw=rand{operation.value}", f"--bs={block_bytes}",
        f"--iodepth={depth}", f"--runtime={seconds}", "--time_based", "--output-format=json",
        "--norandommap", "--file_service_type=random", "--allow_file_create=0",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FIO_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    try:
        job = json.loads(done.stdout)["jobs"][0]
        found = job[operation.value]
        wall = found["runtime"] / 1e3
        processor = wall * (job["usr_cpu"] + job["sys_cpu"]) / 100
        return Slice(found["total_ios"], wall, processor)
    except (ValueError, KeyError, IndexError):
        return None
