"""The rows of ``hsswap bench overlap``: what its figures say of O1, O2 and L1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hsswap.bench.io_rows import lag_of
from hsswap.bench.lab import Turns, tell

Row = dict[str, Any]
LAG_FLOOR_MS = 2.0
"""L1, the 99th percentile."""


def lag_row(name: str, lags: Mapping[str, Sequence[float]]) -> Row:
    """L1: how late the loop came to a timer of each millisecond, in seconds, an entry an arm."""
    found = {arm: lag_of(of_arm) for arm, of_arm in lags.items()}
    worst = max(lag["p99"] for lag in found.values())
    tell(
        f"{name}: loop lag p50 / p99 "
        + ", ".join(f"{arm} {lag['p50']:.2f} / {lag['p99']:.2f} ms" for arm, lag in found.items())
    )
    return {
        "id": "L1",
        "name": name,
        "loop_lag_ms": found,
        "floor": LAG_FLOOR_MS,
        "passed": worst <= LAG_FLOOR_MS,
    }


def call_row(name: str, turns: Turns, floor: float) -> Row:
    """O2 of one way to call."""
    ratio = turns.of_turns(lambda bare, public: public / bare)
    public, bare = turns.median_us("public"), turns.median_us("bare")
    tell(
        f"{name}: {public.median:.1f} us, kernels {bare.median:.1f}: {ratio.median:.2f} "
        f"[{ratio.low:.2f}, {ratio.high:.2f}]"
    )
    return {
        "id": "O2",
        "name": name,
        "public_us": public._asdict(),
        "bare_us": bare._asdict(),
        "ratio": ratio._asdict(),
        "floor": floor,
        "passed": ratio.high <= floor,
    }


def overlap_row(name: str, turns: Turns, nbytes: int) -> Row:
    """O1 of one measure; a ratio counts where the two halves are within 2x of each other."""

    def share(wall: float, read: float, compute: float, calls: float) -> float:
        return (read + compute - calls - wall) / (min(read, compute) - calls)

    overlap = turns.of_turns(share)
    medians = {arm: turns.median_us(arm) for arm in turns.seconds}
    read, compute, calls = (medians[arm].median for arm in ("read", "compute", "calls"))
    comparable = max(read, compute) - calls <= 2 * (min(read, compute) - calls)
    tell(
        f"{name}: read {read:.0f} us ({nbytes / read / 1e3:.1f} GB/s), compute {compute:.0f}, both "
        f"{medians['wall'].median:.0f}, calls {calls:.0f}: overlap {overlap.median:.2f} "
        f"[{overlap.low:.2f}, {overlap.high:.2f}]"
        + ("" if comparable else "; not within 2x of each other: does not count")
    )
    return {
        "id": "O1",
        "name": name,
        **{f"{arm}_us": medians[arm]._asdict() for arm in medians},
        "read_bytes": nbytes,
        "overlap": overlap._asdict(),
        "within_2x": comparable,
        "floor": 0.7,
        "passed": comparable and overlap.low >= 0.7,
    }
