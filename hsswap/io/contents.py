"""What a store knows of the blocks written to it: arrays by layer and index. Pure state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hsswap.io.runs import BlockRun, indices_of
from hsswap.io.tables import sparse_zeros


class StoredBlocks(NamedTuple):
    """What is known of some blocks, an entry each.

    ``written``: it has content of its id's generation. ``durable``: which survives a loss of power
    as far as the store knows. ``lengths``: valid tokens. ``codes_versions``: of the predictor's
    codes in it, 0 without any.
    """

    written: NDArray[np.bool_]
    durable: NDArray[np.bool_]
    lengths: NDArray[np.uint16]
    codes_versions: NDArray[np.uint32]


class Contents:
    """``[layers, capacity]`` each: checksum, what that started from, valid tokens and codes version
    of the last write, and its generation, which is 0 when there was none or it failed; and whether
    it came back as something else.
    """

    def __init__(self, layers: int, capacity: int) -> None:
        shape = layers, capacity
        self.checksums = sparse_zeros(shape, np.uint32)
        # Kept, because working them out again takes reads of few blocks ten times as long.
        self.seeds = sparse_zeros(shape, np.uint32)
        self.written = sparse_zeros(shape, np.int64)
        self.lengths = sparse_zeros(shape, np.uint16)
        self.codes_versions = sparse_zeros(shape, np.uint32)
        self.corrupt = sparse_zeros(shape, np.bool_)

    def has_any(self, run: BlockRun) -> bool:
        """Whether any of a run's blocks has content."""
        return bool((self.written[run.layer, run.blocks] == run.generations).any())

    def record(self, runs: list[BlockRun]) -> None:
        """Writes of one layer succeeded."""
        if len(runs) == 1:  # a third of the cost
            run = runs[0]
            place = run.layer, run.blocks
            self.checksums[place] = run.crcs
            self.seeds[place] = run.seeds
            self.lengths[place] = run.lengths
            self.codes_versions[place] = run.codes_version
            self.corrupt[place] = False
            self.written[place] = run.generations
            return
        where = runs[0].layer, indices_of(runs)
        self.checksums[where] = [crc for run in runs for crc in run.crcs]
        self.seeds[where] = [seed for run in runs for seed in run.seeds]
        self.lengths[where] = np.concatenate([run.lengths for run in runs])
        versions = [run.codes_version for run in runs]
        self.codes_versions[where] = np.repeat(versions, [run.count for run in runs])
        self.corrupt[where] = False
        self.written[where] = np.concatenate([run.generations for run in runs])

    def forget(self, run: BlockRun) -> None:
        """A write failed: old bytes, new ones or both are there."""
        self.written[run.layer, run.blocks] = 0
