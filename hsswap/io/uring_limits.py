"""How much the uring backend has under way, and does in one turn of the loop."""

from __future__ import annotations

from hsswap.io.base import Transfer

DEPTH = 64
"""Transfers in the drive's queue at most."""
MAX_DEPTH = 1024
BYTES_IN_FLIGHT = (64 << 20, 8 << 20, 1 << 20)
"""In the drive's queue at most, by priority; a transfer longer than that goes alone. A needed read
waits for what the drive was given before it, so that reads ahead are kept to what a drive needs:
7 GB/s at 100 us take 0.7 MB, but a virtual machine's drive that gave 3 GB/s for 16 MiB in its queue
gave 1.2 for 2 MiB (1.7 ms a read; an H200 host, 2026-11-30). Of needed blocks of 1 MiB it has 64,
as a plain reader's: 0.93 (0.91-0.94) of its speed, with 32 0.91 (0.86-0.96) in turn with it."""

TURN_TRANSFERS = 16
TURN_STARTS = 32
TURN_BYTES = 2 << 20
"""Ended, and started, in one turn at most: the rest waits for the next, behind whatever else the
loop has to do. A transfer costs 5 to 15 us with what its caller does, 2 MiB of checksums 0.2 ms
(from memory; a sixth of that from the cache). Turns of 8 halve the lag of the loop and cost a
third more processor time a block, 32 save 8 % (64 KiB, 64 in flight).

Bytes without a hook in place count half: they are handed to the kernel, which takes 5 us for
256 KiB of huge pages and 12 of small ones. When they counted a quarter, reads of 256 KiB were as
quick and the loop was late by 1.1 ms where it is now by 0.6 (p99, 2 cores, 2026-12-01)."""

FIRST_TRANSFERS = 4
MORE_TRANSFERS = 4
"""Ended in the first turn that finds the drive with nothing to do, for it waits for whoever asks
again; and by how many more in each turn behind that. A drive that is another program's copy (a
virtual machine's) tells of nothing before all is done: then that is every time. For such a drive,
27 us a block of 64 KiB, 64 in flight, the loop's processor time leaves 0.84 of its speed with 16 in
every turn, 0.88 with 4, 8, 12 and 16, 0.87 with 8 and 16 or with 4, 6, 8 ...; of 105 us and 256 KiB
0.95, 0.97, 0.96 and 0.97.

Where others wait already, they are started before bytes are looked at, so many first, and such a
drive has all its 64 blocks again in 0.35 ms (in 2.4 before)."""


class TurnEnds:
    """What one turn may end: ``transfers``, of ``nbytes`` bytes that are looked at. Pure state."""

    def __init__(self) -> None:
        self._most = 0
        self.transfers = self.nbytes = 0

    def begin(self, in_drive: int | None) -> None:
        """A turn begins, and the drive has so many to do meanwhile; None: of what ended before an
        earlier turn some is left.
        """
        more = self._most + MORE_TRANSFERS if in_drive is None else 2 * in_drive
        self._most = min(max(more, FIRST_TRANSFERS), TURN_TRANSFERS)
        self.transfers, self.nbytes = self._most, TURN_BYTES * self._most // TURN_TRANSFERS

    def take(self, count: int, nbytes: int) -> int:
        """Take as many as may be, of ``count`` with ``nbytes`` bytes each; one in a turn always."""
        taken = min(count, self.transfers, self.nbytes // nbytes)
        if taken <= 0 and self.transfers == self._most:
            taken = 1
        taken = max(taken, 0)
        self.transfers -= taken
        self.nbytes -= taken * nbytes
        return taken


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


def is_long(transfer: Transfer, nbytes: int) -> bool:
    """Whether the hook of a transfer of so many bytes runs on a thread."""
    short = nbytes <= TURN_BYTES and transfer.span_bytes <= INLINE_BYTES
    return not (short and transfer.quick)
