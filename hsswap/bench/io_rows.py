"""Rows of ``hsswap bench io``: what an arm did, as figures and as a line of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from hsswap.bench.figures import Interval, percentile
from hsswap.bench.io_arms import Slice
from hsswap.commands.output import say
from hsswap.io.base import Operation

KIB = 1024
SUMMING = "threads-sum"
"""A reader that looks at its bytes, as checksums must."""
FEW = "c-uring-few"
"""One with no more memory than it has in flight, which a cache may hold."""
Row = dict[str, Any]


class Named(Protocol):
    """An arm, as far as a row shows it."""

    name: str
    path: str
    destination: str


def rates(slices: list[Slice]) -> list[float]:
    """Operations a second of each slice."""
    return [one.operations / one.wall_s for one in slices]


def ratio(ours: list[Slice], theirs: list[Slice]) -> list[float]:
    """Median, low and high end of the ratios of the turns."""
    pairs = zip(rates(ours), rates(theirs), strict=True)
    return [round(value, 3) for value in Interval.of([a / b for a, b in pairs])]


def row_of(
    arm: Named, slices: list[Slice], operation: Operation, block_bytes: int, depth: int
) -> Row:
    """What is reported of one arm."""
    rate = Interval.of([block_bytes * rate / 1e6 for rate in rates(slices)])
    processor = Interval.of([1e6 * one.processor_s / one.operations for one in slices])
    return {
        "arm": arm.name,
        "path": arm.path,
        "memory": arm.destination,
        "operation": operation.value,
        "block_kib": block_bytes // KIB,
        "depth": depth,
        "mb_per_s": round(rate.median, 1),
        "mb_per_s_95": [round(rate.low, 1), round(rate.high, 1)],
        "processor_us_per_block": round(processor.median, 2),
        "processor_us_per_block_95": [round(processor.low, 2), round(processor.high, 2)],
    }


def lag_of(lags: Sequence[float]) -> Row:
    """How late the loop was, of seconds for each millisecond."""
    return {
        "p50": round(1e3 * percentile(lags, 0.5), 3),
        "p99": round(1e3 * percentile(lags, 0.99), 3),
        "timers": len(lags),
    }


def print_rows(rows: list[Row], people: TextIO) -> None:
    """The table for people, one part of it."""
    first = rows[0]
    title = f"{first['operation']} {first['block_kib']} KiB, {first['depth']} in flight"
    say(
        f"{title:34}    MB/s  us/block  lag p50/p99 ms  of the reader in C  of one that sums",
        people,
    )
    for row in rows:
        lag = row.get("loop_lag_ms")
        lags = f"{lag['p50']:6.2f} {lag['p99']:7.2f}" if lag else ""
        ratio = row.get("of_reader")
        of_reader = f"{ratio[0]:.2f} [{ratio[1]:.2f}, {ratio[2]:.2f}]" if ratio else ""
        if summing := row.get(f"of_c-{SUMMING}"):
            of_reader += f"  {summing[0]:.2f} [{summing[1]:.2f}, {summing[2]:.2f}]"
        where = "" if row["memory"] == "host" else f"to {row['memory']}, "
        name = f"  {row['arm']} ({where}{row['path']})"
        say(
            f"{name:34}{row['mb_per_s']:8.0f}{row['processor_us_per_block']:10.1f}"
            f"  {lags:14}  {of_reader}",
            people,
        )
