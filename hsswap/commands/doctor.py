"""``hsswap doctor``: what this machine can do, what is missing, and what to do about it."""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

from hsswap.commands import doctor_probes
from hsswap.commands.doctor_probes import DEGRADED, MISSING, OK, Check, Probe
from hsswap.commands.interrupts import Interrupts
from hsswap.commands.output import say
from hsswap.commands.places import nearest_folder

PROBE_LIMIT_S = 30.0
"""A probe that takes longer is given up: a driver or a network file system hangs."""

COLUMNS = 100
NAME_COLUMNS = 14
TEXT_COLUMN = 24


def main(parsed: argparse.Namespace, interrupts: Interrupts) -> int:
    """Run the command: 0, or 1 if something is broken without which nothing works."""
    # A folder that is not there yet would be made in the nearest one above it.
    path = nearest_folder(parsed.directory or temporary_folder())
    checks = []
    for check in examine(path):
        checks.append(check)
        if not parsed.json:
            say(lines_of(check), sys.stdout)
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
        say(json.dumps({"ok": not broken, "checks": listed}), sys.stdout)
    elif broken:
        say(f"broken: {', '.join(broken)}", sys.stdout)
    return 1 if broken else 0


def temporary_folder() -> Path:
    """The system's temporary folder; where none can be written to, the name it should have."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:
        return Path("/tmp")


def examine(directory: Path) -> Iterator[Check]:
    """Every check in order, with a store in ``directory``. Never raises."""

    def attention() -> Iterator[Check]:
        from hsswap.commands.doctor_selftest import attention as probe

        return probe()

    def store() -> Iterator[Check]:
        from hsswap.commands.doctor_selftest import store as probe

        return probe(directory)

    probes: list[tuple[str, Probe]] = [
        ("python", doctor_probes.python),
        ("cuda driver", doctor_probes.cuda),
        ("gds", lambda: doctor_probes.gds(directory)),
        ("io_uring", doctor_probes.io_uring),
        ("direct I/O", lambda: doctor_probes.directory(directory)),
        ("memory", doctor_probes.memory),
        ("attention", attention),
        ("store", store),
    ]
    for name, probe in probes:
        yield from run_probe(name, probe, PROBE_LIMIT_S)


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


def lines_of(check: Check) -> str:
    """For people: name, state and meaning, wrapped, and the fix on a line of its own."""
    head = f"{check.name:<{NAME_COLUMNS}}{check.state:<{TEXT_COLUMN - NAME_COLUMNS}}"
    indent = " " * TEXT_COLUMN
    lines = _wrapped(check.meaning, head, indent)
    if check.fix:
        lines += _wrapped(check.fix, f"{indent}-> ", f"{indent}   ")
    return "\n".join(lines)


def _wrapped(text: str, first: str, following: str) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()),
        COLUMNS,
        initial_indent=first,
        subsequent_indent=following,
        break_long_words=False,
        break_on_hyphens=False,
    )
