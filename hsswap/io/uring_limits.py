"""How much the uring backend has under way, and does in one turn of the loop."""

from __future__ import annotations

from typing import NamedTuple

DEPTH = 64
"""Transfers in the drive's queue at most."""
MAX_DEPTH = 1024
BYTES_IN_FLIGHT = (32 << 20, 2 << 20, 1 << 20)
"""In the drive's queue at most, by priority; a transfer longer than that goes alone. A needed read
waits for what the drive was given before it, so that of the others is kept to what a fast drive
needs (7 GB/s at 100 us: 0.7 MB)."""

TURN_TRANSFERS = 16
TURN_BYTES = 2 << 20
"""Started, and ended, in one turn at most: the rest waits for the next, behind whatever else the
loop has to do. A transfer costs 5 to 15 us with what its caller does, 2 MiB of checksums 0.2 ms
(from memory; a sixth of that from the cache). Turns of 8 halve the lag of the loop and cost a
third more processor time a block, 32 save 8 % (64 KiB, 64 in flight).

Bytes without a hook in place count a quarter: they are handed to the kernel, which takes 5 us for
256 KiB of small pages."""

RETRY_S = 0.001
"""Until entries that the kernel did not take are offered again, when nothing else is under way."""
RETRIES = 1000
"""How often that is done before the transfers fail."""


class Checking(NamedTuple):
    """Where hooks run: in place, on the loop's thread, if they are quick and spans have
    ``inline_bytes`` at most, else on one of ``threads``.

    A thread gets the GIL back for its next span only when the loop's thread lets go of it, so short
    ones cost more than they take away (seen: 44 us a block of 64 KiB for 18). Long ones are checked
    while the loop's thread goes on, if there are processors for both.
    """

    inline_bytes: int
    threads: int


FEW_PROCESSORS = Checking(1 << 20, 2)
MANY_PROCESSORS = Checking(1 << 17, 8)
MANY = 8


def where_to_check(processors: int) -> Checking:
    """For a process that may use so many processors."""
    return MANY_PROCESSORS if processors >= MANY else FEW_PROCESSORS
