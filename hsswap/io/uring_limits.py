"""How much the uring backend has under way, and does in one turn of the loop."""

from __future__ import annotations

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


INLINE_BYTES = 1 << 20
HOOK_THREADS = 2
"""Hooks run in place, on the loop's thread, if they are quick and spans have ``INLINE_BYTES`` at
most, else on threads: one gets the GIL back for its next span only when the loop's thread lets go
of it. With threads for all above 128 KiB, 16 processors and a drive of 3 GB/s, blocks of 256 KiB
came at 0.72 of a plain reader's speed and took 75 us of processor, in place at 0.87 and 41; of
1 MiB no faster, with half the loop's thread's time but more in all, and writes slower by an eighth.
Of 64 KiB they took 52 us for 22 (an H200 host, 2026-11-30).
"""
