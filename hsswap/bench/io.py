"""``hsswap bench io``: how fast blocks come from a drive, beside plain readers on the same files.

Every backend reads (and overwrites) random blocks of a store through the public call, checksums
included, in turn with a reader in C on the same files, one short slice each, so that whatever else
happens on the machine meets all alike. ``--device`` adds reads that end in the memory of a device,
and kvikio's where it is installed. A ratio is taken within one turn; of all turns the median
counts, with the interval that holds it with 95 %. Before that every block is written, read back and
compared once. The page cache has no part where ``path`` says O_DIRECT.

An arm asks for as many blocks as a plain reader has in flight: while their bytes are checked, and
told of, the drive has fewer. ``-ahead`` asks for twice as many, as sequences do that read tiles;
the drive has no more of them than of a plain reader's (64), and its next ones while others are
checked.

A drive that is another program's copy (a virtual machine's) copies into memory that its cache holds
quicker than into other: a reader in C with no more than the 64 blocks of 64 KiB that it has in
flight came to 2,082 MB/s, with 256 in turn to 1,784, and one that sums what it read to 1,333 and
1,734 (2 cores, 2026-12-01). Host tiers are larger than caches: the readers have as many blocks of
memory as ours have, and ``c-uring-few`` shows one with few. ``--memory-mib`` says how much that is.

What matters most comes first, and nothing is begun after ``--limit`` seconds: a slow drive costs
rows, which are named, and not hours. ``--out`` is a whole report after every row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from typing import Any, Protocol

from hsswap.bench.figures import SLICES_MIN, Interval, machine
from hsswap.bench.io_arms import (
    FilledStore,
    Fio,
    ReaderArm,
    Slice,
    StoreArm,
    compile_reader,
    run_fio,
)
from hsswap.bench.io_device import DeviceArm
from hsswap.bench.io_kvikio import KvikioArm
from hsswap.bench.io_rows import FEW, KIB, SUMMING, Row, lag_of, print_rows, rates, ratio, row_of
from hsswap.bench.io_turns import compare_turns
from hsswap.commands.interrupts import Interrupts
from hsswap.commands.option_types import count, count_or_zero, counts, device_name, named
from hsswap.commands.output import say
from hsswap.commands.places import file_to_write
from hsswap.driver import open_device
from hsswap.driver.base import Device
from hsswap.errors import ArgumentError
from hsswap.io import BACKENDS
from hsswap.io.base import Operation
from hsswap.io.layout import SEGMENT_IDS
from hsswap.io.uring_limits import DEPTH

BLOCKS_KIB, DEPTHS = (64, 256, 1024, 12), (64, 8, 1)
QUICK_KIB, QUICK_DEPTHS = (64,), (64,)
ENGINES = ("threads", "uring")
SLICE_S, QUICK_SLICE_S = 0.1, 0.02
"""A slice ends when the last block in flight has come: 64 of 1 MiB take a drive of 3 GB/s 22 ms, of
which a checksum behind the last is a larger part the shorter the slice."""
FIO_S = 1
LIMIT_S = 300


class Arm(Protocol):
    """Something that takes turns."""

    name: str
    path: str
    destination: str

    async def slice(self, seconds: float) -> Slice:
        """Work that long."""

    async def close(self) -> None:
        """Give back what it holds."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add = parser.add_argument
    add("--dir", type=named, metavar="D", help="where the stores are made (the temporary folder)")
    add("--json", action="store_true", help="one object on stdout and nothing else")
    add("--quick", action="store_true", help="64 KiB at depth 64 alone, short slices")
    add("--plot", type=named, metavar="F", help="a picture of MB/s and processor time")
    add(
        "--out",
        type=file_to_write,
        metavar="F",
        help="the object of --json in a file, after every row",
    )
    add(
        "--limit",
        type=count_or_zero,
        default=LIMIT_S,
        metavar="S",
        help="begin nothing after S seconds",
    )
    add(
        "--device",
        type=device_name,
        metavar="D",
        help="reads to this device as well: host or cuda:N",
    )
    add("--backends", default="posix,uring", metavar="A,B", help="default: posix,uring")
    add("--blocks", type=counts, metavar="K,K", help="block sizes in KiB (64,256,1024,12)")
    add("--depths", type=counts, metavar="N,N", help="blocks in flight (64,8,1)")
    add("--slices", type=count, default=SLICES_MIN, metavar="N", help="turns of each (20)")
    add("--data-mib", type=count, default=256, metavar="N", help="in each store at least (256)")
    add(
        "--memory-mib",
        type=count_or_zero,
        default=0,
        metavar="N",
        help="read into so much, in turn (0)",
    )
    add("--operations", default="read,write", metavar="A,B", help="default: read,write")


def main(args: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the command: 0. Raises HsswapError when it cannot be run or bytes came back wrong."""
    plan = _Plan(args)
    if args.plot is not None:
        from hsswap.commands.plot import check_plot

        check_plot(args.plot)
    report = interrupts.run(_measure(plan))
    if args.json:
        say(json.dumps(report, indent=1), sys.stdout)
    if args.plot is not None:
        from hsswap.bench.io_plot import draw

        draw(args.plot, report)
    return 0


class _Plan:
    """The arguments, checked."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.backends = args.backends.split(",")
        if unknown := [name for name in self.backends if name not in BACKENDS]:
            raise ArgumentError(f"--backends {unknown[0]} is unknown; known: {', '.join(BACKENDS)}")
        if set(self.backends) == {"memory"}:
            raise ArgumentError("--backends memory: the plain readers need one with files, too")
        self.blocks_kib = args.blocks or (QUICK_KIB if args.quick else BLOCKS_KIB)
        self.depths = args.depths or (QUICK_DEPTHS if args.quick else DEPTHS)
        names = [operation.value for operation in Operation]
        wanted = args.operations.split(",")
        if unknown := [name for name in wanted if name not in names]:
            raise ArgumentError(f"--operations {unknown[0]} is unknown; known: {', '.join(names)}")
        self.operations = [Operation(name) for name in wanted]
        if args.slices < SLICES_MIN:
            raise ArgumentError(f"--slices {args.slices}: a ratio needs {SLICES_MIN} and more")
        if args.dir is not None and not os.path.isdir(args.dir):
            raise ArgumentError(f"--dir {args.dir} is no directory; make it, or name another")
        self.slices: int = args.slices
        self.slice_s = QUICK_SLICE_S if args.quick else SLICE_S
        self.data_bytes = args.data_mib << 20
        self.memory_bytes = args.memory_mib << 20
        self.directory: Path | None = args.dir
        self.out: Path | None = args.out
        self.end = time.monotonic() + args.limit
        self.device_name: str | None = args.device
        self.people = sys.stderr if args.json else sys.stdout


class _Report:
    """What was found so far. ``content`` is the object of ``--json``."""

    def __init__(self, plan: _Plan) -> None:
        self._plan = plan
        self.content: dict[str, Any] = {
            "bench": "io",
            "machine": machine(),  # the load is that of others, as it was before
            "directory": str(plan.directory or Path(tempfile.gettempdir())),
            "slices": plan.slices,
            "slice_s": plan.slice_s,
            "memory_mib": plan.memory_bytes >> 20,
            "verified": True,
            "complete": False,
            "left_out": [],
            "results": [],
            "appended_in_turns": [],
        }

    def add(self, part: str, rows: Sequence[Row]) -> None:
        """Add rows, and store what there is."""
        self.content[part].extend(rows)
        self.store()

    def may_begin(self, what: str) -> bool:
        """Whether there is time; what there is none for is said."""
        if time.monotonic() < self._plan.end:
            return True
        self.content["left_out"].append(what)
        say(f"{what}: left out, the time of --limit is over", self._plan.people)
        return False

    def store(self) -> None:
        """Replace the file of ``--out`` as a whole."""
        out = self._plan.out
        if out is not None:
            part = out.with_name(out.name + ".part")
            part.write_text(json.dumps(self.content, indent=1) + "\n")
            os.replace(part, out)


async def _measure(plan: _Plan) -> dict[str, Any]:
    """All sizes, one after the other, each with stores of its own."""
    report = _Report(plan)
    with (
        tempfile.TemporaryDirectory(prefix="hsswap-bench-", dir=plan.directory) as folder,
        open_device(plan.device_name) if plan.device_name else nullcontext() as device,
    ):
        place = Path(folder)
        program = compile_reader(place)
        for kib in plan.blocks_kib:
            if report.may_begin(f"blocks of {kib} KiB"):
                await _measure_size(plan, report, place, kib, program, device)
        for kib in plan.blocks_kib:
            for name in plan.backends:
                if report.may_begin(f"{name}, {kib} KiB, appended in turns"):
                    row = await _turns(plan, name, place / f"turns-{name}-{kib}", kib * KIB)
                    report.add("appended_in_turns", [row])
    report.content["complete"] = not report.content["left_out"]
    report.store()
    return report.content


async def _measure_size(
    plan: _Plan, report: _Report, place: Path, kib: int, program: Path, device: Device | None
) -> None:
    """Every operation and depth with blocks of one size."""
    block_bytes = kib * KIB
    count = whole_segments(max(plan.data_bytes // block_bytes, 2 * max(plan.depths)))
    async with AsyncExitStack() as stack:
        stores = []
        for name in plan.backends:
            made = await FilledStore.make(name, place / f"{name}-{kib}", block_bytes, count)
            stack.push_async_callback(made.store.close)
            stores.append(made)
        # The reader in C writes what it likes over the stores: reads come first, whoever asked how.
        for operation in sorted(plan.operations, key=list(Operation).index):
            for depth in plan.depths:
                if report.may_begin(f"{operation.value} of {kib} KiB, {depth} in flight"):
                    found = await _compare(plan, stores, program, operation, depth, device)
                    report.add("results", found)
                    print_rows(found, plan.people)


def whole_segments(blocks: int) -> int:
    """At least so many, and no file in part: of a hole readers get zeros without the drive."""
    return -(-blocks // SEGMENT_IDS) * SEGMENT_IDS


async def _turns(plan: _Plan, name: str, place: Path, block_bytes: int) -> Row:
    row = await compare_turns(name, place, block_bytes, plan.data_bytes, plan.slices, plan.slice_s)
    median, low, high = row["of_one_alone"]
    say(
        f"{name}: {row['sequences']} sequences appended in turns, {row['block_kib']} KiB: "
        f"{row['mb_per_s']:.0f} MB/s, {median:.2f} [{low:.2f}, {high:.2f}] of one alone",
        plan.people,
    )
    return row


async def _compare(
    plan: _Plan,
    stores: list[FilledStore],
    program: Path,
    operation: Operation,
    depth: int,
    device: Device | None,
) -> list[Row]:
    """One size, operation and depth: everybody in turn. The readers use the files of the last store
    that has some.
    """
    block_bytes = stores[0].store.block_bytes(0)
    files = [made.files() for made in stores if made.files()][-1]
    arms: list[Arm] = []
    found: dict[tuple[str, str], list[Slice]] = {}
    try:
        ours = await _add_ours(arms, stores, operation, depth, device, plan.memory_bytes)
        blocks, reading = max(arm.slots for arm in ours), operation is Operation.READ
        arms += _readers(program, operation, block_bytes, depth, blocks, files)
        kvikio = KvikioArm.make(files, block_bytes, depth, device) if reading else None
        if kvikio is not None:
            arms.append(kvikio)
        for arm in arms:  # once for nothing: first uses, and the drive wakes up
            await arm.slice(plan.slice_s)
        for turn in range(plan.slices):
            for arm in arms if turn % 2 else arms[::-1]:
                found.setdefault(_key(arm), []).append(await arm.slice(plan.slice_s))
        lags = [await arm.lags(plan.slice_s * plan.slices / 4) for arm in ours]
    finally:
        for arm in arms:
            await arm.close()
    rows = [row_of(arm, found[_key(arm)], operation, block_bytes, depth) for arm in arms]
    readers = {f"c-{engine}": found[f"c-{engine}", "host"] for engine in ENGINES}
    best = max(readers, key=lambda name: Interval.of(rates(readers[name])).median)
    for row, arm, its_lags in zip(rows, ours, lags, strict=False):
        mine = found[_key(arm)]
        row["loop_lag_ms"] = lag_of(its_lags)
        row["of_reader"] = ratio(mine, readers[best])
        row["reader"] = best
        row |= {f"of_{name}": ratio(mine, theirs) for name, theirs in readers.items()}
        for other in (f"c-{SUMMING}", FEW):
            if (other, "host") in found:
                row[f"of_{other}"] = ratio(mine, found[other, "host"])
        if ("kvikio", arm.destination) in found:
            row["of_kvikio"] = ratio(mine, found["kvikio", arm.destination])
    loop = asyncio.get_running_loop()
    fio = await loop.run_in_executor(None, run_fio, files, operation, block_bytes, depth, FIO_S)
    if fio is not None:
        rows.append(row_of(Fio(), [fio], operation, block_bytes, depth))
    return rows


def _readers(
    program: Path,
    operation: Operation,
    block_bytes: int,
    depth: int,
    blocks: int,
    files: list[Path],
) -> list[ReaderArm]:
    """The readers in C, with so many blocks of memory; one with no more than it has in flight."""
    engines = (*ENGINES, SUMMING) if operation is Operation.READ else ENGINES
    arms = [
        ReaderArm(program, engine, operation, block_bytes, depth, blocks, files)
        for engine in engines
    ]
    if blocks >= 2 * depth:
        few = ReaderArm(program, "uring", operation, block_bytes, depth, depth, files, name=FEW)
        arms.append(few)
    return arms


async def _add_ours(
    arms: list[Arm],
    stores: list[FilledStore],
    operation: Operation,
    depth: int,
    device: Device | None,
    memory_bytes: int,
) -> list[StoreArm]:
    """Through the stores, into host memory and, if there is one, a device's."""
    reads = operation is Operation.READ
    ours = [StoreArm(filled, operation, depth, memory_bytes=memory_bytes) for filled in stores]
    # Twice as many asked for: the store gives the drive as many as a plain reader does, still.
    ahead = {filled: reads and depth == DEPTH and not _is_direct(filled) for filled in stores}
    ours += [
        StoreArm(filled, operation, depth, ahead=True, memory_bytes=memory_bytes)
        for filled in stores
        if ahead[filled]
    ]
    arms.extend(ours)
    if device is not None and reads:
        for filled in stores:
            direct = _is_direct(filled)
            arm = DeviceArm(filled, depth, device, direct=direct, ahead=ahead[filled])
            arms.append(arm)
            ours.append(arm)
            await arm.verify()
    return ours


def _is_direct(filled: FilledStore) -> bool:
    """Whether the store moves bytes to a device by itself."""
    return filled.name.startswith("gds")


def _key(arm: Arm) -> tuple[str, str]:
    return arm.name, arm.destination
