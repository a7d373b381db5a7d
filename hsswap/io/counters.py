"""What a store counts while it runs."""

from __future__ import annotations

from hsswap.io.base import Operation


class Counters:
    """What a mover counted, by direction."""

    def __init__(self) -> None:
        self.calls = {Operation.READ: 0, Operation.WRITE: 0}
        self.blocks = {Operation.READ: 0, Operation.WRITE: 0}
        self.nbytes = {Operation.READ: 0, Operation.WRITE: 0}
        self.errors = 0
        self.checksum_failures = 0
        self.in_flight = 0
