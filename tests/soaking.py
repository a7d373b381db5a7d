"""What tests under ``make soak`` did, in a file that is committed."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from hsswap.bench.figures import machine


def loop_name() -> str:
    """asyncio or uvloop, whichever runs."""
    return type(asyncio.get_running_loop()).__module__.partition(".")[0]


def note(of: str, **results: Any) -> None:
    """Add to ``soak-OF.json`` in the folder of HSSWAP_SOAK_RESULTS; does nothing where that is not
    set. Tests of several processes may do so at a time.
    """
    if not (folder := os.environ.get("HSSWAP_SOAK_RESULTS")):
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    with (Path(folder) / f"soak-{of}.json").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        known = json.loads(file.read() or "{}")
        known.update(results)
        known["machine"] = machine()
        file.truncate(0)
        file.write(json.dumps(known, indent=1, sort_keys=True) + "\n")
