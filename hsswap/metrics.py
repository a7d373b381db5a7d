"""Counters of a swap and the frozen record that callers get."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What the swap counts while it runs; guarded by the swap's lock.

    Blocks are counted once for each attend that uses them. ``device_hits``: found in device slots
    (the block being filled included); ``host_hits``: in the host tier before they were needed;
    ``misses``: had to be waited for from disk. ``left_out_mass``: what ``top_k_attends`` left out,
    their sum, each the mean of its KV heads.
    """

    device_hits: int = 0
    host_hits: int = 0
    misses: int = 0
    attends: int = 0
    top_k_attends: int = 0
    left_out_mass: float = 0.0
    appended_tokens: int = 0
    read_wait_s: float = 0.0
    read_busy_s: float = 0.0
    write_errors: int = 0


@dataclass(frozen=True, slots=True)
class SwapStatistics:
    """A snapshot of one swap since it was opened.

    ``device_hits``, ``host_hits``, ``misses`` count blocks an attend used: from device slots, from
    the host tier, and waited for from disk. ``blocks_read`` and ``bytes_read`` are what came from
    disk, ahead of need or not; ``bytes_written`` what went there. ``read_wait_s``: seconds attends
    waited for reads. ``read_busy_s``: seconds with at least one read in flight. ``read_overlap``:
    the share of those seconds that nothing waited. ``host_evictions``: blocks pushed out of host
    slots before or after use to make room. ``write_errors``: blocks that could not be written and
    stay dirty in memory. ``*_slots_used`` and ``free_blocks`` are current. ``path``: the way bytes
    take to disk, in words.
    """

    device_hits: int
    host_hits: int
    misses: int
    attends: int
    appended_tokens: int
    blocks_read: int
    blocks_written: int
    bytes_read: int
    bytes_written: int
    read_wait_s: float
    read_busy_s: float
    host_evictions: int
    write_errors: int
    device_slots_used: int
    host_slots_used: int
    free_blocks: int
    path: str

    @property
    def read_overlap(self) -> float:
        """1 when no attend ever waited for a read, 0 when one waited all the time (or none ran)."""
        if self.read_busy_s <= 0.0:
            return 0.0
        return max(0.0, 1.0 - self.read_wait_s / self.read_busy_s)
