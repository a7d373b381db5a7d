"""The gds backend on a GPU host: right bytes first, then its speed beside kvikio called directly.

Scattered blocks of one file go to scattered places of one device allocation: through GdsIO, as
single spans; through GdsIO, runs of 8 blocks a transfer; and by ``kvikio.CuFile.pread``, all
futures first, then all results, with the same settings of kvikio. In turn, a slice each, so that
whatever else the machine does meets all alike; a ratio is taken within one turn, and of all turns
the median counts, with the interval that holds it with 95 % (order statistics). The table says
which path the bytes took; it is forced to be the compatibility path unless --gpudirect is given.

Device memory comes from cuda.bindings, as a caller's would: plain, and from a stream's pool, which
belongs to no context.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsswap.bench.figures import interval_of_median
from hsswap.driver.cuda_errors import load_driver
from hsswap.errors import HsswapError
from hsswap.io.base import IOFile, Operation, Priority, SpanReads, Transfer
from hsswap.io.gds import Compatibility, GdsIO

KIB = 1024
BLOCK_BYTES = (64 * KIB, 256 * KIB, 1024 * KIB)
RUN_BLOCKS = 8
FILE_BYTES = 512 << 20
SLICE_BYTES = 64 << 20


class Device:
    """Device memory from cuda.bindings, in the primary context of device 0."""

    def __init__(self) -> None:
        self._driver = load_driver("cuda:0")
        context = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", 0))
        self._call("cuCtxSetCurrent", context)

    def _call(self, name: str, *arguments: Any) -> Any:
        code, *result = getattr(self._driver, name)(*arguments)
        if code != self._driver.CUresult.CUDA_SUCCESS:
            raise SystemExit(f"{name}: {code}")
        return result[0] if result else None

    def plain(self, nbytes: int) -> int:
        """cuMemAlloc."""
        return int(self._call("cuMemAlloc", nbytes))

    def pooled(self, nbytes: int) -> int:
        """cuMemAllocAsync."""
        address = int(self._call("cuMemAllocAsync", nbytes, 0))
        self._call("cuStreamSynchronize", 0)
        return address

    def content(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """A copy of device memory."""
        found = np.empty(nbytes, np.uint8)
        self._call("cuMemcpyDtoH", found.ctypes.data, address, nbytes)
        return found

    def fill(self, address: int, content: NDArray[np.uint8]) -> None:
        """Overwrite device memory."""
        self._call("cuMemcpyHtoD", address, content.ctypes.data, content.nbytes)


class Blocks:
    """Which blocks of the file a slice reads, and where to: both scattered, one order a seed."""

    def __init__(self, block_bytes: int, seed: int, arena: int) -> None:
        generator = np.random.default_rng(seed)
        count = SLICE_BYTES // block_bytes
        groups = generator.permutation(FILE_BYTES // block_bytes // RUN_BLOCKS)
        starts = groups[: count // RUN_BLOCKS] * RUN_BLOCKS
        self.block_bytes = block_bytes
        self.offsets = (starts[:, None] + np.arange(RUN_BLOCKS)).reshape(-1) * block_bytes
        self.slots = generator.permutation(count)
        self.addresses = self.slots.astype(np.uint64) * np.uint64(block_bytes) + np.uint64(arena)

    def check(self, device: Device, arena: int, content: NDArray[np.uint8]) -> None:
        """Compare what arrived with the file's bytes; clear it for the next."""
        found = device.content(arena, SLICE_BYTES).reshape(-1, self.block_bytes)
        expected = content.reshape(-1, self.block_bytes)[self.offsets // self.block_bytes]
        if not np.array_equal(found[self.slots], expected):
            raise SystemExit(f"WRONG BYTES at {self.block_bytes} bytes a block")
        device.fill(arena, np.zeros(SLICE_BYTES, np.uint8))


async def read_spans(io: GdsIO, file: IOFile, blocks: Blocks) -> None:
    """One slice through the backend, block by block."""
    done = asyncio.get_running_loop().create_future()
    left = len(blocks.offsets)

    def on_done(reads: SpanReads, numbers: list[int], error: HsswapError | None) -> None:
        nonlocal left
        left -= len(numbers)
        if error is not None and not done.done():
            done.set_exception(error)
        elif left == 0 and not done.done():
            done.set_result(None)

    io.submit_spans(
        SpanReads(
            [file] * left,
            blocks.offsets.tolist(),
            blocks.addresses.tolist(),
            blocks.block_bytes,
            Priority.NEEDED,
            on_done,
            lambda reads, numbers: None,
        )
    )
    await done


async def read_runs(io: GdsIO, file: IOFile, blocks: Blocks) -> None:
    """One slice through the backend, in runs."""
    run_blocks = RUN_BLOCKS
    done = asyncio.get_running_loop().create_future()
    left = len(blocks.offsets) // run_blocks

    def on_done(transfer: Transfer, error: HsswapError | None) -> None:
        nonlocal left
        left -= 1
        if error is not None and not done.done():
            done.set_exception(error)
        elif left == 0 and not done.done():
            done.set_result(None)

    batch = [
        Transfer(
            Operation.READ,
            file,
            int(blocks.offsets[at]),
            blocks.addresses[at : at + run_blocks],
            blocks.block_bytes,
            Priority.NEEDED,
            on_done,
        )
        for at in range(0, len(blocks.offsets), run_blocks)
    ]
    io.submit(batch)
    await done


class KvikioDirect:
    """The same file and memory, by kvikio's own calls."""

    class Buffer:
        """Device memory by address."""

        def __init__(self, address: int, nbytes: int) -> None:
            self.__cuda_array_interface__ = {
                "shape": (nbytes,),
                "typestr": "|u1",
                "data": (address, False),
                "version": 3,
            }

    def __init__(self, path: Path, gpudirect: bool) -> None:
        import kvikio
        import kvikio.defaults

        mode = kvikio.CompatMode.OFF if gpudirect else kvikio.CompatMode.ON
        with kvikio.defaults.set("compat_mode", mode):
            self._file = kvikio.CuFile(path, "r")

    async def read(self, blocks: Blocks) -> None:
        """One slice. It blocks the loop, which has nothing else to do."""
        pairs = zip(blocks.addresses.tolist(), blocks.offsets.tolist(), strict=True)
        buffers = [(self.Buffer(address, blocks.block_bytes), offset) for address, offset in pairs]
        futures = [
            self._file.pread(buffer, blocks.block_bytes, offset) for buffer, offset in buffers
        ]
        for future in futures:
            future.get()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


async def seconds(call: Callable[[], Awaitable[None]]) -> float:
    """How long a slice takes."""
    begin = time.perf_counter()
    await call()
    return time.perf_counter() - begin


async def measure(
    device: Device, place: Path, gpudirect: bool, threads: int, slices: int
) -> dict[str, Any]:
    """All sizes in one directory."""
    compatibility = Compatibility.REFUSED if gpudirect else Compatibility.FORCED
    io = GdsIO(threads, compatibility=compatibility, limit=4096)
    await io.start(place)
    file = await io.create_file(place / "gds_check.bin", FILE_BYTES)
    content = np.random.default_rng(1).integers(0, 256, FILE_BYTES, np.uint8)
    with file.path.open("r+b") as stream:
        stream.write(content)  # type: ignore[arg-type]  # the stubs do not know arrays as buffers
        stream.flush()
        os.fsync(stream.fileno())
    direct = KvikioDirect(file.path, gpudirect)
    arenas = {"plain": device.plain(SLICE_BYTES), "pool": device.pooled(SLICE_BYTES)}
    await io.register_memory(arenas["plain"])
    rows = []
    for block_bytes in BLOCK_BYTES:
        for kind, arena in arenas.items():
            blocks = Blocks(block_bytes, 7, arena)
            for read in (read_spans, read_runs):
                await read(io, file, blocks)
                blocks.check(device, arena, content)
            if kind == "plain":
                await direct.read(blocks)
                blocks.check(device, arena, content)
        rows.append(await compare(io, file, direct, block_bytes, arenas["plain"], slices))
    path = io.path
    direct.close()
    await io.remove_file(file)
    await io.close()
    return {"directory": str(place), "path": path, "threads": threads, "rows": rows}


async def compare(
    io: GdsIO, file: IOFile, direct: KvikioDirect, block_bytes: int, arena: int, slices: int
) -> dict[str, Any]:
    """Alternating slices of one block size."""
    taken: dict[str, list[float]] = {"single": [], "runs": [], "kvikio": []}
    for number in range(slices):
        blocks = Blocks(block_bytes, 100 + number, arena)
        ways: list[tuple[str, Callable[[], Awaitable[None]]]] = [
            ("single", lambda b=blocks: read_spans(io, file, b)),  # type: ignore[misc]
            ("runs", lambda b=blocks: read_runs(io, file, b)),  # type: ignore[misc]
            ("kvikio", lambda b=blocks: direct.read(b)),  # type: ignore[misc]
        ]
        for name, call in ways[number % 3 :] + ways[: number % 3]:
            taken[name].append(await seconds(call))
    row: dict[str, Any] = {"block_bytes": block_bytes}
    for name, values in taken.items():
        row[f"{name}_mb_s"] = SLICE_BYTES / 1e6 / statistics.median(values)
    for name in ("single", "runs"):
        ratios = [k / h for k, h in zip(taken["kvikio"], taken[name], strict=True)]
        row[f"{name}_over_kvikio"] = interval_of_median(ratios)
    return row


def show(result: dict[str, Any]) -> None:
    """The table, for people."""
    print(f"{result['directory']}: {result['path']}, {result['threads']} threads")
    print("    block MB/s: hsswap  runs of 8  kvikio    hsswap / kvikio    runs / kvikio")
    for row in result["rows"]:
        speeds = "".join(f"{row[f'{way}_mb_s']:>11.0f}" for way in ("single", "runs", "kvikio"))
        ratios = "".join(
            "{:>7.2f} ({:.2f}-{:.2f})".format(*row[f"{way}_over_kvikio"])
            for way in ("single", "runs")
        )
        print(f"{row['block_bytes'] // KIB:>5} KiB{speeds}  {ratios}")


def main() -> None:
    """Check, measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", type=Path, action="append", help="where files are (.); repeatable")
    parser.add_argument("--threads", type=int, action="append", help="its threads (8); repeatable")
    parser.add_argument("--slices", type=int, default=24, help="turns, 20 or more (24)")
    parser.add_argument("--gpudirect", action="store_true", help="refuse the compatibility path")
    parser.add_argument("--out", type=Path, help="also write the figures to a JSON file")
    arguments = parser.parse_args()
    device = Device()
    results = []
    for directory in arguments.dir or [Path()]:
        for threads in arguments.threads or [8]:
            with tempfile.TemporaryDirectory(dir=directory, prefix="gds-check-") as scratch:
                result = asyncio.run(
                    measure(device, Path(scratch), arguments.gpudirect, threads, arguments.slices)
                )
            result["directory"] = str(directory)
            show(result)
            results.append(result)
    report = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": platform.platform(),
        "python": sys.version.split()[0],
        "slice_bytes": SLICE_BYTES,
        "slices": arguments.slices,
        "results": results,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    try:
        main()
    except HsswapError as error:
        sys.exit(f"gds_check: {error}")
