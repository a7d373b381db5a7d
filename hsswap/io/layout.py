"""Where blocks lie on disk, and how a list of them becomes runs. Pure: no file is touched.

Segments of 256 ids, one file each; layer-major inside, so that neighbouring ids of a layer adjoin::

    file of segment s, ids 256 s .. 256 s + 255
    | layer 0: id 0 | id 1 | ... | id 255 | layer 1: id 0 | ... | ... | last layer: ... | id 255 |
    |<------ 256 * block_bytes(0) ------->|<- 256 * block_bytes(1) ...                           |

Layers of different groups may have blocks of different lengths; each is a multiple of 4096.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hsswap.config import DISK_ALIGNMENT, ModelDims

SEGMENT_IDS = 256
"""Ids of a segment: files grow and shrink by this many blocks of every layer."""

MAX_RUN_BYTES = 256 * 1024
"""Longest run, unless one block is longer. Measured (2-core virtual machine, virtio disk, ext4 with
O_DIRECT, 4 threads, 2026-11-30), KiB: us for a needed tile of 32 blocks of 12 KiB behind queued
prefetch, us when alone, MB/s in bulk: 64: 910, 746, 887; 128: 826, 714, 1234; 256: 882, 573, 1482;
512: 1163, 523, 1612; 1024: 1178, 536, 1727. Blocks of 64 KiB show the same knee. Longer runs gain
little, and a needed read finds every thread busy for longer."""

MAX_READ_RUN_BYTES = 512 * 1024
"""The same of reads. Each run is a dozen steps of Python, which decoding waits for where the
processor is slow: of the reads of an H200 host's decode step 0.68 were hidden behind compute with
256 KiB, 0.75 to 0.86 with 512, 0.61 to 0.74 with 1,024 (`hsswap bench overlap --only decode`, in
turns, 2026-12-01)."""

MAX_RUN_SPANS = 1024
"""Blocks of one transfer: the spans one vectored call takes (IOV_MAX)."""


@dataclass(frozen=True)
class SegmentLayout:
    """Offsets inside segment files of one model's dims."""

    dims: ModelDims

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of a block, by layer."""
        dims = self.dims
        sizes = tuple(dims.block_bytes(dims.group(layer)) for layer in range(dims.layers))
        assert all(size > 0 and size % DISK_ALIGNMENT == 0 for size in sizes)
        return sizes

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Where a layer begins in a segment file, by layer, in bytes."""
        return tuple(accumulate((SEGMENT_IDS * size for size in self.block_bytes[:-1]), initial=0))

    @cached_property
    def segment_bytes(self) -> int:
        """Bytes of a segment file."""
        return SEGMENT_IDS * sum(self.block_bytes)

    def offset(self, layer: int, index: int) -> int:
        """Where a block begins in the file of its segment, in bytes."""
        return self.layer_offsets[layer] + index % SEGMENT_IDS * self.block_bytes[layer]

    def offsets(self, layer: int, indices: list[int]) -> list[int]:
        """:meth:`offset` of many blocks of a layer."""
        begin, block_bytes = self.layer_offsets[layer], self.block_bytes[layer]
        return [begin + index % SEGMENT_IDS * block_bytes for index in indices]


def segment_of(index: int) -> int:
    """The segment a block index belongs to."""
    return index // SEGMENT_IDS


def segment_count(capacity: int) -> int:
    """Segments of a store of that many ids."""
    return -(-capacity // SEGMENT_IDS)


class Runs(NamedTuple):
    """A list of blocks cut into runs.

    ``order``: positions in the list given, sorted by block index (equal ones as given). Run r is
    ``order[bounds[r]:bounds[r + 1]]``: consecutive indices of one segment, in order.
    """

    order: NDArray[np.int64]
    bounds: NDArray[np.int64]


_BEGIN = np.zeros(1, np.int64)


def is_stretch(indices: NDArray[np.int64]) -> bool:
    """Whether these block indices, two at least, follow each other."""
    count = len(indices)
    if count < 2 or indices[-1] - indices[0] != count - 1:
        return False
    return bool(np.logical_and.reduce(indices[1:] - indices[:-1] == 1))


def plan_runs(
    indices: NDArray[np.int64],
    block_bytes: int,
    max_run_bytes: int = MAX_RUN_BYTES,
    max_spans: int = MAX_RUN_SPANS,
) -> Runs:
    """Cut a list of block indices, in any order, into runs of neighbours on disk.

    A run has at most ``max_run_bytes`` bytes (but always a block) and ``max_spans`` blocks. Longer
    stretches are cut into pieces of equal length, give or take a block. An index given twice is in
    two runs. Cost does not grow with Python steps per block.
    """
    count = len(indices)
    if count == 0:
        return Runs(np.empty(0, np.int64), np.zeros(1, np.int64))
    if count == 1:
        return Runs(np.zeros(1, np.int64), np.array([0, 1]))
    longest = max(1, min(max_run_bytes // block_bytes, max_spans))
    if longest > 1 and is_stretch(indices) and indices[0] % SEGMENT_IDS + count <= SEGMENT_IDS:
        pieces = -(-count // longest)  # what follows comes to the same, in four times the time
        return Runs(np.arange(count), -(np.arange(0, -pieces - 1, -1) * count // pieces))
    steps = indices[1:] - indices[:-1]  # np.diff costs three times as much for short arrays
    if np.minimum.reduce(steps) > 0:
        order, ordered = np.arange(count), indices
    else:
        order = indices.argsort(kind="stable")
        ordered = indices[order]
        steps = ordered[1:] - ordered[:-1]
    if longest == 1 or np.minimum.reduce(steps) > 1:  # no neighbours: a third of the cost
        return Runs(order, np.arange(count + 1))
    breaks = (steps != 1) | (ordered[1:] % SEGMENT_IDS == 0)
    starts = np.concatenate((_BEGIN, breaks.nonzero()[0] + 1))
    bounds = np.concatenate((starts, np.array([count])))
    lengths = bounds[1:] - starts
    if np.maximum.reduce(lengths) <= longest:
        return Runs(order, bounds)
    pieces = -(-lengths // longest)
    # Piece p of a stretch of n blocks in m pieces begins at its block p * n // m, rounded up.
    stretch = np.repeat(np.arange(len(starts)), pieces)
    piece = np.arange(len(stretch)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins = starts[stretch] + -(-piece * lengths[stretch] // pieces[stretch])
    return Runs(order, np.append(begins, count))
