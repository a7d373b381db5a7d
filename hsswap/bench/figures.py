"""What every bench needs: medians with intervals, percentiles, and the machine."""

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

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of at least one value, with the narrowest symmetric order statistics of at least 95 %
        (all, if too few).

        The median lies outside ``[ordered[k], ordered[n - 1 - k]]`` with twice the probability that
        a fair coin falls at most k times of n (D. J. Sheskin, the binomial sign test).
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
        return cls(middle, ordered[low], ordered[count - 1 - low])


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies (nearest rank). 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def machine() -> dict[str, object]:
    """Host, processor, GPU, kernel, Python, date, version and commit: what a figure is worth with.

    ``gpu`` and ``driver``: None without one. ``load``: how many others wanted a core just now (one
    minute), which shows in every figure.
    """
    gpu, driver = _gpu()
    return {
        "host": platform.node(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 2),
        "gpu": gpu,
        "driver": driver,
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


def _gpu() -> tuple[str | None, str | None]:
    line = _output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if not line:
        return None, None
    name, _, driver = line.splitlines()[0].partition(", ")
    return name, driver


def _commit() -> str:
    """The commit of the checkout this runs from, with ``+`` when files differ; "" without one. What
    HSSWAP_COMMIT says, where the history did not travel.
    """
    if given := os.environ.get("HSSWAP_COMMIT"):
        return given[:12]
    commit = _output_of("git", "rev-parse", "--short=12", "HEAD")
    changed = _output_of("git", "status", "--porcelain", "--untracked-files=no")
    return "" if commit is None or changed is None else commit + ("+" if changed else "")


def _output_of(*command: str) -> str | None:
    """What a command prints, asked in this file's folder; None where it fails."""
    here = Path(__file__).resolve().parent
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, check=True, cwd=here
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
