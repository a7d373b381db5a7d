"""``hsswap fsck``: check every block of a persistent store."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from hsswap.commands.interrupts import Interrupts
from hsswap.commands.option_types import named
from hsswap.commands.output import say
from hsswap.io.checking import Report, check_store

BAD_SHOWN = 100
"""Bad blocks that are listed for people; ``--json`` lists them all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything ``hsswap fsck`` takes."""
    parser.add_argument(
        "directory", type=named, metavar="D", help="the directory of the store, or its first one"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout and nothing else"
    )


def main(args: argparse.Namespace, _: Interrupts) -> int:
    """Run the command: 0, or 1 when something that was stored cannot be had any more.

    Raises ConfigError when there is no store, StoreLocked while somebody has it open.
    """
    report = check_store(args.directory)
    if args.json:
        say(json.dumps({"ok": report.ok, **asdict(report)}), sys.stdout)
    for line in () if args.json else lines_of(report):
        say(line, sys.stdout)
    return 0 if report.ok else 1


def lines_of(report: Report) -> list[str]:
    """The report for people."""
    lines = [
        f"bad   layer {bad.layer}, block id {bad.block_id}: {bad.problem}"
        for bad in report.bad[:BAD_SHOWN]
    ]
    if len(report.bad) > BAD_SHOWN:
        lines.append(f"... and {len(report.bad) - BAD_SHOWN} more; --json lists them all")
    if report.damaged_records:
        lines.append(f"bad   {report.damaged_records} damaged records; what they said is lost")
    lines.extend(f"note  {name}: nothing in it is known; the next open removes it"
                 for name in report.stray_files)  # fmt: skip
    word = "ok  " if report.ok else "bad "
    lines.append(
        f"{word}  {report.directory}: {report.blocks} blocks, {len(report.bad)} bad; "
        f"{report.bytes_checked} bytes read, {report.prefixes} blocks with a prefix key"
    )
    return lines
