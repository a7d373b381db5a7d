"""Arguments of ``hsswap doctor``."""

from __future__ import annotations

import argparse

from hsswap.commands.option_types import named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything ``hsswap doctor`` takes."""
    add = parser.add_argument
    add("--dir", dest="directory", type=named, metavar="D", help="the folder to test for a store, "
        "which need not exist yet (the system's temporary folder)")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object on stdout and nothing else")
