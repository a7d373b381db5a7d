"""What the benches on a GPU share: names in an option, intervals with names, the machine."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from hsswap.bench.figures import interval_of_median
from hsswap.errors import ArgumentError


def names_of(text: str | None, known: Sequence[str], option: str) -> list[str]:
    """The names in an option's list with commas, or all of them without one, in the order of
    ``known``. Raises ArgumentError for others.
    """
    if text is None:
        return list(known)
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ArgumentError(f"{option} has {', '.join(unknown) or text}; known: {', '.join(known)}")
    return [name for name in known if name in names]


@dataclass(frozen=True, slots=True)
class Interval:
    """:func:`interval_of_median` as result files have it, with names."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Of at least one value."""
        return cls(*interval_of_median(values))


@dataclass(frozen=True, slots=True)
class Machine:
    """Where and when a figure was measured."""

    host: str
    cpu_count: int
    gpu: str | None
    driver: str | None
    date: str
    commit: str | None

    @classmethod
    def here(cls) -> Machine:
        """This machine, now."""
        gpu, driver = _gpu()
        today = datetime.datetime.now(datetime.UTC).date().isoformat()
        cpus = len(os.sched_getaffinity(0))
        return cls(platform.node(), cpus, gpu, driver, today, _commit())

    def as_dict(self) -> dict[str, object]:
        """For a result file."""
        return asdict(self)

    def line(self) -> str:
        """For people."""
        return f"{self.gpu or 'no GPU'}, driver {self.driver}, {self.host}, {self.date}"


def _output_of(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
            cwd=Path(__file__).parent,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _gpu() -> tuple[str | None, str | None]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    line = _output_of(query)
    if line is None:
        return None, None
    name, _, driver = line.splitlines()[0].partition(", ")
    return name, driver


def _commit() -> str | None:
    """What HSSWAP_COMMIT says, where the history did not travel; else the checkout's commit."""
    return os.environ.get("HSSWAP_COMMIT") or _output_of(["git", "rev-parse", "HEAD"])
