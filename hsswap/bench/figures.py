"""What every bench needs: medians with intervals, percentiles, and the machine in words."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from hsswap import __version__

CONFIDENCE = 0.95
SLICES_MIN = 20
"""Alternating slices that a ratio needs."""


class Interval(NamedTuple):
    """A median, and the order statistics that hold it with 95 %."""

    median: float
    low: float
    high: float


def interval_of_median(values: Sequence[float]) -> Interval:
    """Median with the narrowest symmetric order statistics of at least 95 % (all, if too few).

    The median lies outside ``[ordered[k], ordered[n - 1 - k]]`` with twice the probability that a
    fair coin falls at most k times of n (D. J. Sheskin, the binomial sign test).
    """
    ordered = sorted(values)
    count = len(ordered)
    tail, skip = 0.0, 0
    for outside in range(count // 2):
        tail += math.comb(count, outside) / 2**count
        if 2 * tail > 1 - CONFIDENCE:
            break
        skip = outside + 1
    low = max(0, skip - 1)
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    return Interval(middle, ordered[low], ordered[count - 1 - low])


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies (nearest rank). 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def machine() -> dict[str, object]:
    """Host, processor, kernel, Python, date, version and commit: what a figure is worth with.

    ``load``: how many others wanted a core just now (one minute), which shows in every figure.
    """
    return {
        "host": platform.node(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hsswap": __version__,
        "commit": _commit(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """The commit of the checkout this runs from, with ``+`` when files differ; "" without one. What
    HSSWAP_COMMIT says, where the history did not travel.
    """
    if given := os.environ.get("HSSWAP_COMMIT"):
        return given[:12]
    here = Path(__file__).resolve().parent
    found = []
    for command in ("rev-parse --short=12 HEAD", "status --porcelain --untracked-files=no"):
        try:
            done = subprocess.run(
                ["git", "-C", str(here), *command.split()],
                capture_output=True,
                text=True,
                timeout=10,
                check=True,
            )
        except (OSError, subprocess.SubprocessError):
            return ""
        found.append(done.stdout.strip())
    return found[0] + ("+" if found[1] else "")
