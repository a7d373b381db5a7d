"""What a store counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StoreStatistics:
    """What a store has done since it was opened."""

    bytes_read: int
    """Bytes of blocks that were read and verified."""
    bytes_written: int
    """Bytes of blocks that were written."""
    blocks_read: int
    """Blocks that were read and verified."""
    blocks_written: int
    """Blocks that were written."""
    read_calls: int
    """Runs handed to the backend for reading, repeated single blocks included."""
    write_calls: int
    """Runs handed to the backend for writing, repeated single blocks included."""
    errors: int
    """Blocks that ended with an error, and segment files that could not be removed."""
    checksum_failures: int
    """Blocks that came back as others than were written; counted in ``errors`` too."""
    in_flight: int
    """Blocks asked for and not done."""
    segment_files: int
    """Segment files that are there."""
    disk_bytes: int = 0
    """Bytes that the store's files take."""
    record_bytes_written: int = 0
    """Bytes of records, and of stored blocks set aside while they are replaced (persistent stores).
    """
    commits: int = 0
    """Group commits that reached the disk."""
    kept_blocks: int = 0
    """Block ids that nobody holds and whose content is kept until room is needed."""
    prefix_blocks: int = 0
    """Block ids that have a prefix key."""

    @property
    def bytes_written_per_byte_read(self) -> float:
        """All bytes written, records included, over the useful bytes read; inf before any was."""
        written = self.bytes_written + self.record_bytes_written
        if self.bytes_read == 0:
            return float("inf") if written else 0.0
        return written / self.bytes_read
