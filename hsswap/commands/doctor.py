"""``hsswap doctor``: what this machine can do, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from hsswap.commands import doctor_probes
from hsswap.commands.doctor_probes import DEGRADED, MISSING, OK, Check, Probe
from hsswap.commands.interrupts import Interrupts
from hsswap.errors import ArgumentError

PROBE_LIMIT_S = 30.0
"""A probe that takes longer is given up: a driver or a network file system hangs."""


def main(parsed: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the command: 0, or 1 if something is broken without which nothing works."""
    path: Path | None = parsed.directory
    if path is not None and not path.is_dir():
        raise ArgumentError(f"--dir {path} is no directory; make it, or name another")
    to = sys.stderr if parsed.json else sys.stdout
    checks = []
    for check in examine(path):
        checks.append(check)
        if not parsed.json:
            print(line_of(check), file=to, flush=True)
        interrupts.check()
    broken = [check.name for check in checks if check.required and check.state != OK]
    if parsed.json:
        listed = [
            {
                "name": c.name,
                "state": c.state,
                "meaning": c.meaning,
                "fix": c.fix,
                "required": c.required,
            }
            for c in checks
        ]
        print(json.dumps({"ok": not broken, "checks": listed}), flush=True)
    elif broken:
        print(f"broken: {', '.join(broken)}", file=to, flush=True)
    return 1 if broken else 0


def examine(directory: Path | None, limit_s: float = PROBE_LIMIT_S) -> Iterator[Check]:
    """Every check in order; ``directory`` None: the system's temporary folder. Never raises."""

    def attention() -> Iterator[Check]:
        from hsswap.commands.doctor_selftest import attention as probe

        return probe()

    def store() -> Iterator[Check]:
        from hsswap.commands.doctor_selftest import store as probe

        return probe(directory)

    place = directory or Path(tempfile.gettempdir())
    probes: list[tuple[str, Probe]] = [
        ("python", doctor_probes.python),
        ("cuda driver", doctor_probes.cuda),
        ("gds", doctor_probes.gds),
        ("io_uring", doctor_probes.io_uring),
        ("direct I/O", lambda: doctor_probes.directory(place)),
        ("memory", doctor_probes.memory),
        ("attention", attention),
        ("store", store),
    ]
    for name, probe in probes:
        yield from run_probe(name, probe, limit_s)


def run_probe(name: str, probe: Probe, limit_s: float) -> list[Check]:
    """A probe's checks, or one that says why there are none: it failed, or took too long.

    It runs on a thread that does not keep the process alive, because nothing else can leave a
    driver that hangs.
    """
    required = name in ("python", "attention", "store")
    answer: queue.SimpleQueue[list[Check]] = queue.SimpleQueue()

    def run() -> None:
        checks: list[Check] = []
        try:
            checks.extend(probe())
        except Exception as error:  # whatever a probe meets is an answer, too
            text = f"the probe failed: {type(error).__name__}: {error}"
            checks.append(Check(name, DEGRADED, text, "report it with this output", required))
        answer.put(checks)

    threading.Thread(target=run, name=f"doctor-{name}", daemon=True).start()
    try:
        return answer.get(timeout=limit_s)
    except queue.Empty:
        text = f"no answer within {limit_s:g} s"
        return [Check(name, MISSING, text, "see what hangs: py-spy dump, dmesg", required)]


def line_of(check: Check) -> str:
    """One line for people."""
    text = " ".join(check.meaning.split())
    fix = f"  -> {check.fix}" if check.fix else ""
    return f"{check.name:<14}{check.state:<10}{text}{fix}"
